"""The launches of the Hopper kernels: the tiles that their launchers would launch, and the steps whose operands have left the L2
cache, in masks of scattered blocks over operands larger than it."""

import numpy as np

from ..common.config import padded_head_dim, used_columns
from ..hopper.division import (
    blocks_by_document,
    column_constants,
    heads_together,
    items_and_tiles,
    plain_backward_config,
    plan_forward,
)
from ..launch.order import concurrent_heads
from .chips import Chip, KernelFamily
from .model import AttentionSizes, Launch, dense_tiles, mask_of_heads, tile_amounts

_CACHED_BYTES = 25e6  # of operands that the L2 cache holds while programs on all multiprocessors read them
_WAVES = 4  # of programs at work at the same time, that are counted; evenly spaced in the queue


def describe_forward(sizes: AttentionSizes, mask, chip: Chip) -> Launch:
    """Returns the launches of a forward pass. mask: a BlockMask on the host, or None."""
    config, tables = plan_forward(sizes.q_shape, sizes.v_head_dim, mask, True, chip.multiprocessors)
    programs = config.programs * chip.multiprocessors
    columns = column_constants(sizes.head_dim, sizes.v_head_dim)
    width = columns["DIM"] + columns["DIM_V"]
    batch_heads, group = sizes.batch * sizes.heads, sizes.heads // sizes.kv_heads
    together = concurrent_heads(width, sizes.kv_len, tables, batch_heads, group)
    if tables is None:
        items, _ = items_and_tiles(sizes.q_shape, None, config.queries)
        tiles = dense_tiles(items, sizes.kv_len // config.keys, bool(sizes.kv_len % config.keys))
    else:
        of_row, steps = tables.row_queries // config.queries, tables.block_size // config.keys
        blocks = _CACHED_BYTES / (tables.block_size * 2 * width)  # of keys and values
        tiles = _table_tiles(tables, "by_query", of_row, steps, programs, together, blocks * group)
    split = _count_splits(tables, "by_query") * (tables.row_queries if tables else 0)
    merged = 4 * batch_heads * split * (columns["DIM_V"] + 1) * 2  # written and read
    family = KernelFamily(False, columns["USED"], columns["USED_V"], config.queries, config.keys, config.programs)
    mask_of = mask_of_heads(tables, sizes.batch, sizes.heads)
    return Launch(family, programs, tiles, mask_of, together, merged, 1 + bool(split), sizes.tensor_bytes)


def describe_backward(sizes: AttentionSizes, mask, chip: Chip) -> Launch:
    """Returns the launches of a backward pass. Arguments as for ``describe_forward``."""
    tables = blocks_by_document(sizes.head_dim, sizes.v_head_dim, mask, True) or mask
    config = plain_backward_config(sizes.head_dim, sizes.v_head_dim, tables and tables.block_size)
    programs = config.programs * chip.multiprocessors
    dim, dim_v = padded_head_dim(sizes.head_dim), padded_head_dim(sizes.v_head_dim)
    group = sizes.heads // sizes.kv_heads
    joined = group if heads_together(sizes.q_shape, sizes.kv_heads, tables, True, chip.multiprocessors) else 1
    mask_of = mask_of_heads(tables, sizes.batch, sizes.heads)[::joined]
    together = concurrent_heads(2 * (dim + dim_v), sizes.q_len, tables, len(mask_of), by_key=True)
    if tables is None:
        tiles = dense_tiles(-(-sizes.kv_len // config.keys), -(-sizes.q_len // config.queries), False)
    else:
        of_row, steps = tables.block_size // config.keys, tables.block_size // config.queries
        blocks = _CACHED_BYTES / (tables.block_size * (2 * (dim + dim_v) + 4 * dim))  # of queries, dOut, and sums of dQ
        tiles = _table_tiles(tables, "by_key", of_row, steps, programs, together, blocks) * np.array([1, joined, joined, joined])
    queries, keys = sizes.batch * sizes.heads * sizes.q_len, sizes.batch * sizes.kv_heads * sizes.kv_len
    row_bytes, launches = queries * backward_row_bytes(dim, dim_v), 3
    if group > joined:  # dK and dV: zeros are written, sums read, gradients written
        row_bytes, launches = row_bytes + keys * (dim + dim_v) * (4 + 4 + 2), launches + 3
    elif splits := _count_splits(tables, "by_key"):  # results of splits are written and read
        row_bytes += sizes.batch * sizes.heads * splits * tables.block_size * (dim + dim_v) * 4 * 2
        launches += 1
    columns = used_columns(sizes.head_dim), used_columns(sizes.v_head_dim)
    family = KernelFamily(True, *columns, config.queries, config.keys, config.programs)
    return Launch(family, programs, tiles, mask_of, together, row_bytes, launches, 2 * sizes.tensor_bytes)


def backward_row_bytes(dim: int, dim_v: int) -> int:
    """Returns the bytes of a query in the kernels along rows. Before the main kernel: out and dout are read, zeros written. After
    it: sums are read, dQ is written."""
    return 2 * 2 * dim_v + 4 * dim + 4 * dim + 2 * dim


def _count_splits(tables, which: str) -> float:
    """Returns how many splits the heavy rows of a mask have, on average over stored masks."""
    return float(getattr(tables, which).splits[..., 2].sum(-1).float().mean()) if tables is not None else 0.0


def _table_tiles(tables, which: str, tiles: int, steps: int, programs: int, together: int, blocks: float) -> np.ndarray:
    """Returns ``Launch.tiles`` of a table, ``which`` of the tables. tiles: of a row. steps: of a block. blocks: of one head, that
    the L2 cache holds."""
    table = getattr(tables, which)
    work, cols = table.work.numpy(), table.col_idx.numpy()
    if table.is_split or tables.starts is not None:  # there may be room for items that are not in use
        work = work[:, : work[0, 0, 6 if tables.starts is None else 5]]
    begin, runs, _, end = work[..., 1:5].astype(float).transpose(2, 0, 1)
    heads = max(together, programs // (work.shape[1] * tiles))  # at work at the same time
    reach = programs // (heads * tiles), max(1, int(blocks / heads))
    reloaded = np.array([[share_reloaded(items[:, [1, 4]], cols, *reach)] for items in work])
    return tile_amounts(begin, runs, end, steps, reloaded).repeat(tiles, 1)


def share_reloaded(bounds: np.ndarray, col_idx: np.ndarray, rows: int, capacity: int) -> float:
    """Returns which share of the visited blocks the cache must load again, or for the first time, between 0 and 1.

    Programs at work together take ``rows`` rows, one block of each at a time. A block is loaded once in each stretch of time whose
    blocks the cache holds. If it holds all that these rows visit, nothing counts as reloaded, because the next rows visit the same.
    bounds: (items, 2), where each item's entries in col_idx begin and end, in the queue's order. capacity: blocks that the cache
    holds.
    """
    rows, visits, loads = max(1, min(rows, len(bounds))), 0, 0
    for first in np.unique(np.linspace(0, len(bounds) - rows, _WAVES).astype(np.int64)):
        begin, end = bounds[first : first + rows].T
        steps = int((end - begin).max(initial=0))
        place = begin[:, None] + np.arange(steps)
        exists = place < end[:, None]
        columns = np.where(exists, col_idx[np.minimum(place, len(col_idx) - 1)], -1)
        visits += int(exists.sum())
        loads += _count_loads(columns, capacity)
    return loads / visits if visits else 0.0


def _count_loads(columns: np.ndarray, capacity: int) -> int:
    """Returns how often a block is loaded: once in each stretch of steps whose blocks the cache holds; 0 if it holds all.
    columns: (rows, steps) blocks, or -1."""
    steps = columns.shape[1]
    total, begin, length, distinct = 0, 0, steps, _distinct(columns)
    if distinct <= capacity:
        return 0
    while begin < steps:
        # The longest stretch, to a factor of two, whose blocks fit.
        while length > 1 and _distinct(columns[:, begin : begin + length]) > capacity:
            length //= 2
        total += _distinct(columns[:, begin : begin + length])
        begin += length
        length *= 2
    return total


def _distinct(columns: np.ndarray) -> int:
    return int(np.count_nonzero(np.bincount(columns.ravel() + 1)[1:]))
