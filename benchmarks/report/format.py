"""Numbers in tables: about three digits, an empty cell for a missing measurement, a mark for an unreliable one."""

from dataclasses import replace

from ..measure import noise
from ..measure.noise import MARK
from .rows import ReportTable, Row

MARK_NOTE = f"{MARK}: not to be relied on, for the reasons listed at the end; no headline is made from it."
SPREAD_NOTE = (
    "spread: from the first to the third quartile of repeated times, as a share of their median; of both passes the larger."
)


def mark_doubtful(text: str, doubtful: bool) -> str:
    return f"{text} {MARK}" if text and doubtful else text


def add_notes(table: ReportTable) -> ReportTable:
    """The table with the meaning of its marks and spreads, if it has any."""
    table = table.drop_if_empty("spread") if "spread" in table.columns else table
    marks = any(cell.endswith(f" {MARK}") for row in table.rows for cell in row)
    return replace(table, notes=[*table.notes, *[SPREAD_NOTE] * ("spread" in table.columns), *[MARK_NOTE] * marks])


def spread_text(row: Row | dict | None) -> str:
    """How far the times of a row or a result spread."""
    share = row and noise.spread(row.result if isinstance(row, Row) else row)
    return "" if share is None else f"{share:.0%}"


def shares(row: Row) -> list[str]:
    return [percent(row.result["density"]), percent(row.result["block_density"])]


def times(row: Row) -> list[str]:
    return [mark_doubtful(number(row.result.get(name)), row.doubtful) for name in ("forward_ms", "backward_ms")]


def memory(row: Row) -> str:
    return size(row.result["extra_bytes"]) if "extra_bytes" in row.result else ""


def correct_text(row: Row) -> str:
    return "yes" if row.result.get("correct") else "NO"


def number(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def ratio(value: float | None) -> str:
    return f"{value:.1f}" if value and value >= 10 else f"{value:.2f}" if value else ""


def percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.1 else f"{share:.2%}"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
