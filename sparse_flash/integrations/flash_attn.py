"""Three calls of the ``flash-attn`` package (FlashAttention 2), computed here: a program that uses them changes one import.

    from sparse_flash.integrations.flash_attn import flash_attn_func

Argument names, order and defaults, layouts, and the meaning of ``causal`` and ``window_size`` for unequal lengths are that
package's: the last query is aligned with the last key, and a window includes both ends. Each call also takes ``mask``, a Pattern or
its spec text (except in varlen calls, also a BlockMask), and ``backend``, as in ``sparse_flash.attention``. A pair is kept if mask,
causal and window all keep it.

Differences: a query that keeps nothing has lse -inf, not inf. ``return_attn_probs`` returns None for ``S_dmask``, and is refused
with dropout. ``num_splits`` has no effect. Tensors in e4m3 and rotary embedding are refused. Tokens past the capacity of a cache
are dropped on a GPU, and raise ValueError on a CPU.

Source: flash_attn.flash_attn_interface (https://github.com/Dao-AILab/flash-attention), version 2.8.
"""

from typing import Any

import torch

from ..api.attention import attention
from ..api.decode import attention_decode
from ..api.varlen import attention_varlen
from ..core.arguments import check_shapes, refuse_probabilities
from ..decoding.arguments import MAX_QUERIES
from ..masks.block_mask import BlockMask
from ..masks.parsing import text_of
from ..masks.pattern import Pattern
from ..packed.arguments import resolve_longest
from ..packed.rows import lay_out_rows, read_to_end, write
from .models import depends_on_position

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
    mask: BlockMask | Pattern | str | None = None,
    backend: str = "auto",
):
    """Returns softmax(softmax_scale * q k^T) v over the kept pairs.

    q: (batch, seqlen_q, heads, head_dim). k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
    window_size: (left, right), how many keys before and after a query's own position are kept; negative for no limit. causal: right
    is 0. softcap: 0 for none. alibi_slopes: (heads,) or (batch, heads), adds -slope * |i + seqlen_k - seqlen_q - j|. deterministic:
    bitwise repeatable gradients; False follows torch.are_deterministic_algorithms_enabled().

    Returns out, like q, or with return_attn_probs (out, lse, None), lse of shape (batch, heads, seqlen_q) float32. Differentiable.
    Raises ValueError for return_attn_probs with dropout, and whenever ``sparse_flash.attention`` does.
    """
    refuse_probabilities(dropout_p, return_attn_probs)
    check_shapes(
        "q: batch seqlen_q heads head_dim; k: batch seqlen_k kv_heads head_dim; v: batch seqlen_k kv_heads v_head_dim", q, k, v
    )
    options: dict[str, Any] = {"scale": softmax_scale, "deterministic": deterministic or None, "backend": backend}
    options |= _terms(dropout_p, softcap, alibi_slopes)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = attention(q, k, v, _combine_masks(causal, window_size, mask), return_lse=True, **options)
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    block_table: torch.Tensor | None = None,
    *,
    mask: Pattern | str | None = None,
    backend: str = "auto",
):
    """Does what ``flash_attn_func`` does, for each of several sequences, packed one after another.

    q: (total_q, heads, head_dim). k, v: (total_k, kv_heads, head_dim), or with block_table pages, (pages, page_size, kv_heads,
    head_dim). cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, the start of each sequence, and the end of the last.
    max_seqlen_q, max_seqlen_k: upper bounds on sequence lengths. block_table: (sequences, pages of one) int32, the pages of each.

    Returns out, like q, or with return_attn_probs (out, lse, None), lse of shape (heads, total_q) float32.

    With dropout, softcap, alibi_slopes or block_table, sequences are first moved to an axis of max_seqlen tokens each, which takes
    that much memory. mask must then depend only on distances (causal, windows), unless queries and keys share cu_seqlens.
    """
    refuse_probabilities(dropout_p, return_attn_probs)
    kv = "total_k" if block_table is None else "pages page_size"
    check_shapes(
        f"q: total_q heads head_dim; k: {kv} kv_heads head_dim; v: {kv} kv_heads v_head_dim; cu_seqlens_q: sequences+1; "
        "cu_seqlens_k: sequences+1; cu_seqlens_k[1:]: sequences; block_table: sequences pages_of_one",
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k[1:], block_table),
    )
    capacity = len(k) if block_table is None else block_table.shape[1] * k.shape[1]
    options: dict[str, Any] = {"scale": softmax_scale, "deterministic": deterministic or None, "backend": backend}
    terms = _terms(dropout_p, softcap, alibi_slopes)
    kept = _combine_masks(causal, window_size, mask)
    if block_table is None and not terms:
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, kept, return_lse=True, **options)
        return (out, lse, None) if return_attn_probs else out
    resolve_longest("q", q, cu_seqlens_q, max_seqlen_q)
    pages = k if block_table is None else k.new_empty(len(block_table) * capacity, 0)
    resolve_longest("k", pages, cu_seqlens_k, min(max_seqlen_k, capacity))
    shared = block_table is None and cu_seqlens_k is cu_seqlens_q and max_seqlen_k == max_seqlen_q
    if not shared:
        _check_shift_invariant(mask)
    queries = lay_out_rows(cu_seqlens_q, len(q), max_seqlen_q, at_end=not shared)
    if block_table is None:
        keys = lay_out_rows(cu_seqlens_k, len(k), max_seqlen_k, at_end=not shared)
        kv_first, k, v = keys.first, keys.take(k), keys.take(v)
    else:
        kv_first, k, v = read_to_end((k, v), block_table, cu_seqlens_k.diff(), max_seqlen_k)
    by_length = {"q_lens": queries.length, "kv_lens": queries.length}
    options |= by_length if shared else {"q_starts": queries.first, "kv_starts": kv_first}
    out, lse = attention(queries.take(q), k, v, kept, return_lse=True, **options, **terms)
    out = queries.put_back(out, 0.0)
    return (out, queries.put_back(lse[..., None], float("-inf")).squeeze(-1).T, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
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
    cache_seqlens: an int, or (batch,) int32, the tokens of each sequence before k; None: the capacity.
    cache_batch_idx: (batch,) int32, the cache that each sequence uses; these are copied in each call. None: the first ones.
    cache_leftpad: (batch,) int32, the first token of each sequence in its cache. block_table: (batch, pages of one) int32.
    rotary_cos, rotary_sin: must be None. rotary_interleaved: unused.

    Returns out, like q, or with return_softmax_lse (out, lse), lse of shape (batch, heads, seqlen_q) float32.

    Up to 64 queries with pages of a power-of-two size run as ``attention_decode``, which copies nothing. With more queries, other
    pages, softcap, alibi_slopes or cache_leftpad, and for several queries that see later keys, each call copies the cache, and mask
    must be a pattern that depends only on distances.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin must be None; got tables; rotate q and k before the call")
    paged = block_table is not None
    if not paged and cache_batch_idx is None:
        k_cache, v_cache = k_cache[: len(q)], v_cache[: len(q)]
    cache = "pages page_size" if paged else "batch capacity" if cache_batch_idx is None else "caches capacity"
    lengths = cache_seqlens if isinstance(cache_seqlens, torch.Tensor) else None
    check_shapes(
        f"q: batch seqlen_q heads head_dim; k_cache: {cache} kv_heads head_dim; v_cache: {cache} kv_heads v_head_dim; "
        "k: batch seqlen_new kv_heads head_dim; v: batch seqlen_new kv_heads v_head_dim; cache_seqlens: batch; "
        "cache_batch_idx: batch; cache_leftpad: batch; block_table: batch pages_of_one",
        *(q, k_cache, v_cache, k, v, lengths, cache_batch_idx, cache_leftpad, block_table),
    )
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError("k, v and cache_seqlens go together, as k and v are written at cache_seqlens; one of them is None")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k_cache, v_cache, k, v)):
        raise ValueError("flash_attn_with_kvcache gives no gradients, and an argument requires one; call it under torch.no_grad()")
    kept = _combine_masks(causal, window_size, mask)
    number = torch.arange(len(q), device=q.device) if cache_batch_idx is None else cache_batch_idx
    table = block_table if block_table is not None else number[:, None]  # a cache is one page
    capacity, added = table.shape[1] * k_cache.shape[1], 0 if k is None else k.shape[1]
    if not isinstance(cache_seqlens, torch.Tensor):
        held = capacity if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((len(q),), held, dtype=torch.int32, device=q.device)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        counts = cache_seqlens.tolist() or [0]  # there may be no sequence
        if min(counts) < 0 or max(counts) + added > capacity:
            most = f"{capacity - added}, for {added} new tokens in a capacity of {capacity}"
            raise ValueError(f"cache_seqlens must be 0 to {most}; got {min(counts)} to {max(counts)}")
    lens = cache_seqlens + added
    options: dict[str, Any] = {"scale": softmax_scale, "return_lse": True, "backend": backend}
    terms = _terms(0.0, softcap, alibi_slopes)
    q_len, q = q.shape[1], q.transpose(1, 2)
    odd_pages = paged and k_cache.shape[1] & (k_cache.shape[1] - 1)
    # Decoding lets a query before the first token keep nothing; that package lets it see what causal and window leave.
    see_later_keys = q_len > 1 and mask is None and not (causal or int(window_size[1]) == 0)
    if moved := cache_leftpad is not None or terms or odd_pages or see_later_keys or q_len > MAX_QUERIES:
        _check_shift_invariant(mask)
    if k is not None and v is not None:
        position = cache_seqlens[:, None].long() + torch.arange(added, device=q.device)
        write(k_cache, k, position, table)
        write(v_cache, v, position, table)
    if moved:
        first, keys, values = read_to_end((k_cache, v_cache), table, lens.clamp(max=capacity), capacity)
        first = first if cache_leftpad is None else (first + cache_leftpad).clamp(max=capacity)
        out, lse = attention(q, keys, values, kept, kv_starts=first, **options, **terms)
    else:
        if cache_batch_idx is not None:
            k_cache, v_cache = (cache.index_select(0, cache_batch_idx) for cache in (k_cache, v_cache))
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        out, lse = attention_decode(q, k_cache, v_cache, kept, kv_lens=lens, block_table=block_table, **options)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _terms(dropout_p: float, softcap: float, alibi_slopes: torch.Tensor | None) -> dict[str, Any]:
    """The options of ``attention`` that the call uses and ``attention_varlen`` and ``attention_decode`` do not take."""
    terms = {"dropout_p": dropout_p or None, "softcap": softcap if softcap > 0 else None, "alibi_slopes": alibi_slopes}
    return {name: value for name, value in terms.items() if value is not None}


def _combine_masks(causal: bool, window_size, mask):
    """Returns the mask of a call. FlashAttention's own part is text, which torch.compile accepts on every PyTorch."""
    try:
        left, right = (int(limit) for limit in window_size)
    except (TypeError, ValueError):
        said = "window_size must be (left, right), how many keys before and after a query are kept, -1 for no limit"
        raise ValueError(f"{said}; got {window_size!r}") from None
    limits = {"left": left, "right": 0 if causal else right}
    window = ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit >= 0)
    if not window:
        return mask
    window = "causal" if window == "right=0" else f"window({window})"
    if mask is None:
        return window
    if isinstance(mask, str):
        return f"({text_of(mask)}) & {window}"  # read alone first, so that an error shows the given text
    if isinstance(mask, Pattern):
        return mask & window
    raise ValueError(
        f"mask must be a Pattern or its text with causal and window_size; got {type(mask).__name__}; compile it from a pattern "
        f"that says these, such as '... & {window}', or pass the pattern"
    )


def _check_shift_invariant(mask) -> None:
    if depends_on_position(mask):
        raise ValueError(
            "mask must be a pattern of distances alone, such as causal and windows, in calls that move sequences to the end of an "
            f"axis (see the docstring); got {mask}"
        )
