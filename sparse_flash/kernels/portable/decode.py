"""The portable kernel for few queries: divides the blocks that their rows keep among programs, and combines the results.

The ordinary kernels run one program per query tile, so one query against a long cache would occupy one multiprocessor. Here each
program takes a split of the row's entries. It stacks the queries of all heads that share a key head as the rows of one tile, so
it reads keys once for all of these heads. It stores results in float32. The last program of a tile to arrive combines the splits
in a fixed order: one launch, and bitwise repeatable.

Sources: arXiv:2307.08691, Alg. 1 (softmax and the log of its sum); https://pytorch.org/blog/flash-decoding (the splits).
"""

import os
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.config import Config, padded_head_dim
from ..common.layout import empty_out
from ..common.tiles import (
    BITS,
    FLOOR,
    LN_2,
    LOG2_E,
    RUNS,
    BlockPositions,
    TableEntries,
    TableRows,
    TableTensors,
    kept_pairs,
    load_mask_number,
    row_bounds,
    step_position,
)
from ..launch.launch import arrival_counters, launch_or_repeat_alike, multiprocessors, table_arguments
from ..launch.memory import cached_until_cleared
from .configs import combined_at_a_time, decode_config, detect_gpu
from .sinks import add_sink


class Cache(NamedTuple):
    """Keys and values of all sequences. Strides are in units of VECTOR elements; without pages (PAGE 0) page strides are batch
    strides. tokens: of the program's sequence. HEAD_DIM, DIM: actual and padded. SCALED: whether keys and values are e4m3, with
    ``CacheScales``: BY_TOKEN one for each token, otherwise one for a page, or for all tokens."""

    k: Any
    v: Any
    k_page_stride: Any
    k_head_stride: Any
    k_token_stride: Any
    v_page_stride: Any
    v_head_stride: Any
    v_token_stride: Any
    block_table: Any
    table_stride: Any
    tokens: Any
    HEAD_DIM: Any
    DIM: Any
    HEAD_DIM_V: Any
    DIM_V: Any
    TILE_N: Any
    PAGE: Any
    VECTOR: Any
    SCALED: Any
    BY_TOKEN: Any


class CacheScales(NamedTuple):
    """Factors of a head's e4m3 keys and values, float32. page_stride: not used without pages."""

    k: Any
    v: Any
    page_stride: Any


class _Queries(NamedTuple):
    """The queries of ``members`` heads from ``head`` on, stacked row by row; a tile begins at first_row. Strides are in units of
    VECTOR elements. score_scale: scale * log2(e). SEVERAL: whether a head has more than one query. CAUSAL, AT_END: see the
    kernel."""

    q: Any
    batch_stride: Any
    head_stride: Any
    token_stride: Any
    batch: Any
    head: Any
    kv_head: Any
    heads: Any
    members: Any
    first_row: Any
    q_len: Any
    score_scale: Any
    SEVERAL: Any
    CAUSAL: Any
    AT_END: Any
    TILE_M: Any


class _Tile(NamedTuple):
    """A tile of q and its score_scale (see ``prepare_queries``), the position of each row, and the keys, values, pages and
    ``CacheScales`` of its head."""

    q: Any
    score_scale: Any
    position: Any
    k: Any
    v: Any
    pages: Any
    scales: Any


class _Split(NamedTuple):
    """Steps begin .. end - 1 of a table row; ``bounds`` delimit its kinds."""

    begin: Any
    end: Any
    row: Any
    bounds: Any


class _Output(NamedTuple):
    """out and lse of all queries, which sinks, (heads,), have joined if there are any (HAS_SINKS)."""

    out: Any
    lse: Any
    sinks: Any
    batch_stride: Any
    head_stride: Any
    token_stride: Any
    HEAD_DIM_V: Any
    DIM_V: Any
    HAS_SINKS: Any


class Splits(NamedTuple):
    """A program's split of its tile. Programs that share a tile's keys (SPLIT) store ``results``: the outputs of all tiles, then
    their logs, ROWS rows per split. arrived: int32 zeros, one per tile. COMBINED: splits that are combined at a time."""

    tile: Any
    number: Any
    tiles: Any
    count: Any
    results: Any
    arrived: Any
    SPLIT: Any
    ROWS: Any
    COMBINED: Any


@triton.jit
def load_pages(pages, cache, position):
    """The pages that hold a step's tokens: one, or (TILE_N,) if a step spans several; not used without pages."""
    if cache.PAGE == 0:
        page = position
    elif cache.PAGE < cache.TILE_N:
        token = position + tl.arange(0, cache.TILE_N)
        page = tl.load(pages + token // cache.PAGE, mask=token < cache.tokens, other=0)
    else:
        page = tl.load(pages + position // cache.PAGE, mask=position < cache.tokens, other=0)
    return page


@triton.jit
def _offsets(cache, page, token, page_stride, token_stride):
    """(TILE_N,) int64, where these tokens are within their head."""
    if cache.PAGE == 0:
        offset = token.to(tl.int64) * token_stride
    else:
        offset = page.to(tl.int64) * page_stride + (token % cache.PAGE).to(tl.int64) * token_stride
    return offset


@triton.jit
def load_step_keys(k, cache, page, token, exists):
    """(TILE_N, DIM) keys of a step, 0 where none exist. Memory past the last key may hold anything, even NaN, which a weight of 0
    would not cancel."""
    row = _offsets(cache, page, token, cache.k_page_stride, cache.k_token_stride) * cache.VECTOR
    dim = tl.arange(0, cache.DIM)[None, :]
    return tl.load(k + row[:, None] + dim, mask=exists[:, None] & (dim < cache.HEAD_DIM), other=0.0)


@triton.jit
def load_step_values(v, cache, page, token, exists):
    """(TILE_N, DIM_V) values of a step, like keys. SCALED: (TILE_N, DIM_V / 2) int16, each two neighbours: products take pairs of
    tokens, and the GPU transposes 16 bits at a time in shared memory, not 8."""
    IN_ONE: tl.constexpr = 2 if cache.SCALED else 1
    row = _offsets(cache, page, token, cache.v_page_stride, cache.v_token_stride) * (cache.VECTOR // IN_ONE)
    dim = tl.arange(0, cache.DIM_V // IN_ONE)[None, :]
    if cache.SCALED:
        v = v.to(tl.pointer_type(tl.int16), bitcast=True)
    return tl.load(v + row[:, None] + dim, mask=exists[:, None] & (dim < cache.HEAD_DIM_V // IN_ONE), other=0)


@triton.jit
def init_state(cache, TILE_M: tl.constexpr):
    """The softmax state before the first step: (accumulators, running_max, running_sum). SCALED: two accumulators, of even and odd
    columns."""
    if cache.SCALED:
        accumulators = tl.zeros([TILE_M, cache.DIM_V // 2], tl.float32), tl.zeros([TILE_M, cache.DIM_V // 2], tl.float32)
    else:
        accumulators = (tl.zeros([TILE_M, cache.DIM_V], tl.float32),)
    return accumulators, tl.full([TILE_M], FLOOR, tl.float32), tl.zeros([TILE_M], tl.float32)


@triton.jit
def join_accumulators(state, cache):
    """The softmax state after the last step, with one accumulator."""
    accumulators, running_max, running_sum = state
    if cache.SCALED:
        accumulator = tl.reshape(tl.join(accumulators[0], accumulators[1]), [running_max.shape[0], cache.DIM_V])
    else:
        accumulator = accumulators[0]
    return accumulator, running_max, running_sum


@triton.jit
def prepare_queries(q, score_scale, cache):
    """(q, score_scale) as ``add_step`` takes them. SCALED: q in float16, each row divided by a power of two, by which its
    score_scale, (TILE_M,), is multiplied.

    float16 holds e4m3 exactly, and the GPU converts e4m3 to nothing else. The largest of a row is 1 to 2, so of a bfloat16 at most
    2^-25 is lost.
    """
    if cache.SCALED:
        PRODUCTS: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
        q = q.to(tl.float32)
        power = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, 2.0**-126)
        q, score_scale = (q / power[:, None]).to(PRODUCTS), power * score_scale
    return q, score_scale


@triton.constexpr_function
def has_one_factor(BY_TOKEN, PAGE, TILE_N):
    """Whether all tokens of a step have the same scale."""
    return not BY_TOKEN and (PAGE == 0 or PAGE >= TILE_N)


@triton.jit
def load_factors(scales, cache, page, first):
    """The factors of a step's keys and of its values, (TILE_N,), or one of all, 0 where no token exists; not used unless SCALED."""
    if cache.SCALED:
        offset = page.to(tl.int64) * scales.page_stride if cache.PAGE > 0 else 0
        token = first if has_one_factor(cache.BY_TOKEN, cache.PAGE, cache.TILE_N) else first + tl.arange(0, cache.TILE_N)
        exists = token < cache.tokens
        if cache.BY_TOKEN:
            offset += token % cache.PAGE if cache.PAGE > 0 else token
        factors = tl.load(scales.k + offset, mask=exists, other=0.0), tl.load(scales.v + offset, mask=exists, other=0.0)
    else:
        factors = first, first
    return factors


if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):

    @triton.jit
    def _unpack_e4m3(pairs):
        """Even and odd columns in float16 of int16 pairs of e4m3 numbers. A register holds two tokens, before and after."""
        return tl.inline_asm_elementwise(
            "{ .reg .b32 both; .reg .b16 even, odd; prmt.b32 both, $2, 0, 0x3120; mov.b32 {even, odd}, both;"
            " cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip

else:  # which runs no assembly

    @triton.jit
    def _unpack_e4m3(pairs):
        even, odd = (pairs & 0xFF).to(tl.uint8), (pairs >> 8).to(tl.uint8)
        return even.to(tl.float8e4nv, bitcast=True).to(tl.float16), odd.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def add_step(state, q, keys, values, kept, score_scale, factors, cache):
    """Folds a step's keys and values into the softmax state. Products are numbered as in ``forward``.

    SCALED: factors multiply scores, weights and products in float32. So that float16 loses no small weight, the largest is 2^15,
    and a step's factors multiply weights relative to the largest factor.
    """
    accumulators, running_max, running_sum = state
    scores = tl.dot(q, keys.to(q.dtype).T, input_precision="ieee")  # (1)
    ALIKE: tl.constexpr = has_one_factor(cache.BY_TOKEN, cache.PAGE, cache.TILE_N)
    if cache.SCALED:
        factor = (score_scale * factors[0])[:, None] if ALIKE else score_scale[:, None] * factors[0][None, :]
        scores = tl.where(kept, scores * factor, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) - 15.0)
    else:
        scores = tl.where(kept, scores * score_scale, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
    weights = tl.math.exp2(scores - new_max[:, None])
    rescale = tl.math.exp2(running_max - new_max)
    running_sum = running_sum * rescale + tl.sum(weights, 1)
    if cache.SCALED:
        largest = factors[1] if ALIKE else tl.max(factors[1], 0)
        if not ALIKE:
            weights *= (factors[1] * (1.0 / tl.maximum(largest, 2.0**-100)))[None, :]
        weights = weights.to(q.dtype)
        even, odd = _unpack_e4m3(values)
        accumulators = (
            accumulators[0] * rescale[:, None] + tl.dot(weights, even.to(q.dtype), input_precision="ieee") * largest,  # (2)
            accumulators[1] * rescale[:, None] + tl.dot(weights, odd.to(q.dtype), input_precision="ieee") * largest,
        )
    else:
        product = tl.dot(weights.to(values.dtype), values, accumulators[0] * rescale[:, None], input_precision="ieee")  # (2)
        accumulators = (product,)
    return accumulators, new_max, running_sum


@triton.jit
def _add_steps(state, tile, queries, cache, split, table):
    """Folds a split into the softmax state. One loop has the entries of all kinds: separate loops would each wait for their first
    keys."""
    position = tile.position
    TILE_N: tl.constexpr = cache.TILE_N
    BLOCK: tl.constexpr = table.BLOCK
    STEPS: tl.constexpr = BLOCK // TILE_N if table.SPARSE else 1
    in_block = position - split.row * BLOCK if table.SPARSE else position
    within = (in_block >= 0) & (in_block < BLOCK) if table.SPARSE else in_block >= 0
    first = step_position(table, split.begin, split.end, TILE_N)
    page = load_pages(tile.pages, cache, first)
    factors = load_factors(tile.scales, cache, page, first)
    for step in tl.range(split.begin, split.end):
        token = first + tl.arange(0, TILE_N)
        exists = token < cache.tokens
        keys = load_step_keys(tile.k, cache, page, token, exists)
        values = load_step_values(tile.v, cache, page, token, exists)
        kept = exists[None, :]
        if queries.SEVERAL:
            kept = kept & within[:, None]
        if queries.CAUSAL:
            kept = kept & (token[None, :] <= position[:, None])
        if table.SPARSE:
            q_in_block = tl.where(within, in_block, 0)[:, None]
            pairs = BlockPositions(q_in_block, ((step % STEPS) * TILE_N + tl.arange(0, TILE_N))[None, :])
            kept = kept & (q_in_block >= 0)
            # In branches, which the compiler does not look into: otherwise it would prefetch masks instead of keys.
            entry = step // STEPS
            if entry >= split.bounds[BITS]:
                kept = kept & kept_pairs(table, entry, pairs, BITS)
            elif entry >= split.bounds[RUNS]:
                kept = kept & kept_pairs(table, entry, pairs, RUNS)
        # The table and factors are read one step ahead, so no key load and no product waits for them.
        first = step_position(table, step + 1, split.end, TILE_N)
        page = load_pages(tile.pages, cache, first)
        of_step, factors = factors, load_factors(tile.scales, cache, page, first)
        state = add_step(state, tile.q, keys, values, kept, tile.score_scale, of_step, cache)
    return state


@triton.jit
def _add_row(state, tile, queries, cache, splits, row, mask, rows, table):
    """Folds this program's split of a table row into the softmax state: an equal share of its steps."""
    STEPS: tl.constexpr = table.BLOCK // cache.TILE_N
    bounds = row_bounds(rows, mask, row)
    steps = (bounds[3] - bounds[0]) * STEPS
    begin = bounds[0] * STEPS + (steps * splits.number) // splits.count
    end = bounds[0] * STEPS + (steps * (splits.number + 1)) // splits.count
    return _add_steps(state, tile, queries, cache, _Split(begin, end, row, bounds), table)


@triton.jit
def _unstack_rows(queries, ROWS: tl.constexpr):
    """For each of ROWS rows, its stacked head, its query, and whether it exists."""
    row = queries.first_row + tl.arange(0, ROWS)
    if queries.SEVERAL:
        member, query = row // queries.q_len, row % queries.q_len
    else:
        member, query = row, row * 0
    return member, query, member < queries.members


@triton.jit
def normalize_state(state):
    """(out, log2 of the softmax sum) of a softmax state: 0 and -inf if nothing was kept."""
    accumulator, running_max, running_sum = state
    keeps_nothing = running_sum == 0.0
    total = tl.where(keeps_nothing, 1.0, running_sum)
    return accumulator / total[:, None], tl.where(keeps_nothing, -float("inf"), running_max + tl.math.log2(total))


@triton.jit
def _store(state, output, queries, ROWS: tl.constexpr):
    """Stores the results of a tile's ROWS rows."""
    member, query, exists = _unstack_rows(queries, ROWS)
    if output.HAS_SINKS:
        state = add_sink(state, tl.load(output.sinks + queries.head + member, mask=exists, other=-float("inf")))
    values, log = normalize_state(state)
    row = queries.batch * output.batch_stride + (queries.head + member) * output.head_stride + query * output.token_stride
    dim = tl.arange(0, output.DIM_V)[None, :]
    place = output.out + row[:, None] + dim
    tl.store(place, values.to(output.out.dtype.element_ty), mask=exists[:, None] & (dim < output.HEAD_DIM_V))
    batch_head = queries.batch.to(tl.int64) * queries.heads + queries.head + member
    tl.store(output.lse + batch_head * queries.q_len + query, log * LN_2, mask=exists)


@triton.jit
def store_split(state, splits, TILE_M: tl.constexpr, DIM_V: tl.constexpr):
    """Stores this program's results among the splits of its tile. Returns pointers to the (results, logs) of all splits, and
    whether this program is the last one to arrive, which combines them."""
    first_row = splits.tile.to(tl.int64) * splits.count * splits.ROWS
    logs = splits.results + splits.tiles.to(tl.int64) * splits.count * splits.ROWS * DIM_V + first_row
    results = splits.results + first_row * DIM_V
    values, log = normalize_state(state)
    row = tl.arange(0, TILE_M)
    place = splits.number * splits.ROWS + row
    # A split that keeps nothing stores 0, so loading it need not wait for its log.
    tl.store(results + place[:, None] * DIM_V + tl.arange(0, DIM_V)[None, :], values, mask=(row < splits.ROWS)[:, None])
    tl.store(logs + place, log, mask=row < splits.ROWS)
    # Every thread must have written its part of the split before one of them signals it.
    tl.debug_barrier()
    last = tl.atomic_add(splits.arrived + splits.tile, 1, sem="acq_rel", scope="gpu") == splits.count - 1
    if last:
        tl.store(splits.arrived + splits.tile, 0)
    return results, logs, last


@triton.jit
def merge_splits(results, logs, splits, DIM_V: tl.constexpr):
    """The softmax state of a tile, combined from its splits in order. COMBINED of them are in flight at a time; each thread holds
    the same elements of every split, so no data moves between threads."""
    ROWS: tl.constexpr = splits.ROWS
    COMBINED: tl.constexpr = splits.COMBINED
    running_max = tl.full([ROWS], FLOOR, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, DIM_V], tl.float32)
    row = tl.arange(0, ROWS)
    place = row[:, None] * DIM_V + tl.arange(0, DIM_V)[None, :]
    for first in tl.range(0, splits.count, COMBINED):
        some_logs, some_results = (), ()
        for number in tl.static_range(COMBINED):
            split = first + number
            exists = row < (splits.count - split) * ROWS
            # Other multiprocessors wrote them: bypass this one's L1 cache.
            some_logs += (tl.load(logs + split * ROWS + row, mask=exists, other=-float("inf"), cache_modifier=".cg"),)
            here = results + split * ROWS * DIM_V + place
            some_results += (tl.load(here, mask=exists[:, None], other=0.0, cache_modifier=".cg"),)
        new_max = running_max
        for number in tl.static_range(COMBINED):
            new_max = tl.maximum(new_max, some_logs[number])
        rescale = tl.math.exp2(running_max - new_max)
        running_sum *= rescale
        accumulator *= rescale[:, None]
        for number in tl.static_range(COMBINED):
            weight = tl.math.exp2(some_logs[number] - new_max)
            running_sum += weight
            accumulator += some_results[number] * weight[:, None]
        running_max = new_max
    return accumulator, running_max, running_sum


@triton.jit
def _compute_tile(queries, cache, scales, splits, rows, table, output):
    """out and lse of this program's query tile, or its split of them; a tile's last program combines the splits."""
    TILE_M: tl.constexpr = queries.TILE_M
    DIM_V: tl.constexpr = cache.DIM_V
    first_query = cache.tokens - queries.q_len if queries.AT_END else 0
    member, query, exists = _unstack_rows(queries, TILE_M)
    dim = tl.arange(0, cache.DIM)[None, :]
    row = queries.batch * queries.batch_stride + (queries.head + member) * queries.head_stride + query * queries.token_stride
    row = (row * cache.VECTOR)[:, None]
    q = tl.load(queries.q + row + dim, mask=exists[:, None] & (dim < cache.HEAD_DIM), other=0.0)
    k = cache.k + queries.kv_head * cache.k_head_stride * cache.VECTOR
    v = cache.v + queries.kv_head * cache.v_head_stride * cache.VECTOR
    if cache.PAGE == 0:
        k += queries.batch * cache.k_page_stride * cache.VECTOR
        v += queries.batch * cache.v_page_stride * cache.VECTOR
    q, score_scale = prepare_queries(q, queries.score_scale, cache)
    tile = _Tile(q, score_scale, first_query + query, k, v, cache.block_table + queries.batch * cache.table_stride, scales)
    state = init_state(cache, TILE_M)
    if table.SPARSE:
        mask = load_mask_number(rows, queries.batch, queries.head)
        first_block = tl.maximum(first_query, 0) // table.BLOCK
        if queries.SEVERAL:
            last_block = tl.maximum(first_query + queries.q_len - 1, 0) // table.BLOCK
            for block in tl.range(first_block, last_block + 1):
                state = _add_row(state, tile, queries, cache, splits, block, mask, rows, table)
        else:
            state = _add_row(state, tile, queries, cache, splits, first_block, mask, rows, table)
    else:
        steps = (cache.tokens + cache.TILE_N - 1) // cache.TILE_N
        begin = (steps * splits.number) // splits.count
        end = (steps * (splits.number + 1)) // splits.count
        state = _add_steps(state, tile, queries, cache, _Split(begin, end, None, None), table)
    state = join_accumulators(state, cache)
    if splits.SPLIT:
        results, logs, last = store_split(state, splits, TILE_M, DIM_V)
        if last:
            _store(merge_splits(results, logs, splits, DIM_V), output, queries, splits.ROWS)
    else:
        _store(state, output, queries, TILE_M)


# The strides of tensors, as every kernel of few queries takes them.
STRIDES = [f"{name}_stride" for name in ("q_batch", "q_head", "q_token", "k_page", "k_head", "k_token", "v_page", "v_head")]
STRIDES += [f"{name}_stride" for name in ("v_token", "out_batch", "out_head", "out_token", "scale_page", "scale_head", "table")]
NOT_SPECIALIZED = [*STRIDES, "mask_batch_stride", "mask_head_stride"]
NOT_SPECIALIZED += ["heads", "group", "members", "row_tiles", "q_len", "kv_len", "q_blocks"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    split_results,
    arrived,
    kv_lens,
    kv_starts,
    block_table,
    k_scale,
    v_scale,
    sinks,
    table,
    mask_batch_stride,
    mask_head_stride,
    q_batch_stride: tl.int64,
    q_head_stride: tl.int64,
    q_token_stride: tl.int64,
    k_page_stride: tl.int64,
    k_head_stride: tl.int64,
    k_token_stride: tl.int64,
    v_page_stride: tl.int64,
    v_head_stride: tl.int64,
    v_token_stride: tl.int64,
    out_batch_stride: tl.int64,
    out_head_stride: tl.int64,
    out_token_stride: tl.int64,
    scale_page_stride: tl.int64,
    scale_head_stride: tl.int64,
    table_stride: tl.int64,
    heads,
    group,
    members,
    row_tiles,
    q_len,
    kv_len,
    q_blocks,
    score_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    ROWS: tl.constexpr,
    COMBINED: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SEVERAL: tl.constexpr,
    AT_END: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """One program per tile of stacked queries and split of its keys. score_scale: scale * log2(e).

    group: query heads that share a key head. members: how many of them are stacked, all or one. Strides of q, k and v are in units
    of VECTOR elements. HEAD_DIM, DIM: of q and k, actual and padded; HEAD_DIM_V, DIM_V: of v and out. Without pages, page strides
    are batch strides. split_results, arrived, SPLIT, ROWS, COMBINED: see ``Splits``.
    AT_END: the table is square, and the queries are the last of the sequence; otherwise its rows are the queries.
    """
    tile, number = tl.program_id(0), tl.program_id(1)
    tiles, count = tl.num_programs(0), tl.num_programs(1)
    units = heads // members
    batch = tile // row_tiles // units
    head = tile // row_tiles % units * members
    kv_head = head // group
    first_row = tile % row_tiles * TILE_M
    length = tl.maximum(tl.minimum(tl.load(kv_lens + batch), kv_len), 0) if HAS_LENS else kv_len
    of_head = kv_head * scale_head_stride + (batch * scale_page_stride if PAGE == 0 else 0)
    if HAS_STARTS:  # which pages do not come with
        start = tl.maximum(tl.load(kv_starts + batch), 0)
        length = tl.maximum(length - start, 0)
        k_ptr += start * k_token_stride * VECTOR
        v_ptr += start * v_token_stride * VECTOR
        of_head += start if BY_TOKEN else 0
    # fmt: off
    _compute_tile(
        _Queries(q_ptr, q_batch_stride, q_head_stride, q_token_stride, batch, head, kv_head, heads, members, first_row, q_len,
                 score_scale, SEVERAL, CAUSAL, AT_END, TILE_M),
        Cache(k_ptr, v_ptr, k_page_stride, k_head_stride, k_token_stride, v_page_stride, v_head_stride, v_token_stride,
               block_table, table_stride, length, HEAD_DIM, DIM, HEAD_DIM_V, DIM_V, TILE_N, PAGE, VECTOR, SCALED,
              BY_TOKEN),
        CacheScales(k_scale + of_head, v_scale + of_head, scale_page_stride),
        Splits(tile, number, tiles, count, split_results, arrived, SPLIT, ROWS, COMBINED),
        TableRows(table, mask_batch_stride, mask_head_stride, q_blocks),
        TableEntries(table.index, table.tile_idx, table.tile_runs, table.tile_bits, TABLE_BLOCK, SPARSE),
        _Output(out_ptr, lse_ptr, sinks, out_batch_stride, out_head_stride, out_token_stride, HEAD_DIM_V, DIM_V, HAS_SINKS),
    )
    # fmt: on


def attention_decode(
    q, k, v, mask, scale, *,
    kv_lens=None, kv_starts=None, block_table=None, k_scale=None, v_scale=None, sinks=None, causal=False, at_end=True, splits=None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out (batch, heads, q_len, v's head_dim) in q's memory order, lse (batch, heads, q_len) float32.

    q: (batch, heads, q_len, head_dim). k, v: (batch, kv_heads, tokens, head_dim); with block_table, (batch, pages of a sequence)
    int32, they are (pages, kv_heads, page_size, head_dim), page_size a power of two; v may have its own head_dim. All have a
    contiguous last dimension. k_scale, v_scale: if k and v are e4m3, their scales, float32 of k's shape without head_dim, both of
    the same strides; of tokens 1, or 0 if a page or batch entry has one scale for a head.
    kv_lens: (batch,) int32, or None: all tokens. kv_starts: (batch,) int32, or None: each sequence's first token; positions count
    from there. sinks: (heads,) or None. at_end: the queries are the last of each sequence, and mask is None or square and covers
    its tokens; causal: then none of them sees a later key. Otherwise the mask's rows are the queries, and there are neither lengths
    nor pages. splits: programs that share a tile's keys; by default enough to fill the GPU.
    """
    optional = kv_lens, kv_starts, block_table, k_scale, v_scale, sinks
    inputs = [t for t in (q, k, v, *optional) if t is not None]

    def run(recording):
        # Heads of a group with different masks iterate separately.
        apart = mask is not None and mask.mask_index.shape[1] > 1 and mask.by_query.row_ptr.shape[0] > 1
        table = None if mask is None else (mask.block_size, *mask.by_query.row_split.shape[:2], mask.by_query.col_idx.shape[0])
        shapes = CallShapes.of(q, k, v, kv_lens, block_table, k_scale)
        plan = _plan(shapes, kv_starts is not None, sinks is not None, table, apart, causal, at_end, splits)
        out, lse, arguments = plan.arguments(recording, q, k, v, *optional)
        *tensors, batch_stride, head_stride = table_arguments(mask, mask and mask.by_query, lse)
        arguments += [TableTensors(*tensors), batch_stride, head_stride, *plan.numbers, scale * LOG2_E.value]
        recording.launch(decode_kernel, (plan.grid, arguments, plan.constants, plan.options), (sinks is not None and sinks.dtype,))
        return out, lse

    key = scale, kv_lens is None, kv_starts is None, sinks is None, causal, at_end, splits
    return tuple(launch_or_repeat_alike(decode_kernel, mask, key, inputs, run)[:2])


class DecodePlan(NamedTuple):
    """Everything in a launch that follows from shapes. split_numbers: how many numbers the splits of all tiles store; 0 without
    splits. numbers: the kernel's integers."""

    grid: tuple[int, int]
    split_numbers: int
    numbers: tuple[int, ...]
    constants: dict
    options: dict

    def arguments(self, recording, q, k, v, *optional: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, list]:
        """(out, lse, the kernel's arguments before its table). Without splits and optional tensors, there are placeholders."""
        out = recording.fresh(empty_out(q, v.shape[3]))
        lse = recording.fresh(torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
        workspace = lse, lse
        if self.split_numbers:
            results = recording.fresh(torch.empty(self.split_numbers, dtype=torch.float32, device=q.device))
            workspace = results, recording.each_time(partial(arrival_counters, self.grid[0], q.device))
        return out, lse, [q, k, v, out, lse, *workspace, *(lse if t is None else t for t in optional)]


class CallShapes(NamedTuple):
    """The layouts of a call's tensors, on which a plan depends. scale_strides: of page or batch entry, head and token; None without
    scales. pages: the shape of the block table, or None."""

    device: torch.device
    dtype: torch.dtype
    q: tuple[int, ...]
    q_strides: tuple[int, ...]
    k: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_head_dim: int
    v_strides: tuple[int, ...]
    scale_strides: tuple[int, ...] | None
    pages: tuple[int, ...] | None
    has_lens: bool

    @classmethod
    def of(cls, q, k, v, kv_lens, block_table, k_scale) -> "CallShapes":
        of_q, of_k, of_v = ((tuple(t.shape), t.stride()) for t in (q, k, v))
        scale_strides = None if k_scale is None else k_scale.stride()
        pages = None if block_table is None else tuple(block_table.shape)
        return cls(q.device, q.dtype, *of_q, *of_k, of_v[0][3], of_v[1], scale_strides, pages, kv_lens is not None)

    @property
    def scaled(self) -> bool:
        return self.scale_strides is not None

    @property
    def page(self) -> int:
        """The tokens of a page, 0 without pages."""
        return 0 if self.pages is None else self.k[2]

    @property
    def tokens(self) -> int:
        return self.k[2] if self.pages is None else self.k[2] * self.pages[1]

    def plan(self, config: Config, rows: int, tiles: int, splits: int, constants: dict, numbers: tuple[int, ...]) -> DecodePlan:
        """rows: of the heads that are stacked. constants, numbers: arguments that only one kernel takes."""
        dim_v = padded_head_dim(self.v_head_dim)
        stored = min(config.tile_m, 1 << (rows - 1).bit_length())
        strides = [stride for of in (self.q_strides, self.k_strides, self.v_strides) for stride in of[:3]]
        # A vector has 16 bytes if all strides are multiples of it. Strides of e4m3 are even.
        vector = 16 if self.scaled else 16 // self.dtype.itemsize
        vector = vector if gcd(vector, *strides) == vector else 1 + self.scaled
        like_q = torch.empty_strided(self.q, self.q_strides, dtype=self.dtype, device="meta")
        of_head = {"HEAD_DIM": self.q[3], "DIM": padded_head_dim(self.q[3]), "HEAD_DIM_V": self.v_head_dim, "DIM_V": dim_v}
        of_tile = {"TILE_M": config.tile_m, "TILE_N": config.tile_n, "ROWS": stored, "COMBINED": combined_at_a_time(stored, dim_v)}
        of_cache = {"HAS_LENS": self.has_lens, "SPLIT": splits > 1, "PAGE": self.page, "VECTOR": vector, "SCALED": self.scaled}
        of_cache["BY_TOKEN"] = self.scaled and self.scale_strides[2] != 0
        integers = (
            *(stride // vector for stride in strides),
            *empty_out(like_q, self.v_head_dim).stride()[:3],
            *(self.scale_strides or (0, 0))[:2],
            0 if self.pages is None else self.pages[1],
            *numbers,
        )
        split_numbers = tiles * splits * stored * (dim_v + 1) if splits > 1 else 0
        return DecodePlan((tiles, splits), split_numbers, integers, of_head | of_tile | constants | of_cache, config.options)


@cached_until_cleared
def _plan(
    shapes: CallShapes, starts: bool, sinks: bool, table, apart: bool, causal: bool, at_end: bool, splits: int | None
) -> DecodePlan:
    """table: (block_size, masks, rows, entries) of a mask, or None. apart: whether heads of a group loop separately."""
    batch, heads, q_len, head_dim = shapes.q
    group = heads // shapes.k[1]
    members = 1 if apart else group
    rows = members * q_len
    alike = shapes.scaled and shapes.scale_strides[2] == 0 and (shapes.page == 0 or shapes.page >= 128)
    gpu = detect_gpu(shapes.device)
    config = decode_config(shapes.dtype, head_dim, table and table[0], rows, shapes.v_head_dim, gpu, shapes.scaled, alike)
    row_tiles = -(-rows // config.tile_m)
    tiles = batch * (heads // members) * row_tiles
    splits = splits or _choose_splits(tiles, shapes.tokens, table, config.tile_n, shapes.device)
    constants = {"TABLE_BLOCK": table[0] if table else config.tile_n, "SPARSE": table is not None}
    constants |= {"CAUSAL": causal and q_len > 1, "SEVERAL": q_len > 1, "AT_END": at_end, "HAS_STARTS": starts, "HAS_SINKS": sinks}
    numbers = heads, group, members, row_tiles, q_len, shapes.tokens, table[2] if table else 0
    return shapes.plan(config, rows, tiles, splits, constants, numbers)


def _choose_splits(tiles: int, tokens: int, table, tile_n: int, device: torch.device) -> int:
    """How many programs share a tile's keys: two per multiprocessor, but none without a step. The host knows only the number of all
    entries; a row near the end of a triangle has twice the blocks of the mean row."""
    if table is None:
        steps = -(-tokens // tile_n)
    else:
        block_size, masks, rows, entries = table
        steps = -(-2 * entries // (masks * rows)) * (block_size // tile_n)
    return max(1, min(2 * multiprocessors(device) // tiles, steps))
