"""Merges a mask's blocks into larger ones where kernels gain more speed than they lose to extra visited pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .grid import BlockGrid, ranges
from .tiles import FULL_TILE, TilePool, dense_batches, unique_rows

KERNEL_BLOCK = 128  # the block size that keeps tensor cores busiest

# Time per visited pair, relative to blocks of KERNEL_BLOCK: forward and backward, causal and causal & local(1024) of 16,384 tokens,
# bf16, H200, torch 2.11, triton 3.6, 2026-11-21. Portable kernels at both sizes: 1.35 to 1.4, 2.0 to 2.6, 2.1 to 2.7. Where the
# Hopper kernels can run instead, which do not support blocks of 32 and 16: 2.1 to 3.4, 2.8 to 3.6; of 64, which they support,
# random blocks, 2026-11-22: 1.28.
_COST = {64: 1.3, 32: 2.4, 16: 2.6}
SMALL_BLOCKS = tuple(_COST)


def pays(grid: BlockGrid, masks: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> bool:
    """Whether kernels are faster over the blocks of KERNEL_BLOCK that contain these, of one of SMALL_BLOCKS. masks: which mask each
    block belongs to."""
    if not len(rows):
        return False
    wide = BlockGrid(grid.q_len, grid.kv_len, KERNEL_BLOCK)
    parents = _parents(wide, grid, rows, cols) + masks * (wide.q_blocks * wide.kv_blocks)
    most = (int(masks[-1]) + 1) * wide.q_blocks * wide.kv_blocks
    # One flag per parent is faster than a sort, if flags are few.
    visited = np.count_nonzero(_flags(most, parents)) if most <= 64 * len(parents) else len(np.unique(parents))
    return bool(visited * KERNEL_BLOCK**2 <= _COST[grid.block_size] * len(rows) * grid.block_size**2)


def _flags(count: int, which: np.ndarray) -> np.ndarray:
    flags = np.zeros(count, bool)
    flags[which] = True
    return flags


def _parents(wide: BlockGrid, grid: BlockGrid, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    factor = wide.block_size // grid.block_size
    return rows // factor * wide.kv_blocks + cols // factor


def merged(
    grid: BlockGrid,
    rows: np.ndarray,
    cols: np.ndarray,
    pairs: np.ndarray,
    content: np.ndarray,
    decode: Callable[[np.ndarray], np.ndarray],
    pool: TilePool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A mask's kept blocks merged to the size of ``pool``: rows, cols and tile numbers, (n,) int64 each.

    rows, cols, pairs, content: of the kept blocks of ``grid``; pairs: how many each keeps; content: ``tile_content``. decode: their
    indices -> (n, block, block) bool. Time is proportional to the blocks, memory is bounded by the tiles.
    """
    size, factor = grid.block_size, pool.block // grid.block_size
    wide = BlockGrid(grid.q_len, grid.kv_len, pool.block)
    found, which = np.unique(_parents(wide, grid, rows, cols), return_inverse=True)
    tiles = np.full(len(found), FULL_TILE, np.int64)
    partial = np.flatnonzero(np.bincount(which, pairs, len(found)) < pool.block**2)
    children = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[children], np.arange(len(found) + 1))
    place = rows % factor * factor + cols % factor

    def children_of(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the blocks in these, the place of each one's parent among them)"""
        counts = bounds[parents + 1] - bounds[parents]
        return children[ranges(bounds[parents], counts)], np.repeat(np.arange(len(parents)), counts)

    for batch in dense_batches(len(partial), factor):
        chosen = partial[batch]
        of_these, parent = children_of(chosen)
        within = np.zeros((len(chosen), factor**2), np.int64)
        within[parent, place[of_these]] = 1 + content[of_these]
        # Blocks made of the same tiles are alike, and a mask has many of them: one of each is decoded.
        first, alike = unique_rows(within)
        numbers = np.empty(len(first), np.int64)
        for part in dense_batches(len(first), pool.block):
            of_these, parent = children_of(chosen[first[part]])
            dense = np.zeros((len(first[part]), factor, factor, size, size), bool)
            dense[parent, rows[of_these] % factor, cols[of_these] % factor] = decode(of_these)
            numbers[part] = pool.add_dense(dense.swapaxes(2, 3).reshape(-1, pool.block, pool.block))
        tiles[chosen] = numbers[alike]
    return found // wide.kv_blocks, found % wide.kv_blocks, tiles
