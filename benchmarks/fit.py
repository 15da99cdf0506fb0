"""Fits a chip's constants to measured passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sparse_flash.kernels.cost.chips import Chip, KernelFamily, Times
from sparse_flash.kernels.cost.model import HOST_US, KINDS, Launch, predict_pass

_ROUNDS, _LEAST_GAIN = 10, 0.999
# Errors of shorter passes count as if they took this long: a host that is a little late shifts them by tens of percent.
LEAST_US = 100
# The weight of a constant's value before the fit, of a sample's. It decides what samples do not tell apart.
_PRIOR = 0.03
# By how much the host is ahead when a timing begins: benchmarks clear the cache before each call, which takes the GPU this long.
_AHEAD_US = 55


class Sample(NamedTuple):
    """A measured pass. us: its microseconds. name: of what was measured."""

    launch: Launch
    us: float
    name: str = ""

    def error(self, chip: Chip) -> float:
        """Returns by how much the prediction for a timed call exceeds the measurement, as a share of it."""
        found = predict_pass(self.launch, chip)
        return max(found.us, found.host_us - _AHEAD_US) / self.us - 1

    def waits_for_host(self, error: float) -> bool:
        """Whether the GPU is predicted to be done before the host. error: the prediction's."""
        return (1 + error) * self.us < HOST_US[self.launch.family.backward]


def fit(chip: Chip, samples: Sequence[Sample]) -> Chip:
    """Returns the chip with constants for the families of the samples, by non-negative least squares of relative errors.

    Samples that the host bounds say nothing of the GPU, and are left out. Without others the chip stays as it is.
    """
    by_family: dict[KernelFamily, list[Sample]] = {}
    for sample in samples:
        if predict_pass(sample.launch, chip).bound != "the host":
            by_family.setdefault(sample.launch.family, []).append(sample)
    if not by_family:
        return chip
    measured = {family: _fit_family(chip, family, found) for family, found in by_family.items()}
    return replace(chip, measured={**chip.measured, **measured})


def _fit_family(chip: Chip, family: KernelFamily, samples: Sequence[Sample]) -> Times:
    """Returns the constants of one family. The time of the program that finishes last is linear in them, but which program that is
    depends on them. So they are fitted to the programs that would finish last, in rounds, and those of the best round are
    returned."""
    from scipy.optimize import nnls

    before, us = np.array(chip.times(family)), np.array([sample.us for sample in samples])
    times, best, least, scale = chip.times(family), chip.times(family), np.inf, np.maximum(us, LEAST_US)
    for _ in range(_ROUNDS):
        chip = replace(chip, measured={**chip.measured, family: times})
        found = [predict_pass(sample.launch, chip) for sample in samples]
        spread = np.square((np.array([one.us for one in found]) - us) / scale).sum()
        if spread >= least * _LEAST_GAIN:
            break
        best, least = times, spread
        rows = np.array([one.last.amounts for one in found]) * before / scale[:, None]
        targets = (us - np.array([one.beside for one in found])) / scale
        kept = _PRIOR * np.eye(KINDS), np.full(KINDS, _PRIOR)
        shares = nnls(np.concatenate([kept[0], rows]), np.concatenate([kept[1], targets]))[0]
        times = Times(*(shares * before).tolist())
    return best


class Errors(NamedTuple):
    """Relative errors of predictions, without sign: the median, the 90th percentile, the largest. worst: the largest, signed."""

    passes: int
    median: float
    p90: float
    largest: float
    worst: list[tuple[float, Sample]]

    @classmethod
    def of(cls, errors: Sequence[tuple[float, Sample]], worst: int = 5) -> Errors:
        """errors: signed, at least one, each with its sample."""
        found = sorted(errors, key=lambda pair: -abs(pair[0]))
        sizes = np.abs([error for error, _ in found])
        return cls(len(found), float(np.median(sizes)), float(np.quantile(sizes, 0.9)), float(sizes.max()), found[:worst])

    def __str__(self) -> str:
        return f"{self.passes} passes: median {self.median:.1%}, 90 % within {self.p90:.1%}, at most {self.largest:.1%}"
