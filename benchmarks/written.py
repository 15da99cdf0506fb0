"""How numbers are written in tables: to about three digits, an empty cell for what was not measured."""

from __future__ import annotations

from .rows import Row


def shares(row: Row) -> list[str]:
    return [percent(row.result["density"]), percent(row.result["block_density"])]


def times(row: Row) -> list[str]:
    return [number(row.result["forward_ms"]), number(row.result.get("backward_ms"))]


def memory(row: Row) -> str:
    return size(row.result["extra_bytes"]) if "extra_bytes" in row.result else ""


def right(row: Row) -> str:
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
