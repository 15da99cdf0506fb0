"""The parts that the kernels of picked blocks share: the sizes of a call, tiles of gathered rows, and the loop over what is kept
beside the picks.

A tile has ROWS rows: queries, each in as many rows as query heads share its choice, the head fastest. Neighbouring queries fill it;
or the queries of a list do, from anywhere.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...kernels.common.compat import Constants
from ...kernels.common.tiles import BlockPositions, TableEntries, where_kept
from ...kernels.launch.memory import cached_until_cleared
from .division import TILE_ROWS, PickedShape, SelectionSizes

ROWS = tl.constexpr(TILE_ROWS)


class SelectionOperands(NamedTuple):
    """Tensors of a call, (batch, heads, tokens, head_dim) with rows as ``as_addressable`` makes them; of the backward pass also
    what ``preprocess_backward`` writes. For masses, v is k, dout None, log2_sum the masses and delta their gradient."""

    q: Any
    k: Any
    v: Any
    dout: Any = None
    log2_sum: Any = None
    delta: Any = None


INTEGERS = ["first_head", "first_choice", "stride", "kv_heads", "q_len", "offset", "choices", "key_blocks"]


@cached_until_cleared
def constants_of(sizes: SelectionSizes, *widths: int, **more: int) -> Constants:
    """A kernel's argument C, of a ``PickedShape``. widths: DIM, DIM_V, TILE_N. more: its later fields."""
    return Constants(
        PickedShape(sizes.every, sizes.members, sizes.pickers, sizes.slots, *sizes.tiled, sizes.block, *widths, **more)
    )


class AlwaysKept(NamedTuple):
    """The table, by query or by key, of pairs that are kept whatever was picked, as kernels take it."""

    row_ptr: Any
    row_split: Any
    index: Any
    tile_idx: Any
    tile_runs: Any
    tile_bits: Any


def block_of(always) -> int:
    """The block size of what is always kept, 0 if there is none."""
    return always.block_size if always else 0


def always_arguments(always, by_key: bool, placeholder) -> AlwaysKept:
    """always: a BlockMask of one mask, or None: then the kernel does not use the result."""
    if always is None:
        return AlwaysKept(*(placeholder,) * 6)
    table = always.by_key if by_key else always.by_query
    return AlwaysKept(table.row_ptr, table.row_split, table.col_idx, table.tile_idx, *always.tiles)


class PickedCall(NamedTuple):
    """Describes a call and its round to a kernel; None for what the kernel does not use.

    q, dout: ``Rows``. k, v: descriptors or ``Rows``. dout, log2_sum, delta: see ``SelectionOperands``. picks: (batch, kv_heads *
    PICKERS, choices, SLOTS) int32. always: ``AlwaysKept``. score_scale: scale * log2(e). first_head, first_choice: the round's
    first. stride: see ``Round``. offset: position of the first query. choices: of a batch-head, in the whole call. C:
    ``PickedShape``, last: otherwise Triton 3.6 forgets the constants of records within the record, such as a stride of 1.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    log2_sum: Any
    delta: Any
    picks: Any
    always: Any
    scale: Any
    score_scale: Any
    first_head: Any
    first_choice: Any
    stride: Any
    kv_heads: Any
    q_len: Any
    offset: Any
    choices: Any
    key_blocks: Any
    C: Any


class VisitedBlocks(NamedTuple):
    """The blocks that tiles of queries visit: for each cluster of choices whose queries fill a tile.

    counts: (batch, pickers, clusters, 2) int32: how many blocks keep every pair, and how many there are.
    blocks: (batch, pickers, clusters, width) int32: blocks that keep every pair, ascending, then blocks that the causal limit cuts.
    bits: like blocks, int32, or int64 for more than 32 choices: bit c is set if choice c of the cluster picked the block.
    picks: (batch, pickers, choices, slots) int8, 1 for picks that the tile visits; arbitrary for picks that keep nothing.
    """

    counts: Any
    blocks: Any
    bits: Any
    picks: Any = None


class RowsOfTile(NamedTuple):
    """Describes each row of a tile: its choice, numbered within the launch, its query, its head, its number among the rows of its
    choice, and whether it exists. batch, kv_head: of the tile."""

    choice: Any
    query: Any
    head: Any
    number: Any
    exists: Any
    batch: Any
    kv_head: Any


@triton.jit
def _decompose_rows(C):
    """(number of the choice within the tile, query within its share of the tile, member, whether it is used) of each row."""
    row = tl.arange(0, ROWS)
    OF_CHOICE: tl.constexpr = C.TOKENS * C.MEMBERS
    return row // OF_CHOICE, row % OF_CHOICE // C.MEMBERS, row % C.MEMBERS, row < C.CHOICES * OF_CHOICE


@triton.jit
def rows_of_tile(tile, picker, call):
    """``RowsOfTile`` of neighbouring queries. tile: within the launch. picker: batch-head * PICKERS + number of the choosing heads,
    within the launch."""
    number, token, member, used = _decompose_rows(call.C)
    choice = tile // call.C.TILES * call.C.CHOICES + number
    token += tile % call.C.TILES * call.C.TOKENS
    query = (call.first_choice + choice) * call.C.EVERY + token
    exists = used & (token < call.C.EVERY) & (choice < call.stride) & (query < call.q_len)
    batch_head = call.first_head + picker // call.C.PICKERS
    kv_head = batch_head % call.kv_heads
    head = (kv_head * call.C.PICKERS + picker % call.C.PICKERS) * call.C.MEMBERS + member
    choice += picker * call.stride
    return RowsOfTile(choice, query, head, token * call.C.MEMBERS + member, exists, batch_head // call.kv_heads, kv_head)


@triton.jit
def queries_of_tile(tile, call):
    """The first and the last query of a tile; the latter may belong to the next choice, and to no row."""
    QUERIES: tl.constexpr = call.C.TOKENS * call.C.CHOICES
    first = (call.first_choice + tile // call.C.TILES * call.C.CHOICES) * call.C.EVERY + tile % call.C.TILES * call.C.TOKENS
    return first, tl.minimum(first + QUERIES, call.q_len) - 1


@triton.jit
def table_of_tile(tile, picker, call):
    """Returns (the index of a tile's table in ``VisitedBlocks``, the number of each row's choice in the tile)."""
    clusters = (call.choices + call.C.CHOICES - 1) // call.C.CHOICES
    row = (call.first_head * call.C.PICKERS + picker).to(tl.int64)
    number, _, _, _ = _decompose_rows(call.C)
    return row * clusters + call.first_choice // call.C.CHOICES + tile // call.C.TILES, number


@triton.jit
def rows_of_list(entries, begin, end, step, batch_head, call):
    """(``RowsOfTile`` of a step over the queries begin .. end - 1 of a list, the entry of each row: choice * SLOTS + slot).

    entries: int32, with choices numbered within the launch. batch_head: of the list."""
    number, token, member, used = _decompose_rows(call.C)
    place = begin + step // call.C.TILES * call.C.CHOICES + number
    entry = tl.load(entries + place, mask=used & (place < end), other=0)
    choice = entry // call.C.SLOTS
    token += step % call.C.TILES * call.C.TOKENS
    query = (call.first_choice + choice % call.stride) * call.C.EVERY + token
    exists = used & (place < end) & (token < call.C.EVERY) & (query < call.q_len)
    kv_head = batch_head % call.kv_heads
    picker = choice // call.stride % call.C.PICKERS
    head = (kv_head * call.C.PICKERS + picker) * call.C.MEMBERS + member
    rows = RowsOfTile(choice, query, head, token * call.C.MEMBERS + member, exists, batch_head // call.kv_heads, kv_head)
    return rows, entry


@triton.jit
def steps_of_list(begin, end, call):
    return (end - begin + call.C.CHOICES - 1) // call.C.CHOICES * call.C.TILES


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
def index_of_rows(rows, call):
    """The index of each row in a (batch, heads, q_len) tensor."""
    heads = call.kv_heads * call.C.PICKERS * call.C.MEMBERS
    return (rows.batch * heads + rows.head).to(tl.int64) * call.q_len + rows.query


@triton.jit
def choices_of_rows(rows, call):
    """The choice of each row, numbered within the call: its row in ``picks``, (batch, kv_heads * PICKERS, choices, SLOTS)."""
    picker = rows.batch * call.kv_heads * call.C.PICKERS + rows.head // call.C.MEMBERS
    return picker.to(tl.int64) * call.choices + rows.query // call.C.EVERY


@triton.jit
def is_picked(choice, exists, block, call):
    """Whether a block is among the picks of each choice."""
    slot = tl.arange(0, call.C.PADDED)
    some = exists[:, None] & (slot < call.C.SLOTS)[None, :]
    picked = tl.load(call.picks + choice[:, None] * call.C.SLOTS + slot[None, :], mask=some, other=-1)
    return tl.max((picked == block).to(tl.int32), 1) != 0


@triton.jit
def causal_mask(rows, position, call):
    """(rows, keys): which of TILE_N keys from ``position`` on do not follow their query."""
    return (position + tl.arange(0, call.C.TILE_N))[None, :] <= (rows.query + call.offset)[:, None]


@triton.jit
def where_always_kept(values, otherwise, call, row, entry, query, key):
    """values, or ``otherwise`` where the entry of a row does not keep a pair. query, key: within the entry's block, (n, 1) and
    (1, n) or the reverse."""
    split = call.always.row_split + row * 2
    kind = (entry >= tl.load(split)).to(tl.int32) + (entry >= tl.load(split + 1)).to(tl.int32)
    pairs = BlockPositions(query, key)
    return where_kept(values, otherwise, kind, TableEntries(*call.always[2:], call.C.ALWAYS, True), entry, pairs)


@triton.jit
def find_unpicked_pairs(row, step, rows, choice, call):
    """(the first key of a step through a row of what is always kept, which of its (rows, keys) are kept and in no picked block).
    choice: from ``choices_of_rows``."""
    SIZE: tl.constexpr = call.C.ALWAYS
    STEPS: tl.constexpr = SIZE // call.C.TILE_N
    start = step % STEPS * call.C.TILE_N
    position = tl.load(call.always.index + step // STEPS) * SIZE + start
    own = rows.exists & (rows.query // SIZE == row)
    query = tl.where(own, rows.query - row * SIZE, 0)
    unpicked = own & ~is_picked(choice, rows.exists, position // call.C.BLOCK, call)
    kept = (causal_mask(rows, position, call) & unpicked[:, None]).to(tl.int32)
    key = start + tl.arange(0, call.C.TILE_N)
    return position, where_always_kept(kept, 0, call, row, step // STEPS, query[:, None], key[None, :]) != 0


@triton.jit
def steps_of_always(row, call):
    """The first and the end of the steps through a row of what is always kept."""
    STEPS: tl.constexpr = call.C.ALWAYS // call.C.TILE_N
    return tl.load(call.always.row_ptr + row) * STEPS, tl.load(call.always.row_ptr + row + 1) * STEPS


@triton.jit
def locate_piece(piece, call):
    """(batch-head, batch, key head, the first key's position) of a piece of a key block's list."""
    column = tl.load(piece)
    batch_head = call.first_head + column // call.key_blocks
    return batch_head, batch_head // call.kv_heads, batch_head % call.kv_heads, column % call.key_blocks * call.C.BLOCK
