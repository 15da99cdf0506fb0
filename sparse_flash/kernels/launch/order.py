"""The order in which programs take the rows of heads: how many heads run concurrently. Their heaviest rows come first.

The operands of few heads stay in the L2 cache. More heads leave fewer programs idle in the tail.
"""

import math
from functools import cache

from ..common.config import SECOND_AXIS

# Bytes of keys and values that stay in the L2 cache while programs iterate over them; the rest of the cache is for other data.
L2_BYTES = 16 << 20
# If rows keep at least this share of the blocks and a head has about sixteen programs, they read the same operands at about the
# same time. Then more bytes of operands may be in use.
MOSTLY_KEPT = 0.25
BYTES_IN_STEP, HEADS_IN_STEP = 4 * L2_BYTES, 8


def concurrent_heads(row_bytes: int, rows: int, mask, batch_heads: int, group: int = 1, by_key: bool = False) -> int:
    """Returns the number of batch-heads in a group of the queue: as many as have operands that fit the L2 cache together, or down
    to half of that if the last group is then fuller.

    row_bytes: of a row, the mean of both operands of the loop. rows: of an operand. group: query heads of a key head.
    Under documents, and in the backward pass (by_key) if the operands of one key head just fit, a group has at least two key heads.
    If rows keep a large share of blocks, it has two to eight batch-heads, so that all programs stay busy in the tail (up to 24 %:
    docs/performance/kernels.md). With scattered blocks, heads would evict each other's operands.
    """
    of_head = 2 * rows * row_bytes
    fitting, units = L2_BYTES // of_head, batch_heads // group
    two = (by_key and fitting == 1) or (mask is not None and mask.document_order)
    most = max(2 if two else 1, fitting)
    if units <= most:
        return batch_heads
    if _mostly_kept(mask, rows, by_key):
        most = max(most, -(-2 // group), min(-(-HEADS_IN_STEP // group), BYTES_IN_STEP // of_head))
        return -(-units // max(1, units // most)) * group
    # From half of the most on, the number that leaves the fullest last group.
    return max(range(-(-most // 2), most + 1), key=lambda number: (((units - 1) % number + 1) / number, number)) * group


def concurrent_grid_heads(bytes_of_head: int, rows: int, mask, batch_heads: int, by_key: bool = False) -> int:
    """Returns how many batch-heads run concurrently in a grid. If rows keep a large share of blocks: the divisor of ``batch_heads``
    nearest to eight whose operands, ``bytes_of_head`` each, fit the limit. Otherwise one, or more if the second axis of the grid
    would be too long. rows: tokens that a program may iterate over."""
    least = _least_divisor(batch_heads)
    if not _mostly_kept(mask, rows, by_key):
        return least
    most = max(least, min(batch_heads, 2 * HEADS_IN_STEP, BYTES_IN_STEP // bytes_of_head))
    divisors = [number for number in range(least, most + 1) if batch_heads % number == 0]
    return min(divisors, key=lambda number: abs(math.log(number / HEADS_IN_STEP)))


@cache
def _least_divisor(batch_heads: int) -> int:
    """The smallest divisor that keeps the second axis of a grid within its limit."""
    return next(batch_heads // number for number in range(min(batch_heads, SECOND_AXIS), 0, -1) if batch_heads % number == 0)


def _mostly_kept(mask, rows: int, by_key: bool) -> bool:
    """Whether rows visit a large share of the blocks on average, as far as the host knows."""
    if mask is None or mask.starts is not None or not mask.from_host:
        return False
    table = mask.by_key if by_key else mask.by_query
    return table.col_idx.numel() >= MOSTLY_KEPT * table.row_order.numel() * -(-rows // mask.block_size)
