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
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch

import sparse_flash

from ..baselines.base import Peer
from ..baselines.registry import find_peer
from ..workload.cases import Case, CompileCase
from ..workload.problem import Problem, build_problem
from .accuracy import as_attend, is_right, sampled_errors
from .noise import Timing, time_runs

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
    """The result of a case as plain data: its numbers or why there are none. seconds: how long to repeat on a CPU."""
    if isinstance(case, CompileCase):
        return try_measuring(partial(_measure_compile, case), limit)
    return try_measuring(partial(_measure_attention, case, device, seconds or CPU_SECONDS), limit)


def try_measuring(measure: Callable[[], dict], seconds: int | None = None) -> dict:
    """Returns what ``measure`` does, or {"over_limit": seconds}, {"out_of_memory": error} or {"failed": error}: a row that fails is
    a result, and the next row may run."""
    try:
        with time_limit(seconds):
            return measure()
    except OverLimit:
        return {"over_limit": seconds}
    except Exception as error:
        return {"out_of_memory" if _is_out_of_memory(error) else "failed": failure_text(error)}
    finally:
        with suppress(RuntimeError):  # after a fault on the GPU; it is in the result
            torch.cuda.empty_cache()


def failure_text(error: Exception) -> str:
    """An error in one line of a result. Assertions often have no text, so theirs says where they stand."""
    text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:400]
    if isinstance(error, AssertionError) and (frames := traceback.extract_tb(error.__traceback__)):
        text += f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})"
    return text


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU, PyTorch raises a plain RuntimeError.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


class Prepared:
    """A peer with a problem, in the memory order that it wants. ``refused`` says why it cannot compute it, or is None. case: a cell
    of the paper's tables also has the time of both passes together."""

    def __init__(self, peer: Peer, problem: Problem, backward: bool = True, case: Case | None = None):
        self.peer, self.backward, self._case = peer, backward, case
        self.problem = problem.with_memory_order((0, 2, 1, 3) if problem.change.packed else peer.order)
        self.refused = peer.refuses(self.problem)

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Prepared:
        # FlexAttention has no backward pass on a CPU and refuses inputs that require one.
        backward = not (device.type == "cpu" and case.peer.startswith("flex"))
        dtype = getattr(torch, case.dtype) if case.dtype else DTYPES[device.type]
        return cls(find_peer(case.peer), build_problem(case, device, dtype, backward), backward, case)

    def prepare(self) -> None:
        """Prepares both passes, with dropout if the problem has it; within the peer's settings."""
        self._fn = self.peer.prepare(self.problem)
        self.attend = as_attend(self.problem.trained, self._fn)
        self.dout = torch.randn_like(self.attend()[0])

    def time(self, seconds: float) -> Iterator[tuple[str, Timing]]:
        """The figures' names and times. seconds: how long to repeat on a CPU."""
        device = self.problem.q.device
        yield from time_passes(self.problem.trained, self._fn, device, seconds, self.backward)
        if self._case and self._case.kind == "paper" and self.backward:
            yield "both_ms", time_ms(lambda: self.attend(self.dout), device, seconds)


def _measure_attention(case: Case, device: torch.device, seconds: float) -> dict:
    prepared = Prepared.of(case, device)
    problem, mask = prepared.problem, prepared.problem.mask
    kept = problem.kept_pairs
    facts = {
        "dtype": str(problem.q.dtype).removeprefix("torch."),
        "kept_pairs": kept / (case.shape.batch * case.shape.heads),
        "density": mask.density,
        "block_density": mask.block_density,
        "causal": mask.is_causal,
        "table_bytes": 0 if mask.keeps_all else mask.nbytes,
    }
    if not prepared.refused and (backend := prepared.peer.runs_on(problem)):
        facts["backend"] = backend
    return facts | measure(prepared, seconds, [kept * each for each in case.shape.flops])


def measure(prepared: Prepared, seconds: float, flops: Sequence[int] = (), checked: bool = True) -> dict:
    """Times, TFLOP/s, memory and, if ``checked``, errors, as plain data; or {"refused": why}. flops: of the forward and of the
    backward pass, if TFLOP/s are wanted."""
    if prepared.refused:
        return {"refused": prepared.refused}
    with prepared.peer.settings():
        prepared.prepare()
        result = _check(prepared) if checked else {}
        for name, timing in prepared.time(seconds):
            result |= timing.as_result(name)
        for name, count in zip(("forward", "backward"), flops):
            if f"{name}_ms" in result:
                result[f"{name}_tflops"] = count / result[f"{name}_ms"] / 1e9
        if "backward_ms" in result:
            result["extra_bytes"] = peak_bytes(lambda: prepared.attend(prepared.dout), prepared.problem.q.device)
    return result


def _check(prepared: Prepared) -> dict:
    """{"errors", "correct"} and, of a peer that promises gradients that repeat bit for bit, "repeatable". Dropout, which every peer
    draws in its own way, is left out of the check."""
    problem, peer, attend = prepared.problem, prepared.peer, prepared.attend
    if problem.dropout_p:
        attend = as_attend(problem.trained, peer.prepare(replace(problem, dropout_p=0.0)))
    errors = sampled_errors(problem, attend, prepared.backward)
    correct = is_right(errors, problem.q.dtype)
    if not (peer.deterministic and prepared.backward):
        return {"errors": errors, "correct": correct}
    repeatable = all(map(torch.equal, attend(prepared.dout), attend(prepared.dout)))
    return {"errors": errors, "repeatable": repeatable, "correct": correct and repeatable}


def time_passes(
    leaves: tuple[torch.Tensor, ...], fn: Callable, device: torch.device, seconds: float, backward: bool
) -> Iterator[tuple[str, Timing]]:
    """Milliseconds of the forward pass and, with ``backward``, of the backward pass alone. Runs ``fn`` first. leaves: what they
    differentiate by."""
    with torch.no_grad():
        fn()
        yield "forward_ms", time_ms(fn, device, seconds)
    if backward:
        out = fn()
        dout = torch.randn_like(out)
        yield "backward_ms", time_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device, seconds)


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
    compiled = partial(sparse_flash.compile_mask, sparse_flash.parse(case.spec), case.tokens, block_size=case.block_size)
    import scipy.sparse  # noqa: F401  # otherwise part of the first time

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
