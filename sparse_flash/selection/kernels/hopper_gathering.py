"""Gathers rows of queries, for the kernels of key blocks chosen by query: reads the lists by key block, and copies the listed rows
into shared memory.

TMA cannot gather rows on Hopper. Copying warps do it, asynchronously and 16 bytes a thread, so many copies are in flight while
other warps compute. A list is divided into pieces, its items, which are sorted by weight. Each program takes one item of each round
of items, which is an even share. All rounds after an empty item are empty.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...kernels.common.gluon import copy_elements, record
from .tiles import INTEGERS

ROWS = gl.constexpr(64)  # of a tile: queries, each in as many rows as query heads share its picks
GATHERING_WARPS = gl.constexpr(4)

# Arguments for ``Lists`` and ``RowTensor``. New lengths, heads or picks never recompile.
NOT_SPECIALIZED = ["item", "item_count", *INTEGERS]
NOT_SPECIALIZED += [f"{of}_{number}_stride" for of in ("q", "dout") for number in ("batch", "head", "token")]
NOT_SPECIALIZED += ["q_pieces", "dout_pieces"]


@record
class Item:
    """Describes a piece of a list and one part of its block's keys. The entries are begin .. end - 1; entries from ``whole`` on
    keep every key of the block. Items past the last are empty. number: identifies the piece and the part."""

    column: gl.tensor
    begin: gl.tensor
    whole: gl.tensor
    end: gl.tensor
    number: gl.tensor
    part: gl.tensor


@record
class Block:
    """Describes the keys of an item. head_of_round: the batch-head, batch * kv_heads + key head, counted from the first of this
    round of launches. position: of the first key. part: the part of the block that these keys are."""

    head_of_round: gl.tensor
    batch: gl.tensor
    kv_head: gl.tensor
    position: gl.tensor
    part: gl.tensor


@record
class GatheredRows:
    """Holds for each row of a tile: its query, its head, whether it exists, and ``place``, its index among the rows of all entries
    and parts of this round of launches."""

    query: gl.tensor
    head: gl.tensor
    exists: gl.tensor
    place: gl.tensor


@record
class Lists:
    """Holds the lists by key block and the meaning of their entries: see ``lists.ColumnLists`` and ``tiles.PickedCall``. items: the
    first item of this round of launches. count: items of a round."""

    entries: gl.tensor
    items: gl.tensor
    count: gl.tensor
    first_head: gl.tensor
    first_query: gl.tensor
    stride: gl.tensor
    kv_heads: gl.tensor
    q_len: gl.tensor
    key_blocks: gl.tensor
    KEYS: gl.constexpr  # of an item
    PARTS: gl.constexpr  # of a block, each an item of its own
    C: gl.constexpr  # ``PickedShape``

    @gluon.jit
    def item(self, number):
        """Returns a program's item after ``number`` others. The first items of a round of items are the heaviest, so programs take
        every second round in reverse order."""
        place = gl.where(number % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))
        number = place + number * gl.num_programs(0)
        exists = number < self.count * self.PARTS
        place = self.items + number // self.PARTS * 5
        part = number % self.PARTS
        return Item(
            column=gl.load(place, mask=exists, other=0),
            begin=gl.load(place + 1, mask=exists, other=0),
            whole=gl.load(place + 2, mask=exists, other=0),
            end=gl.load(place + 3, mask=exists, other=0),
            number=gl.load(place + 4, mask=exists, other=0) * self.PARTS + part,
            part=part,
        )

    @gluon.jit
    def locate_block(self, item):
        head_of_round = item.column // self.key_blocks
        batch_head = self.first_head + head_of_round
        position = ((item.column - head_of_round * self.key_blocks) * self.PARTS + item.part) * self.KEYS
        return Block(head_of_round, batch_head // self.kv_heads, batch_head % self.kv_heads, position, item.part)

    @gluon.jit
    def steps(self, begin, end):
        """Returns the number of tiles of entries begin .. end - 1."""
        return (end - begin + (self.C.QUERIES - 1)) // self.C.QUERIES

    @gluon.jit
    def load_entries(self, begin, end, step, layout: gl.constexpr):
        """Returns (the entry of each row of a tile, query * slots + slot; whether it exists)."""
        row = gl.arange(0, ROWS, layout=layout)
        place = begin + step * self.C.QUERIES + row // self.C.MEMBERS
        exists = (row < self.C.QUERIES * self.C.MEMBERS) & (place < end)
        return gl.load(self.entries + place, mask=exists, other=0), exists

    @gluon.jit
    def rows_of(self, entry, exists, block, layout: gl.constexpr):
        """Returns ``GatheredRows``. entry, exists: from ``load_entries``."""
        member = gl.arange(0, ROWS, layout=layout) % self.C.MEMBERS
        query = entry // self.C.SLOTS - block.head_of_round * (self.C.PICKERS * self.stride)
        picker = member * 0
        if self.C.PICKERS > 1:
            picker = query // self.stride
            query -= picker * self.stride
        query += self.first_query
        head = (block.kv_head * self.C.PICKERS + picker) * self.C.MEMBERS + member
        place = entry.to(gl.int64) * self.PARTS + block.part
        return GatheredRows(query, head, exists & (query < self.q_len), place * self.C.MEMBERS + member)

    @gluon.jit
    def index_of(self, rows, block):
        """Returns the index of each row in a (batch, heads, q_len) tensor."""
        heads = self.kv_heads * (self.C.PICKERS * self.C.MEMBERS)
        return (block.batch * heads + rows.head).to(gl.int64) * self.q_len + rows.query


@record
class RowTensor:
    """Describes a (batch, heads, tokens, head_dim) tensor of 16-bit elements whose rows are gathered. Strides are in units of 16
    bytes. pieces: units of a row."""

    base: gl.tensor
    batch_stride: gl.tensor
    head_stride: gl.tensor
    token_stride: gl.tensor
    pieces: gl.tensor

    @gluon.jit
    def copy(self, tile, known, batch, TOGETHER: gl.constexpr):
        """Starts the copy of a tile's rows into shared memory. Rows that do not exist become zeros. known: ``RowOrigins``.
        TOGETHER: rows whose addresses are computed at once."""
        DIM: gl.constexpr = tile.shape[1]
        layout: gl.constexpr = copying_layout(DIM, gl.num_warps())
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
        for first in gl.static_range(0, ROWS, TOGETHER):
            query = known.queries.slice(first, TOGETHER).load(gl.SliceLayout(1, layout))
            head = known.heads.slice(first, TOGETHER).load(gl.SliceLayout(1, layout))
            piece = query.to(gl.int64) * self.token_stride + head.to(gl.int64) * self.head_stride
            piece += batch.to(gl.int64) * self.batch_stride
            pointers = self.base + (piece * 8)[:, None] + column[None, :]
            mask = (query >= 0)[:, None] & (column < self.pieces * 8)[None, :]
            copy_elements(tile.slice(first, TOGETHER), pointers, mask=mask)


@record
class RowOrigins:
    """Holds each row's query and head, (ROWS,) int32 in shared memory; query -1 if the row does not exist. One thread finds them,
    and the threads that copy the row read them."""

    queries: gl.shared_memory_descriptor
    heads: gl.shared_memory_descriptor

    @gluon.jit
    def publish(self, rows):
        self.queries.store(gl.where(rows.exists, rows.query, -1))
        self.heads.store(rows.head)


@gluon.jit
def allocate_shared_rows():
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.int32, [ROWS], layout)
    return RowOrigins(queries, gl.allocate_shared_memory(gl.int32, [ROWS], layout))


@gluon.jit
def load_keys(p, n, block, position, KEYS: gl.constexpr):
    """Waits until stage n is released, then starts the copy of KEYS keys of a block's head, from ``position`` on, and of their
    values. p: a record with k_tensor, v_tensor, the rings k and v, and DIM."""
    BYTES: gl.constexpr = KEYS * p.DIM * 2
    place = [block.batch, block.kv_head, position, 0]
    p.k.acquire(n)
    p.k.expect(n, BYTES)
    p.k.load(n, p.k_tensor, place)
    p.v.expect(n, BYTES)
    p.v.load(n, p.v_tensor, place)


@triton.constexpr_function
def copying_layout(dim, warps):
    """Returns the layout of the threads that copy a tile: neighbours copy adjacent 16 bytes of a row."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [warps, 1], [1, 0])


@triton.constexpr_function
def storing_layout(columns, warps):
    """Returns the layout of a (ROWS, columns) product after the four threads that share a row exchange columns, so that each thread
    holds whole units of 16 bytes. With eight warps, four of them hold each half of the columns."""
    across = warps // 4
    units = [[0, 32 << bit] for bit in range((columns // across // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *units],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], *([[0, columns // 2]] if across > 1 else [])],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def store_by_rows(base, values, places, exists):
    """Stores values, (rows, columns) in ``storing_layout``; row i starts at base + places[i]. Values are read once and late. The
    cache modifier keeps them from displacing gathered queries in the L2 cache."""
    column = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, values.type.layout))
    pointers = (base + places)[:, None] + column[None, :]
    gl.store(pointers, values, mask=exists[:, None] & (column >= 0)[None, :], cache_modifier=".cs")


def keys_at_a_time(block: int) -> int:
    """Returns how many keys of a block are in shared memory together. block: its keys, 64 or a multiple of 128."""
    return min(block, 128)


def list_arguments(lists, round) -> tuple:
    """Returns a kernel's arguments entries, items, item and item_count. lists: ``lists.ColumnLists``."""
    count = lists.items.shape[1]
    return lists.entries, lists.items, round.number * count, count


def row_arguments(tensor) -> tuple[int, ...]:
    """Returns the strides and pieces of a ``RowTensor``."""
    *strides, _ = (stride // 8 for stride in tensor.stride())
    return *strides, tensor.shape[3] // 8
