"""``topk_blocks`` for each query: by queries and keys, compressed keys or given scores, of one sequence or packed documents."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..core.arguments import cast_for_autocast, check_tensors, check_types, stand_in_for_empty_batch
from ..core.operators import DEFAULT_BLOCK_SIZE
from ..core.variant import check_counts
from ..masks.block_mask import BlockMask
from ..masks.chooser import check_keep
from ..masks.parsing import text_of
from ..masks.pattern import Pattern
from ..packed.arguments import check_packed, to_documents
from ..packed.documents import BLOCK
from .block_selection import BlockSelection, always_table, check_selection_block
from .choice import COMPRESSED, GIVEN, SCORES, BlockChoice, choose
from .packed_selection import PackedSelection, block_axis, find_block_bounds


@dataclass(frozen=True)
class QueryChoice:
    """How queries choose: arguments of ``topk_blocks``, checked. A function of (q, k)."""

    keep: int
    block_size: int = DEFAULT_BLOCK_SIZE
    always: Pattern | str | BlockMask | None = None
    share_group: bool = False
    score: str = "mean"

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Raises TypeError or ValueError for arguments that ``topk_blocks`` does not take by query."""
        made = cls(**{name: value for name, value in arguments.items() if (name, value) != ("every", 1)})
        keep, block_size = check_choice(made.keep, made.block_size, made.score)
        if made.score == COMPRESSED:
            raise ValueError("score='softmax' reads compressed keys, and a layer makes none; pass a function of (q, k) that does")
        return replace(made, keep=keep, block_size=block_size)

    @torch.no_grad()
    def __call__(self, q: Tensor, k: Tensor) -> BlockSelection:
        return select_by_query(*check_q_and_k(q, k), self)

    def heads(self, q: Tensor, k: Tensor) -> int:
        return k.shape[1] if self.share_group else q.shape[1]

    def selection(self, picks: Tensor, q_len: int, kv_len: int) -> BlockSelection:
        table = always_table(self.always, q_len, kv_len, self.block_size, picks.device)
        return BlockSelection(picks, q_len, kv_len, self.block_size, table)


def check_q_and_k(q: Tensor | None, k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns q and k, cast as under autocast. Raises TypeError if one is missing or no tensor."""
    if q is None or k is None:
        raise TypeError(f"topk_blocks needs q and k, or scores=; got {'no q' if q is None else 'q without k'}")
    check_types(q, k, k)
    return cast_for_autocast(q, k, k)[:2]


def select_by_query(q: Tensor, k: Tensor, how: QueryChoice) -> BlockSelection:
    """By queries and keys."""
    check_tensors(*stand_in_for_empty_batch(q, k, k))
    keep = min(how.keep, -(-k.shape[2] // how.block_size))
    picks = choose(BlockChoice(how.score, how.heads(q, k), keep, how.block_size, k.shape[2]), q, k)
    return how.selection(picks, q.shape[2], k.shape[2])


def select_by_compressed(
    q: Tensor, k: Tensor, how: QueryChoice, kv_len: int | None, compression: tuple[int, int] | None, lse: Any
) -> BlockSelection:
    """By queries and compressed keys."""
    # A sequence shorter than a compressed key's tokens has none.
    keys = k.new_empty(1).expand(*k.shape[:2], 1, k.shape[3]) if k.dim() == 4 and not k.shape[2] else k
    check_tensors(*stand_in_for_empty_batch(q, keys, keys))
    kv_len = q.shape[2] if kv_len is None else kv_len
    length, stride = check_compression(compression, k, how.block_size, kv_len)
    if not (isinstance(lse, Tensor) and lse.is_floating_point() and lse.device == q.device and lse.shape == q.shape[:3]):
        raise ValueError(
            f"score='softmax' needs the lse of q's attention to these keys, floating-point of shape {tuple(q.shape[:3])} on "
            f"{q.device}; got {_describe(lse)}; pass lse=, as attention(..., return_lse=True) returns it"
        )
    keep = min(how.keep, -(-kv_len // how.block_size))
    picks = choose(BlockChoice(COMPRESSED, how.heads(q, k), keep, how.block_size, kv_len, length, stride), q, k, lse=lse)
    return how.selection(picks, q.shape[2], kv_len)


def select_by_scores(scores: Tensor, how: QueryChoice, kv_len: int | None) -> BlockSelection:
    """By given scores."""
    if not isinstance(scores, Tensor) or scores.dim() != 4 or 0 in scores.shape[1:] or not scores.is_floating_point():
        raise ValueError(
            "scores must be a floating-point tensor of shape (batch, kv_heads or heads, q_len, blocks of keys), none of it 0 but "
            f"the batch; got {_describe(scores)}"
        )
    kv_len = scores.shape[2] if kv_len is None else kv_len
    check_counts(kv_len=kv_len)
    _check_blocks_of_scores("kv_len", kv_len, how.block_size, scores)
    picks = choose(BlockChoice(GIVEN, scores.shape[1], min(how.keep, scores.shape[3]), how.block_size, kv_len), scores)
    return how.selection(picks, scores.shape[2], kv_len)


def _describe(scores: object) -> str:
    return f"{scores.dtype} of {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__


def _check_blocks_of_scores(name: str, tokens: int, size: int, scores: Tensor) -> None:
    """Raises ValueError for scores of another number of blocks."""
    if -(-tokens // size) != scores.shape[-1]:
        raise ValueError(
            f"{tokens} tokens are {-(-tokens // size)} blocks of {size} keys; got scores of {scores.shape[-1]}, shape "
            f"{tuple(scores.shape)}; pass a {name}= that fits"
        )


def select_packed_by_query(q: Tensor, k: Tensor, how: QueryChoice, cu_seqlens: Tensor, longest: int | None) -> PackedSelection:
    """By queries and keys of packed documents, (tokens, heads, head_dim)."""
    check_packed(q, k, k)
    if len(q) != len(k) or 0 in (*q.shape, *k.shape):
        raise ValueError(
            f"packed queries choose among the keys of their own tokens, and of no tokens none chooses; got {len(q)} queries and "
            f"{len(k)} keys"
        )
    side = to_documents("q", q, cu_seqlens, longest)
    place = side.locate()
    axis = block_axis(side, how.block_size)
    keys = axis.to_blocks(k)
    bounds = find_block_bounds(axis, place, how.block_size)
    keep = min(how.keep, -(-side.longest // how.block_size))
    q = q.transpose(0, 1)[None]
    picks = choose(BlockChoice(how.score, how.heads(q, keys), keep, how.block_size, keys.shape[2]), q, keys, bounds=bounds)
    picks = torch.where(picks < 0, -1, picks - bounds[:, :1])
    return PackedSelection(picks[0], side.cu_seqlens, side.longest, how.block_size, _check_packed_always(how))


def select_packed_by_scores(scores: Tensor, how: QueryChoice, cu_seqlens: Tensor, longest: int | None) -> PackedSelection:
    """By given scores, (kv_heads | heads, tokens, blocks of the longest document)."""
    if not isinstance(scores, Tensor) or scores.dim() != 3 or 0 in scores.shape or not scores.is_floating_point():
        raise ValueError(
            "scores of packed documents must be a floating-point tensor of shape (kv_heads or heads, tokens, blocks of the longest "
            f"document), none of it 0; got {_describe(scores)}"
        )
    side = to_documents("q", scores.transpose(0, 1), cu_seqlens, longest)
    size, blocks = how.block_size, scores.shape[2]
    _check_blocks_of_scores("max_seqlen_q", side.longest, size, scores)
    place = side.locate()
    bounds = torch.stack([torch.zeros_like(place.within), place.within // size], 1).to(torch.int32)
    picks = choose(BlockChoice(GIVEN, len(scores), min(how.keep, blocks), size, blocks * size), scores[None], bounds=bounds)
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


def check_choice(keep: object, block_size: object, score: str) -> tuple[int, int]:
    """(keep, block_size). Raises TypeError or ValueError for arguments of ``topk_blocks`` by which no query can choose."""
    keep, block_size = check_keep(keep), check_selection_block(block_size)
    if isinstance(keep, float):
        raise TypeError(f"keep of a selection must be an int, how many blocks; got {keep}, a share; pass every=None for shares")
    if score not in (*SCORES, COMPRESSED):
        names = ", ".join(map(repr, (*SCORES, COMPRESSED)))
        raise ValueError(f"score must be one of {names}; got {score!r}; pass scores= for others")
    return keep, block_size


def check_compression(compression: tuple[int, int] | None, k: Tensor, block_size: int, kv_len: int) -> tuple[int, int]:
    """(length, stride) of compressed keys. Raises ValueError for what does not fit k or the block size."""
    length, stride = compression or (block_size, block_size)
    if not (stride > 0 and length > 0 and length % stride == 0 and block_size % stride == 0):
        raise ValueError(f"compression=(length, stride): stride must divide length and blocks of {block_size}; got {compression}")
    check_counts(kv_len=kv_len)
    count = max(0, (kv_len - length) // stride + 1)
    if k.shape[2] != count:
        raise ValueError(
            f"{kv_len} tokens have {count} compressed keys of {length} tokens, {stride} from one to the next; got k of "
            f"{k.shape[2]}, shape {tuple(k.shape)}; pass kv_len= and compression= that fit"
        )
    return length, stride
