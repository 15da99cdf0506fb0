"""Makes the tables of FlexAttention's block masks: kept blocks, and tiles from their token rule.

Source: torch.nn.attention.flex_attention.BlockMask, whose docstring defines the format.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import noop_mask

from .build import from_entries, from_heads
from .grid import BlockGrid
from .mask_tables import MaskTables
from .select_blocks import map_from_lists
from .table import Entries
from .tiles import FULL_TILE, TilePool, dense_batches


def from_flex(mask: FlexMask) -> MaskTables:
    """The tables of ``BlockMask.from_flex``, for a mask with a token rule, on the CPU."""
    if not isinstance(mask, FlexMask):
        got = f"{type(mask).__module__}.{type(mask).__qualname__}"
        raise TypeError(f"from_flex needs a torch.nn.attention.flex_attention.BlockMask; got {got}")
    grid = _grid_of(mask)
    pool = TilePool(grid.block_size)
    batch, heads = mask.kv_num_blocks.shape[:2]
    masks = [from_entries(grid, _entries_of_head(mask, grid, b, h, pool), pool) for b in range(batch) for h in range(heads)]
    return from_heads(masks, batch, heads)


def keeps_listed_blocks(mask: FlexMask) -> bool:
    """Whether this is a FlexAttention mask without a token rule. It keeps every pair of the blocks that it lists."""
    return isinstance(mask, FlexMask) and (mask.mask_mod is None or mask.mask_mod is noop_mask)


def map_from_flex(mask: FlexMask) -> tuple[torch.Tensor, BlockGrid]:
    """The block map of a mask without a token rule, and its grid."""
    grid = _grid_of(mask)
    blocks = map_from_lists(mask.kv_indices, mask.kv_num_blocks, grid.shape)
    if mask.full_kv_indices is not None and mask.full_kv_num_blocks is not None:
        blocks = blocks | map_from_lists(mask.full_kv_indices, mask.full_kv_num_blocks, grid.shape)
    return blocks, grid


def _grid_of(mask: FlexMask) -> BlockGrid:
    """Raises ValueError for blocks that tables do not have."""
    q_block, kv_block = mask.BLOCK_SIZE
    if q_block != kv_block:
        raise ValueError(f"from_flex needs square blocks; got BLOCK_SIZE={(q_block, kv_block)}; pass one number as BLOCK_SIZE")
    return BlockGrid(*mask.seq_lengths, q_block)


def _entries_of_head(mask: FlexMask, grid: BlockGrid, b: int, h: int, pool: TilePool) -> Entries:
    """The kept blocks of a batch entry's head: none of which the token rule keeps nothing, full ones where it keeps all."""
    size, parts = grid.block_size, []
    for mask_mod, counts, indices in (
        (mask.mask_mod, mask.kv_num_blocks, mask.kv_indices),
        (noop_mask, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        if counts is None or indices is None:
            continue
        listed = torch.arange(indices.shape[3], device=indices.device) < counts[b, h, :, None]
        rows = listed.nonzero()[:, 0].cpu().numpy().astype(np.int64)
        cols = indices[b, h][listed].cpu().numpy().astype(np.int64)
        cut = (grid.heights(rows) < size) | (grid.widths(cols) < size)
        tiles = np.full(len(rows), FULL_TILE, np.int64)
        looked_at = np.flatnonzero(cut) if mask_mod is noop_mask else np.arange(len(rows))
        for part in dense_batches(len(looked_at), size):
            chosen = looked_at[part]
            tiles[chosen] = pool.add_dense(_evaluate(mask_mod, grid, b, h, rows[chosen], cols[chosen], indices.device))
        parts.append(Entries(rows, cols, tiles))
    return Entries.join(parts).without_empty()


def _evaluate(
    mask_mod: Any, grid: BlockGrid, b: int, h: int, rows: np.ndarray, cols: np.ndarray, device: torch.device
) -> np.ndarray:
    """The pairs of these blocks that a mask function keeps, (blocks, block, block) bool."""
    within = torch.arange(grid.block_size, device=device)
    q, kv = (torch.from_numpy(blocks).to(device)[:, None] * grid.block_size + within for blocks in (rows, cols))
    batch, head = (torch.tensor(number, device=device) for number in (b, h))
    by_query = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    # Rules look up numbers by position, and there are none past the end.
    kept = torch.vmap(by_query, (None, None, 0, 0))(batch, head, q.clamp(max=grid.q_len - 1), kv.clamp(max=grid.kv_len - 1))
    return (kept & (q < grid.q_len)[:, :, None] & (kv < grid.kv_len)[:, None, :]).cpu().numpy()
