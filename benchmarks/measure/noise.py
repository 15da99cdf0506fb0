"""Repeated times, and whether a figure is reliable: how far times spread, and how far baselines moved.

Results hold the facts and ``doubts`` judges them, so files from before these were recorded still load, without doubts:

    "NAME_spread": [first quartile, third quartile]   next to each figure "NAME", in its unit
    "around": {case key: {NAME: [before, after]}}     the baselines of a row, measured around it
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch

# Figures whose quartiles lie further apart than this share of the median, or whose baseline moved this far meanwhile, say little
# about ratios of 1.2, which is what people read tables for.
MOST_SPREAD = 0.2
MARK = "?"
_SECONDS = 0.3  # per figure, at most
_WARM_CALLS = 20
_RUN_SECONDS, _RUN_CALLS = 0.01, 50  # of calls between two synchronizations; no more than a GPU's queue holds


@dataclass(frozen=True)
class Timing:
    """The median of repeated times, and their first and third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
        return cls(float(median), float(low), float(high))

    def scaled(self, factor: float) -> Timing:
        return Timing(self.median * factor, self.low * factor, self.high * factor)

    def as_result(self, name: str) -> dict:
        """Returns it as a result stores it."""
        return {name: self.median, f"{name}_spread": [self.low, self.high]}


def time_runs(
    call: Callable[[], object],
    seconds: float,
    least: int = 3,
    most: float = inf,
    longest: float = inf,
    wait: Callable[[], object] | None = None,
) -> list[float]:
    """Returns the seconds of each run of ``call``. It runs until all runs together took ``seconds``, but at least and at most so
    often, and no more after ``longest`` seconds. wait: part of each run, such as torch.cuda.synchronize."""
    if wait is not None:
        wait()  # for what was queued before
    times: list[float] = []
    while sum(times) <= longest and (len(times) < least or (sum(times) < seconds and len(times) < most)):
        begin = time.perf_counter()
        call()
        if wait is not None:
            wait()
        times.append(time.perf_counter() - begin)
    return times


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


def spread(result: dict) -> float | None:
    """The largest distance of quartiles of a result's times, as a share of their median; None if it was not recorded."""
    medians = {name: result.get(name.removesuffix("_spread")) for name in result if name.endswith("_spread")}
    return max(((result[name][1] - result[name][0]) / median for name, median in medians.items() if median), default=None)


def doubts(result: dict) -> list[str]:
    """Why a result's figures are unreliable, as phrases; empty if they are reliable."""
    found = []
    wide = spread(result)
    if wide is not None and wide > MOST_SPREAD:
        found.append(f"the middle half of its times spreads over {wide:.0%} of the median")
    for key, passes in result.get("around", {}).items():
        moved = max((abs(after - before) / min(before, after) for before, after in passes.values()), default=0)
        if moved > MOST_SPREAD:
            found.append(f"its baseline ({key}) changed by {moved:.0%} while it was measured")
    return found
