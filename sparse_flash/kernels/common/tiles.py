"""Tile loads, reads of the lookup table, and masks, for the forward and backward kernels.

Kernels iterate over *steps*. A table entry is a block of TABLE_BLOCK x TABLE_BLOCK pairs; a step is the part of an entry that one
iteration computes. The kind of a loop's entries is fixed at compile time, so the loop over full blocks has no mask code.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .compat import is_rows

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every score and finite, so rows without kept keys need no guard: exp2(-inf - FLOOR) is 0, not NaN.
FLOOR = tl.constexpr(-3.0e38)

# Kinds of entries, in the order of a table's row. A dense loop has no tiles: it treats its ragged end as kind RUNS.
FULL = tl.constexpr(0)
RUNS = tl.constexpr(1)
BITS = tl.constexpr(2)
# Entries of any kind with nonexistent tokens, which may be NaN. One loop has all of them, as more copies of the body would cost the
# other loops registers.
CUT = tl.constexpr(3)


class TableEntries(NamedTuple):
    """The entries that a kernel iterates over, row after row. A dense loop (SPARSE False) has steps instead of entries.

    index: the block of each entry along the axis of the loop. tile_idx, tile_runs, tile_bits: its mask tile. BLOCK: tokens on a
    side of an entry.
    """

    index: Any
    tile_idx: Any
    tile_runs: Any
    tile_bits: Any
    BLOCK: Any
    SPARSE: Any


class TableTensors(NamedTuple):
    """The tensors of a table: see ``masks.table.Table``. mask_index: the mask of each head. order: rows by weight."""

    mask_index: Any
    ptr: Any
    split: Any
    order: Any
    index: Any
    tile_idx: Any
    tile_runs: Any
    tile_bits: Any


class TableRows(NamedTuple):
    """The rows of a table. count: rows of a mask. batch_stride, head_stride: of the mask index."""

    table: Any
    batch_stride: Any
    head_stride: Any
    count: Any


class BlockPositions(NamedTuple):
    """Pairs of a step as int32 positions within their block; of query and key, one is (n, 1) and the other (1, n). queries_left,
    keys_left: tokens from the block's start to the end of each axis, for dense loops."""

    query: Any
    key: Any
    queries_left: Any = None
    keys_left: Any = None


class Rows(NamedTuple):
    """A (batch, heads, tokens, head_dim) tensor on a chip that cannot address tiles in hardware. There Triton would lower a
    descriptor to loads of single elements, as it does not know that rows are contiguous and 16-byte aligned.

    Strides are in units of 16 bytes. pieces: 16-byte units per row, or None if a tile is as wide as the tensor.
    """

    base: Any
    batch_stride: Any
    head_stride: Any
    token_stride: Any
    tokens: Any
    pieces: Any


@triton.jit
def _pointers(rows, batch, head, first_row, TILE: tl.constexpr, DIM: tl.constexpr):
    """Pointers to a (TILE, DIM) tile, and which of them are in the tensor."""
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

    tensor: descriptor of a (batch, heads, tokens, head_dim) tensor, for which the hardware computes addresses and bounds; or
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
    """The reverse of ``load_tile``; elements outside the tensor are not stored."""
    if is_rows(tensor):
        pointers, exists = _pointers(tensor, batch, head, first_row, TILE, DIM)
        tl.store(pointers, tile.to(tensor.base.dtype.element_ty), mask=exists)
    else:
        tensor.store([batch, head, first_row, 0], tile.to(tensor.dtype).reshape(1, 1, TILE, DIM))


@triton.jit
def load_mask_number(rows, batch, head):
    """The number of a head's mask among a table's masks."""
    return tl.load(rows.table.mask_index + batch * rows.batch_stride + head * rows.head_stride)


@triton.jit
def ordered_tile(rows, mask, slot, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The table row of a program's slot, counted in the order of rows, and the first token of its tile."""
    TILES: tl.constexpr = BLOCK // TILE
    row = tl.load(rows.table.order + mask * rows.count + slot // TILES)
    return row, row * BLOCK + slot % TILES * TILE


@triton.jit
def row_bounds(rows, mask, row):
    """The first full, run and bit entry of a row, and the end of the bit entries."""
    line = mask * rows.count + row
    begin = tl.load(rows.table.ptr + line + mask)
    runs = tl.load(rows.table.split + line * 2)
    bits = tl.load(rows.table.split + line * 2 + 1)
    end = tl.load(rows.table.ptr + line + mask + 1)
    return begin, runs, bits, end


@triton.jit
def dense_bounds(length, TILE: tl.constexpr):
    """``row_bounds`` of a dense loop over ``length`` tokens, in steps: whole tiles, then the ragged end."""
    whole = length // TILE
    steps = (length + TILE - 1) // TILE
    return whole * 0, whole, steps, steps


@triton.jit
def step_position(table, step, end, TILE: tl.constexpr):
    """The first token of a step along the axis of the loop; a dummy value past the end."""
    if table.SPARSE:
        STEPS: tl.constexpr = table.BLOCK // TILE
        block = tl.load(table.index + step // STEPS, mask=step < end, other=0)
        position = block * table.BLOCK + (step % STEPS) * TILE
    else:
        position = step * TILE
    return position


@triton.jit
def kept_pairs(table, entry, pairs, KIND: tl.constexpr):
    """Which pairs of an entry's step are kept, in the broadcast shape of ``pairs``, a ``BlockPositions``."""
    if not table.SPARSE:
        kept = (pairs.query < pairs.queries_left) & (pairs.key < pairs.keys_left)
    else:
        tile = tl.load(table.tile_idx + entry)
        if KIND == RUNS:
            run = tl.load(table.tile_runs + tile * table.BLOCK + pairs.query)
            kept = (pairs.key >= (run & 0xFFFF)) & (pairs.key < (run >> 16))
        else:
            WORDS: tl.constexpr = (table.BLOCK + 31) // 32
            words = table.tile_bits + tile.to(tl.int64) * (table.BLOCK * WORDS) + pairs.query * WORDS + pairs.key // 32
            kept = ((tl.load(words) >> (pairs.key % 32)) & 1) != 0
    return kept


@triton.jit
def where_kept(values, otherwise, kind, table, entry, pairs):
    """values, or ``otherwise`` where a cut entry of any kind does not keep a pair of the step."""
    if table.SPARSE:
        if kind == RUNS:
            values = tl.where(kept_pairs(table, entry, pairs, RUNS), values, otherwise)
        elif kind == BITS:
            values = tl.where(kept_pairs(table, entry, pairs, BITS), values, otherwise)
    return values
