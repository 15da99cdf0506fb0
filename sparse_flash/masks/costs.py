"""Estimates what a table costs kernels on an H100 or H200: arithmetic on its counts, the same on every rank and machine.

It chooses between tables before a call's heads are known, tells plans over several GPUs how long work takes, and gives ``explain``
rough times. Rows of blocks (in the backward pass: columns) are spread over the multiprocessors. At the end of a pass most of these
are idle, on average for half of the heaviest row's time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .mask_tables import MaskTables

GPUS = "h100", "h200"
BLOCK, HEAD_DIM = 128, 128  # of dense calls; of calls whose head_dim is not known yet, on which choices hardly depend
COPY_RATE = 2.7e6  # bytes per microsecond of an H100
PORTABLE_MARGIN = 1.5  # the gain for which masks leave the portable kernels, whose times rest on few measurements
_LEAST_GAIN = 1.05  # of a mask over dense attention: times are a few percent off
_MOST_KEPT = 0.9  # of the pairs of dense attention
_MULTIPROCESSORS = 132
_LAUNCH_US, _HOST_US = (5.0, 10.0), (26.0, 150.0)  # forward and backward: of kernels; of the host in an eager call, at least
_HEAD_DIMS = {False: (64, 96, 128, 192, 256), True: (32, 64, 128, 256)}  # up to which the columns of _TIMES hold
# (portable kernels, backward, block size) -> microseconds of a multiprocessor: (a row's start and end, a full block, a partial
# block). Fitted by non-negative least squares of relative errors to 1,460 passes of the peers' tables and of calls drawn at random.
# kernels/h200-2026-11-30-rough-times.json has calls that were left out.
_TIMES = {
    (False, False, 128): ((1.99, 0.976, 1.46), (2.26, 1.39, 1.76), (2.47, 1.51, 1.94), (3.53, 2.43, 2.9), (5.22, 2.95, 3.06)),
    (False, False, 64): ((0.48, 0.325, 0.44), (0.94, 0.49, 0.63), (0.94, 0.49, 0.63), (0.93, 0.955, 1.39), (2.11, 1.11, 2.0)),
    (False, True, 128): ((5.18, 2.55, 3.0), (9.14, 4.06, 4.56), (10.3, 4.56, 5.0), (22.1, 9.79, 10.3), (24.8, 12.3, 12.1)),
    (False, True, 64): ((2.01, 0.891, 0.908), (4.63, 1.73, 2.03), (4.63, 1.73, 2.03), (4.95, 3.17, 4.5), (10.7, 3.94, 9.21)),
    (True, False, 128): ((1.42, 1.03, 2.09), (2.15, 1.22, 1.44), (3.13, 2.17, 2.7)),
    (True, False, 64): ((0.382, 0.254, 0.331), (0.64, 0.327, 0.357), (0.997, 0.562, 0.648)),
    (True, False, 32): ((0.0625, 0.111, 0.142), (0.348, 0.201, 0.276), (0.721, 0.295, 0.505), (1.18, 0.666, 0.935)),
    (True, False, 16): ((0.136, 0.0752, 0.111), (0.136, 0.0752, 0.111), (0.147, 0.102, 0.198), (0.344, 0.199, 0.248)),
    (True, True, 128): ((4.17, 2.71, 5.07), (6.3, 3.55, 4.58), (10.2, 6.31, 8.11)),
    (True, True, 64): ((1.24, 0.83, 1.08), (1.74, 0.955, 1.1), (6.42, 2.39, 2.76)),
    (True, True, 32): ((0.0, 0.431, 0.554), (0.989, 0.404, 0.529), (2.16, 0.971, 1.57), (5.14, 2.86, 2.4)),
    (True, True, 16): ((0.24, 0.14, 0.23), (0.24, 0.14, 0.23), (0.387, 0.269, 0.478), (1.2, 0.705, 1.03)),
}


class Counts(NamedTuple):
    """Counts of what a pass iterates over in a head: rows, full and partial blocks; heaviest: the blocks of the heaviest row."""

    block_size: int
    rows: int
    full: float
    partial: float = 0.0
    heaviest: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of_mask(cls, mask: MaskTables, backward: bool = False, split: bool = True) -> Counts:
        """Returns the mean over heads. mask: on the host. split: whether kernels split heavy rows."""
        table = mask.by_key if backward else mask.by_query
        ptr, split_at, work = table.row_ptr.numpy(), table.row_split[..., 0].numpy(), table.work.numpy()
        rows = np.stack([split_at - ptr[:, :-1], ptr[:, 1:] - split_at], -1)
        parts = (np.stack([work[..., 2] - work[..., 1], work[..., 4] - work[..., 2]], -1) if split else rows).reshape(-1, 2)
        full, partial = rows.sum(1)[mask.mask_index.flatten().numpy()].mean(0)
        heaviest = parts[(parts @ (1.0, 1.3)).argmax()]  # a partial block takes about so much longer
        return cls(mask.block_size, rows.shape[1], full, partial, tuple(heaviest))

    @classmethod
    def dense(cls, own: int, other: int, offset: int | None = None) -> Counts:
        """Returns the counts of dense attention. own, other: tokens along rows and along columns. offset: in causal attention, the
        position on the other side of the first token of this one; otherwise None."""
        first, blocks = np.arange(0, own, BLOCK), -(-other // BLOCK)
        full = visited = np.full(len(first), blocks)
        if offset is not None:
            full, visited = (np.clip((first + offset + more) // BLOCK, 0, blocks) for more in (1, 2 * BLOCK - 1))
        return cls(BLOCK, len(first), full.sum(), (visited - full).sum(), (full.max(), (visited - full).max()))

    @property
    def both_passes_us(self) -> float:
        """Returns the microseconds of both passes of a head, if programs on all multiprocessors have work."""
        return sum(row_us(backward, *self[:4]) for backward in (False, True))


def row_us(backward: bool, block_size: int, rows: float, full: float, partial: float = 0.0) -> float:
    """Returns the microseconds of a pass over rows with so many blocks in all, if all multiprocessors have work."""
    times = _block_times(block_size < 64, backward, block_size, (HEAD_DIM, HEAD_DIM))
    assert times is not None
    return float(np.dot(times, (rows, full, partial))) / _MULTIPROCESSORS


def _block_times(portable: bool, backward: bool, block_size: int, head_dims: tuple[int, int]) -> np.ndarray | None:
    """Returns a row of _TIMES, the mean for the head_dims of q and v; None if one is not known."""
    size = min(block_size, BLOCK)
    known = list(zip(_HEAD_DIMS[portable], _TIMES[portable, backward, size]))
    found = [times for dim in head_dims for times in [times for most, times in known if dim <= most][:1]]
    return np.mean(found, 0) * (block_size // size) ** np.array((1, 2, 2)) if len(found) == 2 else None


def pass_us(counts: Counts, backward: bool, portable: bool, heads: int, head_dims: tuple[int, int]) -> float | None:
    """Returns the rough microseconds of an eager call's pass, if known. heads: of all sequences. head_dims: of q and v."""
    times = _block_times(portable, backward, counts.block_size, head_dims)
    if times is None:
        return None
    # Programs of small blocks share a multiprocessor, so each of them takes longer.
    heaviest = np.dot(times[1:], counts.heaviest) * (1 if backward else max(1, BLOCK // counts.block_size))
    busy = heads * np.dot(times, counts[1:4]) / _MULTIPROCESSORS
    return max(_HOST_US[backward], _LAUNCH_US[backward] + max(busy + heaviest / 2, heaviest))


def is_dense_as_fast(mask: MaskTables) -> bool:
    """Whether a mask gains nothing over the call without it, which is causal attention if no visited block lies past the diagonal.
    False for a mask that keeps nearly as many pairs: its user expects no gain. mask: on the host."""
    size, offset, ptr = mask.block_size, mask.kv_len - mask.q_len, mask.by_query.row_ptr.numpy().astype(np.int64)
    last = np.maximum.reduceat(np.append(mask.by_query.col_idx.numpy(), 0), ptr[:, :-1].ravel()).reshape(len(ptr), -1)
    end = np.arange(1, ptr.shape[1]) * size + offset  # where causal attention ends, in each row
    causal = bool(((ptr[:, 1:] == ptr[:, :-1]) | (last * size < end)).all())
    dense = Counts.dense(mask.q_len, mask.kv_len, offset if causal else None)
    if dense.both_passes_us >= _LEAST_GAIN * Counts.of_mask(mask).both_passes_us:
        return False
    pairs = np.clip(np.arange(mask.q_len) + offset + 1, 0, mask.kv_len).sum() if causal else mask.q_len * mask.kv_len
    return bool(mask.density * mask.q_len * mask.kv_len <= _MOST_KEPT * pairs)
