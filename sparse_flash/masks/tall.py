"""The rows of a mask's table in taller rows, for forward kernels whose tiles of queries are taller than a block."""

from __future__ import annotations

import numpy as np

from .block_mask import BlockMask
from .grid import union
from .table import MOST_DERIVED, Entries, KernelTables, Table, build_table, sort_entries
from .tiles import FULL_TILE, TilePool, unique_rows

BLOCK, QUERIES = 128, 192  # a row is three halves of blocks: block rows 0 and 1, 1 and 2, 3 and 4, ...

# Forward, H200: a step of 192 queries takes 1.34 times one of 128, or 0.9 of its time by query; a masked step 1.35 times a full one
# (docs/performance/kernels.md). Tall rows are taken where steps are this many times as many by query, or fewer.
_TIME_OF_PARTIAL = 1.35
_MOST_TIME = 1.06
# Distinct ones. Many documents have more, and may be others at each step: 60 in 65,536 tokens took 61 ms to learn that rows of 128
# are faster, and take 1 ms this way, where compiling takes 5. What has fewer takes up to twice its compiling.
_MOST_TILES = 1 << 6

_EMPTY, _FULL = 0, 1  # of half a block; of a tile, 1 + kind + 3 * its number


def tall_rows(mask: BlockMask) -> KernelTables | None:
    """``BlockMask.by_query`` of one mask in tall rows, on its device; None if kernels are faster on its own rows. Reads the table.
    A full block may lie past the end of the queries."""
    if mask.block_size != BLOCK or mask.masks > 1 or mask.by_query.col_idx.numel() > MOST_DERIVED:
        return None
    here = mask.to("cpu")
    rows, cols, kind, tile = here.entries()
    half = 2 * rows[:, None] + np.arange(2)  # (blocks, 2), the halves of each block; a tall row has three
    block = half // 3 * here.grid.kv_blocks + cols[:, None]
    found = union(list(block.T))
    states = np.full((len(found), 3), _EMPTY)
    states[np.searchsorted(found, block), half % 3] = (1 + kind + 3 * tile)[:, None]
    some = found // here.grid.kv_blocks * QUERIES < here.q_len
    (row, col), states = np.divmod(found[some], here.grid.kv_blocks), states[some]
    half = row[:, None] * 3 + np.arange(3)
    states[half >= 2 * here.grid.q_blocks] = _FULL  # queries past the end may keep anything
    partial = np.flatnonzero((states != _FULL).any(1))
    first, alike = unique_rows(np.column_stack([states, row % 2])[partial])
    if len(first) > _MOST_TILES:
        return None
    distinct, half = states[partial[first]], half[partial[first]] % 2
    code = np.maximum(distinct.ravel() - 1, 0)
    pairs = here.tile_pairs(code % 3, code // 3)
    pairs[distinct.ravel() == _EMPTY] = False
    pairs = np.take_along_axis(pairs.reshape(-1, 3, 2, BLOCK // 2, BLOCK), half[..., None, None, None], 2)
    pool, tiles = TilePool(BLOCK, QUERIES), np.full(len(row), FULL_TILE)
    tiles[partial] = pool.add_dense(pairs.reshape(-1, QUERIES, BLOCK))[alike]
    entries = Entries(row, col, tiles).without_empty()
    if _estimate_time(entries.tiles != FULL_TILE) * QUERIES > _MOST_TIME * _estimate_time(kind > 0) * BLOCK:
        return None
    shape = -(-here.q_len // QUERIES), here.grid.kv_blocks
    full, others, stacks = sort_entries(entries, shape, pool)
    table = build_table(full, others)
    runs, bits = (stack.to(mask.device) for stack in stacks)
    document_order, table = table.has_document_order(), Table(*(tensor.to(mask.device) for tensor in table))
    return KernelTables(BLOCK, QUERIES, mask.mask_index, table, None, (runs, bits), None, document_order)


def _estimate_time(is_partial: np.ndarray) -> float:
    return len(is_partial) + (_TIME_OF_PARTIAL - 1) * np.count_nonzero(is_partial)
