"""The tables of a mask in blocks of 64, for kernels that are faster over these where rows keep few blocks: quarters of a block of
128 that keep nothing are skipped, and two programs share a multiprocessor."""

import numpy as np

from .coarsen import decode_parts, number_parts
from .costs import BLOCK, row_us
from .grid import BlockGrid
from .mask_tables import MaskTables
from .table import Entries, KernelTables, build_table, sort_entries
from .tiles import EMPTY_TILE, FULL_TILE, TilePool, dense_batches, unique_rows

FINE = 64
_LEAST_GAIN = 1.01  # of the predicted time of a forward pass


def fine_blocks(mask: MaskTables) -> KernelTables | None:
    """Both tables of one mask in blocks of FINE, on the CPU; None where the forward pass is predicted to gain too little. mask: in
    blocks of BLOCK."""
    grid, (rows, cols, kind, tile) = BlockGrid(mask.q_len, mask.kv_len, FINE), mask.by_query.entries()
    partial = int(np.count_nonzero(kind))
    time = row_us(False, BLOCK, mask.grid.q_blocks, len(kind) - partial, partial)
    # Whatever the tiles hold, full blocks become four each.
    if time < _LEAST_GAIN * row_us(False, FINE, grid.q_blocks, 4 * (len(kind) - partial)):
        return None
    number, is_last = number_parts(kind, tile), rows == mask.grid.q_blocks - 1
    first, alike = unique_rows(np.column_stack([number, is_last]))
    pool, distinct = TilePool(FINE), np.empty((len(first), 2, 2), np.int64)
    for part in dense_batches(len(first), BLOCK):
        kept = decode_parts(mask, number[first[part]])
        # Tiles may hold anything past the last query. Blocks that the end of the queries cuts must not be full.
        kept[is_last[first[part]], mask.q_len - (mask.grid.q_blocks - 1) * BLOCK :] = False
        tiles = kept.reshape(-1, 2, FINE, 2, FINE).swapaxes(2, 3).reshape(-1, FINE, FINE)
        distinct[part] = pool.add_dense(tiles).reshape(-1, 2, 2)
    quarters = distinct[alike]
    full, empty = (int(np.count_nonzero(quarters == state)) for state in (FULL_TILE, EMPTY_TILE))
    fine_time = row_us(False, FINE, grid.q_blocks, full, 4 * len(kind) - empty - full)
    if time < _LEAST_GAIN * fine_time:
        return None
    row, col = (2 * numbers[:, None, None] + np.arange(2) for numbers in (rows, cols))
    axes = np.broadcast_arrays(row.swapaxes(1, 2), col, quarters)
    entries = Entries(*(axis.ravel() for axis in axes)).without_empty()
    full_blocks, others, stacks = sort_entries(entries, grid.shape, pool)
    by_query = build_table(full_blocks, others)
    by_key = build_table(full_blocks.transposed(), others.transposed())
    in_order, (run_tiles, bit_tiles) = by_query.has_document_order(), stacks
    return KernelTables(FINE, FINE, mask.mask_index, by_query, by_key, (run_tiles, bit_tiles), None, in_order, fine_time)
