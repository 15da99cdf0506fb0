"""Pattern -> tables, in time and memory proportional to the blocks that the mask keeps.

1. Each leaf of the expression gives its blocks' states as runs; ``& | ~`` combine them by three-valued logic.
2. Blocks that are still partial are decided by their tokens, under the expression simplified for the states of its leaves there.
   Of blocks that must be equal, one is evaluated: on a diagonal for distance rules, by keys that a rule gives (``block_keys``).
3. A block found empty is dropped and one found full is promoted, so the table depends only on the mask's meaning.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from importlib.util import find_spec
from typing import cast

import numpy as np

from .build import check_blocks, from_entries, from_heads
from .chooser import Chooser
from .fields import BEYOND
from .grid import FULL, PARTIAL, BlockGrid, BlockRuns
from .mask_tables import MaskTables
from .pattern import And, DerivedPattern, Not, Or, Pattern, PerEntry, Runs, short_text
from .rules import block_states
from .table import Entries, FullBlocks
from .tiles import TilePool, dense_batches, pack_runs, runs_to_dense, unique_rows

_CHUNK = 1 << 14  # partial blocks decided at a time
_BATCH_NUMBERS = 1 << 20  # numbers that describe runs, held at a time
_UNDECIDED = -3  # not the number of a tile, nor EMPTY_TILE or FULL_TILE
_MOST_RUNS = 256  # runs per query beyond which evaluating tokens is as fast
_LONG = 1 << 28  # pairs to evaluate beyond which a progress bar is shown


def compile_tables(pattern: Pattern, grid: BlockGrid, progress: bool | None = None) -> MaskTables:
    """The tables of a pattern, on the CPU."""
    for leaf in pattern.leaves():
        if isinstance(leaf, Chooser):
            raise leaf.missing_content_error()
    whole, made = pattern.map_leaves(_expand_derived), {}
    entries, batch_heads = (whole.patterns, whole.batch_heads) if isinstance(whole, PerEntry) else ((whole,), (1, 1))
    for one in dict.fromkeys(entries):
        try:
            made[one] = _Compilation(one, grid, progress).run()
        except Exception as error:  # of a rule, mostly, where its text says nothing of masks
            error.add_note(f"while compiling {short_text(pattern, 200)} for {grid.q_len} queries and {grid.kv_len} keys")
            raise
    return from_heads([made[one] for one in entries], *batch_heads) if len(entries) > 1 else made[entries[0]]


class _Compilation:
    def __init__(self, pattern: Pattern, grid: BlockGrid, progress: bool | None):
        self.pattern, self.grid, self.progress = pattern, grid, progress
        self.leaves = {leaf: block_states(leaf, grid) for leaf in dict.fromkeys(pattern.leaves())}
        self.diagonals: dict[Pattern, np.ndarray] = {}
        self.pool = TilePool(grid.block_size)

    def run(self) -> MaskTables:
        states = self.pattern.map_leaves(self.leaves.__getitem__)
        check_blocks(states.count(FULL))  # before they take memory
        whole, cut = self.separate_cut_blocks(states)
        entries = Entries.join([*cut, *self.decide_blocks(states)])
        return from_entries(self.grid, entries, self.pool, FullBlocks(self.grid.shape, *whole.row_runs(FULL)))

    def separate_cut_blocks(self, states: BlockRuns) -> tuple[BlockRuns, list[Entries]]:
        """(the states of blocks that are not cut off by the end of the queries or keys, the full ones that are)"""
        (q_blocks, kv_blocks), size = self.grid.shape, self.grid.block_size
        cut_row, cut_col = self.grid.q_len % size > 0, self.grid.kv_len % size > 0
        if not (cut_row or cut_col):
            return states, []
        first = np.full(q_blocks, kv_blocks - cut_col)
        first[-1] *= not cut_row
        cut = BlockRuns.from_row_runs(self.grid.shape, np.arange(q_blocks), first, np.array(kv_blocks), np.array(FULL))
        entries = []
        for rows, cols, _ in (states & cut).blocks(FULL):  # their tiles say where they end
            zero = np.zeros((len(rows), 1, size), np.int64)
            tiles = self.pool.add_runs(self.clip_runs(rows, cols, zero, zero + size)[:, 0])
            entries.append(Entries(*(axis.astype(np.int32) for axis in (rows, cols, tiles))))
        return states & ~cut, entries

    def decide_blocks(self, states: BlockRuns) -> Iterator[Entries]:
        """Partial blocks, decided by their tokens. Blocks that turn out empty are left out."""
        for rows, cols, _ in self.show_progress(states.blocks(PARTIAL, chunk=_CHUNK), states.count(PARTIAL)):
            tiles = np.empty(len(rows), np.int64)
            index = rows * self.grid.kv_blocks + cols
            leaf_states = np.stack([runs.at(index) for runs in self.leaves.values()], axis=1)
            kinds, which = unique_rows(leaf_states)
            for kind, example in enumerate(kinds):
                chosen = which == kind
                rule = _simplify(self.pattern, dict(zip(self.leaves, leaf_states[example].tolist(), strict=True)))
                # A pattern, as a partial block has a leaf that is partial there.
                tiles[chosen] = self.decide(cast(Pattern, rule), rows[chosen], cols[chosen])
            kept = Entries(rows, cols, tiles).without_empty()
            yield Entries(*(axis.astype(np.int32) for axis in kept))  # small, as all are held at once

    def show_progress(self, chunks: Iterator[tuple[np.ndarray, ...]], undecided: int) -> Iterable[tuple[np.ndarray, ...]]:
        """The chunks of undecided blocks. If the work is long and rich is installed, iterating over them moves a bar."""
        long = self.progress or (self.progress is None and undecided * self.grid.block_size**2 > _LONG)
        if not long or not find_spec("rich"):
            return chunks
        from rich.console import Console
        from rich.progress import track

        text = f"compiling {short_text(self.pattern)}: {undecided:,} blocks"
        return track(chunks, text, total=-(-undecided // _CHUNK), console=Console(stderr=True), transient=True)

    def decide(self, rule: Pattern, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """The tiles that ``rule`` keeps of these blocks."""
        if not is_shift_invariant(rule, self.grid.block_size):
            return self.decide_distinct(rule, rows, cols)
        # One block of each diagonal, and the blocks of the last row and column, which may be cut off.
        size, diagonals = self.grid.block_size, sum(self.grid.shape)
        if rule not in self.diagonals:
            self.diagonals[rule] = np.full(4 * diagonals, _UNDECIDED, np.int32)
        tiles = self.diagonals[rule]
        index = (rows - cols) % diagonals * 4 + (self.grid.heights(rows) < size) * 2 + (self.grid.widths(cols) < size)
        undecided = np.flatnonzero(tiles[index] == _UNDECIDED)
        first = undecided[np.unique(index[undecided], return_index=True)[1]]
        if len(first):
            tiles[index[first]] = self.decide_distinct(rule, rows[first], cols[first])
        return tiles[index]

    def decide_distinct(self, rule: Pattern, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """The tiles of these blocks. Of blocks with equal keys (``block_keys``), one is evaluated."""
        if (runs := _row_runs(rule, self.grid.q_positions(rows[:1]))) is not None:
            return self.tiles_from_runs(rule, rows, cols, runs[0].shape[-1])
        keys = [leaf.block_keys(self.grid, rows, cols) for leaf in rule.leaves()]
        known = [one for one in keys if one is not None]
        if len(known) < len(keys):
            return self.tiles_from_tokens(rule, rows, cols)
        first, alike = unique_rows(np.column_stack([*known, self.grid.heights(rows), self.grid.widths(cols)]))
        return self.tiles_from_tokens(rule, rows[first], cols[first])[alike]

    def tiles_from_runs(self, rule: Pattern, rows: np.ndarray, cols: np.ndarray, runs_of_query: int) -> np.ndarray:
        """The tiles of these blocks by the runs of their queries, of some rows at a time, so that memory stays bounded."""
        tiles = np.empty(len(rows), np.int64)
        distinct, row = np.unique(rows, return_inverse=True)
        step = max(1, _BATCH_NUMBERS // (self.grid.block_size * runs_of_query))
        for low in range(0, len(distinct), step):
            chosen = np.flatnonzero((row >= low) & (row < low + step))
            runs = cast(Runs, _row_runs(rule, self.grid.q_positions(distinct[low : low + step])))
            first, stop = (np.ascontiguousarray(bound.swapaxes(1, 2)) for bound in runs)
            for blocks, numbers in self.pick_touching_runs(first, stop, row[chosen] - low, cols[chosen]):
                part = chosen[blocks]
                picked = first[numbers], stop[numbers]
                if picked[0].shape[1] > self.grid.block_size // 4:
                    tiles[part] = self.tiles_from_tokens(rule, rows[part], cols[part])
                    continue
                for bound in picked:
                    bound -= cols[part, None, None] * self.grid.block_size
                tiles[part] = self.pool_runs(self.clip_runs(rows[part], cols[part], *picked))
        return tiles

    def pick_touching_runs(
        self, first: np.ndarray, stop: np.ndarray, row: np.ndarray, cols: np.ndarray
    ) -> Iterator[tuple[slice, tuple[np.ndarray, np.ndarray]]]:
        """Yields (some of the blocks, the index in ``first`` and ``stop``, (rows, runs, block), of the runs that touch them): a
        window over an image has many, of which one or two lie in any block. row: of each block among these rows."""
        size, start = self.grid.block_size, cols[:, None] * self.grid.block_size
        kept = stop > first
        begin, end = np.where(kept, first, BEYOND).min(2), np.where(kept, stop, -BEYOND).max(2)
        touches = (begin[row] < start + size) & (end[row] > start)
        width = max(1, touches.sum(1).max())
        picked = np.argsort(~touches, axis=1, kind="stable")[:, :width]
        step = max(1, _BATCH_NUMBERS // (size * width))
        for part in (slice(low, low + step) for low in range(0, len(cols), step)):
            yield part, (row[part, None], picked[part])

    def pool_runs(self, packed: np.ndarray) -> np.ndarray:
        """Tile numbers of packed runs (n, runs, block)."""
        if packed.shape[1] == 1 or ((packed != 0).sum(1) <= 1).all():
            return self.pool.add_runs(packed.sum(1, dtype=np.int32))
        unique, inverse = unique_rows(packed.reshape(len(packed), -1))
        tiles = []
        for batch in dense_batches(len(unique), self.grid.block_size):
            part = packed[unique[batch]].swapaxes(1, 2)
            tiles.append(self.pool.add_dense(runs_to_dense(part & 0xFFFF, part >> 16, self.grid.block_size)))
        return np.concatenate(tiles)[inverse]

    def tiles_from_tokens(self, rule: Pattern, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        tiles, size = [], self.grid.block_size
        for batch in dense_batches(len(rows), size):
            r, c = rows[batch], cols[batch]
            kept = rule.token_tiles(self.grid.q_positions(r), self.grid.kv_positions(c))
            exists = [np.arange(size) < counts[:, None] for counts in (self.grid.heights(r), self.grid.widths(c))]
            if not (exists[0].all() and exists[1].all()):
                kept = kept & exists[0][:, :, None] & exists[1][:, None, :]
            tiles.append(self.pool.add_dense(kept))
        return np.concatenate(tiles)

    def clip_runs(self, rows: np.ndarray, cols: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Runs (n, runs, block) relative to their block, clipped to it and to the lengths in place, packed."""
        width = self.grid.widths(cols)[:, None, None]
        np.clip(first, 0, width, out=first)
        np.minimum(stop, width, out=stop)
        stop *= (np.arange(self.grid.block_size) < self.grid.heights(rows)[:, None])[:, None, :]
        return pack_runs(first, stop)


def entry_patterns(pattern: Pattern) -> tuple[Pattern, ...]:
    """The pattern of each query head or sequence, also within derived patterns; the pattern itself where all have the same."""
    whole = pattern.map_leaves(_expand_derived)
    return whole.patterns if isinstance(whole, PerEntry) else (pattern,)


def _expand_derived(leaf: Pattern) -> Pattern:
    """The leaves of a derived pattern's expression in its place."""
    return leaf.expand_expression().map_leaves(_expand_derived) if isinstance(leaf, DerivedPattern) else leaf


def _simplify(pattern: Pattern, states: dict[Pattern, int]) -> Pattern | bool:
    """The pattern within a block whose leaves have these states: True or False if they settle it."""
    if isinstance(pattern, (And, Or)):
        absorbing = isinstance(pattern, Or)
        parts = [_simplify(p, states) for p in pattern.operands]
        if any(p is absorbing for p in parts):
            return absorbing
        patterns = [p for p in parts if isinstance(p, Pattern)]
        return type(pattern).of(*patterns) if patterns else not absorbing
    if isinstance(pattern, Not):
        inner = _simplify(pattern.operand, states)
        return ~inner if isinstance(inner, Pattern) else not inner
    return pattern if states[pattern] == PARTIAL else states[pattern] == FULL


def is_shift_invariant(rule: Pattern, block_size: int) -> bool:
    """Whether moving both tokens of a pair by ``block_size`` changes nothing."""
    return all(leaf.shift_period is not None and block_size % leaf.shift_period == 0 for leaf in rule.leaves())


def _row_runs(pattern: Pattern, q: np.ndarray, limit: int = _MOST_RUNS) -> Runs | None:
    """The pattern as runs of keys (first, stop), each (*q.shape, runs), or None if that takes more than ``limit``."""
    if isinstance(pattern, (And, Or)):
        parts = [_row_runs(p, q, limit) for p in pattern.operands]
        known = [p for p in parts if p is not None]
        runs = reduce(_intersect if isinstance(pattern, And) else _unite, known) if len(known) == len(parts) else None
    elif isinstance(pattern, Not):
        # The complement of one run is two; that of several would require sorting, and evaluating tokens is simpler.
        inner = _row_runs(pattern.operand, q, 1)
        runs = inner and _complement(*inner)
    else:
        runs = pattern.row_runs(q.copy())  # a rule may change its argument in place, and others get the same
    return runs if runs and runs[0].shape[-1] <= limit else None


def _intersect(a: Runs, b: Runs) -> Runs:
    shape = (*a[0].shape[:-1], -1)
    return (
        np.maximum(a[0][..., :, None], b[0][..., None, :]).reshape(shape),
        np.minimum(a[1][..., :, None], b[1][..., None, :]).reshape(shape),
    )


def _unite(a: Runs, b: Runs) -> Runs:
    return np.concatenate([a[0], b[0]], axis=-1), np.concatenate([a[1], b[1]], axis=-1)


def _complement(first: np.ndarray, stop: np.ndarray) -> Runs:
    stop = np.maximum(first, stop)
    return np.concatenate([np.zeros_like(first), stop], -1), np.concatenate([first, np.full_like(stop, np.iinfo(np.int64).max)], -1)
