"""Attention over key blocks that each query picked: the forward kernels.

    1. picked_parts  a key block and the queries that picked it, gathered: a partial result and lse for each query, pick and head
    2. visit_blocks  a tile of queries visits the blocks that most of it picked, the blocks that the causal limit cuts, and what
                     is always kept, and merges the partial results of its other picks in their order

Without parts, the first gives the masses of picked blocks.

Source: arXiv:2307.08691, Alg. 1 (online softmax); arXiv:2511.11571 and arXiv:2508.18224 (queries gathered by key block).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...kernels.common.config import padded_head_dim
from ...kernels.common.tiles import LN_2, LOG2_E, load_tile
from ...kernels.launch.launch import as_rows, descriptor_or_rows, launch
from ...kernels.portable.softmax import finish, init_softmax, log_of_sum, merge, update
from . import tiles
from .configs import selection_config
from .division import Round, SelectionSizes
from .tiles import INTEGERS, ROWS

_PARTS_AHEAD = tl.constexpr(3)


@triton.jit
def _update_from_keys(running_max, running_sum, q, k, rows, position, call, CUT: tl.constexpr):
    """``update`` of a step whose keys every row picked. CUT: whether some may follow their query."""
    scores = tl.dot(q, k.T, input_precision="ieee")
    if CUT:
        scores = tl.where(tiles.causal_mask(rows, position, call), scores * call.score_scale, -float("inf"))
        factor = 1.0
    else:
        factor = call.score_scale
    return update(running_max, running_sum, scores, factor)


@triton.jit
def _compute_parts(k, v, part_ptr, lse_ptr, entries, begin, end, batch_head, position, call, CUT: tl.constexpr):
    """The partial results of queries begin .. end - 1 of a list. k, v: the block, if one step holds it."""
    C: tl.constexpr = call.C
    for step in tl.range(0, tiles.steps_of_list(begin, end, call)):
        rows, entry = tiles.rows_of_list(entries, begin, end, step, batch_head, call)
        q = tiles.load_rows(call.q, rows, C.DIM)
        accumulator, running_max, running_sum = init_softmax(ROWS, C.DIM_V)
        if C.BLOCK == C.TILE_N:
            weights, _, running_max, running_sum = _update_from_keys(running_max, running_sum, q, k, rows, position, call, CUT)
            if not C.MASSES:
                accumulator = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            for start in tl.range(position, position + C.BLOCK, C.TILE_N):
                k_step = load_tile(call.k, rows.batch, rows.kv_head, start, C.TILE_N, C.DIM)
                weights, rescale, running_max, running_sum = _update_from_keys(
                    running_max, running_sum, q, k_step, rows, start, call, CUT
                )
                if not C.MASSES:
                    v_step = load_tile(call.v, rows.batch, rows.kv_head, start, C.TILE_N, C.DIM_V)
                    accumulator = accumulator * rescale[:, None]
                    accumulator = tl.dot(weights.to(v_step.dtype), v_step, accumulator, input_precision="ieee")
        total, lse = log_of_sum(running_max, running_sum)
        if C.MASSES:
            at = tiles.index_of_rows(rows, call) * C.SLOTS + entry % C.SLOTS
            tl.store(lse_ptr + at, lse * LN_2, mask=rows.exists)
        else:
            at = entry.to(tl.int64) * C.MEMBERS + rows.number
            places = part_ptr + at[:, None] * C.DIM_V + tl.arange(0, C.DIM_V)[None, :]
            # Read once and late, they would displace gathered queries from the L2 cache.
            part = (accumulator / total[:, None]).to(part_ptr.dtype.element_ty)
            tl.store(places, part, mask=rows.exists[:, None], cache_modifier=".cs")
            tl.store(lse_ptr + at, lse, mask=rows.exists)


@triton.jit
def _compute_piece(part_ptr, lse_ptr, entries, piece, call):
    C: tl.constexpr = call.C
    begin, end = tl.load(piece + 1), tl.load(piece + 3)
    if begin < end:
        whole = tl.load(piece + 2)
        batch_head, batch, kv_head, position = tiles.locate_piece(piece, call)
        k, v = 0, 0
        if C.BLOCK == C.TILE_N:
            k = load_tile(call.k, batch, kv_head, position, C.BLOCK, C.DIM)
            if not C.MASSES:
                v = load_tile(call.v, batch, kv_head, position, C.BLOCK, C.DIM_V)
        if C.MASSES:
            _compute_parts(k, v, part_ptr, lse_ptr, entries, begin, whole, batch_head, position, call, True)
        _compute_parts(k, v, part_ptr, lse_ptr, entries, whole, end, batch_head, position, call, False)


@triton.jit(do_not_specialize=[*INTEGERS, "item"])
def picked_parts_kernel(
    q_rows, k_tensor, v_tensor, part_ptr, lse_ptr, entries, items, item,
    first_head, first_query, stride, kv_heads, q_len, offset, key_blocks,
    score_scale,
    C: tl.constexpr,
):  # fmt: skip
    """One program per piece of a key block's list. item: the round's first. part_ptr: (entries of a round, MEMBERS, DIM_V), and
    lse_ptr the same without DIM_V, in base 2. With MASSES there are no parts; lse_ptr: (batch, heads, q_len, SLOTS), and lists
    have cut blocks."""
    _compute_piece(
        part_ptr, lse_ptr, entries, items + (item + tl.program_id(0)) * 5,
        tiles.PickedCall(q_rows, k_tensor, v_tensor, None, None, None, None, None, None, score_scale,
                         first_head, first_query, stride, kv_heads, q_len, offset, key_blocks, C),
    )  # fmt: skip


def picked_parts(
    operands: tiles.SelectionOperands, lists, parts, part_lse, sizes: SelectionSizes, round: Round, scale: float
) -> None:
    """Writes parts and part_lse of one round. lists: ``lists.ColumnLists``. parts: None: part_lse are masses, (batch, heads, q_len,
    slots) float32, written where a query has pairs."""
    q, k, v = operands[:3]
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    config = selection_config("parts", q.dtype, max(dim, dim_v), sizes.block, q.device)
    n, count = config.tile_n, lists.items.shape[1]
    arguments = [as_rows(q, dim), descriptor_or_rows(k, n, dim), descriptor_or_rows(v, n, dim_v)]
    arguments += [part_lse if parts is None else parts, part_lse]
    arguments += [lists.entries, lists.items, round.number * count, *sizes.integers(round), scale * LOG2_E.value]
    constants = {"C": tiles.constants_of(sizes, dim, dim_v, n, MASSES=parts is None)}
    launch(picked_parts_kernel, (count, 1), arguments, constants, config.options)


@triton.jit
def _add_blocks(state, q, rows, number, blocks, bits, first, last, call, CUT: tl.constexpr):
    """Adds the blocks first .. last - 1 of a tile's table to its state. number: of each row's query in the tile."""
    C: tl.constexpr = call.C
    accumulator, running_max, running_sum = state
    STEPS: tl.constexpr = C.BLOCK // C.TILE_N
    block = tl.load(blocks + first, mask=first < last, other=0)
    for step in tl.range(first * STEPS, last * STEPS):
        position = block * C.BLOCK + step % STEPS * C.TILE_N
        following = (step + 1) // STEPS
        block = tl.load(blocks + following, mask=following < last, other=0)
        k = load_tile(call.k, rows.batch, rows.kv_head, position, C.TILE_N, C.DIM)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if CUT or C.QUERIES > 1:
            scores *= call.score_scale
            factor = 1.0
        else:
            factor = call.score_scale
        if C.QUERIES > 1:
            kept = (tl.load(bits + step // STEPS) >> number) & 1
            scores = tl.where((kept == 1)[:, None], scores, -float("inf"))
        if CUT:
            scores = tl.where(tiles.causal_mask(rows, position, call), scores, -float("inf"))
        weights, rescale, running_max, running_sum = update(running_max, running_sum, scores, factor)
        v = load_tile(call.v, rows.batch, rows.kv_head, position, C.TILE_N, C.DIM_V)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator * rescale[:, None], input_precision="ieee")
    return accumulator, running_max, running_sum


@triton.jit
def _add_always(state, q, rows, first_query, last_query, call):
    """Adds what is always kept and in no picked block."""
    C: tl.constexpr = call.C
    accumulator, running_max, running_sum = state
    picks = tiles.picks_of_rows(rows, call)
    for row in tl.range(first_query // C.ALWAYS, last_query // C.ALWAYS + 1):
        begin, end = tiles.steps_of_always(row, call)
        for step in tl.range(begin, end, num_stages=1):
            # Before the products, which take most of the registers.
            position, kept = tiles.find_unpicked_pairs(row, step, rows, picks, call)
            k = load_tile(call.k, rows.batch, rows.kv_head, position, C.TILE_N, C.DIM)
            scores = tl.where(kept, tl.dot(q, k.T, input_precision="ieee") * call.score_scale, -float("inf"))
            weights, rescale, running_max, running_sum = update(running_max, running_sum, scores, 1.0)
            v = load_tile(call.v, rows.batch, rows.kv_head, position, C.TILE_N, C.DIM_V)
            accumulator = tl.dot(weights.to(v.dtype), v, accumulator * rescale[:, None], input_precision="ieee")
    return accumulator, running_max, running_sum


class _Parts(NamedTuple):
    """listed: how many partial results each query has."""

    listed: Any
    part: Any
    lse: Any


@triton.jit
def _merge_parts(state, rows, parts, call):
    """Adds the partial results of the rows' listed picks."""
    C: tl.constexpr = call.C
    count = tl.load(parts.listed + tiles.picks_of_rows(rows, call), mask=rows.exists, other=0)
    column = tl.arange(0, C.DIM_V)
    for slot in tl.range(0, tl.max(count, 0), num_stages=_PARTS_AHEAD):
        at = (rows.place * C.SLOTS + slot).to(tl.int64) * C.MEMBERS + rows.number
        lse = tl.load(parts.lse + at, mask=slot < count, other=-float("inf"))
        part = tl.load(parts.part + at[:, None] * C.DIM_V + column[None, :], mask=(slot < count)[:, None], other=0.0)
        state = merge(state, (part.to(tl.float32),), (lse,), 1)
    return state


@triton.jit
def _compute_tile(out_rows, lse_ptr, visited, parts, call):
    C: tl.constexpr = call.C
    tile, picker = tl.program_id(0), tl.program_id(1)
    rows = tiles.rows_of_tile(tile, picker, call)
    q = tiles.load_rows(call.q, rows, C.DIM)
    state = init_softmax(ROWS, C.DIM_V)
    table, number = tiles.table_of_tile(tile, picker, call)
    blocks, bits = visited.blocks + table * C.WIDTH, visited.bits + table * C.WIDTH
    whole, end = tl.load(visited.counts + table * 2), tl.load(visited.counts + table * 2 + 1)
    if whole > 0:  # even an empty loop fills and drains a pipeline
        state = _add_blocks(state, q, rows, number, blocks, bits, 0, whole, call, False)
    state = _add_blocks(state, q, rows, number, blocks, bits, whole, end, call, True)
    if C.ALWAYS != 0:
        first, last = tiles.queries_of_tile(tile, call)
        state = _add_always(state, q, rows, first, last, call)
    out, lse = finish(_merge_parts(state, rows, parts, call))
    tiles.store_rows(out_rows, out, rows, C.DIM_V)
    tl.store(lse_ptr + tiles.index_of_rows(rows, call), lse * LN_2, mask=rows.exists)


@triton.jit(do_not_specialize=INTEGERS)
def visit_blocks_kernel(
    q_rows, k_tensor, v_tensor, out_rows, lse_ptr, picks, counts, blocks, bits, listed, part_ptr, part_lse, always,
    first_head, first_query, stride, kv_heads, q_len, offset, key_blocks,
    score_scale,
    C: tl.constexpr,
):  # fmt: skip
    """out and lse of a tile of queries of the heads that share picks. counts, blocks, bits: see ``VisitedBlocks``. listed:
    (batch, kv_heads * PICKERS, q_len) int32, how many partial results a query has. always: see ``always_arguments``."""
    _compute_tile(
        out_rows, lse_ptr, tiles.VisitedBlocks(counts, blocks, bits), _Parts(listed, part_ptr, part_lse),
        tiles.PickedCall(q_rows, k_tensor, v_tensor, None, None, None, picks, always, None, score_scale,
                         first_head, first_query, stride, kv_heads, q_len, offset, key_blocks, C),
    )  # fmt: skip


def visit_blocks(
    operands: tiles.SelectionOperands, picks, visited, listed, parts, part_lse, always, out, lse,
    sizes: SelectionSizes, round: Round, scale: float,
) -> None:  # fmt: skip
    """Writes out and lse of one round. visited: ``VisitedBlocks``. listed, parts, part_lse: see ``visit_blocks_kernel``."""
    q, k, v = operands[:3]
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    config = selection_config("visit", q.dtype, max(dim, dim_v), sizes.smallest_block(always), q.device)
    n = config.tile_n
    arguments = [as_rows(q, dim), descriptor_or_rows(k, n, dim), descriptor_or_rows(v, n, dim_v), as_rows(out, dim_v), lse, picks]
    arguments += [visited.counts, visited.blocks, visited.bits, listed, parts, part_lse]
    arguments += [tiles.always_arguments(always, False, lse), *sizes.integers(round), scale * LOG2_E.value]
    constants = {"C": tiles.constants_of(sizes, dim, dim_v, n, ALWAYS=tiles.block_of(always), WIDTH=visited.blocks.shape[3])}
    launch(visit_blocks_kernel, sizes.tiles_of(round), arguments, constants, config.options)
