"""Merges a mask's blocks into larger ones where kernels gain more speed than they lose to extra visited pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import TypeAlias

import numpy as np

from .costs import BLOCK as KERNEL_BLOCK
from .costs import PORTABLE_MARGIN, Counts
from .grid import FULL, BlockGrid, BlockRuns, concat_ranges
from .table import Entries, FullBlocks, PartialBlocks
from .tiles import TilePool, dense_batches, unique_rows

SMALL_BLOCKS = 64, 32, 16
Decode: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]  # kinds and tiles -> (n, block, block) bool


def is_coarse_faster(grid: BlockGrid, tables: int, bands: Iterable[tuple[FullBlocks, PartialBlocks]]) -> bool:
    """Whether both passes are predicted to take less time over the blocks of KERNEL_BLOCK that contain a mask's blocks, of one of
    SMALL_BLOCKS. All blocks count as full. bands: of its ``tables``, each of whole rows of the larger blocks."""
    wide, factor = BlockGrid(grid.q_len, grid.kv_len, KERNEL_BLOCK), KERNEL_BLOCK // grid.block_size
    blocks = visited = 0
    for full, partial in bands:
        first = full.first // factor
        counts = -(-full.stop // factor) - first
        row, col = np.repeat(full.rows // factor, counts), concat_ranges(first, counts)
        parents = np.concatenate(
            [row * wide.kv_blocks + col, partial.rows.astype(np.int64) // factor * wide.kv_blocks + partial.cols // factor]
        )
        blocks += full.blocks + len(partial.rows)
        # Sorting is many times faster than np.unique, which hashes.
        visited += int(np.count_nonzero(np.diff(np.sort(parents), prepend=-1)))
    own = Counts(grid.block_size, grid.q_blocks * tables, blocks)
    coarse = Counts(KERNEL_BLOCK, wide.q_blocks * tables, visited)
    margin = PORTABLE_MARGIN if grid.block_size < 64 else 1
    return bool(blocks) and margin * coarse.both_passes_us < own.both_passes_us


def merge_blocks(
    grid: BlockGrid,
    bands: Iterable[tuple[FullBlocks, PartialBlocks]],
    decode: Decode,
    pool: TilePool,
) -> tuple[FullBlocks, Entries]:
    """Merges a mask's kept blocks to the size of ``pool``: (blocks that are full in all their parts, the other blocks).

    grid, bands: of the mask's table, each band of whole rows of the larger blocks. decode: kinds and tiles -> (n, block, block)
    bool. Time is proportional to the runs of full blocks and to the other blocks.
    """
    wide, factor = BlockGrid(grid.q_len, grid.kv_len, pool.block), pool.block // grid.block_size
    runs, others = [], []
    for full, partial in bands:
        whole = FullBlocks(wide.shape, *_covered(full, factor, wide.shape).row_runs(FULL))
        rows, cols = _find_uncovered(full, whole, factor)
        zero = np.zeros(len(rows), np.int64)
        children = PartialBlocks(*map(np.concatenate, zip((rows, cols, zero, zero), partial, strict=True)))
        runs.append(whole[1:])
        others.append(_merge_children(children, grid.block_size, wide.kv_blocks, decode, pool))
    found = FullBlocks(wide.shape, *map(np.concatenate, zip(*runs, strict=True)))
    return found, Entries.join(others)


def _covered(full: FullBlocks, factor: int, shape: tuple[int, int]) -> BlockRuns:
    """The larger blocks, in a grid of this shape, that lie in these runs with all of their rows of blocks."""
    rows, row_within = np.divmod(full.rows, factor)
    first, stop = -(-full.first // factor), full.stop // factor
    chosen = ((row_within == number) & (stop > first) for number in range(factor))
    return reduce(BlockRuns.__and__, (BlockRuns.from_row_runs(shape, rows[k], first[k], stop[k], np.array(FULL)) for k in chosen))


def _find_uncovered(full: FullBlocks, whole: FullBlocks, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that lie in no larger one of ``whole``: rows, cols, (n,) int64 each."""
    if len(whole.rows):
        here = BlockRuns.from_row_runs(full.shape, *full[1:], np.array(FULL))
        lines = whole.rows[:, None] * factor + np.arange(factor)
        first, stop = (bound[:, None] * factor for bound in (whole.first, whole.stop))
        full = FullBlocks(
            full.shape, *(here & ~BlockRuns.from_row_runs(full.shape, lines, first, stop, np.array(FULL))).row_runs(FULL)
        )
    lengths = full.stop - full.first
    return np.repeat(full.rows, lengths), concat_ranges(full.first, lengths)


def _merge_children(children: PartialBlocks, size: int, wide_cols: int, decode: Decode, pool: TilePool) -> Entries:
    """The larger blocks that contain these of ``size`` tokens. children: of kind 0 too. wide_cols: larger blocks in a row."""
    factor = pool.block // size
    parents = children.rows // factor * wide_cols + children.cols // factor
    order = np.argsort(parents, kind="stable")
    children, parents = PartialBlocks(*(axis[order] for axis in children)), parents[order]
    bounds = np.append(np.flatnonzero(np.diff(parents, prepend=-1)), len(parents))
    numbers = np.empty(len(bounds) - 1, np.int64)
    for batch in dense_batches(len(numbers), factor):
        chosen = np.arange(batch.start, batch.stop)
        # Blocks made of the same tiles are alike, and a mask has many of them: one of each is decoded.
        first, alike = _find_alike_parents(children, factor, bounds, chosen)
        distinct = np.empty(len(first), np.int64)
        for part in dense_batches(len(first), pool.block):
            child, parent = _children_of(bounds, chosen[first[part]])
            dense = np.zeros((len(first[part]), factor, factor, size, size), bool)
            kept = decode(children.kinds[child], children.tiles[child])
            dense[parent, children.rows[child] % factor, children.cols[child] % factor] = kept
            distinct[part] = pool.add_dense(dense.swapaxes(2, 3).reshape(-1, pool.block, pool.block))
        numbers[chosen] = distinct[alike]
    rows, cols = np.divmod(parents[bounds[:-1]], wide_cols)
    return Entries(rows, cols, numbers)


def _children_of(bounds: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the children of these parents, the index of each child's parent among them). Parent p has bounds[p] .. bounds[p + 1] - 1."""
    counts = bounds[parents + 1] - bounds[parents]
    return concat_ranges(bounds[parents], counts), np.repeat(np.arange(len(parents)), counts)


def _find_alike_parents(
    children: PartialBlocks, factor: int, bounds: np.ndarray, parents: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``unique_rows`` of the parents by the tiles of their children."""
    child, parent = _children_of(bounds, parents)
    tile_at = np.zeros((len(parents), factor, factor), np.int64)
    kind, tile = children.kinds[child], children.tiles[child]
    number = 1 + np.where(kind > 0, 2 * tile + kind, 0)  # equal for equal tiles, and for full blocks; 0 is no block
    tile_at[parent, children.rows[child] % factor, children.cols[child] % factor] = number
    return unique_rows(tile_at.reshape(len(parents), factor**2))
