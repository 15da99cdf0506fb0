"""Times a row's baselines again right before and after the row, because a machine's speed drifts."""

from collections.abc import Callable, Sequence

import torch

from ..results import has_numbers
from ..workload.cases import Case
from . import throughput

Times = dict[str, float]


class BaselineTimer:
    """The baselines of successive cases. A timing after one case serves as the timing before the next, and a peer that is needed
    again stays prepared. seconds, limit: of each timing, as in ``throughput.run``."""

    def __init__(self, device: torch.device, limit: int | None, seconds: float | None):
        self._device, self._limit, self._seconds = device, limit, seconds or throughput.CPU_SECONDS
        self._prepared: dict[str, throughput.Prepared] = {}
        self._just_timed: dict[str, Times] = {}

    def measure(self, baselines: Sequence[Case], case: Callable[[], dict]) -> dict:
        """The result of a case, and {"around": {key of a baseline: {figure: [before, after]}}} if it has numbers. A baseline that
        gives none now is left out: the row is then compared with the baseline's own earlier result."""
        wanted = {baseline.key: baseline for baseline in baselines}
        self._prepared = {key: held for key, held in self._prepared.items() if key in wanted}
        before = {key: self._just_timed.get(key) or self._time(baseline) for key, baseline in wanted.items()}
        self._just_timed = {}
        result = case()
        if not has_numbers(result):
            return result
        self._just_timed = {key: times for key, baseline in wanted.items() if before[key] and (times := self._time(baseline))}
        around = {key: {name: [before[key][name], time] for name, time in times.items()} for key, times in self._just_timed.items()}
        return result | ({"around": around} if around else {})

    def _time(self, baseline: Case) -> Times:
        """Its figures; {} if it gives none."""
        held = self._prepared.pop(baseline.key, None)
        try:
            with throughput.time_limit(self._limit):
                if held is None:
                    held = throughput.Prepared.of(baseline, self._device)
                    with held.peer.settings():
                        held.prepare()
                with held.peer.settings():
                    found = {name: timing.median for name, timing in held.time(self._seconds)}
        except (throughput.OverLimit, Exception):
            return {}
        self._prepared[baseline.key] = held
        return found
