"""Attention over key blocks that each query picked: the forward kernels.

    1. picked_parts  a key block and the queries that picked it, gathered: a result and lse for each query, pick and head
    2. walk_picks    a tile of queries walks the blocks that most of it picked, those that the causal limit cuts, and what is always
                     kept, and joins the parts of its other picks in their order

``picked_masses`` is the first without results.

Source: arXiv:2307.08691, Alg. 1 (online softmax); arXiv:2511.11571 and arXiv:2508.18224 (queries gathered by key block).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..common.tiles import FLOOR, LN_2, LOG2_E, WalkedTable, load_tile
from ..launch.launch import described, launch, rows_of
from .configs import selection_config
from .tiles import (
    INTEGERS,
    ROWS,
    Always,
    Lengths,
    SelectionOperands,
    SelectionSizes,
    Shared,
    Span,
    Turn,
    Walks,
    always_arguments,
    choices_of_rows,
    kept_besides,
    lines_of_rows,
    load_rows,
    padded,
    queries_of_tile,
    rows_of_list,
    rows_of_tile,
    steps_of_always,
    steps_of_list,
    store_rows,
    table_of_tile,
    until_query,
)

_PARTS_AHEAD = tl.constexpr(3)


class _Keys(NamedTuple):
    """The tensors that a walk reads, and how. scale: times log2(e). TILE_N: keys of a step."""

    k: Any
    v: Any
    scale: Any
    DIM: Any
    DIM_V: Any
    TILE_N: Any


@triton.jit
def _weigh(running_max, running_sum, scores, factor):
    """(weights, rescale of what was summed before, the new running_max and running_sum). factor: makes scores base 2."""
    new_max = tl.maximum(running_max, tl.max(scores, 1) * factor)
    weights = tl.math.exp2(scores * factor - new_max[:, None])
    rescale = tl.math.exp2(running_max - new_max)
    return weights, rescale, new_max, running_sum * rescale + tl.sum(weights, 1)


@triton.jit
def _lse(running_max, running_sum):
    """(the sum to divide by, lse of base 2) of rows, which may keep nothing."""
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    return total, tl.where(running_sum == 0.0, -float("inf"), running_max + tl.math.log2(total))


@triton.jit
def _weigh_keys(running_max, running_sum, q, k, rows, position, lengths, keys, CUT: tl.constexpr):
    """``_weigh`` of a step whose keys every row picked. CUT: whether some may follow their query."""
    scores = tl.dot(q, k.T, input_precision="ieee")
    if CUT:
        scores = tl.where(until_query(rows, position, lengths, keys.TILE_N), scores * keys.scale, -float("inf"))
        factor = 1.0
    else:
        factor = keys.scale
    return _weigh(running_max, running_sum, scores, factor)


@triton.jit
def _compute_parts(
    q_rows, k, v, part_ptr, lse_ptr, entries, begin, end, line, position, span, lengths, shared, keys,
    BLOCK: tl.constexpr, CUT: tl.constexpr, MASSES: tl.constexpr,
):  # fmt: skip
    """The parts of queries begin .. end - 1 of a list. k, v: the block, if one step holds it."""
    for step in tl.range(0, steps_of_list(begin, end, shared)):
        rows, entry = rows_of_list(entries, begin, end, step, line, span, lengths, shared)
        q = load_rows(q_rows, rows, keys.DIM)
        accumulator = tl.zeros([ROWS, keys.DIM_V], tl.float32)
        running_max = tl.full([ROWS], FLOOR, tl.float32)
        running_sum = tl.zeros([ROWS], tl.float32)
        if BLOCK == keys.TILE_N:
            weights, _, running_max, running_sum = _weigh_keys(running_max, running_sum, q, k, rows, position, lengths, keys, CUT)
            if not MASSES:
                accumulator = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            for start in tl.range(position, position + BLOCK, keys.TILE_N):
                k_step = load_tile(keys.k, rows.batch, rows.kv_head, start, keys.TILE_N, keys.DIM)
                weights, rescale, running_max, running_sum = _weigh_keys(
                    running_max, running_sum, q, k_step, rows, start, lengths, keys, CUT
                )  # fmt: skip
                if not MASSES:
                    v_step = load_tile(keys.v, rows.batch, rows.kv_head, start, keys.TILE_N, keys.DIM_V)
                    accumulator = accumulator * rescale[:, None]
                    accumulator = tl.dot(weights.to(v_step.dtype), v_step, accumulator, input_precision="ieee")
        total, lse = _lse(running_max, running_sum)
        if MASSES:
            at = lines_of_rows(rows, lengths, shared) * shared.SLOTS + entry % shared.SLOTS
            tl.store(lse_ptr + at, lse * LN_2, mask=rows.exists)
        else:
            at = entry.to(tl.int64) * (shared.EVERY * shared.MEMBERS) + rows.number
            places = part_ptr + at[:, None] * keys.DIM_V + tl.arange(0, keys.DIM_V)[None, :]
            # Read once and late, they would displace gathered queries from the L2 cache.
            part = (accumulator / total[:, None]).to(part_ptr.dtype.element_ty)
            tl.store(places, part, mask=rows.exists[:, None], cache_modifier=".cs")
            tl.store(lse_ptr + at, lse, mask=rows.exists)


@triton.jit
def _compute_piece(
    q_rows, part_ptr, lse_ptr, entries, piece, span, lengths, shared, keys, BLOCK: tl.constexpr, MASSES: tl.constexpr
):  # fmt: skip
    begin, end = tl.load(piece + 1), tl.load(piece + 3)
    if begin < end:
        column = tl.load(piece)
        whole = tl.load(piece + 2)
        own = span.line + column // lengths.key_blocks
        batch, kv_head = own // lengths.kv_heads, own % lengths.kv_heads
        position = column % lengths.key_blocks * BLOCK
        k, v = 0, 0
        if BLOCK == keys.TILE_N:
            k = load_tile(keys.k, batch, kv_head, position, BLOCK, keys.DIM)
            if not MASSES:
                v = load_tile(keys.v, batch, kv_head, position, BLOCK, keys.DIM_V)
        # fmt: off
        if MASSES:
            _compute_parts(q_rows, k, v, part_ptr, lse_ptr, entries, begin, whole, own, position, span, lengths, shared, keys,
                           BLOCK, True, MASSES)
        _compute_parts(q_rows, k, v, part_ptr, lse_ptr, entries, whole, end, own, position, span, lengths, shared, keys,
                       BLOCK, False, MASSES)
        # fmt: on


@triton.jit(do_not_specialize=[*INTEGERS, "item"])
def picked_parts_kernel(
    q_rows,
    k_tensor,
    v_tensor,
    part_ptr,
    lse_ptr,
    entries,
    items,
    item,
    line,
    choice,
    stride,
    kv_heads,
    q_len,
    offset,
    choices,
    key_blocks,
    score_scale,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    MASSES: tl.constexpr,
    EVERY: tl.constexpr,
    MEMBERS: tl.constexpr,
    PICKERS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per piece of a key block's list. item: the turn's first. part_ptr: (entries of a turn, EVERY, MEMBERS, DIM_V),
    and lse_ptr the same without DIM_V, in base 2. MASSES: no parts; lse_ptr: (batch, heads, q_len, SLOTS), and lists have cut
    blocks."""
    # fmt: off
    _compute_piece(
        q_rows, part_ptr, lse_ptr, entries, items + (item + tl.program_id(0)) * 5,
        Span(line, choice, stride),
        Lengths(kv_heads, q_len, offset, choices, key_blocks),
        Shared(EVERY, MEMBERS, PICKERS, SLOTS, CHOICES, TOKENS, TILES),
        _Keys(k_tensor, v_tensor, score_scale, DIM, DIM_V, TILE_N),
        BLOCK, MASSES,
    )
    # fmt: on


def picked_parts(operands: SelectionOperands, lists, parts, part_lse, sizes: SelectionSizes, turn: Turn, scale: float) -> None:
    """Writes parts and part_lse of one turn. lists: ``selection.lists.ColumnLists``."""
    _parts(operands, lists, parts, part_lse, sizes, turn, scale, False)


def picked_masses(operands: SelectionOperands, lists, masses, sizes: SelectionSizes, turn: Turn, scale: float) -> None:
    """Writes masses, (batch, heads, q_len, slots) float32, where a query has pairs."""
    _parts(operands, lists, masses, masses, sizes, turn, scale, True)


def _parts(operands, lists, parts, part_lse, sizes, turn, scale, masses):
    q, k, v = operands[:3]
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    config = selection_config("parts", q.dtype, max(dim, dim_v), sizes.block, q.device)
    n, count = config.tile_n, lists.items.shape[1]
    arguments = [rows_of(q, dim), described(k, n, dim), described(v, n, dim_v), parts, part_lse, lists.entries, lists.items]
    arguments += [turn.number * count, *sizes.integers(turn), scale * LOG2_E.value]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE_N": n, "BLOCK": sizes.block, "MASSES": masses, **sizes.constants}
    launch(picked_parts_kernel, (count, 1), arguments, constants, config.options)


@triton.jit
def _walk_blocks(
    state, q, rows, number, blocks, bits, first, last, lengths, shared, keys, BLOCK: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """Folds the blocks first .. last - 1 of a tile's table. number: of each row's choice in the tile."""
    accumulator, running_max, running_sum = state
    STEPS: tl.constexpr = BLOCK // keys.TILE_N
    block = tl.load(blocks + first, mask=first < last, other=0)
    for step in tl.range(first * STEPS, last * STEPS):
        position = block * BLOCK + step % STEPS * keys.TILE_N
        following = (step + 1) // STEPS
        block = tl.load(blocks + following, mask=following < last, other=0)
        k = load_tile(keys.k, rows.batch, rows.kv_head, position, keys.TILE_N, keys.DIM)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if CUT or shared.CHOICES > 1:
            scores *= keys.scale
            factor = 1.0
        else:
            factor = keys.scale
        if shared.CHOICES > 1:
            kept = (tl.load(bits + step // STEPS) >> number) & 1
            scores = tl.where((kept == 1)[:, None], scores, -float("inf"))
        if CUT:
            scores = tl.where(until_query(rows, position, lengths, keys.TILE_N), scores, -float("inf"))
        weights, rescale, running_max, running_sum = _weigh(running_max, running_sum, scores, factor)
        v = load_tile(keys.v, rows.batch, rows.kv_head, position, keys.TILE_N, keys.DIM_V)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator * rescale[:, None], input_precision="ieee")
    return accumulator, running_max, running_sum


@triton.jit
def _walk_always(
    state, q, rows, first_query, last_query, picks, always, lengths, shared, keys, BLOCK: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Folds what is always kept and in no picked block."""
    accumulator, running_max, running_sum = state
    choice = choices_of_rows(rows, lengths, shared)
    for row in tl.range(first_query // always.table.BLOCK, last_query // always.table.BLOCK + 1):
        begin, end = steps_of_always(always, row, keys.TILE_N)
        for step in tl.range(begin, end, num_stages=1):
            # Before the products, which take most of the registers.
            position, kept = kept_besides(
                always, row, step, rows, choice, picks, lengths, shared, keys.TILE_N, BLOCK, PADDED
            )  # fmt: skip
            k = load_tile(keys.k, rows.batch, rows.kv_head, position, keys.TILE_N, keys.DIM)
            scores = tl.where(kept, tl.dot(q, k.T, input_precision="ieee") * keys.scale, -float("inf"))
            weights, rescale, running_max, running_sum = _weigh(running_max, running_sum, scores, 1.0)
            v = load_tile(keys.v, rows.batch, rows.kv_head, position, keys.TILE_N, keys.DIM_V)
            accumulator = tl.dot(weights.to(v.dtype), v, accumulator * rescale[:, None], input_precision="ieee")
    return accumulator, running_max, running_sum


@triton.jit
def _join_parts(state, rows, parts, lengths, shared, DIM_V: tl.constexpr):
    """Folds the parts of the rows' listed picks."""
    accumulator, running_max, running_sum = state
    count = tl.load(parts.listed + choices_of_rows(rows, lengths, shared), mask=rows.exists, other=0)
    column = tl.arange(0, DIM_V)
    for slot in tl.range(0, tl.max(count, 0), num_stages=_PARTS_AHEAD):
        at = (rows.choice * shared.SLOTS + slot).to(tl.int64) * (shared.EVERY * shared.MEMBERS) + rows.number
        lse = tl.load(parts.lse + at, mask=slot < count, other=-float("inf"))
        part = tl.load(parts.part + at[:, None] * DIM_V + column[None, :], mask=(slot < count)[:, None], other=0.0)
        new_max = tl.maximum(running_max, lse)
        rescale, share = tl.math.exp2(running_max - new_max), tl.math.exp2(lse - new_max)
        accumulator = accumulator * rescale[:, None] + part.to(tl.float32) * share[:, None]
        running_sum = running_sum * rescale + share
        running_max = new_max
    return accumulator, running_max, running_sum


class _Parts(NamedTuple):
    """listed: how many parts each choice has. JOINS: whether there are any."""

    listed: Any
    part: Any
    lse: Any
    JOINS: Any


@triton.jit
def _compute_tile(
    q_rows, out_rows, lse_ptr, picks, walks, parts, always, span, lengths, shared, keys, BLOCK: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    tile, picker = tl.program_id(0), tl.program_id(1)
    rows = rows_of_tile(tile, picker, span, lengths, shared)
    q = load_rows(q_rows, rows, keys.DIM)
    state = tl.zeros([ROWS, keys.DIM_V], tl.float32), tl.full([ROWS], FLOOR, tl.float32), tl.zeros([ROWS], tl.float32)
    table, number = table_of_tile(tile, picker, span, lengths, shared)
    blocks, bits = walks.blocks + table * walks.WIDTH, walks.bits + table * walks.WIDTH
    whole, end = tl.load(walks.counts + table * 2), tl.load(walks.counts + table * 2 + 1)
    if whole > 0:  # even an empty walk fills and drains a pipeline
        state = _walk_blocks(state, q, rows, number, blocks, bits, 0, whole, lengths, shared, keys, BLOCK, False)
    state = _walk_blocks(state, q, rows, number, blocks, bits, whole, end, lengths, shared, keys, BLOCK, True)
    if always.table.BLOCK != 0:
        first, last = queries_of_tile(tile, span, lengths, shared)
        state = _walk_always(state, q, rows, first, last, picks, always, lengths, shared, keys, BLOCK, PADDED)
    if parts.JOINS:
        state = _join_parts(state, rows, parts, lengths, shared, keys.DIM_V)
    accumulator, running_max, running_sum = state
    total, lse = _lse(running_max, running_sum)
    store_rows(out_rows, accumulator / total[:, None], rows, keys.DIM_V)
    tl.store(lse_ptr + lines_of_rows(rows, lengths, shared), lse * LN_2, mask=rows.exists)


@triton.jit(do_not_specialize=INTEGERS)
def walk_picks_kernel(
    q_rows,
    k_tensor,
    v_tensor,
    out_rows,
    lse_ptr,
    picks,
    walk_counts,
    walk_blocks,
    walk_bits,
    listed,
    part_ptr,
    part_lse,
    always_row_ptr,
    always_row_split,
    always_col_idx,
    always_tile_idx,
    always_tile_runs,
    always_tile_bits,
    line,
    choice,
    stride,
    kv_heads,
    q_len,
    offset,
    choices,
    key_blocks,
    score_scale,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALWAYS: tl.constexpr,
    JOINS: tl.constexpr,
    EVERY: tl.constexpr,
    MEMBERS: tl.constexpr,
    PICKERS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    """out and lse of a tile of queries of the heads that share a choice. walk_counts, walk_blocks, walk_bits: see
    ``selection_walks_kernel``. listed: (batch, kv_heads * PICKERS, choices) int32, how many parts a choice has, if JOINS. ALWAYS:
    the block size of what is always kept, or 0."""
    # fmt: off
    _compute_tile(
        q_rows, out_rows, lse_ptr, picks,
        Walks(walk_counts, walk_blocks, walk_bits, WIDTH),
        _Parts(listed, part_ptr, part_lse, JOINS),
        Always(always_row_ptr, always_row_split,
               WalkedTable(always_col_idx, always_tile_idx, always_tile_runs, always_tile_bits, ALWAYS, True)),
        Span(line, choice, stride),
        Lengths(kv_heads, q_len, offset, choices, key_blocks),
        Shared(EVERY, MEMBERS, PICKERS, SLOTS, CHOICES, TOKENS, TILES),
        _Keys(k_tensor, v_tensor, score_scale, DIM, DIM_V, TILE_N),
        BLOCK, PADDED,
    )
    # fmt: on


def walk_picks(
    operands: SelectionOperands,
    picks,
    walks,
    listed,
    parts,
    part_lse,
    always,
    out,
    lse,
    sizes: SelectionSizes,
    turn: Turn,
    scale: float,
) -> None:
    """Writes out and lse of one turn. walks: ``selection.lists.TileWalks``. listed: None if there are no parts."""
    q, k, v = operands[:3]
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    config = selection_config("walk", q.dtype, max(dim, dim_v), sizes.smallest_block(always), q.device)
    n, joins = config.tile_n, listed is not None
    arguments = [rows_of(q, dim), described(k, n, dim), described(v, n, dim_v), rows_of(out, dim_v), lse, picks]
    arguments += [walks.counts, walks.blocks, walks.bits, *((listed, parts, part_lse) if joins else (lse, lse, lse))]
    arguments += [*always_arguments(always, False, lse), *sizes.integers(turn), scale * LOG2_E.value]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE_N": n, "BLOCK": sizes.block, "WIDTH": walks.blocks.shape[3]}
    constants |= {"PADDED": padded(sizes.slots), "ALWAYS": always.block_size if always else 0, "JOINS": joins, **sizes.constants}
    launch(walk_picks_kernel, sizes.tiles_of(turn), arguments, constants, config.options)
