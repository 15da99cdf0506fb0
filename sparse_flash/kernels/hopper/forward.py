"""The forward kernel for Hopper: persistent programs of a warp that plans, a warp that loads and two warp groups that compute.

The planning warp takes tiles from the queue. The loading warp walks the table and keeps rings of key and value tiles filled
by the copy engine. Each warp group holds 64 queries. Products of one step run on the tensor cores while the softmax of
another runs on the ordinary units: within a tile, the scores of the next step are computed beside the weighted values of
this one; across tiles, the first scores of the next tile beside the last values of this one, so that a short row leaves no
gap.

Sources: arXiv:2407.08608 (FlashAttention-3: warp groups, asynchronous products); arXiv:2205.14135, Alg. 5 (block-sparse).
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.config import padded_head_dim
from ..common.gluon import async_load, async_store, fresh_zero, of_tensor, record, store_wait
from ..common.tiles import FLOOR, LN_2, LOG2_E, store_tile
from ..launch import tuned
from ..launch.launch import Recording, multiprocessors, table_arguments
from ..launch.launch import described as described_for_triton
from ..launch.replay import known_call
from .configs import forward_config
from .descriptors import comes_in_parts, described, heads_together, tile_queue
from .dropout import line_stream, zero_dropped
from .masks import LOWEST, all_below, row_bits, row_run, where_bits
from .scheduler import allocate_notes, leave, mask_of, next_tile, slot_and_head, tell, told, work_item

TILE = gl.constexpr(128)  # queries, and keys, of a step
HALF = gl.constexpr(64)  # queries of a warp group
JOINED = tl.constexpr(32)  # queries of a program that joins parts

# Nothing about lengths, heads or masks compiles anew.
NOT_SPECIALIZED = [
    "mask_batch_stride",
    "mask_head_stride",
    "heads",
    "group",
    "q_len",
    "kv_len",
    "items",
    "tiles",
    "heads_together",
    "parts",
]


@record
class ForwardArguments:
    """All that the warps share: the arguments of the launch, shared memory and its barriers."""

    q_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    out_tensor: tma.tensor_descriptor
    lse_ptr: gl.tensor
    part_out: gl.tensor
    part_lse: gl.tensor
    parts: gl.tensor  # tiles of a head
    mask_index: gl.tensor
    work: gl.tensor
    col_idx: gl.tensor
    tile_idx: gl.tensor
    tile_runs: gl.tensor
    tile_bits: gl.tensor
    mask_batch_stride: gl.tensor
    mask_head_stride: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    items: gl.tensor
    tiles: gl.tensor
    heads_together: gl.tensor
    queue: gl.tensor
    score_scale: gl.tensor
    seed: gl.tensor
    dropout_p: gl.tensor
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    notes: gl.shared_memory_descriptor
    noted: gl.shared_memory_descriptor
    DIM: gl.constexpr
    STAGES: gl.constexpr
    TABLE_BLOCK: gl.constexpr
    SPARSE: gl.constexpr
    SPLIT: gl.constexpr  # whether some rows come in parts
    DROPOUT: gl.constexpr


# What the planning warp tells of a tile: its first query, or -1 after the last tile; its head, counted over the batch; where
# full, run and bit entries begin, and the last end; the first key of its first step; and 0, or if the tile is a part of a
# row, its number from 1. Partial blocks come first, whose masks take time, beside the start of the tile.
FIELDS = gl.constexpr(8)


@gluon.jit
def _tile(p, number):
    """A dense walk has an entry for each key tile; a ragged last one counts as a run entry."""
    T: gl.constexpr = p.TABLE_BLOCK // TILE
    slot, flat_head = slot_and_head(number, p.items * T, p.tiles // (p.items * T), p.heads_together)
    if p.SPARSE:
        mask = mask_of(p, flat_head // p.heads, flat_head % p.heads)
        row, begin, runs, bits, end, part = work_item(p.work, mask, p.items, slot // T)
        first_query = row * p.TABLE_BLOCK + slot % T * TILE
    else:
        first_query = slot * TILE
        begin = slot * 0
        runs = p.kv_len // TILE
        end = (p.kv_len + TILE - 1) // TILE
        bits = end
        part = begin
    first = gl.where(end > runs, runs, begin) * T
    part = gl.where(part > 0, (part - 1) * T + slot % T + 1, 0)
    return first_query, flat_head, begin, runs, bits, end, _position(p, first, end * T), part


@gluon.jit
def _position(p, step, stop):
    """The first key of a step that counts from the table's start; 0 past the end of a row."""
    T: gl.constexpr = p.TABLE_BLOCK // TILE
    if p.SPARSE:
        block = gl.load(p.col_idx + step // T, mask=step < stop, other=0)
        position = gl.where(step < stop, block * p.TABLE_BLOCK + step % T * TILE, 0)
    else:
        position = step * TILE
    return position


@gluon.jit
def _plan(p):
    """The planning warp."""
    turn = 0
    number = gl.program_id(0)
    while number < p.tiles:
        tell(p.notes, turn % 2, _tile(p, number))
        mbarrier.arrive(p.noted.index(turn % 2), count=1)
        turn += 1
        # Not before the program is about to start the tile before, so that no tile waits here while others are idle.
        mbarrier.wait(p.q_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
        number = next_tile(p.queue)
    tell(p.notes, turn % 2, (-1, 0, 0, 0, 0, 0, 0, 0))
    mbarrier.arrive(p.noted.index(turn % 2), count=1)
    leave(p.queue)


@gluon.jit
def _load_queries(p, turn, batch, head, first_query):
    slot = turn % 2
    mbarrier.wait(p.q_empty.index(slot), ((turn // 2) & 1) ^ 1)
    mbarrier.expect(p.q_full.index(slot), TILE * p.DIM * 2)
    for half in gl.static_range(2):
        source = [batch, head, first_query + half * HALF, 0]
        async_load(p.q_tensor, source, p.q_full.index(slot), of_tensor(p.q.index(slot * 2 + half), p.q_tensor))


@gluon.jit
def _load_step(p, batch, kv_head, position, step, VALUES: gl.constexpr):
    BYTES: gl.constexpr = TILE * p.DIM * 2
    stage = step % p.STAGES
    mbarrier.wait(p.k_empty.index(stage), ((step // p.STAGES) & 1) ^ 1)
    mbarrier.expect(p.k_full.index(stage), BYTES)
    keys = of_tensor(p.k.index(stage), p.k_tensor)
    async_load(p.k_tensor, [batch, kv_head, position, 0], p.k_full.index(stage), keys)
    if VALUES:
        mbarrier.wait(p.v_empty.index(stage), ((step // p.STAGES) & 1) ^ 1)
        mbarrier.expect(p.v_full.index(stage), BYTES)
        values = of_tensor(p.v.index(stage), p.v_tensor)
        async_load(p.v_tensor, [batch, kv_head, position, 0], p.v_full.index(stage), values)


@gluon.jit
def _load(p):
    """The loading warp: for each tile its queries, then keys and values of each step, in the order that they are used."""
    T: gl.constexpr = p.TABLE_BLOCK // TILE
    step = 0
    turn = 0
    mbarrier.wait(p.noted.index(0), 0)
    first_query = told(p.notes, 0, 0, FIELDS)
    while first_query >= 0:
        flat_head = told(p.notes, turn % 2, 1, FIELDS)
        begin = told(p.notes, turn % 2, 2, FIELDS) * T
        runs = told(p.notes, turn % 2, 3, FIELDS) * T
        end = told(p.notes, turn % 2, 5, FIELDS) * T
        position = told(p.notes, turn % 2, 6, FIELDS)
        batch = flat_head // p.heads
        head = flat_head % p.heads
        _load_queries(p, turn, batch, head, first_query)
        # A row that keeps nothing takes one step of nothing.
        entry = gl.where(end > runs, runs, begin)
        for _ in range(gl.maximum(end - begin, 1)):
            # The table is read one step ahead, so that no load of keys waits for it.
            entry = gl.where(entry + 1 >= end, begin, entry + 1)
            upcoming = _position(p, entry, end)
            _load_step(p, batch, head // p.group, position, step, True)
            position = upcoming
            step += 1
        turn += 1
        mbarrier.wait(p.noted.index(turn % 2), (turn // 2) & 1)
        first_query = told(p.notes, turn % 2, 0, FIELDS)
    # After its last tile a program computes the first scores of one more, and drops them.
    _load_queries(p, turn, 0, 0, 0)
    _load_step(p, 0, 0, 0, step, False)


@gluon.jit
def _mask_words(p, entry, bits, first_query, HALF_INDEX: gl.constexpr, layout: gl.constexpr):
    """What the mask tile of a step, which counts from the table's start, keeps of this half's queries; for ``where_bits``. bits:
    the first step of bit entries."""
    T: gl.constexpr = p.TABLE_BLOCK // TILE
    if not p.SPARSE:
        words = all_below(p.kv_len - entry * TILE, HALF, TILE, layout)
    else:
        tile = gl.load(p.tile_idx + entry // T)
        row = first_query % p.TABLE_BLOCK + HALF_INDEX * HALF
        if entry < bits:
            words = row_run(p.tile_runs + tile * p.TABLE_BLOCK + row, entry % T * TILE, HALF, TILE, layout)
        else:
            WORDS: gl.constexpr = p.TABLE_BLOCK // 32
            first = p.tile_bits + (tile.to(gl.int64) * p.TABLE_BLOCK + row) * WORDS + entry % T * (TILE // 32)
            words = row_bits(first, HALF, TILE, WORDS, layout)
    return words


@gluon.jit
def _softmax(scores, running_max, running_sum, score_scale):
    new_max = gl.maximum(running_max, gl.max(scores, 1) * score_scale)
    weights = gl.exp2(scores * score_scale - new_max[:, None])
    rescale = gl.exp2(running_max - new_max)
    return weights, rescale, new_max, running_sum * rescale + gl.sum(weights, 1)


@gluon.jit
def _kept(p, weights, layout: gl.constexpr):
    """Weights in the form in which they wait for their product. Where they cross from loop to loop this is int32, each of two
    16-bit numbers: as such numbers, the compiler takes pairs apart and puts them together again in every step."""
    dtype: gl.constexpr = p.q_tensor.dtype
    if not p.SPARSE:
        kept = gl.convert_layout(weights.to(dtype), layout)
    else:
        low, high = weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]).split()
        round_pair: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
        kept = gl.inline_asm_elementwise(round_pair, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    return kept


@gluon.jit
def _operand(p, kept, layout: gl.constexpr):
    """What was ``_kept``, as the left operand of a product."""
    if not p.SPARSE:
        operand = kept
    else:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [kept], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        pairs = gl.join(low, high).reshape([kept.shape[0], kept.shape[1] * 2])
        operand = gl.convert_layout(pairs.to(p.q_tensor.dtype, bitcast=True), layout)
    return operand


@gluon.jit
def _walk(p, state, place, step, begin, end, first_query, bits, stream, zeros, HALF_INDEX: gl.constexpr, MASKED: gl.constexpr):
    """Folds steps begin .. end - 1, all of full or all of partial blocks, into the softmax state of a tile: each turn issues the
    scores of its own step and the weighted values of the step before. Runs and bits have one walk: each copy of it takes the
    compiler a second."""
    accumulator, kept, running_max, running_sum = state
    score_layout: gl.constexpr = zeros.type.layout
    out_layout: gl.constexpr = accumulator.type.layout
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    for entry in range(begin, end):
        v_stage = step % p.STAGES
        v_phase = (step // p.STAGES) & 1
        step += 1
        stage = step % p.STAGES
        phase = (step // p.STAGES) & 1
        q = p.q.index(place * 2 + HALF_INDEX + fresh_zero(step))
        keys = p.k.index(stage)
        values = p.v.index(v_stage)
        if MASKED:
            words = _mask_words(p, entry, bits, first_query, HALF_INDEX, score_layout)
        if p.DROPOUT:
            position = _position(p, entry, end)
        mbarrier.wait(p.k_full.index(stage), phase)
        started_scores = warpgroup_mma(q, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(p.v_full.index(v_stage), v_phase)
        operand = _operand(p, kept, operand_layout)
        started_values = warpgroup_mma(operand, values, accumulator, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(started_scores,))
        mbarrier.arrive(p.k_empty.index(stage), count=1)
        if MASKED:
            scores = where_bits(scores, words, LOWEST)
        weights, rescale, running_max, running_sum = _softmax(scores, running_max, running_sum, p.score_scale)
        if p.DROPOUT:
            weights = zero_dropped(p, weights, stream, first_query + HALF_INDEX * HALF, position)
        accumulator = warpgroup_mma_wait(0, deps=(started_values,))
        mbarrier.arrive(p.v_empty.index(v_stage), count=1)
        accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(1, out_layout))[:, None]
        kept = _kept(p, weights, operand_layout)
    return (accumulator, kept, running_max, running_sum), step


@gluon.jit
def _compute(p, HALF_INDEX: gl.constexpr):
    """A warp group: half the queries of each tile."""
    T: gl.constexpr = p.TABLE_BLOCK // TILE
    dtype: gl.constexpr = p.q_tensor.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DIM, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    zeros = gl.zeros([HALF, TILE], gl.float32, layout=score_layout)

    mbarrier.wait(p.noted.index(0), 0)
    mbarrier.wait(p.q_full.index(0), 0)
    mbarrier.wait(p.k_full.index(0), 0)
    q = p.q.index(HALF_INDEX)
    keys = p.k.index(0)
    started_scores = warpgroup_mma(q, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(started_scores,))
    mbarrier.arrive(p.k_empty.index(0), count=1)

    step = 0
    turn = 0
    first_query = told(p.notes, 0, 0, FIELDS)
    while first_query >= 0:
        place = turn % 2
        flat_head = told(p.notes, place, 1, FIELDS)
        stream = line_stream(p, flat_head)
        begin = told(p.notes, place, 2, FIELDS) * T
        runs = told(p.notes, place, 3, FIELDS) * T
        bits = told(p.notes, place, 4, FIELDS) * T
        end = told(p.notes, place, 5, FIELDS) * T
        if end > runs:
            scores = where_bits(scores, _mask_words(p, runs, bits, first_query, HALF_INDEX, score_layout), LOWEST)
        elif begin == end:
            scores = gl.full([HALF, TILE], -float("inf"), gl.float32, layout=score_layout)
        floor = gl.full([HALF], FLOOR, gl.float32, layout=row_layout)
        weights, _, running_max, running_sum = _softmax(scores, floor, gl.zeros_like(floor), p.score_scale)
        if p.DROPOUT:
            position = told(p.notes, place, 6, FIELDS)
            weights = zero_dropped(p, weights, stream, first_query + HALF_INDEX * HALF, position)
        if turn > 0:
            # The tile before is stored by now: its queries' place is free.
            store_wait(0)
            mbarrier.arrive(p.q_empty.index(1 - place), count=1)
        accumulator = gl.zeros([HALF, p.DIM], gl.float32, layout=out_layout)
        state = (accumulator, _kept(p, weights, operand_layout), running_max, running_sum)
        # The first step, done above, is of a partial block where the row has one.
        if p.SPARSE:
            state, step = _walk(p, state, place, step, runs + 1, end, first_query, bits, stream, zeros, HALF_INDEX, True)
        first = begin + (end == runs).to(gl.int32)
        state, step = _walk(p, state, place, step, first, runs, first_query, bits, stream, zeros, HALF_INDEX, False)
        accumulator, kept, running_max, running_sum = state

        v_stage = step % p.STAGES
        v_phase = (step // p.STAGES) & 1
        step += 1
        turn += 1
        stage = step % p.STAGES
        upcoming = turn % 2
        values = p.v.index(v_stage)
        q = p.q.index(upcoming * 2 + HALF_INDEX)
        keys = p.k.index(stage)
        mbarrier.wait(p.v_full.index(v_stage), v_phase)
        operand = _operand(p, kept, operand_layout)
        started_values = warpgroup_mma(operand, values, accumulator, is_async=True)
        mbarrier.wait(p.noted.index(upcoming), (turn // 2) & 1)
        mbarrier.wait(p.q_full.index(upcoming), (turn // 2) & 1)
        mbarrier.wait(p.k_full.index(stage), (step // p.STAGES) & 1)
        started_scores = warpgroup_mma(q, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        accumulator = warpgroup_mma_wait(1, deps=(started_values,))
        mbarrier.arrive(p.v_empty.index(v_stage), count=1)

        keeps_nothing = running_sum == 0.0
        total = gl.where(keeps_nothing, 1.0, running_sum)
        divisor = total
        if p.DROPOUT:
            divisor *= 1.0 - p.dropout_p
        share = gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, out_layout))
        result = accumulator * share[:, None]
        lse = gl.where(keeps_nothing, -float("inf"), (running_max + gl.log2(total)) * LN_2)
        rows = gl.arange(0, HALF, layout=row_layout)
        first_row = first_query + HALF_INDEX * HALF
        if p.SPLIT:
            # No branch: with a product under way, the compiler would run them all one by one. A part's rows go past the end.
            part = told(p.notes, place, 7, FIELDS)
            line = (flat_head * p.parts + part - 1).to(gl.int64) * TILE + HALF_INDEX * HALF
            down = gl.arange(0, HALF, layout=gl.SliceLayout(1, out_layout))[:, None]
            across = gl.arange(0, p.DIM, layout=gl.SliceLayout(0, out_layout))[None, :]
            gl.store(p.part_out + (line * p.DIM + down * p.DIM + across), result, mask=(part > 0) & (down + across >= 0))
            gl.store(p.part_lse + line + rows, lse, mask=(part > 0) & (rows >= 0))
            first_row = gl.where(part > 0, p.q_len, first_row)
        out = p.q.index(place * 2 + HALF_INDEX)
        out.store(result.to(dtype))
        fence_async_shared()
        async_store(p.out_tensor, [flat_head // p.heads, flat_head % p.heads, first_row, 0], of_tensor(out, p.out_tensor))
        query = first_row + rows
        gl.store(p.lse_ptr + flat_head.to(gl.int64) * p.q_len + query, lse, mask=query < p.q_len)

        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        mbarrier.arrive(p.k_empty.index(stage), count=1)
        first_query = told(p.notes, upcoming, 0, FIELDS)
    store_wait(0)


@gluon.jit
def _compute_first(p):
    _compute(p, 0)


@gluon.jit
def _compute_second(p):
    _compute(p, 1)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_forward_kernel(
    q_tensor,
    k_tensor,
    v_tensor,
    out_tensor,
    lse_ptr,
    part_out,
    part_lse,
    parts,
    mask_index,
    work,
    col_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    mask_batch_stride,
    mask_head_stride,
    heads,
    group,
    q_len,
    kv_len,
    items,
    tiles,
    heads_together,
    queue,
    score_scale,
    seed,
    dropout_p,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    TABLE_BLOCK: gl.constexpr,
    SPARSE: gl.constexpr,
    SPLIT: gl.constexpr,
    DROPOUT: gl.constexpr,
):
    # Of two dimensions, as products take them. Of every view Triton 3.9 follows each byte: views in the walks take it seconds.
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(q_tensor.dtype, [4, HALF, DIM], flat)
    k = gl.allocate_shared_memory(k_tensor.dtype, [STAGES, TILE, DIM], flat)
    v = gl.allocate_shared_memory(v_tensor.dtype, [STAGES, TILE, DIM], flat)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    noted = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(noted.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
        mbarrier.init(k_empty.index(i), count=2)
    # The copy engine, which reports to these barriers, must see that they are ready.
    fence_async_shared()
    notes = allocate_notes(2, FIELDS)
    # fmt: off
    p = ForwardArguments(
        q_tensor, k_tensor, v_tensor, out_tensor, lse_ptr, part_out, part_lse, parts, mask_index, work, col_idx,
        tile_idx, tile_runs, tile_bits, mask_batch_stride, mask_head_stride, heads, group, q_len, kv_len, items, tiles,
        heads_together, queue, score_scale, seed, dropout_p, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        notes, noted, DIM, STAGES, TABLE_BLOCK, SPARSE, SPLIT, DROPOUT
    )
    # fmt: on
    gl.warp_specialize(
        [(_compute_first, (p,)), (_compute_second, (p,)), (_load, (p,)), (_plan, (p,))], [4, 1, 1], [REGISTERS, 24, 24]
    )


@triton.jit(do_not_specialize=["heads", "q_len", "mask_batch_stride", "mask_head_stride", "listed"])
def join_kernel(
    out_tensor,
    lse_ptr,
    part_out,
    part_lse,
    table_parts,
    mask_index,
    mask_batch_stride,
    mask_head_stride,
    heads,
    q_len,
    listed,
    DIM: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    """The output of rows that came in parts, each weighed by its share of the softmax's sum: one program ``JOINED`` queries of
    a line of ``Table.parts``, of which there are ``listed``, and a head."""
    STEPS: tl.constexpr = TABLE_BLOCK // JOINED
    TILES: tl.constexpr = TABLE_BLOCK // 128
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
    entry = table_parts + (mask * listed + tl.program_id(0) // STEPS) * 4
    row, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    start = tl.program_id(0) % STEPS * JOINED
    # There are as many lines as parts; the last name none.
    if count > 0:
        rows = tl.arange(0, JOINED)
        place = tl.program_id(1).to(tl.int64) * listed * TILES + first * TILES + start // 128
        line = place * 128 + start % 128 + rows
        running_max = tl.full([JOINED], FLOOR, tl.float32)
        running_sum = tl.zeros([JOINED], tl.float32)
        accumulator = tl.zeros([JOINED, DIM], tl.float32)
        for _ in range(count):
            lse = tl.load(part_lse + line)
            new_max = tl.maximum(running_max, lse)
            rescale, weight = tl.exp(running_max - new_max), tl.exp(lse - new_max)
            part = tl.load(part_out + line[:, None] * DIM + tl.arange(0, DIM)[None, :])
            accumulator = accumulator * rescale[:, None] + part * weight[:, None]
            running_sum = running_sum * rescale + weight
            running_max = new_max
            line += TILES * 128
        keeps_nothing = running_sum == 0.0
        total = tl.where(keeps_nothing, 1.0, running_sum)
        first_query = row * TABLE_BLOCK + start
        store_tile(out_tensor, accumulator / total[:, None], batch, head, first_query, JOINED, DIM)
        query = first_query + rows
        lse = tl.where(keeps_nothing, -float("inf"), running_max + tl.log(total))
        tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * q_len + query, lse, mask=query < q_len)


def attention_forward(q, k, v, mask, scale, terms=None, config=None, beside=None):
    """out like q, lse (batch, heads, q_len) float32.

    q, k, v: float16 or bfloat16, unbroken rows, base and strides multiples of 16 bytes. mask: table blocks of 128 or 256.
    terms: of dropout, or None. beside: see ``launch``.
    """
    parts, dropout_p = _parts(mask), terms.dropout_p if terms else None
    tensors = _tensors(q, k, v, terms, parts)
    recording = Recording(mask, _key(q, k, v, scale, terms, config), tensors, facts=parts)
    recording.launch(attention_forward_kernel, _forward_launch(*tensors, mask, scale, parts, dropout_p, config), beside=beside)
    _, _, _, out, lse, part_out, part_lse, *_ = tensors
    if parts:
        recording.launch(join_kernel, _join_launch(out, lse, part_out, part_lse, mask))
    recording.finish()
    return out, lse


def repeated_forward(q, k, v, mask, scale, terms=None):
    """The same by launches that were made before, or None; any q, k and v."""
    known = known_call(mask, _key(q, k, v, scale, terms))
    if known is None:
        return None
    tensors = _tensors(q, k, v, terms, known.facts)
    return tensors[3:5] if known.again(tensors) else None


def _key(q, k, v, scale, terms, config=None) -> tuple:
    layout = q.shape, q.stride(), k.shape, k.stride(), v.stride(), q.dtype, q.device
    return attention_forward_kernel.fn, tuned.times_read(), *layout, scale, config, terms.dropout_p if terms else None


def _tensors(q, k, v, terms, parts: int) -> tuple[torch.Tensor, ...]:
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    part_out = part_lse = lse
    if parts:
        part_lse = torch.empty((q.shape[0] * q.shape[1] * parts, TILE.value), dtype=torch.float32, device=q.device)
        part_out = torch.empty((*part_lse.shape, padded_head_dim(q.shape[3])), dtype=torch.float32, device=q.device)
    return q, k, v, out, lse, part_out, part_lse, tile_queue(q.device), terms.seed if terms else lse


def _parts(mask) -> int:
    """How many tiles of 128 queries, of all rows that come in parts, write parts."""
    split = comes_in_parts(mask and mask.by_query)
    return mask.by_query.parts.shape[1] * (mask.block_size // TILE.value) if split else 0


def _forward_launch(q, k, v, out, lse, part_out, part_lse, queue, seed, mask, scale, parts, dropout_p, config):
    """(grid, arguments, constants, options)"""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group, dim = heads // kv_heads, padded_head_dim(head_dim)
    block_size = mask.block_size if mask else TILE.value
    config = config or forward_config(q.dtype, dim, mask.block_size if mask else None, q.device)
    items = mask.by_query.work.shape[1] if mask else triton.cdiv(q_len, TILE.value)
    tiles = items * (block_size // TILE.value) * batch * heads
    index, _, _, _, col_idx, tile_idx, tile_runs, tile_bits, *strides = table_arguments(mask, mask and mask.by_query, lse)
    arguments = [
        described(q, [1, 1, HALF.value, dim]),
        described(k, [1, 1, TILE.value, dim]),
        described(v, [1, 1, TILE.value, dim]),
        described(out, [1, 1, HALF.value, dim]),
        lse,
        part_out,
        part_lse,
        parts,
        index,
        mask.by_query.work if mask else lse,
        col_idx,
        tile_idx,
        tile_runs,
        tile_bits,
        *strides,
        heads,
        group,
        q_len,
        kv_len,
        items,
        tiles,
        min(heads_together(2 * dim, kv_len) * group, batch * heads),
        queue,
        scale * LOG2_E.value,
        seed,
        dropout_p or 0.0,
    ]
    constants = {"DIM": dim, "STAGES": config.stages, "REGISTERS": config.registers}
    constants |= {"TABLE_BLOCK": block_size, "SPARSE": mask is not None, "SPLIT": parts > 0}
    constants |= {"DROPOUT": dropout_p is not None}
    return (min(tiles, multiprocessors(q.device)), 1), arguments, constants, config.options


def _join_launch(out, lse, part_out, part_lse, mask):
    """(grid, arguments, constants, options)"""
    batch, heads, q_len = lse.shape
    dim = part_out.shape[-1]
    table = mask.by_query.parts
    index, *_, mask_batch_stride, mask_head_stride = table_arguments(mask, mask.by_query, lse)
    arguments = [described_for_triton(out, JOINED.value, dim), lse, part_out, part_lse, table, index]
    arguments += [mask_batch_stride, mask_head_stride, heads, q_len, table.shape[1]]
    grid = (table.shape[1] * (mask.block_size // JOINED.value), batch * heads)
    return grid, arguments, {"DIM": dim, "TABLE_BLOCK": mask.block_size}, {"num_warps": 4}
