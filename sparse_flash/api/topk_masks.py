"""``topk_blocks`` for blocks of queries: a mask of the blocks of keys that each keeps."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends.torch import block_means, own_precision
from ..choosers.choose import mask_by_scores
from ..masks.block_mask import BlockMask
from ..masks.grid import BlockGrid
from ..masks.pattern import Pattern
from .arguments import check_tensors, of_some_batch


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
    q, k, _ = of_some_batch(q, k, k)
    check_tensors(q, k, k)
    grid, group = BlockGrid(q.shape[2], k.shape[2], block_size), q.shape[1] // k.shape[1]
    queries = block_means(q, block_size).unflatten(1, (-1, group))
    queries = queries.mean(2, keepdim=True) if share_group else queries
    with own_precision(q):
        scores = queries.flatten(2, 3) @ block_means(k, block_size).mT
    mask = mask_by_scores(scores.unflatten(2, queries.shape[2:4]).flatten(1, 2), grid, within, always, keep)
    return replace(mask, mask_index=mask.mask_index.repeat_interleave(group, 1)) if share_group else mask
