"""block_diagonal: chunks of equal length; a token sees its own chunk.

use: chunks of equal length that are read apart: batches packed on one axis, windows of frames or patches
formula: q // block == kv // block
source: arXiv:1904.10509, sec. 4.3 (the first half of "fixed")
specimen: block_diagonal(512)

    ##..
    ##..        block_diagonal(block=2)
    ..##
    ..##
"""

from dataclasses import dataclass

from ..masks.fields import Positive
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("block_diagonal")
@dataclass(frozen=True)
class BlockDiagonal(RunPattern):
    """Tokens of one chunk. block: tokens in a chunk. For chunks of different lengths use ``documents``."""

    block: Positive = 128

    @property
    def shift_period(self):
        return self.block

    def row_runs(self, q):
        first = q[..., None] // self.block * self.block
        return first, first + self.block
