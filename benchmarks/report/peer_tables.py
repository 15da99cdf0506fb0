"""Tables of our speed and the peers', with ratios to the best peer of the same run."""

from .format import add_notes, mark_doubtful, number, spread_text
from .rows import ReportTable, Row, retimed_rivals, rows

Problem = dict[str, Row]  # the rows that may be compared, by peer
_MS, _TFLOPS = ("forward_ms", "backward_ms"), ("forward_tflops", "backward_tflops")
_RATIO = (
    "x: how many times as fast as the fastest other in the same run, each pass for itself, as timed again before and after ours."
)


def tables(data: dict) -> list[ReportTable]:
    """A table with a line for each problem: the back end that we take, each peer's figures, the spread and the ratios of ours."""
    problems, figures = _group_by_problem(data, "peers"), _MS if data["settings"]["device"] == "cpu" else _TFLOPS
    unit = "TFLOP/s forward / backward, over kept pairs only: two products of head_dim a pair forward, five backward"
    unit = "ms forward / backward" if figures == _MS else unit
    note = f"{unit}. by: the back end that we take. Gradients of -deterministic repeat."
    ours = _ours(problems)
    peers = [*ours, *sorted({row.peer for problem in problems for row in problem.values() if not row.is_ours}, key=_place)]
    lines = []
    for problem in problems:
        row, main = next(iter(problem.values())), problem.get(ours[0]) if ours else None
        ratios = _ratios(problem, ours[0]) if main else (None, None, False)
        cells = [row.shape, row.label, main.result.get("backend", "") if main else ""]
        cells += [_cell(problem.get(peer), figures) for peer in peers]
        lines.append([*cells, spread_text(main), _format_ratios(*ratios), _correct_text(problem)])
    columns = ["shape", "mask", "by", *peers, "spread", "x best peer", "correct"]
    return [add_notes(ReportTable("Beside the peers", columns, lines, [note, _RATIO]))] if lines else []


def ratios_to_best(data: dict) -> list[float]:
    """Our speed over that of the fastest peer, forward and backward, for all reliable rows of the peers suite."""
    problems = _group_by_problem(data, "peers")
    pairs = [_ratios(problem, peer) for problem in problems for peer in _ours(problems)[:1]]
    return [ratio for *pair, doubtful in pairs if not doubtful for ratio in pair if ratio]


def _group_by_problem(data: dict, suite: str) -> list[Problem]:
    problems: dict[tuple[str, str, str], Problem] = {}
    for row in rows(data, suite, every=True):
        problems.setdefault(row.problem, {})[row.peer] = row
    return list(problems.values())


def _ours(problems: list[Problem]) -> list[str]:
    return list(dict.fromkeys(row.peer for problem in problems for row in problem.values() if row.is_ours))


def _place(peer: str) -> tuple[bool, str]:
    return not peer.startswith("flex"), peer


def _ratios(problem: Problem, peer: str) -> tuple[float | None, float | None, bool]:
    """(forward, backward, doubtful): the best of the others' times over the peer's. Only right results count."""
    mine = problem.get(peer)
    if mine is None or not mine.counts:
        return None, None, False
    pair, doubtful = [], mine.doubtful
    rivals = retimed_rivals(mine, [row for row in problem.values() if not row.is_ours and row.counts])
    for name in _MS:
        best = min((row for row in rivals if name in row.result), key=lambda row: row.result[name], default=None)
        pair.append(best.result[name] / mine.result[name] if best and name in mine.result else None)
        doubtful |= best is not None and best.doubtful
    return pair[0], pair[1], doubtful


def _format_ratios(forward: float | None, other: float | None, doubtful: bool) -> str:
    texts = [f"{ratio:.2f}" if ratio else "-" for ratio in (forward, other)]
    return mark_doubtful(" / ".join(texts), doubtful) if forward or other else ""


def _cell(row: Row | None, figures: tuple[str, str]) -> str:
    if row is None:
        return ""
    if not row.counts:
        return "wrong" if row.has_numbers else "-"
    return mark_doubtful(" / ".join(number(row.result.get(name, 0.0)) or "-" for name in figures), row.doubtful)


def _correct_text(problem: Problem) -> str:
    """Whether each of our results is right; empty if there is none."""
    ours = [row for row in problem.values() if row.is_ours and row.has_numbers]
    return ("yes" if all(row.counts for row in ours) else "NO") if ours else ""
