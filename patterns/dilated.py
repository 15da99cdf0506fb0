"""dilated: a sliding window with gaps.

use: long audio, series and text, where a window must reach further at the same cost
formula: abs(i - j) < window * dilation and (i - j) % dilation == 0, with i = q // block, j = kv // block
source: arXiv:2004.05150, sec. 3.1
specimen: dilated(4, 3)

    #.#.....
    .#.#....        dilated(2, 2, block=1)
    #.#.#...
    .#.#.#..
    ..#.#.#.
    ...#.#.#
    ....#.#.
    .....#.#
"""

from dataclasses import dataclass

from ..masks.fields import Positive
from ..masks.registry import register_pattern
from ..masks.rules import DistancePattern


@register_pattern("dilated")
@dataclass(frozen=True)
class Dilated(DistancePattern):
    """Every dilation-th unit of a window. window: units seen to each side, the unit itself included. dilation: units from one to
    the next. block: tokens in a unit. With a dilation in tokens, ``block=1``, no block of the window is empty."""

    window: Positive
    dilation: Positive
    block: Positive = 128

    def distance_rule(self, distance):
        return (abs(distance) < self.window * self.dilation) & (distance % self.dilation == 0)
