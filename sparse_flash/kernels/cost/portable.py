"""Predicts the time of a call of the portable kernels, as ``hopper`` does for its own. The two kernels of a backward pass count as
one, over columns."""

import numpy as np
import torch

from ..common.config import padded_head_dim
from ..portable.configs import HOPPER, builtin_config
from .chips import Chip, KernelFamily
from .model import AttentionSizes, Launch, dense_tiles, mask_of_heads, tile_amounts

PORTABLE_ROW_BYTES = 4  # of a column of v, for a query in a backward pass: out and dout are read
_WARPS = 8  # of programs that share a multiprocessor


def family_of_blocks(backward: bool, head_dim: int, v_head_dim: int, block_size: int | None) -> KernelFamily:
    """Returns the kernels of 16-bit types and their tiles: backward, the queries of dQ's by the keys of dK's. block_size: the
    table's, or None."""
    rows, config = (
        builtin_config(HOPPER, kernel, torch.bfloat16, head_dim, block_size, v_head_dim)
        for kernel in (("grad_q", "grad_kv") if backward else ("forward", "forward"))
    )
    dims, programs = (padded_head_dim(head_dim), padded_head_dim(v_head_dim)), max(1, _WARPS // config.num_warps)
    return KernelFamily(backward, *dims, rows.tile_m, config.tile_n, programs, portable=True)


def describe_launch(backward: bool, sizes: AttentionSizes, mask, chip: Chip) -> Launch:
    """Returns the launches of a pass. mask: a BlockMask on the host, or None."""
    family = family_of_blocks(backward, sizes.head_dim, sizes.v_head_dim, mask and mask.block_size)
    own, step = (family.keys, family.queries) if backward else (family.queries, family.keys)
    if mask is None:
        own_len, other_len = (sizes.kv_len, sizes.q_len) if backward else (sizes.q_len, sizes.kv_len)
        tiles = dense_tiles(-(-own_len // own), -(-other_len // step), False)
    else:
        table = mask.by_key if backward else mask.by_query
        ptr, order = table.row_ptr.numpy(), table.row_order.numpy()
        begin, end = (np.take_along_axis(bound, order, 1) for bound in (ptr[:, :-1], ptr[:, 1:]))
        runs = np.take_along_axis(table.row_split.numpy()[..., 0], order, 1)
        tiles = tile_amounts(begin, runs, end, mask.block_size // step).repeat(mask.block_size // own, 1)
    heads = sizes.batch * sizes.heads
    row_bytes = PORTABLE_ROW_BYTES * heads * sizes.q_len * sizes.v_head_dim * backward
    programs = family.programs * chip.multiprocessors
    of_heads = mask_of_heads(mask, sizes.batch, sizes.heads)
    return Launch(family, programs, tiles, of_heads, heads, row_bytes, 1 + 2 * backward, (1 + backward) * sizes.tensor_bytes)
