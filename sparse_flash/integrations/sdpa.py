"""PyTorch's ``scaled_dot_product_attention``, computed here.

    from sparse_flash.integrations.sdpa import scaled_dot_product_attention

Arguments have PyTorch's meaning; ``attn_mask`` may also be a Pattern, its spec text or a BlockMask.

Source: torch.nn.functional.scaled_dot_product_attention.
"""

from __future__ import annotations

import torch

from ..api.attention import attention
from ..core.arguments import check_types
from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | BlockMask | Pattern | str | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Returns softmax(query key^T * scale) value over the kept pairs, like query but with value's head_dim.

    query: (batch, heads, q_len, head_dim). key, value: (batch, heads, kv_len, head_dim), or with enable_gqa a divisor of those
    heads; value may have another head_dim.
    attn_mask: a bool tensor, True where a pair is kept, of two to four dimensions that broadcast to (batch, heads, q_len, kv_len).
    Each call turns it into a table by scanning all its pairs on the host; if it stays the same, call ``BlockMask.from_dense`` once
    instead. Or ``torch.nn.attention.bias.causal_lower_right`` or ``causal_upper_left`` of these lengths, or a mask of this library,
    aligned as in ``attention``.
    is_causal: each query sees the keys up to its own index, counted from the first, as in PyTorch; requires as many queries as
    keys, as does ``causal_upper_left``.

    dropout_p: as in PyTorch, but the same seed drops different pairs.

    Raises ValueError for float masks, for causal calls of unequal lengths, and for shapes that do not fit; TypeError for nested
    tensors and other subclasses as masks.
    """
    check_types(query, key, value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (batch, heads, tokens, head_dim); got {tuple(tensor.shape)}")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal were both given; say 'causal & ...' in the mask")
    if is_causal:
        _check_upper_left("is_causal", query.shape[2], key.shape[2])
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True to share key heads")
    if isinstance(attn_mask, torch.Tensor):
        attn_mask = _convert_mask(attn_mask, (*query.shape[:3], key.shape[2]))
    mask = "causal" if is_causal else attn_mask
    return attention(query, key, value, mask, scale=scale, dropout_p=dropout_p)  # type: ignore[return-value]  # a tuple with return_lse


def _check_upper_left(name: str, q_len: int, kv_len: int) -> None:
    if q_len != kv_len:
        raise ValueError(
            f"{name} counts queries from the first key in PyTorch, which leaves keys unseen if lengths differ; got {q_len} queries "
            f"and {kv_len} keys; attn_mask='causal' aligns the last query with the last key"
        )


def _convert_mask(kept: torch.Tensor, wanted: tuple[int, ...]) -> BlockMask | str | None:
    """Returns the mask of a tensor that broadcasts to wanted, (batch, heads, q_len, kv_len); None if there are no pairs. A mask
    that batch entries or heads share is stored once."""
    if type(kept) not in (torch.Tensor, torch.nn.Parameter) or kept.is_nested or kept.layout is not torch.strided:
        from torch.nn.attention.bias import CausalBias, CausalVariant  # at the first such mask, as it imports torch.compile

        if not isinstance(kept, CausalBias):
            kind = "nested tensor" if kept.is_nested else f"{type(kept).__name__} of layout {kept.layout}"
            raise TypeError(f"attn_mask must be a plain bool tensor, True where a pair is kept; got a {kind}; make it dense first")
        if (kept.seq_len_q, kept.seq_len_kv) != wanted[2:]:
            raise ValueError(
                f"attn_mask must be of {wanted[2]} queries and {wanted[3]} keys; got a causal bias of {kept.seq_len_q} and "
                f"{kept.seq_len_kv}; make it for these, or pass attn_mask='causal'"
            )
        if kept.variant == CausalVariant.UPPER_LEFT:
            _check_upper_left("causal_upper_left", *wanted[2:])
        return "causal"
    if kept.dtype != torch.bool:
        raise ValueError(f"attn_mask must be bool, True where a pair is kept; got {kept.dtype}, which is added to scores")
    shape = (1,) * (4 - kept.dim()) + tuple(kept.shape)
    if not 2 <= kept.dim() <= 4 or any(size not in (1, whole) for size, whole in zip(shape, wanted, strict=True)):
        raise ValueError(
            f"attn_mask must broadcast to (batch, heads, q_len, kv_len), here {wanted}; got {tuple(kept.shape)}; it must have two "
            "to four dimensions, each 1 or that of the call, counted from the last"
        )
    return None if 0 in wanted else BlockMask.from_dense(kept.view(shape).expand(-1, -1, *wanted[2:]))
