"""topk_blocks: which blocks each head visits, chosen from its queries and keys while the model runs: for blocks of queries, or for
each query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, overload

import torch

from ..backends.torch import own_precision
from ..masks.block_mask import BlockMask
from ..masks.cache import as_block_mask, is_recorded, one_mask
from ..masks.grid import BlockGrid
from ..masks.memory import remembered
from ..masks.pattern import Pattern, parse
from ..selection import choice
from ..selection.block_selection import BlockSelection, always_table
from ..selection.choice import COMPRESSED, block_means
from ..selection.packed_selection import PackedSelection
from ..variant.variant import check_counts
from .arguments import (
    DEFAULT_BLOCK_SIZE,
    autocast,
    check_tensors,
    check_types,
    checked_choice,
    checked_compression,
    checked_keep,
    of_some_batch,
)
from .topk_packed import by_query, by_scores

_EITHER = "scores take the place of q, k, score= and share_group=; pass either"
_OF_COMPRESSED = "compression and lse are of compressed keys; pass score='softmax' as well, or leave them out"
_ROUNDING = 1e-6  # 0.07 * 100 is 7.000000000000001, and must not become 8


@overload
def topk_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int | float,
    *,
    every: None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    within: Pattern | str | BlockMask | None = "causal",
    always: Pattern | str | BlockMask | None = None,
    share_group: bool = False,
) -> BlockMask: ...


@overload
def topk_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int,
    *,
    every: int,
    block_size: int = DEFAULT_BLOCK_SIZE,
    always: Pattern | str | BlockMask | None = None,
    share_group: bool = False,
    score: str = "mean",
) -> BlockSelection: ...


@overload
def topk_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int,
    *,
    every: int,
    block_size: int = DEFAULT_BLOCK_SIZE,
    always: Pattern | str | BlockMask | None = None,
    share_group: bool = False,
    score: Literal["softmax"],
    kv_len: int | None = None,
    compression: tuple[int, int] | None = None,
    lse: torch.Tensor | None = None,
) -> BlockSelection: ...


@overload
def topk_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int | None = None,
    every: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    always: Pattern | str | None = None,
    share_group: bool = False,
    score: str = "mean",
) -> PackedSelection: ...


@overload
def topk_blocks(
    *,
    scores: torch.Tensor,
    keep: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int | None = None,
    every: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    always: Pattern | str | None = None,
) -> PackedSelection: ...


@overload
def topk_blocks(
    *,
    scores: torch.Tensor,
    keep: int,
    every: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    always: Pattern | str | BlockMask | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
) -> BlockSelection: ...


@torch.no_grad()
def topk_blocks(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    keep: Any = None,  # None is an error that says what it must be
    *,
    every: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    within: Pattern | str | BlockMask | None = "causal",
    always: Pattern | str | BlockMask | None = None,
    share_group: bool = False,
    score: str = "mean",
    scores: torch.Tensor | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    compression: tuple[int, int] | None = None,
    lse: torch.Tensor | None = None,
) -> BlockMask | BlockSelection | PackedSelection:
    """The blocks of keys that matter most, chosen by scores: a mask for blocks of queries, or a selection for each query.

    With every=None, blocks of queries choose, and the result is a BlockMask:

    Queries and keys are averaged per block, in float32 (a partial last block over its own tokens). For each block of queries, the
    ``keep`` blocks of keys whose means score highest are kept, and in them the pairs that ``within`` keeps. Some blocks are
    always kept, even beyond ``keep``, and count first: the queries' own block (when the numbers of queries and keys differ, the two
    blocks that the queries' positions fall in), and each block in which ``always`` keeps a pair; both only where ``within`` keeps a
    pair. So a query that ``within`` lets see itself always does.

    With an int, groups of that many queries choose, and the result is a BlockSelection, which is causal:

    A query keeps its own block up to itself; the pairs that ``always`` keeps, to the token; and the best of the blocks that end
    before its own begins. A group's first query chooses for it. ``keep`` counts that query's own block and the best ones, not
    ``always``; other blocks in which the group has queries come on top. Of equal scores the first block is kept. No pick depends on
    a token after the group's first query, nor does what a query sees depend on later tokens.

    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim), kv_heads dividing heads. As for ``attention``,
    the last query is aligned with the last key.
    keep: how many blocks; with every=None also a float in (0, 1], the share of the row's blocks that ``within`` keeps, rounded up.
    every: None, or how many queries share a choice, 1 to 128, counted from the first query.
    block_size: keys of a block, and queries with every=None: a power of two in 16..256; of a selection also 512.
    within: with every=None, the pairs that may be kept: causal by default, None for all; a Pattern, its spec text or a BlockMask of
    one mask, with these lengths and this block size.
    always: what is always kept, e.g. "sinks(4) | local(256)"; same types as ``within``.
    share_group: choose once for the query heads that share keys, by the mean of their scores.
    score: of a selection, "mean", products of queries with mean keys; "max", a query's largest product with a key of the block; or
    "softmax", the weight that attention to compressed keys gives to the block's tokens, at scale 1 / sqrt(head_dim), summed over
    the query heads that share a choice. k is then (batch, kv_heads, n, head_dim), the compressed keys, and kv_len the tokens that
    they are of, q_len by default.
    compression: of compressed keys, (length, stride), the block size for both by default; stride divides length and block_size.
    Key i is of the tokens from i * stride to i * stride + length - 1; keys are those whose tokens all exist. A query reads the ones
    with no token after it. One that has tokens in several blocks counts for each by its strides there.
    lse: (batch, heads, q_len), natural, of q's attention to these compressed keys, where it is known; else it is computed.
    scores: in place of q and k, those of an indexer: (batch, kv_heads | heads, ceil(q_len / every), blocks of keys),
    floating-point; -inf and NaN are never chosen. every is then 1 by default. q_len, kv_len: of such a selection, in tokens: groups
    x every and q_len by default.
    cu_seqlens_q, max_seqlen_q: of packed documents, as for ``attention_varlen``; keys share the documents of the queries. q and k
    are then (tokens, heads or kv_heads, head_dim), and scores (kv_heads | heads, tokens, blocks of max_seqlen_q keys). every is 1.
    always is a Pattern or its spec text, in blocks of up to 128 keys. Each document chooses as it would alone: its blocks begin at
    its first token.

    Returns a BlockMask of (batch, heads), of (1, heads) for a batch of 0, or a BlockSelection of (batch, kv_heads | heads), on q's
    device, to pass to ``attention`` with the same q and k; of packed documents a PackedSelection, for ``attention_varlen``. The
    choice is not differentiated. Launches only tensor operations and kernels of fixed shapes: no host synchronization, safe under
    CUDA graphs, provided that patterns were used once with these lengths before the capture (see ``BlockMask.from_blocks``). A
    selection's choice streams: no tensor of all queries and blocks is made. Under activation checkpointing see ``keep_picks``.

    Of a mask under causal, later keys do not influence the choice of blocks: the only block with later keys is the queries' own,
    which is always kept. But all queries of a block share one choice, which therefore depends on later queries of the block, as in
    the sources. This does not matter for a known prompt; in training, a choice, though no value, may depend on tokens up to
    block_size - 1 later. A selection has no such dependence.

    Under autocast, q and k are cast as for ``attention``; products are computed as without it.

    Raises ValueError for arguments that do not fit together, TypeError for wrong types.

    Sources: arXiv:2407.02490 (block-sparse heads: mean-pooled queries and keys, top-k blocks); arXiv:2502.11089 (one choice
    for the query heads that share keys; blocks by query); arXiv:2502.13189 (mean keys by query); arXiv:2606.13392 (the maximum).
    """
    keep = checked_keep(keep)
    if cu_seqlens_q is not None:
        if not (isinstance(within, str) and within == "causal" and q_len is None and kv_len is None):
            raise ValueError("within, q_len and kv_len are of one sequence; leave them out where cu_seqlens_q tells the documents")
        if score == COMPRESSED or compression is not None or lse is not None:
            raise ValueError(
                "compressed keys are of one sequence; packed documents choose by score='mean', 'max' or by scores= of your own"
            )
        keep, _, block_size = checked_choice(keep, 1 if every is None else every, block_size, score)
        if every not in (None, 1):
            raise ValueError(f"packed documents choose for each query; got every={every}, whose groups would cross documents")
        if scores is None:
            q, k = _both(q, k)
            return by_query(q, k, keep, block_size, always, share_group, score, cu_seqlens_q, max_seqlen_q)
        if q is not None or k is not None or share_group or score != "mean":
            raise ValueError(_EITHER)
        return by_scores(scores, keep, block_size, always, cu_seqlens_q, max_seqlen_q)
    if max_seqlen_q is not None:
        raise ValueError("max_seqlen_q is of packed documents; pass cu_seqlens_q as well")
    if score != COMPRESSED and (compression is not None or lse is not None):
        raise ValueError(_OF_COMPRESSED)
    if scores is None and every is None:
        given = {"score": score != "mean", "q_len": q_len is not None, "kv_len": kv_len is not None}
        if any(given.values()):
            raise ValueError(f"{', '.join(name for name in given if given[name])} is of a selection by query; pass every=1 as well")
        return _by_blocks(*_both(q, k), keep, block_size, within, always, share_group)
    keep, shared, block_size = checked_choice(keep, 1 if every is None else every, block_size, score)
    if not (isinstance(within, str) and within == "causal"):
        raise ValueError(
            "a selection is causal; within is for every=None: leave it out, and pass always= for pairs to keep in any case"
        )
    if scores is None:
        q, k = _both(q, k)
        if q_len is not None or (kv_len is not None and score != COMPRESSED):
            raise ValueError("q_len and kv_len are those of q and k; pass them with scores= alone")
        if score == COMPRESSED:
            return _by_compressed(q, k, keep, shared, block_size, always, share_group, kv_len, compression, lse)
        return _by_query(q, k, keep, shared, block_size, always, share_group, score)
    if q is not None or k is not None or share_group or score != "mean":
        raise ValueError(_EITHER)
    return _by_scores(scores, keep, shared, block_size, always, q_len, kv_len)


@dataclass(frozen=True)
class QueryChoice:
    """``topk_blocks`` by query with these arguments, checked: a function of (q, k)."""

    keep: int
    every: int = 1
    block_size: int = DEFAULT_BLOCK_SIZE
    always: Pattern | str | BlockMask | None = None
    share_group: bool = False
    score: str = "mean"

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> QueryChoice:
        """Raises TypeError or ValueError for arguments that ``topk_blocks`` does not take by query, by name."""
        names = [field.name for field in fields(cls)]
        unknown = [str(name) for name in arguments if name not in names]
        if unknown:
            raise TypeError(
                f"select takes {', '.join(names)}; got {', '.join(unknown)}; pass a function of (q, k) for choices of your own"
            )
        if "keep" not in arguments:
            raise TypeError("select needs keep, how many blocks each query attends to; got none; pass select={'keep': 16}")
        choice = cls(**arguments)
        keep, every, block_size = checked_choice(choice.keep, choice.every, choice.block_size, choice.score)
        choice = replace(choice, keep=keep, every=every, block_size=block_size)
        if choice.score == COMPRESSED:
            raise ValueError(
                "score='softmax' reads compressed keys, and a layer makes none; pass a function of (q, k) that makes them"
            )
        if isinstance(choice.always, str):
            parse(choice.always)
        elif not (choice.always is None or isinstance(choice.always, (Pattern, BlockMask))):
            as_block_mask(choice.always)  # raises the error that lists the types of masks
        return choice

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> BlockSelection:
        options = {"block_size": self.block_size, "always": self.always, "share_group": self.share_group, "score": self.score}
        return topk_blocks(q, k, self.keep, every=self.every, **options)  # type: ignore[call-overload]

    @property
    def is_by_means(self) -> bool:
        """Whether a step of decoding can choose by means that are kept, see ``BlockMeans``."""
        return self.score == "mean" and self.every == 1 and self.always is None


def _both(q: torch.Tensor | None, k: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if q is None or k is None:
        raise TypeError("topk_blocks needs q and k, or scores=; got neither")
    check_types(q, k, k)
    return autocast(q, k, k)[:2]


def _by_query(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int,
    every: int,
    block_size: int,
    always: Pattern | str | BlockMask | None,
    share_group: bool,
    score: str,
) -> BlockSelection:
    check_tensors(*of_some_batch(q, k, k))
    keep = min(keep, -(-k.shape[2] // block_size))
    picks = choice.choose_blocks(q, k, keep, every, block_size, share_group, score)
    return _selection(picks, q.shape[2], k.shape[2], block_size, every, always)


def _by_compressed(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int,
    every: int,
    block_size: int,
    always: Pattern | str | BlockMask | None,
    share_group: bool,
    kv_len: int | None,
    compression: tuple[int, int] | None,
    lse: torch.Tensor | None,
) -> BlockSelection:
    # Of a sequence shorter than a compressed key's tokens there is none.
    keys = k.new_empty(1).expand(*k.shape[:2], 1, k.shape[3]) if k.dim() == 4 and not k.shape[2] else k
    check_tensors(*of_some_batch(q, keys, keys))
    kv_len = q.shape[2] if kv_len is None else kv_len
    length, stride = checked_compression(compression, k, lse, q, block_size, kv_len)
    keep = min(keep, -(-kv_len // block_size))
    logs = None if lse is None else lse[:, :, ::every]
    picks = choice.choose_by_compressed(q, k, keep, every, block_size, share_group, kv_len, length, stride, logs)
    return _selection(picks, q.shape[2], kv_len, block_size, every, always)


def _by_scores(
    scores: torch.Tensor,
    keep: int,
    every: int,
    block_size: int,
    always: Pattern | str | BlockMask | None,
    q_len: int | None,
    kv_len: int | None,
) -> BlockSelection:
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores must be a tensor; got {type(scores).__name__}")
    if scores.dim() != 4 or 0 in scores.shape[1:] or not scores.is_floating_point():
        raise ValueError(
            "scores must be of a floating-point type and shape (batch, kv_heads or heads, groups of queries, blocks of keys), none "
            f"of it 0 but the batch; got {scores.dtype} of shape {tuple(scores.shape)}"
        )
    q_len = scores.shape[2] * every if q_len is None else q_len
    kv_len = q_len if kv_len is None else kv_len
    check_counts(q_len=q_len, kv_len=kv_len)
    for name, length, size, of_scores, what in (
        ("q_len", q_len, every, scores.shape[2], f"groups of {every} queries"),
        ("kv_len", kv_len, block_size, scores.shape[3], f"blocks of {block_size} keys"),
    ):
        if -(-length // size) != of_scores:
            raise ValueError(
                f"{length} tokens are {-(-length // size)} {what}; got scores of {of_scores}, shape {tuple(scores.shape)}; pass a "
                f"{name}= that fits"
            )
    picks = choice.choose_by_scores(scores, min(keep, scores.shape[3]), every, block_size, q_len, kv_len)
    return _selection(picks, q_len, kv_len, block_size, every, always)


def _selection(
    picks: torch.Tensor, q_len: int, kv_len: int, block_size: int, every: int, always: Pattern | str | BlockMask | None
) -> BlockSelection:
    table = always_table(always, q_len, kv_len, block_size, picks.device)
    return BlockSelection(picks, q_len, kv_len, block_size, every, True, table)


def _by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    keep: int | float,
    block_size: int,
    within: Pattern | str | BlockMask | None,
    always: Pattern | str | BlockMask | None,
    share_group: bool,
) -> BlockMask:
    if q.shape[:1] == k.shape[:1] == (0,):  # no sequence: a mask of batch 1 fits that, and tables hold one at least
        q, k = (x.new_zeros(1, *x.shape[1:]) for x in (q, k))
    check_tensors(q, k, k)
    grid = BlockGrid(q.shape[2], k.shape[2], block_size)
    for mask in (within, always):
        if not (mask is None or isinstance(mask, (Pattern, str, BlockMask))):
            as_block_mask(mask)  # raises the error that lists the types of masks
    # What does not depend on the input is computed once for patterns; a BlockMask may differ on each call.
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
