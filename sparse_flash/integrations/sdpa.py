"""A call of PyTorch's ``scaled_dot_product_attention``, computed here.

    from sparse_flash.integrations.sdpa import scaled_dot_product_attention

The arguments and what they mean are PyTorch's; ``attn_mask`` may also be a Pattern, its spec text or a BlockMask.

Source: torch.nn.functional.scaled_dot_product_attention.
"""

from __future__ import annotations

import torch

from ..attention import attention
from ..block_mask import BlockMask
from ..pattern import Pattern


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
    """softmax(query key^T * scale, over the pairs that are kept) value, like query.

    query: (batch, heads, q_len, head_dim). key, value: (batch, heads, kv_len, head_dim), or with enable_gqa a divisor of
    those heads.
    attn_mask: a bool tensor, True where a pair is kept, of shape (q_len, kv_len) or (batch | 1, heads | 1, q_len, kv_len): it
    is turned into a table in each call, by a pass over all its pairs on the host, so make it once with
    ``BlockMask.from_dense`` where it stays the same. Or a mask of this library, aligned as ``attention`` says.
    is_causal: each query sees the keys up to its own number, counted from the first, as in PyTorch; for as many queries as keys.

    dropout_p: as there, of other pairs for the same seed.

    Raises ValueError for what it does not carry: masks of numbers, causal calls of unequal lengths.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal were both given; say 'causal & ...' in the mask")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"is_causal counts queries from the first key in PyTorch, which leaves keys unseen where lengths differ; got "
            f"{query.shape[-2]} queries and {key.shape[-2]} keys; attn_mask='causal' aligns the last query with the last key"
        )
    if not enable_gqa and query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True to share key heads")
    if isinstance(attn_mask, torch.Tensor):
        if attn_mask.dtype != torch.bool:
            raise ValueError(f"attn_mask must be bool, True where a pair is kept; got {attn_mask.dtype}, which is added to scores")
        attn_mask = BlockMask.from_dense(attn_mask.expand(*attn_mask.shape[:-2], query.shape[-2], key.shape[-2]))
    mask = "causal" if is_causal else attn_mask
    return attention(query, key, value, mask, scale=scale, dropout_p=dropout_p)
