"""The portable kernel for few queries: the blocks that their rows keep are divided among programs, and joined.

The ordinary kernels have one program for a tile of queries, and one query against a long cache would keep one
multiprocessor busy. Here each program takes a share of the row's entries. It stacks the queries of all heads that share
a key head as the rows of one tile, so that keys are read once for all of them. What it finds goes to memory in float32,
and the last program of a tile to arrive joins the shares in a fixed order: one launch, and the same bits every time.

Source: arXiv:2307.08691, Alg. 1 (softmax and the log of its sum); https://pytorch.org/blog/flash-decoding (the division).
"""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..common.layout import empty_out
from ..common.tiles import BITS, FLOOR, LN_2, LOG2_E, RUNS, kept_pairs, row_bounds, step_position
from ..launch.launch import arrival_counters, launch_or_repeat, multiprocessors, table_arguments
from .configs import decode_config, family_of


@triton.jit
def _page(pages, position, kv_len, TILE_N: tl.constexpr, PAGE: tl.constexpr):
    """The pages that hold the tokens of a step: one, or (TILE_N,) where a step has several; not used without pages."""
    if PAGE == 0:
        page = position
    elif PAGE < TILE_N:
        token = position + tl.arange(0, TILE_N)
        page = tl.load(pages + token // PAGE, mask=token < kv_len, other=0)
    else:
        page = tl.load(pages + position // PAGE, mask=position < kv_len, other=0)
    return page


@triton.jit
def _rows(page, token, page_stride, token_stride, PAGE: tl.constexpr, VECTOR: tl.constexpr):
    """Where the rows of these tokens begin, (TILE_N, 1), from the start of their head."""
    if PAGE == 0:
        row = token.to(tl.int64) * token_stride
    else:
        row = page.to(tl.int64) * page_stride + (token % PAGE).to(tl.int64) * token_stride
    return (row * VECTOR)[:, None]


@triton.jit
def _walk(
    state,
    q,
    k,
    v,
    pages,
    strides,
    table,
    bounds,
    begin,
    end,
    row_block,
    position,
    kv_len,
    score_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SEVERAL: tl.constexpr,
    PAGE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Folds steps begin .. end - 1 into the softmax state, in one loop for entries of all kinds: each loop would wait for keys of
    its own before it starts. bounds: of the row's kinds. position: of each row of the tile."""
    accumulator, running_max, running_sum = state
    STEPS: tl.constexpr = TABLE_BLOCK // TILE_N if SPARSE else 1
    dim, dim_v = tl.arange(0, DIM)[None, :], tl.arange(0, DIM_V)[None, :]
    in_block = position - row_block * TABLE_BLOCK if SPARSE else position
    within = (in_block >= 0) & (in_block < TABLE_BLOCK) if SPARSE else in_block >= 0
    first = step_position(table[0], begin, end, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
    page = _page(pages, first, kv_len, TILE_N, PAGE)
    for step in tl.range(begin, end):
        token = first + tl.arange(0, TILE_N)
        exists = token < kv_len
        # What lies past the last key may be anything, NaN too, which a weight of 0 would not take away.
        load, load_v = exists[:, None] & (dim < HEAD_DIM), exists[:, None] & (dim_v < HEAD_DIM_V)
        keys = tl.load(k + _rows(page, token, strides[0], strides[1], PAGE, VECTOR) + dim, mask=load, other=0.0)
        values = tl.load(v + _rows(page, token, strides[2], strides[3], PAGE, VECTOR) + dim_v, mask=load_v, other=0.0)
        kept = exists[None, :]
        if SEVERAL:
            kept = kept & within[:, None]
        if CAUSAL:
            kept = kept & (token[None, :] <= position[:, None])
        if SPARSE:
            q_in_block = tl.where(within, in_block, 0)[:, None]
            kv_in_block = ((step % STEPS) * TILE_N + tl.arange(0, TILE_N))[None, :]
            kept = kept & (q_in_block >= 0)
            # In branches, out of sight of the compiler, which would fetch masks ahead in place of keys.
            entry = step // STEPS
            if entry >= bounds[BITS]:
                kept = kept & kept_pairs(table, entry, q_in_block, kv_in_block, 0, 0, TABLE_BLOCK, SPARSE, BITS)
            elif entry >= bounds[RUNS]:
                kept = kept & kept_pairs(table, entry, q_in_block, kv_in_block, 0, 0, TABLE_BLOCK, SPARSE, RUNS)
        # The table is read one step ahead, so that no load of keys waits for it.
        first = step_position(table[0], step + 1, end, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
        page = _page(pages, first, kv_len, TILE_N, PAGE)
        scores = tl.dot(q, keys.T, input_precision="ieee")
        scores = tl.where(kept, scores * score_scale, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.math.exp2(scores - new_max[:, None])
        rescale = tl.math.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        accumulator = tl.dot(weights.to(values.dtype), values, accumulator * rescale[:, None], input_precision="ieee")
        running_max = new_max
    return accumulator, running_max, running_sum


@triton.jit
def _walk_share(
    state,
    q,
    k,
    v,
    pages,
    strides,
    table,
    row_ptr,
    row_split,
    mask,
    row_block,
    q_blocks,
    position,
    kv_len,
    score_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SEVERAL: tl.constexpr,
    PAGE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Folds this program's share of a row of the table into the softmax state: as many steps as each other program's."""
    STEPS: tl.constexpr = TABLE_BLOCK // TILE_N
    split, splits = tl.program_id(1), tl.num_programs(1)
    bounds = row_bounds(row_ptr, row_split, mask, row_block, q_blocks)
    steps = (bounds[3] - bounds[0]) * STEPS
    begin = bounds[0] * STEPS + (steps * split) // splits
    end = bounds[0] * STEPS + (steps * (split + 1)) // splits
    # fmt: off
    return _walk(state, q, k, v, pages, strides, table, bounds, begin, end, row_block, position, kv_len, score_scale,
                 HEAD_DIM, DIM, HEAD_DIM_V, DIM_V, TILE_N, TABLE_BLOCK, True, False, SEVERAL, PAGE, VECTOR)
    # fmt: on


@triton.jit
def _query_of(row, members, q_len, SEVERAL: tl.constexpr):
    """Which of the stacked heads, and which of its queries, a row is; and whether there is one."""
    if SEVERAL:
        member, query = row // q_len, row % q_len
    else:
        member, query = row, row * 0
    return member, query, member < members


@triton.jit
def _joined(shares, logs, splits, ROWS: tl.constexpr, JOINED: tl.constexpr, DIM_V: tl.constexpr):
    """The softmax state of a tile, from its shares in their order. JOINED of them are under way at a time, each thread having
    the same numbers of every share: nothing passes between threads."""
    running_max = tl.full([ROWS], FLOOR, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, DIM_V], tl.float32)
    row = tl.arange(0, ROWS)
    place = row[:, None] * DIM_V + tl.arange(0, DIM_V)[None, :]
    for first in tl.range(0, splits, JOINED):
        part_logs, parts = (), ()
        for number in tl.static_range(JOINED):
            share = first + number
            exists = row < (splits - share) * ROWS
            # Other multiprocessors wrote them: not from this one's own cache.
            part_logs += (tl.load(logs + share * ROWS + row, mask=exists, other=-float("inf"), cache_modifier=".cg"),)
            parts += (tl.load(shares + share * ROWS * DIM_V + place, mask=exists[:, None], other=0.0, cache_modifier=".cg"),)
        new_max = running_max
        for number in tl.static_range(JOINED):
            new_max = tl.maximum(new_max, part_logs[number])
        rescale = tl.math.exp2(running_max - new_max)
        running_sum *= rescale
        accumulator *= rescale[:, None]
        for number in tl.static_range(JOINED):
            weight = tl.math.exp2(part_logs[number] - new_max)
            running_sum += weight
            accumulator += parts[number] * weight[:, None]
        running_max = new_max
    return accumulator, running_max, running_sum


@triton.jit
def _finished(accumulator, running_max, running_sum):
    """(out, log2 of the softmax sum) of a softmax state: 0 and -inf where nothing was kept."""
    keeps_nothing = running_sum == 0.0
    total = tl.where(keeps_nothing, 1.0, running_sum)
    return accumulator / total[:, None], tl.where(keeps_nothing, -float("inf"), running_max + tl.math.log2(total))


@triton.jit
def _store(
    state,
    out,
    lse,
    strides,
    batch,
    head,
    heads,
    members,
    first_row,
    q_len,
    HEAD_DIM_V: tl.constexpr,
    DIM_V: tl.constexpr,
    ROWS: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """The results of rows first_row .. first_row + ROWS - 1 of the queries stacked from ``head`` on."""
    values, log = _finished(state[0], state[1], state[2])
    member, query, exists = _query_of(first_row + tl.arange(0, ROWS), members, q_len, SEVERAL)
    row = batch * strides[0] + (head + member) * strides[1] + query * strides[2]
    dim = tl.arange(0, DIM_V)[None, :]
    tl.store(out + row[:, None] + dim, values.to(out.dtype.element_ty), mask=exists[:, None] & (dim < HEAD_DIM_V))
    tl.store(lse + (batch.to(tl.int64) * heads + head + member) * q_len + query, log * LN_2, mask=exists)


NOT_SPECIALIZED = ["mask_batch_stride", "mask_head_stride", "heads", "group", "members", "row_tiles", "q_len", "kv_len", "q_blocks"]
NOT_SPECIALIZED += [f"{name}_stride" for name in ("q_batch", "q_head", "q_token", "out_batch", "out_head", "out_token")]
NOT_SPECIALIZED += [f"{name}_stride" for name in ("k_page", "k_head", "k_token", "v_page", "v_head", "v_token", "table")]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    shares,
    arrived,
    kv_lens,
    block_table,
    mask_index,
    row_ptr,
    row_split,
    col_idx,
    tile_idx,
    tile_runs,
    tile_bits,
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
    JOINED: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SEVERAL: tl.constexpr,
    AT_END: tl.constexpr,
    HAS_LENS: tl.constexpr,
    SHARED: tl.constexpr,
    PAGE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One program a tile of stacked queries and share of its keys. score_scale: scale * log2(e).

    group: query heads that share a key head. members: of them, those that are stacked, all or one. Strides of q, k and v are in
    units of VECTOR numbers. HEAD_DIM, DIM: of q and k, as it is and padded; HEAD_DIM_V, DIM_V: of v and out. Strides of pages are
    those of the batch without pages. shares: room for the results and logs of every program, where several share a tile (SHARED);
    ROWS: rows of a tile in there. arrived: int32 zeros, one a tile. AT_END: the table is square, and the queries are the last of
    the sequence; else its rows are the queries.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles, splits = tl.num_programs(0), tl.num_programs(1)
    units = heads // members
    batch = tile // row_tiles // units
    head = tile // row_tiles % units * members
    kv_head = head // group
    first_row = tile % row_tiles * TILE_M
    length = tl.maximum(tl.minimum(tl.load(kv_lens + batch), kv_len), 0) if HAS_LENS else kv_len
    first_query = length - q_len if AT_END else 0
    member, query, exists = _query_of(first_row + tl.arange(0, TILE_M), members, q_len, SEVERAL)
    position = first_query + query
    dim = tl.arange(0, DIM)[None, :]
    q_row = batch * q_batch_stride + (head + member) * q_head_stride + query * q_token_stride
    q = tl.load(q_ptr + (q_row * VECTOR)[:, None] + dim, mask=exists[:, None] & (dim < HEAD_DIM), other=0.0)
    k, v = k_ptr + kv_head * k_head_stride * VECTOR, v_ptr + kv_head * v_head_stride * VECTOR
    if PAGE == 0:
        k += batch * k_page_stride * VECTOR
        v += batch * v_page_stride * VECTOR
    pages = block_table + batch * table_stride
    strides = (k_page_stride, k_token_stride, v_page_stride, v_token_stride)
    table = (col_idx, tile_idx, tile_runs, tile_bits)
    state = (
        tl.zeros([TILE_M, DIM_V], tl.float32),
        tl.full([TILE_M], FLOOR, tl.float32),
        tl.zeros([TILE_M], tl.float32),
    )
    # fmt: off
    if SPARSE:
        mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
        first_block = tl.maximum(first_query, 0) // TABLE_BLOCK
        if SEVERAL:
            last_block = tl.maximum(first_query + q_len - 1, 0) // TABLE_BLOCK
            for row_block in tl.range(first_block, last_block + 1):
                state = _walk_share(state, q, k, v, pages, strides, table, row_ptr, row_split, mask, row_block, q_blocks, position,
                                    length, score_scale, HEAD_DIM, DIM, HEAD_DIM_V, DIM_V, TILE_N, TABLE_BLOCK, SEVERAL, PAGE,
                                    VECTOR)
        else:
            state = _walk_share(state, q, k, v, pages, strides, table, row_ptr, row_split, mask, first_block, q_blocks, position,
                                length, score_scale, HEAD_DIM, DIM, HEAD_DIM_V, DIM_V, TILE_N, TABLE_BLOCK, SEVERAL, PAGE,
                                    VECTOR)
    else:
        steps = (length + TILE_N - 1) // TILE_N
        begin, end = (steps * split) // splits, (steps * (split + 1)) // splits
        state = _walk(state, q, k, v, pages, strides, table, None, begin, end, 0, position, length, score_scale,
                      HEAD_DIM, DIM, HEAD_DIM_V, DIM_V, TILE_N, TILE_N, False, CAUSAL, SEVERAL, PAGE, VECTOR)
    # fmt: on
    out_strides = (out_batch_stride, out_head_stride, out_token_stride)
    # fmt: off
    if SHARED:
        first_row_of_tile = tile.to(tl.int64) * splits * ROWS
        logs = shares + tiles.to(tl.int64) * splits * ROWS * DIM_V + first_row_of_tile
        shares += first_row_of_tile * DIM_V
        values, log = _finished(state[0], state[1], state[2])
        row = tl.arange(0, TILE_M)
        share_row = split * ROWS + row
        # A share that keeps nothing is 0, not left out: then its loads need not wait for its log.
        tl.store(shares + share_row[:, None] * DIM_V + tl.arange(0, DIM_V)[None, :], values, mask=(row < ROWS)[:, None])
        tl.store(logs + share_row, log, mask=row < ROWS)
        # Every thread has written its part of the share before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(arrived + tile, 0)
            whole = _joined(shares, logs, splits, ROWS, JOINED, DIM_V)
            _store(whole, out_ptr, lse_ptr, out_strides, batch, head, heads, members, first_row, q_len,
                   HEAD_DIM_V, DIM_V, ROWS, SEVERAL)
    else:
        _store(state, out_ptr, lse_ptr, out_strides, batch, head, heads, members, first_row, q_len,
               HEAD_DIM_V, DIM_V, TILE_M, SEVERAL)
    # fmt: on


def attention_decode(
    q, k, v, mask, scale, *, kv_lens=None, block_table=None, causal=False, at_end=True, config=None, splits=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v's head_dim) in q's memory order, lse (batch, heads, q_len) float32.

    q: (batch, heads, q_len, head_dim). k, v: (batch, kv_heads, tokens, head_dim), or with block_table (batch, pages of a
    sequence) int32, (pages, kv_heads, page_size, head_dim), page_size a power of two; v's head_dim may be its own. All with an
    unbroken last dimension.
    kv_lens: (batch,) int32, or None: all tokens. at_end: the queries are the last of each sequence, mask is square and covers
    its tokens, or is None; causal: then none of them sees a later one. Else the mask's rows are the queries, and there are
    neither lengths nor pages. splits: programs that share a tile's keys; by default what fills the GPU.
    """
    # Heads of a group that have masks of their own walk each their own way.
    apart = mask is not None and mask.mask_index.shape[1] > 1 and mask.by_query.row_ptr.shape[0] > 1
    table = None if mask is None else (mask.block_size, *mask.by_query.row_split.shape[:2], mask.by_query.col_idx.shape[0])
    pages = None if block_table is None else tuple(block_table.shape)
    layout = tuple(q.shape), q.stride(), tuple(k.shape), k.stride(), v.shape[3], v.stride()
    shape = q.device, q.dtype, *layout, table, apart, pages, kv_lens is not None, causal, at_end, config, splits
    plan = _plan(*shape)
    out = empty_out(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    shares = arrived = lse
    if plan.shares:
        shares = torch.empty(plan.shares, dtype=torch.float32, device=q.device)
        arrived = arrival_counters(plan.grid[0], q.device)
    lens = lse if kv_lens is None else kv_lens
    where = lse if block_table is None else block_table
    tensors = q, k, v, out, lse, shares, arrived, lens, where

    def prepared():
        index, row_ptr, row_split, _, *entries = table_arguments(mask, mask and mask.by_query, lse)
        arguments = [*tensors, index, row_ptr, row_split, *entries, *plan.numbers, scale * LOG2_E.value]
        return plan.grid, arguments, plan.constants, plan.options

    launch_or_repeat(decode_kernel, mask, (*shape, scale), tensors, prepared)
    return out, lse


class DecodePlan(NamedTuple):
    """All of a launch that follows from shapes. shares: numbers in the room for shares, 0 where there are none. numbers: the
    kernel's integers from q_batch_stride on."""

    grid: tuple[int, int]
    shares: int
    numbers: tuple[int, ...]
    constants: dict
    options: dict


@lru_cache(maxsize=1024)
def _plan(
    device,
    dtype,
    q_shape,
    q_strides,
    k_shape,
    k_strides,
    v_head_dim,
    v_strides,
    table,
    apart,
    pages,
    has_lens,
    causal,
    at_end,
    config,
    splits,
) -> DecodePlan:
    """table: (block_size, masks, rows, entries) of a mask, or None. apart: whether heads of a group walk apart. pages: the shape
    of the block table, or None."""
    batch, heads, q_len, head_dim = q_shape
    group = heads // k_shape[1]
    members = 1 if apart else group
    rows = members * q_len
    config = config or decode_config(dtype, head_dim, table and table[0], rows, v_head_dim, family_of(device), q_len > 1)
    tile_m, tile_n, dim_v = config.tile_m, config.tile_n, padded_head_dim(v_head_dim)
    row_tiles = -(-rows // tile_m)
    tiles = batch * (heads // members) * row_tiles
    stored = min(tile_m, 1 << (rows - 1).bit_length())
    tokens = k_shape[2] if pages is None else k_shape[2] * pages[1]
    splits = splits or _splits(tiles, tokens, table, tile_n, device)
    strides = *q_strides[:3], *k_strides[:3], *v_strides[:3]
    vector = 16 // dtype.itemsize
    vector = vector if gcd(vector, *strides) == vector else 1
    like_q = torch.empty_strided(q_shape, q_strides, dtype=dtype, device="meta")
    constants = {
        "HEAD_DIM": head_dim,
        "DIM": padded_head_dim(head_dim),
        "HEAD_DIM_V": v_head_dim,
        "DIM_V": dim_v,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "ROWS": stored,
        "JOINED": joined_at_a_time(stored, dim_v),
        "TABLE_BLOCK": table[0] if table else tile_n,
        "SPARSE": table is not None,
        "CAUSAL": causal and q_len > 1,
        "SEVERAL": q_len > 1,
        "AT_END": at_end,
        "HAS_LENS": has_lens,
        "SHARED": splits > 1,
        "PAGE": 0 if pages is None else k_shape[2],
        "VECTOR": vector,
    }
    numbers = (
        *(stride // vector for stride in strides),
        *empty_out(like_q, v_head_dim).stride()[:3],
        0 if pages is None else pages[1],
        heads,
        group,
        members,
        row_tiles,
        q_len,
        tokens,
        table[2] if table else 0,
    )
    shares = tiles * splits * stored * (dim_v + 1) if splits > 1 else 0
    return DecodePlan((tiles, splits), shares, numbers, constants, config.options)


def joined_at_a_time(rows: int, dim: int) -> int:
    """How many shares of so many rows a program holds at once: their loads run side by side, and must stay in registers beside
    their sum."""
    return max(1, 4096 // (rows * dim))


def _splits(tiles: int, tokens: int, table, tile_n: int, device: torch.device) -> int:
    """How many programs share a tile's keys: two for each multiprocessor, but none without a step to take. From what
    the host knows; a row near the end of a triangle has twice the blocks of the mean row."""
    if table is None:
        steps = -(-tokens // tile_n)
    else:
        block_size, masks, rows, entries = table
        steps = -(-2 * entries // (masks * rows)) * (block_size // tile_n)
    return max(1, min(2 * multiprocessors(device) // tiles, steps))
