"""The natural forms that most patterns have; each derives the token rule and the block rule from one method.

RunPattern      each query keeps a few runs of keys                      causal, windows, documents, prefixes
UnitPattern     the rule speaks of units of ``block`` tokens             butterfly, random, fixed
DistancePattern the rule speaks of the distance between two units        strided, dilated, power_of_two
"""

from __future__ import annotations

import numpy as np

from .grid import FULL, PARTIAL, BlockGrid, BlockRuns
from .pattern import Pattern

# Units below this many tokens leave few blocks empty, and listing their cells would cost as much as looking at tokens.
SMALLEST_LISTED_UNIT = 16
_CHUNK = 1 << 20


def positive_int(pattern: str, name: str, value, least: int = 1) -> int:
    """``value`` as an int of at least ``least``; raises ValueError otherwise."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{pattern}: {name} must be an integer of at least {least}; got {value!r}")
    return int(value)


class RunPattern(Pattern):
    """Each query keeps a few runs of keys: define ``row_runs``."""

    def row_runs(self, q):
        raise NotImplementedError

    def token_rule(self, q, kv):
        first, stop = self.row_runs(np.asarray(q))
        kept = False
        for run in range(first.shape[-1]):
            kept = kept | ((kv >= first[..., run]) & (kv < stop[..., run]))
        return kept

    def block_rule(self, grid: BlockGrid):
        """Run by run: some query of a block row reaches from the least first to the greatest stop; all of them reach
        from the greatest first to the least stop."""
        size = grid.block_size
        runs = self.row_runs(np.array([grid.offset]))[0].shape[-1]
        step = max(1, _CHUNK // (size * runs))
        pieces = []
        for low in range(0, grid.q_blocks, step):
            rows = np.arange(low, min(low + step, grid.q_blocks))
            first, stop = self.row_runs(grid.q_positions(rows))
            first, stop = np.maximum(first, 0), np.minimum(stop, grid.kv_len)
            empty = stop <= first
            some_first = np.where(empty, grid.kv_len, first).min(1) // size
            some_stop = -(-np.where(empty, 0, stop).max(1) // size)
            all_first = -(-np.where(empty, grid.kv_len, first).max(1) // size)
            all_stop = np.where(empty, 0, stop).min(1)
            all_stop = np.where(all_stop == grid.kv_len, grid.kv_blocks, all_stop // size)
            pieces += [(rows[:, None], some_first, some_stop, PARTIAL), (rows[:, None], all_first, all_stop, FULL)]
        columns = [np.concatenate([np.broadcast_to(p[k], p[1].shape).ravel() for p in pieces]) for k in range(4)]
        return BlockRuns.from_row_runs(grid.shape, *columns)


class UnitPattern(Pattern):
    """The rule speaks of units of ``block`` tokens, position // block: define ``unit_rule``, and ``unit_pairs`` where the
    kept pairs can be listed without a look at all of them."""

    block: int

    def unit_rule(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Which pairs of units may attend: bool, broadcastable like ``token_rule``."""
        raise NotImplementedError

    def unit_pairs(self, first: int, stop: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
        """All kept (i, j) with first <= i < stop and 0 <= j < cols, each pair once, as two int64 arrays."""
        pairs = []
        step = max(1, (4 * _CHUNK) // cols)
        j = np.arange(cols)[None, :]
        for low in range(first, stop, step):
            i = np.arange(low, min(low + step, stop))[:, None]
            row, col = np.nonzero(np.broadcast_to(self.unit_rule(i, j), (len(i), cols)))
            pairs.append((row + low, col))
        return tuple(np.concatenate([p[k] for p in pairs]).astype(np.int64) for k in range(2))

    def token_rule(self, q, kv):
        return self.unit_rule(np.asarray(q) // self.block, np.asarray(kv) // self.block)

    def token_tiles(self, q, kv):
        size, unit = kv.shape[1], self.block
        starts_on_units = size % unit == 0 and not (q[:, 0] % unit).any() and not (kv[:, 0] % unit).any()
        if unit == 1 or not starts_on_units:
            return super().token_tiles(q, kv)
        return super().token_tiles(q[:, ::unit], kv[:, ::unit]).repeat(unit, axis=1).repeat(unit, axis=2)

    def block_rule(self, grid: BlockGrid):
        unit, size = self.block, grid.block_size
        if unit < SMALLEST_LISTED_UNIT:
            return None
        i, j = self.unit_pairs(grid.offset // unit, (grid.kv_len - 1) // unit + 1, -(-grid.kv_len // unit))
        # Kept units overlap no other, so the areas that they cover in a block add up to the block's kept pairs.
        row, top, bottom = _overlaps(i * unit - grid.offset, unit, grid.q_len, size)
        col, left, right = _overlaps(j * unit, unit, grid.kv_len, size)
        flat, area = [], []
        for r in range(row.shape[1]):
            for c in range(col.shape[1]):
                pairs = (bottom - top)[:, r] * (right - left)[:, c]
                flat.append((row[:, r] * grid.kv_blocks + col[:, c])[pairs > 0])
                area.append(pairs[pairs > 0])
        flat, inverse = np.unique(np.concatenate(flat), return_inverse=True)
        kept = np.bincount(inverse, np.concatenate(area), len(flat)).astype(np.int64)
        rows, cols = np.divmod(flat, grid.kv_blocks)
        state = np.where(kept == grid.heights(rows) * grid.widths(cols), FULL, PARTIAL)
        return BlockRuns.from_row_runs(grid.shape, rows, cols, cols + 1, state)


def _overlaps(start: np.ndarray, unit: int, length: int, size: int):
    """Cuts token ranges [start, start + unit) into their parts in each block of ``size`` tokens that they can touch.

    Returns block, first, stop: (ranges, parts) int64; parts outside [0, length) have stop <= first.
    """
    part = np.arange(-(-(unit - 1) // size) + 1)
    block = start[:, None] // size + part
    first = np.maximum(np.maximum(start[:, None], block * size), 0)
    stop = np.minimum(np.minimum(start[:, None] + unit, (block + 1) * size), length)
    return block, first, np.maximum(stop, first)


class DistancePattern(UnitPattern):
    """The rule speaks of the distance i - j between a query's unit and a key's unit: define ``distance_rule``."""

    def distance_rule(self, distance: np.ndarray) -> np.ndarray:
        """Which distances i - j (negative: the key is later) may attend: bool of the same shape."""
        raise NotImplementedError

    @property
    def shift_invariant(self) -> bool:
        return self.block == 1

    def unit_rule(self, i, j):
        return self.distance_rule(i - j)

    def unit_pairs(self, first, stop, cols):
        distance = np.arange(first - cols + 1, stop)
        distance = distance[self.distance_rule(distance)]
        low = np.maximum(first, distance)
        count = np.maximum(np.minimum(stop, cols + distance) - low, 0)
        before = np.concatenate([[0], np.cumsum(count)])
        which = np.repeat(np.arange(len(distance)), count)
        i = low[which] + np.arange(before[-1]) - before[which]
        return i, i - distance[which]
