"""from_blocks: whole units, kept where an array of zeros and ones says so.

use: a block map that you have, as measured on a model or chosen by hand
formula: array[i + rows - cols, j] == 1, with i = q // block, j = kv // block, (rows, cols) the array's shape
specimen: from_blocks("1000/1100/1010/1001", block=1024)

    #...
    ##..        from_blocks("1000/1100/1010/1001", block=1)
    #.#.
    #..#
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..masks.fields import Positive, set_fields
from ..masks.registry import register_pattern
from ..masks.rules import UnitPattern


@register_pattern("from_blocks")
@dataclass(frozen=True)
class FromBlocks(UnitPattern):
    """Units that an array keeps.

    blocks: (rows, cols) zeros and ones or booleans in nested lists, an array or a tensor, kept as text with a slash between
    rows: "110/011". block: tokens in a unit.

    The array's last row and column are one unit, as the last query has the position of the last key: in a wide array, with fewer
    queries than keys, the first row stands for unit cols - rows. The array must hold all units of the sequence; ``shifted`` places
    one among other tokens. For maps that change between calls, ``BlockMask.from_blocks`` makes the table itself.
    """

    blocks: str
    block: Positive = 128

    def __post_init__(self):
        set_fields(self, blocks=_as_text(self.blocks))
        super().__post_init__()

    @cached_property
    def _array(self) -> np.ndarray:
        return np.array([[digit == "1" for digit in row] for row in self.blocks.split("/")])

    def named_tokens(self):
        cols = self._array.shape[1]
        return (cols - 1) * self.block + 1, cols * self.block

    def unit_rule(self, i, j):
        rows, cols = self._array.shape
        row = i - (cols - rows)
        inside = (row >= 0) & (row < rows) & (j >= 0) & (j < cols)
        return inside & self._array[np.clip(row, 0, rows - 1), np.clip(j, 0, cols - 1)]


def _as_text(blocks) -> str:
    if isinstance(blocks, str):
        rows = blocks.split("/")
        if not rows[0] or any(len(row) != len(rows[0]) or set(row) - {"0", "1"} for row in rows):
            raise ValueError(f"from_blocks: text must be rows of 0 and 1 of one length, such as '110/011'; got {blocks[:60]!r}")
        return blocks
    array = np.array(blocks.tolist() if hasattr(blocks, "tolist") else blocks)
    if array.ndim != 2 or not array.size or not np.isin(array, (0, 1)).all():
        raise ValueError(
            f"from_blocks: blocks must be a (rows, cols) array of zeros and ones; got {array.dtype} of shape {array.shape}; "
            "for one map a head use BlockMask.per_head or BlockMask.from_blocks"
        )
    return "/".join("".join("01"[int(kept)] for kept in row) for row in array.tolist())
