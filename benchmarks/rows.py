"""``sf.bench``: the speed of masks at a user's sizes, as values. Writes no files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparse_flash.masks.block_mask import BlockMask
from sparse_flash.masks.parsing import parse
from sparse_flash.masks.pattern import Pattern, PerHead

from .measure.noise import doubts
from .report.tables import gains
from .results import Results, has_numbers, why_not
from .run import Options, device_of, measure
from .workload import suites
from .workload.cases import CallSizes, Case


@dataclass(frozen=True)
class BenchRow:
    """One mask at the sizes asked for. Prints as a sentence.

    mask: its spec text. backend: the back end that ran it.
    forward_ms, backward_ms: medians; None without a result. memory: the most bytes that both passes hold beyond their inputs.
    kept: pairs kept / all pairs. over: the dense call that a user would run in the mask's place, and whose it is: causal attention
    if no query sees a later key, else attention of all pairs. dense_forward_ms, dense_backward_ms: of that call, timed before and
    after the mask. forward_speedup, speedup: their ratios, forward, and forward and backward. at_best: the ratio of blocks.
    correct: whether out and gradients agree with float64 attention of sampled queries; None without a result.
    doubts: why the figures are unreliable: times or baselines changed meanwhile. failed: why there is no result, or "".
    """

    mask: str
    backend: str | None
    forward_ms: float | None
    backward_ms: float | None
    memory: int | None
    kept: float | None
    over: str
    dense_forward_ms: float | None
    dense_backward_ms: float | None
    forward_speedup: float | None
    speedup: float | None
    at_best: float | None
    correct: bool | None
    doubts: tuple[str, ...]
    failed: str

    def __str__(self):
        if self.failed:
            return f"{self.mask}: no result: {self.failed}"
        said = f"{self.mask}: {self.forward_ms:.3g} ms forward, {self.backward_ms:.3g} ms backward"
        if self.speedup:
            said += f"; {self.speedup:.2f} times as fast as dense attention ({self.over}), at best {self.at_best:.2f}"
        said += "" if self.correct else "; WRONG"
        return f"{said}; not to be relied on: {'; '.join(self.doubts)}" if self.doubts else said


def bench(
    masks: str | Pattern | Iterable[str | Pattern | Sequence[str | Pattern]],
    q_len: int | None = None,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    batch: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    backend: str = "auto",
    quick: bool = False,
) -> list[BenchRow]:
    """How fast masks are on this machine, beside the dense calls that they replace: both passes, checked against float64.

    masks: patterns or spec texts, or one alone; for a mask of each query head, ``per_head([...])`` or a list. Each has a row.
    q_len: queries and keys, tokens. heads, kv_heads, head_dim, v_head_dim, batch: sizes of q, (batch, heads, q_len, head_dim), and
    of k and v. dtype: of all three. The defaults are as in ``sparse-flash bench``: 4 heads of 8,192 tokens, head_dim 64, float32
    on a CPU; 16 heads of 16,384 tokens, head_dim 128, bfloat16 on a GPU. device: "cuda" where there is one.
    quick: short timings, and by default 1,024 tokens of 2 heads. Raises ValueError for sizes that no call has, and for a mask
    of other sizes, before anything is measured. A mask that fails later, for lack of memory for instance, is a row that says why.
    """
    asked = [_as_pattern(one) for one in (masks if isinstance(masks, Iterable) and not isinstance(masks, str) else [masks])]
    if not asked:
        raise ValueError("masks must be patterns or spec texts; got none")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.bfloat16; got {dtype!r}")
    sizes = CallSizes(
        q_len, batch, heads, kv_heads, head_dim, v_head_dim, None if dtype is None else str(dtype).removeprefix("torch.")
    )
    found = device_of(str(device) if device else None)
    chosen = suites.choose(("speedup",), found.type, quick, asked, backend, sizes)
    cases = [case for case in chosen["speedup"] if isinstance(case, Case)]
    results = _Unsaved(Path(), {"settings": {}, "suites": {"speedup": [case.key for case in cases]}, "cases": {}})
    measure(suites.sort_cases(cases), chosen, results, found, Options(quick=quick))
    compared = {gain.row.key: gain for gain in gains(results.data)}
    labels = [suites.Mask.of(one).label for one in asked]
    ours = {case.mask.label: case.key for case in cases if suites.is_ours(case)}
    return [_row(label, results.get(ours[label]) or {}, compared.get(ours[label])) for label in labels]


class _Unsaved(Results):
    """Results that no file keeps."""

    def save(self) -> None:
        pass


def _as_pattern(given: object) -> Pattern:
    if isinstance(given, (list, tuple)):
        return PerHead(tuple(given))
    if isinstance(given, str):
        return parse(given)
    if not isinstance(given, Pattern):
        way_out = "; pass what it was compiled from" if isinstance(given, BlockMask) else ""
        raise TypeError(f"masks must be patterns or spec texts; got {type(given).__name__}{way_out}")
    return given


def _row(label: str, result: dict, gain) -> BenchRow:
    again = list(result.get("around", {}).values())
    dense = [
        min((sum(passes[name]) / 2 for passes in again if name in passes), default=None) for name in ("forward_ms", "backward_ms")
    ]
    return BenchRow(
        mask=label,
        backend=result.get("backend"),
        forward_ms=result.get("forward_ms"),
        backward_ms=result.get("backward_ms"),
        memory=result.get("extra_bytes"),
        kept=result.get("density"),
        over=gain.over if gain else "",
        dense_forward_ms=dense[0],
        dense_backward_ms=dense[1],
        forward_speedup=gain and gain.forward,
        speedup=gain and gain.total,
        at_best=1 / gain.visited if gain and gain.visited else None,
        correct=result.get("correct"),
        doubts=tuple(doubts(result)),
        failed="" if has_numbers(result) else why_not(result),
    )
