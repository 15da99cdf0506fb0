"""How a call over picked blocks is divided: queries into tiles, key heads and ranges of queries into rounds, lists into pieces."""

from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.common.config import SECOND_AXIS

# wgmma begins at 64 rows. Tiles of 128 rows were slower everywhere: docs/performance/selection.md, "Tile sizes".
TILE_ROWS = 64
# Below this block size, a partial result for each query and pick takes longer than visiting the union of a tile's picks.
_SMALL_BLOCK = 64
# A tile visits a block that this share of its choices picked. docs/performance/selection.md, "Tile sizes", has the figures of other
# shares.
_VISITED_SHARE = 3, 4
WORKSPACE = 512 << 20  # bytes that partial results may take; docs/performance/selection.md, "Tile sizes", has figures
_FORWARD_ROWS = 1024  # of a piece of a list: enough to hide the load of the key block
# A piece of the backward pass has this many times the mean list of a key block, so few blocks are divided.
_BACKWARD_MEANS = 2


class Tiling(NamedTuple):
    """How queries fill a tile. choices: in a tile. tokens: queries of each choice in a tile. tiles: that a choice takes. Either
    choices or tiles is 1."""

    choices: int
    tokens: int
    tiles: int


class Round(NamedTuple):
    """A part of a call, which one launch of each kernel computes: ``heads`` batch-heads (batch * kv_heads + key head) from ``head``
    on, and of each ``choices`` choices from ``choice`` on. stride: choices from one batch-head to the next, as a round numbers
    them; the same in all rounds of a call."""

    number: int
    head: int
    heads: int
    choice: int
    choices: int
    stride: int


@dataclass(frozen=True)
class PickedShape:
    """The constants of a kernel over picked blocks. Rows of a tile are decomposed by them, so none of that takes a division by a
    number that is known only at run time."""

    EVERY: int  # queries that share a choice
    MEMBERS: int  # query heads that share a choice
    PICKERS: int  # choices of a key head, by query
    SLOTS: int  # picks of a choice
    CHOICES: int  # this, TOKENS and TILES: see ``Tiling``
    TOKENS: int
    TILES: int
    BLOCK: int  # keys of a picked block
    DIM: int  # padded head_dim of q and k, as tiles have powers of two
    DIM_V: int
    TILE_N: int  # keys of a step
    ALWAYS: int = 0  # the block size of what is always kept, 0 if there is none
    WIDTH: int = 0  # of a row of ``VisitedBlocks``
    PARTS: int = 0  # partial results of a pick, 0 if tiles visit all their picks
    MASSES: bool = False  # whether masses of picked blocks are computed

    @property
    def PADDED(self) -> int:
        """SLOTS as a power of two."""
        return padded_count(self.SLOTS)

    @property
    def QUERIES(self) -> int:
        """How many queries, with all their members, fit a tile."""
        return TILE_ROWS // self.MEMBERS


class SelectionSizes(NamedTuple):
    """Sizes of a call. every: queries that share a choice. pickers: choices of a key head, by query. block: keys. Lengths are
    tokens."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    every: int
    slots: int
    pickers: int
    block: int

    @property
    def members(self) -> int:
        """Query heads that share a choice."""
        return self.heads // (self.kv_heads * self.pickers)

    @property
    def batch_heads(self) -> int:
        return self.batch * self.kv_heads

    @property
    def choices(self) -> int:
        """The number of choices of a batch-head and picker."""
        return -(-self.q_len // self.every)

    @property
    def key_blocks(self) -> int:
        return -(-self.kv_len // self.block)

    @property
    def tiled(self) -> Tiling:
        tokens = TILE_ROWS // self.members
        return Tiling(tokens // self.every, self.every, 1) if self.every <= tokens else Tiling(1, tokens, -(-self.every // tokens))

    @property
    def rows_of_choice(self) -> int:
        return self.every * self.members

    def integers(self, round: Round) -> tuple[int, ...]:
        """The kernels' arguments INTEGERS."""
        of_round = round.head, round.choice, round.stride
        return *of_round, self.kv_heads, self.q_len, self.kv_len - self.q_len, self.choices, self.key_blocks

    def tiles_of(self, round: Round) -> tuple[int, int]:
        """The grid of kernels whose programs each compute a tile of queries."""
        return -(-round.choices // self.tiled.choices) * self.tiled.tiles, round.heads * self.pickers

    def smallest_block(self, always) -> int:
        """The most keys of a step that is within one block of both tables."""
        return self.block if always is None else min(self.block, always.block_size)


def padded_count(count: int) -> int:
    """The power of two, at least 2, that Triton needs for an axis of ``count``."""
    return max(2, 1 << (count - 1).bit_length())


class Rounds(NamedTuple):
    """heads: batch-heads of a round (batch * kv_heads + key head). choices: of each. all: the rounds."""

    heads: int
    choices: int
    all: tuple[Round, ...]


def visits_all(sizes: SelectionSizes) -> bool:
    """Whether tiles visit all picks, and none is listed: their rows share a choice, or blocks are small."""
    return sizes.tiled.choices == 1 or sizes.block < _SMALL_BLOCK


def least_choices(sizes: SelectionSizes) -> int:
    """How many of a tile's choices must pick a block for the tile to visit it."""
    of, share = sizes.tiled.choices, _VISITED_SHARE
    return 1 if visits_all(sizes) else max(2, -(-of * share[0] // share[1]))


def plan_rounds(sizes: SelectionSizes, bytes_of_entry: int, bytes_of_head: int) -> Rounds:
    """Returns as few rounds as fit, and as grids allow, whose second axis has the batch-heads and pickers of a round.

    bytes_of_entry: of the partial results of a pick. bytes_of_head: of what does not depend on the choices of a round. At least one
    tile of one batch-head is computed at a time, whatever it takes.
    """
    of_choice = sizes.pickers * sizes.slots * bytes_of_entry
    heads, choices = WORKSPACE // max(1, of_choice * sizes.choices + bytes_of_head), sizes.choices
    if heads == 0 and of_choice > 0:
        # A whole batch-head's own bytes count as half at most: else long sequences would have nothing for partial results.
        unit = sizes.tiled.choices
        fitting = max(unit, (WORKSPACE - min(bytes_of_head, WORKSPACE // 2)) // of_choice)
        ranges = -(-choices // fitting)
        choices = -(-choices // (ranges * unit)) * unit
    # Rounds with equal numbers of batch-heads.
    heads = -(-sizes.batch_heads // -(-sizes.batch_heads // min(sizes.batch_heads, SECOND_AXIS // sizes.pickers, max(1, heads))))
    firsts = [(head, choice) for head in range(0, sizes.batch_heads, heads) for choice in range(0, sizes.choices, choices)]
    found = (
        Round(number, head, min(heads, sizes.batch_heads - head), choice, min(choices, sizes.choices - choice), choices)
        for number, (head, choice) in enumerate(firsts)
    )
    return Rounds(heads, choices, tuple(found))


def plan_forward(sizes: SelectionSizes, dim_v: int, itemsize: int) -> Rounds:
    """Returns the rounds of a forward pass. dim_v: padded."""
    of_entry = 0 if visits_all(sizes) else sizes.rows_of_choice * (dim_v * itemsize + 4)
    return plan_rounds(sizes, of_entry, 0)


def plan_backward(sizes: SelectionSizes, dim: int, dim_v: int, itemsize: int, keys: int, with_parts: bool) -> Rounds:
    """Returns the rounds of a backward pass. dim, dim_v: padded. keys: of a part of dQ. with_parts: whether dQ comes as parts."""
    of_entry = sizes.block // keys * sizes.rows_of_choice * dim * itemsize if with_parts else 0
    # At most half as many pieces again as there are key blocks: see ``backward_piece_size``.
    return plan_rounds(sizes, of_entry, sizes.key_blocks * sizes.block * (dim + dim_v) * 6)


def forward_piece_size(sizes: SelectionSizes) -> int:
    """Entries of a piece in the forward pass."""
    return max(1, _FORWARD_ROWS // sizes.rows_of_choice // sizes.tiled.choices) * sizes.tiled.choices


def backward_piece_size(sizes: SelectionSizes, rounds: Rounds) -> int:
    """Entries of a piece in the backward pass."""
    mean = sizes.pickers * rounds.choices * sizes.slots // sizes.key_blocks
    unit = sizes.tiled.choices
    return max(1, _BACKWARD_MEANS * mean // unit) * unit + unit
