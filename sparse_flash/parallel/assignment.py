"""Assigns the tokens of a sequence to ranks. Everything here is a number on the host: every rank finds the same, without
messages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..masks.block_mask import BlockMask
from ..masks.grid import concat_ranges, union

# Chunks are the unit that is assigned. Chunks of 512 tokens gave documents of random lengths no better plans.
CHUNK_TOKENS = 1024
# Bounds on the chunks of a rank take precedence: zigzag needs a few to fold evenly, and the search must end in milliseconds.
_LEAST_CHUNKS, _MOST_CHUNKS = 4, 64
# Limits of ``improve_owners``. An exchange must bring the greater cost of its two ranks below _LEAST_GAIN of what it was. After
# _LOOK_BACK exchanges the costliest rank must be below _LEAST_PROGRESS of what it was.
_MOST_EXCHANGES, _PARTNERS, _LEAST_GAIN = 100, 2, 0.999  # _PARTNERS: ranks that the costliest one tries
_LOOK_BACK, _LEAST_PROGRESS = 32, 0.98
# Heavy rows visit more than the share _HEAVY of all columns. They are shared if their number times heads / kv_heads is at most the
# share _FEW of all rows. Their queries and results then have at most half of the bytes of all keys and values.
_HEAVY_SHARE, _FEW_SHARE = 0.5, 0.25
_FEW_RANKS = 16  # may share the memory of one host
_MOST_ENTRIES = 1 << 22  # entries of a table that are read at a time


@dataclass(frozen=True, eq=False)
class Visits:
    """Lists the block columns that chunks of ``chunk_blocks`` blocks visit under a mask.

    mask: on the CPU. work: (chunks,) float64, how many blocks the rows of a chunk visit, the mean over heads.
    ptr, cols: (chunks + 1,) and (needs,) int64. Chunk i needs the block columns cols[ptr[i] : ptr[i + 1]], ascending: each is
    visited by a row of the chunk, in at least one head.
    shared: (q_blocks,) bool, rows that are left out here because their queries travel; None if there are none.
    """

    mask: BlockMask
    chunk_blocks: int
    work: np.ndarray
    ptr: np.ndarray
    cols: np.ndarray
    shared: np.ndarray | None = None

    @classmethod
    def from_mask(cls, mask: BlockMask, chunk_blocks: int, shared: np.ndarray | None = None) -> Visits:
        blocks = mask.grid.q_blocks
        chunks = -(-blocks // chunk_blocks)
        visited = np.diff(mask.by_query.row_ptr.numpy()) * (True if shared is None else ~shared)
        work = _head_shares(mask) @ np.add.reduceat(visited, np.arange(chunks) * chunk_blocks, axis=1)
        needed = np.zeros(chunks * blocks, bool)
        for _, chunk, cols in _entries_by_chunk(mask, chunk_blocks, shared):
            needed[chunk * blocks + cols] = True
        needs = np.flatnonzero(needed)
        return cls(mask, chunk_blocks, work, np.searchsorted(needs, np.arange(chunks + 1) * blocks), needs % blocks, shared)

    def without_shared_rows(self, group: float) -> Visits | None:
        """Returns the visits without the rows that visit most columns, in the mean over heads; None if no row does, or too many.
        group: heads / kv_heads."""
        heavy = _head_shares(self.mask) @ np.diff(self.mask.by_query.row_ptr.numpy()) > _HEAVY_SHARE * self.mask.grid.kv_blocks
        few = 0 < heavy.sum() * group <= _FEW_SHARE * len(heavy)
        return Visits.from_mask(self.mask, self.chunk_blocks, heavy) if few else None

    @property
    def chunks(self) -> int:
        return len(self.work)

    @cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (row chunk, column chunk, visited blocks, the mean over heads) of each pair of chunks with visited blocks."""
        blocks = np.zeros(self.chunks**2)
        for share, chunk, cols in _entries_by_chunk(self.mask, self.chunk_blocks, self.shared):
            blocks += share * np.bincount(chunk * self.chunks + cols // self.chunk_blocks, minlength=len(blocks))
        visited = np.flatnonzero(blocks)
        return *np.divmod(visited, self.chunks), blocks[visited]


def _head_shares(mask: BlockMask) -> np.ndarray:
    """Returns (masks,) float64: the share of heads that use each stored mask."""
    return np.bincount(mask.mask_index.flatten().numpy(), minlength=mask.masks) / mask.mask_index.numel()


def _entries_by_chunk(
    mask: BlockMask, chunk_blocks: int, without: np.ndarray | None = None
) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    """Yields (share of heads, chunk of each row, column) of a mask's visited blocks, some rows of a stored mask at a time.
    without: (q_blocks,) bool, rows that are left out."""
    cols, rows = mask.by_query.col_idx.numpy(), mask.grid.q_blocks
    chunk_of_row = np.arange(rows) // chunk_blocks
    for share, ptr in zip(_head_shares(mask).tolist(), mask.by_query.row_ptr.numpy(), strict=True):
        first = 0
        while first < rows:
            # Takes rows of _MOST_ENTRIES entries in all, and one row at least.
            stop = max(first + 1, int(np.searchsorted(ptr, ptr[first] + _MOST_ENTRIES, side="right")) - 1)
            counts, visited = np.diff(ptr[first : stop + 1]), cols[ptr[first] : ptr[stop]]
            if without is not None:
                visited = visited[np.repeat(~without[first:stop], counts)]
                counts = counts * ~without[first:stop]
            yield share, np.repeat(chunk_of_row[first:stop], counts), visited
            first = stop


@dataclass(frozen=True, eq=False)
class Owners:
    """Records which blocks each rank owns.

    name: how chunks were assigned. owner: (chunks,) int64, the rank of each chunk of ``chunk_blocks`` blocks.
    blocks: (ranks, blocks of a rank) int64, the blocks of each rank, ascending, then -1 for padding. All ranks have equally many.
    """

    name: str
    owner: np.ndarray
    chunk_blocks: int
    blocks: np.ndarray

    @classmethod
    def from_chunks(cls, name: str, owner: np.ndarray, chunk_blocks: int, blocks: int, ranks: int) -> Owners:
        """blocks: the number of blocks of the whole sequence."""
        owner_of_block = owner[np.arange(blocks) // chunk_blocks]
        owned = np.bincount(owner_of_block, minlength=ranks)
        # All assignments have this width, so all have the same shapes. Every rank may then have padding.
        width = min(blocks, -(-len(owner) // ranks) * chunk_blocks)
        by_rank = np.full((ranks, width), -1)
        by_rank[np.arange(width) < owned[:, None]] = np.argsort(owner_of_block, kind="stable")
        return cls(name, owner, chunk_blocks, by_rank)

    @property
    def ranks(self) -> int:
        return len(self.blocks)

    def positions(self, q_len: int, block_size: int) -> np.ndarray:
        """Returns (ranks, tokens of a rank) int64: each token's position, -1 for padding. One rank alone has no padding."""
        positions = self.blocks[:, :, None] * block_size + np.arange(block_size)
        positions[(self.blocks < 0)[:, :, None] | (positions >= q_len)] = -1
        positions = positions.reshape(self.ranks, -1)
        return positions[:, :q_len] if self.ranks == 1 else positions

    def with_visits(self, visits: Visits) -> Assignment:
        return Assignment(self.name, self.owner, self.chunk_blocks, self.blocks, visits)


@dataclass(frozen=True, eq=False)
class Assignment(Owners):
    """Records which blocks each rank owns, and which it visits under a mask. visits: of the chunks."""

    visits: Visits

    @cached_property
    def owner_of_block(self) -> np.ndarray:
        """Returns (blocks,) int64, the rank that owns each block."""
        return self.owner[np.arange(self.visits.mask.grid.q_blocks) // self.chunk_blocks]

    @cached_property
    def visited(self) -> np.ndarray:
        """Returns (ranks,) float64: how many blocks the rows of each rank visit, the mean over heads."""
        return np.bincount(self.owner, self.visits.work, self.ranks)

    @cached_property
    def visiting_rows(self) -> np.ndarray:
        """Returns (ranks,) int64: how many block rows of each rank are in chunks that visit blocks of others. Not every row of such
        a chunk visits them, so this is an upper bound."""
        row, col, _ = self.visits.pairs
        visits_others = np.zeros(self.visits.chunks, bool)
        visits_others[row[self.owner[row] != self.owner[col]]] = True
        return self.sum_by_rank(visits_others[np.arange(len(self.owner_of_block)) // self.chunk_blocks]).astype(np.int64)

    def sum_by_rank(self, values: np.ndarray) -> np.ndarray:
        """Returns (ranks,): the sum of values, (blocks,), over each rank's blocks."""
        return np.bincount(self.owner_of_block, values, self.ranks)

    @cached_property
    def visited_by_shared_rows(self) -> np.ndarray:
        """Returns (ranks,) float64: how many blocks of each rank the shared rows of all ranks visit, the mean over heads."""
        of_columns = np.zeros(len(self.owner_of_block))
        if self.visits.shared is not None:
            for share, _, cols in _entries_by_chunk(self.visits.mask, self.chunk_blocks, ~self.visits.shared):
                of_columns += share * np.bincount(cols, minlength=len(of_columns))
        return self.sum_by_rank(of_columns)

    @cached_property
    def needs(self) -> np.ndarray:
        """Returns (ranks, kv_blocks) bool: whether a rank visits a block column."""
        needs = np.zeros((self.ranks, len(self.owner_of_block)), bool)
        needs[np.repeat(self.owner, np.diff(self.visits.ptr)), self.visits.cols] = True
        return needs

    def outgoing(self, source: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (blocks of a rank that others visit; (ranks, blocks) bool, the ranks that get each block).

        If ranks are few, blocks that go to the same ranks follow each other, so the blocks for one rank form few runs.
        """
        own = self.blocks[source][self.blocks[source] >= 0]
        wanted = self.needs[:, own]
        wanted[source] = False
        order = np.lexsort(wanted) if self.ranks <= _FEW_RANKS else np.arange(len(own))
        order = order[wanted[:, order].any(0)]
        return own[order], wanted[:, order]

    @cached_property
    def received(self) -> np.ndarray:
        """Returns (ranks,) int64: how many blocks each rank gets from others."""
        own = self.needs[self.owner_of_block, np.arange(len(self.owner_of_block))]
        return self.needs.sum(1) - np.bincount(self.owner_of_block, own, self.ranks).astype(np.int64)


def blocks_per_chunk(blocks: int, block_size: int, ranks: int) -> int:
    """Returns the number of blocks of a chunk: CHUNK_TOKENS of them, less for short sequences and more for long ones."""
    return max(1, min(max(CHUNK_TOKENS // block_size, blocks // (_MOST_CHUNKS * ranks)), blocks // (_LEAST_CHUNKS * ranks)))


def fold_chunks(chunks: int, ranks: int, folds: int) -> np.ndarray:
    """Returns (chunks,) int64, the rank of each chunk.

    0 folds give each rank one piece of the sequence. n folds give each rank two pieces in each of n stretches: one piece is as far
    from the stretch's start as the other is from its end. 1 fold is zigzag.
    """
    if not folds:
        return np.arange(chunks) // -(-chunks // ranks)
    pieces = 2 * ranks * folds
    piece = np.arange(chunks) * pieces // chunks % (2 * ranks)
    return np.minimum(piece, 2 * ranks - 1 - piece)


def balance_chunks(work: np.ndarray, ranks: int) -> np.ndarray:
    """Assigns chunks, heaviest first, each to the rank with the least work among the ranks that may still get one."""
    owner, left = np.zeros(len(work), np.int64), [-(-len(work) // ranks)] * ranks
    loads = [(0.0, rank) for rank in range(ranks)]  # a heap of the ranks that may get chunks
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank = loads[0]
        owner[chunk] = rank
        left[rank] -= 1
        if left[rank]:
            heapq.heapreplace(loads, (load + float(work[chunk]), rank))
        else:
            heapq.heappop(loads)
    return owner


def candidates(visits: Sequence[Visits], layers: Sequence[int], ranks: int) -> list[Owners]:
    """Returns regular assignments: contiguous, zigzag, zigzag in more and more stretches, and chunks levelled by their work.

    Finer assignments balance better, and make ranks fetch more. visits: of masks of one length and block size. layers: how many
    layers have each mask; the work of all layers counts.
    """
    chunks = visits[0].chunks
    owners = {"contiguous": fold_chunks(chunks, ranks, 0)}
    folds = 1
    while 2 * ranks * folds <= chunks:
        owners["zigzag" if folds == 1 else f"zigzag in {folds} stretches"] = fold_chunks(chunks, ranks, folds)
        folds *= 2
    owners["levelled"] = balance_chunks(_summed_work(visits, layers), ranks)
    most_chunks = -(-chunks // ranks)
    return [
        Owners.from_chunks(name, owner, visits[0].chunk_blocks, visits[0].mask.grid.q_blocks, ranks)
        for name, owner in owners.items()
        if np.bincount(owner, minlength=ranks).max() <= most_chunks
    ]


def _summed_work(visits: Sequence[Visits], layers: Sequence[int]) -> np.ndarray:
    return np.sum([one.work * count for one, count in zip(visits, layers, strict=True)], axis=0)


def improve_owners(start: Owners, visits: Sequence[Visits], layers: Sequence[int], fetching: float) -> Owners:
    """Improves an assignment by exchanges of chunks between the costliest rank and one of the cheapest.

    In each step the costliest rank tries the cheapest ranks in order. It exchanges with the first rank for which some pair of
    chunks lowers the greater of the two costs. The search ends if there is no such rank, or if the greatest cost hardly falls.
    A rank's cost is its visited blocks, plus ``fetching`` for each block that it gets, over all layers. The search is bounded in
    steps, not in time, so that all ranks find the same assignment. visits, layers: as for ``candidates``.
    """
    search, greatest = _Search(start, visits, layers, fetching), [np.inf]
    while len(greatest) <= _MOST_EXCHANGES and search.step():
        greatest.append(search.cost.max())
        if len(greatest) > _LOOK_BACK and greatest[-1] > _LEAST_PROGRESS * greatest[-_LOOK_BACK]:
            break
    blocks = visits[0].mask.grid.q_blocks
    return Owners.from_chunks(f"{start.name}, then exchanged", search.owner, start.chunk_blocks, blocks, start.ranks)


class _Search:
    """Holds the state of ``improve_owners``. Columns of all masks are numbered together, mask after mask."""

    def __init__(self, start: Owners, visits: Sequence[Visits], layers: Sequence[int], fetching: float):
        self.owner, self.work = start.owner.copy(), _summed_work(visits, layers)
        blocks = visits[0].mask.grid.q_blocks
        chunk = np.arange(blocks) // start.chunk_blocks
        columns = len(visits) * blocks
        self.weight = np.repeat(fetching * np.asarray(layers, np.float64), blocks)
        touched = []
        for number, one in enumerate(visits):
            # A chunk touches its own blocks too, which need no fetching.
            rows = np.repeat(np.arange(one.chunks), np.diff(one.ptr))
            touched += [key + number * blocks for key in (rows * columns + one.cols, chunk * columns + np.arange(blocks))]
        keys = union(touched)
        self.ptr, self.cols = np.searchsorted(keys, np.arange(len(self.owner) + 1) * columns), keys % columns
        self.owned = np.bincount(chunk) * fetching * sum(layers)
        self.chunks_of = [np.flatnonzero(self.owner == rank) for rank in range(start.ranks)]
        self.touched_by = [self._touched(chunks) for chunks in self.chunks_of]
        # (ranks, columns): how many chunks of a rank touch a column.
        self.holders = np.stack([np.bincount(cols, minlength=len(self.weight)) for cols, _ in self.touched_by])
        self.cost = np.array([self._cost_of(rank) for rank in range(start.ranks)])

    def _touched(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the columns that the chunks touch, chunk after chunk; the index of each chunk's first column among them)."""
        counts = np.diff(self.ptr)[chunks]
        return self.cols[concat_ranges(self.ptr[chunks], counts)], np.cumsum(counts) - counts

    def _cost_of(self, rank: int) -> float:
        chunks = self.chunks_of[rank]
        return float(self.work[chunks].sum() + self.weight[self.holders[rank] > 0].sum() - self.owned[chunks].sum())

    def _fetch_costs(self, owner: int, rank: int, holders: int) -> np.ndarray:
        """Returns for each chunk of ``owner`` the fetching cost of its columns that ``holders`` chunks of ``rank`` touch."""
        cols, first = self.touched_by[owner]
        return np.add.reduceat(np.where(self.holders[rank] == holders, self.weight, 0)[cols], first)

    def step(self) -> bool:
        """Makes the next exchange. Returns whether there was one."""
        costliest = int(self.cost.argmax())
        given = self.chunks_of[costliest]
        saved = self.work[given] + self._fetch_costs(costliest, costliest, 1)
        for cheapest in np.argsort(self.cost, kind="stable")[:_PARTNERS].tolist():
            taken = self.chunks_of[cheapest]
            if cheapest == costliest or not len(taken):
                continue
            # The costs of both ranks after an exchange of each given chunk (rows) for each taken one (columns). A block that both
            # chunks touch may count as fetched, so the costs are upper bounds.
            costly = self.cost[costliest] - saved[:, None] + self.work[taken] + self._fetch_costs(cheapest, costliest, 0)
            added = self.work[given] + self._fetch_costs(costliest, cheapest, 0)
            cheap = self.cost[cheapest] + added[:, None] - self.work[taken] - self._fetch_costs(cheapest, cheapest, 1)
            greater = np.maximum(costly, cheap, out=costly)
            best = int(greater.argmin())
            if greater.flat[best] < self.cost[costliest] * _LEAST_GAIN:
                self._exchange(costliest, given[best // len(taken)], cheapest, taken[best % len(taken)])
                return True
        return False

    def _exchange(self, rank: int, chunk: int, other_rank: int, other_chunk: int) -> None:
        """Exchanges two chunks between their owners."""
        self.owner[chunk], self.owner[other_chunk] = other_rank, rank
        for owner, leaving, coming in ((rank, chunk, other_chunk), (other_rank, other_chunk, chunk)):
            self.holders[owner, self.cols[self.ptr[leaving] : self.ptr[leaving + 1]]] -= 1
            self.holders[owner, self.cols[self.ptr[coming] : self.ptr[coming + 1]]] += 1
            self.chunks_of[owner] = np.flatnonzero(self.owner == owner)
            self.touched_by[owner] = self._touched(self.chunks_of[owner])
            self.cost[owner] = self._cost_of(owner)
