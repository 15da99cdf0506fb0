"""The calls of the ``flash-attn`` package (FlashAttention 2), computed here: a program that uses them changes one import.

    from sparse_flash.integrations.flash_attn import flash_attn_func

Argument names, order and defaults, layouts, and the meaning of ``causal`` and ``window_size`` for unequal lengths are that
package's: the last query is aligned with the last key, and a window includes both ends. Each call also takes ``mask``, a Pattern or
its spec text (except in varlen calls, also a BlockMask), and ``backend``, as in ``sparse_flash.attention``. A pair is kept if mask,
causal and window all keep it.

Differences: a query that keeps nothing has lse -inf, not inf. ``S_dmask``, the matrix of weights with dropout's signs, is never
formed: ``return_attn_probs`` returns None instead, and is refused with dropout. ``num_splits`` has no effect, as the kernel
chooses. Calls do not synchronize with the GPU, so lengths cannot be checked there: tokens past the capacity of a cache are dropped.
On a CPU they raise ValueError.

Source: flash_attn.flash_attn_interface (https://github.com/Dao-AILab/flash-attention), version 2.8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..api.arguments import refuse_probabilities
from ..api.attention import attention
from ..api.decode import MAX_QUERIES, attention_decode
from ..api.document_arguments import resolve_longest
from ..api.varlen import attention_varlen
from ..backends import E4M3, check_read_pages
from ..compat.pytorch import is_recorded
from ..masks.block_mask import BlockMask
from ..masks.memory import cached_until_cleared
from ..masks.parsing import parse, text_of
from ..masks.pattern import And, DerivedPattern, Not, Or, Pattern
from ..packed.gather_rows import take_rows

_NO_WINDOW = (-1, -1)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    mask: BlockMask | Pattern | str | None = None,
    backend: str = "auto",
):
    """Returns softmax(softmax_scale * q k^T) v over the kept pairs.

    q: (batch, seqlen_q, heads, head_dim). k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
    window_size: (left, right), how many keys before and after a query's own position are kept; negative for no limit. causal: right
    is 0. softcap: 0 for none. alibi_slopes: (heads,) or (batch, heads), adds -slope * |i + seqlen_k - seqlen_q - j|. deterministic:
    bitwise repeatable gradients; False follows torch.are_deterministic_algorithms_enabled().
    q_descale, k_descale, v_descale: as FlashAttention-3 takes them, for q, k and v of torch.float8_e4m3fn: (batch, kv_heads)
    float32, what the numbers of a key head and of its queries are multiplied by; None for 1. Then out is bfloat16, and there are no
    gradients: see ``precision="fp8"`` of ``sparse_flash.attention``.

    Returns out, like q, or with return_attn_probs (out, lse, None), lse of shape (batch, heads, seqlen_q) float32. Differentiable.
    Raises ValueError for return_attn_probs with dropout, and whenever ``sparse_flash.attention`` does.
    """
    refuse_probabilities(dropout_p, return_attn_probs)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_dims(name, tensor, "(batch, tokens, heads, head_dim)")
    scales: dict[str, Any] = {"q_scale": q_descale, "k_scale": k_descale, "v_scale": v_descale}
    if q.dtype == E4M3:
        scales = {name: torch.ones(1, 1, device=q.device) if scale is None else scale for name, scale in scales.items()}
        if scales["q_scale"].shape[1] > 1:
            scales["q_scale"] = scales["q_scale"].repeat_interleave(q.shape[2] // k.shape[2], 1)
        scales["precision"] = "fp8"
    out, lse = attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        _combine_masks(causal, window_size, mask),
        scale=softmax_scale,
        return_lse=True,
        deterministic=deterministic or None,
        backend=backend,
        **scales,
        **_variant(dropout_p, softcap, alibi_slopes),
    )
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    mask: BlockMask | Pattern | str | None = None,
    backend: str = "auto",
):
    """Calls ``flash_attn_func`` on qkv, (batch, seqlen, 3, heads, head_dim)."""
    _check_dims("qkv", qkv, "(batch, tokens, 3, heads, head_dim)")
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *rest, mask=mask, backend=backend)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    mask: BlockMask | Pattern | str | None = None,
    backend: str = "auto",
):
    """Calls ``flash_attn_func`` on q and kv, (batch, seqlen_k, 2, kv_heads, head_dim)."""
    _check_dims("kv", kv, "(batch, tokens, 2, kv_heads, head_dim)")
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *rest, mask=mask, backend=backend)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    mask: Pattern | str | None = None,
    backend: str = "auto",
):
    """Does what ``flash_attn_func`` does, for each of several sequences, packed one after another.

    q: (total_q, heads, head_dim). k, v: (total_k, kv_heads, head_dim), or with block_table pages, (pages, page_size, kv_heads,
    head_dim). cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, the start of each sequence, and the end of the last.
    max_seqlen_q, max_seqlen_k: upper bounds on sequence lengths; ints, or tensors of one, which are read on the host. Compiled
    code cannot read them, and takes all tokens for the bound. block_table: (sequences, pages of one) int32, the pages of each.

    Returns out, like q, or with return_attn_probs (out, lse, None), lse of shape (heads, total_q) float32.

    With dropout, softcap, alibi_slopes or block_table, sequences are first moved to an axis of max_seqlen tokens each, which takes
    that much memory. mask must then depend only on distances (causal, windows), unless queries and keys share cu_seqlens.
    """
    refuse_probabilities(dropout_p, return_attn_probs)
    max_seqlen_q = _read_max_seqlen("max_seqlen_q", max_seqlen_q, len(q))
    max_seqlen_k = _read_max_seqlen(
        "max_seqlen_k", max_seqlen_k, len(k) if block_table is None else block_table.shape[1] * k.shape[1]
    )
    options: dict[str, Any] = {
        "scale": softmax_scale,
        "return_lse": True,
        "deterministic": deterministic or None,
        "backend": backend,
    }
    variant = _variant(dropout_p, softcap, alibi_slopes)
    kept = _combine_masks(causal, window_size, mask)
    if not variant and block_table is None:
        longest: dict[str, Any] = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, kept, **longest, **options)
        return (out, lse, None) if return_attn_probs else out
    _check_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    shared = block_table is None and cu_seqlens_k is cu_seqlens_q and max_seqlen_k == max_seqlen_q
    if not shared:
        _check_shift_invariant(mask, "sequences whose queries and keys have cu_seqlens of their own")
    q_rows = _lay_out_rows(cu_seqlens_q, len(q), max_seqlen_q, at_end=not shared)
    q = _gather_rows(q, q_rows)
    if block_table is None:
        kv_rows = _lay_out_rows(cu_seqlens_k, len(k), max_seqlen_k, at_end=not shared)
        k, v, kv_first, kv_length = _gather_rows(k, kv_rows), _gather_rows(v, kv_rows), kv_rows.first, kv_rows.length
    else:
        kv_length = cu_seqlens_k.diff()
        kv_first = max_seqlen_k - kv_length
        token = torch.arange(max_seqlen_k, device=q.device) - kv_first[:, None]
        k, v = (t[_find_pages(block_table, token, t)].transpose(1, 2) for t in (k, v))
    options |= {"q_lens": q_rows.length, "kv_lens": kv_length} if shared else {"q_starts": q_rows.first, "kv_starts": kv_first}
    out, lse = attention(q, k, v, kept, **options, **variant)
    out = _scatter_rows(out, q_rows, 0.0)
    return (out, _scatter_rows(lse[..., None], q_rows, float("-inf")).squeeze(-1).T, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    mask: Pattern | str | None = None,
    backend: str = "auto",
):
    """Calls ``flash_attn_varlen_func`` on qkv, (total, 3, heads, head_dim)."""
    _check_dims("qkv", qkv, "(tokens of all sequences, 3, heads, head_dim)")
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest, mask=mask, backend=backend)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    mask: Pattern | str | None = None,
    backend: str = "auto",
):
    """Calls ``flash_attn_varlen_func`` on q and kv, (total_k, 2, kv_heads, head_dim)."""
    _check_dims("kv", kv, "(tokens of all sequences, 2, kv_heads, head_dim)")
    rest = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, *rest, mask=mask, backend=backend
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    mask: BlockMask | Pattern | str | None = None,
    backend: str = "auto",
):
    """Attends the last tokens of each sequence to its cache, after writing k and v to the cache; forward only.

    q: (batch, seqlen_q, heads, head_dim). k_cache, v_cache: (caches, capacity, kv_heads, head_dim), or with block_table pages,
    (pages, page_size, kv_heads, head_dim). k, v: (batch, seqlen_new, kv_heads, head_dim), written in place to positions
    cache_seqlens, cache_seqlens + 1, ... of the caches.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), with k and v: k is rotated by the positions that it is written to, q by
    cache_seqlens, cache_seqlens + 1, ... with causal or a window, otherwise all of it by cache_seqlens.
    rotary_interleaved: pairs of dimensions are 0 and 1, 2 and 3, ...; otherwise 0 and rotary_dim / 2, ...
    cache_seqlens: an int, or (batch,) int32, the tokens of each sequence before k; None: the capacity.
    cache_batch_idx: (batch,) int32, the cache that each sequence uses; these are copied in each call. None: the first ones.
    cache_leftpad: (batch,) int32, the first token of each sequence in its cache. block_table: (batch, pages of one) int32.

    Returns out, like q, or with return_softmax_lse (out, lse), lse of shape (batch, heads, seqlen_q) float32.

    Up to 64 queries with pages of a power-of-two size run as ``attention_decode``, which copies nothing. With more queries, other
    pages, softcap, alibi_slopes or cache_leftpad, the cache is copied in each call, and mask must be a pattern that depends only on
    distances. It is also copied where queries see later keys and may outnumber the tokens of a sequence: several without k,
    without mask, neither causal nor with a window that ends at the query, on a GPU unless cache_seqlens is an int or None.
    """
    paged = block_table is not None
    _check_dims("q", q, "(batch, tokens, heads, head_dim)")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_dims(name, cache, f"({'pages, page_size' if paged else 'caches, capacity'}, kv_heads, head_dim)")
    _check_cache_call(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table)
    for name, each in (("cache_seqlens", cache_seqlens), ("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if isinstance(each, torch.Tensor) and each.shape != q.shape[:1]:
            raise ValueError(f"{name} must have shape ({len(q)},), a number for each sequence; got {tuple(each.shape)}")
    if not paged and cache_batch_idx is None:
        k_cache, v_cache = k_cache[: len(q)], v_cache[: len(q)]
    kept = _combine_masks(causal, window_size, mask)
    batch, q_len = q.shape[:2]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    new = 0 if k is None else k.shape[1]
    fewest = 0  # tokens that every sequence is known to hold
    if not isinstance(cache_seqlens, torch.Tensor):
        fewest = capacity if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch,), fewest, dtype=torch.int32, device=q.device)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        counts = cache_seqlens.tolist() or [0]  # there may be no sequence
        fewest, longest = min(counts), max(counts)
        if fewest < 0:
            raise ValueError(f"cache_seqlens must not be negative; got {fewest}")
        if longest + new > capacity:
            room = "block_table names pages for" if paged else "the cache has room for"
            raise ValueError(f"{room} {capacity} tokens of a sequence; got cache_seqlens of up to {longest} and {new} new tokens")
    index = _make_indexer(k_cache, cache_batch_idx, block_table, batch)
    if k is not None and v is not None:
        position = cache_seqlens[:, None].long() + torch.arange(new, device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            by_query = torch.arange(q_len, device=q.device) if causal or _parse_window(window_size) != (None, None) else 0
            q = _apply_rotary(q, rotary_cos, rotary_sin, cache_seqlens[:, None].long() + by_query, rotary_interleaved)
            k = _apply_rotary(k, rotary_cos, rotary_sin, position, rotary_interleaved)
        for cache, tokens in ((k_cache, k), (v_cache, v)):
            _write(cache, tokens, position, index, capacity)
    lens = cache_seqlens + new
    variant = _variant(0.0, softcap, alibi_slopes)
    options: dict[str, Any] = {"scale": softmax_scale, "return_lse": True, "backend": backend}
    reasons_to_copy = {
        "softcap or alibi_slopes": variant,
        "cache_leftpad": cache_leftpad is not None,
        f"more than {MAX_QUERIES} queries": q_len > MAX_QUERIES,
        "pages of such a size": paged and k_cache.shape[1] & (k_cache.shape[1] - 1),
        # Decoding lets a query before the first token keep nothing; that package lets it see what causal and window leave.
        "queries before the first token": mask is None
        and not causal
        and _parse_window(window_size)[1] != 0
        and q_len > max(1, fewest + new),
    }
    reason = next((name for name, holds in reasons_to_copy.items() if holds), None)
    if reason is not None:
        _check_shift_invariant(mask, f"a cache with {reason}")
        # The last tokens of all sequences go to the end of the axis.
        lens = lens.clamp(max=capacity)
        token = torch.arange(capacity, device=q.device) - (capacity - lens)[:, None]
        keys, values = (cache[index(token)] for cache in (k_cache, v_cache))
        first = capacity - lens if cache_leftpad is None else capacity - lens + cache_leftpad
        q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
        out, lse = attention(q, keys, values, kept, kv_starts=first.clamp(max=capacity), **options, **variant)
    else:
        if cache_batch_idx is not None:
            k_cache, v_cache = (cache.index_select(0, cache_batch_idx) for cache in (k_cache, v_cache))
        q, k_cache, v_cache = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
        out, lse = attention_decode(q, k_cache, v_cache, kept, kv_lens=lens, block_table=block_table, **options)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _check_dims(name: str, tensor: torch.Tensor, shape: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
    packed = next((int(part) for part in shape.split(", ") if part in ("2", "3")), None)
    if tensor.dim() != shape.count(",") + 1 or (packed is not None and tensor.shape[-3] != packed):
        raise ValueError(f"{name} must have shape {shape}; got {tuple(tensor.shape)}")


def _read_max_seqlen(name: str, given: int | torch.Tensor, most: int) -> int:
    if not isinstance(given, torch.Tensor):
        return given
    if given.numel() != 1:
        raise TypeError(f"{name} must be an int, or a tensor of one; got a tensor of shape {tuple(given.shape)}")
    return most if torch.compiler.is_compiling() else int(given)


def _check_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
) -> None:
    """Raises ValueError for sequences that do not fit their tokens, as ``attention_varlen`` does, or their pages."""
    _check_dims("q", q, "(tokens of all sequences, heads, head_dim)")
    shape = "(tokens of all sequences, kv_heads, head_dim)" if block_table is None else "(pages, page_size, kv_heads, head_dim)"
    for name, tensor in (("k", k), ("v", v)):
        _check_dims(name, tensor, shape)
    resolve_longest("q", q, cu_seqlens_q, max_seqlen_q)
    if block_table is None:
        resolve_longest("k", k, cu_seqlens_k, max_seqlen_k)
    else:
        _check_block_table(block_table, len(cu_seqlens_k) - 1)
        most = block_table.shape[1] * k.shape[1]
        if cu_seqlens_k.device.type == "cpu" and not is_recorded(cu_seqlens_k.device):
            lengths = cu_seqlens_k.diff().tolist()
            if min(lengths, default=0) < 0 or max(lengths, default=0) > min(max_seqlen_k, most):
                raise ValueError(
                    f"cu_seqlens_k must not decrease, and no sequence be longer than max_seqlen_k={max_seqlen_k} or the {most} "
                    f"tokens of its pages; got sequences of {min(lengths)} to {max(lengths)} tokens"
                )
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must be of as many sequences; got {len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        )


def _check_block_table(block_table: torch.Tensor, batch: int) -> None:
    if block_table.dim() != 2 or len(block_table) != batch or block_table.shape[1] == 0:
        raise ValueError(f"block_table must have shape ({batch}, pages of a sequence); got {tuple(block_table.shape)}")


def _variant(dropout_p: float, softcap: float, alibi_slopes: torch.Tensor | None) -> dict:
    variant = {"dropout_p": dropout_p, "softcap": softcap if softcap > 0 else None, "alibi_slopes": alibi_slopes}
    return {name: value for name, value in variant.items() if value is not None and not (name == "dropout_p" and value == 0)}


def _parse_window(window_size) -> tuple[int | None, int | None]:
    try:
        left, right = (int(limit) for limit in window_size)
    except (TypeError, ValueError):
        raise ValueError(
            "window_size must be (left, right), how many keys before and after a query's own position are kept, -1 for no limit; "
            f"got {window_size!r}"
        ) from None
    return None if left < 0 else left, None if right < 0 else right


def _combine_masks(causal: bool, window_size, mask):
    """Returns the mask of a call. FlashAttention's own part is text, which torch.compile accepts on every PyTorch."""
    left, right = _parse_window(window_size)
    right = 0 if causal else right
    if left is None and right is None:
        return mask
    parts = [f"{name}={limit}" for name, limit in (("left", left), ("right", right)) if limit is not None]
    window = "causal" if left is None and right == 0 else f"window({', '.join(parts)})"
    if mask is None:
        return window
    if isinstance(mask, str):
        return f"({text_of(mask)}) & {window}"  # read alone first, so that an error shows the given text
    if isinstance(mask, Pattern):
        return _intersect(mask, window)
    raise ValueError(
        f"mask is a {type(mask).__name__}, which causal and window_size cannot be joined with; compile it from a pattern that says "
        f"these, such as '... & {window}', or pass the pattern"
    )


@cached_until_cleared(maxsize=256)
def _intersect(mask: Pattern, window: str) -> Pattern:
    return mask & window


def _check_shift_invariant(mask, what: str) -> None:
    if mask is None:
        return
    pattern = parse(mask) if isinstance(mask, str) else mask
    if not (isinstance(pattern, Pattern) and _is_shift_invariant(pattern)):
        raise ValueError(
            f"{what}: mask must be a pattern of distances alone there, such as causal and windows, as sequences are moved to the "
            f"end of an axis; got {mask}"
        )


def _is_shift_invariant(pattern: Pattern) -> bool:
    if isinstance(pattern, (And, Or)):
        return all(map(_is_shift_invariant, pattern.operands))
    if isinstance(pattern, Not):
        return _is_shift_invariant(pattern.operand)
    return _is_shift_invariant(pattern.expand_expression()) if isinstance(pattern, DerivedPattern) else pattern.shift_period == 1


class _Rows(NamedTuple):
    """Packed sequences on an axis with ``longest`` rows for each. first: (sequences,) int32, the first row that a sequence fills.
    length: its tokens. row_of_token, token_of_row: int32, -1 for none."""

    longest: int
    first: torch.Tensor
    length: torch.Tensor
    row_of_token: torch.Tensor
    token_of_row: torch.Tensor


def _lay_out_rows(cu_seqlens: torch.Tensor, tokens: int, longest: int, at_end: bool) -> _Rows:
    """Lays packed sequences out, ``longest`` rows for each: at the end of these, or at their start."""
    start, count = cu_seqlens[:-1].int(), cu_seqlens.diff().int().clamp(max=longest)
    first = longest - count if at_end else torch.zeros_like(count)
    position = torch.arange(longest, device=cu_seqlens.device, dtype=torch.int32) - first[:, None]
    token_of_row = torch.where((position >= 0) & (position < count[:, None]), start[:, None] + position, -1).flatten()
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens[1:].int().contiguous(), token, right=True).clamp(max=len(count) - 1)
    position = token - start[sequence]
    row = sequence.int() * longest + first[sequence] + position
    return _Rows(longest, first, count, torch.where((position >= 0) & (position < count[sequence]), row, -1), token_of_row)


def _gather_rows(x: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """(tokens, heads, head_dim) -> (sequences, heads, longest, head_dim)."""
    taken = take_rows(x, rows.token_of_row, rows.row_of_token, 0.0, False)
    return taken.unflatten(0, (len(rows.length), rows.longest)).transpose(1, 2)


def _scatter_rows(x: torch.Tensor, rows: _Rows, fill: float) -> torch.Tensor:
    """(sequences, heads, longest, head_dim) -> (tokens, heads, head_dim), with ``fill`` for tokens of no sequence."""
    return take_rows(x.transpose(1, 2).flatten(0, 1), rows.row_of_token, rows.token_of_row, fill, False)


def _find_pages(block_table: torch.Tensor, token: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (page, offset in it) of tokens (sequences, n); page 0 for tokens before a sequence's first. Raises as
    ``check_read_pages`` does."""
    exists, token, size = token >= 0, token.clamp(min=0).long(), cache.shape[1]
    page = block_table.long().gather(1, (token // size).clamp(max=block_table.shape[1] - 1))
    check_read_pages(page, exists, len(cache))
    return torch.where(exists, page, 0), token % size


def _make_indexer(cache, cache_batch_idx, block_table, batch: int):
    """Returns a function: positions (batch, n) -> an index into the cache; any index for negative positions."""
    if block_table is not None:
        return lambda token: _find_pages(block_table, token, cache)
    caches = torch.arange(batch, device=cache.device) if cache_batch_idx is None else cache_batch_idx.long()
    return lambda token: (caches[:, None], token.clamp(min=0).long())


def _write(cache: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor, index, capacity: int) -> None:
    """Writes tokens (batch, n, heads, head_dim) to their positions. Tokens past the capacity are dropped: they write the same as
    the first one; if that is past the end too, it rewrites the old contents."""
    fits = position < capacity
    position = torch.where(fits, position, torch.where(fits[:, :1], position[:, :1], capacity - 1))
    there = torch.where(fits[:, :1, None, None], tokens[:, :1].to(cache.dtype), cache[index(position[:, :1])])
    cache.index_put_(index(position), torch.where(fits[:, :, None, None], tokens.to(cache.dtype), there))


def _apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates the first dimensions of x, (batch, tokens, heads, head_dim). position: (batch, tokens | 1) int64."""
    half = cos.shape[1]
    cos, sin = (table[position].float()[:, :, None] for table in (cos, sin))
    rotary, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    first, second = (rotary[..., ::2], rotary[..., 1::2]) if interleaved else (rotary[..., :half], rotary[..., half:])
    rotated = first * cos - second * sin, first * sin + second * cos
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([joined.to(x.dtype), rest], -1)


def _check_cache_call(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, block_table) -> None:
    if (k is None) != (v is None):
        raise ValueError("k and v go together; one of them is None")
    if k is not None and cache_seqlens is None:
        raise ValueError("k and v are written at cache_seqlens, which is None; pass the tokens that each cache holds")
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin go together; one of them is None")
    if cos is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin are for calls with k and v; rotate q before the call")
    if cos is not None and (cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[3]):
        raise ValueError(
            f"rotary_cos and rotary_sin must have shape (positions, rotary_dim / 2), rotary_dim at most {q.shape[3]}; got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("block_table says which pages a sequence has, and cache_batch_idx which cache; pass one of them")
    if block_table is not None:
        _check_block_table(block_table, len(q))
    elif cache_batch_idx is None and len(k_cache) < len(q):
        raise ValueError(f"there must be a cache for each sequence; got {len(k_cache)} caches and {len(q)} sequences")
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != q.shape[3]:
        raise ValueError(
            "k_cache and v_cache must agree in all but head_dim, and k_cache in that with q; got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}, and q of {tuple(q.shape)}"
        )
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if tensor is not None and (tensor.dim() != 4 or tensor.shape[0] != q.shape[0] or tensor.shape[2:] != cache.shape[2:]):
            raise ValueError(
                f"{name} must have shape (batch, new tokens, kv_heads, head_dim), here ({q.shape[0]}, new tokens, "
                f"{cache.shape[2]}, {cache.shape[3]}); got {tuple(tensor.shape)}"
            )
    if k is not None and k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must hold as many new tokens; got {k.shape[1]} and {v.shape[1]}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k_cache, v_cache, k, v)):
        raise ValueError("flash_attn_with_kvcache gives no gradients, and an argument requires one; call it under torch.no_grad()")
