"""Merges a mask's blocks into larger ones where kernels gain more speed than they lose to extra visited pairs."""

import numpy as np

from .costs import BLOCK as KERNEL_BLOCK
from .costs import PORTABLE_MARGIN, both_passes_us
from .grid import BlockGrid, concat_ranges
from .mask_tables import MaskTables
from .table import Entries, PartialBlocks
from .tiles import TilePool, dense_batches, unique_rows


def is_coarse_faster(mask: MaskTables) -> bool:
    """Whether both passes are predicted to take less time over blocks of KERNEL_BLOCK. All blocks count as full."""
    if mask.block_size >= KERNEL_BLOCK:
        return False
    wide, factor = BlockGrid(mask.q_len, mask.kv_len, KERNEL_BLOCK), KERNEL_BLOCK // mask.block_size
    blocks = visited = 0
    for full, partial in (band for number in range(mask.masks) for band in mask.bands(number, factor)):
        first = full.first // factor
        counts = -(-full.stop // factor) - first
        row, col = np.repeat(full.rows // factor, counts), concat_ranges(first, counts)
        parents = np.concatenate(
            [row * wide.kv_blocks + col, partial.rows.astype(np.int64) // factor * wide.kv_blocks + partial.cols // factor]
        )
        blocks += full.blocks + len(partial.rows)
        # Sorting is many times faster than np.unique, which hashes.
        visited += int(np.count_nonzero(np.diff(np.sort(parents), prepend=-1)))
    own = both_passes_us(mask.block_size, mask.grid.q_blocks * mask.masks, blocks)
    coarse = both_passes_us(KERNEL_BLOCK, wide.q_blocks * mask.masks, visited)
    margin = PORTABLE_MARGIN if mask.block_size < 64 else 1
    return bool(blocks) and margin * coarse < own


def merge_blocks(mask: MaskTables, number: int, pool: TilePool) -> Entries:
    """A stored mask's kept blocks, merged to the size of ``pool``."""
    wide, factor, parts = BlockGrid(mask.q_len, mask.kv_len, pool.block), pool.block // mask.block_size, []
    for full, partial in mask.bands(number, factor):
        lengths = full.stop - full.first
        rows, cols = np.repeat(full.rows, lengths), concat_ranges(full.first, lengths)
        zero = np.zeros(len(rows), np.int64)
        children = PartialBlocks(*map(np.concatenate, zip((rows, cols, zero, zero), partial, strict=True)))
        parts.append(_merge_children(mask, children, wide.kv_blocks, pool))
    return Entries.join(parts)


def _merge_children(mask: MaskTables, children: PartialBlocks, wide_cols: int, pool: TilePool) -> Entries:
    """The larger blocks that contain these of a mask. children: of kind 0 too. wide_cols: larger blocks in a row."""
    factor = pool.block // mask.block_size
    parents = children.rows // factor * wide_cols + children.cols // factor
    order = np.argsort(parents, kind="stable")
    children, parents = PartialBlocks(*(axis[order] for axis in children)), parents[order]
    bounds = np.append(np.flatnonzero(np.diff(parents, prepend=-1)), len(parents))
    numbers = np.empty(len(bounds) - 1, np.int64)
    for batch in dense_batches(len(numbers), factor):
        count = batch.stop - batch.start
        rows, cols, kind, tile = (axis[bounds[batch.start] : bounds[batch.stop]] for axis in children)
        parent = np.repeat(np.arange(count), np.diff(bounds[batch.start : batch.stop + 1]))
        parts = np.zeros((count, factor, factor), np.int64)
        parts[parent, rows % factor, cols % factor] = number_parts(kind, tile)
        # A mask has many blocks made of the same tiles: one of each kind is decoded.
        first, alike = unique_rows(parts.reshape(count, factor**2))
        distinct = np.empty(len(first), np.int64)
        for part in dense_batches(len(first), pool.block):
            dense = decode_parts(mask, parts[first[part]])
            distinct[part] = pool.add_dense(dense.swapaxes(2, 3).reshape(-1, pool.block, pool.block))
        numbers[batch] = distinct[alike]
    rows, cols = np.divmod(parents[bounds[:-1]], wide_cols)
    return Entries(rows, cols, numbers)


def number_parts(kind: np.ndarray, tile: np.ndarray) -> np.ndarray:
    """Numbers of blocks for ``decode_parts``, equal for equal tiles and for full blocks. kind, tile: as from ``Table.entries``."""
    return 1 + np.where(kind > 0, 2 * tile + kind, 0)


def decode_parts(mask: MaskTables, parts: np.ndarray) -> np.ndarray:
    """(*parts.shape, block, block) bool. parts: 0 for a block that keeps nothing, 1 for a full one, else 1 + kind + 2 * tile."""
    pairs = np.zeros((*parts.shape, mask.block_size, mask.block_size), bool)
    some = parts[parts > 0]
    pairs[parts > 0] = mask.tile_pairs(np.where(some > 1, 1 + some % 2, 0), np.maximum(some - 2, 0) // 2)
    return pairs
