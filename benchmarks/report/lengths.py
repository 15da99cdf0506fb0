"""Tables against length, from only the JSON: of the length suite, and of arXiv:2205.14135, App. E.6, by variant."""

from collections.abc import Callable
from math import log2

from ..results import why_gave_up
from . import format
from .rows import ReportTable, Row, rows

Value = Callable[[Row], float | None]
_MEMORY = "Memory beyond the inputs"
_GROWS = "grows as: N to this power, between the two longest lengths."
_PAPER_NOTES = (
    'Milliseconds of each pass, and of both. -: not supported, as listed under "Without a result".',
    "After arXiv:2205.14135, App. E.6. Padded: keys of each sequence up to a length from half of the tokens to all of them. "
    "Results are compared with float64 without dropout, which every peer draws in its own way.",
)


def tables(data: dict) -> list[ReportTable]:
    memory: dict[str, Value] = {_MEMORY: lambda row: row.result.get("extra_bytes")}
    made = _build(rows(data, "length"), "", {"Forward and backward, ms": lambda row: row.total_ms} | memory)
    of_paper = rows(data, "paper", every=True)
    values: dict[str, Value] = {
        "Forward, ms": lambda row: row.result.get("forward_ms"),
        "Backward, ms": lambda row: row.result.get("backward_ms"),
        "Forward and backward, ms": lambda row: row.result.get("both_ms"),
    }
    for variant in dict.fromkeys(row.variant for row in of_paper):
        made += _build([row for row in of_paper if row.variant == variant], f", {variant}", values | memory)
    if of_paper:
        made[-1].notes.extend(_PAPER_NOTES)
    return [format.add_notes(table) for table in made]


def _build(found: list[Row], variant: str, values: dict[str, Value]) -> list[ReportTable]:
    """A table for each value: a line for each mask and peer, a column for each length."""
    if not found:
        return []
    lengths, at = sorted({row.tokens for row in found}), {(row.name, row.tokens): row for row in found}
    shape, made = found[0].shape.replace(f"N{found[0].tokens} ", ""), []
    for title, value in values.items():
        lines = []
        for name in dict.fromkeys(row.name for row in found):
            line = [at.get((name, n)) for n in lengths]
            lines.append([name, *(_cell(row, value, title == _MEMORY) for row in line), _growth(line, value)])
        columns = ["mask, by", *(f"{n:,}" for n in lengths), "grows as"]
        made.append(ReportTable(f"{title}, against tokens{variant} ({shape})", columns, lines, [_GROWS]))
    return made


def _cell(row: Row | None, value: Value, is_memory: bool) -> str:
    if row is None:
        return ""
    if not row.counts:
        return "wrong" if row.has_numbers else why_gave_up(row.result) or "-"
    if is_memory:
        return format.memory(row)
    return format.mark_doubtful(format.number(value(row)), row.doubtful)


def _growth(line: list[Row | None], value: Value) -> str:
    points = [(row, found) for row in line if row and row.counts and (found := value(row))][-2:]
    if len(points) < 2:
        return ""
    (a, x), (b, y) = points
    return format.mark_doubtful(f"N^{log2(y / x) / log2(b.tokens / a.tokens):.2f}", a.doubtful or b.doubtful)
