"""The rows of a mask's table in taller rows, for forward kernels whose tiles of queries are taller than a block."""

from __future__ import annotations

import numpy as np

from .block_mask import BlockMask
from .table import MOST_DERIVED, Entries, KernelTables, Table, build_table, sort_entries
from .tiles import FULL_TILE, TilePool, dense_batches

BLOCK, QUERIES = 128, 192  # a row is three halves of blocks: block rows 0 and 1, 1 and 2, 3 and 4, ...

# Forward, H200: a step of 192 queries takes 1.34 times one of 128, or 0.9 of its time by query; a masked step 1.35 times a full one
# (docs/performance/kernels.md). Tall rows are taken where steps are this many times as many by query, or fewer.
_TIME_OF_PARTIAL = 1.35
_MOST_TIME = 1.06
# Distinct ones. Many documents have more, and may be others at each step: 60 in 65,536 tokens took 61 ms to learn that rows of 128
# are faster, and take 1 ms this way, where compiling takes 5. What has fewer takes up to twice its compiling.
_MOST_TILES = 1 << 6

_EMPTY, _FULL = 0, 1  # of half a tall row's block; from 2 on, twice the number of its tile, plus 1 if it is of bits


def tall_rows(mask: BlockMask) -> KernelTables | None:
    """``BlockMask.by_query`` of one mask in tall rows, on its device; None if kernels are faster on its own rows. Reads the table.
    A full block may lie past the end of the queries."""
    if mask.block_size != BLOCK or mask.masks > 1 or mask.by_query.col_idx.numel() > MOST_DERIVED:
        return None
    here = mask.to("cpu")
    rows, cols, kind, tile = here.entries()
    found, upper, lower = _merge_rows(here, rows, cols, np.where(kind == 0, _FULL, 2 + 2 * tile + (kind == 2)))
    row, col = np.divmod(found, here.grid.kv_blocks)
    pool = TilePool(BLOCK, QUERIES)
    tiles = np.full(len(found), FULL_TILE, np.int64)
    partial = np.flatnonzero((upper != _FULL) | (lower != _FULL))
    joined = _merge_tiles(here, row[partial] % 2, upper[partial], lower[partial], pool)
    if joined is None:
        return None
    tiles[partial] = joined
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


def _merge_rows(
    mask: BlockMask, rows: np.ndarray, cols: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The blocks of the tall rows, row * kv_blocks + column, ascending, and the states of both block rows that each lies in."""
    first, third = rows // 3 * 2, rows % 3
    above, below = third < 2, third > 0
    tall = np.concatenate([(first + third)[above], (first + third - 1)[below]])
    key = tall * mask.grid.kv_blocks + np.concatenate([cols[above], cols[below]])
    found, which = np.unique(key, return_inverse=True)
    upper, lower = (np.full(len(found), _EMPTY, np.int64) for _ in range(2))
    count = np.count_nonzero(above)
    upper[which[:count]], lower[which[count:]] = state[above], state[below]
    # Queries past the end may keep anything.
    row = found // mask.grid.kv_blocks
    lower[row // 2 * 3 + row % 2 + 1 >= mask.grid.q_blocks] = _FULL
    some = row * QUERIES < mask.q_len
    return found[some], upper[some], lower[some]


def _merge_tiles(mask: BlockMask, odd: np.ndarray, upper: np.ndarray, lower: np.ndarray, pool: TilePool) -> np.ndarray | None:
    """The tile numbers of blocks with these states: an even row has the first three halves of both block rows, an odd one the last
    three. None if there are too many tiles."""
    states = int(max(upper.max(initial=0), lower.max(initial=0))) + 1
    unique, inverse = np.unique((upper * states + lower) * 2 + odd, return_inverse=True)
    if len(unique) > _MOST_TILES:
        return None
    (upper, lower), odd = np.divmod(unique // 2, states), unique % 2
    numbers = [np.zeros(0, np.int64)]
    for part in dense_batches(len(unique), QUERIES):
        both = np.concatenate([_decode_states(mask, upper[part]), _decode_states(mask, lower[part])], 1)
        rows = np.arange(QUERIES) + odd[part, None] * (2 * BLOCK - QUERIES)
        numbers.append(pool.add_dense(np.take_along_axis(both, rows[:, :, None], 1)))
    return np.concatenate(numbers)[inverse]


def _decode_states(mask: BlockMask, state: np.ndarray) -> np.ndarray:
    """(n, BLOCK, BLOCK) bool of states."""
    is_tile = state > _FULL
    pairs = mask.tile_pairs(np.where(is_tile, 1 + state % 2, 0), np.where(is_tile, state // 2 - 1, 0))
    pairs[state == _EMPTY] = False
    return pairs
