"""What one call of a short problem costs: time, which calls back to back take, and host time, which the program waits.

Where the GPU has little to do, the host is the limit: a call takes the longer of the two. A CUDA graph takes the host's
part of the work away; its replay is measured in the same manner.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from .check import Attend, eagerly, is_right, sampled_errors
from .peer import Peer
from .problem import Problem

_SECONDS = 0.3  # a figure
_WARM_CALLS = 20
_RUN_SECONDS, _RUN_CALLS = 0.01, 50  # of calls between two synchronizations; no more than GPUs take into their queues
_LEAST_RUNS = 3


def measured(problem: Problem, rival: Peer, device: torch.device, graph: bool) -> dict:
    """Microseconds a call, of the forward pass without gradients and of forward and backward, and their errors."""
    attend = eagerly(problem, rival.prepare(problem))
    dout = torch.randn_like(attend()[0])
    if graph:
        attend = captured(attend, dout)
    errors = sampled_errors(problem, attend)
    result = {"errors": errors, "correct": is_right(errors, problem.q.dtype)}
    dout.normal_()  # the check leaves most of a graph's own dout zero
    for name, call in (("forward", attend), ("both", lambda: attend(dout))):
        result[f"{name}_us"], result[f"{name}_host_us"] = microseconds(call, device)
    return result


def captured(attend: Attend, dout: torch.Tensor) -> Attend:
    """``attend`` as replays of two CUDA graphs. dout: the second one's own; another is copied into it. Results are
    overwritten by the next replay."""
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


def microseconds(call: Callable, device: torch.device) -> tuple[float, float]:
    """(time a call, host time a call): medians over runs of calls back to back, and over all those calls."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(_WARM_CALLS):
        call()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    calls = max(1, min(_RUN_CALLS, int(_RUN_SECONDS / (time.perf_counter() - begin))))
    runs: list[float] = []
    while len(runs) < _LEAST_RUNS or sum(runs) < _SECONDS:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        runs.append(time.perf_counter() - begin)
    # Apart from the runs above, which the clock's own calls would lengthen.
    hosts: list[float] = []
    for _ in runs:
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            hosts.append(time.perf_counter() - begin)
        wait()
    return statistics.median(runs) / calls * 1e6, statistics.median(hosts) * 1e6
