"""A program's tile, and the loop over the entries of its row: shared by the forward pass and both backward passes.

A query tile iterates over keys; a key tile (BY_KEY) iterates over queries, through the transposed table. Records with integers are
created inside a kernel: Triton specializes integers in a tuple argument (1, and multiples of 16) despite ``do_not_specialize``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.tiles import BITS, CUT, FULL, RUNS, BlockPositions, dense_bounds, load_mask_number, ordered_tile, row_bounds
from .lengths import ValidRange, find_cut_entry, find_valid_by_kind, has_padding, load_valid_range


@dataclass(frozen=True)
class LoopShape:
    """The constants of a kernel, except a user's functions: Triton's cache covers a function's code only if it is an argument."""

    DIM: int  # padded head_dim of q and k, as tiles have powers of two
    DIM_V: int  # of v and out
    TILE_M: int  # queries of a step
    TILE_N: int  # keys of a step
    BLOCK: int  # of the table, so that a step's position in its block takes no division; without a table, the tokens of a step
    SPARSE: bool  # whether there is a table
    SCORED: bool  # whether scores are more than scaled products
    REACH: int  # the largest distance of a relative bias
    HAS_DLSE: bool  # whether lse has a gradient


class Sizes(NamedTuple):
    """heads: of queries. group: query heads that share a key head. DIM: padded head_dim of q and k, DIM_V: of v and out. A step's
    scores are TILE_M queries by TILE_N keys, with BY_KEY keys by queries."""

    heads: Any
    group: Any
    q_len: Any
    kv_len: Any
    DIM: Any
    DIM_V: Any
    TILE_M: Any
    TILE_N: Any
    BY_KEY: Any


class Scoring(NamedTuple):
    """How products become scores: see ``common.variant``. scale: times log2(e)."""

    scale: Any
    variant: Any
    SCORED: Any
    REACH: Any
    SCORE: Any
    DERIVATIVE: Any


class Tile(NamedTuple):
    """A program's tile. batch_head: batch * heads + head. first: its first query or key."""

    batch: Any
    head: Any
    kv_head: Any
    batch_head: Any
    first: Any


class RowEntries(NamedTuple):
    """Entries begin .. end - 1 of a row. Cut entries (KIND CUT) also have ``valid``, the existing tokens of the axis that a program
    iterates over, and their kind."""

    begin: Any
    end: Any
    valid: Any = None
    kind: Any = None


class FirstPair(NamedTuple):
    """The first pair of a step."""

    tile: Any
    first_query: Any
    first_key: Any


@triton.jit
def slot_and_batch_head(tiles):
    """(the number of a program's tile among a batch-head's ``tiles``, its batch-head). Along the grid's first axis, the tiles of a
    few batch-heads alternate."""
    together = tl.num_programs(0) // tiles
    return tl.program_id(0) // together, tl.program_id(1) * together + tl.program_id(0) % together


@triton.jit
def count_tiles(blocks, length, TILE: tl.constexpr, BLOCK: tl.constexpr, SPARSE: tl.constexpr):
    """How many tiles a head has. blocks: rows of its table."""
    return blocks * (BLOCK // TILE) if SPARSE else tl.cdiv(length, TILE)


@triton.jit
def query_tile(slot, batch_head, rows, table, sizes):
    """(the ``Tile`` of a slot, the bounds of its row's entries). Slots are counted in the order of rows."""
    batch = batch_head // sizes.heads
    head = batch_head % sizes.heads
    kv_head = head // sizes.group
    if table.SPARSE:
        mask = load_mask_number(rows, batch, head)
        row, first = ordered_tile(rows, mask, slot, sizes.TILE_M, table.BLOCK)
        bounds = row_bounds(rows, mask, row)
    else:
        first = slot * sizes.TILE_M
        bounds = dense_bounds(sizes.kv_len, sizes.TILE_N)
    return Tile(batch, head, kv_head, batch_head, first), bounds


@triton.jit
def load_axis_ranges(first, batch, sizes, variant):
    """``ValidRange`` of the axis of the tile that begins at ``first``, and of the other axis, empty if the tile has no valid
    token."""
    queries = load_valid_range(variant.q_starts, variant.q_lens, batch, sizes.q_len)
    keys = load_valid_range(variant.kv_starts, variant.kv_lens, batch, sizes.kv_len)
    own, others = (keys, queries) if sizes.BY_KEY else (queries, keys)
    if has_padding(variant.kv_starts, variant.kv_lens) if sizes.BY_KEY else has_padding(variant.q_starts, variant.q_lens):
        some = (first < own.last) & (first + (sizes.TILE_N if sizes.BY_KEY else sizes.TILE_M) > own.first)
        others = ValidRange(others.first, tl.where(some, others.last, others.first))
    return own, others


@triton.jit
def add_row(ADD: tl.constexpr, state, operands, tile, bounds, valid, table, sizes, scoring):
    """``state`` after ADD has added all entries of a row, one kind after another.

    ADD: (state, operands, tile, entries, table, sizes, scoring, KIND) -> state. bounds: of the row's kinds. valid: tokens of the
    axis that the program iterates over.
    """
    variant = scoring.variant
    Q_CUT: tl.constexpr = has_padding(variant.q_starts, variant.q_lens)
    KV_CUT: tl.constexpr = has_padding(variant.kv_starts, variant.kv_lens)
    KINDS: tl.constexpr = BITS + 1 if table.SPARSE else RUNS if Q_CUT or KV_CUT else BITS
    if Q_CUT or KV_CUT:
        if sizes.BY_KEY:
            entries = find_valid_by_kind(table, bounds, valid, sizes.q_len, sizes.TILE_M)
        else:
            entries = find_valid_by_kind(table, bounds, valid, sizes.kv_len, sizes.TILE_N)
        if (Q_CUT if sizes.BY_KEY else KV_CUT) or not table.SPARSE:
            for number in range(2 * KINDS):
                begin, end = find_cut_entry(entries, number, KINDS)
                if begin < end:
                    cut = RowEntries(begin, end, valid, number // 2)
                    state = ADD(state, operands, tile, cut, table, sizes, scoring, CUT)
    for KIND in tl.static_range(FULL, KINDS):
        if Q_CUT or KV_CUT:
            begin, end = entries[KIND][1], entries[KIND][2]
        else:
            begin, end = bounds[KIND], bounds[KIND + 1]
        if KIND == FULL or begin < end:  # even an empty loop fills and drains a pipeline
            state = ADD(state, operands, tile, RowEntries(begin, end), table, sizes, scoring, KIND)
    return state


@triton.jit
def locate_step(tile, position, sizes):
    """The ``FirstPair`` of a step whose first token along the axis of the loop is ``position``."""
    return FirstPair(tile, position, tile.first) if sizes.BY_KEY else FirstPair(tile, tile.first, position)


@triton.jit
def arange_2d(first, COUNT: tl.constexpr, AS_ROWS: tl.constexpr):
    """first .. first + COUNT - 1, (COUNT, 1) if AS_ROWS, otherwise (1, COUNT)."""
    numbers = first + tl.arange(0, COUNT)
    return numbers[:, None] if AS_ROWS else numbers[None, :]


@triton.jit
def locate_in_block(place, step, table, sizes):
    """``BlockPositions`` of the pairs of a step."""
    if sizes.BY_KEY:
        STEPS: tl.constexpr = table.BLOCK // sizes.TILE_M if table.SPARSE else 1
        q_start = place.first_query - (step % STEPS) * sizes.TILE_M
        k_start = place.first_key // table.BLOCK * table.BLOCK
    else:
        STEPS: tl.constexpr = table.BLOCK // sizes.TILE_N if table.SPARSE else 1
        k_start = place.first_key - (step % STEPS) * sizes.TILE_N
        q_start = place.first_query // table.BLOCK * table.BLOCK
    query = arange_2d(place.first_query - q_start, sizes.TILE_M, not sizes.BY_KEY)
    key = arange_2d(place.first_key - k_start, sizes.TILE_N, sizes.BY_KEY)
    return BlockPositions(query, key, sizes.q_len - q_start, sizes.kv_len - k_start)
