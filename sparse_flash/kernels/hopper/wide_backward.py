"""The computing warps of the backward pass for Hopper at head_dim 129 to 256: two roles, tiles of 64 keys, 64 queries a step.

The first warp group computes weights, dQ, and sums of dV. The second computes gradients of scores, and sums of dK. Each holds the
left operand of its sums in registers, and reads only the right operand from shared memory. Weights pass from the first group to the
second, in the order in which threads hold them. Gradients of scores pass back as an operand of dQ. While one group waits, or
computes exponentials, the products of the other keep the tensor cores busy. ``backward_arguments`` numbers a step's products.

dQ goes through shared memory in pieces. A sending warp adds them to global memory by TMA, so computing warps wait for no store
(docs/performance/kernels.md has the figures).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon import opaque_zero, view
from ..common.tiles import BITS, FULL, RUNS
from . import backward_steps
from .products import new_sums, scale_sums, start_product, start_transposed_product, store_columns, wait_for_sums


@gluon.jit
def _to_thread_order(tile):
    """Returns a (64, 64) tile of 16 bits as (4, 1024): each thread of four warps holds 16 adjacent bytes of each row."""
    parts = tile.reshape([4, 2, 8, 4, 2, 4, 2])
    return parts.permute((3, 0, 2, 5, 4, 1, 6)).reshape([4, 1024])


@gluon.jit
def _from_thread_order(tile):
    """Reverses ``_to_thread_order``."""
    parts = tile.reshape([4, 4, 8, 4, 2, 2, 2])
    return parts.permute((1, 5, 2, 0, 4, 3, 6)).reshape([64, 64])


@gluon.jit
def _start_dq(p, own, step, turn, sums, PIECE: gl.constexpr):
    """Starts the product of a piece of a step's dQ, in the registers of ``sums``."""
    keys = p.k.stage(turn, opaque_zero(step)).slice(PIECE * 64, 64, dim=1)
    return warpgroup_mma(own.dscores.stage(step).permute((1, 0)), keys, sums, use_acc=False, is_async=True)


@gluon.jit
def _hand_over_dq(p, own, dq, step, PIECE: gl.constexpr):
    """Hands a piece of a step's dQ to the sending warp, in halves."""
    unit = dq
    if p.SHAPE.FIXED:
        unit = p.unit.index(p.q.place(step)).load(gl.SliceLayout(1, dq.type.layout))
    rows = backward_steps.dq_rows(p, dq, unit)
    halves = rows.reshape([2, rows.shape[0] // 2, 256]).permute((1, 2, 0)).split()
    for half in gl.static_range(2):
        sent = (step * p.SHAPE.PIECES + PIECE) * 2 + half
        own.dq.acquire(sent)
        view(own.dq.stage(sent), rows.dtype, halves[half].shape, p.grads.dq_rows.layout).store(halves[half])
        fence_async_shared()
        own.dq.commit(sent)


@gluon.jit
def _add_weights(p, own, tile, state, step, last, turn, begin, end, exists, stream, terms, zeros, KIND: gl.constexpr):
    """Adds steps begin .. end - 1, all of one kind, to dV and dQ. state: dV, and the scores of the step, (keys, queries). last: the
    tile's last step. The scores that it computes are not used."""
    dv, scores = state
    dtype: gl.constexpr = p.q.data.dtype
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    PRODUCTS: gl.constexpr = 1 if p.SHAPE.USED == p.SHAPE.DIM else 2
    score_layout: gl.constexpr = zeros.type.layout
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq_zeros = gl.zeros([p.SHAPE.QUERIES, 64], gl.float32, layout=dq_layout)
    existing = backward_steps.existing_key_words(p, tile, score_layout)
    for entry in range(begin, end):
        dout = p.dout.stage(step)
        words = entry
        if KIND != FULL:
            words = backward_steps.mask_words(p, tile, entry, exists, KIND, score_layout)
        position = entry
        if p.dropout.ENABLED or p.scoring.SCORED:
            position = backward_steps.first_query(p, tile, entry, end, exists)
        # (a) P = exp2(S - lse), where the previous step has computed (1) S = Q K^T
        weights = backward_steps.scores_to_weights(
            p, tile, scores, backward_steps.load_lse(p, step, score_layout), words, existing, stream, terms, position, KIND
        )
        operand = gl.convert_layout(backward_steps.round_weights(p, weights), operand_layout)
        if p.scoring.SIGNED:
            ones = gl.full([p.SHAPE.KEYS, p.SHAPE.QUERIES], 1.0, gl.float32, layout=score_layout)
            derivative = p.scoring.times_derivative(ones, scores, terms, position, tile.first)
            own.weights.stage(0, 1).store(_to_thread_order(derivative.to(dtype)))
        elif p.scoring.SCORED:
            weights = p.scoring.times_derivative(weights, scores, terms, position, tile.first)
        own.weights.stage(0).store(_to_thread_order(weights.to(dtype)))
        own.weights.commit(step + turn)
        p.dout.wait(step)
        # (3) dV += P^T dO
        started_dv = start_product(operand, dout, dv)
        # (5) dQ += dS K
        own.dscores.wait(step)
        started = _start_dq(p, own, step, turn, dq_zeros, 0)
        dv = wait_for_sums(started_dv, 1)
        if not p.SHAPE.FIXED:
            p.q.release(step)
        for piece in gl.static_range(p.SHAPE.PIECES - 1):
            dq = warpgroup_mma_wait(0, deps=(started,))
            _hand_over_dq(p, own, dq, step, piece)
            started = _start_dq(p, own, step, turn, dq, piece + 1)
        # (1) S = Q K^T of the next step. After the last step there is no wait: the next tile's first scores are computed when its
        # keys have arrived.
        p.q.wait(step + 1, pred=step != last)
        started_scores = start_transposed_product(p.k.stage(turn, opaque_zero(step)), p.q.stage(step + 1), zeros, p.SHAPE.USED)
        dq = warpgroup_mma_wait(PRODUCTS, deps=(started,))
        _hand_over_dq(p, own, dq, step, p.SHAPE.PIECES - 1)
        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        if p.SHAPE.FIXED:  # units of dQ lie beside q
            p.q.release(step)
        step += 1
    return (dv, scores), step


@gluon.jit
def compute_weights(p, own):
    """Runs the warp group that computes weights and sums dV."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.QUERIES, 16])
    zeros = gl.zeros([p.SHAPE.KEYS, p.SHAPE.QUERIES], gl.float32, layout=score_layout)
    step = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        last = step + gl.maximum(tile.end - tile.begin, 1) - 1
        p.k.wait(turn)
        p.q.wait(step)
        started = start_transposed_product(p.k.stage(turn), p.q.stage(step), zeros, p.SHAPE.USED)
        state = (new_sums(p.SHAPE.KEYS, p.SHAPE.DIM_V, p.SHAPE.USED_V), warpgroup_mma_wait(0, deps=(started,)))
        stream = p.dropout.stream(tile.batch_head)
        terms = p.scoring.load_head_terms(p.heads, tile.batch_head)
        if p.table.SPARSE:
            # A column that keeps nothing takes one empty step.
            exists = tile.end > tile.begin
            stop = gl.where(exists, tile.bits, tile.runs + 1)
            state, step = _add_weights(p, own, tile, state, step, last, turn, tile.runs, stop, exists, stream, terms, zeros, RUNS)
            state, step = _add_weights(p, own, tile, state, step, last, turn, tile.bits, tile.end, True, stream, terms, zeros, BITS)
        state, step = _add_weights(p, own, tile, state, step, last, turn, tile.begin, tile.runs, True, stream, terms, zeros, FULL)
        # Tells the other group that this one has read the tile's keys. The other group has read all weights, so this fill needs no
        # acquire.
        own.weights.commit(step + turn)
        dv, _ = state
        _hand_over(p, tile, dv, p.v.stage(turn), own.dv, turn, 1)
        turn += 1
        tile = p.scheduler.tile(turn)


@gluon.jit
def compute_gradients(p, own):
    """Runs the warp group that computes gradients of scores and sums dK."""
    dtype: gl.constexpr = p.q.data.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.QUERIES, 16])
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    PRODUCTS: gl.constexpr = 1 if p.SHAPE.USED_V == p.SHAPE.DIM_V else 2
    zeros = gl.zeros([p.SHAPE.KEYS, p.SHAPE.QUERIES], gl.float32, layout=score_layout)
    thread_order: gl.constexpr = _to_thread_order(zeros.to(dtype)).type.layout
    step = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        last = step + gl.maximum(tile.end - tile.begin, 1) - 1
        p.v.wait(turn)
        p.dout.wait(step)
        started = start_transposed_product(p.v.stage(turn), p.dout.stage(step), zeros, p.SHAPE.USED_V)
        dk = new_sums(p.SHAPE.KEYS, p.SHAPE.DIM, p.SHAPE.USED)
        operand_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
        dweights = warpgroup_mma_wait(0, deps=(started,))
        p.k.wait(turn)
        for _ in range(gl.maximum(tile.end - tile.begin, 1)):
            q = p.q.stage(step)
            delta = p.delta.index(p.dout.place(step) + opaque_zero(step)).load(column)[None, :]
            own.weights.wait(step + turn)
            passed = own.weights.stage(opaque_zero(step)).load(thread_order)
            weights = gl.convert_layout(_from_thread_order(passed), score_layout).to(gl.float32)
            # (b) dS = P (dP - delta), where the previous step has computed (2) dP = dO V^T
            dscores = backward_steps.compute_dscores(p, weights, dweights, delta)
            if p.scoring.SIGNED:
                passed = own.weights.stage(opaque_zero(step), 1).load(thread_order)
                dscores *= gl.convert_layout(_from_thread_order(passed), score_layout).to(gl.float32)
            rounded = dscores.to(dtype)
            own.dscores.stage(0).store(rounded)
            fence_async_shared()
            own.dscores.commit(step)
            p.q.wait(step)
            # (4) dK += dS^T Q
            started_dk = start_product(gl.convert_layout(rounded, operand_layout), q, dk)
            # (2) dP = dO V^T of the next step
            p.dout.wait(step + 1, pred=step != last)
            started = start_transposed_product(p.v.stage(turn, opaque_zero(step)), p.dout.stage(step + 1), zeros, p.SHAPE.USED_V)
            dk = wait_for_sums(started_dk, PRODUCTS)
            p.q.release(step)
            dweights = warpgroup_mma_wait(0, deps=(started,))
            step += 1
        # dK is stored to the buffer of the keys, which the other group's dQ must have read.
        own.weights.wait(step + turn)
        _hand_over(p, tile, dk, p.k.stage(turn), own.dk, turn, 0)
        turn += 1
        tile = p.scheduler.tile(turn)


@gluon.jit
def _hand_over(p, tile, grad, buffer, ring, turn, WHICH: gl.constexpr):
    """Hands over dK or dV of a tile: sums to global memory, results to the sending warp. WHICH: 0 for dK, 1 for dV."""
    if p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0):
        backward_steps.add_sums(p, tile, grad, WHICH)
    else:
        _store_results(p, grad, buffer, WHICH)
    fence_async_shared()
    ring.commit(turn)


@gluon.jit
def _store_results(p, grad, buffer, WHICH: gl.constexpr):
    if WHICH == 0:
        grad = scale_sums(grad, p.scale)
    elif p.dropout.ENABLED:
        grad = scale_sums(grad, 1.0 / p.dropout.share())
    store_columns(buffer, grad)
