"""Tables of our speed beside that of the peers, with ratios to the best peer of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .cases import OURS
from .rows import Row, Table, rows
from .written import number

Passes = tuple[float | None, float | None]  # forward, and backward or both; None where there is no number
_RATIO = "x: how many times as fast as the fastest other in the same run, each pass for itself"


def tables(data: dict) -> list[Table]:
    made = [_peers(data), _deterministic(data), *_small(data)]
    return [table for table in made if table]


def ratios_to_best(data: dict) -> list[float]:
    """Of all rows of the peers suite: our speed over that of the fastest other, forward and backward."""
    found = _problems(rows(data, "peers", every=True))
    main = _ours(found)[:1]
    pairs = [_ratios(row.get(peer), _rivals(row.values()), _tflops) for row in found.values() for peer in main]
    return [ratio for pair in pairs for ratio in pair if ratio]


def _peers(data: dict) -> Table | None:
    found = _problems(rows(data, "peers", every=True))
    if not found:
        return None
    ours, others = _ours(found), _others(found)
    main = ours[0] if ours else OURS
    portable = f"{OURS}:triton" if f"{OURS}:triton" in ours else main
    lines = []
    for (shape, label, _), row in found.items():
        mine = row.get(main)
        flex = [row["flex"]] if "flex" in row else []
        lines.append(
            [
                shape,
                label,
                mine.result.get("backend", "") if mine else "",
                *(_cell(row.get(peer), _tflops) for peer in (*ours, *others)),
                _pair(_ratios(mine, _rivals(row.values()), _tflops)),
                _pair(_ratios(row.get(portable), flex, _tflops)),
                _all_right(row),
            ]
        )
    columns = ["shape", "mask", "by", *ours, *others, "x best peer", f"{portable.removeprefix(OURS + ':')} x flex", "correct"]
    note = (
        "TFLOP/s forward / backward, over kept pairs only: 4 x pairs x head_dim x heads x batch, backward 2.5 times that. "
        f"{_RATIO}. by: the back end that {main} takes."
    )
    return Table("Beside the peers", columns, lines, [note])


def _deterministic(data: dict) -> Table | None:
    found = _problems(rows(data, "deterministic", every=True))
    if not found:
        return None
    ours, others = _ours(found), _others(found)
    main = next((peer for peer in ours if _repeats(peer)), None)
    free = next((peer for peer in ours if not _repeats(peer)), None)
    lines = []
    for (shape, label, _), row in found.items():
        mine = row.get(main)
        lines.append(
            [
                shape,
                label,
                *(_cell(row.get(peer), _tflops) for peer in (*ours, *others)),
                _pair(_ratios(mine, [r for r in _rivals(row.values()) if _repeats(r.peer)], _tflops)),
                _pair(_ratios(mine, [row[free]] if free in row else [], _tflops)),
                _all_right(row),
            ]
        )
    columns = ["shape", "mask", *ours, *others, "x best deterministic", f"x {free or OURS}", "correct"]
    note = f"TFLOP/s forward / backward. {_RATIO}. Correct: also, that gradients of one problem repeat bit by bit."
    return Table("Deterministic backward pass", columns, lines, [note])


def _small(data: dict) -> list[Table]:
    found = _problems(rows(data, "small", every=True))
    if not found:
        return []
    ours, others = _ours(found), _others(found)
    main = ours[0] if ours else OURS
    made = []
    for title, value in (("Time of one call", _call_us), ("Host time of one call", _host_us)):
        lines = [
            [
                shape,
                label,
                how,
                *(_cell(row.get(peer), value) for peer in (*ours, *others)),
                _pair(_ratios(row.get(main), _rivals(row.values()), lambda r, value=value: _speeds(value(r)))),
                _all_right(row),
            ]
            for (shape, label, how), row in found.items()
        ]
        columns = ["shape", "mask", "as", *ours, *others, "x best peer", "correct"]
        made.append((f"{title}, us, short problems", columns, lines))
    common = f"Forward without gradients / forward and backward. {_RATIO}."
    notes = (
        f"{common} Calls back to back, until the device is done with them, over their number.",
        f"{common} Until the call returns, with nothing waiting for the device.",
    )
    return [Table(*table, [note]) for table, note in zip(made, notes, strict=True)]


def _problems(found: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    """{problem: {peer: row}}"""
    problems: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in found:
        problems.setdefault(row.problem, {})[row.peer] = row
    return problems


def _ours(problems: dict) -> list[str]:
    return list(dict.fromkeys(row.peer for peers in problems.values() for row in peers.values() if row.ours))


def _others(problems: dict) -> list[str]:
    names = {row.peer for peers in problems.values() for row in peers.values() if not row.ours}
    return sorted(names, key=lambda peer: (not peer.startswith("flex"), peer))


def _rivals(found: Iterable[Row]) -> list[Row]:
    return [row for row in found if not row.ours]


def _repeats(peer: str) -> bool:
    return peer.partition(":")[0].endswith("-deterministic")


def _tflops(row: Row) -> Passes:
    return row.result["forward_tflops"], row.result.get("backward_tflops")


def _call_us(row: Row) -> Passes:
    return row.result["forward_us"], row.result["both_us"]


def _host_us(row: Row) -> Passes:
    return row.result["forward_host_us"], row.result["both_host_us"]


def _speeds(times: Passes) -> Passes:
    forward, both = times
    return 1 / forward, 1 / both


def _ratios(mine: Row | None, others: list[Row], speed: Callable[[Row], Passes]) -> Passes:
    """Our speed over the best of the others'. Only right results count."""
    if mine is None or not mine.counts:
        return None, None
    pair = []
    for number_of_pass, own in enumerate(speed(mine)):
        best = max((speed(row)[number_of_pass] or 0 for row in others if row.counts), default=0)
        pair.append(own / best if own and best else None)
    return tuple(pair)


def _pair(ratios: Passes) -> str:
    return " / ".join(f"{ratio:.2f}" if ratio else "-" for ratio in ratios) if any(ratios) else ""


def _cell(row: Row | None, value: Callable[[Row], Passes]) -> str:
    if row is None:
        return ""
    if not row.counts:
        return "wrong" if row.finished else "-"
    return " / ".join(number(figure) or "-" for figure in value(row))


def _all_right(row: dict[str, Row]) -> str:
    """Whether each of our results is right; empty where there is none."""
    ours = [r for r in row.values() if r.ours and r.finished]
    return ("yes" if all(r.counts for r in ours) else "NO") if ours else ""
