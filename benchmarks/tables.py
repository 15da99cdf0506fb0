"""Rows with ratios, made from the JSON alone; the terminal and the report print the same ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

from .cases import OURS
from .results import finished, why_not

TEXT_COLUMNS = ("mask", "by", "why")  # to the left; numbers to the right


@dataclass(frozen=True)
class Row:
    """One case as tables and plots see it."""

    shape: str
    tokens: int
    label: str
    peer: str
    result: dict

    @property
    def ours(self) -> bool:
        return self.peer.partition(":")[0] == OURS

    @property
    def total_ms(self) -> float | None:
        """Forward and backward together, or None where there is no backward pass."""
        return self.result["forward_ms"] + self.result["backward_ms"] if "backward_ms" in self.result else None

    @property
    def name(self) -> str:
        return f"{self.label}, {self.peer}"


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def rows(data: dict, suite: str, every: bool = False) -> list[Row]:
    """The suite's attention cases that have numbers, or with ``every`` all that were tried, in the order of the suite."""
    found = []
    for key in data["suites"].get(suite, []):
        entry = data["cases"].get(key)
        if entry and entry["case"]["kind"] == "attention" and (every or finished(entry["result"])):
            case = entry["case"]
            s = case["shape"]
            shape = f"B{s['batch']} H{s['heads']} N{s['tokens']} D{s['head_dim']}"
            found.append(Row(shape, s["tokens"], case["label"], case["peer"], entry["result"]))
    return found


def dense_rival(data: dict) -> tuple[Row | None, Row | None]:
    """The fastest dense attention that is not ours at the speedup suite's shape: (forward, forward and backward)."""
    rivals = [row for row in rows(data, "speedup") if row.label == "full" and not row.ours]
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
    made = [_speedup(data), *_length(data), _peers(data), _compile(data), _left_out(data)]
    return [table for table in made if table and table.rows]


def _speedup(data: dict) -> Table | None:
    forward, total = dense_rival(data)
    lines = []
    for row in rows(data, "speedup"):
        if not row.ours:
            lines.append([row.label, row.peer, *_shares(row), *_times(row), "", "", "", _memory(row), _right(row)])
    for gain in gains(data):
        row = gain.row
        ideal = 1 / row.result["block_density"] if row.result["block_density"] else None
        lines.append(
            [
                row.label,
                row.peer,
                *_shares(row),
                *_times(row),
                _ratio(gain.forward),
                _ratio(gain.total),
                _ratio(ideal),
                _memory(row),
                _right(row),
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
                *(_number(row and (row.total_ms or row.result["forward_ms"])) for row in line),
                _growth(line, lambda r: r.total_ms),
            ]
        )
        memory.append([name, *(_memory(row) if row else "" for row in line), _growth(line, lambda r: r.result.get("extra_bytes"))])
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


def _peers(data: dict) -> Table | None:
    found = rows(data, "peers", every=True)
    if not found:
        return None
    ours = next((row.peer for row in found if row.ours), OURS)
    others = sorted({row.peer for row in found if not row.ours}, key=lambda peer: (peer != "flex", peer))
    at = {(row.shape, row.label, row.peer): row for row in found}
    lines = []
    for shape, label in dict.fromkeys((row.shape, row.label) for row in found):
        mine, flex = at.get((shape, label, ours)), at.get((shape, label, "flex"))
        best = [at.get((shape, label, peer)) for peer in others]
        lines.append(
            [
                shape,
                label,
                _speeds(mine),
                *(_speeds(row) for row in best),
                _ratios(mine, [flex]),
                _ratios(mine, best),
                _right(mine) if mine and finished(mine.result) else "",
            ]
        )
    columns = ["shape", "mask", ours, *others, "/ flex", "/ best peer", "correct"]
    note = (
        "TFLOP/s forward / backward, over kept pairs only: 4 x pairs x head_dim x heads x batch, backward 2.5 times that; then "
        "ratios, in the same run."
    )
    return Table("Beside the peers", columns, lines, [note])


def _speeds(row: Row | None) -> str:
    if row is None:
        return ""
    if not finished(row.result):
        return "-"
    backward = row.result.get("backward_tflops")
    return f"{_number(row.result['forward_tflops'])} / {_number(backward) if backward else '-'}"


def _ratios(mine: Row | None, others: list[Row | None]) -> str:
    """Forward and backward ratio to the best of the others."""
    if mine is None or not finished(mine.result):
        return ""
    pair = []
    for key in ("forward_tflops", "backward_tflops"):
        best = max((row.result.get(key, 0) for row in others if row and finished(row.result)), default=0)
        pair.append(f"{mine.result[key] / best:.2f}" if best and key in mine.result else "-")
    return "" if pair == ["-", "-"] else " / ".join(pair)


def _compile(data: dict) -> Table | None:
    lines = []
    for key in data["suites"].get("compile", []):
        entry = data["cases"].get(key)
        if entry and finished(entry["result"]):
            case, r = entry["case"], entry["result"]
            sizes = (_bytes(r["table_bytes"]), _bytes(r["peak_bytes"]))
            lines.append(
                [
                    case["label"],
                    f"{case['tokens']:,}",
                    f"{r['kept_blocks']:,}",
                    _percent(r["density"]),
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
    lines += [[key, "not run yet"] for key, entry in entries.items() if not entry]
    return Table("Without a result", ["case", "why"], lines)


def _shares(row: Row) -> list[str]:
    return [_percent(row.result["density"]), _percent(row.result["block_density"])]


def _times(row: Row) -> list[str]:
    return [_number(row.result["forward_ms"]), _number(row.result.get("backward_ms"))]


def _memory(row: Row) -> str:
    return _bytes(row.result["extra_bytes"]) if "extra_bytes" in row.result else ""


def _right(row: Row) -> str:
    return "yes" if row.result.get("correct") else "NO"


def _number(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return f"{value:.1f}" if value and value >= 10 else f"{value:.2f}" if value else ""


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.1 else f"{share:.2%}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
