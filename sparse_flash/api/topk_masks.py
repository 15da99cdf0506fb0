"""``topk_blocks`` for blocks of queries: a mask of the blocks of keys that each keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ..backends.torch import own_precision
from ..choosers.choose import limits_of
from ..compat.pytorch import is_recorded
from ..masks.block_mask import BlockMask
from ..masks.cache import as_block_mask
from ..masks.grid import BlockGrid
from ..masks.memory import remembered
from ..masks.pattern import Pattern
from ..selection.choice import block_means
from .arguments import check_tensors

_ROUNDING = 1e-6  # 0.07 * 100 is 7.000000000000001, and must not become 8


def choose_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int | float,
    block_size: int,
    within: Pattern | str | BlockMask | None,
    always: Pattern | str | BlockMask | None,
    share_group: bool,
) -> BlockMask:
    """See ``topk_blocks``."""
    if q.shape[:1] == k.shape[:1] == (0,):  # no sequence: a mask of batch 1 fits that, and tables hold one at least
        q, k = (x.new_zeros(1, *x.shape[1:]) for x in (q, k))
    check_tensors(q, k, k)
    grid = BlockGrid(q.shape[2], k.shape[2], block_size)
    for mask in (within, always):
        if not (mask is None or isinstance(mask, (Pattern, str, BlockMask))):
            as_block_mask(mask)  # raises the error that lists the types of masks
    # The limits of patterns do not depend on the input and are computed once; a BlockMask may differ on each call.
    lasts = not isinstance(within, BlockMask) and not isinstance(always, BlockMask) and not is_recorded(q.device)
    limits = (_cached_limits if lasts else _limits)(within, always, grid, q.device)
    group = q.shape[1] // k.shape[1]
    queries = block_means(q, block_size).unflatten(1, (-1, group))
    queries = queries.mean(2) if share_group else queries.flatten(2, 3)
    with own_precision(q):
        scores = queries @ block_means(k, block_size).mT
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
    allowed, forced = limits_of(within, always, grid, device)
    bias = torch.zeros(grid.shape, device=device).masked_fill(~allowed, -math.inf).masked_fill(forced, math.inf)
    return _Limits(forced, bias, allowed.sum(1, keepdim=True, dtype=torch.float64))


_cached_limits = remembered(maxsize=64)(_limits)


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
