"""topk_blocks: chooses the blocks of keys that score highest, for blocks of queries or for each query."""

from typing import Any

import torch

from ..choosers.choose import mask_by_means
from ..core.operators import DEFAULT_BLOCK_SIZE
from ..masks.block_mask import BlockMask
from ..masks.chooser import check_keep
from ..masks.pattern import Pattern
from ..selection import query_choice
from ..selection.choice import COMPRESSED


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
    kv_len: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    compression: tuple[int, int] | None = None,
    lse: torch.Tensor | None = None,
) -> Any:  # as the docstring says; a union of the three would need a cast at each call
    """Chooses the blocks of keys that score highest. Returns a mask for blocks of queries, or a selection for each query.

    With every=None, blocks of queries choose, and the result is a BlockMask:

    Queries and keys are averaged per block, in float32 (a partial last block over its tokens). Each block of queries keeps the
    ``keep`` blocks of keys whose means score highest, and in them the pairs that ``within`` keeps. It always keeps the block at the
    queries' positions (two blocks if the numbers of queries and keys differ), and each block in which ``always`` keeps a pair, both
    only where ``within`` keeps a pair. These count first towards ``keep``, and may exceed it. So a query that may see itself under
    ``within`` does. Of equal scores, the first block is kept.

    With every=1, each query chooses, and the result is a BlockSelection, which is causal:

    A query keeps its block up to itself; the pairs that ``always`` keeps, to the token; and the best of the blocks that end
    before this block begins. ``keep`` counts the query's block and the best, not ``always``. Of equal scores the first is kept.
    No pick, and nothing that a query sees, depends on later tokens.

    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim), kv_heads dividing heads. As for ``attention``, the
    last query is aligned with the last key.
    keep: how many blocks; with every=None also a float in (0, 1], the share of the row's blocks that ``within`` keeps, rounded up.
    every: None or 1.
    block_size: keys of a block, and queries with every=None: a power of two in 16..256; of a selection also 512.
    within: with every=None, the pairs that may be kept: causal by default, None for all; a Pattern, its spec text or a BlockMask of
    one mask, with these lengths and this block size.
    always: pairs to keep in any case, e.g. "sinks(4) | local(256)"; same types as ``within``.
    share_group: choose once for the query heads that share keys, by the mean of their scores.
    score: of a selection: "mean", products of queries with mean keys; "max", a query's largest product with a key of the block; or
    "softmax", the weight that attention to compressed keys gives to the block's tokens, at scale 1 / sqrt(head_dim), summed over
    the query heads that share a choice. k is then (batch, kv_heads, n, head_dim), the compressed keys, and kv_len the tokens that
    they are of, q_len by default.
    compression: of compressed keys, (length, stride), the block size for both by default; stride divides length and block_size.
    Key i is made of the tokens from i * stride to i * stride + length - 1; a key exists only if all of these do. A query reads
    the ones with no token after it. One that has tokens in several blocks counts for each by its strides there.
    lse: (batch, heads, q_len), natural, of q's attention to these compressed keys, as ``return_lse=True`` returns it.
    scores: instead of q and k, the scores of an indexer: (batch, kv_heads | heads, q_len, blocks of keys), floating-point; -inf and
    NaN are never chosen. every is then 1 by default. kv_len: tokens of such a selection, q_len by default.
    cu_seqlens_q, max_seqlen_q: of packed documents, as for ``attention_varlen``; keys share the documents of the queries. q and k
    are then (tokens, heads or kv_heads, head_dim), and scores (kv_heads | heads, tokens, blocks of max_seqlen_q keys); every is 1.
    always is a Pattern or its spec text, in blocks of up to 128 keys. Each document chooses by itself: its blocks begin at
    its first token.

    Returns a BlockMask of (batch, heads), of (1, heads) for a batch of 0, or a BlockSelection of (batch, kv_heads | heads), on q's
    device, to pass to ``attention`` with the same q and k; for packed documents a PackedSelection, for ``attention_varlen``. The
    choice is not differentiated. There is no host synchronization, and a CUDA graph may capture the call if patterns were used once
    with these lengths before (see ``BlockMask.from_blocks``). A selection's choice streams: no tensor of all queries and blocks is
    made. Under activation checkpointing see ``keep_picks``.

    For a mask under causal, later keys do not influence the choice: the only block with later keys is at the queries' positions,
    and always kept. But the queries of a block share one choice, which depends on all of them, as in the sources. In training, a
    choice, though no value, may thus depend on tokens up to block_size - 1 later; for a known prompt this does not matter. A
    selection has no such dependence.

    Under autocast, q and k are cast as for ``attention``; products are computed without autocast.

    Raises ValueError for arguments that do not fit together, TypeError for wrong types.

    Sources: arXiv:2407.02490 (block-sparse heads: mean-pooled queries and keys, top-k blocks); arXiv:2502.11089 (one choice
    for the query heads that share keys; blocks by query); arXiv:2502.13189 (mean keys by query); arXiv:2606.13392 (the maximum).
    """
    keep = check_keep(keep)
    has_within = not (isinstance(within, str) and within == "causal")
    has_compression = compression is not None or lse is not None
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise ValueError("max_seqlen_q is of packed documents; pass cu_seqlens_q as well")
        if has_compression and score != COMPRESSED:
            raise ValueError("compression and lse are of compressed keys; pass score='softmax' as well, or leave them out")
        if scores is None and every is None:
            if score != "mean" or kv_len is not None:
                raise ValueError("score and kv_len need a choice for each query; pass every=1")
            return mask_by_means(*query_choice.check_q_and_k(q, k), keep, block_size, within, always, share_group)
    elif has_within or kv_len is not None:
        raise ValueError("within and kv_len are of one sequence; leave them out where cu_seqlens_q tells the documents")
    elif has_compression or score == COMPRESSED:
        raise ValueError("compressed keys are of one sequence; packed documents choose by score='mean', 'max' or scores=")
    if every not in (None, 1):
        raise ValueError(f"every must be 1, each query chooses, or None, blocks of queries choose; got {every!r}")
    choice = query_choice.QueryChoice(*query_choice.check_choice(keep, block_size, score), always, share_group, score)
    if has_within:
        raise ValueError("a selection is causal; within is for every=None: leave it out, and pass always= for pairs to keep anyway")
    if scores is not None:
        if q is not None or k is not None or share_group or score != "mean":
            raise ValueError("scores take the place of q, k, score= and share_group=; pass either")
        if cu_seqlens_q is not None:
            return query_choice.select_packed_by_scores(scores, choice, cu_seqlens_q, max_seqlen_q)
        return query_choice.select_by_scores(scores, choice, kv_len)
    q, k = query_choice.check_q_and_k(q, k)
    if cu_seqlens_q is not None:
        return query_choice.select_packed_by_query(q, k, choice, cu_seqlens_q, max_seqlen_q)
    if score == COMPRESSED:
        return query_choice.select_by_compressed(q, k, choice, kv_len, compression, lse)
    if kv_len is not None:
        raise ValueError("kv_len follows from k; pass it only with scores= or score='softmax'")
    return query_choice.select_by_query(q, k, choice)
