"""The portable kernel for few queries: divides the blocks that their rows keep among programs, and merges the results.

The ordinary kernels run one program per query tile, so one query over a long cache would occupy one multiprocessor. Here each
program takes a split of the row's entries. The queries of all heads that share a key head are the rows of one tile, so keys are
read once for all of these heads. Programs store results in float32. The last program of a tile to arrive merges the splits in a
fixed order: one launch, and bitwise repeatable.

Sources: arXiv:2307.08691, Alg. 1 (softmax and the log of its sum); https://pytorch.org/blog/flash-decoding (the splits).
"""

import os
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import tiles
from ..common.compat import Constants
from ..common.config import Config, padded_head_dim
from ..common.layout import empty_out
from ..common.tiles import BITS, LN_2, LOG2_E, RUNS
from ..launch.launch import arrival_counters, launch_or_repeat_alike, multiprocessors, table_arguments
from ..launch.memory import cached_until_cleared
from .configs import combined_at_a_time, decode_config, detect_gpu
from .sinks import add_sink
from .softmax import finish, init_softmax, merge, update


@dataclass(frozen=True)
class DecodeShape:
    """The constants of a kernel of few queries."""

    HEAD_DIM: int  # of q and k; later columns are not loaded
    DIM: int  # padded, as tiles have powers of two
    HEAD_DIM_V: int  # of v and out
    DIM_V: int
    TILE_M: int  # rows of stacked queries
    TILE_N: int  # keys of a step
    ROWS: int  # that a split stores: TILE_M, or fewer if there are fewer queries
    COMBINED: int  # splits that are merged at a time, in separate registers
    SPLIT: bool  # whether programs share a tile's keys
    PAGE: int  # tokens, a power of two, so that no token's page takes a division; 0 without pages
    VECTOR: int  # elements in the unit of strides; loads have 16 bytes if the unit has
    SCALED: bool  # whether keys and values are e4m3 with scales
    BY_TOKEN: bool  # whether each token has a scale; otherwise each head has one, by page or batch entry
    HAS_LENS: bool
    BLOCK: int  # keys of a table's block or of a pick
    # For calls under a table or without one:
    SPARSE: bool = True
    CAUSAL: bool = False  # whether a later key of the sequence must be masked
    SEVERAL: bool = False  # whether a head has more than one query; otherwise no row needs its position
    AT_END: bool = True  # whether the table is square, and the queries are the last of the sequence; else its rows are the queries
    HAS_STARTS: bool = False
    HAS_SINKS: bool = False
    # For calls over picks:
    SLOTS: int = 0  # picks of a query
    PADDED: int = 0  # SLOTS as a power of two

    @property
    def ONE_FACTOR(self) -> bool:
        """Whether all tokens of a step have the same scale."""
        return not self.BY_TOKEN and (self.PAGE == 0 or self.PAGE >= self.TILE_N)

    @property
    def HEADROOM(self) -> float:
        """The exponent of the largest weight, so that small weights are not lost in float16, which products with e4m3 values
        use."""
        return 15.0 if self.SCALED else 0.0


class Cache(NamedTuple):
    """Keys and values of all sequences; k_scale, v_scale: float32 factors of e4m3 ones. Strides of k and v are in units of VECTOR
    elements; without pages, page strides are batch strides. SHAPE: ``DecodeShape``."""

    k: Any
    v: Any
    block_table: Any
    k_scale: Any
    v_scale: Any
    k_page_stride: Any
    k_head_stride: Any
    k_token_stride: Any
    v_page_stride: Any
    v_head_stride: Any
    v_token_stride: Any
    scale_page_stride: Any
    scale_head_stride: Any
    table_stride: Any
    SHAPE: Any


class Sequence(NamedTuple):
    """A sequence's keys, values and scales of one key head, its row of the block table, and its number of tokens."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    pages: Any
    tokens: Any


class Queries(NamedTuple):
    """Queries of ``members`` heads from ``head`` on, as rows; a tile begins at first_row. Strides of q are in units of VECTOR
    elements. score_scale: scale * log2(e). SHAPE: ``DecodeShape``."""

    q: Any
    out: Any
    lse: Any
    sinks: Any
    q_batch_stride: Any
    q_head_stride: Any
    q_token_stride: Any
    out_batch_stride: Any
    out_head_stride: Any
    out_token_stride: Any
    batch: Any
    head: Any
    heads: Any
    members: Any
    first_row: Any
    q_len: Any
    score_scale: Any
    SHAPE: Any


class _Tile(NamedTuple):
    """A tile of q, its score_scale, and the position of each row."""

    q: Any
    score_scale: Any
    position: Any


class Steps(NamedTuple):
    """Steps begin .. end - 1. bounds: of the kinds of a table row's entries, None if the entries have no masks."""

    begin: Any
    end: Any
    row: Any = None
    bounds: Any = None


class Splits(NamedTuple):
    """A program's split of its tile. Programs that share a tile's keys store ``results``: the outputs of all tiles, then their
    logs, ROWS rows for each split. arrived: int32 zeros, one for each tile."""

    tile: Any
    number: Any
    tiles: Any
    count: Any
    results: Any
    arrived: Any


@triton.jit
def locate_sequence(cache, batch, kv_head, first, tokens):
    """``Sequence`` of ``tokens`` tokens from ``first`` on, which is 0 unless HAS_STARTS, and with pages."""
    SHAPE: tl.constexpr = cache.SHAPE
    k, v, of_head = cache.k, cache.v, kv_head * cache.scale_head_stride
    if SHAPE.HAS_STARTS:
        k += first * cache.k_token_stride * SHAPE.VECTOR
        v += first * cache.v_token_stride * SHAPE.VECTOR
        of_head += first if SHAPE.BY_TOKEN else 0
    k += kv_head * cache.k_head_stride * SHAPE.VECTOR
    v += kv_head * cache.v_head_stride * SHAPE.VECTOR
    if SHAPE.PAGE == 0:
        k += batch * cache.k_page_stride * SHAPE.VECTOR
        v += batch * cache.v_page_stride * SHAPE.VECTOR
        of_head += batch * cache.scale_page_stride
    pages = cache.block_table + batch * cache.table_stride
    return Sequence(k, v, cache.k_scale + of_head, cache.v_scale + of_head, pages, tokens)


@triton.jit
def _load_pages(sequence, position, SHAPE: tl.constexpr):
    """The pages of a step's tokens: one, or (TILE_N,) if a step spans several; unused without pages."""
    if SHAPE.PAGE == 0:
        page = position
    elif SHAPE.PAGE < SHAPE.TILE_N:
        token = position + tl.arange(0, SHAPE.TILE_N)
        page = tl.load(sequence.pages + token // SHAPE.PAGE, mask=token < sequence.tokens, other=0)
    else:
        page = tl.load(sequence.pages + position // SHAPE.PAGE, mask=position < sequence.tokens, other=0)
    return page


@triton.jit
def _load_tokens(base, page, token, exists, page_stride, token_stride, SHAPE: tl.constexpr, VALUES: tl.constexpr):
    """(TILE_N, DIM) keys of a step, or with VALUES its values, (TILE_N, DIM_V), 0 where no token exists. Memory past the last token
    may be NaN, which a weight of 0 would not cancel.

    SCALED values: (TILE_N, DIM_V / 2) int16, two neighbouring columns each: products take pairs of tokens, and in shared memory the
    GPU transposes 16 bits at a time."""
    IN_ONE: tl.constexpr = 2 if VALUES and SHAPE.SCALED else 1
    HEAD_DIM: tl.constexpr = (SHAPE.HEAD_DIM_V if VALUES else SHAPE.HEAD_DIM) // IN_ONE
    DIM: tl.constexpr = (SHAPE.DIM_V if VALUES else SHAPE.DIM) // IN_ONE
    if SHAPE.PAGE == 0:
        row = token.to(tl.int64) * token_stride
    else:
        row = page.to(tl.int64) * page_stride + (token % SHAPE.PAGE).to(tl.int64) * token_stride
    dim = tl.arange(0, DIM)[None, :]
    if IN_ONE == 2:
        base = base.to(tl.pointer_type(tl.int16), bitcast=True)
    pointers = base + (row * (SHAPE.VECTOR // IN_ONE))[:, None] + dim
    return tl.load(pointers, mask=exists[:, None] & (dim < HEAD_DIM), other=0 if IN_ONE == 2 else 0.0)


@triton.jit
def _load_factors(sequence, cache, page, first):
    """The factors of a step's keys and of its values, (TILE_N,) or one number, 0 where no token exists; unused unless SCALED."""
    SHAPE: tl.constexpr = cache.SHAPE
    if SHAPE.SCALED:
        offset = page.to(tl.int64) * cache.scale_page_stride if SHAPE.PAGE > 0 else 0
        token = first if SHAPE.ONE_FACTOR else first + tl.arange(0, SHAPE.TILE_N)
        exists = token < sequence.tokens
        if SHAPE.BY_TOKEN:
            offset += token % SHAPE.PAGE if SHAPE.PAGE > 0 else token
        of_keys, of_values = sequence.k_scale + offset, sequence.v_scale + offset
        factors = tl.load(of_keys, mask=exists, other=0.0), tl.load(of_values, mask=exists, other=0.0)
    else:
        factors = first, first
    return factors


@triton.jit
def init_state(SHAPE: tl.constexpr):
    """The softmax state before the first step, with a tuple of accumulators. SCALED: two, of even and odd columns."""
    if SHAPE.SCALED:
        half, running_max, running_sum = init_softmax(SHAPE.TILE_M, SHAPE.DIM_V // 2)
        accumulators = half, half
    else:
        accumulator, running_max, running_sum = init_softmax(SHAPE.TILE_M, SHAPE.DIM_V)
        accumulators = (accumulator,)
    return accumulators, running_max, running_sum


@triton.jit
def _unstack_rows(queries, ROWS: tl.constexpr):
    """For each of ROWS rows, its stacked head, its query, and whether it exists."""
    row = queries.first_row + tl.arange(0, ROWS)
    if queries.SHAPE.SEVERAL:
        member, query = row // queries.q_len, row % queries.q_len
    else:
        member, query = row, row * 0
    return member, query, member < queries.members


@triton.jit
def load_queries(queries, first_position):
    """``_Tile``. first_position: of a head's first query. SCALED: q in float16, each row divided by a power of two, which
    multiplies its score_scale, (TILE_M,).

    float16 holds e4m3 exactly, and the GPU converts e4m3 only to float16. A row's largest number becomes 1 to 2, so a bfloat16
    loses at most 2^-25 of it.
    """
    SHAPE: tl.constexpr = queries.SHAPE
    member, query, exists = _unstack_rows(queries, SHAPE.TILE_M)
    dim = tl.arange(0, SHAPE.DIM)[None, :]
    row = queries.batch * queries.q_batch_stride + (queries.head + member) * queries.q_head_stride + query * queries.q_token_stride
    q = tl.load(queries.q + (row * SHAPE.VECTOR)[:, None] + dim, mask=exists[:, None] & (dim < SHAPE.HEAD_DIM), other=0.0)
    score_scale = queries.score_scale
    if SHAPE.SCALED:
        PRODUCTS: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
        q = q.to(tl.float32)
        power = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, 2.0**-126)
        q, score_scale = (q / power[:, None]).to(PRODUCTS), power * score_scale
    return _Tile(q, score_scale, first_position + query)


if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):

    @triton.jit
    def _unpack_e4m3(pairs):
        """Even and odd columns, in float16, of int16 pairs of e4m3 numbers. A register holds two tokens, before and after."""
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
def _add_step(state, tile, keys, values, kept, factors, SHAPE: tl.constexpr):
    """Folds a step's keys and values into the softmax state. Products are numbered as in ``forward``.

    SCALED: factors multiply scores, weights and products in float32. A step's factors multiply weights relative to the largest
    factor, so that small weights are not lost in float16.
    """
    accumulators, running_max, running_sum = state
    scores = tl.dot(tile.q, keys.to(tile.q.dtype).T, input_precision="ieee")  # (1)
    factor = tile.score_scale
    if SHAPE.SCALED:
        factor = (factor * factors[0])[:, None] if SHAPE.ONE_FACTOR else factor[:, None] * factors[0][None, :]
    scores = tl.where(kept, scores * factor, -float("inf"))
    weights, rescale, running_max, running_sum = update(running_max, running_sum, scores, 1.0, SHAPE.HEADROOM)
    if SHAPE.SCALED:
        largest = factors[1] if SHAPE.ONE_FACTOR else tl.max(factors[1], 0)
        if not SHAPE.ONE_FACTOR:
            weights *= (factors[1] * (1.0 / tl.maximum(largest, 2.0**-100)))[None, :]
        weights = weights.to(tile.q.dtype)
        even, odd = _unpack_e4m3(values)
        accumulators = (
            accumulators[0] * rescale[:, None] + tl.dot(weights, even.to(weights.dtype), input_precision="ieee") * largest,  # (2)
            accumulators[1] * rescale[:, None] + tl.dot(weights, odd.to(weights.dtype), input_precision="ieee") * largest,
        )
    else:
        product = tl.dot(weights.to(values.dtype), values, accumulators[0] * rescale[:, None], input_precision="ieee")  # (2)
        accumulators = (product,)
    return accumulators, running_max, running_sum


@triton.jit
def add_steps(state, tile, sequence, cache, steps, table):
    """Folds steps into the softmax state, in one loop over entries of all kinds: separate loops would each wait for their first
    keys."""
    SHAPE: tl.constexpr = cache.SHAPE
    TILE_N: tl.constexpr = SHAPE.TILE_N
    STEPS: tl.constexpr = SHAPE.BLOCK // TILE_N if table.SPARSE else 1
    MASKED: tl.constexpr = steps.bounds is not None
    in_block = tile.position - steps.row * SHAPE.BLOCK if MASKED else tile.position
    within = (in_block >= 0) & (in_block < SHAPE.BLOCK) if MASKED else in_block >= 0
    first = tiles.step_position(table, steps.begin, steps.end, TILE_N)
    page = _load_pages(sequence, first, SHAPE)
    factors = _load_factors(sequence, cache, page, first)
    for step in tl.range(steps.begin, steps.end):
        token = first + tl.arange(0, TILE_N)
        exists = token < sequence.tokens
        keys = _load_tokens(sequence.k, page, token, exists, cache.k_page_stride, cache.k_token_stride, SHAPE, False)
        values = _load_tokens(sequence.v, page, token, exists, cache.v_page_stride, cache.v_token_stride, SHAPE, True)
        kept = exists[None, :]
        if SHAPE.SEVERAL:
            kept = kept & within[:, None]
        if SHAPE.CAUSAL:
            kept = kept & (token[None, :] <= tile.position[:, None])
        if MASKED:
            q_in_block = tl.where(within, in_block, 0)[:, None]
            pairs = tiles.BlockPositions(q_in_block, ((step % STEPS) * TILE_N + tl.arange(0, TILE_N))[None, :])
            kept = kept & (q_in_block >= 0)
            # In branches, from which the compiler does not prefetch: otherwise it would prefetch masks instead of keys.
            entry = step // STEPS
            if entry >= steps.bounds[BITS]:
                kept = kept & tiles.kept_pairs(table, entry, pairs, BITS)
            elif entry >= steps.bounds[RUNS]:
                kept = kept & tiles.kept_pairs(table, entry, pairs, RUNS)
        # The table and factors are read one step ahead, so no key load and no product waits for them.
        first = tiles.step_position(table, step + 1, steps.end, TILE_N)
        page = _load_pages(sequence, first, SHAPE)
        of_step, factors = factors, _load_factors(sequence, cache, page, first)
        state = _add_step(state, tile, keys, values, kept, of_step, SHAPE)
    return state


@triton.jit
def split_steps(steps, splits):
    """The first step and the end of this program's split, an equal share of the steps."""
    return (steps * splits.number) // splits.count, (steps * (splits.number + 1)) // splits.count


@triton.jit
def _add_row(state, tile, sequence, cache, splits, row, mask, rows, table):
    """Folds this program's split of a table row into the softmax state."""
    STEPS: tl.constexpr = table.BLOCK // cache.SHAPE.TILE_N
    bounds = tiles.row_bounds(rows, mask, row)
    begin, end = split_steps((bounds[3] - bounds[0]) * STEPS, splits)
    return add_steps(state, tile, sequence, cache, Steps(bounds[0] * STEPS + begin, bounds[0] * STEPS + end, row, bounds), table)


@triton.jit
def _store(state, queries, ROWS: tl.constexpr):
    """Stores the results of a tile's ROWS rows."""
    SHAPE: tl.constexpr = queries.SHAPE
    member, query, exists = _unstack_rows(queries, ROWS)
    if SHAPE.HAS_SINKS:
        state = add_sink(state, tl.load(queries.sinks + queries.head + member, mask=exists, other=-float("inf")))
    values, log = finish(state)
    head = queries.head + member
    row = queries.batch * queries.out_batch_stride + head * queries.out_head_stride + query * queries.out_token_stride
    dim = tl.arange(0, SHAPE.DIM_V)[None, :]
    place = queries.out + row[:, None] + dim
    tl.store(place, values.to(queries.out.dtype.element_ty), mask=exists[:, None] & (dim < SHAPE.HEAD_DIM_V))
    tl.store(queries.lse + (queries.batch.to(tl.int64) * queries.heads + head) * queries.q_len + query, log * LN_2, mask=exists)


@triton.jit
def _store_split(state, splits, SHAPE: tl.constexpr):
    """Stores this program's results among the splits of its tile. Returns pointers to the (results, logs) of all splits, and
    whether this program arrives last, and so merges them."""
    first_row = splits.tile.to(tl.int64) * splits.count * SHAPE.ROWS
    logs = splits.results + splits.tiles.to(tl.int64) * splits.count * SHAPE.ROWS * SHAPE.DIM_V + first_row
    results = splits.results + first_row * SHAPE.DIM_V
    values, log = finish(state)
    row = tl.arange(0, SHAPE.TILE_M)
    place = splits.number * SHAPE.ROWS + row
    # A split that keeps nothing stores 0, so its results can be loaded before its log.
    pointers = results + place[:, None] * SHAPE.DIM_V + tl.arange(0, SHAPE.DIM_V)[None, :]
    tl.store(pointers, values, mask=(row < SHAPE.ROWS)[:, None])
    tl.store(logs + place, log, mask=row < SHAPE.ROWS)
    # Every thread must have written its part of the split before one of them signals it.
    tl.debug_barrier()
    last = tl.atomic_add(splits.arrived + splits.tile, 1, sem="acq_rel", scope="gpu") == splits.count - 1
    if last:
        tl.store(splits.arrived + splits.tile, 0)
    return results, logs, last


@triton.jit
def _merge_splits(results, logs, count, SHAPE: tl.constexpr):
    """The softmax state of a tile, merged from its splits in order. COMBINED splits are in flight at a time. A thread holds the
    same elements of every split, so no data moves between threads."""
    state = init_softmax(SHAPE.ROWS, SHAPE.DIM_V)
    row = tl.arange(0, SHAPE.ROWS)
    place = row[:, None] * SHAPE.DIM_V + tl.arange(0, SHAPE.DIM_V)[None, :]
    for first in tl.range(0, count, SHAPE.COMBINED):
        some_logs, some_results = (), ()
        for number in tl.static_range(SHAPE.COMBINED):
            split = first + number
            exists = row < (count - split) * SHAPE.ROWS
            # Other multiprocessors wrote them, so loads bypass the L1 cache.
            some_logs += (tl.load(logs + split * SHAPE.ROWS + row, mask=exists, other=-float("inf"), cache_modifier=".cg"),)
            here = results + split * SHAPE.ROWS * SHAPE.DIM_V + place
            some_results += (tl.load(here, mask=exists[:, None], other=0.0, cache_modifier=".cg"),)
        state = merge(state, some_results, some_logs, SHAPE.COMBINED)
    return state


@triton.jit
def store_tile_or_split(state, queries, splits):
    """Stores out and lse of a tile, or of the program's split; a tile's last program merges its splits."""
    SHAPE: tl.constexpr = queries.SHAPE
    accumulators, running_max, running_sum = state
    if SHAPE.SCALED:
        accumulator = tl.reshape(tl.join(accumulators[0], accumulators[1]), [SHAPE.TILE_M, SHAPE.DIM_V])
    else:
        accumulator = accumulators[0]
    state = accumulator, running_max, running_sum
    if SHAPE.SPLIT:
        results, logs, last = _store_split(state, splits, SHAPE)
        if last:
            _store(_merge_splits(results, logs, splits.count, SHAPE), queries, SHAPE.ROWS)
    else:
        _store(state, queries, SHAPE.TILE_M)


@triton.jit
def _compute_tile(queries, cache, splits, kv_head, first, length, rows, table):
    """Computes out and lse of this program's query tile or split. first, length: of the sequence's tokens."""
    SHAPE: tl.constexpr = cache.SHAPE
    first_query = length - queries.q_len if SHAPE.AT_END else 0
    sequence = locate_sequence(cache, queries.batch, kv_head, first, length)
    tile = load_queries(queries, first_query)
    state = init_state(SHAPE)
    if SHAPE.SPARSE:
        mask = tiles.load_mask_number(rows, queries.batch, queries.head)
        first_block = tl.maximum(first_query, 0) // SHAPE.BLOCK
        if SHAPE.SEVERAL:
            last_block = tl.maximum(first_query + queries.q_len - 1, 0) // SHAPE.BLOCK
            for block in tl.range(first_block, last_block + 1):
                state = _add_row(state, tile, sequence, cache, splits, block, mask, rows, table)
        else:
            state = _add_row(state, tile, sequence, cache, splits, first_block, mask, rows, table)
    else:
        begin, end = split_steps((sequence.tokens + SHAPE.TILE_N - 1) // SHAPE.TILE_N, splits)
        state = add_steps(state, tile, sequence, cache, Steps(begin, end), table)
    store_tile_or_split(state, queries, splits)


# The arguments of strides, in every kernel of few queries.
STRIDES = [f"{name}_stride" for name in ("q_batch", "q_head", "q_token", "k_page", "k_head", "k_token", "v_page", "v_head")]
STRIDES += [f"{name}_stride" for name in ("v_token", "out_batch", "out_head", "out_token", "scale_page", "scale_head", "table")]
NOT_SPECIALIZED = [*STRIDES, "mask_batch_stride", "mask_head_stride"]
NOT_SPECIALIZED += ["heads", "group", "members", "row_tiles", "q_len", "kv_len", "q_blocks"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, split_results, arrived, kv_lens, kv_starts, block_table, k_scale, v_scale, sinks,
    table, mask_batch_stride, mask_head_stride,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_token_stride: tl.int64,
    k_page_stride: tl.int64, k_head_stride: tl.int64, k_token_stride: tl.int64,
    v_page_stride: tl.int64, v_head_stride: tl.int64, v_token_stride: tl.int64,
    out_batch_stride: tl.int64, out_head_stride: tl.int64, out_token_stride: tl.int64,
    scale_page_stride: tl.int64, scale_head_stride: tl.int64, table_stride: tl.int64,
    heads, group, members, row_tiles, q_len, kv_len, q_blocks, score_scale,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """One program per tile of stacked queries and split of its keys. score_scale: scale * log2(e).

    group: query heads that share a key head. members: how many of them are stacked, all or one. Strides: see ``Cache`` and
    ``Queries``. split_results, arrived: see ``Splits``. kv_lens, kv_starts, sinks: used if SHAPE, a ``DecodeShape``, says so.
    """
    # Loaded here rather than where they are used, which takes up to six registers more.
    tile, number = tl.program_id(0), tl.program_id(1)
    tile_count, count = tl.num_programs(0), tl.num_programs(1)
    units = heads // members
    batch = tile // row_tiles // units
    head = tile // row_tiles % units * members
    length = tl.maximum(tl.minimum(tl.load(kv_lens + batch), kv_len), 0) if SHAPE.HAS_LENS else kv_len
    start = 0
    if SHAPE.HAS_STARTS:
        start = tl.maximum(tl.load(kv_starts + batch), 0)
        length = tl.maximum(length - start, 0)
    _compute_tile(
        Queries(q_ptr, out_ptr, lse_ptr, sinks, q_batch_stride, q_head_stride, q_token_stride, out_batch_stride, out_head_stride,
                out_token_stride, batch, head, heads, members, tile % row_tiles * SHAPE.TILE_M, q_len, score_scale, SHAPE),
        Cache(k_ptr, v_ptr, block_table, k_scale, v_scale, k_page_stride, k_head_stride, k_token_stride, v_page_stride,
              v_head_stride, v_token_stride, scale_page_stride, scale_head_stride, table_stride, SHAPE),
        Splits(tile, number, tile_count, count, split_results, arrived), head // group, start, length,
        tiles.TableRows(table, mask_batch_stride, mask_head_stride, q_blocks),
        tiles.TableEntries(*table[4:], SHAPE.BLOCK, SHAPE.SPARSE),
    )  # fmt: skip


def attention_decode(
    q, k, v, mask, scale, *,
    kv_lens=None, kv_starts=None, block_table=None, k_scale=None, v_scale=None, sinks=None, causal=False, at_end=True, splits=None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out (batch, heads, q_len, v's head_dim) in q's memory order, lse (batch, heads, q_len) float32.

    q, k, v, kv_lens, block_table, k_scale, v_scale, kv_starts: as for ``decode`` in ``core.backends``, with a contiguous last
    dimension. sinks: (heads,) or None. at_end: the queries are the last of each sequence, and mask is None or square and covers its
    tokens; causal: without a mask, no query then sees a later key. Without at_end, the mask's rows are the queries, without lengths
    and pages. splits: programs that share a tile's keys; by default enough to fill the GPU.
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
        arguments += [tiles.TableTensors(*tensors), batch_stride, head_stride, *plan.numbers, scale * LOG2_E.value]
        recording.launch(decode_kernel, (plan.grid, arguments, plan.constants, plan.options), (sinks is not None and sinks.dtype,))
        return out, lse

    key = scale, kv_lens is None, kv_starts is None, sinks is None, causal, at_end, splits
    return tuple(launch_or_repeat_alike(decode_kernel, mask, key, inputs, run)[:2])


class DecodePlan(NamedTuple):
    """Everything in a launch that depends only on shapes. split_numbers: how many numbers the splits of all tiles store; 0 without
    splits. numbers: the kernel's integers."""

    grid: tuple[int, int]
    split_numbers: int
    numbers: tuple[int, ...]
    constants: dict
    options: dict

    def arguments(self, recording, q, k, v, *optional: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, list]:
        """(out, lse, the kernel's arguments before its table). Placeholders replace absent splits and optional tensors."""
        out = recording.fresh(empty_out(q, v.shape[3]))
        lse = recording.fresh(torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
        workspace = lse, lse
        if self.split_numbers:
            results = recording.fresh(torch.empty(self.split_numbers, dtype=torch.float32, device=q.device))
            workspace = results, recording.each_time(partial(arrival_counters, self.grid[0], q.device))
        return out, lse, [q, k, v, out, lse, *workspace, *(lse if t is None else t for t in optional)]


class CallShapes(NamedTuple):
    """The layouts of a call's tensors, which determine a plan. scale_strides: of page or batch entry, head and token; None without
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

    def plan(self, config: Config, rows: int, tiles: int, splits: int, numbers: tuple[int, ...], **constants: int) -> DecodePlan:
        """rows: of the heads in a tile. numbers, constants: of only one kernel."""
        dims = self.q[3], padded_head_dim(self.q[3]), self.v_head_dim, padded_head_dim(self.v_head_dim)
        stored = min(config.tile_m, 1 << (rows - 1).bit_length())
        strides = [stride for of in (self.q_strides, self.k_strides, self.v_strides) for stride in of[:3]]
        # A vector has 16 bytes if all strides are multiples of 16 bytes. Strides of e4m3 are even.
        vector = 16 if self.scaled else 16 // self.dtype.itemsize
        vector = vector if gcd(vector, *strides) == vector else 1 + self.scaled
        of_tile = config.tile_m, config.tile_n, stored, combined_at_a_time(stored, dims[3]), splits > 1
        of_cache = self.page, vector, self.scaled, self.scaled and self.scale_strides[2] != 0, self.has_lens
        like_q = torch.empty_strided(self.q, self.q_strides, dtype=self.dtype, device="meta")
        integers = (
            *(stride // vector for stride in strides),
            *empty_out(like_q, self.v_head_dim).stride()[:3],
            *(self.scale_strides or (0, 0))[:2],
            0 if self.pages is None else self.pages[1],
            *numbers,
        )
        split_numbers = tiles * splits * stored * (dims[3] + 1) if splits > 1 else 0
        shape = DecodeShape(*dims, *of_tile, *of_cache, **constants)
        return DecodePlan((tiles, splits), split_numbers, integers, {"SHAPE": Constants(shape)}, config.options)


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
    numbers = heads, group, members, row_tiles, q_len, shapes.tokens, table[2] if table else 0
    of_table = {"BLOCK": table[0] if table else config.tile_n, "SPARSE": table is not None, "AT_END": at_end}
    of_queries = {"SEVERAL": q_len > 1, "CAUSAL": causal and q_len > 1, "HAS_STARTS": starts, "HAS_SINKS": sinks}
    return shapes.plan(config, rows, tiles, splits, numbers, **of_table, **of_queries)


def _choose_splits(tiles: int, tokens: int, table, tile_n: int, device: torch.device) -> int:
    """How many programs share a tile's keys: two per multiprocessor in total, each with at least one step."""
    if table is None:
        steps = -(-tokens // tile_n)
    else:
        block_size, masks, rows, entries = table  # a row near the end of a triangle has twice the mean row's blocks
        steps = -(-2 * entries // (masks * rows)) * (block_size // tile_n)
    return max(1, min(2 * multiprocessors(device) // tiles, steps))
