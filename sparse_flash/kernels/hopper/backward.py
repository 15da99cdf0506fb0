"""The backward pass for Hopper: one pass over key tiles that computes dK and dV, and adds to dQ as it goes.

Persistent programs: one warp plans, one loads, eight compute, and one hands results to the copy engine, which adds tiles of
dQ to an fp32 array in global memory. Scores lie transposed, keys along rows, so that they are the left operand of dV
without a way through shared memory. The scores of the next step, or of the next tile's first, are computed beside the
other products of this one, so that the tensor cores have work while the exponentials run.

Tiles are added to dQ in whatever order they come, and floating-point sums depend on theirs. Where gradients shall repeat bit
for bit, tiles are added as integers, in units of a power of two for each query: see ``bound_kernel``.

Sources: arXiv:2205.14135, Alg. 4 (one pass, dQ accumulated); arXiv:2407.08608, sec. 3 (warp roles).
"""

from typing import NamedTuple

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
from ..common.gluon import async_add, async_load, async_store, barrier, fresh_zero, of_tensor, record, store_wait, view
from ..common.tiles import BITS, FULL, LOG2_E, RUNS, load_tile, store_tile
from ..launch import tuned
from ..launch.launch import Recording, multiprocessors, table_arguments
from ..launch.launch import described as described_for_triton
from ..launch.replay import known_call
from .configs import BACKWARD_OF_DROPOUT, backward_config
from .descriptors import FLOAT_LAYOUT, ROW_LAYOUT, comes_in_parts, described, heads_together, tile_queue
from .dropout import kept_operand, line_stream, negate_dropped, score_gradients
from .masks import ZERO, column_bits, where_column_bits, where_run
from .scheduler import allocate_notes, leave, mask_of, next_tile, slot_and_head, tell, told, work_item

KEYS = gl.constexpr(128)  # of a tile
ROWS = 64  # queries of a program of the kernel before

# Nothing about lengths, heads or masks compiles anew.
NOT_SPECIALIZED = [
    "mask_batch_stride",
    "mask_head_stride",
    "heads",
    "group",
    "q_len",
    "padded_q_len",
    "padded_kv_len",
    "kv_lines",
    "items",
    "tiles",
    "heads_together",
]


@record
class BackwardArguments:
    """All that the warps share: the arguments of the launch, shared memory and its barriers."""

    q_tensor: tma.tensor_descriptor
    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    dout_tensor: tma.tensor_descriptor
    dq_rows: tma.tensor_descriptor
    dk_tensor: tma.tensor_descriptor
    dv_tensor: tma.tensor_descriptor
    dkv_rows: tma.tensor_descriptor
    lse_rows: tma.tensor_descriptor
    delta_rows: tma.tensor_descriptor
    unit_rows: tma.tensor_descriptor
    mask_index: gl.tensor
    work: gl.tensor
    row_idx: gl.tensor
    tile_idx: gl.tensor
    tile_runs: gl.tensor
    tile_bits: gl.tensor
    mask_batch_stride: gl.tensor
    mask_head_stride: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    padded_q_len: gl.tensor
    padded_kv_len: gl.tensor
    kv_lines: gl.tensor
    items: gl.tensor
    tiles: gl.tensor
    heads_together: gl.tensor
    queue: gl.tensor
    scale: gl.tensor
    score_scale: gl.tensor
    seed: gl.tensor
    dropout_p: gl.tensor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    unit: gl.shared_memory_descriptor
    dscores: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    step_done: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    notes: gl.shared_memory_descriptor
    noted: gl.shared_memory_descriptor
    DIM: gl.constexpr
    QUERIES: gl.constexpr  # of a step
    Q_STAGES: gl.constexpr  # one more than DOUT_STAGES
    DOUT_STAGES: gl.constexpr
    TABLE_BLOCK: gl.constexpr
    SPARSE: gl.constexpr
    ADDED: gl.constexpr  # whether several tiles make one of dK and dV
    FIXED: gl.constexpr  # whether gradients do not depend on the order in which tiles are added
    DROPOUT: gl.constexpr
    RAGGED: gl.constexpr  # whether a dense walk's last tile has fewer keys


# What the planning warp tells of a tile: its first key, or -1 after the last tile; its query head, counted over the batch;
# where its full, run and bit entries begin, and the last end; and the first query of its first step.
FIELDS = gl.constexpr(7)


@gluon.jit
def _tile(p, number):
    T: gl.constexpr = p.TABLE_BLOCK // KEYS
    STEPS: gl.constexpr = p.TABLE_BLOCK // p.QUERIES if p.SPARSE else 1
    slot, flat_head = slot_and_head(number, p.items * T, p.tiles // (p.items * T), p.heads_together)
    if p.SPARSE:
        mask = mask_of(p, flat_head // p.heads, flat_head % p.heads)
        row, begin, runs, bits, end, _ = work_item(p.work, mask, p.items, slot // T)
        first_key = row * p.TABLE_BLOCK + slot % T * KEYS
    else:
        first_key = slot * KEYS
        begin = slot * 0
        runs = (p.q_len + p.QUERIES - 1) // p.QUERIES
        bits = runs
        end = runs
    position = _position(p, _first_step(p, first_key, begin * STEPS, runs * STEPS, end * STEPS), end * STEPS)
    return first_key, flat_head, begin, runs, bits, end, position


@gluon.jit
def _plan(p):
    """The planning warp."""
    turn = 0
    number = gl.program_id(0)
    while number < p.tiles:
        tell(p.notes, turn % 2, _tile(p, number))
        mbarrier.arrive(p.noted.index(turn % 2), count=1)
        turn += 1
        # Not before the tile two turns back is done, so that no tile waits here while other programs are idle.
        mbarrier.wait(p.k_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
        number = next_tile(p.queue)
    tell(p.notes, turn % 2, (-1, 0, 0, 0, 0, 0, 0))
    mbarrier.arrive(p.noted.index(turn % 2), count=1)
    leave(p.queue)


@gluon.jit
def _told_tile(p, turn):
    """What was told of a tile: (first_key, batch, head, begin, runs, bits, end), in steps."""
    STEPS: gl.constexpr = p.TABLE_BLOCK // p.QUERIES if p.SPARSE else 1
    place = turn % 2
    mbarrier.wait(p.noted.index(place), (turn // 2) & 1)
    first_key = told(p.notes, place, 0, FIELDS)
    flat_head = told(p.notes, place, 1, FIELDS)
    begin = told(p.notes, place, 2, FIELDS) * STEPS
    runs = told(p.notes, place, 3, FIELDS) * STEPS
    bits = told(p.notes, place, 4, FIELDS) * STEPS
    end = told(p.notes, place, 5, FIELDS) * STEPS
    return first_key, flat_head // p.heads, flat_head % p.heads, begin, runs, bits, end


@gluon.jit
def _first_step(p, first_key, begin, runs, end):
    """Where a walk starts; it goes up to the end, and on from begin. Partial blocks come first. A dense walk starts beside
    its keys: if all programs added to the same tile of dQ at once, they would wait for each other."""
    if p.SPARSE:
        first = gl.where(end > runs, runs, begin)
    else:
        first = first_key // p.QUERIES % end
    return first


@gluon.jit
def _position(p, step, stop):
    """The first query of a step that counts from the table's start; 0 past the end of a walk."""
    STEPS: gl.constexpr = p.TABLE_BLOCK // p.QUERIES
    if p.SPARSE:
        block = gl.load(p.row_idx + step // STEPS, mask=step < stop, other=0)
        position = gl.where(step < stop, block * p.TABLE_BLOCK + step % STEPS * p.QUERIES, 0)
    else:
        position = step * p.QUERIES
    return position


@gluon.jit
def _first_query(p, step, stop, exists, first_key):
    """The first query of a step for the computing warps, whose dense walk counts from where it starts: see ``_first_step``."""
    STEPS: gl.constexpr = p.TABLE_BLOCK // p.QUERIES
    if p.SPARSE:
        block = gl.load(p.row_idx + step // STEPS, mask=exists, other=0)
        position = block * p.TABLE_BLOCK + step % STEPS * p.QUERIES
    else:
        step += _first_step(p, first_key, step, stop, stop)
        position = gl.where(step < stop, step, step - stop) * p.QUERIES
    return position


@gluon.jit
def _load_keys(p, turn, batch, kv_head, first_key):
    place = turn % 2
    mbarrier.wait(p.k_empty.index(place), ((turn // 2) & 1) ^ 1)
    mbarrier.expect(p.k_full.index(place), KEYS * p.DIM * 2)
    async_load(p.k_tensor, [batch, kv_head, first_key, 0], p.k_full.index(place), of_tensor(p.k.index(place), p.k_tensor))


@gluon.jit
def _load_queries(p, step, batch, head, line, position):
    stage = step % p.Q_STAGES
    mbarrier.wait(p.step_done.index(stage), ((step // p.Q_STAGES) & 1) ^ 1)
    ROWS: gl.constexpr = 2 if p.FIXED else 1
    mbarrier.expect(p.q_full.index(stage), p.QUERIES * p.DIM * 2 + p.QUERIES * 4 * ROWS)
    if p.FIXED:
        async_load(p.unit_rows, [line + position], p.q_full.index(stage), p.unit.index(stage))
    async_load(p.lse_rows, [line + position], p.q_full.index(stage), p.lse.index(stage))
    async_load(p.q_tensor, [batch, head, position, 0], p.q_full.index(stage), of_tensor(p.q.index(stage), p.q_tensor))


@gluon.jit
def _load(p):
    """The loading warp: for each tile its keys and values, and queries and their gradients of each step, in the order that
    they are used."""
    SIZE: gl.constexpr = p.QUERIES * p.DIM * 2 + p.QUERIES * 4
    step = 0
    turn = 0
    first_key, batch, head, begin, runs, _, end = _told_tile(p, 0)
    while first_key >= 0:
        kv_head = head // p.group
        _load_keys(p, turn, batch, kv_head, first_key)
        first = step
        position = told(p.notes, turn % 2, 6, FIELDS)
        line = (batch * p.heads + head) * p.padded_q_len
        entry = _first_step(p, first_key, begin, runs, end)
        # A column that keeps nothing takes one step of nothing.
        for _ in range(gl.maximum(end - begin, 1)):
            # The table is read one step ahead, so that no load waits for it.
            entry = gl.where(entry + 1 >= end, begin, entry + 1)
            upcoming = _position(p, entry, end)
            _load_queries(p, step, batch, head, line, position)
            if step == first:
                mbarrier.wait(p.v_empty, (turn & 1) ^ 1)
                mbarrier.expect(p.v_full, KEYS * p.DIM * 2)
                async_load(p.v_tensor, [batch, kv_head, first_key, 0], p.v_full, of_tensor(p.v.index(0), p.v_tensor))
            stage = step % p.DOUT_STAGES
            # Free once the step that held this stage is done; of all steps, its flag is that of Q's ring.
            held = step + p.Q_STAGES - p.DOUT_STAGES
            mbarrier.wait(p.step_done.index(held % p.Q_STAGES), ((held // p.Q_STAGES) & 1) ^ 1)
            mbarrier.expect(p.dout_full.index(stage), SIZE)
            async_load(p.delta_rows, [line + position], p.dout_full.index(stage), p.delta.index(stage))
            async_load(
                p.dout_tensor, [batch, head, position, 0], p.dout_full.index(stage), of_tensor(p.dout.index(stage), p.dout_tensor)
            )
            position = upcoming
            step += 1
        turn += 1
        first_key, batch, head, begin, runs, _, end = _told_tile(p, turn)
    # After its last tile a program computes the first scores of one more, and drops them.
    _load_keys(p, turn, 0, 0, 0)
    _load_queries(p, step, 0, 0, 0, 0)


@gluon.jit
def _send(p):
    """The warp that sends results on: adds tiles of dQ to global memory, and at the end of a tile stores its dK and dV, or
    adds them. It also tells the loading warp what has been used, so that the computing warps need not wait for each other
    to do so."""
    ROWS: gl.constexpr = p.QUERIES * p.DIM // 256
    HALF: gl.constexpr = KEYS * p.DIM // 512
    step = 0
    sent = 0
    turn = 0
    first_key, batch, head, begin, runs, _, end = _told_tile(p, 0)
    while first_key >= 0:
        line = (batch * p.heads + head) * p.padded_q_len
        entry = _first_step(p, first_key, begin, runs, end)
        last = step + gl.maximum(end - begin, 1) - 1
        for _ in range(gl.maximum(end - begin, 1)):
            position = _position(p, entry, end)
            mbarrier.wait(p.dq_full, sent & 1)
            # Who hands over dQ has done all products of the step.
            mbarrier.arrive(p.step_done.index(step % p.Q_STAGES), count=1)
            mbarrier.arrive(p.v_empty, count=1, pred=step == last)
            tile = view(p.dq, p.dq_rows.dtype, [ROWS, 256], p.dq_rows.layout)
            async_add(p.dq_rows, [(line + position) // p.QUERIES * ROWS, 0], tile)
            store_wait(0)
            mbarrier.arrive(p.dq_empty, count=1)
            entry = gl.where(entry + 1 >= end, begin, entry + 1)
            step += 1
            sent += 1
        place = p.k.index(turn % 2)
        kv_head = head // p.group
        if p.ADDED:
            # In a fixed order they are summed by the kernel after, over query heads.
            line = (batch * p.heads + head if p.FIXED else batch * (p.heads // p.group) + kv_head) * p.padded_kv_len + first_key
            low = view(p.dq, gl.float32, [HALF, 256], p.dkv_rows.layout)
            high = view(place, gl.float32, [HALF, 256], p.dkv_rows.layout)
            for grad in range(2):
                row = (line + grad * p.kv_lines) // KEYS * (2 * HALF)
                mbarrier.wait(p.dq_full, sent & 1)
                if p.FIXED:
                    async_store(p.dkv_rows, [row, 0], low)
                    async_store(p.dkv_rows, [row + HALF, 0], high)
                else:
                    async_add(p.dkv_rows, [row, 0], low)
                    async_add(p.dkv_rows, [row + HALF, 0], high)
                store_wait(0)
                mbarrier.arrive(p.dq_empty, count=1)
                sent += 1
        else:
            mbarrier.wait(p.dq_full, sent & 1)
            async_store(p.dk_tensor, [batch, kv_head, first_key, 0], of_tensor(place, p.dk_tensor))
            values = view(p.dq, p.q_tensor.dtype, [1, 1, KEYS, p.DIM], p.dv_tensor.layout)
            async_store(p.dv_tensor, [batch, kv_head, first_key, 0], values)
            store_wait(0)
            mbarrier.arrive(p.dq_empty, count=1)
            sent += 1
        mbarrier.arrive(p.k_empty.index(turn % 2), count=1)
        turn += 1
        first_key, batch, head, begin, runs, _, end = _told_tile(p, turn)


@gluon.jit
def _mask_words(p, entry, exists, first_key, KIND: gl.constexpr, layout: gl.constexpr):
    """What the mask tile of a step says of its queries; of nothing, where there is no tile."""
    STEPS: gl.constexpr = p.TABLE_BLOCK // p.QUERIES
    tile = gl.load(p.tile_idx + entry // STEPS, mask=exists, other=0)
    query = entry % STEPS * p.QUERIES
    if KIND == RUNS:
        columns = gl.arange(0, p.QUERIES, layout=gl.SliceLayout(0, layout))
        words = gl.load(p.tile_runs + tile * p.TABLE_BLOCK + query + columns, mask=exists & (columns >= 0), other=0)
    else:
        WORDS: gl.constexpr = p.TABLE_BLOCK // 32
        first = p.tile_bits + (tile.to(gl.int64) * p.TABLE_BLOCK + query) * WORDS + first_key % p.TABLE_BLOCK // 32
        words = column_bits(first, KEYS, p.QUERIES, WORDS, layout)
    return words


@gluon.jit
def _masked(p, weights, words, first_key, KIND: gl.constexpr):
    """Weights of a step, keys along rows, with 0 where its mask tile keeps nothing."""
    if KIND == RUNS:
        rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, weights.type.layout))[:, None] + first_key % p.TABLE_BLOCK
        masked = where_run(weights, (words & 0xFFFF)[None, :], (words >> 16)[None, :], rows, ZERO)
    else:
        masked = where_column_bits(weights, words, ZERO)
    return masked


@gluon.jit
def _in_register_order(grad, WARPS_DOWN: gl.constexpr):
    """A tile of a gradient as rows of 256 numbers in the order that threads hold them, so that each thread writes whole pieces of
    16 bytes, beside its neighbours'. ``finish_kernel`` puts them back."""
    ROWS: gl.constexpr = grad.shape[0]
    DIM: gl.constexpr = grad.shape[1]
    ACROSS: gl.constexpr = 8 // WARPS_DOWN
    pieces = grad.reshape([WARPS_DOWN, 2, 8, ACROSS, DIM // (16 * ACROSS), 2, 4, 2]).permute((1, 4, 3, 0, 2, 6, 5, 7))
    return pieces.reshape([ROWS * DIM // 256, 256])


@gluon.jit
def _rounded(numbers):
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [numbers], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _walk(p, state, step, last, turn, begin, end, exists, first_key, stream, zeros, dq_zeros, KIND: gl.constexpr):
    """Adds steps begin .. end - 1, all of one kind, to dK, dV and dQ.

    state: dK, dV and the scores of the step, (keys, queries). last: the tile's last step, beside which the scores of the
    next tile's first are computed.
    """
    dk, dv, scores = state
    dtype: gl.constexpr = p.q_tensor.dtype
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    WARPS_DOWN: gl.constexpr = p.QUERIES // 16
    SENT: gl.constexpr = 2 if p.ADDED else 1  # times that a tile's end goes through the place of dQ
    score_layout: gl.constexpr = zeros.type.layout
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    for entry in range(begin, end):
        stage = step % p.Q_STAGES
        dout_stage = step % p.DOUT_STAGES
        q = p.q.index(stage)
        dout = p.dout.index(dout_stage)
        values = p.v.index(fresh_zero(step))
        if KIND != FULL:
            words = _mask_words(p, entry, exists, first_key, KIND, score_layout)
        if p.DROPOUT:
            position = _first_query(p, entry, end, exists, first_key)
        mbarrier.wait(p.dout_full.index(dout_stage), (step // p.DOUT_STAGES) & 1)
        started = warpgroup_mma(values, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
        lse = p.lse.index(stage).load(column)
        weights = gl.exp2(scores * p.score_scale - lse[None, :])
        if KIND != FULL:
            weights = _masked(p, weights, words, first_key, KIND)
        if p.RAGGED:
            # Keys that do not exist have scores of 0, which may lie far above lse. Infinite weights would make dQ NaN, finite ones
            # meet rows of zeros. No weight of a key that exists is more than 1.
            weights = gl.minimum(weights, 1.0, propagate_nan=tl.PropagateNan.ALL)
        if p.DROPOUT:
            # What is dropped goes as the sign, so that neither words nor truth values have to be kept beside the sums.
            weights = negate_dropped(p, weights, stream, position, first_key)
        dweights = warpgroup_mma_wait(0, deps=(started,))
        delta = p.delta.index(dout_stage).load(column)
        if p.DROPOUT:
            operand = gl.convert_layout(kept_operand(weights, dtype), operand_layout)
        else:
            operand = gl.convert_layout(weights.to(dtype), operand_layout)
        started_dv = warpgroup_mma(operand, dout, dv, is_async=True)
        # Over at once: what follows stays behind the product's start, where the compiler would put it before.
        mbarrier.wait(p.dout_full.index(dout_stage), (step // p.DOUT_STAGES) & 1)
        if p.DROPOUT:
            dscores = score_gradients(weights, dweights, delta[None, :])
        else:
            dscores = weights * (dweights - delta[None, :])
        p.dscores.index(0).store(dscores.to(dtype))
        ds_operand = gl.convert_layout(dscores.to(dtype), operand_layout)
        started_dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        fence_async_shared()
        barrier()
        keys = p.k.index(turn % 2 + fresh_zero(step))
        stored = p.dscores.index(fresh_zero(step))
        started_dq = warpgroup_mma(stored.permute((1, 0)), keys, dq_zeros, use_acc=False, is_async=True)
        dv, dk = warpgroup_mma_wait(
            1,
            deps=(
                started_dv,
                started_dk,
            ),
        )
        upcoming_stage = (step + 1) % p.Q_STAGES
        upcoming_turn = turn + (step == last).to(gl.int32)
        mbarrier.wait(p.q_full.index(upcoming_stage), ((step + 1) // p.Q_STAGES) & 1)
        mbarrier.wait(p.k_full.index(upcoming_turn % 2), (upcoming_turn // 2) & 1)
        upcoming_q = p.q.index(upcoming_stage)
        upcoming_keys = p.k.index(upcoming_turn % 2)
        started_scores = warpgroup_mma(upcoming_keys, upcoming_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(started_dq,))
        mbarrier.wait(p.dq_empty, ((step + turn * SENT) & 1) ^ 1)
        if p.FIXED:
            unit = p.unit.index(stage).load(gl.SliceLayout(1, dq.type.layout))
            tile = _in_register_order(_rounded(dq * unit[:, None]), WARPS_DOWN)
            view(p.dq, gl.int32, tile.shape, p.dq_rows.layout).store(tile)
        else:
            p.dq.store(_in_register_order(dq, WARPS_DOWN))
        fence_async_shared()
        mbarrier.arrive(p.dq_full, count=1)

        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        step += 1
    return (dk, dv, scores), step


@gluon.jit
def _compute(p):
    """The computing warps: each half of them holds 64 keys."""
    dtype: gl.constexpr = p.q_tensor.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, p.QUERIES, 16])
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, p.DIM, 16])
    # Two warp groups share dQ: each takes half its queries, or where those are 64, half its columns.
    DOWN: gl.constexpr = p.QUERIES // 16  # warps
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, 8 // DOWN], [16, p.DIM * DOWN // 8, 16])
    zeros = gl.zeros([KEYS, p.QUERIES], gl.float32, layout=score_layout)
    dq_zeros = gl.zeros([p.QUERIES, p.DIM], gl.float32, layout=dq_layout)

    mbarrier.wait(p.k_full.index(0), 0)
    mbarrier.wait(p.q_full.index(0), 0)
    q = p.q.index(0)
    keys = p.k.index(0)
    started = warpgroup_mma(keys, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(started,))
    step = 0
    turn = 0
    first_key, batch, head, begin, runs, bits, end = _told_tile(p, 0)
    while first_key >= 0:
        last = step + gl.maximum(end - begin, 1) - 1
        dk = gl.zeros([KEYS, p.DIM], gl.float32, layout=grad_layout)
        dv = gl.zeros([KEYS, p.DIM], gl.float32, layout=grad_layout)
        state = (dk, dv, scores)
        stream = line_stream(p, batch * p.heads + head)
        mbarrier.wait(p.v_full, turn & 1)
        if p.SPARSE:
            # A column that keeps nothing takes one step of nothing.
            exists = end > begin
            stop = gl.where(exists, bits, runs + 1)
            state, step = _walk(p, state, step, last, turn, runs, stop, exists, first_key, stream, zeros, dq_zeros, RUNS)
            state, step = _walk(p, state, step, last, turn, bits, end, True, first_key, stream, zeros, dq_zeros, BITS)
        state, step = _walk(p, state, step, last, turn, begin, runs, True, first_key, stream, zeros, dq_zeros, FULL)
        dk, dv, scores = state
        # They leave through the place of the tile's keys, and that of dQ once its last tile has left.
        place = p.k.index(turn % 2)
        if p.ADDED:
            _hand_over_halves(p, dk, step + 2 * turn, place)
            _hand_over_halves(p, dv, step + 2 * turn + 1, place)
        else:
            place.store((dk * p.scale).to(dtype))
            if p.DROPOUT:
                dv = dv * (1.0 / (1.0 - p.dropout_p))
            mbarrier.wait(p.dq_empty, ((step + turn) & 1) ^ 1)
            view(p.dq, dtype, [KEYS, p.DIM], flat).store(dv.to(dtype))
            fence_async_shared()
            mbarrier.arrive(p.dq_full, count=1)
        turn += 1
        first_key, batch, head, begin, runs, bits, end = _told_tile(p, turn)


@gluon.jit
def _hand_over_halves(p, grad, sent, place):
    """dK or dV in fp32, in register order: half by way of dQ's place and half by ``place``."""
    HALF: gl.constexpr = KEYS * p.DIM // 512
    low, high = _in_register_order(grad, 8).reshape([2, HALF, 256]).permute((1, 2, 0)).split()
    mbarrier.wait(p.dq_empty, (sent & 1) ^ 1)
    view(p.dq, gl.float32, [HALF, 256], p.dkv_rows.layout).store(low)
    view(place, gl.float32, [HALF, 256], p.dkv_rows.layout).store(high)
    fence_async_shared()
    mbarrier.arrive(p.dq_full, count=1)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_kernel(
    q_tensor,
    k_tensor,
    v_tensor,
    dout_tensor,
    dq_rows,
    dk_tensor,
    dv_tensor,
    dkv_rows,
    lse_rows,
    delta_rows,
    unit_rows,
    mask_index,
    work,
    row_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    mask_batch_stride,
    mask_head_stride,
    heads,
    group,
    q_len,
    padded_q_len,
    padded_kv_len,
    kv_lines,
    items,
    tiles,
    heads_together,
    queue,
    scale,
    score_scale,
    seed,
    dropout_p,
    DIM: gl.constexpr,
    QUERIES: gl.constexpr,
    DOUT_STAGES: gl.constexpr,
    TABLE_BLOCK: gl.constexpr,
    SPARSE: gl.constexpr,
    ADDED: gl.constexpr,
    FIXED: gl.constexpr,
    DROPOUT: gl.constexpr,
    RAGGED: gl.constexpr,
):
    Q_STAGES: gl.constexpr = DOUT_STAGES + 1
    dtype: gl.constexpr = q_tensor.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k = gl.allocate_shared_memory(dtype, [2, KEYS, DIM], flat)
    v = gl.allocate_shared_memory(dtype, [1, KEYS, DIM], flat)
    q = gl.allocate_shared_memory(dtype, [Q_STAGES, QUERIES, DIM], flat)
    dout = gl.allocate_shared_memory(dtype, [DOUT_STAGES, QUERIES, DIM], flat)
    lse = gl.allocate_shared_memory(gl.float32, [Q_STAGES, QUERIES], lse_rows.layout)
    delta = gl.allocate_shared_memory(gl.float32, [DOUT_STAGES, QUERIES], delta_rows.layout)
    unit = lse
    if FIXED:
        unit = gl.allocate_shared_memory(gl.float32, [Q_STAGES, QUERIES], unit_rows.layout)
    dscores = gl.allocate_shared_memory(dtype, [1, KEYS, QUERIES], flat)
    dq = gl.allocate_shared_memory(gl.float32, [QUERIES * DIM // 256, 256], dq_rows.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barriers)
    dout_full = gl.allocate_shared_memory(gl.int64, [DOUT_STAGES, 1], barriers)
    step_done = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barriers)
    dq_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    noted = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(noted.index(i), count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(step_done.index(i), count=1)
    for i in gl.static_range(DOUT_STAGES):
        mbarrier.init(dout_full.index(i), count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=1)
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_empty, count=1)
    # The copy engine, which reports to these barriers, must see that they are ready.
    fence_async_shared()
    notes = allocate_notes(2, FIELDS)
    # fmt: off
    p = BackwardArguments(
        q_tensor, k_tensor, v_tensor, dout_tensor, dq_rows, dk_tensor, dv_tensor, dkv_rows, lse_rows, delta_rows,
        unit_rows, mask_index, work, row_idx, tile_idx, tile_runs, tile_bits, mask_batch_stride, mask_head_stride,
        heads, group, q_len, padded_q_len, padded_kv_len, kv_lines, items, tiles, heads_together, queue, scale,
        score_scale, seed, dropout_p, k, v, q, dout, lse, delta, unit, dscores, dq, k_full, k_empty, v_full, v_empty,
        q_full, dout_full, step_done, dq_full, dq_empty, notes, noted, DIM, QUERIES, Q_STAGES, DOUT_STAGES, TABLE_BLOCK,
        SPARSE, ADDED, FIXED, DROPOUT, RAGGED
    )
    # fmt: on
    gl.warp_specialize([(_compute, (p,)), (_load, (p,)), (_send, (p,)), (_plan, (p,))], [1, 1, 1], [24, 24, 24])


@triton.jit(do_not_specialize=["kv_heads"])
def bound_kernel(k_tensor, v_tensor, bounds_ptr, kv_heads, DIM: tl.constexpr, TILE: tl.constexpr):
    """Of each key head the largest number of K, and the largest length of a row of V, into (2, heads) zeros.

    They bound dQ: of a query it is sum P (dP - delta) K, where the P sum to 1, and |dP| <= |dOut| |V|; dropout sets some dP to
    0 and divides only at the end. So there is a power of two of which each tile's part, and their sum, is less than 2^31 times,
    and integers sum to the same in any order. It is 2^-30 of the bound: of dQ over 16,384 keys of random directions some 2^-18,
    where 16-bit weights round to 2^-9.
    """
    batch = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    first = tl.program_id(0) * TILE
    k = load_tile(k_tensor, batch, head, first, TILE, DIM).to(tl.float32)
    v = load_tile(v_tensor, batch, head, first, TILE, DIM).to(tl.float32)
    tl.atomic_max(bounds_ptr + tl.program_id(1), tl.max(tl.max(tl.abs(k), 1), 0))
    longest = tl.max(tl.sqrt_rn(tl.sum(v * v, 1)), 0)
    tl.atomic_max(bounds_ptr + tl.num_programs(1) + tl.program_id(1), longest)


@triton.jit(do_not_specialize=["heads", "group", "q_len", "padded_q_len", "share"])
def prepare_kernel(
    out_tensor,
    dout_tensor,
    lse_ptr,
    dlse_ptr,
    dq_ptr,
    rows_ptr,
    bounds_ptr,
    heads,
    group,
    q_len,
    padded_q_len,
    share,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    FIXED: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """What a query's row contributes to every product, in rows padded to whole tiles: lse in base 2, +inf where the query
    keeps nothing, and delta = rowsum(dOut * Out) - dLse, with dropout times the share that it keeps, by which gradients are
    divided at last; and zeros for dQ to be added to. Where FIXED, also the power of two that its dQ is counted in."""
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    first = tl.program_id(0) * TILE
    out = load_tile(out_tensor, batch, head, first, TILE, DIM).to(tl.float32)
    dout = load_tile(dout_tensor, batch, head, first, TILE, DIM).to(tl.float32)
    query = first + tl.arange(0, TILE)
    line = tl.program_id(1).to(tl.int64) * q_len + query
    lse = tl.load(lse_ptr + line, mask=query < q_len, other=0.0)
    lse = tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E)
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + line, mask=query < q_len, other=0.0)
    if DROPOUT:
        delta *= share
    padded = tl.program_id(1).to(tl.int64) * padded_q_len + query
    lines = tl.num_programs(1).to(tl.int64) * padded_q_len
    tl.store(rows_ptr + padded, lse)
    tl.store(rows_ptr + lines + padded, delta)
    if FIXED:
        kv_heads = tl.num_programs(1) // group
        bounds = bounds_ptr + tl.program_id(1) // group
        length = tl.sqrt_rn(tl.sum(dout * dout, 1))
        most = (length * tl.load(bounds + kv_heads) + tl.abs(delta)) * tl.load(bounds)
        # Of a number below 2^(e + 1) at most 2^30 units of 2^(e - 29); half of what integers hold is left for rounding.
        exponent = tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - 127, -97)
        unit = ((29 - exponent + 127) << 23).to(tl.float32, bitcast=True)
        # What has no bound is NaN, as a sum would be.
        tl.store(rows_ptr + 2 * lines + padded, tl.where(most < float("inf"), unit, float("nan")))
    tl.store(
        dq_ptr + padded[:, None] * DIM + tl.arange(0, DIM)[None, :], tl.zeros([TILE, DIM], tl.int32).to(dq_ptr.dtype.element_ty)
    )


@triton.jit(do_not_specialize=["heads", "group", "padded_len", "factor"])
def finish_kernel(
    grad_tensor, sums_ptr, unit_ptr, heads, group, padded_len, factor, DIM: tl.constexpr, TILE: tl.constexpr, FIXED: tl.constexpr
):
    """A gradient from its sums, which lie in register order: times a factor, in the dtype and memory order of its tensor.
    TILE: rows of the tiles that were added. group: how many sums, one after the other, make one gradient. FIXED: they are
    integers, in units of a power of two for each row."""
    DOWN: tl.constexpr = TILE // 16
    ACROSS: tl.constexpr = 8 // DOWN
    first = tl.program_id(0) * TILE
    sums = tl.zeros([TILE * DIM], tl.float32)
    for member in range(group):
        line = (tl.program_id(1).to(tl.int64) * group + member) * padded_len + first
        sums += tl.load(sums_ptr + line * DIM + tl.arange(0, TILE * DIM)).to(tl.float32)
    pieces = sums.reshape(2, DIM // (16 * ACROSS), ACROSS, DOWN, 8, 4, 2, 2).permute(3, 0, 4, 2, 1, 6, 5, 7)
    grad = pieces.reshape(TILE, DIM) * factor
    if FIXED:
        unit = tl.load(unit_ptr + tl.program_id(1).to(tl.int64) * padded_len + first + tl.arange(0, TILE))
        grad = grad / unit[:, None]
    store_tile(grad_tensor, grad, tl.program_id(1) // heads, tl.program_id(1) % heads, first, TILE, DIM)


def attention_backward(dout, dlse, q, k, v, out, lse, mask, scale, terms=None, deterministic=False, config=None):
    """dq, dk, dv like q, k, v. dlse may be None. Unless ``deterministic``, dQ is summed in an order that differs from run to
    run, and so are dK and dV where query heads share them or heavy columns come in parts.

    The others: float16 or bfloat16, unbroken rows, base and strides multiples of 16 bytes. mask: table blocks of 128 or 256.
    terms: of dropout, or None.
    """
    room = _room(q, k, mask, deterministic)
    dlse = None if dlse is None else dlse.contiguous()
    tensors = _tensors(dout, dlse, q, k, v, out, lse, terms, deterministic, room)
    key = _key(dout, dlse, q, k, v, out, scale, terms, deterministic, config)
    recording = Recording(mask, key, tensors, tensors[_ROOMS], room)
    _launch(recording, tensors, room, mask, scale, dlse is not None, deterministic, terms.dropout_p if terms else None, config)
    recording.finish()
    return tensors[_GRADIENTS]


def repeated_backward(dout, dlse, q, k, v, out, lse, mask, scale, terms=None, deterministic=False):
    """The same by launches that were made before, or None; any tensors."""
    known = known_call(mask, _key(dout, dlse, q, k, v, out, scale, terms, deterministic))
    if known is None:
        return None
    dlse = None if dlse is None else dlse.contiguous()
    tensors = _tensors(dout, dlse, q, k, v, out, lse, terms, deterministic, known.facts)
    return tensors[_GRADIENTS] if known.again(tensors) else None


def _key(dout, dlse, q, k, v, out, scale, terms, deterministic: bool, config=None) -> tuple:
    layout = q.shape, q.stride(), k.shape, k.stride(), v.stride(), out.stride(), dout.stride(), q.dtype, q.device
    more = scale, config, dlse is None, deterministic, terms.dropout_p if terms else None
    return attention_backward_kernel.fn, tuned.times_read(), *layout, *more


_GRADIENTS, _ROOMS = slice(7, 10), slice(10, 12)


def _tensors(dout, dlse, q, k, v, out, lse, terms, deterministic: bool, room: "_Room") -> tuple[torch.Tensor, ...]:
    device = q.device
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    workspace = torch.empty(room.dq_sums + room.rows, dtype=torch.float32, device=device)
    kv_sums = workspace
    if room.kv_sums:
        fill = torch.empty if deterministic else torch.zeros
        kv_sums = fill(room.kv_sums, dtype=torch.float32, device=device)
    bounds = torch.zeros((2, k.shape[0] * k.shape[1]), dtype=torch.float32, device=device) if deterministic else lse
    dlse = lse if dlse is None else dlse
    seed = terms.seed if terms else lse
    return q, k, v, dout, out, lse, dlse, dq, dk, dv, workspace, kv_sums, bounds, tile_queue(device), seed


class _Room(NamedTuple):
    """Sums in fp32, or integers of that size. padded_q, padded_kv: tokens, in whole blocks, so that none reaches into the next
    head's rows. dq_sums: numbers. rows: of lse, delta and, where sums are integers, units. kv_sums: of dK and dV, where several
    tiles make one; else 0."""

    padded_q: int
    padded_kv: int
    dq_sums: int
    rows: int
    kv_sums: int


def _room(q, k, mask, deterministic: bool) -> _Room:
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dim = padded_head_dim(head_dim)
    block_size = mask.block_size if mask else KEYS.value
    padded_q, padded_kv = (triton.cdiv(length, block_size) * block_size for length in (q_len, kv_len))
    lines = batch * heads * padded_q
    # Where several tiles make one of dK and dV, those are summed in fp32 as well: as they come, or one after the other.
    added = heads > kv_heads or (comes_in_parts(mask and mask.by_key) and not deterministic)
    kv_lines = batch * (heads if deterministic else kv_heads) * padded_kv
    return _Room(padded_q, padded_kv, lines * dim, (3 if deterministic else 2) * lines, 2 * kv_lines * dim if added else 0)


def _launch(recording, tensors, room: _Room, mask, scale, has_dlse: bool, deterministic: bool, dropout_p, config) -> None:
    q, k, v, dout, out, lse, dlse, dq, dk, dv, workspace, kv_sums, bounds, queue, seed = tensors
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group, dim = heads // kv_heads, padded_head_dim(head_dim)
    block_size = mask.block_size if mask else KEYS.value
    if config is None and dropout_p is not None:
        config = BACKWARD_OF_DROPOUT[dim]
    config = config or backward_config(q.dtype, dim, mask.block_size if mask else None, q.device)
    sums = workspace[: room.dq_sums].view(torch.int32 if deterministic else torch.float32).view(-1, 256)
    rows = workspace[room.dq_sums :].view(-1, batch * heads * room.padded_q)
    row_lse, row_delta, row_unit = rows[0], rows[1], rows[2 if deterministic else 0]
    share = 1.0 - (dropout_p or 0.0)
    if deterministic:
        arguments = [described_for_triton(k, ROWS, dim), described_for_triton(v, ROWS, dim), bounds, kv_heads]
        grid = (triton.cdiv(kv_len, ROWS), batch * kv_heads)
        recording.launch(bound_kernel, (grid, arguments, {"DIM": dim, "TILE": ROWS}, {"num_warps": 4}))

    arguments = [
        described_for_triton(out, ROWS, dim),
        described_for_triton(dout, ROWS, dim),
        lse,
        dlse,
        sums,
        rows,
        bounds,
        heads,
        group,
        q_len,
        room.padded_q,
        share,
    ]
    constants = {"DIM": dim, "TILE": ROWS, "HAS_DLSE": has_dlse, "FIXED": deterministic, "DROPOUT": dropout_p is not None}
    recording.launch(prepare_kernel, ((room.padded_q // ROWS, batch * heads), arguments, constants, {"num_warps": 4}))

    work = (mask.whole_columns if deterministic else mask.by_key.work) if mask else lse
    items = work.shape[1] if mask else triton.cdiv(kv_len, KEYS.value)
    tiles = items * (block_size // KEYS.value) * batch * heads
    index, _, _, _, row_idx, tile_idx, tile_runs, tile_bits, *strides = table_arguments(mask, mask and mask.by_key, lse)
    kv_rows = kv_sums[: room.kv_sums or room.dq_sums].view(-1, 256)
    arguments = [
        described(q, [1, 1, config.queries, dim]),
        described(k, [1, 1, KEYS.value, dim]),
        described(v, [1, 1, KEYS.value, dim]),
        described(dout, [1, 1, config.queries, dim]),
        described(sums, [config.queries * dim // 256, 256], FLOAT_LAYOUT),
        described(dk, [1, 1, KEYS.value, dim]),
        described(dv, [1, 1, KEYS.value, dim]),
        described(kv_rows, [KEYS.value * dim // 512, 256], FLOAT_LAYOUT),
        described(row_lse, [config.queries], ROW_LAYOUT),
        described(row_delta, [config.queries], ROW_LAYOUT),
        described(row_unit, [config.queries], ROW_LAYOUT),
        index,
        work,
        row_idx,
        tile_idx,
        tile_runs,
        tile_bits,
        *strides,
        heads,
        group,
        q_len,
        room.padded_q,
        room.padded_kv,
        # As many as there are heads of keys, or of queries where each has sums of its own.
        room.kv_sums // (2 * dim) or batch * kv_heads * room.padded_kv,
        items,
        tiles,
        min(heads_together(4 * dim, q_len), batch * heads),
        queue,
        scale / share,
        scale * LOG2_E.value,
        seed,
        dropout_p or 0.0,
    ]
    constants = {"DIM": dim, "QUERIES": config.queries, "DOUT_STAGES": config.dout_stages}
    constants |= {"TABLE_BLOCK": block_size, "SPARSE": mask is not None, "ADDED": room.kv_sums > 0, "FIXED": deterministic}
    constants |= {"DROPOUT": dropout_p is not None, "RAGGED": mask is None and kv_len % KEYS.value > 0}
    grid = (min(tiles, multiprocessors(q.device)), 1)
    recording.launch(attention_backward_kernel, (grid, arguments, constants, config.options))

    finished = [(dq, sums, 1, room.padded_q, scale / share, config.queries)]
    if room.kv_sums:
        dk_sums, dv_sums = kv_sums.chunk(2)
        members = group if deterministic else 1
        finished += [(dk, dk_sums, members, room.padded_kv, scale / share, KEYS.value)]
        finished += [(dv, dv_sums, members, room.padded_kv, 1.0 / share, KEYS.value)]
    for grad, added, members, length, factor, tile in finished:
        batch, heads = grad.shape[:2]
        arguments = [described_for_triton(grad, tile, dim), added, row_unit, heads, members, length, factor]
        constants = {"DIM": dim, "TILE": tile, "FIXED": added.dtype == torch.int32}
        recording.launch(finish_kernel, ((length // tile, batch * heads), arguments, constants, {"num_warps": 4}))
