"""The tables of a mask in blocks that start where documents start, for kernels whose tiles need not lie on a fixed grid.

On a fixed grid, most rows of blocks have a masked block at either end, and a row of two documents visits the blocks of both.
"""

import numpy as np
import torch

from .costs import BLOCK, both_passes_us, row_us
from .grid import concat_ranges
from .mask_tables import MaskTables
from .table import ROW, Entries, KernelTables, Table, build_table, sort_entries
from .tiles import FULL_TILE, TilePool, dense_batches, pack_runs, unpack_runs

# Fields of a work item that differ from those in other tables: see ``document_tables``.
_START, _BLOCKS, _SHIFT, _END = 0, 5, 6, 7
_LEAST_GAIN = 1.01  # of predicted time
_FORWARD_TIME = 1.1  # of a forward pass, relative to the predicted: tiles of results do not leave by TMA


def document_tables(
    mask_index: torch.Tensor, by_query: Table, by_key: Table, tiles: tuple[torch.Tensor, torch.Tensor], starts: torch.Tensor
) -> KernelTables:
    """Both tables of a mask of as many queries as keys, in blocks that start where documents start. No row is split.

    starts: (blocks + 1,) int32, the token with which each block starts; it ends where the next one starts, or is full. ``col_idx``
    and field 0 of a work item are a block's start, not its number. Field 5 is how many blocks have tokens, 6 what to add to a token
    of the row's document for its position on an axis of whole blocks, 7 where the document ends. Items without tokens come last.
    """
    return KernelTables(BLOCK, BLOCK, mask_index, by_query, by_key, tiles, starts, document_order=True)


def document_blocks(mask: MaskTables) -> KernelTables | None:
    """The ``document_tables`` of one mask in blocks of BLOCK, on the CPU; None where kernels are predicted to gain too little."""
    runs = single_runs(mask)
    if runs is None:
        return None
    first_token = _documents(*runs)
    tokens = np.diff(first_token, append=mask.q_len)
    blocks = -(-tokens // BLOCK)
    if len(first_token) < 2 or blocks.sum() > 2 * mask.grid.q_blocks:
        return None
    document = np.repeat(np.arange(len(tokens)), blocks)
    first_block = np.cumsum(blocks) - blocks
    starts = np.append(first_token[document] + concat_ranges(np.zeros_like(blocks), blocks) * BLOCK, mask.q_len)
    entries, pool = _entries(*runs, starts, first_token[document], first_block[document])
    _, _, kinds, _ = mask.by_query.entries()
    if _LEAST_GAIN * _estimate_time(entries.tiles != FULL_TILE, len(document)) > _estimate_time(kinds > 0, mask.grid.q_blocks):
        return None
    full, others, (run_tiles, bit_tiles) = sort_entries(entries, (len(document), len(document)), pool)
    by_query, by_key = build_table(full, others), build_table(full.transposed(), others.transposed())
    if by_query.is_split or by_key.is_split:
        return None
    start, end = (torch.from_numpy(tokens.astype(np.int32)) for tokens in (starts, (first_token + tokens)[document]))
    by_query, by_key = (_use_starts(table, start, end) for table in (by_query, by_key))
    made = document_tables(mask.mask_index, by_query, by_key, (run_tiles, bit_tiles), start)
    return made._replace(forward_us=_FORWARD_TIME * row_us(False, BLOCK, len(document), full.blocks, len(others.rows)))


def _use_starts(table: Table, starts: torch.Tensor, ends: torch.Tensor) -> Table:
    """The table with the starts of blocks instead of their numbers: see ``document_tables``. ends: of each block's document."""
    work = table.work.clone()
    row = work[..., ROW].long()
    work[..., _START], work[..., _BLOCKS] = starts[row], len(starts) - 1
    work[..., _SHIFT], work[..., _END] = row * BLOCK - starts[row], ends[row]
    return table._replace(col_idx=starts[table.col_idx.long()], work=work)


def _estimate_time(is_partial: np.ndarray, rows: int) -> float:
    partial = int(np.count_nonzero(is_partial))
    return both_passes_us(BLOCK, rows, len(is_partial) - partial, partial)


def single_runs(mask: MaskTables) -> tuple[np.ndarray, np.ndarray] | None:
    """(first, stop) of the one run of keys that each query of one mask keeps, (q_len,) int64, both 0 if it keeps nothing. None for
    several runs, runs that do not ascend, and a query that keeps nothing between others."""
    rows, cols, kinds, tiles = mask.by_query.entries()
    if (kinds == 2).any():
        return None
    size, blocks = mask.block_size, mask.grid.q_blocks
    # First the full blocks, whose rows are all equal, then the run tiles.
    full = kinds == 0
    bounds = np.searchsorted(rows[full], np.arange(blocks + 1))
    count, col = np.diff(bounds), np.append(cols[full], 0)
    first = np.where(count > 0, col[bounds[:-1]] * size, mask.kv_len)[:, None].repeat(size, 1)
    stop = np.where(count > 0, (col[bounds[1:] - 1] + 1) * size, 0)[:, None].repeat(size, 1)
    kept = (count * size)[:, None].repeat(size, 1)
    rows, cols, runs = rows[~full], cols[~full] * size, mask.tile_runs.cpu().numpy()[tiles[~full]]
    for batch in dense_batches(len(rows), size):
        where, heads = np.unique(rows[batch], return_index=True)
        tile_first, tile_stop = unpack_runs(runs[batch])
        some, key = tile_stop > tile_first, cols[batch, None]
        low = np.minimum.reduceat(np.where(some, tile_first + key, mask.kv_len), heads)
        high = np.maximum.reduceat(np.where(some, tile_stop + key, 0), heads)
        first[where], stop[where] = np.minimum(first[where], low), np.maximum(stop[where], high)
        kept[where] += np.add.reduceat(tile_stop - tile_first, heads)
    # Beyond the last query, tiles may hold anything.
    first, stop, kept = (numbers.ravel()[: mask.q_len] for numbers in (first, stop, kept))
    (keeping,) = np.nonzero(kept)
    between = slice(keeping[0], keeping[-1] + 1) if len(keeping) else slice(0)
    ascend = (np.diff(first[between]) >= 0).all() and (np.diff(stop[between]) >= 0).all()
    if len(keeping) != len(first[between]) or not ascend or (stop - first != kept)[between].any():
        return None
    return np.where(kept > 0, first, 0), stop


def _documents(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The first token of each document, from 0: where no query before keeps a later key, and no later query an earlier one."""
    some = stop > first
    before = np.maximum.accumulate(stop)[:-1]
    after = np.minimum.accumulate(np.where(some, first, len(first))[::-1])[-2::-1]
    token = np.arange(1, len(first))
    starts = (before <= token) & (token <= after) & (some[1:] | some[:-1])
    return np.append(0, token[starts])


def _entries(
    first: np.ndarray, stop: np.ndarray, starts: np.ndarray, first_token: np.ndarray, first_block: np.ndarray
) -> tuple[Entries, TilePool]:
    """The kept blocks of runs, and their tiles. first_token, first_block: of each block's document."""
    rows = len(first_token)
    query = starts[:-1, None] + np.arange(BLOCK)
    exists = query < starts[1:, None]
    query = np.minimum(query, len(first) - 1)
    keeps = exists & (stop > first)[query]
    first_of_any, stop_of_all = (np.where(keeps, bound[query], len(first)).min(1) for bound in (first, stop))
    first_of_all, stop_of_any = (np.where(keeps, bound[query], 0).max(1) for bound in (first, stop))
    row_keeps = keeps.any(1)
    begin = np.where(row_keeps, first_of_any - first_token, 0) // BLOCK
    count = np.where(row_keeps, -(-(stop_of_any - first_token) // BLOCK) - begin, 0)
    row = np.repeat(np.arange(rows), count)
    block = concat_ranges(begin, count)
    whole = np.all(keeps | ~exists, axis=1)
    key = first_token[row] + block * BLOCK
    is_full = whole[row] & (first_of_all[row] <= key) & (key + BLOCK <= stop_of_all[row])
    pool, tiles = TilePool(BLOCK), np.full(len(row), FULL_TILE, np.int64)
    partial = np.flatnonzero(~is_full)
    for batch in dense_batches(len(partial), BLOCK):
        entry = partial[batch]
        inside = [np.clip(bound[query[row[entry]]] - key[entry, None], 0, BLOCK) for bound in (first, stop)]
        tiles[entry] = pool.add_runs(pack_runs(*(np.where(exists[row[entry]], bound, 0) for bound in inside)))
    return Entries(row, first_block[row] + block, tiles).without_empty(), pool
