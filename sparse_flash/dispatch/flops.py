"""Counts the floating-point operations of kept pairs: for ``torch.utils.flop_counter``, ``explain`` and the benchmarks.

Tables are read on the host, which synchronizes with a GPU. Tensors without values, fake ones and those on the device meta, are
counted by their shapes: all pairs of as many blocks as a table has room for. Their lengths may be symbolic.
"""

from __future__ import annotations

import numpy as np
import torch

from ..masks.block_mask import BlockMask
from ..variant.variant import LENGTHS, Variant


def forward_flops(head_dim: int, v_head_dim: int) -> int:
    """Returns what a pair takes: its score and its part of out."""
    return 2 * (head_dim + v_head_dim)


def backward_flops(head_dim: int, v_head_dim: int) -> int:
    """Returns what a pair takes: its score again, the gradient of its weight, and its parts of dq, dk and dv."""
    return 2 * (3 * head_dim + 2 * v_head_dim)


def have_values(*tensors: torch.Tensor | None) -> bool:
    return all(t is None or (type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta) for t in tensors)


def kept_pairs(q: torch.Tensor, k: torch.Tensor, mask: BlockMask | None, variant: Variant | None = None) -> int:
    """How many pairs a call keeps, over batch and heads. mask: None for all pairs. variant: pairs of tokens that its lengths
    exclude do not count."""
    batch, heads, q_len, kv_len = *q.shape[:3], k.shape[2]
    lengths = [] if variant is None else [t for t in (getattr(variant, name) for name in LENGTHS) if t is not None]
    if variant is None or not lengths or not have_values(*lengths, *([] if mask is None else [mask.mask_index])):
        return batch * heads * q_len * kv_len if mask is None else count_mask_pairs(mask, batch, heads)
    queries = _spans(variant.q_starts, variant.q_lens, q_len, batch)
    keys = _spans(variant.kv_starts, variant.kv_lens, kv_len, batch)
    return count_pairs_within(mask, queries, keys, heads)


def count_mask_pairs(mask: BlockMask, batch: int, heads: int) -> int:
    """How many pairs a mask keeps, over batch and heads."""
    if not have_values(mask.mask_index):
        room, every = mask.by_query.col_idx.shape[0] * mask.block_size**2 // mask.masks, mask.q_len * mask.kv_len
        known = isinstance(room, int) and isinstance(every, int)  # comparing symbolic lengths would fix them
        return batch * heads * (min(room, every) if known else room)
    index = mask.mask_index.cpu().numpy()
    return int(mask.kept_pairs()[index].sum()) * (batch * heads // index.size)


def count_pairs_within(mask: BlockMask | None, queries: np.ndarray, keys: np.ndarray, heads: int) -> int:
    """Like ``count_mask_pairs``, of the queries and keys first .. stop - 1 of each batch entry, both (batch, 2) int64."""
    if mask is None:
        return heads * int((np.diff(queries) * np.diff(keys)).sum())
    index = np.broadcast_to(mask.mask_index.cpu().numpy(), (len(queries), heads))
    of_heads = np.column_stack([index.ravel(), *(np.repeat(spans, heads, 0) for spans in (queries, keys))])
    different, counts = np.unique(of_heads, axis=0, return_counts=True)
    found = (mask.pairs_between(number, (a, b), (c, d)) for number, a, b, c, d in different.tolist())
    return sum(pairs * count for pairs, count in zip(found, counts.tolist(), strict=True))


def _spans(starts: torch.Tensor | None, lens: torch.Tensor | None, length: int, batch: int) -> np.ndarray:
    """(batch, 2) int64: the first token that exists and the one after the last, which is never before the first."""
    first, stop = (
        np.full(batch, bound) if given is None else given.cpu().numpy().astype(np.int64).clip(0, length)
        for given, bound in ((starts, 0), (lens, length))
    )
    return np.column_stack([first, np.maximum(first, stop)])
