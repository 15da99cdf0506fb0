"""How a call over picked blocks is divided: queries into tiles, key heads and ranges of queries into rounds, lists into pieces."""

from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.common.config import SECOND_AXIS

# wgmma begins at 64 rows. Tiles of 128 rows were slower everywhere: docs/performance/selection.md, "Tile sizes".
TILE_ROWS = 64
WORKSPACE = 1 << 30  # bytes that the partial results of a round may take
_TIMES_SUMS = 4  # in long sequences, they may take so many times the bytes of the sums of dK and dV of a batch-head
_FORWARD_ROWS = 1024  # of a piece of a list: enough to hide the load of the key block
# A piece of the backward pass has this many times the mean list of a key block, so few blocks are divided.
_BACKWARD_MEANS = 2


class Round(NamedTuple):
    """A part of a call, which one launch of each kernel computes: ``heads`` batch-heads (batch * kv_heads + key head) from ``head``
    on, and of each ``queries`` queries from ``query`` on. stride: queries from one batch-head to the next, as a round numbers
    them; the same in all rounds of a call."""

    number: int
    head: int
    heads: int
    query: int
    queries: int
    stride: int


@dataclass(frozen=True)
class PickedShape:
    """The constants of a kernel over picked blocks, by which rows of a tile are decomposed without divisions at run time."""

    MEMBERS: int  # query heads that share picks
    PICKERS: int  # heads that pick, of a key head
    SLOTS: int  # picks of a query
    QUERIES: int  # of a tile, with all their members
    BLOCK: int  # keys of a picked block
    DIM: int  # padded head_dim of q and k, as tiles have powers of two
    DIM_V: int
    TILE_N: int  # keys of a step
    ALWAYS: int = 0  # the block size of what is always kept, 0 if there is none
    WIDTH: int = 0  # of a row of ``VisitedBlocks``
    PARTS: int = 0  # partial results of a pick
    MASSES: bool = False  # whether masses of picked blocks are computed

    @property
    def PADDED(self) -> int:
        """SLOTS as a power of two."""
        return padded_count(self.SLOTS)


class SelectionSizes(NamedTuple):
    """Sizes of a call. slots: picks of a query. pickers: heads that pick, of a key head. block: keys. Lengths are tokens."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    slots: int
    pickers: int
    block: int

    @property
    def members(self) -> int:
        """Query heads that share picks."""
        return self.heads // (self.kv_heads * self.pickers)

    @property
    def batch_heads(self) -> int:
        return self.batch * self.kv_heads

    @property
    def key_blocks(self) -> int:
        return -(-self.kv_len // self.block)

    @property
    def tile_queries(self) -> int:
        """How many queries, with all their members, fit a tile."""
        return TILE_ROWS // self.members

    def integers(self, round: Round) -> tuple[int, ...]:
        """The kernels' arguments INTEGERS."""
        of_round = round.head, round.query, round.stride
        return *of_round, self.kv_heads, self.q_len, self.kv_len - self.q_len, self.key_blocks

    def tiles_of(self, round: Round) -> tuple[int, int]:
        """The grid of kernels whose programs each compute a tile of queries."""
        return -(-round.queries // self.tile_queries), round.heads * self.pickers

    def smallest_block(self, always) -> int:
        """The most keys of a step that is within one block of both tables."""
        return self.block if always is None else min(self.block, always.block_size)


def padded_count(count: int) -> int:
    """The power of two, at least 2, that Triton needs for an axis of ``count``."""
    return max(2, 1 << (count - 1).bit_length())


def plan_rounds(sizes: SelectionSizes, bytes_of_entry: int, bytes_of_head: int) -> list[Round]:
    """Returns as few rounds as fit, at least a tile each, and as grids allow, whose second axis has the batch-heads and pickers.
    bytes_of_entry: of the partial results of a pick. bytes_of_head: of what does not depend on the queries of a round."""
    of_query = sizes.pickers * sizes.slots * bytes_of_entry
    heads, queries = WORKSPACE // max(1, of_query * sizes.q_len + bytes_of_head), sizes.q_len
    if heads == 0 and of_query > 0:
        # Each round also adds to sums of all earlier keys, so there must not be more rounds in longer sequences.
        unit = sizes.tile_queries
        fitting = max(unit, max(WORKSPACE - bytes_of_head, _TIMES_SUMS * bytes_of_head) // of_query)
        ranges = -(-queries // fitting)
        queries = -(-queries // (ranges * unit)) * unit
    # Rounds with equal numbers of batch-heads.
    heads = -(-sizes.batch_heads // -(-sizes.batch_heads // min(sizes.batch_heads, SECOND_AXIS // sizes.pickers, max(1, heads))))
    firsts = [(head, query) for head in range(0, sizes.batch_heads, heads) for query in range(0, sizes.q_len, queries)]
    return [
        Round(number, head, min(heads, sizes.batch_heads - head), query, min(queries, sizes.q_len - query), queries)
        for number, (head, query) in enumerate(firsts)
    ]


def count_entries(sizes: SelectionSizes, rounds: list[Round]) -> int:
    """The most picks of a round. The first is the largest."""
    return rounds[0].heads * sizes.pickers * rounds[0].stride * sizes.slots


def forward_piece_size(sizes: SelectionSizes) -> int:
    """Entries of a piece in the forward pass."""
    return max(1, _FORWARD_ROWS // sizes.members // sizes.tile_queries) * sizes.tile_queries


def backward_piece_size(sizes: SelectionSizes, rounds: list[Round]) -> int:
    """Entries of a piece in the backward pass."""
    mean, unit = sizes.pickers * rounds[0].stride * sizes.slots // sizes.key_blocks, sizes.tile_queries
    return max(1, _BACKWARD_MEANS * mean // unit) * unit + unit
