"""Timing and memory of a case.

GPU: medians of CUDA-event times over runs with a cold cache. CPU: medians of wall time. Both come with quartiles. Memory: the most
bytes that one forward and backward pass holds in tensors at once, beyond its inputs, as PyTorch's allocators count them on both
devices (on a CPU through the profiler's allocation events, so that earlier allocations do not count).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

import sparse_flash
from sparse_flash.tools.explain import is_causal

from ..baselines.base import Peer
from ..baselines.registry import find_peer
from ..results import has_numbers
from ..workload.cases import CallCase, Case, CompileCase, PaperCase
from ..workload.problem import Problem, build_problem
from . import latency
from .accuracy import as_attend, dropout_errors, dropout_is_right, is_right, sampled_errors
from .noise import MachineLoad, Timing, time_runs

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
CPU_SECONDS, _CPU_MOST = 0.5, 50
_GPU_WARMUP_MS, _GPU_MS = 50, 200


class OverLimit(BaseException):
    """A case ran past its time. Not an Exception, so that no library's fallback mistakes it for its own failure."""


@contextmanager
def time_limit(seconds: int | None):
    """Raises OverLimit in the body once it has run this long; does nothing off the main thread."""
    if not seconds or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def over(*_):
        raise OverLimit

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(case: Case | CompileCase, device: torch.device, limit: int | None = None, seconds: float | None = None) -> dict:
    """The result of a case as plain data: its numbers, or one of {"refused": why}, {"over_limit": seconds},
    {"out_of_memory": error}, {"failed": error}; and what ``noise`` judges them by. seconds: how long to repeat on a CPU."""
    load, begin = MachineLoad(_threads(case, device)), time.perf_counter()
    try:
        with time_limit(limit):
            measured = (
                _measure_compile(case)
                if isinstance(case, CompileCase)
                else _measure_attention(case, device, seconds or CPU_SECONDS)
            )
    except OverLimit:
        measured = {"over_limit": limit}
    except Exception as error:
        # A peer that cannot run is a result: the others still can.
        measured = {"out_of_memory" if _is_out_of_memory(error) else "failed": failure_text(error)}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if has_numbers(measured) and (seen := load.seen()):
        measured["load"] = seen
    return measured | {"took_s": round(time.perf_counter() - begin, 2)}


def failure_text(error: Exception) -> str:
    """An error in one line of a result. Assertions often have no text, so theirs says where they stand."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, AssertionError) and (frames := traceback.extract_tb(error.__traceback__)):
        text += f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})"
    return text.strip().replace("\n", " ")[:400]


def _threads(case: Case | CompileCase, device: torch.device) -> int:
    """Processors that the program uses while it is timed."""
    return 1 if device.type == "cuda" or isinstance(case, CompileCase) else torch.get_num_threads()


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU, PyTorch raises a plain RuntimeError.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def prepare_case(case: Case, device: torch.device) -> tuple[Problem, Peer, bool]:
    """(the problem, the peer, whether to run a backward pass)."""
    rival = find_peer(case.peer)
    # FlexAttention has no backward pass on a CPU and refuses inputs that require one.
    backward = not (device.type == "cpu" and case.peer.startswith("flex"))
    dtype = getattr(torch, case.dtype) if case.dtype else DTYPES[device.type]
    return build_problem(case, device, dtype, backward).with_memory_order(rival.order), rival, backward


def _measure_attention(case: Case, device: torch.device, seconds: float) -> dict:
    shape = case.shape
    problem, rival, backward = prepare_case(case, device)
    mask, kept = problem.mask, problem.kept_pairs
    facts = {
        "dtype": str(problem.q.dtype).removeprefix("torch."),
        "kept_pairs": kept / (shape.batch * shape.heads),
        "density": mask.density,
        "block_density": mask.block_density,
        "causal": is_causal(mask),
        "table_bytes": 0 if mask.keeps_all else mask.nbytes,
        "input_bytes": sum(t.numel() * t.element_size() for t in problem.leaves),
    }
    reason = rival.refuses(problem)
    if reason:
        return facts | {"refused": reason}
    if rival.runs_on(problem):
        facts["backend"] = rival.runs_on(problem)
    with rival.settings():
        if isinstance(case, CallCase):
            return facts | latency.measure_call(problem, rival, device, case.graph, seconds)
        if isinstance(case, PaperCase):
            return facts | _measure_paper_case(problem, rival, device, seconds, backward)
        return facts | _measure_passes(problem, rival, [kept * each for each in shape.flops], device, seconds, backward)


def _measure_passes(problem: Problem, rival: Peer, flops: list[int], device: torch.device, seconds: float, backward: bool) -> dict:
    """flops: of the forward and of the backward pass."""
    begin = time.perf_counter()
    fn = rival.prepare(problem)
    attend = as_attend(problem.leaves, fn)
    errors = sampled_errors(problem, attend, backward)
    result = {"first_call_s": time.perf_counter() - begin}
    for name, timing in time_passes(problem.leaves, fn, device, seconds, backward):
        result |= timing.as_result(name)
    result["forward_tflops"] = flops[0] / result["forward_ms"] / 1e9
    correct = is_right(errors, problem.q.dtype)
    if backward:
        result["backward_tflops"] = flops[1] / result["backward_ms"] / 1e9
        dout = torch.randn_like(attend()[0])
        result["extra_bytes"] = peak_bytes(lambda: attend(dout), device)
        if rival.deterministic:
            result["repeatable"] = repeatable = all(map(torch.equal, attend(dout), attend(dout)))
            correct = correct and repeatable
    return result | {"errors": errors, "correct": correct}


def time_passes(
    leaves: tuple[torch.Tensor, ...], fn: Callable, device: torch.device, seconds: float, backward: bool
) -> Iterator[tuple[str, Timing]]:
    """Milliseconds of the forward pass and, with ``backward``, of the backward pass alone. Runs ``fn`` first. leaves: q, k, v."""
    with torch.no_grad():
        fn()
        yield "forward_ms", time_ms(fn, device, seconds)
    if backward:
        out = fn()
        dout = torch.randn_like(out)
        yield "backward_ms", time_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device, seconds)


def _measure_paper_case(problem: Problem, rival: Peer, device: torch.device, seconds: float, backward: bool) -> dict:
    """Milliseconds of each pass and of both, memory of both. The check against the definition runs without dropout, which every
    peer draws in its own way."""
    fn = rival.prepare(replace(problem, dropout_p=0.0))
    errors = sampled_errors(problem, as_attend(problem.leaves, fn), backward)
    correct = is_right(errors, problem.q.dtype)
    if problem.dropout_p:
        ones = replace(problem, v=torch.ones_like(problem.v))
        of_dropout = dropout_errors(problem, as_attend(ones.leaves, rival.prepare(ones)))
        errors, correct = errors | of_dropout, correct and dropout_is_right(of_dropout)
        fn = rival.prepare(problem)
    attend = as_attend(problem.leaves, fn)
    result: dict = {}
    for name, timing in time_passes(problem.leaves, fn, device, seconds, backward):
        result |= timing.as_result(name)
    if backward:
        dout = torch.randn_like(attend()[0])
        result |= time_ms(lambda: attend(dout), device, seconds).as_result("both_ms")
        result["extra_bytes"] = peak_bytes(lambda: attend(dout), device)
    return result | {"errors": errors, "correct": correct}


def time_ms(fn: Callable, device: torch.device, seconds: float) -> Timing:
    """Milliseconds of ``fn``, which has run before."""
    if device.type == "cuda":
        import triton

        median, low, high = triton.testing.do_bench(fn, warmup=_GPU_WARMUP_MS, rep=_GPU_MS, quantiles=[0.5, 0.25, 0.75])
        return Timing(median, low, high)
    return Timing.of(time_runs(fn, seconds, most=_CPU_MOST, longest=8 * seconds)).scaled(1e3)


def profile_kernels(call: Callable[[], object], calls: int = 1) -> list:
    """Returns the profiler's averages of the GPU's kernels in these calls, the longest kernel first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [event for event in recorded.key_averages() if event.device_type == DeviceType.CUDA]
    return sorted(events, key=lambda event: -event.self_device_time_total)


def peak_bytes(fn: Callable, device: torch.device) -> int:
    """The most bytes that tensors made by ``fn`` hold at once."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = fn()
    del result
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@contextmanager
def _quiet_stderr():
    """Hides the profiler's notes, which its library writes past Python."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _measure_compile(case: CompileCase) -> dict:
    compiled = partial(
        sparse_flash.compile_mask, sparse_flash.parse(case.spec), case.tokens, block_size=case.block_size, progress=False
    )
    times = time_runs(compiled, seconds=3, least=1, most=3)
    # Tracing slows allocation, so memory is measured in a separate run.
    tracemalloc.start()
    try:
        mask = compiled()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return {
        **Timing.of(times).as_result("compile_s"),
        "peak_bytes": peak,
        "table_bytes": mask.nbytes,
        "kept_blocks": int(mask.by_query.row_ptr[0, -1]),
        "density": mask.density,
        "block_density": mask.block_density,
    }
