"""Makes BlockMasks of block maps computed at run time, on the device of the map."""

from __future__ import annotations

import torch

from ..compat.pytorch import in_differentiating_transform, is_recorded
from .block_mask import BlockMask
from .grid import BlockGrid
from .memory import remembered
from .select_blocks import Listing, chosen, counted, listing_of, table_of_all

_MOST_KEPT_BLOCKS = 1 << 20  # of a mask that keeps every block; some 60 bytes each


def of_maps(maps: torch.Tensor, grid: BlockGrid, within: BlockMask) -> BlockMask:
    """The blocks of ``within``, one mask, that each map keeps. maps: (batch, heads, q_blocks, kv_blocks) bool."""
    if not torch.compiler.is_compiling() and in_differentiating_transform():
        raise NotImplementedError(
            "masks of blocks are not made under vmap or torch.func's transforms; make the mask before, or put what vmap would map "
            "over into the batch"
        )
    listing = _listing(within)
    batch, heads = maps.shape[:2]
    if batch * heads * listing.block.numel() >= 2**31:  # counting both tables
        raise ValueError(
            f"{batch} x {heads} maps of {grid.q_blocks} x {grid.kv_blocks} blocks are more than 2^30 - 1; use a larger block_size"
        )
    by_query, by_key = chosen(maps.reshape(batch * heads, -1), listing)
    return BlockMask(
        q_len=grid.q_len,
        kv_len=grid.kv_len,
        block_size=grid.block_size,
        keeps_all=False,
        mask_index=torch.arange(batch * heads, dtype=torch.int32, device=maps.device).view(batch, heads),
        by_query=by_query,
        by_key=by_key,
        tile_runs=within.tile_runs,
        tile_bits=within.tile_bits,
    )


def of_all_blocks(grid: BlockGrid, device: torch.device) -> BlockMask:
    """The mask that keeps every pair, remembered if it is small."""
    keep_it = grid.q_blocks * grid.kv_blocks <= _MOST_KEPT_BLOCKS and not is_recorded(device)
    return (_kept_of_all_blocks if keep_it else _of_all_blocks)(grid, device)


def _of_all_blocks(grid: BlockGrid, device: torch.device) -> BlockMask:
    """The mask that keeps every pair, made on the device: a copy from the host would repeat in each replay of a graph."""
    size, cut_row, cut_col = grid.block_size, grid.q_len % grid.block_size, grid.kv_len % grid.block_size
    # The tile that says where a cut block ends: 0 in the last column, 1 in the last row, 2 in the corner.
    tile = torch.zeros(grid.shape, dtype=torch.int32, device=device)
    if cut_row:
        tile[-1] = 1
        tile[-1, -1:] += cut_col > 0
    heights = [size, cut_row or size, cut_row or size]
    widths = [cut_col or size, size, cut_col or size]
    token = counted(size, device)
    runs = [(token < h).to(torch.int32) * (w << 16) for h, w in zip(heights, widths, strict=True)]
    return BlockMask(
        q_len=grid.q_len,
        kv_len=grid.kv_len,
        block_size=size,
        keeps_all=True,
        mask_index=torch.zeros((1, 1), dtype=torch.int32, device=device),
        by_query=table_of_all(tile, cut_row > 0, cut_col > 0),
        by_key=table_of_all(tile.T, cut_col > 0, cut_row > 0),
        tile_runs=torch.stack(runs),
        tile_bits=torch.zeros((2, size, -(-size // 32)), dtype=torch.int32, device=device),
    )


_kept_of_all_blocks = remembered(maxsize=16)(_of_all_blocks)


def _listing(mask: BlockMask) -> Listing:
    """The entries of one mask to choose from, made once per mask and kept as long as it lives."""
    known = mask.__dict__.get("_listed")
    if known is None:
        known = listing_of(mask.by_query, mask.by_key)
        if not is_recorded(mask.device):
            mask.__dict__["_listed"] = known
    return known
