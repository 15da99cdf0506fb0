"""The natural forms of most patterns; each derives the token rule and the block rule from one method.

RunPattern      each query keeps a few runs of keys                      causal, windows, documents, prefixes
UnitPattern     the rule applies to units of ``block`` tokens            butterfly, random, fixed
DistancePattern the rule applies to the distance between two units       strided, dilated, power_of_two
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import scipy.sparse

from .fields import positive_int
from .grid import FULL, PARTIAL, BlockGrid, BlockRuns, concat_ranges, runs_of
from .hints import Runs, evaluate_rule, explain_array_errors
from .pattern import DerivedPattern, Pattern, layout_of

# Evaluating all pairs of smaller units would cost as much as evaluating tokens.
SMALLEST_LISTED_UNIT = 16
_CHUNK = 1 << 20
# Runs of blocks: rows, first, stop, states.
_RowRuns: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def block_states(pattern: Pattern, grid: BlockGrid) -> BlockRuns:
    """The states that ``block_rule`` gives; all blocks are partial if it gives none. Raises ValueError for another form."""
    given = pattern.block_rule(grid)
    if given is None:
        return BlockRuns(grid.shape, np.zeros(1, np.int64), np.full(1, PARTIAL, np.int8))
    states = BlockRuns.from_sparse(given) if scipy.sparse.issparse(given) else given
    if not isinstance(states, BlockRuns) or states.shape != grid.shape:
        got = type(given).__name__ + (f" of shape {given.shape}" if hasattr(given, "shape") else "")
        raise ValueError(f"the block rule of {pattern} must return a scipy.sparse matrix of shape {grid.shape}; got {got}")
    return states


class RunPattern(Pattern):
    """Each query keeps a few runs of keys: define ``row_runs``, and ``ordered_runs`` if it holds."""

    def row_runs(self, q: np.ndarray) -> Runs:
        raise NotImplementedError(f"{type(self).__name__} is a RunPattern and defines no row_runs")

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        first, stop = self.row_runs(np.array(q))  # a copy: a rule may change its argument in place
        kept: np.ndarray = np.zeros((), bool)
        for run in range(first.shape[-1]):
            kept = kept | ((kv >= first[..., run]) & (kv < stop[..., run]))
        return kept

    def block_rule(self, grid: BlockGrid) -> BlockRuns:
        """Run by run: some query of a row reaches from the least first to the greatest stop, all from the greatest to the least."""
        runs = self._count_runs(grid.offset)
        pieces = []
        for rows in _row_chunks(grid, runs * (2 if self.ordered_runs else grid.block_size)):
            first, stop = self.row_runs(grid.q_ends(rows) if self.ordered_runs else grid.q_positions(rows))
            if self.ordered_runs:
                some, every = (first[:, 0], stop[:, 1]), (first[:, 1], stop[:, 0])
            else:
                first, stop = np.maximum(first, 0), np.minimum(stop, grid.kv_len)
                empty = stop <= first
                first, stop = np.where(empty, grid.kv_len, first), np.where(empty, 0, stop)
                some, every = (first.min(1), stop.max(1)), (first.max(1), stop.min(1))
            pieces += [_round_to_blocks(grid, rows, *some, PARTIAL), _round_to_blocks(grid, rows, *every, FULL)]
        return _merge_row_runs(grid, pieces)

    def _count_runs(self, position: int) -> int:
        """How many runs a query keeps. Raises ValueError for runs in another form than ``row_runs`` must return."""
        with explain_array_errors(self, "row_runs"):
            runs: object = self.row_runs(np.array([position, position]))
        first, stop = _check_two_arrays(runs, f"row_runs of {self} must return (first, stop)")
        if first.ndim != 2 or len(first) != 2 or first.shape != stop.shape or {first.dtype.kind, stop.dtype.kind} - {"i"}:
            raise ValueError(
                f"row_runs of {self} must return two integer arrays of shape (*q.shape, runs); for q of shape (2,) got "
                f"{first.dtype} of shape {first.shape} and {stop.dtype} of shape {stop.shape}; begin with q = q[..., None]"
            )
        if first.shape[1] == 0:
            raise ValueError(f"row_runs of {self} must return at least one run a query; got none; stop <= first is an empty run")
        return first.shape[1]


def _check_two_arrays(given: object, requirement: str) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        got = f"{len(given)} values" if isinstance(given, (tuple, list)) else type(given).__name__
        raise TypeError(f"{requirement}, two integer arrays; got {got}")
    return np.asarray(given[0]), np.asarray(given[1])


def _row_chunks(grid: BlockGrid, numbers_per_row: int) -> Iterator[np.ndarray]:
    """The block rows, in chunks small enough for this many numbers per row to fit in bounded memory."""
    step = max(1, _CHUNK // numbers_per_row)
    return (np.arange(low, min(low + step, grid.q_blocks)) for low in range(0, grid.q_blocks, step))


def _round_to_blocks(grid: BlockGrid, rows: np.ndarray, first: np.ndarray, stop: np.ndarray, state: int) -> _RowRuns:
    """Runs of blocks (row, first, stop, state) from runs of tokens, one or more per block row.

    rows: (rows,). first, stop: (rows, runs) key positions. state: PARTIAL takes blocks that a run touches, FULL those it covers.
    """
    size = grid.block_size
    first, stop = np.maximum(first, 0), np.minimum(stop, grid.kv_len)
    if state == PARTIAL:
        first, stop = first // size, -(-stop // size)
    else:
        first, stop = -(-first // size), np.where(stop == grid.kv_len, grid.kv_blocks, stop // size)
    row, run = np.nonzero(stop > first)
    return rows[row], first[row, run], stop[row, run], np.full(len(row), state)


def _merge_row_runs(grid: BlockGrid, pieces: list[_RowRuns]) -> BlockRuns:
    return BlockRuns.from_row_runs(grid.shape, *(np.concatenate(column) for column in zip(*pieces, strict=True)))


class UnitPattern(Pattern):
    """The rule applies to units of ``block`` tokens, position // block: define ``unit_rule``, and ``unit_pairs`` if the kept pairs
    can be listed without testing all of them. ``block`` is a field, or the same number for all patterns of the class."""

    block: int

    def _unit(self) -> int:
        """``block``. Raises TypeError for a class without it, ValueError where it is no number of tokens."""
        name = self.name or type(self).__qualname__
        if not hasattr(self, "block"):
            raise TypeError(f"{name} is a pattern of units and has no block, the tokens in a unit; add a field block: int = 128")
        return positive_int(name, "block", self.block)

    def unit_rule(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Which pairs of units may attend: bool, broadcastable like ``token_rule``."""
        raise NotImplementedError(f"{type(self).__name__} is a UnitPattern and defines no unit_rule")

    def unit_pairs(self, first: int, stop: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
        """All kept (i, j) with first <= i < stop and 0 <= j < cols, each pair once, as two int64 arrays."""
        pairs = []
        step = max(1, _CHUNK // cols)
        for low in range(first, stop, step):
            i, j = np.arange(low, min(low + step, stop))[:, None], np.arange(cols)[None, :]
            kept = evaluate_rule(self, "unit_rule", self.unit_rule, (i, j), (len(i), cols))
            row, col = np.nonzero(kept)
            pairs.append((row + low, col))
        queries, keys = (np.concatenate([p[k] for p in pairs]).astype(np.int64) for k in range(2))
        return queries, keys

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        unit = self._unit()
        return self.unit_rule(np.asarray(q) // unit, np.asarray(kv) // unit)

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        size, unit = kv.shape[1], self._unit()
        if unit == 1:
            return super().token_tiles(q, kv)
        if size % unit == 0 and not (q[:, 0] % unit).any() and not (kv[:, 0] % unit).any():
            # Blocks begin with units: twice as fast as finding the unit of each token.
            return super().token_tiles(q[:, ::unit], kv[:, ::unit]).repeat(unit, axis=1).repeat(unit, axis=2)
        (i, row), (j, col) = (_find_units(position // unit) for position in (q, kv))
        kept = super().token_tiles(i * unit, j * unit)
        block = np.arange(len(kept))[:, None, None]
        # Columns before rows, as rows are copied whole.
        kept = kept[block, np.arange(kept.shape[1])[:, None], col[:, None, :]]
        return kept[block[:, 0], row]

    def block_rule(self, grid: BlockGrid) -> BlockRuns | None:
        unit, lists_pairs = self._unit(), type(self).unit_pairs is not UnitPattern.unit_pairs
        if unit < SMALLEST_LISTED_UNIT and not lists_pairs:
            return None
        first, stop = grid.offset // unit, (grid.kv_len - 1) // unit + 1
        i, j = self._check_unit_pairs(first, stop)
        return self._large_unit_states(grid, i, j) if unit >= grid.block_size else self._small_unit_states(grid, i, j)

    def _check_unit_pairs(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """``unit_pairs``. Raises ValueError or TypeError for pairs in another form than it must return."""
        pairs: object = self.unit_pairs(first, stop, stop)
        if type(self).unit_pairs is UnitPattern.unit_pairs:
            return cast("tuple[np.ndarray, np.ndarray]", pairs)
        i, j = _check_two_arrays(pairs, f"unit_pairs of {self} must return (i, j)")
        if i.ndim != 1 or i.shape != j.shape or (i.size and {i.dtype.kind, j.dtype.kind} - {"i"}):
            raise ValueError(
                f"unit_pairs of {self} must return two signed integer arrays of one length; got {i.dtype} of shape {i.shape} and "
                f"{j.dtype} of shape {j.shape}"
            )
        inside = (i >= first) & (i < stop) & (j >= 0) & (j < stop)
        i, j = i[inside].astype(np.int64), j[inside].astype(np.int64)
        pair = np.sort(i * stop + j)  # a pair listed twice would count as two areas of a block
        if (pair[1:] == pair[:-1]).any():
            twice = int(pair[1:][pair[1:] == pair[:-1]][0])
            raise ValueError(f"unit_pairs of {self} must list each pair once; got {divmod(twice, stop)} twice")
        return i, j

    def _small_unit_states(self, grid: BlockGrid, i: np.ndarray, j: np.ndarray) -> BlockRuns:
        """Kept units do not overlap, so the areas they cover in a block add up to the block's kept pairs."""
        kept = scipy.sparse.csr_array(grid.shape, dtype=np.int64)
        for row, height in _split_at_blocks(i * self.block - grid.offset, self.block, grid.q_len, grid.block_size):
            for col, width in _split_at_blocks(j * self.block, self.block, grid.kv_len, grid.block_size):
                pairs = height * width
                some = pairs > 0
                kept += scipy.sparse.csr_array((pairs[some], (row[some], col[some])), shape=grid.shape)
        kept = kept.tocoo()
        rows, cols = (index.astype(np.int64) for index in kept.coords)
        state = np.where(kept.data == grid.heights(rows) * grid.widths(cols), FULL, PARTIAL)
        return BlockRuns.from_row_runs(grid.shape, rows, cols, cols + 1, state)

    def _large_unit_states(self, grid: BlockGrid, i: np.ndarray, j: np.ndarray) -> BlockRuns:
        """The queries of a block row lie in one or two units; where both agree on a block, that is its state."""
        order = np.lexsort((j, i))
        unit, first, stop = runs_of(i[order], j[order])
        first, stop = first * self.block, stop * self.block
        rows = np.arange(grid.q_blocks)
        q = grid.q_ends(rows) // self.block
        by_end = []
        for end in range(2 if (q[:, 0] != q[:, 1]).any() else 1):  # the unit of each row's first query, and of its last
            low, high = (np.searchsorted(unit, q[:, end], side=s) for s in ("left", "right"))
            row = np.repeat(rows, high - low)
            run = concat_ranges(low, high - low)
            # A unit of whole blocks leaves none partial.
            states = (PARTIAL, FULL) if self.block % grid.block_size else (FULL,)
            runs = [_round_to_blocks(grid, row, first[run, None], stop[run, None], state) for state in states]
            by_end.append(_merge_row_runs(grid, runs))
        return by_end[0] if len(by_end) == 1 else by_end[0].where_equal(by_end[1])


def _find_units(unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the units of each block in order, (n, units), where the last may repeat; the index of each token's unit among them).

    unit: (n, block), the unit of each token of n blocks, ascending. [[4, 4, 5], [6, 6, 6]] gives [[4, 5], [6, 6]] and
    [[0, 0, 1], [0, 0, 0]].
    """
    index = unit - unit[:, :1]
    return np.minimum(unit[:, :1] + np.arange(index[:, -1].max() + 1), unit[:, -1:]), index


def _split_at_blocks(start: np.ndarray, unit: int, length: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts token ranges [start, start + unit), unit < size, into their parts in blocks of ``size`` tokens: yields (block, tokens)
    of the first and of the second part; parts outside [0, length) have no tokens."""
    for part in range(2):
        block = start // size + part
        first = np.maximum(np.maximum(start, block * size), 0)
        yield block, np.maximum(np.minimum(np.minimum(start + unit, (block + 1) * size), length) - first, 0)


class DistancePattern(UnitPattern):
    """The rule applies to the distance i - j between a query's unit and a key's unit: define ``distance_rule``."""

    def distance_rule(self, distance: np.ndarray) -> np.ndarray:
        """Which distances i - j (negative: the key is later) may attend: bool of the same shape."""
        raise NotImplementedError(f"{type(self).__name__} is a DistancePattern and defines no distance_rule")

    @property
    def shift_period(self) -> int:
        return self._unit()

    def unit_rule(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return self.distance_rule(i - j)

    def block_rule(self, grid: BlockGrid) -> BlockRuns:
        """From the runs of kept distances [low, high): some queries of units top .. bottom reach key units
        top - high + 1 .. bottom - low; all of them reach bottom - high + 1 .. top - low."""
        unit = self._unit()
        pieces = []
        # A block covers at least this many distances, so a shorter gap separates no blocks and a shorter run fills none.
        least = 2 * max(1, grid.block_size // unit) - 1
        distance = np.arange(grid.offset // unit - (grid.kv_len - 1) // unit, (grid.kv_len - 1) // unit + 1)
        with explain_array_errors(self, "distance_rule"):
            kept = np.asarray(self.distance_rule(distance.copy()))  # a rule may change its argument in place
        if kept.dtype != bool or kept.shape != distance.shape:
            raise TypeError(
                f"distance_rule of {self} must return booleans of its argument's shape, {distance.shape}; got {kept.dtype} of "
                f"shape {kept.shape}; compare, and combine with & | ~"
            )
        edges = np.diff(kept.astype(np.int8), prepend=0, append=0)
        low, high = np.flatnonzero(edges > 0) + distance[0], np.flatnonzero(edges < 0) + distance[0]
        wide_gap, long_run = low[1:] - high[:-1] >= least, high - low >= least
        # The greatest distances first: a row's first keys have them.
        joined_low = low[np.append(True, wide_gap)[: len(low)]][::-1]
        joined_high = high[np.append(wide_gap, True)[: len(low)]][::-1]
        long_low, long_high = low[long_run][::-1], high[long_run][::-1]
        for rows in _row_chunks(grid, 1 + len(joined_low) + len(long_low)):
            top, bottom = np.split(grid.q_ends(rows) // unit, 2, axis=1)
            covered = (bottom - long_high + 1) * unit, (top - long_low + 1) * unit
            pieces.append(_round_to_blocks(grid, rows, *covered, FULL))
            if unit % grid.block_size or (top != bottom).any():  # else no block is partial
                reached = (top - joined_high + 1) * unit, (bottom - joined_low + 1) * unit
                pieces.append(_round_to_blocks(grid, rows, *reached, PARTIAL))
        return _merge_row_runs(grid, pieces)


@dataclass(frozen=True)
class Moved(Pattern):
    """A pattern whose position 0 is position ``by``, for keys from there on: it may say anything of those before.

    pattern: one that is not composed of others.
    """

    pattern: Pattern
    by: int

    @property
    def shift_period(self) -> int | None:
        return self.pattern.shift_period

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        # A rule need not take negative keys, unless blocks on a diagonal are alike.
        return self.pattern.token_rule(q - self.by, kv - self.by if self.shift_period else np.maximum(kv - self.by, 0))

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        kept, whole = np.empty((*q.shape, kv.shape[1]), bool), kv[:, 0] >= self.by
        for chosen, by, tiles in ((whole, self.by, self.pattern.token_tiles), (~whole, 0, super().token_tiles)):
            if chosen.any():
                kept[chosen] = tiles(q[chosen] - by, kv[chosen] - by)
        return kept

    def row_runs(self, q: np.ndarray) -> Runs | None:
        runs = self.pattern.row_runs(q - self.by)
        return None if runs is None else (runs[0] + self.by, runs[1] + self.by)

    def block_rule(self, grid: BlockGrid) -> BlockRuns:
        """From the pattern's own blocks, in the same rows: each block here touches one or two of them."""
        unmoved = BlockGrid(grid.q_len, max(1, grid.kv_len - self.by), grid.block_size)
        rows = np.arange(grid.q_blocks)
        pieces = [_round_to_blocks(grid, rows, rows[:, None] * 0, rows[:, None] * 0 + self.by, PARTIAL)]
        states = block_states(self.pattern, unmoved)
        for state in (PARTIAL, FULL):
            rows, first, stop = states.row_runs(state)
            first = first[:, None] * grid.block_size + self.by
            stop = np.minimum(stop[:, None] * grid.block_size, unmoved.kv_len) + self.by
            # The first and the last block of a full run may be full only in part.
            pieces += [_round_to_blocks(grid, rows, first, stop, kind) for kind in sorted({PARTIAL, state})]
        return _merge_row_runs(grid, pieces)


def move_pattern(pattern: Pattern, by: int) -> Pattern:
    """The expression with position 0 at position ``by``, negative or not; equal for many ``by``, as tables are cached."""

    def change(leaf: Pattern) -> Pattern:
        rest = abs(by) % leaf.shift_period * (1 if by > 0 else -1) if leaf.shift_period else by
        if not rest and layout_of(leaf) is None:  # a moved pattern is over no layout, which would be before the expression
            return leaf
        if isinstance(leaf, DerivedPattern):
            return leaf.expand_expression().map_leaves(change)
        moved = leaf.move_by(by)
        return Moved(leaf, rest) if moved is None else moved

    return pattern.map_leaves(change)
