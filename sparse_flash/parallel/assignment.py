"""Which rank owns which tokens. Numbers on the host only: every rank comes to the same result, with no message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..masks.block_mask import BlockMask
from .costs import SequenceSizes

# Tokens of a chunk, the unit that is assigned, where this leaves each rank enough chunks for zigzag to fold evenly.
CHUNK_TOKENS = 512
_CHUNKS_OF_A_RANK = 4
# Rows that visit a larger share of all columns are shared, so that their queries travel and not the keys, if they are few: their
# queries and results are then at most half of the bytes of all keys and values.
_HEAVY, _FEW = 0.5, 0.25
# Of ``exchanged``: a million tokens over 8 ranks take a second. Gains below a thousandth end it.
_MOST_EXCHANGES, _PARTNERS, _LEAST_GAIN = 100, 3, 0.999


@dataclass(frozen=True, eq=False)
class Visits:
    """What chunks of ``per`` blocks visit under a mask.

    blocks: (chunks, chunks) float64, how many blocks of column chunk j the rows of chunk i visit, the mean over heads.
    needs: (chunks, kv_blocks) bool, the block columns that some row of the chunk visits, in some head.
    """

    per: int
    blocks: np.ndarray
    needs: np.ndarray

    @classmethod
    def of(cls, mask: BlockMask, per: int, without: np.ndarray | None = None) -> Visits:
        """without: (q_blocks,) bool, block rows that do not count."""
        rows = mask.grid.q_blocks
        chunks = -(-rows // per)
        ptr, cols = mask.by_query.row_ptr.numpy(), mask.by_query.col_idx.numpy()
        share = _share_of_heads(mask)
        bounds = ptr[:, np.minimum(np.arange(chunks + 1) * per, rows)]
        blocks, needs = np.zeros((chunks, chunks)), np.zeros((chunks, rows), bool)
        for number in range(mask.masks):
            counted = None if without is None else np.repeat(~without, np.diff(ptr[number]))
            for chunk in range(chunks):
                begin, end = bounds[number, chunk], bounds[number, chunk + 1]
                visited = cols[begin:end]
                if counted is not None:
                    visited = visited[counted[begin - ptr[number, 0] : end - ptr[number, 0]]]
                blocks[chunk] += share[number] * np.bincount(visited // per, minlength=chunks)
                needs[chunk, visited] = True
        return cls(per, blocks, needs)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which blocks each rank owns, and which it visits.

    name: how chunks were assigned. owner: (chunks,) int64, the rank of each. visits: what the chunks visit.
    blocks: (ranks, blocks of a rank) int64, the blocks of each rank, ascending, then -1 for padding: all ranks have equally many.
    """

    name: str
    owner: np.ndarray
    visits: Visits
    blocks: np.ndarray

    @classmethod
    def of(cls, name: str, owner: np.ndarray, visits: Visits, ranks: int) -> Assignment:
        rows = visits.needs.shape[1]
        chunk_of_block = np.arange(rows) // visits.per
        blocks = np.full((ranks, -(-len(owner) // ranks) * visits.per), -1)
        for rank in range(ranks):
            own = np.flatnonzero(owner[chunk_of_block] == rank)
            blocks[rank, : len(own)] = own
        # Padding that every rank has is of no use.
        return cls(name, owner, visits, blocks[:, : (blocks >= 0).sum(1).max()])

    @property
    def ranks(self) -> int:
        return len(self.blocks)

    @cached_property
    def work(self) -> np.ndarray:
        """(ranks, ranks) float64: how many blocks of rank j's tokens the rows of rank i visit, the mean over heads."""
        mine = (self.owner == np.arange(self.ranks)[:, None]).astype(np.float64)
        return mine @ self.visits.blocks @ mine.T

    @cached_property
    def needs(self) -> np.ndarray:
        """(ranks, kv_blocks) bool: the block columns that each rank visits."""
        return np.stack([self.visits.needs[self.owner == rank].any(0) for rank in range(self.ranks)])

    def of_blocks(self, values: np.ndarray) -> np.ndarray:
        """(ranks,): the sum over each rank's blocks of values, (blocks,)."""
        return np.array([values[blocks[blocks >= 0]].sum() for blocks in self.blocks])

    def sent(self, source: int, target: int) -> np.ndarray:
        """The blocks that one rank sends another, ascending: those that it owns and the other visits."""
        own = self.blocks[source][self.blocks[source] >= 0]
        return own[self.needs[target, own]] if source != target else own[:0]

    def columns(self, rank: int) -> np.ndarray:
        """The block columns of a rank's table: its own blocks, padding included, then those that it gets, rank after rank."""
        return np.concatenate([self.blocks[rank], *(self.sent(source, rank) for source in range(self.ranks))])

    def places(self, q_len: int, block_size: int) -> np.ndarray:
        """(ranks, tokens of a rank) int64: the place of each token in the whole sequence, -1 for padding. One rank has none."""
        places = self.blocks[:, :, None] * block_size + np.arange(block_size)
        places[(self.blocks < 0)[:, :, None] | (places >= q_len)] = -1
        places = places.reshape(self.ranks, -1)
        return places[:, :q_len] if self.ranks == 1 else places

    @cached_property
    def received(self) -> np.ndarray:
        """(ranks,) int64: how many blocks each rank gets from others."""
        return np.array([sum(len(self.sent(source, target)) for source in range(self.ranks)) for target in range(self.ranks)])


def _share_of_heads(mask: BlockMask) -> np.ndarray:
    """(masks,) float64: which share of heads, over the batch, uses each stored mask."""
    return np.bincount(mask.mask_index.flatten().numpy(), minlength=mask.masks) / mask.mask_index.numel()


def shared_rows(mask: BlockMask, sizes: SequenceSizes) -> np.ndarray:
    """(q_blocks,) bool: the block rows that visit most block columns, in the mean over heads, if they are few; else none."""
    visited = _share_of_heads(mask) @ np.diff(mask.by_query.row_ptr.numpy())
    heavy = visited > _HEAVY * mask.grid.kv_blocks
    return heavy & (heavy.sum() * sizes.heads <= _FEW * len(heavy) * sizes.kv_heads)


def column_work(mask: BlockMask, rows: np.ndarray) -> np.ndarray:
    """(kv_blocks,) float64: how many of some block rows, (q_blocks,) bool, visit each block column, the mean over heads."""
    ptr, cols = mask.by_query.row_ptr.numpy(), mask.by_query.col_idx.numpy()
    work = np.zeros(mask.grid.kv_blocks)
    for number, share in enumerate(_share_of_heads(mask)):
        visited = cols[ptr[number, 0] : ptr[number, -1]][np.repeat(rows, np.diff(ptr[number]))]
        work += share * np.bincount(visited, minlength=len(work))
    return work


def chunk_blocks(blocks: int, block_size: int, ranks: int) -> int:
    """The blocks of a chunk: CHUNK_TOKENS, fewer for short sequences."""
    return max(1, min(CHUNK_TOKENS // block_size, blocks // (_CHUNKS_OF_A_RANK * ranks)))


def folded(chunks: int, ranks: int, folds: int) -> np.ndarray:
    """(chunks,) int64, the rank of each chunk. 0 folds: each rank owns one piece of the sequence. n folds: two pieces in each of n
    stretches, one as far from the stretch's start as the other from its end (1: zigzag)."""
    if not folds:
        return np.arange(chunks) // -(-chunks // ranks)
    pieces = 2 * ranks * folds
    piece = np.arange(chunks) * pieces // chunks % (2 * ranks)
    return np.minimum(piece, 2 * ranks - 1 - piece)


def levelled(work: np.ndarray, ranks: int) -> np.ndarray:
    """The heaviest chunk first, each to the rank with the least work among those that have room."""
    owner, load, room = np.zeros(len(work), np.int64), np.zeros(ranks), np.full(ranks, -(-len(work) // ranks))
    for chunk in np.argsort(-work, kind="stable"):
        rank = np.where(room > 0, load, np.inf).argmin()
        owner[chunk] = rank
        load[rank] += work[chunk]
        room[rank] -= 1
    return owner


def candidates(mask: BlockMask, ranks: int, per: int, without: np.ndarray | None = None) -> list[Assignment]:
    """Contiguous, zigzag, zigzag in ever more stretches, and chunks levelled by their work alone.

    Finer ones balance better and make ranks fetch more. without: (q_blocks,) bool, block rows that do not count.
    """
    visits = Visits.of(mask, per, without)
    chunks = len(visits.needs)
    owners = {"contiguous": folded(chunks, ranks, 0)}
    folds = 1
    while 2 * ranks * folds <= chunks:
        owners["zigzag" if folds == 1 else f"zigzag in {folds} stretches"] = folded(chunks, ranks, folds)
        folds *= 2
    owners["levelled"] = levelled(visits.blocks.sum(1), ranks)
    room = -(-chunks // ranks)
    return [
        Assignment.of(name, owner, visits, ranks)
        for name, owner in owners.items()
        if np.bincount(owner, minlength=ranks).max() <= room
    ]


def exchanged(start: Assignment, fetching: float) -> Assignment:
    """From there, the costliest rank exchanges a chunk with one of the cheapest, again and again: always the pair that lowers the
    greater of their two costs most, until none does.

    A rank's cost is its visited blocks, plus ``fetching`` for each block that it gets. Bounded in steps, not in time: all ranks
    must come to the same assignment.
    """
    visits, owner, ranks = start.visits, start.owner.copy(), start.ranks
    work, touched = visits.blocks.sum(1), visits.needs.copy()
    blocks = np.arange(touched.shape[1])
    touched[blocks // visits.per, blocks] = True  # a chunk's own blocks need no fetching
    owned, touched = np.bincount(blocks // visits.per, minlength=len(work)), touched.astype(np.float32)
    holders = np.stack([touched[owner == rank].sum(0) for rank in range(ranks)])  # chunks of a rank that touch a block

    def cost_of(rank: int | np.integer) -> float:
        return work[owner == rank].sum() + fetching * (np.count_nonzero(holders[rank]) - owned[owner == rank].sum())

    cost = np.array([cost_of(rank) for rank in range(ranks)])
    for _ in range(_MOST_EXCHANGES):
        high = cost.argmax()
        theirs = np.flatnonzero(owner == high)
        freed = touched[theirs] @ (holders[high] == 1).astype(np.float32)
        least, pair = cost[high] * _LEAST_GAIN, None
        for low in np.argsort(cost, kind="stable")[:_PARTNERS]:
            mine = np.flatnonzero(owner == low)
            if low == high or not len(mine):
                continue
            # Of an exchange of each of theirs, in rows, for each of mine, in columns. Blocks that both chunks touch may count as
            # fetched anew: an estimate from above.
            moved = work[theirs][:, None] - work[mine]
            to_low = touched[theirs] @ (holders[low] == 0).astype(np.float32)
            to_high = touched[mine] @ (holders[high] == 0).astype(np.float32)
            freed_low = touched[mine] @ (holders[low] == 1).astype(np.float32)
            of_high = cost[high] - moved + fetching * (to_high - freed[:, None])
            of_low = cost[low] + moved + fetching * (to_low[:, None] - freed_low)
            greater = np.maximum(of_high, of_low)
            if greater.min() < least:
                least, (i, j) = greater.min(), np.unravel_index(greater.argmin(), greater.shape)
                pair = theirs[i], mine[j], low
        if pair is None:
            break
        chunk, other, low = pair
        owner[chunk], owner[other] = low, high
        holders[low] += touched[chunk] - touched[other]
        holders[high] += touched[other] - touched[chunk]
        cost[[high, low]] = cost_of(high), cost_of(low)
    return Assignment.of(f"{start.name}, then exchanged", owner, visits, ranks)
