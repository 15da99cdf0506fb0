"""Tables from only the JSON; the terminal and the report print the same ones."""

from dataclasses import dataclass

from ..measure.noise import doubts
from ..results import has_numbers, why_not
from . import format, lengths, peer_tables
from .rows import ReportTable, Row, retimed_rivals, rows

_WAITING_NAMED = 8  # of the cases that have not been run; a suite may have hundreds


@dataclass(frozen=True)
class Gain:
    """One mask's speed-up over the fastest dense call in its place, as timed around it; ratios are None if one side has no number.
    dense: "causal" for a mask in which no query sees a later key, else "full". rivals: (peer forward, peer forward and backward).
    kept, visited: shares of the pairs and of the blocks of that dense call. between: the least and the largest total that
    the spread of the row's times and those of its rival before and after it allow."""

    row: Row
    forward: float | None
    total: float | None
    dense: str
    rivals: tuple[str | None, str | None]
    kept: float
    visited: float
    doubtful: bool
    between: tuple[float, float] | None

    @property
    def over(self) -> str:
        """Says which call the ratios compare with."""
        return f"{self.dense}, {' / '.join(dict.fromkeys(peer for peer in self.rivals if peer))}"


def gains(data: dict) -> list[Gain]:
    """Our masks of the speedup suite, densest first. A result that does not say whether its mask is causal has no ratio."""
    found = rows(data, "speedup")
    dense = [row for row in found if row.label in ("full", "causal") and not row.is_ours and row.counts]
    compared = []
    for row in (row for row in found if row.is_ours):
        name = {True: "causal", False: "full", None: ""}[row.result.get("causal")]
        compared.append(_gain(row, name, retimed_rivals(row, [rival for rival in dense if rival.label == name])))
    return sorted(compared, key=lambda gain: -gain.kept)


def _gain(row: Row, name: str, dense: list[Row]) -> Gain:
    kept, visited = (row.result[share] / (dense[0].result[share] if dense else 1.0) for share in ("density", "block_density"))
    forward = min(dense, key=lambda rival: rival.result["forward_ms"], default=None)
    totals = [(rival.total_ms, rival) for rival in dense if rival.total_ms]
    total_ms, total = min(totals, key=lambda one: one[0], default=(None, None))
    return Gain(
        row,
        forward.result["forward_ms"] / row.result["forward_ms"] if forward else None,
        total_ms / row.total_ms if total_ms and row.total_ms else None,
        name,
        (forward.peer if forward else None, total.peer if total else None),
        kept,
        visited,
        row.doubtful or any(rival.doubtful for rival in (forward, total) if rival),
        _between(row, total) if total and row.total_ms else None,
    )


def _between(row: Row, rival: Row) -> tuple[float, float]:
    """See ``Gain``."""

    def ends(result: dict, again: dict) -> tuple[float, float]:
        pairs = [again.get(name) or result.get(f"{name}_spread") or [result[name]] for name in ("forward_ms", "backward_ms")]
        return sum(map(min, pairs)), sum(map(max, pairs))

    (low, high), (least, most) = ends(row.result, {}), ends(rival.result, row.result.get("around", {}).get(rival.key, {}))
    return least / high, most / low


def tables(data: dict) -> list[ReportTable]:
    """The tables of the suites that were measured, and one of the cases without numbers."""
    made = [
        _speedup(data),
        *lengths.tables(data),
        *peer_tables.tables(data),
        _compile(data),
        _doubtful(data),
        _left_out(data),
    ]
    return [table for table in made if table and table.rows]


def _speedup(data: dict) -> ReportTable | None:
    def line(row: Row, *compared: str) -> list[str]:
        figures = [*format.shares(row), *format.times(row), format.spread_text(row), format.memory(row), format.correct_text(row)]
        return [row.label, row.peer, *compared, *figures]

    lines = [line(row, "", "", "", "") for row in rows(data, "speedup") if not row.is_ours]
    for gain in gains(data):
        ratios = [format.mark_doubtful(format.ratio(ratio), gain.doubtful) for ratio in (gain.forward, gain.total)]
        at_best = format.ratio(1 / gain.visited if gain.visited else None)
        lines.append(line(gain.row, *ratios, at_best, gain.over if gain.forward else ""))
    if not lines:
        return None
    compared = ["x forward", "x both", "x at best", "over"]
    columns = ["mask", "by", *compared, "kept", "visited", "forward ms", "backward ms", "spread", "memory", "correct"]
    note = (
        "x: how many times as fast as the dense call that a user would otherwise run: causal attention where no query sees a later "
        "key, else attention of all pairs; by the fastest peer in this run (over), timed again before and after each row. At best: "
        "blocks of that call / visited blocks."
    )
    title = f"Speed-up against density ({next(iter(rows(data, 'speedup'))).shape})"
    return format.add_notes(ReportTable(title, columns, lines, [note]))


def _compile(data: dict) -> ReportTable | None:
    lines = []
    for key in data["suites"].get("compile", []):
        entry = data["cases"].get(key)
        if entry and has_numbers(entry["result"]):
            case, r = entry["case"], entry["result"]
            seconds = format.mark_doubtful(f"{r['compile_s']:.3f}", bool(doubts(r)))
            counts = [f"{case['tokens']:,}", f"{r['kept_blocks']:,}", format.percent(r["density"])]
            sizes = [format.size(r["table_bytes"]), format.size(r["peak_bytes"])]
            lines.append([case["label"], *counts, seconds, format.spread_text(r), *sizes])
    columns = ["mask", "tokens", "blocks", "kept", "seconds", "spread", "table", "peak memory"]
    return format.add_notes(ReportTable("Compiling masks", columns, lines)) if lines else None


def _doubtful(data: dict) -> ReportTable:
    lines = [[key, "; ".join(why)] for key, entry in _entries(data).items() if entry and (why := doubts(entry["result"]))]
    return ReportTable("Not to be relied on", ["case", "why"], lines)


def _entries(data: dict) -> dict[str, dict | None]:
    """{key: the stored entry of the case}, of all suites."""
    return {key: data["cases"].get(key) for keys in data["suites"].values() for key in keys}


def _left_out(data: dict) -> ReportTable:
    entries = _entries(data)
    lines = [[key, why_not(entry["result"])] for key, entry in entries.items() if entry and not has_numbers(entry["result"])]
    waiting = [key for key, entry in entries.items() if not entry]
    lines += [[key, "not run yet"] for key in waiting[:_WAITING_NAMED]]
    if len(waiting) > _WAITING_NAMED:
        lines.append([f"{len(waiting) - _WAITING_NAMED} more", "not run yet"])
    return ReportTable("Without a result", ["case", "why"], lines)
