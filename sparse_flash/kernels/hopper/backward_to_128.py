"""The backward pass for Hopper at head_dim 33 to 64, and to 128 in blocks of 64 or with a variant. One pass over key tiles computes
dK and dV, and accumulates dQ.

Programs are persistent. Each has a scheduler warp, a loading warp, eight computing warps and a sending warp. The sending warp hands
results to TMA, which adds tiles of dQ to an fp32 array in global memory. Scores are transposed, with keys along rows, so that the
weights in registers are the left operand of dV. The scores of the next step, or of the next tile's first step, are computed during
this step's other products. This keeps the tensor cores busy while the exponentials run. ``backward_arguments`` numbers a step's
products.

Sources: arXiv:2205.14135, Alg. 4 (one pass, dQ accumulated); arXiv:2407.08608, sec. 3 (warp roles).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon import async_add, async_store, barrier, opaque_zero, record, store_wait, view, view_for_tma
from ..common.tiles import BITS, FULL, RUNS
from .backward_steps import (
    compute_dscores,
    existing_key_words,
    first_query,
    first_row,
    load_lse,
    load_tiles,
    mask_words,
    round_to_int,
    round_weights,
    row_of_sums,
    scores_to_weights,
    to_register_order,
)
from .products import copy_rows, new_sums, scale_sums, start_product, start_transposed_product, store_columns, wait_for_both
from .ring import Ring, allocate_tiles, new_ring
from .scheduler import schedule


@record
class BuffersTo128:
    dscores: gl.shared_memory_descriptor  # (1, queries, keys)
    dq: Ring  # one stage, through which every step sends dQ, piece by piece, and every tile sends dK and dV


@gluon.jit
def _send(p, own):
    """Runs the sending warp: adds pieces of dQ to global memory, and at the end of a tile stores or adds its dK and dV. It also
    releases the values, as the computing warps would have to wait for each other to do so."""
    grads = p.grads
    step = 0
    sent = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        row = first_row(p, tile)
        steps = gl.maximum(tile.end - tile.begin, 1)
        if p.SHAPE.TOGETHER:
            last = step + p.heads.group * steps - 1
            for _ in range(p.heads.group):
                step, sent = _send_dq(p, own, tile, turn, row, step, step + steps, last, sent)
                row += grads.padded_q_len
        else:
            step, sent = _send_dq(p, own, tile, turn, row, step, step + steps, step + steps - 1, sent)
        sent = _send_dkv(p, own, tile, turn, sent)
        p.k.release(turn)
        if p.k.STAGES == 1:
            p.scheduler.slots.release(turn)
        turn += 1
        tile = p.scheduler.tile(turn)


@gluon.jit
def _send_dq(p, own, tile, turn, row, step, stop, last, sent):
    """Adds dQ of all steps of a tile with one query head. row: from ``first_row``. last: the tile's last step."""
    ROWS: gl.constexpr = p.SHAPE.QUERIES * p.SHAPE.COLUMNS // 256
    grads = p.grads
    entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
    for _ in range(stop - step):
        position = p.scheduler.position(tile, entry, tile.end)
        rows = view(own.dq.data, grads.dq_rows.dtype, [ROWS, 256], grads.dq_rows.layout)
        for piece in gl.static_range(p.SHAPE.PIECES):
            own.dq.wait(sent)
            if piece == p.SHAPE.PIECES - 1:
                # The warps that hand over dQ have finished all products with the values.
                p.v.release(turn, pred=step == last)
            async_add(grads.dq_rows, [((row + position) // p.SHAPE.QUERIES * p.SHAPE.ALL_PIECES + piece) * ROWS, 0], rows)
            store_wait(0)
            own.dq.release(sent)
            sent += 1
        entry = p.scheduler.next_step(tile, entry)
        step += 1
    return step, sent


@gluon.jit
def _send_dkv(p, own, tile, turn, sent):
    """Stores or adds dK and dV of a tile, from the buffer of its keys and the buffer of dQ."""
    grads = p.grads
    batch, head = p.heads.of(tile.batch_head)
    kv_head = head // p.heads.group
    buffer = p.k.stage(turn)
    if p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0):
        row = row_of_sums(p, tile)
        if p.SHAPE.SPLIT and p.SHAPE.ADDED:
            # An unused item, which only another mask uses, names the column past the last. Its rows go past the end of all.
            row = gl.where(tile.first < grads.padded_kv_len, row, 2 * grads.kv_rows)
        sent = _send_sums(p, own, row, buffer, sent)
    elif not p.SHAPE.OWN_STARTS or tile.stop - tile.first == p.SHAPE.KEYS:
        sent = _send_results(p, own, batch, kv_head, tile.first, buffer, sent)
    else:
        # The computing warps have stored dK and dV.
        own.dq.wait(sent)
        own.dq.release(sent)
        sent += 1
    return sent


@gluon.jit
def _send_results(p, own, batch, kv_head, first_key, buffer, sent):
    """Stores dK and dV of a tile in their tensors."""
    grads = p.grads
    own.dq.wait(sent)
    async_store(grads.dk, [batch, kv_head, first_key, 0], view_for_tma(buffer, grads.dk))
    if p.SHAPE.SPLIT_SUMS:
        # A split uses the buffer of dQ twice, so a whole column counts an unused fill.
        own.dq.release(sent)
        sent += 1
        own.dq.wait(sent)
    values = view(own.dq.data, grads.dv.dtype, [1, 1, p.SHAPE.KEYS, p.SHAPE.DIM], grads.dv.layout)
    async_store(grads.dv, [batch, kv_head, first_key, 0], values)
    store_wait(0)
    own.dq.release(sent)
    return sent + 1


@gluon.jit
def _send_sums(p, own, row, buffer, sent):
    """Adds dK and dV of a tile, in fp32, to rows from ``row`` on, or stores them there."""
    HALF: gl.constexpr = p.SHAPE.KEYS * p.SHAPE.DIM // 512
    grads, rows = p.grads, p.grads.dkv_rows[0]
    low = view(own.dq.data, gl.float32, [HALF, 256], rows.layout)
    high = view(buffer, gl.float32, [HALF, 256], rows.layout)
    for grad in range(2):
        sum_row = (row + grad * grads.kv_rows) // p.SHAPE.KEYS * (2 * HALF)
        own.dq.wait(sent)
        _send_rows(rows, sum_row, low, p.SHAPE.ALONE)
        _send_rows(rows, sum_row + HALF, high, p.SHAPE.ALONE)
        store_wait(0)
        own.dq.release(sent)
        sent += 1
    return sent


@gluon.jit
def _send_rows(tensor, row, rows, ALONE: gl.constexpr):
    if ALONE:
        async_store(tensor, [row, 0], rows)
    else:
        async_add(tensor, [row, 0], rows)


@gluon.jit
def _sent_before(p, step, turn):
    """Returns how often the buffer of dQ was filled before a step: once for each piece, and once or twice at the end of each
    tile."""
    OF_A_TILE: gl.constexpr = 2 if p.SHAPE.ADDED or p.SHAPE.SPLIT_SUMS else 1
    return step * p.SHAPE.PIECES + turn * OF_A_TILE


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
    PRODUCTS: gl.constexpr = len(dk)  # hardware products that make one product here, and one of scores
    score_layout: gl.constexpr = zeros.type.layout
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    existing = existing_key_words(p, tile, score_layout)
    for entry in range(begin, end):
        q = p.q.stage(step)
        dout = p.dout.stage(step)
        values = p.v.stage(turn, opaque_zero(step))
        words, position = entry, entry
        if KIND != FULL:
            words = mask_words(p, tile, entry, exists, KIND, score_layout)
        if p.dropout.ENABLED or p.scoring.SCORED:
            position = first_query(p, tile, entry, end, exists)
        p.dout.wait(step)
        # (2) dP = dO V^T
        started = start_transposed_product(values, dout, zeros, p.SHAPE.USED)
        sent = _sent_before(p, step, turn)
        # P = exp2(S - lse), where the previous step has computed (1) S = Q K^T
        products = scores
        lse = load_lse(p, step, score_layout)
        weights = scores_to_weights(p, tile, products, lse, words, existing, stream, terms, position, KIND)
        if p.scoring.SCORED:
            # The derivative is applied here, so that its inputs need not stay in registers during the products.
            operand = gl.convert_layout(round_weights(p, weights), operand_layout)
            if not p.scoring.SIGNED:
                weights = p.scoring.times_derivative(weights, products, terms, position, tile.first)
        # The previous step's dQ is committed only here. Right after the store, the tensor cores would idle during the wait for it,
        # as the product beside it takes all of shared memory's rate.
        _commit_dq(p, own, sent - 1, step != first)
        dweights = warpgroup_mma_wait(0, deps=(started,))
        if p.SHAPE.PIECES > 1:
            delta = p.delta.index(p.dout.place(step)).load(column)
        if not p.scoring.SCORED:
            operand = gl.convert_layout(round_weights(p, weights), operand_layout)
        # (3) dV += P^T dO
        started_dv = start_product(operand, dout, dv)
        # ``opaque_zero`` keeps the compiler from moving the load of delta before the product's start.
        if p.SHAPE.PIECES == 1:
            delta = p.delta.index(p.dout.place(step) + opaque_zero(step)).load(column)
        else:
            # With dQ in pieces, the assembler would serialize all products if delta were read here. This wait returns at once.
            p.dout.wait(step)
        # dS = P (dP - delta)
        dscores = compute_dscores(p, weights, dweights, delta[None, :])
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
        if p.SHAPE.PIECES == 1:
            started_dq = warpgroup_mma(stored, keys, dq_zeros, use_acc=False, is_async=True)
            dv, dk = wait_for_both(started_dv, started_dk, 1)
            units = _units_of(p, step, dq_zeros)
            p.q.release(step)
        else:
            # dQ takes twice the registers here: one piece stays in registers during the product of the next.
            left = keys.slice(0, p.SHAPE.COLUMNS, dim=1)
            started_left = warpgroup_mma(stored, left, dq_zeros, use_acc=False, is_async=True)
            dv, dk = wait_for_both(started_dv, started_dk, 1)
            units = _units_of(p, step, dq_zeros)
            p.q.release(step)
            dq_left = warpgroup_mma_wait(0, deps=(started_left,))
            right = keys.slice(p.SHAPE.COLUMNS, p.SHAPE.COLUMNS, dim=1)
            started_dq = warpgroup_mma(stored, right, dq_zeros, use_acc=False, is_async=True)
            _store_dq(p, own, dq_left, units, sent)
            _commit_dq(p, own, sent, True)
        upcoming_turn = turn
        if p.k.STAGES > 1:
            upcoming_turn = turn + (step == last).to(gl.int32)
            p.q.wait(step + 1)
            p.k.wait(upcoming_turn)
        else:
            p.q.wait(step + 1, pred=step != last)
        # (1) S = Q K^T of the next step
        upcoming_q = p.q.stage(step + 1)
        upcoming_keys = p.k.stage(upcoming_turn)
        started_scores = start_transposed_product(upcoming_keys, upcoming_q, zeros, p.SHAPE.USED)
        dq = warpgroup_mma_wait(PRODUCTS, deps=(started_dq,))
        _store_dq(p, own, dq, units, sent + p.SHAPE.PIECES - 1)
        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        step += 1
    return (dk, dv, scores), step


@gluon.jit
def _units_of(p, step, dq):
    """Returns the units of a step's integer sums, by query, which were loaded with q. Without FIXED, the result is not used."""
    units = step
    if p.SHAPE.FIXED:
        units = p.unit.index(p.q.place(step)).load(gl.SliceLayout(1, dq.type.layout))
    return units


@gluon.jit
def _store_dq(p, own, dq, units, sent):
    """Stores a piece of a step's dQ for the sending warp."""
    WARPS_DOWN: gl.constexpr = p.SHAPE.QUERIES // 16
    own.dq.acquire(sent)
    if p.SHAPE.FIXED:
        rows = to_register_order(round_to_int(dq * units[:, None]), WARPS_DOWN, True)
        view(own.dq.data, gl.int32, rows.shape, p.grads.dq_rows.layout).store(rows)
    else:
        own.dq.data.store(to_register_order(dq, WARPS_DOWN, True))


@gluon.jit
def _commit_dq(p, own, sent, exists):
    """Hands a stored piece of dQ to the sending warp, if there is one."""
    fence_async_shared()
    own.dq.commit(sent, exists)


@gluon.jit
def _compute(p, own):
    """Runs the computing warps. Each warp group holds 64 keys."""
    WARPS: gl.constexpr = gl.num_warps()
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, p.SHAPE.QUERIES, 16])
    # Two warp groups share dQ: each takes half of its queries, or, with 64 queries, half of its columns.
    DOWN: gl.constexpr = p.SHAPE.QUERIES // 16  # warps
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, WARPS // DOWN], [16, p.SHAPE.COLUMNS * DOWN // WARPS, 16])
    zeros = gl.zeros([p.SHAPE.KEYS, p.SHAPE.QUERIES], gl.float32, layout=score_layout)
    dq_zeros = gl.zeros([p.SHAPE.QUERIES, p.SHAPE.COLUMNS], gl.float32, layout=dq_layout)

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
        if p.SHAPE.TOGETHER:
            last = step + p.heads.group * steps - 1
            for member in range(p.heads.group):
                state, step = _add_head(p, own, tile, state, step, first, last, turn, tile.batch_head + member, zeros, dq_zeros)
        else:
            state, step = _add_head(p, own, tile, state, step, first, step + steps - 1, turn, tile.batch_head, zeros, dq_zeros)
        dk, dv, scores = state
        _commit_dq(p, own, _sent_before(p, step, turn) - 1, True)
        _hand_over(p, own, tile, turn, step, dk, dv)
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
def _hand_over(p, own, tile, turn, step, dk, dv):
    """Hands dK and dV of a tile to the sending warp, through the buffer of its keys and the buffer of dQ."""
    buffer = p.k.stage(turn)
    sent = _sent_before(p, step, turn)
    if p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0):
        _hand_over_sums(p, own, dk, dv, sent, buffer)
    else:
        _hand_over_results(p, own, tile, dk, dv, sent, buffer)


@gluon.jit
def _hand_over_results(p, own, tile, dk, dv, sent, buffer):
    """Hands over dK and dV in their dtype: dK through ``buffer``, dV through the buffer of dQ."""
    dtype: gl.constexpr = p.k.data.dtype
    store_columns(buffer, scale_sums(dk, p.scale))
    if p.dropout.ENABLED:
        dv = scale_sums(dv, 1.0 / p.dropout.share())
    own.dq.acquire(sent)
    if p.SHAPE.SPLIT_SUMS:
        fence_async_shared()
        own.dq.commit(sent)
        sent += 1
        own.dq.acquire(sent)
    values = view(own.dq.data, dtype, [p.SHAPE.KEYS, p.SHAPE.DIM], p.k.data.layout)
    store_columns(values, dv)
    if p.SHAPE.OWN_STARTS:
        if tile.stop - tile.first < p.SHAPE.KEYS:
            # TMA would also overwrite rows beyond the document's end, which belong to the next document.
            barrier()
            batch, head = p.heads.of(tile.batch_head)
            kv_head = head // p.heads.group
            copy_rows(p.grads.dk, p.grads.pointers.dk, batch, kv_head, tile.first, tile.stop, buffer)
            copy_rows(p.grads.dv, p.grads.pointers.dv, batch, kv_head, tile.first, tile.stop, values)
    fence_async_shared()
    own.dq.commit(sent)


@gluon.jit
def _hand_over_sums(p, own, dk, dv, sent, buffer):
    """Hands over dK and dV in fp32."""
    _hand_over_halves(p, own, dk, sent, buffer)
    _hand_over_halves(p, own, dv, sent + 1, buffer)


@gluon.jit
def _hand_over_halves(p, own, grad, sent, buffer):
    """Hands over dK or dV in fp32, in register order, half through the buffer of dQ, half through ``buffer``. Columns that are not
    in use come last, and are not written."""
    HALF: gl.constexpr = p.SHAPE.KEYS * p.SHAPE.DIM // 512
    own.dq.acquire(sent)
    low = view(own.dq.data, gl.float32, [HALF, 256], p.grads.dkv_rows[0].layout)
    high = view(buffer, gl.float32, [HALF, 256], p.grads.dkv_rows[0].layout)
    FIRST: gl.constexpr = p.SHAPE.KEYS * grad[0].shape[1] // 512
    _store_halves(grad[0], p.SHAPE.KEYS // 16, low.slice(0, FIRST), high.slice(0, FIRST))
    if len(grad) > 1:
        REST: gl.constexpr = p.SHAPE.KEYS * grad[1].shape[1] // 512
        _store_halves(grad[1], p.SHAPE.KEYS // 16, low.slice(FIRST, REST), high.slice(FIRST, REST))
    fence_async_shared()
    own.dq.commit(sent)


@gluon.jit
def _store_halves(grad, WARPS_DOWN: gl.constexpr, low_rows, high_rows):
    HALF: gl.constexpr = low_rows.shape[0]
    low, high = to_register_order(grad, WARPS_DOWN).reshape([2, HALF, 256]).permute((1, 2, 0)).split()
    low_rows.store(low)
    high_rows.store(high)


@gluon.jit
def backward_to_128(p):
    """Runs the roles."""
    dscores = allocate_tiles(p.inputs.q.dtype, 1, p.SHAPE.QUERIES, p.SHAPE.KEYS)
    ROWS: gl.constexpr = p.SHAPE.QUERIES * p.SHAPE.COLUMNS // 256
    own = BuffersTo128(dscores, new_ring(gl.allocate_shared_memory(gl.float32, [ROWS, 256], p.grads.dq_rows.layout), 1))
    # TMA signals the barriers, so it must see that they are initialized.
    fence_async_shared()
    gl.warp_specialize(
        [(_compute, (p, own)), (load_tiles, (p,)), (_send, (p, own)), (schedule, (p.scheduler,))], [1, 1, 1], [24, 24, 24]
    )
