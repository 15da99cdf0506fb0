"""random: each pair of units is kept with a given probability.

use: added to a window: shortens the way between distant tokens of long inputs
formula: hash(seed, i, j) < density * 2**64, with i = q // block, j = kv // block
source: arXiv:2007.14062, sec. 2 (there a fixed number of keys a query)
specimen: random(0.06)

    #....##.
    ...##...        random(0.25, seed=1, block=1)
    ...##...
    .....#.#
    .....#..
    .##.#.#.
    .....#.#
    .#.#....
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import Natural, Positive, Share
from ..masks.registry import register_pattern
from ..masks.rules import UnitPattern

_GOLDEN = 0x9E3779B97F4A7C15


@register_pattern("random")
@dataclass(frozen=True)
class Random(UnitPattern):
    """Pairs of units drawn independently. density: the probability of each pair. seed: of the hash. block: tokens in a unit.

    An integer hash of (seed, i, j) decides every pair: the result is the same on every machine, and a longer sequence extends a
    shorter one, unlike with a fixed number of units per row. Rows may keep nothing; add a window, as ``bigbird`` does.
    """

    density: Share
    seed: Natural = 0
    block: Positive = 128

    def unit_rule(self, i, j):
        # splitmix64 (doi:10.1145/2660193.2660195): each row is a stream that starts at a hash of (seed, i).
        i, j = np.asarray(i).astype(np.uint64), np.asarray(j).astype(np.uint64)
        start = _mix_bits(_mix_bits(np.full(1, self.seed, np.uint64) + np.uint64(_GOLDEN)) ^ (i * np.uint64(_GOLDEN)))
        # The upper 53 bits: then the threshold is exact for every density that a float can hold to that precision.
        return (_mix_bits(start + j * np.uint64(_GOLDEN)) >> np.uint64(11)) < np.uint64(round(self.density * 2**53))


def _mix_bits(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
