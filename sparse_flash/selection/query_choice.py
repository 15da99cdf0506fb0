"""``topk_blocks`` for each query: selections by queries and keys, by compressed keys or by given scores, of one sequence or of
packed documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..core.arguments import cast_for_autocast, check_tensors, check_types, stand_in_for_empty_batch
from ..core.operators import DEFAULT_BLOCK_SIZE
from ..core.variant import check_counts
from ..masks.block_mask import BlockMask, as_block_mask
from ..masks.chooser import check_keep
from ..masks.parsing import parse, text_of
from ..masks.pattern import Pattern
from ..packed.arguments import check_packed, to_documents
from ..packed.repack import BLOCK
from . import choice
from .block_selection import BlockSelection, always_table, check_every, check_selection_block
from .choice import COMPRESSED, SCORES
from .packed_selection import PackedSelection, block_axis, find_block_bounds, locate_tokens


@dataclass(frozen=True)
class QueryChoice:
    """How queries choose: arguments of ``topk_blocks``, checked. A function of (q, k)."""

    keep: int
    every: int = 1
    block_size: int = DEFAULT_BLOCK_SIZE
    always: Pattern | str | BlockMask | None = None
    share_group: bool = False
    score: str = "mean"

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> QueryChoice:
        """Raises TypeError or ValueError for arguments that ``topk_blocks`` does not take by query, by name."""
        names = [field.name for field in fields(cls)]
        unknown = [str(name) for name in arguments if name not in names]
        if unknown:
            raise TypeError(
                f"select takes {', '.join(names)}; got {', '.join(unknown)}; pass a function of (q, k) for other choices"
            )
        if "keep" not in arguments:
            raise TypeError("select needs keep, how many blocks each query attends to; got none; pass select={'keep': 16}")
        made = cls(**arguments)
        keep, every, block_size = check_choice(made.keep, made.every, made.block_size, made.score)
        if made.score == COMPRESSED:
            raise ValueError("score='softmax' reads compressed keys, and a layer makes none; pass a function of (q, k) that does")
        if isinstance(made.always, str):
            parse(made.always)
        elif not (made.always is None or isinstance(made.always, (Pattern, BlockMask))):
            as_block_mask(made.always)  # raises the error that lists the types of masks
        return replace(made, keep=keep, every=every, block_size=block_size)

    @torch.no_grad()
    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> BlockSelection:
        return select_by_query(*check_q_and_k(q, k), self)

    def selection(self, picks: torch.Tensor, q_len: int, kv_len: int) -> BlockSelection:
        table = always_table(self.always, q_len, kv_len, self.block_size, picks.device)
        return BlockSelection(picks, q_len, kv_len, self.block_size, self.every, True, table)


def check_q_and_k(q: torch.Tensor | None, k: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and k, cast as under autocast. Raises TypeError if one is missing or no tensor."""
    if q is None or k is None:
        raise TypeError("topk_blocks needs q and k, or scores=; got neither")
    check_types(q, k, k)
    return cast_for_autocast(q, k, k)[:2]


def select_by_query(q: torch.Tensor, k: torch.Tensor, how: QueryChoice) -> BlockSelection:
    """By queries and keys."""
    check_tensors(*stand_in_for_empty_batch(q, k, k))
    keep = min(how.keep, -(-k.shape[2] // how.block_size))
    picks = choice.choose_by_keys(q, k, keep, how.every, how.block_size, how.share_group, how.score)
    return how.selection(picks, q.shape[2], k.shape[2])


def select_by_compressed(
    q: torch.Tensor,
    k: torch.Tensor,
    how: QueryChoice,
    kv_len: int | None,
    compression: tuple[int, int] | None,
    lse: torch.Tensor | None,
) -> BlockSelection:
    """By queries and compressed keys."""
    # A sequence shorter than a compressed key's tokens has none.
    keys = k.new_empty(1).expand(*k.shape[:2], 1, k.shape[3]) if k.dim() == 4 and not k.shape[2] else k
    check_tensors(*stand_in_for_empty_batch(q, keys, keys))
    kv_len = q.shape[2] if kv_len is None else kv_len
    length, stride = check_compression(compression, k, lse, q, how.block_size, kv_len)
    keep = min(how.keep, -(-kv_len // how.block_size))
    logs = None if lse is None else lse[:, :, :: how.every]
    picks = choice.choose_by_compressed(q, k, keep, how.every, how.block_size, how.share_group, kv_len, length, stride, logs)
    return how.selection(picks, q.shape[2], kv_len)


def select_by_scores(scores: torch.Tensor, how: QueryChoice, q_len: int | None, kv_len: int | None) -> BlockSelection:
    """By given scores."""
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores must be a tensor; got {type(scores).__name__}")
    if scores.dim() != 4 or 0 in scores.shape[1:] or not scores.is_floating_point():
        raise ValueError(
            "scores must be of a floating-point type and shape (batch, kv_heads or heads, groups of queries, blocks of keys), none "
            f"of it 0 but the batch; got {scores.dtype} of shape {tuple(scores.shape)}"
        )
    q_len = scores.shape[2] * how.every if q_len is None else q_len
    kv_len = q_len if kv_len is None else kv_len
    check_counts(q_len=q_len, kv_len=kv_len)
    for name, length, size, of_scores, what in (
        ("q_len", q_len, how.every, scores.shape[2], f"groups of {how.every} queries"),
        ("kv_len", kv_len, how.block_size, scores.shape[3], f"blocks of {how.block_size} keys"),
    ):
        if -(-length // size) != of_scores:
            raise ValueError(
                f"{length} tokens are {-(-length // size)} {what}; got scores of {of_scores}, shape {tuple(scores.shape)}; pass a "
                f"{name}= that fits"
            )
    picks = choice.choose_by_scores(scores, min(how.keep, scores.shape[3]), how.every, how.block_size, q_len, kv_len)
    return how.selection(picks, q_len, kv_len)


def select_packed_by_query(
    q: torch.Tensor, k: torch.Tensor, how: QueryChoice, cu_seqlens: torch.Tensor, longest: int | None
) -> PackedSelection:
    """By queries and keys of packed documents, (tokens, heads, head_dim)."""
    check_packed(q, k, k)
    for name, tensor in (("q", q), ("k", k)):
        if 0 in tensor.shape:
            raise ValueError(f"{name} must not be empty where queries choose; got shape {tuple(tensor.shape)}")
    if len(q) != len(k):
        raise ValueError(f"packed queries choose among the keys of their own tokens; got {len(q)} queries and {len(k)} keys")
    side = to_documents("q", q, cu_seqlens, longest)
    place = locate_tokens(side)
    axis = block_axis(side, place, how.block_size)
    keys = axis.to_blocks(k)
    bounds = find_block_bounds(axis, place, how.block_size)
    keep = min(how.keep, -(-side.longest // how.block_size))
    picks = choice.choose_by_keys(q.transpose(0, 1)[None], keys, keep, 1, how.block_size, how.share_group, how.score, bounds)
    picks = torch.where((picks < 0) | ~place.exists[:, None], -1, picks - bounds[:, :1])
    return PackedSelection(picks[0], side.cu_seqlens, side.longest, how.block_size, _check_packed_always(how))


def select_packed_by_scores(
    scores: torch.Tensor, how: QueryChoice, cu_seqlens: torch.Tensor, longest: int | None
) -> PackedSelection:
    """By given scores, (kv_heads | heads, tokens, blocks of the longest document)."""
    if not isinstance(scores, torch.Tensor) or scores.dim() != 3 or 0 in scores.shape or not scores.is_floating_point():
        raise ValueError(
            "scores of packed documents must be a floating-point tensor of shape (kv_heads or heads, tokens, blocks of the longest "
            f"document), none of it 0; got {tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__}"
        )
    side = to_documents("q", scores.transpose(0, 1), cu_seqlens, longest)
    size = how.block_size
    blocks = -(-side.longest // size)
    if blocks != scores.shape[2]:
        raise ValueError(
            f"a document of up to {side.longest} tokens has {blocks} blocks of {size} keys; got scores of {scores.shape[2]}, "
            f"shape {tuple(scores.shape)}; pass a max_seqlen_q= that fits"
        )
    place = locate_tokens(side)
    bounds = torch.stack([torch.zeros_like(place.within), place.within // size], 1).to(torch.int32)
    picks = choice.choose_by_scores(scores[None], min(how.keep, blocks), 1, size, side.tokens, blocks * size, bounds)
    picks = torch.where(place.exists[:, None], picks, -1)
    return PackedSelection(picks[0], side.cu_seqlens, side.longest, size, _check_packed_always(how))


def _check_packed_always(how: QueryChoice) -> Pattern | str | None:
    """Raises ValueError or TypeError for what documents cannot always keep."""
    always, block_size = how.always, how.block_size
    if not (always is None or isinstance(always, (Pattern, str))):
        raise TypeError(f"always of packed documents must be a Pattern or its spec text; got {type(always).__name__}")
    if always is not None and block_size > BLOCK:
        raise ValueError(f"with always, packed blocks have up to {BLOCK} keys; got block_size={block_size}; leave always out")
    if isinstance(always, str):
        text_of(always)  # raises SpecError for text that cannot be read
    return always


def check_choice(keep: object, every: object, block_size: object, score: str) -> tuple[int, int, int]:
    """(keep, every, block_size). Raises TypeError or ValueError for arguments of ``topk_blocks`` by which no query can choose."""
    keep, every, block_size = check_keep(keep), check_every(every), check_selection_block(block_size)
    if isinstance(keep, float):
        raise TypeError(f"keep of a selection must be an int, how many blocks; got {keep}, a share; pass every=None for shares")
    if score not in (*SCORES, COMPRESSED):
        names = ", ".join(map(repr, (*SCORES, COMPRESSED)))
        raise ValueError(f"score must be one of {names}; got {score!r}; pass scores= for others")
    return keep, every, block_size


def check_compression(
    compression: object, k: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, block_size: int, kv_len: int
) -> tuple[int, int]:
    """(length, stride) of compressed keys. Raises TypeError or ValueError for what does not fit k or the block size."""
    if compression is None:
        compression = block_size, block_size
    if not (isinstance(compression, tuple) and len(compression) == 2 and all(type(number) is int for number in compression)):
        raise TypeError(
            "compression must be two ints, tokens of a compressed key and tokens from one to the next; got "
            f"{compression!r}; pass compression=(32, 16) for NSA's"
        )
    length, stride = compression
    if not (stride > 0 and length > 0 and length % stride == 0 and block_size % stride == 0):
        raise ValueError(f"compression=(length, stride): stride must divide length and blocks of {block_size}; got {compression}")
    check_counts(kv_len=kv_len)
    count = max(0, (kv_len - length) // stride + 1)
    if k.shape[2] != count:
        raise ValueError(
            f"{kv_len} tokens have {count} compressed keys of {length} tokens, {stride} from one to the next; got k of "
            f"{k.shape[2]}, shape {tuple(k.shape)}; pass kv_len= and compression= that fit"
        )
    if lse is not None and not (isinstance(lse, torch.Tensor) and lse.is_floating_point() and lse.device == q.device):
        found = f"{lse.dtype} on {lse.device}" if isinstance(lse, torch.Tensor) else type(lse).__name__
        raise TypeError(f"lse must be a floating-point tensor on {q.device}; got {found}")
    if lse is not None and lse.shape != q.shape[:3]:
        raise ValueError(f"lse must have shape {tuple(q.shape[:3])}, (batch, heads, q_len); got {tuple(lse.shape)}")
    return length, stride
