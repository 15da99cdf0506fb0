"""Times rows that are drawn at random, to hold predictions of time against.

    python -m sparse_flash.benchmarks.drawn --seed 1 --count 200 --out runs/drawn
    python -m sparse_flash.benchmarks.drawn --choices --count 40 --out runs/choices
    python -m sparse_flash.benchmarks.drawn --kind decode --count 40 --out runs/decode

Writes drawn.json after each row: the case, forward and backward milliseconds with their spread, and the back end that ran. The same
seed draws the same rows (``workload.drawn``).

With --choices, rows are those in which ``auto`` chooses between tables or kernels of nearly equal predicted times. Each of them is
timed; on a CPU they are only listed. A row has what was chosen, and for each option predicted and measured times.

With --kind, rows are other calls: see ``drawn_calls``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice

import torch

import sparse_flash
from sparse_flash.kernels.cost.choices import LEAST_GAIN, compare_with_dense, reference_chip
from sparse_flash.masks.block_mask import BlockMask
from sparse_flash.masks.coarsen import KERNEL_BLOCK, SMALL_BLOCKS
from sparse_flash.masks.document_blocks import document_blocks
from sparse_flash.tools.cost import predict
from sparse_flash.tools.explain import is_causal

from .baselines.registry import find_peer
from .drawn_calls import KINDS, draw_calls
from .measure.throughput import CPU_SECONDS, DTYPES, time_passes, try_measuring
from .program import RowFile, add_device, add_limit, create_parser
from .results import environment
from .workload.cases import Case
from .workload.drawn import draw_cases
from .workload.problem import build_problem, parse_and_compile

_CLOSE = 1.5  # the most between predicted times of options that are called close


def main(arguments: list[str] | None = None) -> int:
    parser = create_parser("drawn", __doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="rows (default %(default)s)")
    parser.add_argument("--choices", action="store_true", help="rows with close choices, and each option's time")
    parser.add_argument("--kind", choices=KINDS, help="of other calls (default: attention under masks)")
    add_limit(parser)
    add_device(parser)
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.limit
    file = RowFile(options.out / "drawn.json", {"seed": options.seed, "environment": environment(options.device)}, "rows")
    file.write()
    rows = file.data["rows"]
    if options.kind:
        return _measure_calls(
            file, islice(draw_calls(options.kind, options.seed), options.count), options.kind, options.device, until
        )
    cases = draw_close_choices(options.seed) if options.choices else draw_cases(options.seed, options.count)
    measure = measure_options if options.choices else measure_row
    for case in islice(cases, options.count):
        if time.monotonic() > until:
            print(f"the time was up: {options.count - len(rows)} rows were not begun", flush=True)
            break
        found = try_measuring(partial(measure, case, options.device))
        said = found.get("failed") or ", ".join(f"{name} {value}" for name, value in found.items())
        row = {"shape": asdict(case.shape), "spec": case.mask.spec, "block_size": case.mask.block_size} | found
        file.add("rows", row, f"{len(rows) + 1} of {options.count}: {case.shape}", case.label[:80], said)
    print(options.out)
    return int(any("failed" in row for row in rows))


def _measure_calls(file: RowFile, calls: Iterator, kind: str, device: torch.device, until: float) -> int:
    """Measures calls of ``drawn_calls`` until the time is up."""
    for call in calls:
        if time.monotonic() > until:
            break
        found = try_measuring(partial(call.measure, device))
        file.add("rows", {"kind": kind, "call": asdict(call)} | found, f"{call}"[:200], f"{found}"[:200])
    print(file.path)
    return int(any("failed" in row for row in file.data["rows"]))


def measure_row(case: Case, device: torch.device) -> dict:
    """Returns the back end that ran a case, the block size of the table that it ran, and milliseconds."""
    problem, rival = build_problem(case, device, DTYPES[device.type]), find_peer(case.peer)
    row: dict = {"backend": rival.runs_on(problem), "kernel_block": (problem.mask.coarse or problem.mask).block_size}
    for name, timing in time_passes(problem.leaves, rival.prepare(problem), device, CPU_SECONDS, backward=True):
        row |= timing.as_result(name)
    return row


def list_options(mask: BlockMask) -> dict[str, BlockMask]:
    """Returns what ``auto`` chooses from, by name; what it takes comes first. "dense" is what it says may be as fast."""
    found = {"own": replace(mask, coarse=None)}
    if mask.block_size in SMALL_BLOCKS:
        found["blocks of 128"] = replace(mask, coarse=mask.in_blocks_of(KERNEL_BLOCK))
        chosen = "own" if mask.coarse is None else "blocks of 128"
    elif by_document := document_blocks(mask, least_gain=0):
        chosen = "own" if mask.by_document is None else "by document"
        found["by document"] = replace(mask)
        for name, one in found.items():
            vars(one)["_by_document"] = by_document if name == "by document" else None
    else:
        chosen = "own"
        if not mask.keeps_all and compare_with_dense(mask.to("cpu")).gain < LEAST_GAIN:
            dense = "causal" if is_causal(mask) else "full"
            found["dense"] = sparse_flash.compile_mask(dense, mask.q_len, mask.kv_len, device=mask.device)
    return {chosen: found.pop(chosen)} | found


def predict_us(case: Case, mask: BlockMask) -> float:
    """Returns the predicted microseconds of both passes, by the constants that choices are made by."""
    s = case.shape
    time = predict(mask, s.heads, s.head_dim, reference_chip(), batch=s.batch, kv_heads=s.kv_heads, v_head_dim=s.v_head_dim)
    return time.forward_us + (time.backward_us or 0.0)


def draw_close_choices(seed: int) -> Iterator[Case]:
    """Yields drawn cases that have several options, whose predicted times differ by at most _CLOSE."""
    for case in draw_cases(seed, sys.maxsize):
        options = list_options(parse_and_compile(case.mask, case.tokens, torch.device("cpu"))[1])
        times = [predict_us(case, mask) for mask in options.values()]
        if min(times) < max(times) < _CLOSE * min(times):
            yield case


def measure_options(case: Case, device: torch.device) -> dict:
    """Returns what ``auto`` chooses for a case, and for each option its predicted and, on a GPU, its measured milliseconds."""
    mask = parse_and_compile(case.mask, case.tokens, torch.device("cpu"))[1]
    options, row = list_options(mask), {}
    for name, one in options.items():
        row[name] = {"predicted_ms": round(predict_us(case, one) / 1e3, 4)}
    if device.type == "cuda":
        problem = build_problem(case, device, DTYPES[device.type])
        for name, one in list_options(problem.mask).items():
            attend = partial(sparse_flash.attention, *problem.leaves, one)
            for which, timing in time_passes(problem.leaves, attend, device, CPU_SECONDS, backward=True):
                row[name] |= timing.as_result(which)
    return {"chosen": next(iter(options)), "options": row}


if __name__ == "__main__":
    sys.exit(main())
