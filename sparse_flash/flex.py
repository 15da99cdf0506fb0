"""Reads the block masks of PyTorch's FlexAttention: kept blocks, and tiles from their token rule.

Source: torch.nn.attention.flex_attention.BlockMask, whose docstring defines the format.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from .grid import BlockGrid
from .tiles import EMPTY_TILE, FULL_TILE, TilePool, dense_batches


def grid_of(mask: FlexMask) -> BlockGrid:
    """Raises TypeError for what is no FlexAttention mask, ValueError for blocks that this library's tables cannot hold."""
    if not isinstance(mask, FlexMask):
        got = f"{type(mask).__module__}.{type(mask).__qualname__}"
        raise TypeError(f"from_flex needs a torch.nn.attention.flex_attention.BlockMask; got {got}")
    q_block, kv_block = mask.BLOCK_SIZE
    if q_block != kv_block:
        raise ValueError(
            f"from_flex needs square blocks; got BLOCK_SIZE={(q_block, kv_block)}; pass create_block_mask one number as BLOCK_SIZE"
        )
    return BlockGrid(*mask.seq_lengths, q_block)


def entries_of(mask: FlexMask, pool: TilePool) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each batch entry, and in it each head, the kept blocks as (rows, cols, tiles): see ``block_mask.Entries``. Blocks
    that the token rule keeps nothing of are left out, and those that it keeps whole are full."""
    grid = grid_of(mask)
    batch, heads = mask.kv_num_blocks.shape[:2]
    for b in range(batch):
        for h in range(heads):
            rows, cols = _listed(mask.kv_num_blocks[b, h], mask.kv_indices[b, h])
            tiles = _tiles(mask, grid, b, h, rows, cols, pool, rule=True)
            parts = [(rows, cols, tiles)]
            if mask.full_kv_num_blocks is not None:
                rows, cols = _listed(mask.full_kv_num_blocks[b, h], mask.full_kv_indices[b, h])
                parts.append((rows, cols, _tiles(mask, grid, b, h, rows, cols, pool, rule=False)))
            rows, cols, tiles = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            kept = tiles != EMPTY_TILE
            yield rows[kept], cols[kept], tiles[kept]


def _listed(count: torch.Tensor, indices: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The (row, col) of the first count[r] blocks that each row r lists."""
    listed = torch.arange(indices.shape[1], device=indices.device) < count[:, None]
    rows = listed.nonzero()[:, 0].cpu().numpy().astype(np.int64)
    return rows, indices[listed].cpu().numpy().astype(np.int64)


def _tiles(mask: FlexMask, grid: BlockGrid, b: int, h: int, rows, cols, pool: TilePool, rule: bool) -> np.ndarray:
    """Tile numbers of blocks. rule: whether their pairs follow the mask's token rule, or all are kept."""
    size, device = grid.block_size, mask.kv_indices.device
    cut = (grid.heights(rows) < size) | (grid.widths(cols) < size)
    tiles = np.full(len(rows), FULL_TILE, np.int64)
    looked_at = np.arange(len(rows)) if rule else np.flatnonzero(cut)
    by_token = torch.vmap(mask.mask_mod, (None, None, None, 0))
    by_tile = torch.vmap(torch.vmap(by_token, (None, None, 0, None)), (None, None, 0, 0))
    batch, head = (torch.tensor(number, device=device) for number in (b, h))
    for part in dense_batches(len(looked_at), size):
        chosen = looked_at[part]
        q, kv = (
            torch.from_numpy(blocks[chosen]).to(device)[:, None] * size + torch.arange(size, device=device)
            for blocks in (rows, cols)
        )
        kept = (q < grid.q_len)[:, :, None] & (kv < grid.kv_len)[:, None, :]
        if rule:
            # Rules look numbers up by position, and there are none past the end.
            kept &= by_tile(batch, head, q.clamp(max=grid.q_len - 1), kv.clamp(max=grid.kv_len - 1))
        tiles[chosen] = pool.add_dense(kept.cpu().numpy())
    return tiles
