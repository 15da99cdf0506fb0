"""The rows of a mask's table in taller rows, for forward kernels whose tiles of queries are taller than a block."""

import numpy as np

from .coarsen import decode_parts, number_parts
from .grid import union
from .mask_tables import MaskTables
from .table import Entries, KernelTables, build_table, sort_entries
from .tiles import FULL_TILE, TilePool, unique_rows

BLOCK, QUERIES = 128, 192  # a row is three halves of blocks: block rows 0 and 1, 1 and 2, 3 and 4, ...

# Forward, H200 (docs/performance/kernels.md): a step of 192 queries takes 0.9 of the time by query of one of 128; a masked step,
# 1.35 times that of a full one. Tall rows are taken where steps are this many times as many by query, or fewer.
_TIME_OF_PARTIAL = 1.35
_MOST_TIME = 1.06
# Distinct ones. Many documents have more, and learning that rows of 128 are faster takes ten times their compiling.
_MOST_TILES = 1 << 6

_EMPTY, _FULL = 0, 1  # as in ``decode_parts``


def tall_rows(mask: MaskTables) -> KernelTables | None:
    """``by_query`` of one mask in blocks of BLOCK, on the CPU, in tall rows; None if kernels are faster on its rows."""
    rows, cols, kind, tile = mask.by_query.entries()
    number, third = number_parts(kind, tile), rows % 3
    # Tall rows have block rows 0 and 1, 1 and 2, 3 and 4, ...: the upper ones here, then the lower ones.
    chosen = third < 2, third > 0
    blocks = [((rows // 3 * 2 + third - part) * mask.grid.kv_blocks + cols)[some] for part, some in enumerate(chosen)]
    found = union(blocks)
    states = np.full((len(found), 2), _EMPTY)
    for part in range(2):
        states[np.searchsorted(found, blocks[part]), part] = number[chosen[part]]
    some = found // mask.grid.kv_blocks * QUERIES < mask.q_len
    (row, col), states = np.divmod(found[some], mask.grid.kv_blocks), states[some]
    states[row // 2 * 3 + row % 2 + 1 >= mask.grid.q_blocks, 1] = _FULL  # queries past the end may keep anything
    partial = np.flatnonzero((states[:, 0] != _FULL) | (states[:, 1] != _FULL))
    first, alike = unique_rows(np.column_stack([states, row % 2])[partial])
    if len(first) > _MOST_TILES:
        return None
    both = decode_parts(mask, states[partial[first]]).reshape(-1, 2 * BLOCK, BLOCK)
    query = np.arange(QUERIES) + row[partial[first], None] % 2 * (2 * BLOCK - QUERIES)
    pool, tiles = TilePool(BLOCK, QUERIES), np.full(len(row), FULL_TILE)
    tiles[partial] = pool.add_dense(np.take_along_axis(both, query[:, :, None], 1))[alike]
    entries = Entries(row, col, tiles).without_empty()
    if _estimate_time(entries.tiles != FULL_TILE) * QUERIES > _MOST_TIME * _estimate_time(kind > 0) * BLOCK:
        return None
    shape = -(-mask.q_len // QUERIES), mask.grid.kv_blocks
    full, others, stacks = sort_entries(entries, shape, pool)
    table = build_table(full, others)
    return KernelTables(BLOCK, QUERIES, mask.mask_index, table, None, (stacks[0], stacks[1]), None, table.has_document_order())


def _estimate_time(is_partial: np.ndarray) -> float:
    return len(is_partial) + (_TIME_OF_PARTIAL - 1) * np.count_nonzero(is_partial)
