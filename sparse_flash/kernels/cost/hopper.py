"""Predicts the time of a call of the Hopper kernels: what their launchers would launch, and how long it takes.

A launch is a queue of tiles. A tile takes the time of its row's start, of its steps in full blocks, and of those in partial blocks.
Kernels along whole rows take the time of their bytes.
"""

from typing import NamedTuple

import numpy as np

from ..common.config import padded_head_dim, used_columns
from ..hopper.division import backward_of_call, blocks_by_document, columns_of, forward_division, heads_together, items_and_tiles
from ..launch.order import heads_in_queue
from .chips import Chip, KernelFamily, Times
from .reuse import share_reloaded
from .schedule import Last, last_to_finish

# The kernels along rows, by whether they are portable, forward and backward.
_BESIDE = {False: ("merging split rows", "sums of dQ"), True: ("", "sums of out * dOut")}
KINDS = len(Times._fields)  # what a tile has of each: rows (1), full steps, partial steps, reloaded steps


class AttentionSizes(NamedTuple):
    """The sizes of a call. q_len, kv_len: tokens. Elements have two bytes."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.head_dim

    @property
    def tensor_bytes(self) -> int:
        """Returns the bytes of q, k, v and out."""
        dims = self.head_dim + self.v_head_dim
        return 2 * self.batch * dims * (self.heads * self.q_len + self.kv_heads * self.kv_len)


class Launch(NamedTuple):
    """Describes the launches of a pass. Bytes are read or written.

    tiles: (stored masks, tiles of a head, KINDS), in the queue's order. mask_of: (batch-heads,) integers, the stored mask of each.
    together: batch-heads that follow each other together. row_bytes: of the kernels along whole rows. launches: how many kernels
    there are. least_bytes: of the queue's kernel, if it touches each element once.
    """

    family: KernelFamily
    programs: int
    tiles: np.ndarray
    mask_of: np.ndarray
    together: int
    row_bytes: float
    launches: int
    least_bytes: float

    def amounts(self) -> np.ndarray:
        """Returns (tiles of all heads, KINDS) in the queue's order: groups of heads, and within a group the tiles of all heads in
        turn."""
        groups = [self.mask_of[first : first + self.together] for first in range(0, len(self.mask_of), self.together)]
        return np.concatenate([self.tiles[group].swapaxes(0, 1).reshape(-1, KINDS) for group in groups])


class Pass(NamedTuple):
    """A predicted pass.

    us: microseconds on the GPU. host_us: that the host takes to launch it, call by call; CUDA graphs take none. parts: microseconds
    by name, whose sum is ``us``. beside: microseconds beside the queue's kernel. last: the program that finishes last. measured:
    whether constants of these kernels were measured on the chip. portable: whether they are the portable ones.
    """

    us: float
    host_us: float
    parts: dict[str, float]
    beside: float
    last: Last
    measured: bool
    portable: bool

    @property
    def eager_us(self) -> float:
        """Returns the microseconds of an eager call, if no other work hides its host's time."""
        return max(self.us, self.host_us)

    @property
    def bound(self) -> str:
        """Returns what bounds an eager call: the host, or the part that takes the most time."""
        return "the host" if self.host_us > self.us else max(self.parts, key=self.parts.__getitem__)


def predicted(launch: Launch, chip: Chip) -> Pass:
    """Returns a pass on a chip."""
    times, backward = np.array(chip.times(launch.family)), launch.family.backward
    amounts = launch.amounts()
    last = last_to_finish(amounts @ times, min(launch.programs, len(amounts)), amounts)
    rows, full, partial, reloaded = amounts.sum(0) * times / launch.programs
    of_memory = launch.least_bytes / chip.bytes_per_us
    parts = {
        "products": full + partial,
        "row starts": rows,
        "loads past the L2 cache": reloaded,
        "idle programs": last.time - rows - full - partial - reloaded,
    }
    if of_memory > last.time:
        parts = {"memory, once for each element": of_memory}
    beside = {
        _BESIDE[launch.family.portable][backward]: launch.row_bytes / chip.bytes_per_us,
        "launches": launch.launches * chip.launch_us,
    }
    parts = {name: float(us) for name, us in (parts | beside).items() if us}
    measured, us = chip.has_measured(launch.family), sum(parts.values())
    return Pass(us, chip.host_us[backward], parts, sum(beside.values()), last, measured, launch.family.portable)


def forward(sizes: AttentionSizes, mask, chip: Chip) -> Launch:
    """Returns the launches of a forward pass. mask: a BlockMask on the host, or None."""
    config, tables = forward_division(sizes.q_shape, sizes.v_head_dim, mask, True, chip.multiprocessors)
    programs = config.programs * chip.multiprocessors
    columns = columns_of(sizes.head_dim, sizes.v_head_dim)
    width = columns["DIM"] + columns["DIM_V"]
    batch_heads, group = sizes.batch * sizes.heads, sizes.heads // sizes.kv_heads
    together = heads_in_queue(width, sizes.kv_len, tables, batch_heads, group)
    if tables is None:
        items, _ = items_and_tiles(sizes.q_shape, None, config.queries)
        tiles = dense_tiles(items, sizes.kv_len // config.keys, bool(sizes.kv_len % config.keys))
    else:
        of_row, steps = tables.row_queries // config.queries, tables.block_size // config.keys
        blocks = chip.cached_bytes / (tables.block_size * 2 * width)  # of keys and values
        tiles = _of_table(tables, "by_query", of_row, steps, programs, together, blocks * group)
    split = _splits(tables, "by_query") * (tables.row_queries if tables else 0)
    merged = 4 * batch_heads * split * (columns["DIM_V"] + 1) * 2  # written and read
    family = KernelFamily(False, columns["USED"], columns["USED_V"], config.queries, config.keys, config.programs)
    mask_of = mask_of_heads(tables, sizes.batch, sizes.heads)
    return Launch(family, programs, tiles, mask_of, together, merged, 1 + bool(split), sizes.tensor_bytes)


def backward(sizes: AttentionSizes, mask, chip: Chip) -> Launch:
    """Returns the launches of a backward pass. Arguments as for ``forward``."""
    tables = blocks_by_document(sizes.head_dim, sizes.v_head_dim, mask, True) or mask
    config = backward_of_call(sizes.head_dim, sizes.v_head_dim, tables and tables.block_size)
    programs = config.programs * chip.multiprocessors
    dim, dim_v = padded_head_dim(sizes.head_dim), padded_head_dim(sizes.v_head_dim)
    group = sizes.heads // sizes.kv_heads
    joined = group if heads_together(sizes.q_shape, sizes.kv_heads, tables, True, chip.multiprocessors) else 1
    mask_of = mask_of_heads(tables, sizes.batch, sizes.heads)[::joined]
    together = heads_in_queue(2 * (dim + dim_v), sizes.q_len, tables, len(mask_of), by_key=True)
    if tables is None:
        tiles = dense_tiles(-(-sizes.kv_len // config.keys), -(-sizes.q_len // config.queries), False)
    else:
        of_row, steps = tables.block_size // config.keys, tables.block_size // config.queries
        blocks = chip.cached_bytes / (tables.block_size * (2 * (dim + dim_v) + 4 * dim))  # of queries, dOut, and sums of dQ
        tiles = _of_table(tables, "by_key", of_row, steps, programs, together, blocks) * np.array([1, joined, joined, joined])
    queries, keys = sizes.batch * sizes.heads * sizes.q_len, sizes.batch * sizes.kv_heads * sizes.kv_len
    row_bytes, launches = queries * backward_row_bytes(dim, dim_v), 3
    if group > joined:  # dK and dV: zeros are written, sums read, gradients written
        row_bytes, launches = row_bytes + keys * (dim + dim_v) * (4 + 4 + 2), launches + 3
    elif splits := _splits(tables, "by_key"):  # results of splits are written and read
        row_bytes += sizes.batch * sizes.heads * splits * tables.block_size * (dim + dim_v) * 4 * 2
        launches += 1
    columns = used_columns(sizes.head_dim), used_columns(sizes.v_head_dim)
    family = KernelFamily(True, *columns, config.queries, config.keys, config.programs)
    return Launch(family, programs, tiles, mask_of, together, row_bytes, launches, 2 * sizes.tensor_bytes)


def backward_row_bytes(dim: int, dim_v: int) -> int:
    """Returns the bytes of a query in the kernels along rows. Before the main kernel: out and dout are read, zeros written. After
    it: sums are read, dQ is written."""
    return 2 * 2 * dim_v + 4 * dim + 4 * dim + 2 * dim


def dense_tiles(items: int, full: int, partial: bool) -> np.ndarray:
    return np.broadcast_to(np.array([1.0, full, partial, 0.0]), (1, items, KINDS))


def _splits(tables, which: str) -> float:
    """Returns how many splits the heavy rows of a mask have, on average over stored masks."""
    return float(getattr(tables, which).splits[..., 2].sum(-1).float().mean()) if tables is not None else 0.0


def _of_table(tables, which: str, tiles: int, steps: int, programs: int, together: int, blocks: float) -> np.ndarray:
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
    return kinds_of(begin, runs, end, steps, reloaded).repeat(tiles, 1)


def kinds_of(begin, runs, end, steps: int, reloaded=0.0) -> np.ndarray:
    """Returns (masks, items, KINDS): what a tile of each item has. begin, runs, end: (masks, items), where entries begin, full ones
    end, and all end. steps: of a block. reloaded: a share of all steps."""
    amounts = np.ones(begin.shape), (runs - begin) * steps, (end - runs) * steps, (end - begin) * steps * reloaded
    return np.stack(amounts, -1).astype(float)


def mask_of_heads(tables, batch: int, heads: int) -> np.ndarray:
    if tables is None:
        return np.zeros(batch * heads, np.int64)
    return np.broadcast_to(tables.mask_index.numpy(), (batch, heads)).reshape(-1)
