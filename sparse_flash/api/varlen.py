"""Attention on packed documents of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ..compat.pytorch import is_plain_eager
from ..core import operators
from ..core.arguments import cast_for_autocast, check_types, resolve_deterministic
from ..core.call import AttentionCall
from ..kernels.common.layout import layouts
from ..masks.block_mask import BlockMask
from ..masks.cache import to_traceable
from ..masks.fit import check_fit, parse_if_names_tokens
from ..masks.pattern import Pattern
from ..packed.arguments import check_packed, to_documents
from ..packed.in_place import build_packed_mask
from ..packed.kept import kept_of_documents
from ..packed.repack import Axis, Packed, PackedDocuments, repack_documents
from ..selection.block_selection import BlockSelection
from ..selection.packed_selection import PackedSelection, check_packed_selection
from .attention import attention
from .call import build_call, observe
from .keywords import advises

_HASHABLE = {int, float, bool, str, np.int32, np.int64, type(None)}


@advises
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    mask: Pattern | str | PackedSelection | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_block_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``attention`` within each of several packed documents, each under the mask for its length.

    q: (tokens, heads, head_dim). k: (tokens_k, kv_heads, head_dim); kv_heads divides heads. v: (tokens_k, kv_heads, v_head_dim);
    v_head_dim may differ from head_dim. All share one dtype and device.
    cu_seqlens_q: (documents + 1,) int32 or int64 on q's device: the start of each document, from 0, and the end of the last. Tokens
    past that end belong to no document, and have no effect as long as they, their products and their incoming gradients are finite.
    cu_seqlens_k: the same for k and v; None: cu_seqlens_q. If a document's numbers of queries and keys differ, its last query has
    the position of its last key.
    mask: a Pattern or its spec text, made of position-based rules, the same for all heads; if it names a number of tokens, it must
    fit every document, which is checked only on a CPU; None for all pairs within a document; or the PackedSelection of
    ``topk_blocks`` for these documents, whose queries and keys belong to the same tokens.
    max_seqlen_q, max_seqlen_k: upper bounds on document lengths; the token counts by default. They bound the table, which is
    compiled once for each power of two of 128-token blocks, and the memory of the table derived from it. The derived table is
    cached while the tensors of cu_seqlens live and PyTorch does not change them; after other writes to them, call
    ``torch.autograd.graph.increment_version``.
    scale, return_lse, deterministic, backend: as for ``attention``, and so is autocast.
    return_block_lse: of a PackedSelection, also return last, for each block that a token picked, the lse of its scores in it:
    (heads, tokens, picks), in the order of its picks.

    Returns out, (tokens, heads, v_head_dim), or (out, lse) with lse (heads, tokens), as in ``attention``. Both are differentiable
    in q, k and v. A query that keeps nothing, and a token of no document, has out 0, lse -inf and no gradient. Tensors may have 0
    tokens.

    On a GPU, new lengths need no synchronization and no compilation of kernels or masks, and may change under a CUDA graph (call it
    once before capturing, as the first call compiles). So lengths are not checked there: decreasing cu_seqlens, or ones past the
    token count, are clamped, and a document longer than the maximum uses only its first tokens. On a CPU both raise ValueError.
    Arguments that do not fit together raise ValueError everywhere, wrong types TypeError.

    If each query keeps one run of keys and runs ascend (causal, local, prefix, full and their intersections), documents stay in
    place, in blocks that neighbours may share. Masked values get a weight of 0 there, so infinities and NaN in one document, or
    past the last, can reach a neighbour. Under other patterns, documents are copied to separate blocks of 128 tokens, and results
    back. Under a PackedSelection documents are copied too; infinities and NaN can still reach documents nearby if the number of
    query heads that share a choice is not a power of two, or with ``always`` on the back end torch.

    Source: the variable-length call of FlashAttention (arXiv:2205.14135).
    """
    check_types(q, k, v)
    q, k, v = cast_for_autocast(q, k, v)
    options: dict[str, Any] = {"scale": scale, "return_lse": True, "deterministic": deterministic, "backend": backend}
    if isinstance(mask, PackedSelection):
        check_packed(q, k, v)
        check_packed_selection(mask, q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        selection, axis = mask.to_block_axis()
        q, k, v = map(axis.to_blocks, (q, k, v))
        results = attention(q, k, v, selection, return_block_lse=return_block_lse, **options)
        return _unpack_results(results, axis, return_lse)
    if return_block_lse:
        raise ValueError(f"return_block_lse needs a PackedSelection as mask; got {type(mask).__name__}; leave it out")
    mask = "full" if mask is None else mask
    if isinstance(mask, BlockSelection):
        raise TypeError("a BlockSelection is of one sequence; pass cu_seqlens_q= to topk_blocks for one of packed documents")
    if not isinstance(mask, (Pattern, str)):
        hint = "; a BlockMask has one length, so pass the pattern that it was compiled from" * (type(mask).__name__ == "BlockMask")
        raise TypeError(f"mask must be a Pattern, its spec text or None; got {type(mask).__name__}{hint}")
    settings = mask, max_seqlen_q, max_seqlen_k, scale, resolve_deterministic(deterministic), backend
    starts = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    prepare = partial(_prepare, q, k, v, cu_seqlens_q, cu_seqlens_k, *settings)
    are_tensors = isinstance(starts[0], torch.Tensor) and isinstance(starts[1], torch.Tensor)
    if are_tensors and _HASHABLE.issuperset(map(type, settings[1:])):
        # Everything that ``_prepare`` depends on, except cu_seqlens.
        call, packed = kept_of_documents(starts, (*settings, cu_seqlens_k is None, *layouts((q, k, v))), prepare)
    else:
        call, packed = prepare(lambda function: function())
    if packed is None:
        call = call.on(q, k, v)
        observe(call.mask, q, k)
        out, lse = operators.attend_to_documents(call)
        return (out, lse) if return_lse else out
    q, k, v = packed.queries.to_blocks(q), packed.keys.to_blocks(k), packed.keys.to_blocks(v)
    return _unpack_results(attention(q, k, v, packed.mask, **options), packed.queries, return_lse)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    mask: Pattern | str,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale: float | None,
    deterministic: bool,
    backend: str,
    run: Callable[[Callable[[], Any]], Any],
) -> tuple[AttentionCall, Packed | None]:
    """Checks a call and makes its table. Returns the call without tensors, and the documents to move, or None if they stay in
    place.
    run: see ``kept_of_documents``."""
    check_packed(q, k, v)
    same = cu_seqlens_k is None or (len(k) == len(q) and _has_same_documents(cu_seqlens_q, cu_seqlens_k))
    if same and len(k) != len(q):
        raise ValueError(f"q has {len(q)} tokens and k {len(k)}; pass cu_seqlens_k, which says where k's documents start")
    queries = to_documents("q", q, cu_seqlens_q, max_seqlen_q)
    keys = to_documents("k", k, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, max_seqlen_k)
    if len(queries.cu_seqlens) != len(keys.cu_seqlens):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of as many documents; "
            f"got {len(queries.cu_seqlens) - 1} and {len(keys.cu_seqlens) - 1}"
        )
    if same and keys.longest < queries.longest:
        queries = keys

    if torch.compiler.is_compiling():
        mask = to_traceable(mask)
    elif q.device.type == "cpu" and (named := parse_if_names_tokens(mask)) is not None:
        for lengths in zip(queries.cu_seqlens.diff().tolist(), keys.cu_seqlens.diff().tolist(), strict=True):
            check_fit(named, *lengths)
    packed: Any = mask  # unused without tokens
    if not (0 in q.shape or 0 in k.shape):
        packed = run(partial(_pack, mask, queries, None if same else keys))
    moved = packed if isinstance(packed, Packed) else None
    q, k, v = map(operators.documents_as_batch, (q, k, v))
    call = build_call(q, k, v, None if moved else packed, scale, deterministic, backend, None, {})
    return call.on(*operators.NO_TENSORS), moved


def _pack(mask: Pattern | str, queries: PackedDocuments, keys: PackedDocuments | None) -> BlockMask | Packed:
    """The mask of documents in place, or the documents moved to separate blocks if the pattern needs that."""
    in_place = build_packed_mask(mask, queries, keys)
    return repack_documents(mask, queries, keys) if in_place is None else in_place


def _has_same_documents(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> bool:
    """Whether both are known to hold the same documents. The host does not read values on a GPU."""
    if cu_seqlens_k is cu_seqlens_q:
        return True
    both = cu_seqlens_q, cu_seqlens_k
    if not all(isinstance(starts, torch.Tensor) and starts.device.type == "cpu" for starts in both) or not is_plain_eager(*both):
        return False
    return cu_seqlens_q.tolist() == cu_seqlens_k.tolist()


def _unpack_results(
    results: torch.Tensor | tuple[torch.Tensor, ...], axis: Axis, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Moves results from the axis of blocks back to tokens. results: out, lse and perhaps the lse of picked blocks."""
    out, lse, *of_picks = results
    found = [axis.to_tokens(out, 0.0)]
    if return_lse:
        found.append(axis.to_tokens(lse.unsqueeze(-1), float("-inf"), heads_first=True).squeeze(-1).T)
    found += [axis.to_tokens(of_pick, float("-inf"), heads_first=True).transpose(0, 1) for of_pick in of_picks]
    return tuple(found) if len(found) > 1 else found[0]
