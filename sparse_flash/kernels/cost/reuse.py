"""Counts the steps whose operands have left the L2 cache: in masks of scattered blocks, over operands larger than the cache."""

import numpy as np

_WAVES = 4  # of programs at work at the same time, that are counted; evenly spaced in the queue


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
        loads += _loads(columns, capacity)
    return loads / visits if visits else 0.0


def _loads(columns: np.ndarray, capacity: int) -> int:
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
