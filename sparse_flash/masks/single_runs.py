"""The run of keys of each query, for masks whose queries each keep one run."""

from __future__ import annotations

import numpy as np

from .block_mask import BlockMask
from .tiles import dense_batches, unpack_runs


def single_runs(mask: BlockMask) -> tuple[np.ndarray, np.ndarray] | None:
    """(first, stop) of the one run of keys that each query keeps, (q_len,) int64, both 0 if it keeps nothing. None if a query keeps
    several runs, runs do not ascend, or a query that keeps nothing lies between others. mask: a single one."""
    rows, cols, kinds, tiles = mask.entries()
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
