"""Attention on packed documents of different lengths."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ..core import operators
from ..core.arguments import cast_for_autocast, check_types, resolve_deterministic
from ..core.call import AttentionCall
from ..kernels.common.layout import layouts
from ..masks.block_mask import BlockMask
from ..masks.cache import to_traceable
from ..masks.fit import check_fit, parse_if_names_tokens
from ..masks.pattern import Pattern
from ..packed.arguments import check_packed, to_documents
from ..packed.documents import Axis
from ..packed.in_place import pack_documents
from ..packed.kept import kept_of_documents
from ..packed.moved import MovedDocuments
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
    tensors = cast_for_autocast(q, k, v)
    options: dict[str, Any] = {"scale": scale, "deterministic": deterministic, "backend": backend}
    if isinstance(mask, PackedSelection):
        check_packed(*tensors)
        check_packed_selection(mask, q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        selection, axis = mask.to_block_axis()
        return _attend_moved(tensors, selection, axis, axis, return_lse, options | {"return_block_lse": return_block_lse})
    if return_block_lse:
        raise ValueError(f"return_block_lse needs a PackedSelection as mask; got {type(mask).__name__}; leave it out")
    mask = "full" if mask is None else mask
    if isinstance(mask, BlockSelection):
        raise TypeError("a BlockSelection is of one sequence; pass cu_seqlens_q= to topk_blocks for one of packed documents")
    if not isinstance(mask, (Pattern, str)):
        hint = "; a BlockMask has one length, so pass the pattern that it was compiled from" * (type(mask).__name__ == "BlockMask")
        raise TypeError(f"mask must be a Pattern, its spec text or None; got {type(mask).__name__}{hint}")
    settings = cu_seqlens_k is None, mask, max_seqlen_q, max_seqlen_k, scale, resolve_deterministic(deterministic), backend
    starts = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    prepare = partial(_prepare, tensors, starts, settings)
    if all(map(torch.is_tensor, starts)) and _HASHABLE.issuperset(map(type, settings[2:])):
        # All that ``_prepare`` depends on besides cu_seqlens.
        call, moved = kept_of_documents(starts, (*settings, *layouts(tensors)), prepare)
    else:
        call, moved = prepare(lambda function: function())
    if moved is not None:
        return _attend_moved(tensors, *moved, return_lse, options)
    call = call.on(*tensors)
    observe(call.mask, *tensors[:2])
    out, lse = operators.attend_to_documents(call)
    return (out, lse) if return_lse else out


def _prepare(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    starts: tuple[torch.Tensor, torch.Tensor],
    settings: tuple[Any, ...],
    run: Callable[[Callable[[], Any]], Any],
) -> tuple[AttentionCall, MovedDocuments | None]:
    """Checks a call, and makes its table. Returns (the call in place, without tensors; None), or documents that are to be moved.
    settings: whether cu_seqlens_k was left out, then arguments of ``attention_varlen``. run: see ``kept_of_documents``."""
    same, mask, max_seqlen_q, max_seqlen_k, scale, deterministic, backend = settings
    check_packed(*tensors)
    q, k, _ = tensors
    if same and len(k) != len(q):
        raise ValueError(f"q has {len(q)} tokens and k {len(k)}; pass cu_seqlens_k, which says where k's documents start")
    same = same or (len(k) == len(q) and starts[0] is starts[1])
    queries, keys = to_documents("q", q, starts[0], max_seqlen_q), to_documents("k", k, starts[1], max_seqlen_k)
    documents = [len(side.cu_seqlens) - 1 for side in (queries, keys)]
    if documents[0] != documents[1]:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be of as many documents; got {documents[0]} and {documents[1]}")
    if same and keys.longest < queries.longest:
        queries = keys
    if torch.compiler.is_compiling():
        mask = to_traceable(mask)
    elif q.device.type == "cpu" and (named := parse_if_names_tokens(mask)) is not None:
        for lengths in zip(queries.cu_seqlens.diff().tolist(), keys.cu_seqlens.diff().tolist(), strict=True):
            check_fit(named, *lengths)
    packed: Any = mask  # unused without tokens
    if not (0 in q.shape or 0 in k.shape):
        packed = run(partial(pack_documents, mask, queries, None if same else keys))
    moved = packed if isinstance(packed, MovedDocuments) else None
    q, k, v = map(operators.documents_as_batch, tensors)
    call = build_call(q, k, v, None if moved else packed, scale, deterministic, backend, None, {})
    return call.on(*operators.NO_TENSORS), moved


def _attend_moved(
    tensors: tuple[torch.Tensor, ...], mask: BlockMask | BlockSelection, queries: Axis, keys: Axis, return_lse: bool, options: Any
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention on the axes of blocks, with out, lse and perhaps the lse of picked blocks moved back to the tokens."""
    operators.refuse_transforms(*tensors)  # before vmap warns of a move
    q, k, v = (axis.to_blocks(x) for axis, x in zip((queries, keys, keys), tensors, strict=True))
    out, lse, *of_picks = attention(q, k, v, mask, return_lse=True, **options)
    found = [queries.to_tokens(out.squeeze(0).transpose(0, 1), 0)]
    found += [queries.to_tokens(of_rows.squeeze(0), 1) for of_rows in ([lse] if return_lse else []) + of_picks]
    return tuple(found) if len(found) > 1 else found[0]
