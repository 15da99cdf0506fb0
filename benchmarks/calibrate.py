"""Measures the constants of predicted times on this GPU: a fixed set of calls that tell them apart, then the fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from sparse_flash.kernels.cost import chips
from sparse_flash.kernels.cost.chips import Chip

from .baselines.registry import find_peer
from .fit import Sample, fit
from .fit_cost import samples_of_call
from .measure.throughput import CPU_SECONDS, DTYPES, time_ms, time_passes
from .workload.cases import OURS, Case, Mask, Shape
from .workload.problem import build_problem, parse_and_compile

HEAD_DIMS = ((128, None), (64, None), (256, None), (96, None), (192, 128))  # of q and k, and of v; the commonest first
LIMIT = 120  # seconds
_COPIED = 1 << 29  # bytes
_DOCUMENTS = "causal & documents((0, 9000, 9500, 9600, 26000, 26300, 30000, 50000, 50400, 51000, 65536))"
# (batch, heads, key heads, tokens, spec, block): what they tell apart. Uneven rows come with the causal ones and documents.
_CALLS = (
    (1, 16, None, 16384, "full", 128),  # steps
    (4, 16, None, 4096, "full", 128),
    (1, 16, None, 16384, "causal", 128),
    (1, 16, None, 16384, "causal & local(1024)", 128),  # rows' starts, partial blocks
    (2, 16, None, 8192, "causal & local(256)", 128),
    (1, 16, None, 16384, "butterfly(block=128)", 128),  # short rows without partial blocks
    (1, 8, None, 65536, "random(0.02, block=128)", 128),  # more than the L2 cache holds
    (1, 8, None, 65536, _DOCUMENTS, 128),
    (1, 16, None, 16384, "bigbird(block=128)", 128),  # split rows and columns
    (1, 32, 8, 16384, "causal & local(1024)", 128),  # shared keys
    (1, 8, None, 1024, "causal", 128),  # launches, small tiles
    (2, 8, None, 2048, "full", 128),
    (1, 16, None, 16384, "random(0.08, block=64)", 64),  # blocks of 64
    (1, 16, None, 16384, "causal & local(512)", 64),
)

Measure = Callable[[Case], Sequence[float]]


def cases(head_dims: Sequence[tuple[int, int | None]] = HEAD_DIMS) -> Iterator[Case]:
    """Returns the calls to measure, in this order."""
    for head_dim, v_head_dim in head_dims:
        for batch, heads, kv_heads, tokens, spec, block in _CALLS:
            yield Case(Shape(batch, heads, tokens, head_dim, kv_heads, v_head_dim), Mask(spec, spec, block), OURS)


def measure_case(case: Case) -> list[float]:
    """Returns the microseconds of the forward and of the backward pass on the current GPU."""
    device = torch.device("cuda")
    problem = build_problem(case, device, DTYPES["cuda"])
    found = time_passes(problem.leaves, find_peer(case.peer).prepare(problem), device, CPU_SECONDS, backward=True)
    return [1e3 * timing.median for _, timing in found]


def copy_rate() -> float:
    """Returns the bytes that a copy on the current GPU reads and writes in a microsecond."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPIED / (1e3 * time_ms(lambda: target.copy_(source), source.device, CPU_SECONDS).median)


def measure_samples(
    chip: Chip, measure: Measure = measure_case, limit: float = LIMIT, head_dims: Sequence[tuple[int, int | None]] = HEAD_DIMS
) -> Iterator[Sample]:
    """Returns the measured passes of the calls that are begun within ``limit`` seconds. measure: returns a call's microseconds,
    forward and backward."""
    until = time.monotonic() + limit
    for case in cases(head_dims):
        if time.monotonic() > until:
            return
        yield from samples_of_case(case, chip, measure(case))


def samples_of_case(case: Case, chip: Chip, us: Sequence[float]) -> Iterator[Sample]:
    """Returns the passes of a case that took these microseconds, forward and backward."""
    mask = parse_and_compile(case.mask, case.tokens, torch.device("cpu"))[1]
    return samples_of_call(mask, case.shape, chip, us, case.key)


def calibrate_chip(chip: Chip, found: Sequence[Sample], bytes_per_us: float) -> Chip:
    """Returns the chip with constants fitted to these passes, and writes it to the file of this machine, from which predictions
    take it."""
    made = fit(replace(chip, bytes_per_us=bytes_per_us), found)
    chips.write_chips(chips.calibrated_file(), [made])
    return made
