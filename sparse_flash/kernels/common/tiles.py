"""What the forward and backward kernels share: loading tiles, reading the lookup table, and masks.

Kernels walk *steps*. A table entry is a block of TABLE_BLOCK x TABLE_BLOCK pairs; a step is the part of it that one
iteration computes. The kind of a walk is fixed at compile time: the loop over full blocks holds no mask code at all.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .compat import is_rows

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every score and finite, so that a row that has kept nothing yet needs no guard: exp2(-inf - FLOOR) is 0, not NaN.
FLOOR = tl.constexpr(-3.0e38)

# Kinds of walks, in the order of a table's row. A dense walk has no tiles: its ragged end is a walk of kind RUNS.
FULL = tl.constexpr(0)
RUNS = tl.constexpr(1)
BITS = tl.constexpr(2)
# Entries of any of those kinds, some of whose tokens do not exist and may hold anything. One walk for all of them, as a copy
# of the body costs the others registers.
CUT = tl.constexpr(3)


class Rows(NamedTuple):
    """A (batch, heads, tokens, head_dim) tensor on a chip that cannot address tiles by itself. Triton would turn a descriptor
    into loads of single numbers there, as it does not know that rows are unbroken and begin on 16 bytes.

    Strides are in pieces of 16 bytes. pieces: those of a row, or None where a tile is as wide as the tensor.
    """

    base: Any
    batch_stride: Any
    head_stride: Any
    token_stride: Any
    tokens: Any
    pieces: Any


@triton.jit
def _pointers(rows, batch, head, first_row, TILE: tl.constexpr, DIM: tl.constexpr):
    """Of a (TILE, DIM) tile, and which of them lie in the tensor."""
    PIECE: tl.constexpr = 128 // rows.base.dtype.element_ty.primitive_bitwidth
    row, column = tl.arange(0, TILE), tl.arange(0, DIM)
    first = tl.cast(first_row, tl.int64) * rows.token_stride
    first += tl.cast(batch, tl.int64) * rows.batch_stride + tl.cast(head, tl.int64) * rows.head_stride
    begin = rows.base + first * PIECE + (row.to(tl.int64) * rows.token_stride * PIECE)[:, None]
    exists = (first_row + row < rows.tokens)[:, None]
    if rows.pieces is not None:
        exists = exists & (column < rows.pieces * PIECE)[None, :]
    return begin + column[None, :], exists


@triton.jit
def load_tile(tensor, batch, head, first_row, TILE: tl.constexpr, DIM: tl.constexpr):
    """Rows first_row .. first_row + TILE - 1 of one head as a (TILE, DIM) tile; 0 outside the tensor.

    tensor: descriptor of a (batch, heads, tokens, head_dim) tensor, whose addresses and bounds the hardware works out; or
    ``Rows``.
    """
    if is_rows(tensor):
        pointers, exists = _pointers(tensor, batch, head, first_row, TILE, DIM)
        tile = tl.load(pointers, mask=exists, other=0.0)
    else:
        tile = tensor.load([batch, head, first_row, 0]).reshape(TILE, DIM)
    return tile


@triton.jit
def store_tile(tensor, tile, batch, head, first_row, TILE: tl.constexpr, DIM: tl.constexpr):
    """The reverse of ``load_tile``; what lies outside the tensor is not stored."""
    if is_rows(tensor):
        pointers, exists = _pointers(tensor, batch, head, first_row, TILE, DIM)
        tl.store(pointers, tile.to(tensor.base.dtype.element_ty), mask=exists)
    else:
        tensor.store([batch, head, first_row, 0], tile.to(tensor.dtype).reshape(1, 1, TILE, DIM))


@triton.jit
def ordered_tile(row_order, mask, rows, slot, TILE: tl.constexpr, TABLE_BLOCK: tl.constexpr):
    """The table row that a program's slot stands for, heaviest first, and the first token of its tile within it."""
    TILES: tl.constexpr = TABLE_BLOCK // TILE
    row = tl.load(row_order + mask * rows + slot // TILES)
    return row, row * TABLE_BLOCK + slot % TILES * TILE


@triton.jit
def row_bounds(row_ptr, row_split, mask, row, rows):
    """Where the full, run and bit entries of a row begin, and where the last end."""
    line = mask * rows + row
    begin = tl.load(row_ptr + line + mask)
    runs = tl.load(row_split + line * 2)
    bits = tl.load(row_split + line * 2 + 1)
    end = tl.load(row_ptr + line + mask + 1)
    return begin, runs, bits, end


@triton.jit
def dense_bounds(length, TILE: tl.constexpr):
    """The same for a dense walk over ``length`` tokens, in steps: whole tiles, then the ragged end."""
    whole = length // TILE
    steps = (length + TILE - 1) // TILE
    return whole * 0, whole, steps, steps


@triton.jit
def step_position(index, step, end, STEPS: tl.constexpr, TILE: tl.constexpr, TABLE_BLOCK: tl.constexpr, SPARSE: tl.constexpr):
    """The first token of a step along the walked axis; any number past the end."""
    if SPARSE:
        block = tl.load(index + step // STEPS, mask=step < end, other=0)
        position = block * TABLE_BLOCK + (step % STEPS) * TILE
    else:
        position = step * TILE
    return position


@triton.jit
def kept_pairs(
    table, entry, q_in_block, kv_in_block, q_left, kv_left, TABLE_BLOCK: tl.constexpr, SPARSE: tl.constexpr, KIND: tl.constexpr
):
    """Which pairs of a step are kept, of the broadcast shape of q_in_block and kv_in_block.

    table: (index, tile_idx, tile_runs, tile_bits). q_in_block, kv_in_block: int32 positions within the block, one of shape
    (n, 1), the other (1, n). q_left, kv_left: tokens from the block's start to the end of the queries and keys.
    """
    if not SPARSE:
        kept = (q_in_block < q_left) & (kv_in_block < kv_left)
    else:
        tile = tl.load(table[1] + entry)
        if KIND == RUNS:
            run = tl.load(table[2] + tile * TABLE_BLOCK + q_in_block)
            kept = (kv_in_block >= (run & 0xFFFF)) & (kv_in_block < (run >> 16))
        else:
            WORDS: tl.constexpr = (TABLE_BLOCK + 31) // 32
            words = table[3] + tile.to(tl.int64) * (TABLE_BLOCK * WORDS) + q_in_block * WORDS + kv_in_block // 32
            kept = ((tl.load(words) >> (kv_in_block % 32)) & 1) != 0
    return kept


@triton.jit
def of_kept_pairs(values, otherwise, kind, table, entry, q_in_block, kv_in_block, TABLE_BLOCK: tl.constexpr, SPARSE: tl.constexpr):
    """values, and ``otherwise`` where a step of a cut entry, of any kind, does not keep a pair."""
    if SPARSE:
        if kind == RUNS:
            kept = kept_pairs(table, entry, q_in_block, kv_in_block, 0, 0, TABLE_BLOCK, SPARSE, RUNS)
            values = tl.where(kept, values, otherwise)
        elif kind == BITS:
            kept = kept_pairs(table, entry, q_in_block, kv_in_block, 0, 0, TABLE_BLOCK, SPARSE, BITS)
            values = tl.where(kept, values, otherwise)
    return values
