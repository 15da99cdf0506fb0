"""Times a row's baselines again right before and after the row, because a machine's speed drifts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..workload.cases import CallCase, Case
from . import latency, throughput
from .accuracy import as_attend


class BaselineTimer:
    """The baselines of successive cases. A timing after one case serves as the timing before the next, and a peer that is needed
    again stays prepared. seconds, limit: of each timing, as in ``throughput.run``."""

    def __init__(self, device: torch.device, limit: int | None, seconds: float | None):
        self._device, self._limit, self._seconds = device, limit, seconds or throughput.CPU_SECONDS
        self._prepared: dict[str, _Prepared] = {}
        self._before: dict[str, dict[str, float]] = {}
        self._just_timed = False

    def before(self, cases: Sequence[Case]) -> None:
        """Times the baselines of the next case."""
        wanted = {case.key: case for case in cases}
        self._prepared = {key: held for key, held in self._prepared.items() if key in wanted}
        self._before = {key: times for key, times in self._before.items() if key in wanted and self._just_timed}
        self._just_timed = False
        for key, case in wanted.items():
            if key not in self._before:
                self._before |= self._time_baseline(key, case)

    def after(self) -> dict:
        """{"around": {case key: {figure: [before, after]}}}, or {} without baselines."""
        before, self._before, self._just_timed = self._before, {}, True
        for key in before:
            self._before |= self._time_baseline(key)
        around = {key: {name: [before[key][name], time] for name, time in times.items()} for key, times in self._before.items()}
        return {"around": around} if around else {}

    def _time_baseline(self, key: str, case: Case | None = None) -> dict[str, dict[str, float]]:
        """{key: times}; {} if it gives none now; the row is then compared with the baseline's own earlier result."""
        try:
            with throughput.time_limit(self._limit):
                held = self._prepared[key] if case is None or key in self._prepared else _Prepared(case, self._device)
                times = held.times(self._device, self._seconds)
        except (throughput.OverLimit, Exception):
            self._prepared.pop(key, None)
            return {}
        self._prepared[key] = held
        return {key: times}


class _Prepared:
    """A case's peer, prepared for its problem."""

    def __init__(self, case: Case, device: torch.device):
        self._case = case
        self._problem, self._rival, self._backward = throughput.prepare_case(case, device)
        with self._rival.settings():
            self._fn = self._rival.prepare(self._problem)
            if isinstance(case, CallCase):
                attend = as_attend(self._problem.leaves, self._fn)
                self._dout = torch.randn_like(attend()[0])
                self._attend = latency.capture_graphs(attend, self._dout) if case.graph else attend

    def times(self, device: torch.device, seconds: float) -> dict[str, float]:
        with self._rival.settings():
            if isinstance(self._case, CallCase):
                found = latency.time_both(self._attend, self._dout, device, seconds)
            else:
                found = throughput.time_passes(self._problem.leaves, self._fn, device, seconds, self._backward)
            return {name: timing.median for name, timing in found}
