"""The cost of one call of a short problem: time, per back-to-back call, and host time, for which the program waits.

If the GPU has little to do, the host is the limit: a call takes the longer of the two. A CUDA graph removes the host's part; its
replay is measured the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from .accuracy import Attend
from .noise import Timing, time_runs

_SECONDS = 0.3  # per figure, at most
_WARM_CALLS = 20
_RUN_SECONDS, _RUN_CALLS = 0.01, 50  # of calls between two synchronizations; no more than a GPU's queue holds


def time_both(attend: Attend, dout: torch.Tensor, device: torch.device, seconds: float) -> Iterator[tuple[str, Timing]]:
    """Microseconds of both passes, each as time and as host time."""
    for name, call in (("forward", attend), ("both", lambda: attend(dout))):
        time_us, host_us = time_calls_us(call, device, min(seconds, _SECONDS))
        yield f"{name}_us", time_us
        yield f"{name}_host_us", host_us


def capture_graphs(attend: Attend, dout: torch.Tensor) -> Attend:
    """``attend`` as replays of two CUDA graphs. dout: the second graph's own; any other is copied into it. The next replay
    overwrites the results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            attend()
            attend(dout)
    torch.cuda.current_stream().wait_stream(stream)
    forward, both = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        alone = attend()
    with torch.cuda.graph(both):
        together = attend(dout)
    for tensor in (*alone, *together):
        tensor.detach().fill_(torch.nan)  # so that a replay that writes nothing is noticed

    def replay(new=None):
        if new is None:
            forward.replay()
            return alone
        if new is not dout:
            dout.copy_(new)
        both.replay()
        return together

    return replay


def time_calls_us(call: Callable, device: torch.device, seconds: float = _SECONDS) -> tuple[Timing, Timing]:
    """(time per call, host time per call): over runs of back-to-back calls, and over the medians of runs in which each call is
    timed."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(_WARM_CALLS):
        call()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    calls = max(1, min(_RUN_CALLS, int(_RUN_SECONDS / (time.perf_counter() - begin))))

    def call_often() -> None:
        for _ in range(calls):
            call()

    runs = time_runs(call_often, seconds, wait=wait)
    # Separate from the runs above, which reading the clock would lengthen.
    hosts: list[float] = []
    for _ in runs:
        hosts.append(statistics.median(time_runs(call, 0, least=calls)))
        wait()
    return Timing.of(runs).scaled(1e6 / calls), Timing.of(hosts).scaled(1e6)
