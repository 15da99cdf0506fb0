"""The tables of arXiv:2205.14135, App. E.6, from only the JSON: each pass, both and memory against length, by variant."""

from __future__ import annotations

from ..results import why_gave_up
from . import format
from .rows import ReportTable, Row, rows

_VALUES = (("Forward", "forward_ms"), ("Backward", "backward_ms"), ("Forward and backward", "both_ms"), ("Memory", "extra_bytes"))
_NOTES = (
    "Milliseconds; memory is what one forward and backward pass holds beyond its inputs. -: not supported, as listed under "
    '"Without a result".',
    "After arXiv:2205.14135, App. E.6. Padded: keys of each sequence up to a length from half of the tokens to all of them. The "
    "peers' dropout is checked for its mean and variance, and their results without it against float64.",
)


def tables(data: dict) -> list[ReportTable]:
    found = rows(data, "paper", every=True)
    made = []
    for variant in dict.fromkeys(row.variant for row in found):
        chosen = [row for row in found if row.variant == variant]
        lengths = sorted({row.tokens for row in chosen})
        at = {(row.name, row.tokens): row for row in chosen}
        shape = chosen[0].shape.replace(f"N{chosen[0].tokens} ", "")
        for title, value in _VALUES:
            lines = [[name, *(_cell(at.get((name, n)), value) for n in lengths)] for name in dict.fromkeys(name for name, _ in at)]
            unit = "" if value == "extra_bytes" else ", ms"
            columns = ["mask, by", *(f"{n:,}" for n in lengths)]
            made.append(ReportTable(f"{title}{unit}, against tokens, {variant} ({shape})", columns, lines))
    if made:
        made[-1].notes.extend(_NOTES)
    return list(map(format.add_notes, made))


def _cell(row: Row | None, value: str) -> str:
    if row is None:
        return ""
    if not row.counts:
        return "wrong" if row.has_numbers else why_gave_up(row.result) or "-"
    if value not in row.result:
        return ""
    return format.memory(row) if value == "extra_bytes" else format.mark_doubtful(format.number(row.result[value]), row.doubtful)
