"""What the kernels of key blocks chosen by query share: tiles of gathered rows, and the walk over what is kept beside the picks.

A tile has ROWS rows: queries, each in as many rows as query heads share its choice, the head fastest. Neighbouring queries fill it;
or the queries of a list do, from anywhere.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.tiles import InBlock, of_kept_pairs

# wgmma begins at 64 rows. 128 were slower everywhere (H200, bf16, head_dim 128, 65,536 tokens: 263 TFLOP/s, 334 with 64).
ROWS = tl.constexpr(64)


class Tiling(NamedTuple):
    """How queries fill a tile. choices: in a tile. tokens: queries of each choice in a tile. tiles: that a choice takes. Either
    choices or tiles is 1."""

    choices: int
    tokens: int
    tiles: int


def tiling(every: int, members: int) -> Tiling:
    """every: queries that share a choice. members: query heads that do, up to ROWS."""
    tokens = ROWS.value // members
    return Tiling(tokens // every, every, 1) if every <= tokens else Tiling(1, tokens, -(-every // tokens))


class Turn(NamedTuple):
    """A part of a call, which one launch of each kernel computes: ``lines`` lines (batch * kv_heads + key head) from ``line`` on,
    ``choices`` choices of each from ``choice`` on. stride: choices from one line to the next, as a turn numbers them; that of all
    turns of a call."""

    number: int
    line: int
    lines: int
    choice: int
    choices: int
    stride: int


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
    def lines(self) -> int:
        return self.batch * self.kv_heads

    @property
    def choices(self) -> int:
        """Of a line and picker."""
        return -(-self.q_len // self.every)

    @property
    def key_blocks(self) -> int:
        return -(-self.kv_len // self.block)

    @property
    def tiled(self) -> Tiling:
        return tiling(self.every, self.members)

    @property
    def rows_of_choice(self) -> int:
        return self.every * self.members

    def integers(self, turn: Turn) -> tuple[int, ...]:
        """The kernels' arguments INTEGERS."""
        turned = turn.line, turn.choice, turn.stride
        return *turned, self.kv_heads, self.q_len, self.kv_len - self.q_len, self.choices, self.key_blocks

    def tiles_of(self, turn: Turn) -> tuple[int, int]:
        """The grid of kernels whose programs each compute a tile of queries."""
        return -(-turn.choices // self.tiled.choices) * self.tiled.tiles, turn.lines * self.pickers

    def smallest_block(self, always) -> int:
        """The most keys of a step that is within one block of both tables."""
        return self.block if always is None else min(self.block, always.block_size)

    @property
    def constants(self) -> dict[str, int]:
        """Of ``Shared``."""
        return dict(zip(Shared._fields, (self.every, self.members, self.pickers, self.slots, *self.tiled), strict=True))


class SelectionOperands(NamedTuple):
    """Tensors of a call, (batch, heads, tokens, head_dim) with rows as ``addressable`` makes them; of the backward pass also what
    ``rows_of_softmax`` writes. For masses, v is k, dout None, log2_sum the masses and delta their gradient."""

    q: Any
    k: Any
    v: Any
    dout: Any = None
    log2_sum: Any = None
    delta: Any = None


INTEGERS = ["line", "choice", "stride", "kv_heads", "q_len", "offset", "choices", "key_blocks"]


def padded(count: int) -> int:
    """The power of two, at least 2, that Triton needs for an axis of ``count``."""
    return max(2, triton.next_power_of_2(count))


def always_arguments(always, by_key: bool, placeholder) -> tuple:
    """The arguments of ``always_table``. always: a BlockMask of one mask, or None: then the kernel does not use them."""
    if always is None:
        return (placeholder,) * 6
    table = always.by_key if by_key else always.by_query
    return table.row_ptr, table.row_split, table.col_idx, table.tile_idx, *always.tiles


class Shared(NamedTuple):
    """Who shares a choice, and how its rows fill tiles. EVERY: queries. MEMBERS: query heads. PICKERS: choices of a key head, by
    query. SLOTS: picks of a choice. CHOICES, TOKENS, TILES: see ``Tiling``."""

    EVERY: Any
    MEMBERS: Any
    PICKERS: Any
    SLOTS: Any
    CHOICES: Any
    TOKENS: Any
    TILES: Any


class Span(NamedTuple):
    """What a kernel knows of its ``Turn``."""

    line: Any
    choice: Any
    stride: Any


class Lengths(NamedTuple):
    """offset: position of the first query. choices: of a line, in the whole call. key_blocks: of BLOCK keys."""

    kv_heads: Any
    q_len: Any
    offset: Any
    choices: Any
    key_blocks: Any


class Walks(NamedTuple):
    """See ``selection_walks_kernel``. WIDTH: of blocks and bits."""

    counts: Any
    blocks: Any
    bits: Any
    WIDTH: Any


class RowsOfTile(NamedTuple):
    """Of each row of a tile: its choice, numbered within the launch, its query, its head, its number among the rows of its choice,
    and whether it exists. batch, kv_head: of the tile."""

    choice: Any
    query: Any
    head: Any
    number: Any
    exists: Any
    batch: Any
    kv_head: Any


class Always(NamedTuple):
    """The pairs that are kept whatever was picked, by query or by key. table: a ``WalkedTable``; BLOCK is 0 if there are none."""

    row_ptr: Any
    row_split: Any
    table: Any


@triton.jit
def _filled(shared):
    """(number of the choice within the tile, query within its share of the tile, member, whether it is used) of each row."""
    row = tl.arange(0, ROWS)
    OF_CHOICE: tl.constexpr = shared.TOKENS * shared.MEMBERS
    return row // OF_CHOICE, row % OF_CHOICE // shared.MEMBERS, row % shared.MEMBERS, row < shared.CHOICES * OF_CHOICE


@triton.jit
def rows_of_tile(tile, picker, span, lengths, shared):
    """``RowsOfTile`` of neighbouring queries. tile: within the launch. picker: line * PICKERS + number of the choosing heads,
    within the launch."""
    number, token, member, used = _filled(shared)
    choice = tile // shared.TILES * shared.CHOICES + number
    token += tile % shared.TILES * shared.TOKENS
    query = (span.choice + choice) * shared.EVERY + token
    exists = used & (token < shared.EVERY) & (choice < span.stride) & (query < lengths.q_len)
    line = span.line + picker // shared.PICKERS
    kv_head = line % lengths.kv_heads
    head = (kv_head * shared.PICKERS + picker % shared.PICKERS) * shared.MEMBERS + member
    choice += picker * span.stride
    return RowsOfTile(choice, query, head, token * shared.MEMBERS + member, exists, line // lengths.kv_heads, kv_head)


@triton.jit
def queries_of_tile(tile, span, lengths, shared):
    """The first and the last query of a tile; the latter may belong to the next choice, and to no row."""
    QUERIES: tl.constexpr = shared.TOKENS * shared.CHOICES
    first = (span.choice + tile // shared.TILES * shared.CHOICES) * shared.EVERY + tile % shared.TILES * shared.TOKENS
    return first, tl.minimum(first + QUERIES, lengths.q_len) - 1


@triton.jit
def table_of_tile(tile, picker, span, lengths, shared):
    """(where a tile's table is among those of ``selection_walks_kernel``, the number of each row's choice in it)."""
    clusters = (lengths.choices + shared.CHOICES - 1) // shared.CHOICES
    line = (span.line * shared.PICKERS + picker).to(tl.int64)
    number, _, _, _ = _filled(shared)
    return line * clusters + span.choice // shared.CHOICES + tile // shared.TILES, number


@triton.jit
def rows_of_list(entries, begin, end, step, line, span, lengths, shared):
    """(``RowsOfTile`` of a step over the queries begin .. end - 1 of a list, the entry of each row: choice * SLOTS + slot).

    entries: int32, with choices numbered within the launch. line: of the list."""
    number, token, member, used = _filled(shared)
    place = begin + step // shared.TILES * shared.CHOICES + number
    entry = tl.load(entries + place, mask=used & (place < end), other=0)
    choice = entry // shared.SLOTS
    token += step % shared.TILES * shared.TOKENS
    query = (span.choice + choice % span.stride) * shared.EVERY + token
    exists = used & (place < end) & (token < shared.EVERY) & (query < lengths.q_len)
    kv_head = line % lengths.kv_heads
    picker = choice // span.stride % shared.PICKERS
    head = (kv_head * shared.PICKERS + picker) * shared.MEMBERS + member
    rows = RowsOfTile(choice, query, head, token * shared.MEMBERS + member, exists, line // lengths.kv_heads, kv_head)
    return rows, entry


@triton.jit
def steps_of_list(begin, end, shared):
    return (end - begin + shared.CHOICES - 1) // shared.CHOICES * shared.TILES


@triton.jit
def _row_pointers(tensor, rows, DIM: tl.constexpr):
    """Pointers to the rows of a tile, and which elements exist. tensor: ``Rows`` of a (batch, heads, q_len, head_dim) tensor."""
    PIECE: tl.constexpr = 128 // tensor.base.dtype.element_ty.primitive_bitwidth
    first = rows.query.to(tl.int64) * tensor.token_stride + rows.head.to(tl.int64) * tensor.head_stride
    first += rows.batch.to(tl.int64) * tensor.batch_stride
    column = tl.arange(0, DIM)
    exists = rows.exists[:, None]
    if tensor.pieces is not None:
        exists = exists & (column < tensor.pieces * PIECE)[None, :]
    return tensor.base + (first * PIECE)[:, None] + column[None, :], exists


@triton.jit
def load_rows(tensor, rows, DIM: tl.constexpr):
    """(ROWS, DIM); 0 where there is no row."""
    pointers, exists = _row_pointers(tensor, rows, DIM)
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def store_rows(tensor, tile, rows, DIM: tl.constexpr):
    pointers, exists = _row_pointers(tensor, rows, DIM)
    tl.store(pointers, tile.to(tensor.base.dtype.element_ty), mask=exists)


@triton.jit
def lines_of_rows(rows, lengths, shared):
    """Where a row's number is in a (batch, heads, q_len) tensor."""
    heads = lengths.kv_heads * shared.PICKERS * shared.MEMBERS
    return (rows.batch * heads + rows.head).to(tl.int64) * lengths.q_len + rows.query


@triton.jit
def choices_of_rows(rows, lengths, shared):
    """The choice of each row among those of the call: its line in ``picks``, (batch, kv_heads * PICKERS, choices, SLOTS)."""
    picker = rows.batch * lengths.kv_heads * shared.PICKERS + rows.head // shared.MEMBERS
    return picker.to(tl.int64) * lengths.choices + rows.query // shared.EVERY


@triton.jit
def is_picked(picks, choice, exists, block, SLOTS: tl.constexpr, PADDED: tl.constexpr):
    """Whether a block is among the picks of each choice. PADDED: SLOTS, or the next power of two."""
    slot = tl.arange(0, PADDED)
    picked = tl.load(picks + choice[:, None] * SLOTS + slot[None, :], mask=exists[:, None] & (slot < SLOTS)[None, :], other=-1)
    return tl.max((picked == block).to(tl.int32), 1) != 0


@triton.jit
def until_query(rows, position, lengths, TILE_N: tl.constexpr):
    """(rows, keys): which of TILE_N keys from ``position`` on do not follow their query."""
    return (position + tl.arange(0, TILE_N))[None, :] <= (rows.query + lengths.offset)[:, None]


@triton.jit
def of_always(values, otherwise, always, row, entry, query, key):
    """values, or ``otherwise`` where the entry of a row does not keep a pair. query, key: within the entry's block, (n, 1) and
    (1, n) or the reverse."""
    runs, bits = tl.load(always.row_split + row * 2), tl.load(always.row_split + row * 2 + 1)
    kind = (entry >= runs).to(tl.int32) + (entry >= bits).to(tl.int32)
    return of_kept_pairs(values, otherwise, kind, always.table, entry, InBlock(query, key))


@triton.jit
def kept_besides(
    always, row, step, rows, choice, picks, lengths, shared, TILE_N: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """(the first key of a step through a row of ``always``, which of its (rows, keys) are kept and in no picked block).
    choice: from ``choices_of_rows``."""
    SIZE: tl.constexpr = always.table.BLOCK
    STEPS: tl.constexpr = SIZE // TILE_N
    start = step % STEPS * TILE_N
    position = tl.load(always.table.index + step // STEPS) * SIZE + start
    own = rows.exists & (rows.query // SIZE == row)
    query = tl.where(own, rows.query - row * SIZE, 0)
    unpicked = own & ~is_picked(picks, choice, rows.exists, position // BLOCK, shared.SLOTS, PADDED)
    kept = (until_query(rows, position, lengths, TILE_N) & unpicked[:, None]).to(tl.int32)
    key = start + tl.arange(0, TILE_N)
    return position, of_always(kept, 0, always, row, step // STEPS, query[:, None], key[None, :]) != 0


@triton.jit
def steps_of_always(always, row, TILE_N: tl.constexpr):
    """The first and the end of the steps through a row of ``always``."""
    STEPS: tl.constexpr = always.table.BLOCK // TILE_N
    return tl.load(always.row_ptr + row) * STEPS, tl.load(always.row_ptr + row + 1) * STEPS
