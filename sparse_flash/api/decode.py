"""Decoding: one or a few queries of each sequence against a long cache of keys and values, contiguous or in pages."""

from __future__ import annotations

import operator
from typing import Any

import torch

from .. import backends
from ..compat.constants import constant_in_graphs
from ..compat.pytorch import is_plain_eager, plain_tensors
from ..dispatch import operators
from ..kernels.common.layout import layouts
from ..kernels.launch.memory import keep, prepared_under
from ..masks.block_mask import BlockMask, compile_up_to, convert_foreign_mask, fake_mask_if_needed
from ..masks.cache import keep_if_captured, run_in_thread, to_traceable
from ..masks.fit import check_fit, parse_if_names_tokens
from ..masks.memory import cached_until_cleared
from ..masks.parsing import parse, text_of
from ..masks.pattern import Pattern
from ..patterns import causal, full, local
from ..selection.block_selection import BlockSelection
from ..selection.decode import decode, supports
from .arguments import autocast_applies, check_selected_heads, check_types, resolve_scale
from .call import DEFAULT_BLOCK_SIZE, fitting, observe, remember_fitting
from .decoding_arguments import (
    MAX_QUERIES,
    check_cache_lengths,
    check_cache_scales,
    check_decoding_mask,
    check_decoding_tensors,
    check_no_gradient,
)
from .keywords import answers_unknown_keywords, keyword_error


@answers_unknown_keywords(keyword_error)
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
    """Attention of the last tokens of each sequence to all its tokens, read from a cache; forward only.

    q: (batch, heads, q_len, head_dim), q_len up to 64: the queries of the last q_len tokens of each sequence, whose keys and values
    are already in the cache.
    k, v: the cache, (batch, kv_heads, capacity, head_dim); kv_heads divides heads. With ``block_table`` in pages, (pages, kv_heads,
    page_size, head_dim), page_size a power of two. v may have its own head_dim, which is also out's. A cache in the order of vLLM
    and FlashAttention, (pages, page_size, kv_heads, head_dim), is passed as ``k.transpose(1, 2)``. Any strides; a contiguous last
    dimension avoids a copy.
    kv_lens: (batch,) int32 or int64 on the device of q, the token count of each sequence; None: the capacity. A length past the
    capacity counts as the capacity, a negative one as 0; on a CPU a negative one raises ValueError. Cache contents past a length
    are never used, not even NaN.
    kv_starts: (batch,) int32 or int64 on the device of q, the index of each sequence's first token in a cache without pages, padded
    before it; None, or negative: 0. Positions count from there, kv_lens from the cache's first token.
    block_table: (batch, pages of a sequence) int32 or int64 on the device of q: token t of sequence b is in page
    ``block_table[b, t // page_size]``. The capacity is page_size times the pages of a sequence; entries past a length are not
    read.
    k_scale, v_scale: given if and only if k and v are of torch.float8_e4m3fn. A key is what k holds times its scale, a value what v
    holds times its own. float32 on the device of q, of shape (batch, kv_heads), or with pages (pages, kv_heads); with the
    cache's third dimension as well, each token has a scale. A size of 1 serves all. Products are in float32 if q is, otherwise in
    float16, which holds e4m3 exactly.
    mask: a Pattern or its spec text, which must fit a sequence of the capacity if kv_lens is None, and on a CPU the lengths in
    kv_lens; None for dense attention, in which all queries see all keys; a BlockMask, square and covering the capacity; or a
    BlockSelection, the blocks of the cache that these queries picked, without ``always`` and kv_starts. Query i has position
    ``kv_lens[b] - kv_starts[b] - q_len + i``; a key's position is its index in the sequence. A query at a negative position
    keeps nothing.
    scale: positive; 1 / sqrt(head_dim) by default. return_lse: also return lse, as in ``attention``.
    backend: as for ``attention``; "hopper" and "triton" share one kernel here. Of a BlockSelection they and "torch" read the picked
    blocks and no others, so attention costs no more as the cache grows.

    Returns out, like q but with v's head_dim, or (out, lse). A query that keeps nothing has out 0 and lse -inf. The batch, the
    queries and the cache may be empty. Raises ValueError for arguments that do not fit together and for tensors that require a
    gradient, TypeError for wrong types. There is no autocast: the caller casts q to the dtype of a cache that is not e4m3.

    A pattern is compiled once, to the square table of the capacity rounded up by at most an eighth; each call reads the rows of its
    queries, so a cache that grows within its capacity compiles nothing. No call synchronizes with the device, and a CUDA graph may
    capture it. The table takes 16 bytes per kept block (128 x 128) at or before the diagonal: 2 MiB for a pattern that keeps all of
    the past at 65,536 tokens, 0.5 GiB at a million. "causal" itself and "full" need no table.

    Sources: arXiv:2309.06180 (paged caches), https://pytorch.org/blog/flash-decoding (keys shared among programs).
    """
    check_types(q, k, v)
    compiling, has_pages = torch.compiler.is_compiling(), block_table is not None
    key: Any = None if compiling else ("decode", has_pages, *layouts((q, k, v)))
    if compiling or key not in fitting:
        check_decoding_tensors(q, k, v, block_table)
        if not compiling:
            remember_fitting(key)
    check_no_gradient(q, k, v)
    kv_lens, kv_starts, block_table = check_cache_lengths(q, k.shape[2], kv_lens, kv_starts, block_table)
    k_scale, v_scale = check_cache_scales(q, k, k_scale, v_scale, block_table)
    scale = resolve_scale(scale, q.shape[3])
    capacity = backends.cache_capacity(k, block_table)
    observe(mask, q, k)
    if 0 in q.shape or capacity == 0:
        _check_empty_call(mask, capacity, q, backend)
        out, lse = operators.make_empty_results(q, k[:0].to(q.dtype), v[:0].to(q.dtype), None)
    elif isinstance(mask, BlockSelection):
        if kv_starts is not None:
            raise ValueError("kv_starts must be None with a selection, whose blocks start with the cache; got both")
        _check_selection(mask, q, k, capacity, kv_lens)
        name = backends.choose_backend(backend, backends.Call.from_tensors(q, k, v, mask.block_size), supports)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        out, lse = decode(q, k, v, mask, kv_lens, block_table, scale, name, (k_scale, v_scale))
    else:
        mask, is_causal = _resolve_mask(mask, capacity, q, kv_lens, kv_starts)
        block_size = None if mask is None else mask.block_size
        prepared = {} if compiling else prepared_under(mask)
        key = key, block_size, backend
        name = prepared.get(key, "")
        if not name:
            name = backends.choose_backend(backend, backends.Call.from_tensors(q, k, v, block_size))
            keep(prepared, key, name)
        call = q, k, v, mask, kv_lens, block_table, is_causal, scale, name
        out, lse = operators.attention_decode(*call, k_scale, v_scale, kv_starts)
    return (out, lse) if return_lse else out


def _check_empty_call(mask: object, capacity: int, q: torch.Tensor, backend: str) -> None:
    """Raises as a call with queries and keys does for a mask of another type, text that cannot be read, and unknown back ends."""
    if isinstance(mask, str):
        text_of(mask)
    elif isinstance(mask, BlockMask):
        check_decoding_mask(mask, capacity, q)
    elif not (mask is None or isinstance(mask, (BlockSelection, Pattern))):
        convert_foreign_mask(mask)
    backends.check_name(backend)


def _check_selection(
    selection: BlockSelection, q: torch.Tensor, k: torch.Tensor, capacity: int, kv_lens: torch.Tensor | None
) -> None:
    """Raises ValueError where the selection does not fit."""
    if selection.always is not None:
        raise ValueError("attention_decode takes no selection with always=; choose without it, or use sparse_flash.attention")
    check_selected_heads(selection, q, k)
    # Without lengths the cache's capacity tells positions, here and where the queries chose.
    fits = selection.kv_len == capacity if kv_lens is None else selection.kv_len <= capacity
    if selection.q_len != q.shape[2] or not fits:
        raise ValueError(
            f"the selection is of q_len={selection.q_len} and a cache of {selection.kv_len} tokens; got {q.shape[2]} queries and a "
            f"cache of {capacity}{', without kv_lens' * (kv_lens is None)}; choose again for these, or pass kv_lens"
        )


def is_decode_step(q: torch.Tensor, k: torch.Tensor, mask: object) -> bool:
    """Whether ``attention_decode`` on a cache exactly as long as its tokens gives what ``attention`` would, at less cost: a mask
    compiled per length would be recompiled for every token."""
    return can_decode(q, k) and not (isinstance(mask, BlockMask) or torch.compiler.is_compiling())


def can_decode(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether ``attention_decode`` supports what a call asks for with these queries and keys, given a mask that fits."""
    few = q.shape[2] <= MAX_QUERIES and q.shape[2] <= k.shape[2] and q.dtype == k.dtype
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return few and not (gradient or autocast_applies(q.device))


def _resolve_mask(
    mask: BlockMask | Pattern | str | None, capacity: int, q: torch.Tensor, kv_lens: Any = None, kv_starts: Any = None
) -> tuple[BlockMask | None, bool]:
    """(the square mask or None, whether attention without one is causal)."""
    if mask is None:
        return None, False
    if not isinstance(mask, (BlockMask, Pattern, str)):
        mask = convert_foreign_mask(mask)
    if isinstance(mask, BlockMask):
        check_decoding_mask(mask, capacity, q)
        return (None if mask.keeps_all else mask), False
    # index() turns a symbolic capacity into a plain number: a compiled graph holds the table of one capacity.
    length = _rounded(operator.index(capacity))
    if torch.compiler.is_compiling():
        is_causal, tensors = _constant_tables(to_traceable(mask), length, q.device)
        table = BlockMask.from_tensors(length, length, DEFAULT_BLOCK_SIZE, tensors) if tensors else None
        if table is not None:
            check_decoding_mask(table, capacity, q)
        return table, is_causal
    if (named := parse_if_names_tokens(mask)) is not None:
        if kv_lens is kv_starts is None:
            check_fit(named, q.shape[2], capacity)
        elif q.device.type == "cpu" and is_plain_eager(q):
            ends = torch.full((1,), capacity) if kv_lens is None else kv_lens.clamp(max=capacity)
            counts = ends if kv_starts is None else ends - kv_starts.clamp(min=0)
            for kv_len in set(counts[counts > 0].tolist()):
                check_fit(named, min(q.shape[2], kv_len - 1), kv_len)  # fewer than keys, as later tokens may be yet to come
    table, is_causal = _compiled(mask, length, q.device)
    if table is not None:
        check_decoding_mask(table, capacity, q)
    keep_if_captured(table, q.device)
    return table and fake_mask_if_needed(table), is_causal


def _rounded(capacity: int) -> int:
    """The next multiple of an eighth of the power of two below it, in whole blocks: a cache tensor that grows with every token
    compiles its pattern eight times per doubling."""
    unit = max(DEFAULT_BLOCK_SIZE, 1 << max(0, capacity.bit_length() - 4))
    return -(-capacity // unit) * unit


@cached_until_cleared(maxsize=64)
def _compiled(pattern: Pattern | str, length: int, device: torch.device) -> tuple[BlockMask | None, bool]:
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    if pattern in (causal(), full()):
        return None, pattern == causal()
    # No key is later than the last query, and blocks of later keys would only cost programs time.
    pattern = pattern & (causal() | local(MAX_QUERIES))
    return run_in_thread(compile_up_to, pattern, length, length, DEFAULT_BLOCK_SIZE, device), False


@constant_in_graphs
def _constant_tables(pattern: Pattern | str, length: int, device: torch.device) -> tuple[bool, list[torch.Tensor]]:
    """Returns (is causal, the table's tensors) as constants of a compiled graph."""
    with plain_tensors():
        mask, is_causal = _compiled(pattern, length, device)
        return is_causal, [] if mask is None else mask.constants()
