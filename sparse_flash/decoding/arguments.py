"""Checks the arguments of ``attention_decode``: queries, a cache, its scales, lengths, pages and mask."""

from typing import TypeAlias

import torch

from ..core.arguments import check_alike, check_dtype, check_head_groups, check_mask_fits
from ..core.caches import E4M3
from ..core.variant import check_lengths, check_same_device
from ..masks.block_mask import BlockMask

MAX_QUERIES = 64  # per sequence
_Integers: TypeAlias = torch.Tensor | None


def check_decoding_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor | None) -> None:
    """``check_tensors`` for ``attention_decode``, whose k and v are a cache. Sizes except head_dim and of pages may be 0."""
    order = "(batch, kv_heads, capacity, head_dim)" if block_table is None else "(pages, kv_heads, page_size, head_dim)"
    for name, tensor, shape in (("q", q, "(batch, heads, q_len, head_dim)"), ("k", k, order), ("v", v, order)):
        if tensor.dim() != 4 or tensor.shape[3] == 0:
            raise ValueError(f"{name} must have shape {shape}, head_dim not 0; got {tuple(tensor.shape)}")
    if block_table is not None and 0 in k.shape[::2]:
        raise ValueError(f"k must have at least one page of one token, {order}; got {tuple(k.shape)}")
    if k.dtype == v.dtype == E4M3:
        check_dtype("q", q)
        check_same_device("k", k, q)
        check_same_device("v", v, q)
    elif E4M3 in (k.dtype, v.dtype):
        raise ValueError(
            f"a cache in e4m3 holds both keys and values so, with k_scale and v_scale; got k of {k.dtype} and v of {v.dtype}; "
            "quantize the other too"
        )
    else:
        check_alike(q, k, v, cast="cast q with .to({1})")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in all but head_dim; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in head_dim; got {tuple(q.shape)} and {tuple(k.shape)}, k of {order}")
    check_head_groups(q.shape[1], k.shape[1])
    if block_table is None and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must agree in batch; got {tuple(q.shape)} and {tuple(k.shape)}; pages need a block_table")
    if q.shape[2] > MAX_QUERIES:
        raise ValueError(
            f"attention_decode takes up to {MAX_QUERIES} queries of a sequence; got {q.shape[2]}; use sparse_flash.attention for "
            "more"
        )


def check_cache_scales(
    q: torch.Tensor, k: torch.Tensor, k_scale: object, v_scale: object, block_table: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Checks the scales of ``attention_decode`` and returns (k_scale, v_scale) for back ends: see ``core/backends``."""
    first, tokens = ("batch", "capacity") if block_table is None else ("pages", "page_size")
    shape = f"({first}, kv_heads)"
    if k.dtype != E4M3:
        if k_scale is None and v_scale is None:
            return None, None
        raise ValueError(f"k_scale and v_scale belong to a cache of torch.float8_e4m3fn; got k of {k.dtype}; leave them out")
    found: list[torch.Tensor] = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        one = _check_cache_scale(name, scale, k, q, shape, f"{shape[:-1]}, {tokens})")
        found.append(one[..., None] if one.dim() == 2 else one)
    found = torch.broadcast_tensors(*found)
    if found[0].stride() != found[1].stride() or found[0].stride(2) != 1:
        found = [scale.contiguous() for scale in found]
    return found[0].expand(k.shape[:3]), found[1].expand(k.shape[:3])


def _check_cache_scale(name: str, scale: object, x: torch.Tensor, q: torch.Tensor, shape: str, by_token: str) -> torch.Tensor:
    """Checks a scale of x, keys or values. shape, by_token: the text for a scale of each head, and of each token."""
    if not isinstance(scale, torch.Tensor):
        raise TypeError(
            f"{name} of an e4m3 cache must be a float32 tensor of shape {shape}; got {type(scale).__name__}; pass what stored "
            "numbers are to be multiplied by, torch.ones if by nothing"
        )
    check_same_device(name, scale, q, "detach it")
    fits = scale.dim() in (2, 3) and all(n in (1, whole) for n, whole in zip(scale.shape, x.shape, strict=False))
    if scale.dtype != torch.float32 or not fits:
        raise ValueError(
            f"{name} must be float32 of shape {shape}, or {by_token} for a scale of each token, and a size of 1 serves all; got "
            f"{scale.dtype} of shape {tuple(scale.shape)} for an e4m3 cache whose first dimensions are {tuple(x.shape[:3])}"
        )
    return scale


def check_cache_lengths(
    q: torch.Tensor, page_size: int, kv_lens: _Integers, kv_starts: _Integers, block_table: _Integers
) -> tuple[_Integers, _Integers, _Integers]:
    """Checks and returns (kv_lens, kv_starts, block_table) of ``attention_decode``, all in int32."""
    kv_lens = None if kv_lens is None else check_lengths("kv_lens", kv_lens, q, page_size)
    kv_starts = None if kv_starts is None else check_lengths("kv_starts", kv_starts, q, page_size)
    if kv_starts is not None and block_table is not None:
        raise ValueError("kv_starts must be None with a block_table; got both; leave pages before a sequence out of its row")
    if block_table is not None:
        check_same_device("block_table", block_table, q)
        integers = block_table.dtype in (torch.int32, torch.int64)
        if not integers or block_table.dim() != 2 or block_table.shape[0] != q.shape[0] or block_table.shape[1] == 0:
            raise ValueError(
                f"block_table must be int32 or int64 of shape ({q.shape[0]}, pages of a sequence); got {block_table.dtype} of "
                f"shape {tuple(block_table.shape)}"
            )
        block_table = block_table.to(torch.int32)
        if page_size & (page_size - 1):
            raise ValueError(f"page_size, the third dimension of k, must be a power of two; got {page_size}")
    return kv_lens, kv_starts, block_table


def check_decoding_mask(mask: BlockMask, capacity: int, q: torch.Tensor) -> None:
    """Raises ValueError unless a mask was made for a cache of this capacity."""
    if mask.q_len != mask.kv_len or mask.q_len < capacity:
        raise ValueError(
            f"a mask for decoding must be square and cover the cache's capacity of {capacity} tokens; got q_len={mask.q_len}, "
            f"kv_len={mask.kv_len}; compile it for {capacity}, or pass the pattern itself"
        )
    check_mask_fits(mask, q)
