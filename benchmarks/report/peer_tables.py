"""Tables of our speed and the peers', with ratios to the best peer of the same run."""

from __future__ import annotations

from collections.abc import Callable

from ..workload.cases import OURS
from .format import add_notes, mark_doubtful, number, spread_text
from .rows import ReportTable, Row, retimed_rivals, rows

Problem = dict[str, Row]  # the rows that may be compared, by peer
Figures = Callable[[Row], tuple[float | None, float | None]]  # forward, and backward or both; None if there is no number
Ratios = dict[str, tuple[str, Callable[[Problem], list[Row]]]]  # column: a peer of ours, and the rows that it is compared with
_RATIO = (
    "x: how many times as fast as the fastest other in the same run, each pass for itself, as timed again before and after ours."
)


def tables(data: dict) -> list[ReportTable]:
    return [table for table in (_peers(data), _deterministic(data), *_small(data)) if table.rows]


def ratios_to_best(data: dict) -> list[float]:
    """Our speed over that of the fastest peer, forward and backward, for all reliable rows of the peers suite."""
    problems = _group_by_problem(data, "peers")
    pairs = [_ratios(problem.get(peer), _rivals(problem), _ms) for problem in problems for peer in _ours(problems)[:1]]
    return [ratio for *pair, doubtful in pairs if not doubtful for ratio in pair if ratio]


def _peers(data: dict) -> ReportTable:
    problems = _group_by_problem(data, "peers")
    main, portable = next(iter(_ours(problems)), OURS), f"{OURS}:triton"
    portable = portable if portable in _ours(problems) else main
    facts = {"by": lambda problem: problem[main].result.get("backend", "") if main in problem else ""}
    ratios: Ratios = {
        "x best peer": (main, _rivals),
        f"{portable.removeprefix(OURS + ':')} x flex": (portable, lambda problem: _named(problem, "flex")),
    }
    unit = "TFLOP/s forward / backward, over kept pairs only: two products of head_dim a pair forward, five backward"
    note = f"{'ms forward / backward' if _on_cpu(data) else unit}. by: the back end that {main} takes."
    figures = _ms if _on_cpu(data) else _tflops
    return _build_table("Beside the peers", problems, figures, _ms, main, facts, ratios, note)


def _deterministic(data: dict) -> ReportTable:
    problems = _group_by_problem(data, "deterministic")
    main = next(filter(_is_deterministic, _ours(problems)), "")
    free = next((peer for peer in _ours(problems) if not _is_deterministic(peer)), OURS)
    ratios: Ratios = {
        "x best deterministic": (main, lambda problem: [row for row in _rivals(problem) if _is_deterministic(row.peer)]),
        f"x {free}": (main, lambda problem: _named(problem, free)),
    }
    unit, figures = ("ms", _ms) if _on_cpu(data) else ("TFLOP/s", _tflops)
    note = f"{unit} forward / backward. Correct: also, that gradients of one problem repeat bit for bit."
    return _build_table("Deterministic backward pass", problems, figures, _ms, main, {}, ratios, note)


def _small(data: dict) -> list[ReportTable]:
    problems = _group_by_problem(data, "small")
    main = next(iter(_ours(problems)), OURS)
    unit, factor = ("ms", 1e-3) if _on_cpu(data) else ("us", 1.0)
    facts = {"as": lambda problem: next(iter(problem.values())).variant}
    ratios: Ratios = {"x best peer": (main, _rivals)}
    passes = "Forward without gradients / forward and backward,"
    kinds: tuple[tuple[str, Figures, str], ...] = (
        ("Time", _call_us, f"{passes} of calls back to back, until the device is done, over their number."),
        ("Host time", _host_us, f"{passes} until the call returns, with nothing waiting for the device."),
    )
    return [
        _build_table(f"{name} of one call, {unit}, short problems", problems, figures, figures, main, facts, ratios, note, factor)
        for name, figures, note in kinds
    ]


def _build_table(
    title: str, problems: list[Problem], figures: Figures, times: Figures, main: str,
    facts: dict[str, Callable[[Problem], str]], ratios: Ratios, note: str, factor: float = 1.0,
) -> ReportTable:  # fmt: skip
    """A line for each problem: facts, each peer's figures times ``factor``, the spread of ``main``, and ratios of times."""
    peers = [*_ours(problems), *_others(problems)]
    lines = []
    for problem in problems:
        row = next(iter(problem.values()))
        cells = [row.shape, row.label, *(fact(problem) for fact in facts.values())]
        cells += [_cell(problem.get(peer), figures, factor) for peer in peers]
        cells += [spread_text(problem.get(main))]
        cells += [_format_ratios(_ratios(problem.get(peer), rivals(problem), times)) for peer, rivals in ratios.values()]
        lines.append([*cells, _correct_text(problem)])
    columns = ["shape", "mask", *facts, *peers, "spread", *ratios, "correct"]
    return add_notes(ReportTable(title, columns, lines, [note, _RATIO]))


def _group_by_problem(data: dict, suite: str) -> list[Problem]:
    problems: dict[tuple[str, str, str], Problem] = {}
    for row in rows(data, suite, every=True):
        problems.setdefault(row.problem, {})[row.peer] = row
    return list(problems.values())


def _ours(problems: list[Problem]) -> list[str]:
    return list(dict.fromkeys(row.peer for problem in problems for row in problem.values() if row.is_ours))


def _others(problems: list[Problem]) -> list[str]:
    names = {row.peer for problem in problems for row in _rivals(problem)}
    return sorted(names, key=lambda peer: (not peer.startswith("flex"), peer))


def _rivals(problem: Problem) -> list[Row]:
    return [row for row in problem.values() if not row.is_ours]


def _named(problem: Problem, peer: str) -> list[Row]:
    return [problem[peer]] if peer in problem else []


def _is_deterministic(peer: str) -> bool:
    return peer.partition(":")[0].endswith("-deterministic")


def _tflops(row: Row) -> tuple[float | None, float | None]:
    return row.result["forward_tflops"], row.result.get("backward_tflops")


def _call_us(row: Row) -> tuple[float | None, float | None]:
    return row.result["forward_us"], row.result["both_us"]


def _host_us(row: Row) -> tuple[float | None, float | None]:
    return row.result["forward_host_us"], row.result["both_host_us"]


def _ms(row: Row) -> tuple[float | None, float | None]:
    return row.result["forward_ms"], row.result.get("backward_ms")


def _on_cpu(data: dict) -> bool:
    return data["settings"]["device"] == "cpu"


def _ratios(mine: Row | None, others: list[Row], times: Figures) -> tuple[float | None, float | None, bool]:
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


def _cell(row: Row | None, figures: Figures, factor: float) -> str:
    if row is None:
        return ""
    if not row.counts:
        return "wrong" if row.has_numbers else "-"
    return mark_doubtful(" / ".join(number(figure and factor * figure) or "-" for figure in figures(row)), row.doubtful)


def _correct_text(problem: Problem) -> str:
    """Whether each of our results is right; empty if there is none."""
    ours = [row for row in problem.values() if row.is_ours and row.has_numbers]
    return ("yes" if all(row.counts for row in ours) else "NO") if ours else ""
