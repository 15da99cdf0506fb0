"""The natural forms of most patterns; each derives the token rule and the block rule from one method.

RunPattern      each query keeps a few runs of keys                      causal, windows, documents, prefixes
UnitPattern     the rule applies to units of ``block`` tokens            butterfly, random, fixed
DistancePattern the rule applies to the distance between two units       strided, dilated, power_of_two
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..compat.extras import naming_extra
from .grid import FULL, PARTIAL, BlockGrid, BlockRuns, SparseMatrix, runs_of, union
from .pattern import DerivedPattern, Pattern, Runs, evaluate_rule, layout_of

# Evaluating all pairs of smaller units would cost as much as evaluating tokens.
SMALLEST_LISTED_UNIT = 16
_CHUNK = 1 << 17  # pairs or runs evaluated at a time, which fit in a core's cache
# Runs of blocks: rows, first, stop, states.
_RowRuns: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def block_states(pattern: Pattern, grid: BlockGrid) -> BlockRuns:
    """The states that ``block_rule`` gives; all blocks are partial if it gives none. Raises ValueError for another form."""
    with naming_extra():  # scipy
        given = pattern.block_rule(grid)
    if given is None:
        return BlockRuns(grid.shape, np.zeros(1, np.int64), np.full(1, PARTIAL, np.int8))
    states = BlockRuns.from_sparse(given) if hasattr(given, "tocoo") else given
    if not isinstance(states, BlockRuns) or states.shape != grid.shape:
        got = type(given).__name__ + (f" of shape {given.shape}" if hasattr(given, "shape") else "")
        raise ValueError(f"the block rule of {pattern} must return a scipy.sparse matrix of shape {grid.shape}; got {got}")
    return states


class RunPattern(Pattern):
    """Each query keeps a few runs of keys: define ``row_runs``."""

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
        pieces, step = [], max(1, _CHUNK // (self._count_runs(grid.offset) * grid.block_size))  # bounds memory
        for low in range(0, grid.q_blocks, step):
            rows = np.arange(low, min(low + step, grid.q_blocks))
            first, stop = self.row_runs(grid.q_positions(rows))
            first, stop = np.maximum(first, 0), np.minimum(stop, grid.kv_len)
            empty = stop <= first
            first, stop = np.where(empty, grid.kv_len, first), np.where(empty, 0, stop)
            some, every = (first.min(1), stop.max(1)), (first.max(1), stop.min(1))
            pieces += [_round_to_blocks(grid, rows, *some, PARTIAL), _round_to_blocks(grid, rows, *every, FULL)]
        return _merge_row_runs(grid, pieces)

    def _count_runs(self, position: int) -> int:
        """How many runs a query keeps. Raises ValueError for runs in another form than ``row_runs`` must return."""
        bounds = [np.asarray(bound) for bound in self.row_runs(np.array([position, position]))]
        runs = bounds[0].size // 2
        if len(bounds) != 2 or not runs or any(bound.shape != (2, runs) or bound.dtype.kind != "i" for bound in bounds):
            got = " and ".join(f"{bound.dtype} of shape {bound.shape}" for bound in bounds)
            raise ValueError(
                f"row_runs of {self} must return (first, stop), two integer arrays of shape (*q.shape, runs), of one run or more; "
                f"for q of shape (2,) got {got}; begin with q = q[..., None]"
            )
        return runs


def _round_to_blocks(grid: BlockGrid, rows: np.ndarray, first: np.ndarray, stop: np.ndarray, state: int) -> _RowRuns:
    """Runs of blocks that runs of keys, first and stop (rows, runs), touch (for PARTIAL) or cover (for FULL)."""
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
    """The rule applies to units of ``block`` tokens, position // block: define ``unit_rule``. ``block`` is a field or constant."""

    block: int

    def unit_rule(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Which pairs of units may attend: bool, broadcastable like ``token_rule``."""
        raise NotImplementedError(f"{type(self).__name__} is a UnitPattern and defines no unit_rule")

    def kept_units(self, first: int, stop: int) -> SparseMatrix:
        """Which pairs (i, j) of units are kept, first <= i < stop and 0 <= j < stop: (stop - first, stop) int32, 1 if kept.
        Tests all pairs."""
        from scipy.sparse import csr_array, vstack

        parts, step = [], max(1, _CHUNK // stop)
        for low in range(first, stop, step):
            i, j = np.arange(low, min(low + step, stop))[:, None], np.arange(stop)[None, :]
            kept = evaluate_rule(self, "unit_rule", self.unit_rule, (i, j), (len(i), stop))
            parts.append(csr_array(kept, dtype=np.int32))
        return vstack(parts)

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        return self.unit_rule(np.asarray(q) // self.block, np.asarray(kv) // self.block)

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        if self.block == 1:
            return super().token_tiles(q, kv)
        (i, row), (j, col) = (_find_units(position // self.block) for position in (q, kv))
        kept = super().token_tiles(i * self.block, j * self.block)
        block = np.arange(len(kept))[:, None, None]
        # Columns before rows, as rows are copied whole.
        kept = kept[block, np.arange(kept.shape[1])[:, None], col[:, None, :]]
        return kept[block[:, 0], row]

    def block_rule(self, grid: BlockGrid) -> BlockRuns | None:
        """From the sum over the kept pairs of units of how many queries and keys lie in each block. Units that are
        whole blocks need no keys: all blocks of a unit have one state in a row."""
        unit, size, whole = self.block, grid.block_size, self.block % grid.block_size == 0
        if unit < SMALLEST_LISTED_UNIT:
            return None
        units = self.kept_units(grid.offset // unit, (grid.kv_len - 1) // unit + 1)
        kept = _tokens_in_units(grid.q_len, grid.offset, unit, size) @ units
        kept = kept if whole else kept @ _tokens_in_units(grid.kv_len, 0, unit, size).T
        kept = kept.tocsr().tocoo()  # by column before, which leaves each row sorted
        rows, cols = (index.astype(np.int64) for index in kept.coords)
        full = kept.data == grid.heights(rows) * (1 if whole else grid.widths(cols))
        rows, first, stop = runs_of(rows * 2 + full, cols)
        step = unit // size if whole else 1
        return BlockRuns.from_row_runs(grid.shape, rows // 2, first * step, stop * step, PARTIAL + rows % 2)


def _tokens_in_units(tokens: int, position: int, unit: int, size: int) -> SparseMatrix:
    """(blocks, units) int32: how many tokens of each block lie in each unit, from the unit of the first token, at ``position``."""
    from scipy.sparse import csc_array

    start = union([np.arange(0, tokens, size), np.arange(-position % unit, tokens, unit)])
    units = (start + position) // unit - position // unit
    return csc_array((np.diff(start, append=tokens).astype(np.int32), (start // size, units)))


def _find_units(unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the units of each block, (n, units), where the last may repeat; the index of each token's unit among them). unit: (n, block)
    ascending, the unit of each token. [[4, 4, 5], [6, 6, 6]] gives [[4, 5], [6, 6]] and [[0, 0, 1], [0, 0, 0]]."""
    index = unit - unit[:, :1]
    return np.minimum(unit[:, :1] + np.arange(index[:, -1].max() + 1), unit[:, -1:]), index


class DistancePattern(UnitPattern):
    """The rule applies to the distance i - j between a query's unit and a key's unit: define ``distance_rule``."""

    def distance_rule(self, distance: np.ndarray) -> np.ndarray:
        """Which distances i - j (negative: the key is later) may attend: bool of the same shape."""
        raise NotImplementedError(f"{type(self).__name__} is a DistancePattern and defines no distance_rule")

    @property
    def shift_period(self) -> int:
        return self.block

    def unit_rule(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return self.distance_rule(i - j)

    def kept_units(self, first: int, stop: int) -> SparseMatrix:
        from scipy.sparse import dia_array

        distance = np.arange(first - stop + 1, stop)
        kept = distance[evaluate_rule(self, "distance_rule", self.distance_rule, (distance,), distance.shape)]
        ones = np.broadcast_to(np.int32(1), (len(kept), stop - first))
        return dia_array((ones, kept - first), shape=(stop, stop - first)).tocsr().T  # by row, so its transpose is by column


@dataclass(frozen=True)
class Moved(Pattern):
    """A pattern, not composed of others, whose position 0 is position ``by``; it may say anything of keys before that."""

    pattern: Pattern
    by: int

    @property
    def shift_period(self) -> int | None:
        return self.pattern.shift_period

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        # A rule need not take negative keys, unless it repeats along diagonals.
        return self.pattern.token_rule(q - self.by, kv - self.by if self.shift_period else np.maximum(kv - self.by, 0))

    def row_runs(self, q: np.ndarray) -> Runs | None:
        runs = self.pattern.row_runs(q - self.by)
        return None if runs is None else (runs[0] + self.by, runs[1] + self.by)

    def block_rule(self, grid: BlockGrid) -> BlockRuns:
        """From the unmoved pattern's blocks in the same rows: each block here touches one or two of them."""
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
        return Moved(leaf, rest)

    return pattern.map_leaves(change)
