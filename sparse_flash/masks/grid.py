"""The grid of blocks that a pattern is compiled on, and the run-length algebra of block states.

Patterns are defined on *positions*: key j has position j, and the last query has the position of the last key, so query i has
position ``i + kv_len - q_len``. That one rule aligns every pattern at the end, as decoding needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import sparray, spmatrix

EMPTY, PARTIAL, FULL = 0, 1, 2
BLOCK_SIZES = (16, 32, 64, 128, 256)
SparseMatrix: TypeAlias = "sparray | spmatrix"


def check_index(name: str, value: SupportsIndex, count: int) -> int:
    """The number of one of ``count`` tokens, heads or batch entries. Raises TypeError or IndexError."""
    index = operator.index(value)
    if not 0 <= index < count:
        raise IndexError(f"{name} must be 0 to {count - 1}; got {index}")
    return index


@dataclass(frozen=True)
class BlockGrid:
    """A (q_len, kv_len) attention matrix divided into square blocks; the last row and column of blocks may be cut off.

    q_len, kv_len: tokens. block_size: tokens on a side of a block, a power of two from 16 to 256.
    """

    q_len: int
    kv_len: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("q_len", "kv_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} must be a positive integer number of tokens; got {value!r}")
            object.__setattr__(self, name, int(value))
        if not isinstance(self.block_size, (int, np.integer)) or self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be a power of two in 16..256; got {self.block_size!r}; try 128")
        object.__setattr__(self, "block_size", int(self.block_size))

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_size)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_size)

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_blocks, self.kv_blocks

    @property
    def offset(self) -> int:
        """The position of the first query (negative when there are more queries than keys)."""
        return self.kv_len - self.q_len

    def heights(self, rows: np.ndarray) -> np.ndarray:
        """How many queries the given block rows hold: block_size, fewer in the last row."""
        return np.minimum(self.q_len - rows * self.block_size, self.block_size)

    def widths(self, cols: np.ndarray) -> np.ndarray:
        """How many keys the given block columns hold: block_size, fewer in the last column."""
        return np.minimum(self.kv_len - cols * self.block_size, self.block_size)

    def q_positions(self, rows: np.ndarray) -> np.ndarray:
        """(len(rows), block_size) int64 positions of the queries in these block rows; past the end the last one repeats."""
        index = rows[:, None] * self.block_size + np.arange(self.block_size)
        return np.minimum(index, self.q_len - 1) + self.offset

    def kv_positions(self, cols: np.ndarray) -> np.ndarray:
        """(len(cols), block_size) int64 positions of the keys in these block columns; past the end the last one repeats."""
        index = cols[:, None] * self.block_size + np.arange(self.block_size)
        return np.minimum(index, self.kv_len - 1)


def cells_of(index: np.ndarray, shape: Sequence[int]) -> list[np.ndarray]:
    """The cell on each axis of row-major indices. (numpy 2.4's unravel_index is wrong for some arrays of over 8,192 numbers.)"""
    cells: list[np.ndarray] = []
    for extent in shape[:0:-1]:
        index, cell = np.divmod(index, extent)
        cells.insert(0, cell)
    return [index, *cells]


def union(ascending: Sequence[np.ndarray]) -> np.ndarray:
    """The distinct numbers of some ascending arrays, ascending. Merging is several times as fast as np.unique, which hashes."""
    numbers = np.sort(np.concatenate(ascending), kind="stable")
    return numbers[np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]]


def concat_ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ..., counts[0] numbers, then those from first[1] on, and so on."""
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def runs_of(rows: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, ordered by row and column, as runs [first, stop) of columns in a row, in order: rows, first, stop, (runs,) each."""
    begins = np.append(True, (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1] + 1))[: len(rows)]
    begin = np.flatnonzero(begins)
    last = np.append(begin[1:], len(rows))[: len(begin)] - 1
    return rows[begin], cols[begin], cols[last] + 1


@dataclass(frozen=True)
class BlockRuns:
    """Block states: block k of the row-major grid has state ``states[r]`` for the last r with ``starts[r] <= k``.

    shape: (q_blocks, kv_blocks). starts: (runs,) int64, ascending, starts[0] == 0. states: (runs,) int8 of EMPTY (0),
    PARTIAL (1), FULL (2).

    ``& | ~`` are three-valued logic, in time and memory proportional to the runs rather than the blocks.
    """

    shape: tuple[int, int]
    starts: np.ndarray
    states: np.ndarray

    @classmethod
    def from_row_runs(
        cls, shape: tuple[int, int], rows: np.ndarray, first: np.ndarray, stop: np.ndarray, state: np.ndarray
    ) -> BlockRuns:
        """From runs of blocks [first, stop) in the given rows, each with a state; where runs overlap the larger state wins."""
        rows, first, stop, state = (np.asarray(a).ravel() for a in np.broadcast_arrays(rows, first, stop, state))
        first, stop = np.clip(first, 0, shape[1]), np.clip(stop, 0, shape[1])
        keep = stop > first
        base, kept = rows[keep].astype(np.int64) * shape[1], state[keep]
        begin, end = base + first[keep], base + stop[keep]
        if (begin[1:] >= end[:-1]).all():  # in order, and none over another
            position, states = np.append(0, np.column_stack([begin, end])), np.append(EMPTY, np.column_stack([kept, 0 * kept]))
            last = np.append(position[1:] != position[:-1], True) & (position < shape[0] * shape[1])
            return cls(shape, position[last], states[last].astype(np.int8))._merge_equal_runs()
        position = np.concatenate([[0], begin, end])
        is_full, is_some = (kept == FULL).astype(np.int32), (kept > EMPTY).astype(np.int32)
        order = np.argsort(position, kind="stable")
        position = position[order]
        full = np.cumsum(np.concatenate([[0], is_full, -is_full])[order])
        some = np.cumsum(np.concatenate([[0], is_some, -is_some])[order])
        last = np.append(position[1:] != position[:-1], True) & (position < shape[0] * shape[1])
        states = np.where(full[last] > 0, FULL, np.where(some[last] > 0, PARTIAL, EMPTY)).astype(np.int8)
        return cls(shape, position[last], states)._merge_equal_runs()

    @classmethod
    def from_sparse(cls, matrix: SparseMatrix) -> BlockRuns:
        """From a scipy.sparse matrix of states (1 partial, 2 full); a boolean matrix means full where True."""
        coo = matrix.tocoo()
        state = np.where(coo.data, FULL, EMPTY) if coo.dtype == bool else coo.data
        unknown = np.setdiff1d(state, [EMPTY, PARTIAL, FULL])
        if unknown.size:
            raise ValueError(f"block states must be 0 (empty), 1 (partial) or 2 (full); got {unknown[0]}")
        row, col = coo.coords
        return cls.from_row_runs(coo.shape, row, col.astype(np.int64), col.astype(np.int64) + 1, state)

    def _merge_equal_runs(self) -> BlockRuns:
        change = np.append(True, self.states[1:] != self.states[:-1])
        return BlockRuns(self.shape, self.starts[change], self.states[change])

    def _combine(self, other: BlockRuns, operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> BlockRuns:
        if self.shape != other.shape:
            raise ValueError(f"block states of different grids: {self.shape} and {other.shape}")
        starts = union([self.starts, other.starts])
        return BlockRuns(self.shape, starts, operation(self.at(starts), other.at(starts)))._merge_equal_runs()

    def __and__(self, other: BlockRuns) -> BlockRuns:
        return self._combine(other, np.minimum)

    def __or__(self, other: BlockRuns) -> BlockRuns:
        return self._combine(other, np.maximum)

    def __invert__(self) -> BlockRuns:
        return BlockRuns(self.shape, self.starts, (FULL - self.states).astype(np.int8))

    def at(self, index: np.ndarray) -> np.ndarray:
        """The states of the blocks with these row-major indices, int8."""
        return self.states[np.searchsorted(self.starts, index, side="right") - 1]

    def count(self, state: int) -> int:
        """How many blocks have this state."""
        lengths = np.diff(self.starts, append=self.shape[0] * self.shape[1])
        return int(lengths[self.states == state].sum())

    def row_runs(self, state: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The blocks in this state as runs [first, stop) of columns in a row, in order: rows, first, stop, (runs,) int64 each."""
        width, chosen = self.shape[1], self.states == state
        begin, end = self.starts[chosen], np.append(self.starts[1:], self.shape[0] * width)[chosen]
        # A run of the grid may go over several rows.
        parts = (end - 1) // width - begin // width + 1
        rows = concat_ranges(begin // width, parts)
        first, stop = (np.clip(np.repeat(bound, parts) - rows * width, 0, width) for bound in (begin, end))
        return rows, first, stop

    def rows_and_cols(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, cols) of the blocks in this state, in row-major order, (blocks,) int64 each."""
        rows, cols, _ = zip(*self.blocks(state), strict=True)
        return np.concatenate(rows), np.concatenate(cols)

    def below(self) -> BlockRuns:
        """The states one row further down: the last row is gone, and the first row is empty."""
        kept = self.starts < (self.shape[0] - 1) * self.shape[1]
        starts, states = np.append(0, self.starts[kept] + self.shape[1]), np.append(EMPTY, self.states[kept]).astype(np.int8)
        return BlockRuns(self.shape, starts, states)

    def blocks(self, state: int | None = None, chunk: int = 1 << 20) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields (rows, cols, states) of the non-empty blocks, or of those in one state, in order, in one piece or more."""
        chosen = self.states != EMPTY if state is None else self.states == state
        ends = np.append(self.starts[1:], self.shape[0] * self.shape[1])
        first, stop, states = self.starts[chosen], ends[chosen], self.states[chosen]
        before = np.concatenate([[0], np.cumsum(stop - first)])
        for low in range(0, max(int(before[-1]), 1), chunk):
            high = min(low + chunk, int(before[-1]))
            # The runs of this piece, and how many of its blocks are in each.
            begin, end = np.searchsorted(before, low, side="right") - 1, np.searchsorted(before, high)
            inside = np.diff(before[begin : end + 1].clip(low, high))
            run = np.repeat(np.arange(begin, end), inside)
            index = np.repeat(first[begin:end] - before[begin:end], inside) + np.arange(low, high)
            rows, cols = np.divmod(index, self.shape[1])
            yield rows, cols, states[run]
