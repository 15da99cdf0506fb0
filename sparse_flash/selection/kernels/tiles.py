"""The parts that the kernels of picked blocks share: the sizes of a call, tiles of gathered rows, and the loop over what is kept
in addition to the picks.

A tile has ROWS rows: queries, each in as many rows as query heads share its picks, the head fastest. Neighbouring queries fill it;
or the queries of a list do, from anywhere.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...kernels.common.compat import Constants
from ...kernels.common.tiles import BlockPositions, TableEntries, TableTensors, where_kept
from ...kernels.launch.launch import table_arguments
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


INTEGERS = ["first_head", "first_query", "stride", "kv_heads", "q_len", "offset", "key_blocks"]


@cached_until_cleared
def constants_of(sizes: SelectionSizes, *widths: int, **more: int) -> Constants:
    """A kernel's argument C, of a ``PickedShape``. widths: DIM, DIM_V, TILE_N. more: its later fields."""
    return Constants(PickedShape(sizes.members, sizes.pickers, sizes.slots, sizes.tile_queries, sizes.block, *widths, **more))


def block_of(always) -> int:
    """The block size of what is always kept, 0 if there is none."""
    return always.block_size if always else 0


def always_arguments(always, by_key: bool, placeholder) -> TableTensors:
    """The table by query or by key of pairs that are kept whatever was picked. always: a BlockMask of one mask, or None: unused."""
    table = always and (always.by_key if by_key else always.by_query)
    return TableTensors(*table_arguments(always, table, placeholder)[:8])


class PickedCall(NamedTuple):
    """Describes a call and its round to a kernel; None for what the kernel does not use.

    q, dout: ``Rows``. k, v: descriptors or ``Rows``. dout, log2_sum, delta: see ``SelectionOperands``. picks: (batch, kv_heads *
    PICKERS, q_len, SLOTS) int32. always: ``always_arguments``. score_scale: scale * log2(e). first_head, first_query: the round's
    first. stride: see ``Round``. offset: position of the first query. C: ``PickedShape``, last: otherwise Triton 3.6 forgets the
    constants of records within the record, such as a stride of 1.
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
    first_query: Any
    stride: Any
    kv_heads: Any
    q_len: Any
    offset: Any
    key_blocks: Any
    C: Any


class VisitedBlocks(NamedTuple):
    """The blocks that tiles of queries visit.

    counts: (batch, pickers, tiles, 2) int32: how many blocks keep every pair, and how many there are.
    blocks: (batch, pickers, tiles, width) int32: blocks that keep every pair, ascending, then blocks that the causal limit cuts.
    bits: like blocks, int32, or int64 for more than 32 queries: bit i is set if query i of the tile picked the block.
    picks: (batch, pickers, q_len, slots) int8, 1 for picks that the tile visits; arbitrary for picks that keep nothing.
    """

    counts: Any
    blocks: Any
    bits: Any
    picks: Any = None


class RowsOfTile(NamedTuple):
    """Describes each row of a tile: ``place``, the index of its query within the round, its query, its head, its number among the
    rows of its query, and whether it exists. batch, kv_head: of the tile."""

    place: Any
    query: Any
    head: Any
    number: Any
    exists: Any
    batch: Any
    kv_head: Any


@triton.jit
def _decompose_rows(C):
    """(index of the query within the tile, member, whether it is used) of each row."""
    row = tl.arange(0, ROWS)
    return row // C.MEMBERS, row % C.MEMBERS, row < C.QUERIES * C.MEMBERS


@triton.jit
def rows_of_tile(tile, picker, call):
    """``RowsOfTile`` of neighbouring queries. tile: within the launch. picker: batch-head * PICKERS + number of the picking heads,
    within the launch."""
    number, member, used = _decompose_rows(call.C)
    place = tile * call.C.QUERIES + number
    query = call.first_query + place
    exists = used & (place < call.stride) & (query < call.q_len)
    batch_head = call.first_head + picker // call.C.PICKERS
    kv_head = batch_head % call.kv_heads
    head = (kv_head * call.C.PICKERS + picker % call.C.PICKERS) * call.C.MEMBERS + member
    place += picker * call.stride
    return RowsOfTile(place, query, head, member, exists, batch_head // call.kv_heads, kv_head)


@triton.jit
def queries_of_tile(tile, call):
    """The first and the last query of a tile."""
    first = call.first_query + tile * call.C.QUERIES
    return first, tl.minimum(first + call.C.QUERIES, call.q_len) - 1


@triton.jit
def table_of_tile(tile, picker, call):
    """Returns (the index of a tile's table in ``VisitedBlocks``, the index of each row's query in the tile)."""
    tiles = (call.q_len + call.C.QUERIES - 1) // call.C.QUERIES
    row = (call.first_head * call.C.PICKERS + picker).to(tl.int64)
    number, _, _ = _decompose_rows(call.C)
    return row * tiles + call.first_query // call.C.QUERIES + tile, number


@triton.jit
def rows_of_list(entries, begin, end, step, batch_head, call):
    """(``RowsOfTile`` of a step over the queries begin .. end - 1 of a list, the entry of each row: place * SLOTS + slot).

    entries: int32. batch_head: of the list."""
    number, member, used = _decompose_rows(call.C)
    index = begin + step * call.C.QUERIES + number
    exists = used & (index < end)
    entry = tl.load(entries + index, mask=exists, other=0)
    place = entry // call.C.SLOTS
    query = call.first_query + place % call.stride
    kv_head = batch_head % call.kv_heads
    picker = place // call.stride % call.C.PICKERS
    head = (kv_head * call.C.PICKERS + picker) * call.C.MEMBERS + member
    return RowsOfTile(place, query, head, member, exists & (query < call.q_len), batch_head // call.kv_heads, kv_head), entry


@triton.jit
def steps_of_list(begin, end, call):
    return (end - begin + call.C.QUERIES - 1) // call.C.QUERIES


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
def picks_of_rows(rows, call):
    """The row of each row's query in ``picks``, (batch, kv_heads * PICKERS, q_len, SLOTS)."""
    picker = rows.batch * call.kv_heads * call.C.PICKERS + rows.head // call.C.MEMBERS
    return picker.to(tl.int64) * call.q_len + rows.query


@triton.jit
def is_picked(picks, exists, block, call):
    """Whether a block is among the picks of each row. picks: from ``picks_of_rows``."""
    slot = tl.arange(0, call.C.PADDED)
    some = exists[:, None] & (slot < call.C.SLOTS)[None, :]
    picked = tl.load(call.picks + picks[:, None] * call.C.SLOTS + slot[None, :], mask=some, other=-1)
    return tl.max((picked == block).to(tl.int32), 1) != 0


@triton.jit
def causal_mask(rows, position, call):
    """(rows, keys): which of TILE_N keys from ``position`` on do not follow their query."""
    return (position + tl.arange(0, call.C.TILE_N))[None, :] <= (rows.query + call.offset)[:, None]


@triton.jit
def where_always_kept(values, otherwise, call, row, entry, query, key):
    """values, or ``otherwise`` where the entry of a row does not keep a pair. query, key: within the entry's block, (n, 1) and
    (1, n) or the reverse."""
    split = call.always.split + row * 2
    kind = (entry >= tl.load(split)).to(tl.int32) + (entry >= tl.load(split + 1)).to(tl.int32)
    pairs = BlockPositions(query, key)
    return where_kept(values, otherwise, kind, TableEntries(*call.always[4:], call.C.ALWAYS, True), entry, pairs)


@triton.jit
def find_unpicked_pairs(row, step, rows, picks, call):
    """(the first key of a step through a row of what is always kept, which of its (rows, keys) are kept and in no picked block).
    picks: from ``picks_of_rows``."""
    SIZE: tl.constexpr = call.C.ALWAYS
    STEPS: tl.constexpr = SIZE // call.C.TILE_N
    start = step % STEPS * call.C.TILE_N
    position = tl.load(call.always.index + step // STEPS) * SIZE + start
    own = rows.exists & (rows.query // SIZE == row)
    query = tl.where(own, rows.query - row * SIZE, 0)
    unpicked = own & ~is_picked(picks, rows.exists, position // call.C.BLOCK, call)
    kept = (causal_mask(rows, position, call) & unpicked[:, None]).to(tl.int32)
    key = start + tl.arange(0, call.C.TILE_N)
    return position, where_always_kept(kept, 0, call, row, step // STEPS, query[:, None], key[None, :]) != 0


@triton.jit
def steps_of_always(row, call):
    """The first and the end of the steps through a row of what is always kept."""
    STEPS: tl.constexpr = call.C.ALWAYS // call.C.TILE_N
    return tl.load(call.always.ptr + row) * STEPS, tl.load(call.always.ptr + row + 1) * STEPS


@triton.jit
def locate_piece(piece, call):
    """(batch-head, batch, key head, the first key's position) of a piece of a key block's list."""
    column = tl.load(piece)
    batch_head = call.first_head + column // call.key_blocks
    return batch_head, batch_head // call.kv_heads, batch_head % call.kv_heads, column % call.key_blocks * call.C.BLOCK
