"""Tables of our speed and the peers', with ratios to the best peer of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..workload.cases import OURS
from .format import add_notes, mark_doubtful, number, spread_text
from .rows import ReportTable, Row, retimed_rivals, rows

Passes = tuple[float | None, float | None]  # forward, and backward or both; None if there is no number
_RATIO = (
    "x: how many times as fast as the fastest other in the same run, each pass for itself, as timed again before and after ours."
)


def tables(data: dict) -> list[ReportTable]:
    made = [_peers(data), _deterministic(data), *_small(data)]
    return [table for table in made if table]


def ratios_to_best(data: dict) -> list[float]:
    """Our speed over that of the fastest peer, forward and backward, for all reliable rows of the peers suite."""
    found = _group_by_problem(rows(data, "peers", every=True))
    main = _ours(found)[:1]
    pairs = [_ratios(row.get(peer), _rivals(row.values()), _ms) for row in found.values() for peer in main]
    return [ratio for *pair, doubtful in pairs if not doubtful for ratio in pair if ratio]


def _peers(data: dict) -> ReportTable | None:
    found, figures = _group_by_problem(rows(data, "peers", every=True)), _ms if _on_cpu(data) else _tflops
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
                *(_cell(row.get(peer), figures) for peer in (*ours, *others)),
                spread_text(mine),
                _format_ratios(_ratios(mine, _rivals(row.values()), _ms)),
                _format_ratios(_ratios(row.get(portable), flex, _ms)),
                _correct_text(row),
            ]
        )
    columns = [
        "shape",
        "mask",
        "by",
        *ours,
        *others,
        "spread",
        "x best peer",
        f"{portable.removeprefix(OURS + ':')} x flex",
        "correct",
    ]
    unit = "TFLOP/s forward / backward, over kept pairs only: two products of head_dim a pair forward, five backward"
    notes = [f"{'ms forward / backward' if _on_cpu(data) else unit}. by: the back end that {main} takes.", _RATIO]
    return add_notes(ReportTable("Beside the peers", columns, lines, notes))


def _deterministic(data: dict) -> ReportTable | None:
    found, figures = _group_by_problem(rows(data, "deterministic", every=True)), _ms if _on_cpu(data) else _tflops
    if not found:
        return None
    ours, others = _ours(found), _others(found)
    main = next((peer for peer in ours if _is_deterministic(peer)), None)
    free = next((peer for peer in ours if not _is_deterministic(peer)), None)
    lines = []
    for (shape, label, _), row in found.items():
        mine = row.get(main) if main else None
        lines.append(
            [
                shape,
                label,
                *(_cell(row.get(peer), figures) for peer in (*ours, *others)),
                spread_text(mine),
                _format_ratios(_ratios(mine, [r for r in _rivals(row.values()) if _is_deterministic(r.peer)], _ms)),
                _format_ratios(_ratios(mine, [row[free]] if free in row else [], _ms)),
                _correct_text(row),
            ]
        )
    columns = ["shape", "mask", *ours, *others, "spread", "x best deterministic", f"x {free or OURS}", "correct"]
    unit = "ms" if _on_cpu(data) else "TFLOP/s"
    notes = [f"{unit} forward / backward. Correct: also, that gradients of one problem repeat bit for bit.", _RATIO]
    return add_notes(ReportTable("Deterministic backward pass", columns, lines, notes))


def _small(data: dict) -> list[ReportTable]:
    found = _group_by_problem(rows(data, "small", every=True))
    if not found:
        return []
    ours, others = _ours(found), _others(found)
    main = ours[0] if ours else OURS
    unit, factor = ("ms", 1e-3) if _on_cpu(data) else ("us", 1.0)
    made = []
    for title, value in (("Time of one call", _call_us), ("Host time of one call", _host_us)):
        lines = [
            [
                shape,
                label,
                how,
                *(_cell(row.get(peer), value, factor) for peer in (*ours, *others)),
                spread_text(row.get(main)),
                _format_ratios(_ratios(row.get(main), _rivals(row.values()), value)),
                _correct_text(row),
            ]
            for (shape, label, how), row in found.items()
        ]
        columns = ["shape", "mask", "as", *ours, *others, "spread", "x best peer", "correct"]
        made.append((f"{title}, {unit}, short problems", columns, lines))
    notes = (
        "Forward without gradients / forward and backward, of calls back to back, until the device is done, over their number.",
        "Forward without gradients / forward and backward, until the call returns, with nothing waiting for the device.",
    )
    return [add_notes(ReportTable(*table, [note, _RATIO])) for table, note in zip(made, notes, strict=True)]


def _group_by_problem(found: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    """{problem: {peer: row}}"""
    problems: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in found:
        problems.setdefault(row.problem, {})[row.peer] = row
    return problems


def _ours(problems: dict) -> list[str]:
    return list(dict.fromkeys(row.peer for peers in problems.values() for row in peers.values() if row.is_ours))


def _others(problems: dict) -> list[str]:
    names = {row.peer for peers in problems.values() for row in peers.values() if not row.is_ours}
    return sorted(names, key=lambda peer: (not peer.startswith("flex"), peer))


def _rivals(found: Iterable[Row]) -> list[Row]:
    return [row for row in found if not row.is_ours]


def _is_deterministic(peer: str) -> bool:
    return peer.partition(":")[0].endswith("-deterministic")


def _tflops(row: Row) -> Passes:
    return row.result["forward_tflops"], row.result.get("backward_tflops")


def _call_us(row: Row) -> Passes:
    return row.result["forward_us"], row.result["both_us"]


def _host_us(row: Row) -> Passes:
    return row.result["forward_host_us"], row.result["both_host_us"]


def _ms(row: Row) -> Passes:
    return row.result["forward_ms"], row.result.get("backward_ms")


def _on_cpu(data: dict) -> bool:
    return data["settings"]["device"] == "cpu"


def _ratios(mine: Row | None, others: list[Row], times: Callable[[Row], Passes]) -> tuple[float | None, float | None, bool]:
    """(forward, backward or both, doubtful): the best of the others' times over ours. Only right results count."""
    if mine is None or not mine.counts:
        return None, None, False
    pair, doubtful = [], mine.doubtful
    rivals = retimed_rivals(mine, [row for row in others if row.counts])
    for number_of_pass, own in enumerate(times(mine)):
        timed = [(time, row) for row in rivals if (time := times(row)[number_of_pass])]
        best = min(timed, key=lambda one: one[0], default=None)
        pair.append(best[0] / own if own and best else None)
        doubtful |= best is not None and best[1].doubtful
    forward, other = pair
    return forward, other, doubtful


def _format_ratios(ratios: tuple[float | None, float | None, bool]) -> str:
    *pair, doubtful = ratios
    return mark_doubtful(" / ".join(f"{ratio:.2f}" if ratio else "-" for ratio in pair), doubtful) if any(pair) else ""


def _cell(row: Row | None, value: Callable[[Row], Passes], factor: float = 1.0) -> str:
    if row is None:
        return ""
    if not row.counts:
        return "wrong" if row.has_numbers else "-"
    return mark_doubtful(" / ".join(number(figure and factor * figure) or "-" for figure in value(row)), row.doubtful)


def _correct_text(row: dict[str, Row]) -> str:
    """Whether each of our results is right; empty if there is none."""
    ours = [r for r in row.values() if r.is_ours and r.has_numbers]
    return ("yes" if all(r.counts for r in ours) else "NO") if ours else ""
