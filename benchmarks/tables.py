"""Tables made from the JSON alone; the terminal and the report print the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from . import beside, paper, written
from .results import finished, why_not
from .rows import Row, Table, rows

_WAITING_NAMED = 8  # of the cases that have not been run; a suite may have hundreds


def dense_rival(data: dict) -> tuple[Row | None, Row | None]:
    """The fastest dense attention that is not ours at the speedup suite's shape: (forward, forward and backward)."""
    rivals = [row for row in rows(data, "speedup") if row.label == "full" and not row.ours and row.counts]
    forward = min(rivals, key=lambda row: row.result["forward_ms"], default=None)
    total = min((row for row in rivals if row.total_ms), key=lambda row: row.total_ms, default=None)
    return forward, total


@dataclass(frozen=True)
class Gain:
    """One mask's speed-up over the dense rival; ratios are None where one side has no number."""

    row: Row
    forward: float | None
    total: float | None


def gains(data: dict) -> list[Gain]:
    """Our masks of the speedup suite, densest first."""
    forward, total = dense_rival(data)
    found = [
        Gain(
            row,
            forward and forward.result["forward_ms"] / row.result["forward_ms"],
            total and row.total_ms and total.total_ms / row.total_ms,
        )
        for row in rows(data, "speedup")
        if row.ours
    ]
    return sorted(found, key=lambda gain: -gain.row.result["density"])


def tables(data: dict) -> list[Table]:
    """The tables of the suites that were measured, and one of what gave no numbers."""
    made = [_speedup(data), *_length(data), *beside.tables(data), *paper.tables(data), _compile(data), _left_out(data)]
    return [table for table in made if table and table.rows]


def _speedup(data: dict) -> Table | None:
    forward, total = dense_rival(data)
    lines = []
    for row in rows(data, "speedup"):
        if not row.ours:
            line = [row.label, row.peer, *written.shares(row), *written.times(row)]
            lines.append([*line, "", "", "", written.memory(row), written.right(row)])
    for gain in gains(data):
        row = gain.row
        ideal = 1 / row.result["block_density"] if row.result["block_density"] else None
        lines.append(
            [
                row.label,
                row.peer,
                *written.shares(row),
                *written.times(row),
                written.ratio(gain.forward),
                written.ratio(gain.total),
                written.ratio(ideal),
                written.memory(row),
                written.right(row),
            ]
        )
    if not lines:
        return None
    names = " and ".join(dict.fromkeys(r.peer for r in (forward, total) if r))
    columns = [
        "mask",
        "by",
        "kept",
        "visited",
        "forward ms",
        "backward ms",
        "x forward",
        "x both",
        "x at best",
        "memory",
        "correct",
    ]
    note = (
        f"x: how many times as fast as dense attention of all pairs ({names}, the fastest in this run); at best: all blocks / "
        "visited blocks."
    )
    return Table(f"Speed-up against density ({next(iter(rows(data, 'speedup'))).shape})", columns, lines, [note])


def _length(data: dict) -> list[Table]:
    found = rows(data, "length")
    if not found:
        return []
    lengths = sorted({row.tokens for row in found})
    series = list(dict.fromkeys(row.name for row in found))
    at = {(row.name, row.tokens): row for row in found}
    times, memory = [], []
    for name in series:
        line = [at.get((name, n)) for n in lengths]
        times.append(
            [
                name,
                *(written.number(row and (row.total_ms or row.result["forward_ms"])) for row in line),
                _growth(line, lambda r: r.total_ms),
            ]
        )
        bytes_grow = _growth(line, lambda r: r.result.get("extra_bytes"))
        memory.append([name, *(written.memory(row) if row else "" for row in line), bytes_grow])
    columns = ["mask, by", *(f"{n:,}" for n in lengths), "grows as"]
    grows = "grows as: N to this power, between the two longest lengths."
    shape = found[0].shape.replace(f"N{found[0].tokens} ", "")
    no_backward = any(row.total_ms is None for row in found)
    notes = [grows] + (["FlexAttention has no backward pass on a CPU: its times are of the forward pass."] if no_backward else [])
    return [
        Table(f"Forward and backward, ms, against tokens ({shape})", columns, times, notes),
        Table(f"Memory beyond the inputs against tokens ({shape})", columns, memory, [grows]),
    ]


def _growth(line: list[Row | None], value) -> str:
    points = [(row.tokens, value(row)) for row in line if row and value(row)]
    if len(points) < 2:
        return ""
    (a, x), (b, y) = points[-2:]
    return f"N^{log2(y / x) / log2(b / a):.2f}"


def _compile(data: dict) -> Table | None:
    lines = []
    for key in data["suites"].get("compile", []):
        entry = data["cases"].get(key)
        if entry and finished(entry["result"]):
            case, r = entry["case"], entry["result"]
            sizes = (written.size(r["table_bytes"]), written.size(r["peak_bytes"]))
            lines.append(
                [
                    case["label"],
                    f"{case['tokens']:,}",
                    f"{r['kept_blocks']:,}",
                    written.percent(r["density"]),
                    f"{r['compile_s']:.3f}",
                    *sizes,
                ]
            )
    return (
        Table("Compiling masks", ["mask", "tokens", "blocks", "kept", "seconds", "table", "peak memory"], lines) if lines else None
    )


def _left_out(data: dict) -> Table:
    entries = {key: data["cases"].get(key) for keys in data["suites"].values() for key in keys}
    lines = [[key, why_not(entry["result"])] for key, entry in entries.items() if entry and not finished(entry["result"])]
    waiting = [key for key, entry in entries.items() if not entry]
    lines += [[key, "not run yet"] for key in waiting[:_WAITING_NAMED]]
    if len(waiting) > _WAITING_NAMED:
        lines.append([f"{len(waiting) - _WAITING_NAMED} more", "not run yet"])
    return Table("Without a result", ["case", "why"], lines)
