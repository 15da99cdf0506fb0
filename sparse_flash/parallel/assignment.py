"""Assigns the tokens of a sequence to ranks, by numbers on the host: every rank finds the same, without messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..masks.block_mask import BlockMask

# Chunks are the unit that is assigned. Chunks of 512 tokens gave documents of random lengths no better plans.
CHUNK_TOKENS = 1024
# Bounds on the chunks of a rank take precedence: zigzag needs a few to fold evenly, and planning must end in milliseconds.
_LEAST_CHUNKS, _MOST_CHUNKS = 4, 64
CONTIGUOUS = "contiguous"  # the name of the owners that have one piece of the sequence each
_FEW_RANKS = 16  # may share the memory of one host
_MOST_ENTRIES = 1 << 22  # entries of a table that are read at a time


@dataclass(frozen=True, eq=False)
class Visits:
    """Counts the blocks that chunks of ``chunk_blocks`` block rows visit under a mask.

    mask: on the CPU. needed: (chunks, kv_blocks) bool, whether a row of the chunk visits the block column, in at least one head.
    pairs: (row chunk, column chunk, visited blocks) of each pair of chunks with any. Blocks are float64, the sum over the heads of
    ``mask.mask_index``. They are integers, so sums have the same bits on every rank.
    """

    mask: BlockMask
    chunk_blocks: int
    needed: np.ndarray
    chunks: int
    pairs: tuple[np.ndarray, np.ndarray, np.ndarray]

    @classmethod
    def from_mask(cls, mask: BlockMask, chunk_blocks: int) -> "Visits":
        blocks, all_cols = mask.grid.q_blocks, mask.by_query.col_idx.numpy()
        chunk_of_block = np.arange(blocks) // chunk_blocks
        chunks = int(chunk_of_block[-1]) + 1
        needed, visited = np.zeros(chunks * blocks, bool), np.zeros(chunks**2)
        heads_of_mask = np.bincount(mask.mask_index.flatten().numpy(), minlength=mask.masks).tolist()
        for heads, ptr in zip(heads_of_mask, mask.by_query.row_ptr.numpy(), strict=True):
            first = 0
            while first < blocks:
                # Takes rows of _MOST_ENTRIES entries in all, and one row at least.
                stop = max(first + 1, int(np.searchsorted(ptr, ptr[first] + _MOST_ENTRIES, side="right")) - 1)
                row_chunk = np.repeat(chunk_of_block[first:stop], np.diff(ptr[first : stop + 1]))
                cols = all_cols[ptr[first] : ptr[stop]]
                needed[row_chunk * blocks + cols] = True
                visited += heads * np.bincount(row_chunk * chunks + chunk_of_block[cols], minlength=len(visited))
                first = stop
        found = np.flatnonzero(visited)
        return cls(mask, chunk_blocks, needed.reshape(chunks, blocks), chunks, (*np.divmod(found, chunks), visited[found]))

    @property
    def heads(self) -> int:
        return self.mask.mask_index.numel()

    @cached_property
    def work(self) -> np.ndarray:
        """Returns (chunks,) float64: how many blocks the rows of a chunk visit, the sum over heads."""
        row, _, blocks = self.pairs
        return np.bincount(row, blocks, self.chunks)


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
    def from_chunks(cls, name: str, owner: np.ndarray, chunk_blocks: int, blocks: int, ranks: int) -> "Owners":
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
        """Returns (ranks, tokens of a rank) int64: each token's position, -1 for padding. One rank has no padding."""
        positions = self.blocks[:, :, None] * block_size + np.arange(block_size)
        positions[(self.blocks < 0)[:, :, None] | (positions >= q_len)] = -1
        positions = positions.reshape(self.ranks, -1)
        return positions[:, :q_len] if self.ranks == 1 else positions

    def with_visits(self, visits: Visits) -> "Assignment":
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
        """Returns (ranks,) float64: how many blocks the rows of each rank visit."""
        return np.bincount(self.owner, self.visits.work, self.ranks)

    @cached_property
    def _visited_of_others(self) -> np.ndarray:
        """Returns (chunks,) float64: how many blocks of other ranks the rows of each chunk visit."""
        row, col, blocks = self.visits.pairs
        return np.bincount(row, blocks * (self.owner[row] != self.owner[col]), self.visits.chunks)

    @cached_property
    def visited_of_others(self) -> np.ndarray:
        """Returns (ranks,) float64: how many blocks of other ranks the rows of each rank visit."""
        return np.bincount(self.owner, self._visited_of_others, self.ranks)

    @cached_property
    def visiting_rows(self) -> np.ndarray:
        """Returns (ranks,) int64: block rows of each rank in chunks that visit blocks of others, so at least the visiting rows."""
        rows = np.diff(np.append(np.arange(self.visits.chunks) * self.chunk_blocks, len(self.owner_of_block)))
        return np.bincount(self.owner, rows * (self._visited_of_others > 0), self.ranks).astype(np.int64)

    @cached_property
    def needs(self) -> np.ndarray:
        """Returns (ranks, kv_blocks) bool: whether a rank visits a block column."""
        return np.stack([self.visits.needed[self.owner == rank].any(0) for rank in range(self.ranks)])

    def outgoing(self, source: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (blocks of a rank that others visit; (ranks, blocks) bool, the ranks that get each block). If ranks are few,
        blocks that go to the same ranks follow each other, so the blocks for one rank form few runs."""
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
    """Returns (chunks,) int64, the rank of each chunk. 0 folds give each rank one piece of the sequence. n folds give each rank two
    pieces in each of n stretches, one as far from the stretch's start as the other from its end. 1 fold is zigzag."""
    if not folds:
        return np.arange(chunks) // -(-chunks // ranks)
    pieces = 2 * ranks * folds
    piece = np.arange(chunks) * pieces // chunks % (2 * ranks)
    return np.minimum(piece, 2 * ranks - 1 - piece)


def candidates(visits: Sequence[Visits], layers: Sequence[int], ranks: int) -> list[Owners]:
    """Returns regular assignments: contiguous, zigzag, zigzag in more and more stretches, and chunks levelled by their work in all
    layers. Finer assignments balance better, and make ranks fetch more. layers: how many layers have each mask."""
    chunks = visits[0].chunks
    owners = {CONTIGUOUS: fold_chunks(chunks, ranks, 0)}
    folds = 1
    while 2 * ranks * folds <= chunks:
        owners["zigzag" if folds == 1 else f"zigzag in {folds} stretches"] = fold_chunks(chunks, ranks, folds)
        folds *= 2
    work = np.sum([one.work / one.heads * count for one, count in zip(visits, layers, strict=True)], axis=0)
    # The chunks by descending work go to ranks 0, 1, ..., 1, 0, 0, 1, ...
    number, levelled = np.arange(chunks) % (2 * ranks), np.empty(chunks, np.int64)
    levelled[np.argsort(-work, kind="stable")] = np.minimum(number, 2 * ranks - 1 - number)
    owners["levelled"] = levelled
    most_chunks = -(-chunks // ranks)
    return [
        Owners.from_chunks(name, owner, visits[0].chunk_blocks, visits[0].mask.grid.q_blocks, ranks)
        for name, owner in owners.items()
        if np.bincount(owner, minlength=ranks).max() <= most_chunks
    ]
