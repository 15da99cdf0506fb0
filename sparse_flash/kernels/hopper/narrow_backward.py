"""The computing warps of the backward pass for Hopper at head_dim 33 to 64.

Both warp groups share one role: each holds 64 keys of the tile. Blocks of 64 have one group. The scores of the next step, or of the
next tile's first step, are computed during this step's other products. This keeps the tensor cores busy while the exponentials run.
``backward_arguments`` numbers a step's products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon import barrier, opaque_zero, view
from ..common.tiles import BITS, FULL, RUNS
from . import backward_steps
from .products import copy_rows, new_sums, scale_sums, start_product, start_transposed_product, store_columns, wait_for_both


@gluon.jit
def _add_steps(
    p, own, tile, state, step, first, last, turn, begin, end, exists, stream, terms, zeros, dq_zeros, KIND: gl.constexpr
):
    """Adds steps begin .. end - 1, all of one kind, to dK, dV and dQ.

    state: dK, dV and the scores of the step, (keys, queries). first: the tile's first step. last: the tile's last step, which
    computes the scores of the next tile's first step; if shared memory holds the keys of one tile only, these scores are not used.
    """
    dk, dv, scores = state
    dtype: gl.constexpr = p.q.data.dtype
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    score_layout: gl.constexpr = zeros.type.layout
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    existing = backward_steps.existing_key_words(p, tile, score_layout)
    for entry in range(begin, end):
        q = p.q.stage(step)
        dout = p.dout.stage(step)
        values = p.v.stage(turn, opaque_zero(step))
        words, position = entry, entry
        if KIND != FULL:
            words = backward_steps.mask_words(p, tile, entry, exists, KIND, score_layout)
        if p.dropout.ENABLED or p.scoring.SCORED:
            position = backward_steps.first_query(p, tile, entry, end, exists)
        p.dout.wait(step)
        # (2) dP = dO V^T
        started = start_transposed_product(values, dout, zeros, p.SHAPE.USED)
        sent = step + turn
        # (a) P = exp2(S - lse), where the previous step has computed (1) S = Q K^T
        products = scores
        lse = backward_steps.load_lse(p, step, score_layout)
        weights = backward_steps.scores_to_weights(p, tile, products, lse, words, existing, stream, terms, position, KIND)
        if p.scoring.SCORED:
            # The derivative is applied here, so that its inputs need not stay in registers during the products.
            operand = gl.convert_layout(backward_steps.round_weights(p, weights), operand_layout)
            if not p.scoring.SIGNED:
                weights = p.scoring.times_derivative(weights, products, terms, position, tile.first)
        # The previous step's dQ is committed only here. Right after the store, the tensor cores would idle during the wait for it,
        # as the product beside it takes all of shared memory's rate.
        _commit_dq(own, sent - 1, step != first)
        dweights = warpgroup_mma_wait(0, deps=(started,))
        if not p.scoring.SCORED:
            operand = gl.convert_layout(backward_steps.round_weights(p, weights), operand_layout)
        # (3) dV += P^T dO
        started_dv = start_product(operand, dout, dv)
        # ``opaque_zero`` keeps the compiler from moving the load of delta before the product's start.
        delta = p.delta.index(p.dout.place(step) + opaque_zero(step)).load(column)
        # (b) dS = P (dP - delta)
        dscores = backward_steps.compute_dscores(p, weights, dweights, delta[None, :])
        if p.scoring.SIGNED:
            dscores = p.scoring.times_derivative(dscores, products, terms, position, tile.first)
        # Keys lie along the rows of the buffer, as in dQ's product, so the tensor cores read its left operand without a transpose.
        own.dscores.index(0).permute((1, 0)).store(dscores.to(dtype))
        ds_operand = gl.convert_layout(dscores.to(dtype), operand_layout)
        # (4) dK += dS^T Q
        started_dk = start_product(ds_operand, q, dk)
        fence_async_shared()
        barrier()
        # (5) dQ += dS K
        keys = p.k.stage(turn, opaque_zero(step))
        stored = own.dscores.index(opaque_zero(step))
        started_dq = warpgroup_mma(stored, keys, dq_zeros, use_acc=False, is_async=True)
        dv, dk = wait_for_both(started_dv, started_dk, 1)
        units = step  # of integer sums, by query
        if p.SHAPE.FIXED:
            units = p.unit.index(p.q.place(step)).load(gl.SliceLayout(1, dq_zeros.type.layout))
        p.q.release(step)
        upcoming_turn = turn
        if p.k.STAGES > 1:
            upcoming_turn = turn + (step == last).to(gl.int32)
            p.q.wait(step + 1)
            p.k.wait(upcoming_turn)
        else:
            p.q.wait(step + 1, pred=step != last)
        # (1) S = Q K^T of the next step
        started_scores = start_transposed_product(p.k.stage(upcoming_turn), p.q.stage(step + 1), zeros, p.SHAPE.USED)
        dq = warpgroup_mma_wait(1, deps=(started_dq,))
        own.dq.acquire(sent)
        rows = backward_steps.dq_rows(p, dq, units)
        view(own.dq.data, rows.dtype, rows.shape, p.grads.dq_rows.layout).store(rows)
        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        step += 1
    return (dk, dv, scores), step


@gluon.jit
def _commit_dq(own, sent, exists):
    """Hands a stored step of dQ to the sending warp, if there is one."""
    fence_async_shared()
    own.dq.commit(sent, exists)


@gluon.jit
def compute_tiles(p, own):
    """Runs the computing warps."""
    WARPS: gl.constexpr = gl.num_warps()
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, p.SHAPE.QUERIES, 16])
    # Two warp groups share dQ: each takes half of its queries, or, with 64 queries, half of its columns.
    DOWN: gl.constexpr = p.SHAPE.QUERIES // 16  # warps
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, WARPS // DOWN], [16, p.SHAPE.COLUMNS, 16])
    zeros = gl.zeros([p.SHAPE.KEYS, p.SHAPE.QUERIES], gl.float32, layout=score_layout)
    dq_zeros = gl.zeros([p.SHAPE.QUERIES, p.SHAPE.DIM], gl.float32, layout=dq_layout)

    scores = zeros
    if p.k.STAGES > 1:
        scores = _first_scores(p, 0, 0, zeros)
    step = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        first = step
        steps = gl.maximum(tile.end - tile.begin, 1)
        if p.k.STAGES == 1:
            scores = _first_scores(p, turn, step, zeros)
        state = (new_sums(p.SHAPE.KEYS, p.SHAPE.DIM, p.SHAPE.USED), new_sums(p.SHAPE.KEYS, p.SHAPE.DIM, p.SHAPE.USED), scores)
        p.v.wait(turn)
        last = step + (p.heads.group if p.SHAPE.TOGETHER else 1) * steps - 1
        for member in range(p.heads.group if p.SHAPE.TOGETHER else 1):
            state, step = _add_head(p, own, tile, state, step, first, last, turn, tile.batch_head + member, zeros, dq_zeros)
        dk, dv, scores = state
        _commit_dq(own, step + turn - 1, True)
        _hand_over(p, own, tile, turn, step + turn, dk, dv)
        turn += 1
        tile = p.scheduler.tile(turn)


@gluon.jit
def _add_head(p, own, tile, state, step, first, last, turn, batch_head, zeros, dq_zeros):
    """Adds all steps of a tile with one query head."""
    stream = p.dropout.stream(batch_head)
    terms = p.scoring.load_head_terms(p.heads, batch_head)
    if p.table.SPARSE:
        # A column that keeps nothing takes one empty step.
        exists = tile.end > tile.begin
        stop = gl.where(exists, tile.bits, tile.runs + 1)
        state, step = _add_steps(
            p, own, tile, state, step, first, last, turn, tile.runs, stop, exists, stream, terms, zeros, dq_zeros, RUNS
        )
        state, step = _add_steps(
            p, own, tile, state, step, first, last, turn, tile.bits, tile.end, True, stream, terms, zeros, dq_zeros, BITS
        )
    return _add_steps(
        p, own, tile, state, step, first, last, turn, tile.begin, tile.runs, True, stream, terms, zeros, dq_zeros, FULL
    )


@gluon.jit
def _first_scores(p, turn, step, zeros):
    """Returns the scores of a tile's first step, if no previous step has computed them."""
    p.k.wait(turn)
    p.q.wait(step)
    started = start_transposed_product(p.k.stage(turn), p.q.stage(step), zeros, p.SHAPE.USED)
    return warpgroup_mma_wait(0, deps=(started,))


@gluon.jit
def _hand_over(p, own, tile, turn, sent, dk, dv):
    """Adds dK and dV of a tile to sums, or hands them to the sending warp: dK through the buffer of the tile's keys, dV through the
    buffer of dQ, so that the next tile's values arrive meanwhile."""
    if p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0):
        backward_steps.add_sums(p, tile, dk, 0)
        backward_steps.add_sums(p, tile, dv, 1)
        own.dq.acquire(sent)
    else:
        buffer = p.k.stage(turn)
        store_columns(buffer, scale_sums(dk, p.scale))
        if p.dropout.ENABLED:
            dv = scale_sums(dv, 1.0 / p.dropout.share())
        own.dq.acquire(sent)
        values = view(own.dq.data, p.k.data.dtype, [p.SHAPE.KEYS, p.SHAPE.DIM], p.k.data.layout)
        store_columns(values, dv)
        if p.SHAPE.OWN_STARTS:
            if tile.stop - tile.first < p.SHAPE.KEYS:
                # TMA would also overwrite rows beyond the document's end, which belong to the next document.
                barrier()
                batch, head = p.heads.of(tile.batch_head)
                kv_head = head // p.heads.group
                copy_rows(p.grads.dk, p.grads.pointers.dk, batch, kv_head, tile.first, tile.stop, buffer)
                copy_rows(p.grads.dv, p.grads.pointers.dv, batch, kv_head, tile.first, tile.stop, values)
    _commit_dq(own, sent, True)
