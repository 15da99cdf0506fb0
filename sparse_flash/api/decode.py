"""Decoding: a few queries of each sequence over a long cache of keys and values, contiguous or paged."""

from typing import Any

import torch

from ..core import backends, operators
from ..core.arguments import check_types, resolve_scale
from ..core.caches import cache_capacity
from ..core.description import Call
from ..decoding.arguments import check_cache_lengths, check_cache_scales, check_decoding_tensors
from ..decoding.masks import resolve_mask
from ..kernels.common.layout import layouts
from ..kernels.launch.memory import keep, prepared_under
from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern
from ..selection.block_selection import BlockSelection, check_cached_selection
from ..selection.decode import decode, supports
from .call import fitting, observe, remember_fitting
from .keywords import advises


@advises
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | BlockSelection | Pattern | str | None = None,
    *,
    kv_lens: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention of the last tokens of each sequence to all its tokens in a cache; forward only.

    q: (batch, heads, q_len, head_dim), q_len up to 64: the queries of the last q_len tokens of each sequence, whose keys and values
    are already in the cache.
    k, v: the cache, (batch, kv_heads, capacity, head_dim); kv_heads divides heads. With ``block_table`` in pages, (pages, kv_heads,
    page_size, head_dim), page_size a power of two. v may have another head_dim, which is also out's. Pass a cache in the order of
    vLLM and FlashAttention, (pages, page_size, kv_heads, head_dim), as ``k.transpose(1, 2)``. Any strides; a contiguous last
    dimension avoids a copy.
    kv_lens: (batch,) int32 or int64 on the device of q, the token count of each sequence; None: the capacity. A length past the
    capacity counts as the capacity, a negative length as 0; on a CPU a negative length raises ValueError. Cache contents past a
    length are never used, and may be NaN.
    kv_starts: (batch,) int32 or int64 on the device of q, the index of each sequence's first token in a left-padded cache without
    pages; None, or negative: 0. Positions count from there, kv_lens from the cache's first token.
    block_table: (batch, pages of a sequence) int32 or int64 on the device of q: token t of sequence b is in page
    ``block_table[b, t // page_size]``. The capacity is page_size times the pages of a sequence; entries past a length are not read.
    k_scale, v_scale: given if and only if k and v are of torch.float8_e4m3fn: a stored number times its scale is the key or the
    value. float32 on the device of q, of shape (batch, kv_heads), or with pages (pages, kv_heads); with the cache's third dimension
    as well, each token has a scale. Sizes of 1 broadcast. Products are in float32 if q is, otherwise in float16, which holds e4m3
    exactly.
    mask: a Pattern or its spec text, which must fit a sequence of the capacity if kv_lens is None, and on a CPU the lengths in
    kv_lens; None for dense attention, in which all queries see all keys; a BlockMask, square and covering the capacity; or a
    BlockSelection without ``always``, the blocks of the cache that these queries picked, if kv_starts is None. Query i has position
    ``kv_lens[b] - kv_starts[b] - q_len + i``; a key's position is its index in the sequence. A query at a negative position keeps
    nothing.
    scale: positive; 1 / sqrt(head_dim) by default. return_lse: also return lse, as in ``attention``.
    backend: as for ``attention``; "hopper" and "triton" share one kernel here. Under a BlockSelection, they and "torch" read only
    the picked blocks, so attention costs the same as the cache grows.

    Returns out, like q but with v's head_dim, or (out, lse). A query that keeps nothing has out 0 and lse -inf. The batch, the
    queries and the cache may be empty. Raises ValueError for arguments that do not fit together and for tensors that require a
    gradient, TypeError for wrong types. There is no autocast: the caller casts q to the dtype of a cache that is not e4m3.

    A pattern is compiled once, to the square table of the capacity rounded up by at most an eighth; each call reads the rows of its
    queries, so growing sequences compile nothing. No call synchronizes with the device, and a CUDA graph may capture it. The table
    takes 16 bytes per kept block (128 x 128) at or before the diagonal: 2 MiB for a pattern that keeps all of the past at 65,536
    tokens, 0.5 GiB at a million. "causal" and "full" need no table.

    Sources: arXiv:2309.06180 (paged caches), https://pytorch.org/blog/flash-decoding (keys shared among programs).
    """
    check_types(q, k, v)
    compiling, has_pages = torch.compiler.is_compiling(), block_table is not None
    key: Any = None if compiling else ("decode", has_pages, *layouts((q, k, v)))
    if compiling or key not in fitting:
        check_decoding_tensors(q, k, v, block_table)
        if not compiling:
            remember_fitting(key)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "attention_decode gives no gradients, and q, k or v requires one; use sparse_flash.attention, or call it under "
            "torch.no_grad()"
        )
    kv_lens, kv_starts, block_table = check_cache_lengths(q, k.shape[2], kv_lens, kv_starts, block_table)
    k_scale, v_scale = check_cache_scales(q, k, k_scale, v_scale, block_table)
    scale = resolve_scale(scale, q.shape[3])
    capacity = cache_capacity(k, block_table)
    observe(mask, q, k)
    if 0 in q.shape or capacity == 0:
        backends.check_name(backend)
        if not isinstance(mask, BlockSelection):
            resolve_mask(mask, max(1, capacity), q, kv_lens, kv_starts)  # which raises for masks that no call takes
        out, lse = operators.make_empty_results(q, k[:0].to(q.dtype), v[:0].to(q.dtype), None)
    elif isinstance(mask, BlockSelection):
        if kv_starts is not None:
            raise ValueError("kv_starts must be None with a selection, whose blocks start with the cache; got both")
        check_cached_selection(mask, q, k, capacity, kv_lens)
        name = backends.choose_backend(backend, Call.from_tensors(q, k, v, mask.block_size), supports)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        out, lse = decode(q, k, v, mask, scale, name, kv_lens, block_table, k_scale, v_scale)
    else:
        mask, is_causal = resolve_mask(mask, capacity, q, kv_lens, kv_starts)
        block_size = None if mask is None else mask.block_size
        prepared = {} if compiling else prepared_under(mask)
        key = key, block_size, backend
        name = prepared.get(key, "")
        if not name:
            name = backends.choose_backend(backend, Call.from_tensors(q, k, v, block_size))
            keep(prepared, key, name)
        call = q, k, v, mask, kv_lens, block_table, is_causal, scale, name
        out, lse = operators.attention_decode(*call, k_scale, v_scale, kv_starts)
    return (out, lse) if return_lse else out
