"""Merges a mask's blocks into larger ones where kernels gain more speed than they lose to extra visited pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import numpy as np

from ..kernels.cost.choices import PORTABLE_MARGIN, predict_both_passes
from .grid import FULL, BlockGrid, BlockRuns, concat_ranges
from .table import Entries, FullBlocks, PartialBlocks
from .tiles import TilePool, dense_batches, tile_ids, unique_rows

KERNEL_BLOCK = 128  # the block size that keeps tensor cores busiest

SMALL_BLOCKS = 64, 32, 16


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
        blocks, visited = blocks + full.blocks + len(partial.rows), visited + _count_distinct(parents)
    wide_us = predict_both_passes(KERNEL_BLOCK, wide.q_blocks * tables, visited) * (PORTABLE_MARGIN if grid.block_size < 64 else 1)
    return bool(blocks) and wide_us < predict_both_passes(grid.block_size, grid.q_blocks * tables, blocks)


def _count_distinct(numbers: np.ndarray) -> int:
    """How many different numbers there are."""
    if not len(numbers):
        return 0
    least = int(numbers.min())
    count = int(numbers.max()) - least + 1
    if count > 64 * len(numbers):
        return len(np.unique(numbers))
    # One flag per number is faster than a sort, if flags are few.
    flags = np.zeros(count, bool)
    flags[numbers - least] = True
    return int(np.count_nonzero(flags))


def merge_blocks(
    grid: BlockGrid,
    bands: Iterable[tuple[FullBlocks, PartialBlocks]],
    decode: Callable[[np.ndarray, np.ndarray], np.ndarray],
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
        rows, cols, kinds, tiles = map(np.concatenate, zip((rows, cols, zero, zero), partial, strict=True))
        runs.append(whole[1:])
        others.append(_merge_into_parents(rows, cols, kinds, tiles, grid.block_size, wide.kv_blocks, decode, pool))
    found = FullBlocks(wide.shape, *map(np.concatenate, zip(*runs, strict=True)))
    return found, Entries(*map(np.concatenate, zip(*others, strict=True)))


def _covered(full: FullBlocks, factor: int, shape: tuple[int, int]) -> BlockRuns:
    """The larger blocks, in a grid of this shape, that lie in these runs with all of their rows of blocks."""
    rows, line = np.divmod(full.rows, factor)
    first, stop = -(-full.first // factor), full.stop // factor
    lines = ((line == number) & (stop > first) for number in range(factor))
    return reduce(BlockRuns.__and__, (BlockRuns.from_row_runs(shape, rows[k], first[k], stop[k], np.array(FULL)) for k in lines))


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


def _merge_into_parents(
    rows: np.ndarray,
    cols: np.ndarray,
    kinds: np.ndarray,
    tiles: np.ndarray,
    size: int,
    cols_of_wide: int,
    decode: Callable[[np.ndarray, np.ndarray], np.ndarray],
    pool: TilePool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The larger blocks that contain these of ``size`` tokens: rows, cols and tile numbers, (n,) int64 each. cols_of_wide: how many
    there are in a row."""
    factor = pool.block // size
    parents = rows // factor * cols_of_wide + cols // factor
    children = np.argsort(parents, kind="stable")
    ordered = parents[children]
    bounds = np.append(np.flatnonzero(np.diff(ordered, prepend=-1)), len(ordered))
    found = ordered[bounds[:-1]]
    numbers = np.empty(len(found), np.int64)
    place, content = rows % factor * factor + cols % factor, tile_ids(kinds, tiles)

    def children_of(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the blocks in these, the place of each one's parent among them)"""
        counts = bounds[parents + 1] - bounds[parents]
        return children[concat_ranges(bounds[parents], counts)], np.repeat(np.arange(len(parents)), counts)

    for batch in dense_batches(len(found), factor):
        chosen = np.arange(len(found))[batch]
        of_these, parent = children_of(chosen)
        within = np.zeros((len(chosen), factor**2), np.int64)
        within[parent, place[of_these]] = 1 + content[of_these]
        # Blocks made of the same tiles are alike, and a mask has many of them: one of each is decoded.
        first, alike = unique_rows(within)
        distinct = np.empty(len(first), np.int64)
        for part in dense_batches(len(first), pool.block):
            of_these, parent = children_of(chosen[first[part]])
            dense = np.zeros((len(first[part]), factor, factor, size, size), bool)
            dense[parent, rows[of_these] % factor, cols[of_these] % factor] = decode(kinds[of_these], tiles[of_these])
            distinct[part] = pool.add_dense(dense.swapaxes(2, 3).reshape(-1, pool.block, pool.block))
        numbers[chosen] = distinct[alike]
    return found // cols_of_wide, found % cols_of_wide, numbers
