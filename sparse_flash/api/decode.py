"""Decoding: one or a few queries of each sequence against a long cache of keys and values, contiguous or in pages."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import backends
from ..dispatch import observers, operators
from ..masks.block_mask import BlockMask, as_block_mask, of_another_library, plain_tensors
from ..masks.pattern import Pattern, parse
from ..patterns import causal, full, local
from ..variant.variant import check_dtype, int32_lengths
from .attention import DEFAULT_BLOCK_SIZE, check_mask_fits, checked_scale
from .keywords import shown_without_foreign, unexpected

MAX_QUERIES = 64


@shown_without_foreign
def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | Pattern | str | None = None,
    *,
    kv_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **foreign,
):
    """Attention of the last tokens of each sequence to all of its tokens, read from a cache; forward only.

    q: (batch, heads, q_len, head_dim), q_len up to 64: the queries of the last q_len tokens of each sequence, whose keys and
    values are in the cache already.
    k, v: the cache, (batch, kv_heads, capacity, head_dim); kv_heads divides heads. Or with ``block_table`` in pages, (pages,
    kv_heads, page_size, head_dim), page_size a power of two. v may have a head_dim of its own, which is out's. A cache in vLLM's
    and FlashAttention's order (pages, page_size, kv_heads, head_dim) is passed as ``k.transpose(1, 2)``. Any strides; an unbroken
    last dimension costs no copy.
    kv_lens: (batch,) int32 or int64 on the device of q, how many tokens each sequence has; None: all that there is room for. A
    length past the capacity counts as the capacity. What the cache holds past a length is never used, NaN neither.
    block_table: (batch, pages of a sequence) int32 or int64 on the device of q: token t of sequence b is in page
    ``block_table[b, t // page_size]``. The capacity is page_size times the pages of a sequence; entries past a length are
    not read. (Kernels read int32: int64 is cast in each call.)
    mask: a Pattern or its spec text; None for dense attention, in which all queries see all keys; or a BlockMask, square, as
    for training, of at least the capacity. Query i has position ``kv_lens[b] - q_len + i``, and a key its place in the
    sequence. A query whose position is negative keeps nothing.
    scale: positive; 1 / sqrt(head_dim) by default. return_lse: also return lse, as of ``attention``.
    backend: as for ``attention``; "hopper" and "triton" are one kernel here.

    Returns out, like q but of v's head_dim, or (out, lse). A query that keeps nothing has out 0 and lse -inf. Raises ValueError for
    arguments that do not fit together and for tensors that require a gradient, TypeError for wrong types. There is no autocast: q
    is cast to the cache's dtype by the caller.

    A pattern is compiled once, to the square table of the capacity rounded up by an eighth at most, and each call walks the
    rows of its queries: a cache that grows within its capacity compiles nothing, and no call waits for the device, so that it
    may be captured in a CUDA graph. The table takes 16 bytes a kept block (128 x 128) at or before the diagonal: 2 MiB for a
    pattern that keeps all of the past at 65,536 tokens, 0.5 GiB at a million; "causal" itself and "full" need none.

    Sources: arXiv:2309.06180 (paged caches), https://pytorch.org/blog/flash-decoding (keys shared among programs).
    """
    if foreign:
        raise unexpected(attention_decode, foreign)
    _check_tensors(q, k, v, block_table)
    kv_lens, block_table = _checked_lengths(q, k.shape[2], kv_lens, block_table)
    scale = checked_scale(scale, q.shape[3])
    capacity = k.shape[2] if block_table is None else k.shape[2] * block_table.shape[1]
    mask, is_causal = _resolved(mask, capacity, q)
    name = backends.choose(backend, backends.Call.of(q, k, v, None if mask is None else mask.block_size))
    out, lse = operators.attention_decode(q, k, v, mask, kv_lens, block_table, is_causal, scale, name)
    return (out, lse) if return_lse else out


def decodes(q: torch.Tensor, k: torch.Tensor, mask) -> bool:
    """Whether ``attention_decode`` gives what ``attention`` would, of a cache without room for more than its tokens, and does so
    at less cost: a mask compiled for each length would be compiled anew with every token."""
    return takes(q, k) and not (isinstance(mask, BlockMask) or torch.compiler.is_compiling())


def takes(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether ``attention_decode`` carries what a call asks for of these queries and keys, where the mask fits it."""
    few = q.shape[2] <= MAX_QUERIES and q.shape[2] <= k.shape[2] and q.dtype == k.dtype
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return few and not (gradient or observers.looked_at() or torch.is_autocast_enabled(q.device.type))


def _resolved(mask, capacity: int, q) -> tuple[BlockMask | None, bool]:
    """(the square mask or None, whether attention without one is causal)."""
    if mask is None:
        return None, False
    if not isinstance(mask, (BlockMask, Pattern, str)):
        mask = of_another_library(mask)
    if isinstance(mask, BlockMask):
        _check_mask(mask, capacity, q)
        return (None if mask.keeps_all else mask), False
    length = _rounded(capacity)
    if torch.compiler.is_compiling():
        is_causal, tensors = _constant_tables(mask, length, q.device)
        return (BlockMask.from_tensors(length, length, DEFAULT_BLOCK_SIZE, tensors) if tensors else None), is_causal
    return _compiled(mask, length, q.device)


def _rounded(capacity: int) -> int:
    """The next multiple of an eighth of the power of two below it, of whole blocks: a cache that is a tensor more with every
    token compiles its pattern eight times as it doubles."""
    unit = max(DEFAULT_BLOCK_SIZE, 1 << max(0, capacity.bit_length() - 4))
    return -(-capacity // unit) * unit


@lru_cache(maxsize=64)
def _compiled(pattern: Pattern | str, length: int, device: torch.device) -> tuple[BlockMask | None, bool]:
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    if pattern in (causal(), full()):
        return None, pattern == causal()
    # No key is later than the last of the queries, and blocks of such keys would only take programs' time.
    pattern = pattern & (causal() | local(MAX_QUERIES))
    return as_block_mask(pattern, q_len=length, kv_len=length, block_size=DEFAULT_BLOCK_SIZE, device=device), False


def _constant_tables(pattern, length: int, device) -> tuple[bool, list[torch.Tensor]]:
    """As constants of a compiled graph; see masks/block_mask.py."""
    with plain_tensors():
        mask, is_causal = _compiled(pattern, length, device)
        return is_causal, [] if mask is None else mask.constants()


_constant_tables._dynamo_marked_constant = True


def _check_tensors(q, k, v, block_table) -> None:
    order = "(batch, kv_heads, capacity, head_dim)" if block_table is None else "(pages, kv_heads, page_size, head_dim)"
    for name, tensor, shape in (("q", q, "(batch, heads, q_len, head_dim)"), ("k", k, order), ("v", v, order)):
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(f"{name} must have shape {shape}, none of it 0; got {tuple(tensor.shape)}")
        check_dtype(name, tensor)
        if tensor.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must have one dtype; q is {q.dtype}, {name} is {tensor.dtype}; cast q with .to({tensor.dtype})"
            )
        if tensor.device != q.device:
            raise ValueError(f"q, k and v must be on one device; q is on {q.device}, {name} on {tensor.device}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "attention_decode gives no gradients, and q, k or v requires one; use sparse_flash.attention, or call it under "
            "torch.no_grad()"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in all but head_dim; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q and k must agree in head_dim, and the number of key heads divide that of query heads; got shapes "
            f"{tuple(q.shape)} and {tuple(k.shape)}, k of {order}"
        )
    if block_table is None and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must agree in batch; got {tuple(q.shape)} and {tuple(k.shape)}; pages need a block_table")
    if q.shape[2] > MAX_QUERIES:
        raise ValueError(
            f"attention_decode takes up to {MAX_QUERIES} queries of a sequence; got {q.shape[2]}; use sparse_flash.attention for "
            "more"
        )


def _checked_lengths(q, page_size: int, kv_lens, block_table) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both in int32."""
    batch = q.shape[0]
    if kv_lens is not None:
        kv_lens = int32_lengths(_integers("kv_lens", kv_lens, q))
        if tuple(kv_lens.shape) != (batch,):
            raise ValueError(f"kv_lens must have shape ({batch},), a length for each sequence; got {tuple(kv_lens.shape)}")
    if block_table is not None:
        block_table = _integers("block_table", block_table, q).to(torch.int32)
        if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.shape[1] == 0:
            raise ValueError(f"block_table must have shape ({batch}, pages of a sequence); got {tuple(block_table.shape)}")
        if page_size & (page_size - 1):
            raise ValueError(f"page_size, the third dimension of k, must be a power of two; got {page_size}")
    return kv_lens, block_table


def _integers(name: str, tensor, q) -> torch.Tensor:
    way_out = f"{name}.to(torch.int32)" if isinstance(tensor, torch.Tensor) else f"torch.tensor({name}, dtype=torch.int32)"
    way_out = f"use {way_out}.to({str(q.device)!r})"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be an int32 or int64 tensor on {q.device}; got {type(tensor).__name__}; {way_out}")
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.device != q.device:
        raise ValueError(f"{name} must be int32 or int64 on {q.device}; got {tensor.dtype} on {tensor.device}; {way_out}")
    return tensor


def _check_mask(mask: BlockMask, capacity: int, q) -> None:
    if mask.q_len != mask.kv_len or mask.q_len < capacity:
        raise ValueError(
            f"a mask for decoding must be square and cover the cache's capacity of {capacity} tokens; got q_len={mask.q_len}, "
            f"kv_len={mask.kv_len}; compile it for {capacity}, or pass the pattern itself"
        )
    check_mask_fits(mask, q)
