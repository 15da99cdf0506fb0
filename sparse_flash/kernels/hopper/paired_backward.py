"""The backward pass for Hopper at head_dim 129 to 192, with v of 65 to 128: tiles of 128 keys, shared by two warp groups.

Each warp group does for its 64 keys what all computing warps of ``backward_to_128`` do together. Sums of dK and dV take 160
registers a thread, so scores cannot be computed a step ahead. Instead, the other group keeps the tensor cores busy. The groups
share only dQ: each reads the gradients of scores of both groups, and computes one of three pieces of 64 columns. They alternate in
computing the third piece. ``backward_arguments`` numbers a step's products.

In shared memory, q and k are three tiles of 64 columns, without zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon import async_add, async_store, opaque_zero, record, store_wait, view, view_for_tma
from ..common.tiles import BITS, FULL, RUNS
from .backward_steps import (
    existing_key_words,
    first_row,
    load_tiles,
    mask_words,
    round_to_int,
    scores_to_weights,
    to_register_order,
)
from .pairs import from_pairs, multiply_pairs, negate_after, to_pairs
from .products import stage_pieces, start_pieces_product
from .ring import Ring, allocate_tiles, new_linked_ring, new_ring
from .scheduler import schedule
from .wide_backward import add_sums

PIECES = gl.constexpr(3)  # of 64 columns, of q and k
PIECE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@record
class PairedGroup:
    """Holds the buffers of a warp group and its sending warp."""

    dscores: Ring  # released by both groups
    dq: Ring  # one stage, through which the group sends its pieces of dQ
    ready: Ring  # without data; full: the group's dK and dV are in the buffers of k and v
    GROUP: gl.constexpr  # 0 or 1


@gluon.jit
def _new_group(p, GROUP: gl.constexpr):
    dscores = allocate_tiles(p.inputs.q.dtype, 2, p.SHAPE.KEYS, p.SHAPE.QUERIES)
    dq = gl.allocate_shared_memory(gl.float32, [p.SHAPE.QUERIES * 64 // 256, 256], p.grads.dq_rows.layout)
    return PairedGroup(new_ring(dscores, 2, CONSUMERS=2), new_ring(dq, 1), new_linked_ring(p.k, p.k.data, 1), GROUP)


@gluon.jit
def _sent_before(step, GROUP: gl.constexpr):
    """Returns how many pieces of dQ a group has sent before a step: one in each step, and the third in every second step."""
    return step + (step + (1 - GROUP)) // 2


@gluon.jit
def _start_dq(p, own, other, step, turn, piece):
    """Starts the two products of a piece of a step's dQ. The second waits until the other group has stored its gradients of
    scores."""
    zeros = gl.zeros([p.SHAPE.QUERIES, 64], gl.float32, layout=PIECE_LAYOUT)
    dscores, others = own.dscores.stage(step), other.dscores.stage(step)
    keys = p.k.stage(turn, piece + own.GROUP * PIECES)
    started = warpgroup_mma(dscores.permute((1, 0)), keys, zeros, use_acc=False, is_async=True)
    other.dscores.wait(step)
    others_keys = p.k.stage(turn, piece + other.GROUP * PIECES)
    return warpgroup_mma(others.permute((1, 0)), others_keys, started, is_async=True)


@gluon.jit
def _hand_over_dq(p, own, dq, units, sent):
    """Hands a piece of dQ to the sending warp. units: of its queries; only read with FIXED."""
    own.dq.acquire(sent)
    if p.SHAPE.FIXED:
        rows = to_register_order(round_to_int(dq * units[:, None]), 4)
        view(own.dq.data, gl.int32, rows.shape, p.grads.dq_rows.layout).store(rows)
    else:
        own.dq.data.store(to_register_order(dq, 4))
    fence_async_shared()
    own.dq.commit(sent)


@gluon.jit
def _add_steps(p, own, other, tile, state, step, turn, begin, end, exists, zeros, KIND: gl.constexpr):
    """Adds steps begin .. end - 1, all of one kind, to the group's dK and dV, and to dQ. tile: the part of the tile from the
    group's keys on. state: (dV, pieces of dK)."""
    dv, dk = state
    dtype: gl.constexpr = p.q.data.dtype
    score_layout: gl.constexpr = zeros.type.layout
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    of_dv: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    of_dk: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    existing = existing_key_words(p, tile, score_layout)
    for entry in range(begin, end):
        dout = p.dout.stage(step)
        words = entry
        if KIND != FULL:
            words = mask_words(p, tile, entry, exists, KIND, score_layout)
        # (1) S = Q K^T
        p.q.wait(step)
        keys = stage_pieces(p.k, turn, opaque_zero(step) + own.GROUP * PIECES, PIECES)
        started = start_pieces_product(keys, stage_pieces(p.q, step, 0, PIECES), zeros, PIECES * 64)
        products = warpgroup_mma_wait(0, deps=(started,))
        # P = exp2(S - lse)
        weights = scores_to_weights(p, tile, products, step, words, existing, 0, 0, entry, KIND)
        pairs = to_pairs(weights, dtype)
        # (2) dP - delta = dO V^T - delta
        p.dout.wait(step)
        delta = p.delta.index(p.dout.place(step) + opaque_zero(step)).load(column)
        values = p.v.stage(turn, opaque_zero(step) + own.GROUP)
        started = warpgroup_mma(values, dout.permute((1, 0)), negate_after(delta, pairs, score_layout), is_async=True)
        # (3) dV += P^T dO
        started_dv = warpgroup_mma(from_pairs(pairs, dtype, of_dv), dout, dv, is_async=True)
        dweights = warpgroup_mma_wait(1, deps=(started,))
        # dS = P (dP - delta). Uses the weights in 16 bits, as weights in 32 bits would take registers beside all sums.
        pairs = multiply_pairs(pairs, dweights, dtype)
        own.dscores.acquire(step)
        own.dscores.stage(step).store(from_pairs(pairs, dtype, score_layout))
        operand = from_pairs(pairs, dtype, of_dk)
        # (4) dK += dS^T Q
        started_sums = (started_dv,)
        for piece in gl.static_range(PIECES):
            started_sums += (warpgroup_mma(operand, p.q.stage(step, piece), dk[piece], is_async=True),)
        fence_async_shared()
        own.dscores.commit(step)
        # Waits here, as there are no registers for the left operands of these products beside the sums of the next.
        dv, first, second, third = warpgroup_mma_wait(0, deps=started_sums)
        dk = first, second, third
        # (5) dQ += dS K
        sent = _sent_before(step, own.GROUP)
        started_dq = _start_dq(p, own, other, step, turn, opaque_zero(step) + own.GROUP)
        units = delta
        if p.SHAPE.FIXED:
            units = p.unit.index(p.q.place(step)).load(gl.SliceLayout(1, PIECE_LAYOUT))
        p.q.release(step)
        dq = warpgroup_mma_wait(0, deps=(started_dq,))
        _hand_over_dq(p, own, dq, units, sent)
        if step % 2 == own.GROUP:
            started_dq = _start_dq(p, own, other, step, turn, opaque_zero(step) + 2)
            dq = warpgroup_mma_wait(0, deps=(started_dq,))
            _hand_over_dq(p, own, dq, units, sent + 1)
        own.dscores.release(step)
        other.dscores.release(step)
        step += 1
    return (dv, dk), step


@gluon.jit
def _compute(p, own, other):
    """Runs a computing warp group."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.QUERIES, 16])
    values_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.DIM_V, 16])
    zeros = gl.zeros([p.SHAPE.KEYS, p.SHAPE.QUERIES], gl.float32, layout=score_layout)
    step = 0
    turn = 0
    whole = p.scheduler.tile(turn)
    while whole.first >= 0:
        tile = whole.part_from(own.GROUP * p.SHAPE.KEYS)
        piece = gl.zeros([p.SHAPE.KEYS, 64], gl.float32, layout=PIECE_LAYOUT)
        state = (gl.zeros([p.SHAPE.KEYS, p.SHAPE.DIM_V], gl.float32, layout=values_layout), (piece, piece, piece))
        p.k.wait(turn)
        p.v.wait(turn)
        if p.table.SPARSE:
            # A column that keeps nothing takes one empty step.
            exists = tile.end > tile.begin
            stop = gl.where(exists, tile.bits, tile.runs + 1)
            state, step = _add_steps(p, own, other, tile, state, step, turn, tile.runs, stop, exists, zeros, RUNS)
            state, step = _add_steps(p, own, other, tile, state, step, turn, tile.bits, tile.end, True, zeros, BITS)
        state, step = _add_steps(p, own, other, tile, state, step, turn, tile.begin, tile.runs, True, zeros, FULL)
        dv, dk = state
        # Waits until the other group's dQ has read these keys.
        own.dscores.acquire(step - 1 + own.dscores.STAGES)
        if p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0):
            add_sums(p, tile, dk, 0, own.GROUP)
            add_sums(p, tile, (dv,), 1, own.GROUP)
        else:
            _store_results(p, dk, dv, turn, own.GROUP)
        fence_async_shared()
        own.ready.commit(turn)
        turn += 1
        whole = p.scheduler.tile(turn)


@gluon.jit
def _store_results(p, dk, dv, turn, GROUP: gl.constexpr):
    """Stores a group's dK and dV in the buffers of its keys and values."""
    dtype: gl.constexpr = p.q.data.dtype
    p.v.stage(turn, GROUP).store(dv.to(dtype))
    for piece in gl.static_range(PIECES):
        p.k.stage(turn, opaque_zero(turn) + (GROUP * PIECES + piece)).store((dk[piece] * p.scale).to(dtype))


@gluon.jit
def _send(p, own):
    """Runs a sending warp: adds a group's pieces of dQ to global memory, and at the end of a tile stores its dK and dV."""
    ROWS: gl.constexpr = p.SHAPE.QUERIES * 64 // 256
    grads = p.grads
    step = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        row = first_row(p, tile)
        batch, head = p.heads.of(tile.batch_head)
        kv_head = head // p.heads.group
        entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
        for _ in range(gl.maximum(tile.end - tile.begin, 1)):
            sum_row = (row + p.scheduler.position(tile, entry, tile.end)) // p.SHAPE.QUERIES * p.SHAPE.ALL_PIECES
            sent = _sent_before(step, own.GROUP)
            _send_piece(grads, own.dq, sent, (sum_row + own.GROUP) * ROWS)
            if step % 2 == own.GROUP:
                _send_piece(grads, own.dq, sent + 1, (sum_row + 2) * ROWS)
            entry = p.scheduler.next_step(tile, entry)
            step += 1
        first = tile.first + own.GROUP * p.SHAPE.KEYS
        own.ready.wait(turn)
        if not (p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0)):
            for piece in gl.static_range(PIECES):
                keys = view_for_tma(p.k.stage(turn, own.GROUP * PIECES + piece), grads.dk)
                async_store(grads.dk, [batch, kv_head, first, piece * 64], keys)
            async_store(grads.dv, [batch, kv_head, first, 0], view_for_tma(p.v.stage(turn, own.GROUP), grads.dv))
            store_wait(0)
        p.k.release(turn)
        p.scheduler.slots.release(turn)
        turn += 1
        tile = p.scheduler.tile(turn)


@gluon.jit
def _send_piece(grads, ring, sent, row):
    ring.wait(sent)
    async_add(grads.dq_rows, [row, 0], view(ring.data, grads.dq_rows.dtype, ring.data.shape, grads.dq_rows.layout))
    store_wait(0)
    ring.release(sent)


@gluon.jit
def paired_backward(p):
    """Runs the roles."""
    gl.static_assert(not (p.dropout.ENABLED or p.scoring.SCORED))
    first, second = _new_group(p, 0), _new_group(p, 1)
    # TMA signals the barriers, so it must see that they are initialized.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (p, first, second)),
            (_compute, (p, second, first)),
            (load_tiles, (p,)),
            (_send, (p, first)),
            (_send, (p, second)),
            (schedule, (p.scheduler,)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )
