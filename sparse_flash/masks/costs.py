"""Estimates what a table costs kernels on an H100 or H200, by its counts: the same on every rank and machine. Rows of blocks (in
the backward pass: columns) are spread over the multiprocessors."""

import numpy as np

BLOCK, HEAD_DIM = 128, 128  # of dense calls; of calls whose head_dim is not known yet, on which choices hardly depend
COPY_RATE = 2.7e6  # bytes per microsecond of an H100
PORTABLE_MARGIN = 1.5  # the gain for which masks leave the portable kernels, whose times rest on few measurements
_MULTIPROCESSORS = 132
# (backward, block size) -> microseconds of a multiprocessor at HEAD_DIM: (a row's start and end, a full block, a partial block); of
# Hopper's kernels, and for blocks of 32 and 16 of the portable ones. Fitted to 1,460 passes by non-negative least squares.
_TIMES = {
    (False, 128): (2.47, 1.51, 1.94),
    (False, 64): (0.94, 0.49, 0.63),
    (False, 32): (0.721, 0.295, 0.505),
    (False, 16): (0.147, 0.102, 0.198),
    (True, 128): (10.3, 4.56, 5.0),
    (True, 64): (4.63, 1.73, 2.03),
    (True, 32): (2.16, 0.971, 1.57),
    (True, 16): (0.387, 0.269, 0.478),
}


def both_passes_us(block_size: int, rows: float, full: float, partial: float = 0.0) -> float:
    """Returns the microseconds of both passes of a head, if programs on all multiprocessors have work."""
    return sum(row_us(backward, block_size, rows, full, partial) for backward in (False, True))


def row_us(backward: bool, block_size: int, rows: float, full: float, partial: float = 0.0) -> float:
    """Returns the microseconds of a pass over rows with so many blocks in all, if all multiprocessors have work."""
    size = min(block_size, BLOCK)
    times = np.array(_TIMES[backward, size]) * (block_size // size) ** np.array((1, 2, 2))
    return float(np.dot(times, (rows, full, partial))) / _MULTIPROCESSORS
