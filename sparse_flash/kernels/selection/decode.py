"""The portable kernel for few queries that each picked blocks of keys: visits the picked blocks of a cache and no others.

As in ``decode``, programs share a query's keys, and the last one of a tile to arrive combines their results in a fixed order: one
launch, and bitwise repeatable. A tile has the query heads that share a choice as its rows.

Source: arXiv:2307.08691, Alg. 1 (softmax and the log of its sum); https://pytorch.org/blog/flash-decoding (the splits).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.tiles import LN_2, LOG2_E
from ..launch.launch import launch_or_repeat_alike, multiprocessors
from ..launch.memory import cached_until_cleared
from ..portable.configs import decode_config, detect_gpu
from ..portable.decode import (
    STRIDES,
    Cache,
    CacheScales,
    CallShapes,
    DecodePlan,
    Splits,
    add_step,
    init_state,
    join_accumulators,
    load_factors,
    load_pages,
    load_step_keys,
    load_step_values,
    merge_splits,
    normalize_state,
    prepare_queries,
    store_split,
)
from .division import padded_count


@triton.jit
def _position_of_step(picks, step, end, BLOCK: tl.constexpr, TILE_N: tl.constexpr):
    """The first key of a step over the picks of a query."""
    STEPS: tl.constexpr = BLOCK // TILE_N
    return tl.load(picks + step // STEPS, mask=step < end, other=0) * BLOCK + step % STEPS * TILE_N


@triton.jit
def _state_of_steps(
    q, position, k, v, pages, scales, cache, picks, begin, end, score_scale, BLOCK: tl.constexpr, TILE_M: tl.constexpr
):
    """The softmax state of steps begin .. end - 1 over the picks of a query at this position."""
    q, score_scale = prepare_queries(q, score_scale, cache)
    state = init_state(cache, TILE_M)
    TILE_N: tl.constexpr = cache.TILE_N
    first = _position_of_step(picks, begin, end, BLOCK, TILE_N)
    page = load_pages(pages, cache, first)
    factors = load_factors(scales, cache, page, first)
    for step in tl.range(begin, end):
        token = first + tl.arange(0, TILE_N)
        kept = token <= position
        keys, values = load_step_keys(k, cache, page, token, kept), load_step_values(v, cache, page, token, kept)
        # Picks and factors are read one step ahead, so no key load and no product waits for them.
        first = _position_of_step(picks, step + 1, end, BLOCK, TILE_N)
        page = load_pages(pages, cache, first)
        of_step, factors = factors, load_factors(scales, cache, page, first)
        state = add_step(state, q, keys, values, kept[None, :], score_scale, of_step, cache)
    return join_accumulators(state, cache)


class _Members(NamedTuple):
    """Members ``first`` and later of a query's heads, which share a choice. q, out, lse: rows of member 0. Strides are from one
    member to the next; q_stride in units of the cache's VECTOR. TILE_M: rows of a tile."""

    q: Any
    out: Any
    lse: Any
    first: Any
    members: Any
    q_stride: Any
    out_stride: Any
    lse_stride: Any
    TILE_M: Any


@triton.jit
def _store(state, rows, cache, ROWS: tl.constexpr):
    values, log = normalize_state(state)
    member = rows.first + tl.arange(0, ROWS).to(tl.int64)
    dim = tl.arange(0, cache.DIM_V)[None, :]
    place = rows.out + (member * rows.out_stride)[:, None] + dim
    exists = member < rows.members
    tl.store(place, values.to(rows.out.dtype.element_ty), mask=exists[:, None] & (dim < cache.HEAD_DIM_V))
    tl.store(rows.lse + member * rows.lse_stride, log * LN_2, mask=exists)


@triton.jit
def _compute(rows, position, k, v, pages, scales, cache, picks, steps, splits, score_scale, BLOCK: tl.constexpr):
    """out and lse of this program's rows, or its split of them. steps: over all picks of the query."""
    member = rows.first + tl.arange(0, rows.TILE_M).to(tl.int64)
    dim = tl.arange(0, cache.DIM)[None, :]
    load = (member < rows.members)[:, None] & (dim < cache.HEAD_DIM)
    q = tl.load(rows.q + (member * rows.q_stride * cache.VECTOR)[:, None] + dim, mask=load, other=0.0)
    begin, end = (steps * splits.number) // splits.count, (steps * (splits.number + 1)) // splits.count
    state = _state_of_steps(q, position, k, v, pages, scales, cache, picks, begin, end, score_scale, BLOCK, rows.TILE_M)
    if splits.SPLIT:
        results, logs, last = store_split(state, splits, rows.TILE_M, cache.DIM_V)
        if last:
            _store(merge_splits(results, logs, splits, cache.DIM_V), rows, cache, splits.ROWS)
    else:
        _store(state, rows, cache, rows.TILE_M)


@triton.jit(do_not_specialize=[*STRIDES, "pickers", "groups", "group", "members", "row_tiles", "q_len", "kv_len"])
def selection_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, split_results, arrived, kv_lens, block_table, k_scale, v_scale, picks,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_token_stride: tl.int64,
    k_page_stride: tl.int64, k_head_stride: tl.int64, k_token_stride: tl.int64,
    v_page_stride: tl.int64, v_head_stride: tl.int64, v_token_stride: tl.int64,
    out_batch_stride: tl.int64, out_head_stride: tl.int64, out_token_stride: tl.int64,
    scale_page_stride: tl.int64, scale_head_stride: tl.int64, table_stride: tl.int64,
    pickers, groups, group, members, row_tiles, q_len, kv_len, score_scale,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, ROWS: tl.constexpr, COMBINED: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    PADDED: tl.constexpr, EVERY: tl.constexpr, HAS_LENS: tl.constexpr, SPLIT: tl.constexpr,
    PAGE: tl.constexpr, VECTOR: tl.constexpr, SCALED: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """One program for a query, up to TILE_M of the heads that share its choice, and a share of its picked blocks.

    picks: (batch, pickers, groups, SLOTS) int32, ascending, then -1; EVERY queries share a group's. members: query heads that share
    a choice. group: query heads that share a key head. row_tiles: tiles of members. score_scale: scale * log2(e). PADDED: SLOTS as
    a power of two. The rest as for ``decode_kernel``.
    """
    tile, number = tl.program_id(0), tl.program_id(1)
    tiles, count = tl.num_programs(0), tl.num_programs(1)
    first = tile % row_tiles * TILE_M
    query = tile // row_tiles % q_len
    picker = tile // row_tiles // q_len % pickers
    batch = (tile // row_tiles // q_len // pickers).to(tl.int64)
    head = (picker * members).to(tl.int64)
    length = tl.maximum(tl.minimum(tl.load(kv_lens + batch), kv_len), 0) if HAS_LENS else kv_len
    position = length - q_len + query
    picks += ((batch * pickers + picker) * groups + query // EVERY) * SLOTS
    slot = tl.arange(0, PADDED)
    pick = tl.load(picks + slot, mask=slot < SLOTS, other=-1)
    # The first ones, as picks ascend.
    steps = tl.sum(((pick >= 0) & (pick * BLOCK <= position)).to(tl.int32), 0) * (BLOCK // TILE_N)
    k = k_ptr + head // group * k_head_stride * VECTOR
    v = v_ptr + head // group * v_head_stride * VECTOR
    of_head = head // group * scale_head_stride + (batch * scale_page_stride if PAGE == 0 else 0)
    if PAGE == 0:
        k += batch * k_page_stride * VECTOR
        v += batch * v_page_stride * VECTOR
    q = q_ptr + (batch * q_batch_stride + head * q_head_stride + query * q_token_stride) * VECTOR
    out = out_ptr + batch * out_batch_stride + head * out_head_stride + query * out_token_stride
    lse = lse_ptr + (batch * pickers * members + head) * q_len + query
    _compute(
        _Members(q, out, lse, first, members, q_head_stride, out_head_stride, q_len, TILE_M), position, k, v,
        block_table + batch * table_stride,
        CacheScales(k_scale + of_head, v_scale + of_head, scale_page_stride),
        Cache(k_ptr, v_ptr, k_page_stride, k_head_stride, k_token_stride, v_page_stride, v_head_stride, v_token_stride,
              block_table, table_stride, length, HEAD_DIM, DIM, HEAD_DIM_V, DIM_V, TILE_N, PAGE, VECTOR, SCALED,
              BY_TOKEN),
        picks, steps, Splits(tile, number, tiles, count, split_results, arrived, SPLIT, ROWS, COMBINED), score_scale, BLOCK,
    )  # fmt: skip


def selection_decode(
    q, k, v, picks, block_size, every, scale, *, kv_lens=None, block_table=None, k_scale=None, v_scale=None, splits=None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out (batch, heads, q_len, v's head_dim) in q's memory order, lse (batch, heads, q_len) float32.

    q, k, v, kv_lens, block_table, k_scale, v_scale: as for ``attention_decode`` in ``decode``. picks: (batch, heads that pick,
    groups, n) int32, contiguous, of blocks of block_size keys, ascending, each once, then -1; every: queries of a group. splits:
    programs that share a query's blocks; by default enough to fill the GPU.
    """
    inputs = [t for t in (q, k, v, picks, kv_lens, block_table, k_scale, v_scale) if t is not None]

    def run(recording):
        shapes = CallShapes.of(q, k, v, kv_lens, block_table, k_scale)
        plan = _plan(shapes, tuple(picks.shape), block_size, every, splits)
        out, lse, arguments = plan.arguments(recording, q, k, v, kv_lens, block_table, k_scale, v_scale)
        arguments += [picks, *plan.numbers, scale * LOG2_E.value]
        recording.launch(selection_decode_kernel, (plan.grid, arguments, plan.constants, plan.options))
        return out, lse

    key = block_size, every, scale, kv_lens is None, splits
    return tuple(launch_or_repeat_alike(selection_decode_kernel, None, key, inputs, run)[:2])


@cached_until_cleared
def _plan(shapes: CallShapes, picks: tuple[int, ...], block_size: int, every: int, splits: int | None) -> DecodePlan:
    batch, heads, q_len, head_dim = shapes.q
    pickers, groups, slots = picks[1:]
    members = heads // pickers
    gpu = detect_gpu(shapes.device)
    config = decode_config(shapes.dtype, head_dim, block_size, members, shapes.v_head_dim, gpu, shapes.scaled)
    row_tiles = -(-members // config.tile_m)
    tiles = batch * pickers * q_len * row_tiles
    # Two programs per multiprocessor, but none without a step.
    splits = splits or max(1, min(2 * multiprocessors(shapes.device) // tiles, slots * (block_size // config.tile_n)))
    constants = {"BLOCK": block_size, "SLOTS": slots, "PADDED": padded_count(slots), "EVERY": every}
    numbers = pickers, groups, heads // shapes.k[1], members, row_tiles, q_len, shapes.tokens
    return shapes.plan(config, members, tiles, splits, constants, numbers)
