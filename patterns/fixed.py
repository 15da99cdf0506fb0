"""fixed: segments of stride units; each segment's last units, its summary, are seen from everywhere.

use: long text and pixels generated token by token: own segment and summaries of the earlier ones
formula: i // stride == j // stride or j % stride >= stride - summary, with i = q // block, j = kv // block
source: arXiv:1904.10509, sec. 4.3 (stride is its l, summary its c; there with causal)
specimen: fixed(6)

    ###..#..#
    ###..#..#        fixed(3, block=1)
    ###..#..#
    ..####..#
    ..####..#
    ..####..#
    ..#..####
    ..#..####
    ..#..####
"""

from dataclasses import dataclass

from ..masks.fields import Positive
from ..masks.registry import register_pattern
from ..masks.rules import UnitPattern


@register_pattern("fixed")
@dataclass(frozen=True)
class Fixed(UnitPattern):
    """A unit sees its own segment and the summary units of all segments. stride: units in a segment. summary: how many units at a
    segment's end are seen from everywhere, at most stride. block: tokens in a unit."""

    stride: Positive
    summary: Positive = 1
    block: Positive = 128

    def __post_init__(self):
        super().__post_init__()
        if self.summary > self.stride:
            raise ValueError(f"fixed: summary must be at most stride={self.stride}; got {self.summary}; full() keeps everything")

    @property
    def shift_period(self):
        return self.stride * self.block

    def unit_rule(self, i, j):
        return (i // self.stride == j // self.stride) | (j % self.stride >= self.stride - self.summary)
