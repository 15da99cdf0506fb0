"""strided: the nearest units, and every stride-th unit beyond.

use: images row by row, audio and series with a period; long text generated token by token
formula: abs(i - j) < stride or (i - j) % stride == 0, with i = q // block, j = kv // block
source: arXiv:1904.10509, sec. 4.3 (there with causal: 0 <= i - j)
specimen: strided(6)

    ####..#.
    #####..#        strided(3, block=1)
    ######..
    #######.
    .#######
    ..######
    #..#####
    .#..####
"""

from dataclasses import dataclass

from ..masks.fields import Positive
from ..masks.registry import register_pattern
from ..masks.rules import DistancePattern


@register_pattern("strided")
@dataclass(frozen=True)
class Strided(DistancePattern):
    """Units nearer than ``stride`` and units whose distance is a multiple of it. stride: units. block: tokens in a unit. The
    paper's stride counts tokens, ``block=1``, which leaves no block empty."""

    stride: Positive
    block: Positive = 128

    def distance_rule(self, distance):
        return (abs(distance) < self.stride) | (distance % self.stride == 0)
