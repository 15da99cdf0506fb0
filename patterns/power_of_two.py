"""power_of_two: a unit sees itself and the units at distances 1, 2, 4, 8, ...: the butterfly's difference form.

use: long text and series generated token by token, where the whole past must stay within reach
formula: abs(i - j) in {0, 1, 2, 4, ...} and abs(i - j) < 2**factors, with i = q // block, j = kv // block
source: arXiv:1907.00235, sec. 4.2 (LogSparse); by differences, where arXiv:2112.00029 takes digits
specimen: power_of_two()

    ###.#...
    ####.#..        power_of_two(block=1)
    #####.#.
    .#####.#
    #.#####.
    .#.#####
    ..#.####
    ...#.###
"""

from dataclasses import dataclass

from ..masks.fields import Factors, Positive
from ..masks.registry import register_pattern
from ..masks.rules import DistancePattern


@register_pattern("power_of_two")
@dataclass(frozen=True)
class PowerOfTwo(DistancePattern):
    """Units at a distance of 0 or a power of two. factors: how many powers; None for no limit. block: tokens in a unit.

    With causal a unit reaches every earlier unit in at most log2(units) layers; with ``causal & butterfly`` it does not.
    """

    factors: Factors | None = None
    block: Positive = 128

    def distance_rule(self, distance):
        far = abs(distance)
        kept = far & (far - 1) == 0
        return kept if self.factors is None else kept & (far < 1 << self.factors)
