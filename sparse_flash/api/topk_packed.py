"""topk_blocks of packed documents: each query chooses among the blocks of its own document."""

from __future__ import annotations

import torch

from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern, text_of
from ..packed.gather_rows import take_rows
from ..packed.repack import BLOCK
from ..selection import choice
from ..selection.packed_selection import PackedSelection, block_axis, bounds_of, places
from .arguments import check_packed, documents_of


def by_query(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int,
    block_size: int,
    always: Pattern | str | BlockMask | None,
    share_group: bool,
    score: str,
    cu_seqlens: torch.Tensor,
    longest: int | None,
) -> PackedSelection:
    """By queries and keys, see ``topk_blocks``."""
    check_packed(q, k, k)
    for name, tensor in (("q", q), ("k", k)):
        if 0 in tensor.shape:
            raise ValueError(f"{name} must not be empty where queries choose; got shape {tuple(tensor.shape)}")
    if len(q) != len(k):
        raise ValueError(f"packed queries choose among the keys of their own tokens; got {len(q)} queries and {len(k)} keys")
    side = documents_of("q", q, cu_seqlens, longest)
    place = places(side)
    axis = block_axis(side, place, block_size)
    keys = take_rows(k, axis.token_of_row, axis.row_of_token, 0.0, True).transpose(0, 1).unsqueeze(0)
    bounds = bounds_of(axis, place, block_size)
    keep = min(keep, -(-side.longest // block_size))
    picks = choice.choose_blocks(q.transpose(0, 1)[None], keys, keep, 1, block_size, share_group, score, bounds)
    picks = torch.where((picks < 0) | ~place.exists[:, None], -1, picks - bounds[:, :1])
    return PackedSelection(picks[0], side.cu_seqlens, side.longest, block_size, _checked(always, block_size))


def by_scores(
    scores: torch.Tensor,
    keep: int,
    block_size: int,
    always: Pattern | str | BlockMask | None,
    cu_seqlens: torch.Tensor,
    longest: int | None,
) -> PackedSelection:
    """By given scores, (kv_heads | heads, tokens, blocks of the longest document), see ``topk_blocks``."""
    if not isinstance(scores, torch.Tensor) or scores.dim() != 3 or 0 in scores.shape or not scores.is_floating_point():
        raise ValueError(
            "scores of packed documents must be a floating-point tensor of shape (kv_heads or heads, tokens, blocks of the longest "
            f"document), none of it 0; got {tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__}"
        )
    side = documents_of("q", scores.transpose(0, 1), cu_seqlens, longest)
    blocks = -(-side.longest // block_size)
    if blocks != scores.shape[2]:
        raise ValueError(
            f"a document of up to {side.longest} tokens has {blocks} blocks of {block_size} keys; got scores of {scores.shape[2]}, "
            f"shape {tuple(scores.shape)}; pass a max_seqlen_q= that fits"
        )
    place = places(side)
    bounds = torch.stack([torch.zeros_like(place.within), place.within // block_size], 1).to(torch.int32)
    picks = choice.choose_by_scores(scores[None], min(keep, blocks), 1, block_size, side.tokens, blocks * block_size, bounds)
    picks = torch.where(place.exists[:, None], picks, -1)
    return PackedSelection(picks[0], side.cu_seqlens, side.longest, block_size, _checked(always, block_size))


def _checked(always: Pattern | str | BlockMask | None, block_size: int) -> Pattern | str | None:
    """Raises ValueError or TypeError for what documents cannot always keep."""
    if not (always is None or isinstance(always, (Pattern, str))):
        raise TypeError(
            f"always of packed documents must be a Pattern or its spec text, for all lengths; got {type(always).__name__}"
        )
    if always is not None and block_size > BLOCK:
        raise ValueError(
            f"with always, blocks of packed documents have up to {BLOCK} keys; got block_size={block_size}; leave always out"
        )
    if isinstance(always, str):
        text_of(always)  # raises SpecError for text that cannot be read
    return always
