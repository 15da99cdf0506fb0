"""topk_blocks: which blocks each head visits, chosen from its queries and keys while the model runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ..masks.block_mask import BlockMask
from ..masks.cache import as_block_mask, is_recorded, one_mask
from ..masks.grid import BlockGrid
from ..masks.memory import remembered
from ..masks.pattern import Pattern
from .arguments import DEFAULT_BLOCK_SIZE, check_keep, check_tensors

_ROUNDING = 1e-6  # 0.07 * 100 is 7.000000000000001, and must not become 8


@torch.no_grad()
def topk_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int | float,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    within: Pattern | str | BlockMask | None = "causal",
    always: Pattern | str | BlockMask | None = None,
    share_group: bool = False,
) -> BlockMask:
    """A mask per head that keeps the blocks that matter most to it, scored by mean queries and mean keys.

    Queries and keys are averaged per block, in float32 (a partial last block over its own tokens). For each block of queries, the
    ``keep`` blocks of keys whose means score highest are kept, and in them the pairs that ``within`` keeps. Some blocks are
    always kept, even beyond ``keep``, and count first: the queries' own block (when the numbers of queries and keys differ, the two
    blocks that the queries' positions fall in), and each block in which ``always`` keeps a pair; both only where ``within`` keeps a
    pair. So a query that ``within`` lets see itself always does.

    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim), kv_heads dividing heads. As for ``attention``,
    the last query is aligned with the last key.
    keep: how many blocks per row; or a float in (0, 1], the share of the row's blocks that ``within`` keeps, rounded up.
    block_size: tokens on a side of a block, a power of two in 16..256.
    within: the pairs that may be kept: causal by default, None for all; a Pattern, its spec text or a BlockMask of one mask, with
    these lengths and this block size.
    always: blocks that are always kept, e.g. "sinks(4) | local(256)"; same types as ``within``.
    share_group: choose once for the query heads that share keys, by the mean of their scores.

    Returns a BlockMask of (batch, heads) on q's device, to pass to ``attention`` with the same q and k. The choice is not
    differentiated. Launches only tensor operations of fixed shapes: no host synchronization, safe under CUDA graphs, provided that
    patterns were used once with these lengths before the capture (see ``BlockMask.from_blocks``).

    A query sees only what ``within`` allows. Under causal, later keys do not influence the choice of its blocks: the only block
    with later keys is its own, which is always kept. But all queries of a block share one choice, which therefore depends on later
    queries of the block, as in the sources. This does not matter for a known prompt; in training, a choice, though no value, may
    depend on tokens up to block_size - 1 later.

    Raises ValueError for arguments that do not fit together, TypeError for wrong types.

    Sources: arXiv:2407.02490 (block-sparse heads: mean-pooled queries and keys, top-k blocks); arXiv:2502.11089 (one choice
    for the query heads that share keys).
    """
    check_tensors(q, k, k)
    check_keep(keep)
    grid = BlockGrid(q.shape[2], k.shape[2], block_size)
    for mask in (within, always):
        if not (mask is None or isinstance(mask, (Pattern, str, BlockMask))):
            as_block_mask(mask)  # raises the error that lists the types of masks
    # What does not depend on the input is computed once for patterns; a BlockMask may differ on each call.
    lasts = not isinstance(within, BlockMask) and not isinstance(always, BlockMask) and not is_recorded(q.device)
    limits = (_cached_limits if lasts else _limits)(within, always, grid, q.device)
    group = q.shape[1] // k.shape[1]
    queries = _block_means(q, block_size).unflatten(1, (-1, group))
    queries = queries.mean(2) if share_group else queries.flatten(2, 3)
    scores = queries @ _block_means(k, block_size).mT
    if not share_group:
        scores = scores.unflatten(2, (group, -1)).flatten(1, 2)
    mask = BlockMask.from_blocks(_highest(scores, keep, limits), block_size, grid.q_len, grid.kv_len, within=within)
    return replace(mask, mask_index=mask.mask_index.repeat_interleave(group, 1)) if share_group else mask


class _Limits(NamedTuple):
    """The part of the choice that does not depend on queries and keys.

    forced: (q_blocks, kv_blocks) bool, always kept. bias: (q_blocks, kv_blocks) float32, added to scores: inf where forced, -inf
    where nothing may be kept, else 0. allowed: (q_blocks, 1) float64, how many blocks may be kept.
    """

    forced: torch.Tensor
    bias: torch.Tensor
    allowed: torch.Tensor


def _limits(
    within: Pattern | str | BlockMask | None, always: Pattern | str | BlockMask | None, grid: BlockGrid, device: torch.device
) -> _Limits:
    row = torch.arange(grid.q_blocks, device=device)[:, None] * grid.block_size
    col = torch.arange(grid.kv_blocks, device=device)
    first, last = row + grid.offset, (row + grid.block_size - 1).clamp(max=grid.q_len - 1) + grid.offset
    # Positions before the first key also round down, to blocks that do not exist.
    forced = (col >= first.div(grid.block_size, rounding_mode="floor")) & (col <= last.div(grid.block_size, rounding_mode="floor"))
    if always is not None:
        forced = forced | one_mask("always", always, grid, device).kept_blocks()
    allowed = torch.ones_like(forced) if within is None else one_mask("within", within, grid, device).kept_blocks()
    forced = forced & allowed
    bias = torch.zeros(grid.shape, device=device).masked_fill(~allowed, -math.inf).masked_fill(forced, math.inf)
    return _Limits(forced, bias, allowed.sum(1, keepdim=True, dtype=torch.float64))


_cached_limits = remembered(maxsize=64)(_limits)


def _block_means(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """(batch, heads, blocks, head_dim) means over the tokens of each block, in float32 or x's dtype if that is wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    whole = x.shape[2] // block_size
    means = x[:, :, : whole * block_size].unflatten(2, (whole, block_size)).mean(3, dtype=dtype)
    rest = x[:, :, whole * block_size :]
    return torch.cat([means, rest.mean(2, keepdim=True, dtype=dtype)], 2) if rest.shape[2] else means


def _highest(scores: torch.Tensor, keep: int | float, limits: _Limits) -> torch.Tensor:
    """(batch, heads, q_blocks, kv_blocks) bool: the blocks to keep. Includes disallowed blocks where fewer than ``keep`` are
    allowed."""
    share, blocks = isinstance(keep, float), scores.shape[3]
    most = min(keep, blocks) if isinstance(keep, int) else max(1, math.ceil(keep * blocks - _ROUNDING))
    best = (scores + limits.bias).topk(most, dim=3, sorted=share).indices
    taken = torch.zeros_like(scores, dtype=torch.bool)
    if share:
        count = torch.ceil(keep * limits.allowed - _ROUNDING)
        taken.scatter_(3, best, (torch.arange(most, device=scores.device) < count).expand(best.shape))
    else:
        taken.scatter_(3, best, True)
    return taken | limits.forced
