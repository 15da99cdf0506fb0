"""Blocks that the newest queries of a cache choose, by the mean keys of its blocks, which are kept as it grows.

On a GPU a kernel each (``kernels/selection/newest_blocks``), elsewhere PyTorch operations of fixed shapes; neither synchronizes.
"""

from __future__ import annotations

from functools import partial

import torch

from ..backends import cache_capacity, dequantized
from ..backends import triton as triton_backend
from ..backends.torch import without_autocast
from ..compat.names import operator_name
from ..compat.pytorch import is_plain_eager
from ..kernels.common.layout import as_contiguous_rows
from ..kernels.common.streams import current_device
from . import decode
from .choice import add_own_block, kernel_chooses, rank_columns
from .decode import query_positions, read_tokens, resolve_lengths


def choose_newest(
    q: torch.Tensor, means: torch.Tensor, kv_lens: torch.Tensor | None, length: int, keep: int, block_size: int, share_group: bool
) -> torch.Tensor:
    """Like ``choose_by_keys``, for few queries, the last ones of each sequence. One at a negative position picks none.

    means: (batch, kv_heads, blocks, head_dim), in the dtype of ``block_means``, of a cache of ``length`` tokens. kv_lens: (batch,)
    int32; None: ``length``.
    """
    heads = means.shape[1] if share_group else q.shape[1]
    if means.dtype == torch.float32 and kernel_chooses(q, heads, keep):
        call = q, means, kv_lens, length, keep, block_size, heads
        return _choose_by_kernel(*call) if is_plain_eager(q) else _choose_operator(*call)
    own = query_positions(q, length, kv_lens).div(block_size, rounding_mode="floor")[:, None, :, None]
    rows = q.unflatten(1, (means.shape[1], -1)).to(means.dtype)
    with without_autocast(q):
        rows = rows.sum(2, keepdim=True) if share_group else rows
        scores = (rows @ means[:, :, None].mT).flatten(1, 2)
    return add_own_block(rank_columns(scores, own, keep - 1), own, means.shape[2] + 1)


def _choose_by_kernel(
    q: torch.Tensor, means: torch.Tensor, kv_lens: torch.Tensor | None, length: int, keep: int, block_size: int, heads: int
) -> torch.Tensor:
    from ..kernels.selection.newest_blocks import pick_decode_blocks

    with current_device(q.device):
        return pick_decode_blocks(as_contiguous_rows(q), means, _contiguous(kv_lens), length, keep, block_size, heads)


# torch.compile does not look inside.
_choose_operator = torch.library.custom_op(operator_name("choose_newest"), _choose_by_kernel, mutates_args=())


@_choose_operator.register_fake
def _(
    q: torch.Tensor, means: torch.Tensor, kv_lens: torch.Tensor | None, length: int, keep: int, block_size: int, heads: int
) -> torch.Tensor:
    return q.new_empty(q.shape[0], heads, q.shape[2], keep, dtype=torch.int32)


def update_means(
    means: torch.Tensor,
    k: torch.Tensor,
    tokens: int,
    block_size: int,
    kv_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None = None,
) -> None:
    """Writes the means of the blocks that the last ``tokens`` of each sequence made whole.

    means: (batch, kv_heads, blocks + 1, head_dim); the last one takes what is of no whole block.
    """
    batch, heads, blocks = means.shape[0], means.shape[1], means.shape[2] - 1
    touched = (tokens + block_size - 2) // block_size + 1
    if means.dtype == torch.float32 and k.dtype in triton_backend.DTYPES and triton_backend.can_use_kernels(k.device):
        call = means, k, blocks, touched, block_size, kv_lens, block_table
        (_update_by_kernel if is_plain_eager(k) else _update_operator)(*call)
        return
    length = resolve_lengths(batch, cache_capacity(k, block_table), kv_lens, k.device)
    block = length[:, None] // block_size - touched + torch.arange(touched, device=k.device)
    sequence, head = (torch.arange(n, device=k.device) for n in (batch, heads))
    for some in block.split(max(1, decode.CHUNK // (batch * heads * block_size * k.shape[3])), 1):
        exists = (some >= 0) & (some < blocks)
        token = torch.where(exists, some, 0)[:, :, None] * block_size + torch.arange(block_size, device=k.device)
        read = exists.repeat_interleave(block_size, 1)[:, None]
        these = partial(read_tokens, token=token.flatten(1)[:, None], read=read, heads=heads, block_table=block_table)
        keys = dequantized(k, k_scale, k.dtype if k_scale is None else means.dtype, these).unflatten(2, (-1, block_size))
        target = torch.where(exists, some, blocks)[:, None]
        means[sequence[:, None, None], head[:, None], target] = keys.mean(3, dtype=means.dtype)


def _update_by_kernel(
    means: torch.Tensor,
    k: torch.Tensor,
    blocks: int,
    touched: int,
    block_size: int,
    kv_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    from ..kernels.selection.newest_blocks import update_means as launch_update

    if means.shape[0]:
        with current_device(k.device):
            launch_update(means, as_contiguous_rows(k), blocks, touched, block_size, _contiguous(kv_lens), _contiguous(block_table))


_update_operator = torch.library.custom_op(operator_name("update_means"), _update_by_kernel, mutates_args=("means",))


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
