"""The computing warps of the backward pass for Hopper at head_dim 65 to 192, with v of 65 to 128: a warp group for each 64 keys.

Each warp group computes the weights of its 64 keys, and their dK and dV. The groups share only dQ: each reads the gradients of
scores of both groups, and computes some of the columns. While one group computes exponentials, the products of the other keep the
tensor cores busy. Tiles of 64 keys have one group. ``backward_arguments`` numbers a step's products.

Up to head_dim 128, one of two groups computes 64 of dQ's columns, and the other the rest in use. In a step's order of products, dQ
comes before dK, and passes through shared memory during dK's product, which reads only one operand there. From 129 on, dQ has three
pieces of 64 columns, and the groups alternate in computing the third. In shared memory, q and k are then three tiles of 64 columns,
without zeros.

The gradients of scores have two stages. No barrier releases a stage: a group stores its gradients of step n + 2 only after the
other group has stored its gradients of step n + 1. By then the other group has waited for its dQ of step n.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon import barrier, opaque_zero, view
from ..common.tiles import BITS, FULL, RUNS
from . import backward_steps
from .pairs import from_pairs, multiply_pairs, negate_after, to_pairs
from .products import (
    copy_rows,
    new_sums,
    scale_sums,
    stage_pieces,
    start_pieces_product,
    start_product,
    start_transposed_product,
    store_columns,
    wait_for_both,
    wait_for_sums,
)

PIECE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def sent_before(p, step, GROUP: gl.constexpr):
    """Returns how many pieces of dQ a group has sent before a step. From head_dim 129 on, it sends the third piece in every second
    step."""
    if p.SHAPE.DIM > 128:
        sent = step + (step + (1 - GROUP)) // 2
    else:
        sent = step * p.SHAPE.GROUP_PIECES
    return sent


@gluon.jit
def _start_dq(p, own, other, step, turn, piece, WIDTH: gl.constexpr = 64):
    """Starts the products of a piece of a step's dQ, one for each group. The second waits until the other group has stored its
    gradients of scores. WIDTH: columns of the piece."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zeros = gl.zeros([p.SHAPE.QUERIES, WIDTH], gl.float32, layout=layout)
    started = warpgroup_mma(*_dq_operands(p, own, step, turn, piece, WIDTH), zeros, use_acc=False, is_async=True)
    if p.SHAPE.PARTS == 2:
        other.dscores.wait(step)
        started = warpgroup_mma(*_dq_operands(p, other, step, turn, piece, WIDTH), started, is_async=True)
    return started


@gluon.jit
def _dq_operands(p, group, step, turn, piece, WIDTH: gl.constexpr):
    """Returns the gradients of scores of a group, and a piece of its keys."""
    dscores = group.tiles.index(step % p.SHAPE.PARTS)
    if p.SHAPE.DIM > 128:
        operands = dscores.permute((1, 0)), p.k.stage(turn, piece + group.GROUP * p.SHAPE.ACROSS)
    else:
        keys = p.k.stage(turn, opaque_zero(step) + group.GROUP)
        operands = dscores, keys.slice(piece * 64, WIDTH, dim=1)
    return operands


@gluon.jit
def _hand_over_dq(p, own, dq, units, sent):
    """Hands a piece of dQ to the sending warp. units: of its queries; only read with FIXED."""
    own.dq.acquire(sent)
    rows = backward_steps.dq_rows(p, dq, units)
    view(own.dq.data, rows.dtype, rows.shape, p.grads.dq_rows.layout).store(rows)
    fence_async_shared()
    own.dq.commit(sent)


@gluon.jit
def _load_units(p, step, numbers):
    """Returns the units of a step's integer sums, by query; without FIXED, ``numbers``, which are not read."""
    units = numbers
    if p.SHAPE.FIXED:
        units = p.unit.index(p.q.place(step)).load(gl.SliceLayout(1, PIECE_LAYOUT))
    return units


@gluon.jit
def _add_steps(p, own, other, tile, state, step, turn, begin, end, exists, stream, terms, zeros, KIND: gl.constexpr):
    """Adds steps begin .. end - 1, all of one kind, to the group's dK and dV, and to dQ, for head_dim up to 128. tile: the part of
    the tile from the group's keys on. state: (dV, dK)."""
    dv, dk = state
    PRODUCTS: gl.constexpr = len(dk)  # hardware products that make one product; v has as many columns as q and k
    dtype: gl.constexpr = p.q.data.dtype
    score_layout: gl.constexpr = zeros.type.layout
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    existing = backward_steps.existing_key_words(p, tile, score_layout)
    LATE: gl.constexpr = p.SHAPE.LATE
    for entry in range(begin, end):
        q = p.q.stage(step)
        dout = p.dout.stage(step)
        keys = p.k.stage(turn, opaque_zero(step) + own.GROUP)
        values = p.v.stage(turn, opaque_zero(step) + own.GROUP)
        words, position = entry, entry
        if KIND != FULL:
            words = backward_steps.mask_words(p, tile, entry, exists, KIND, score_layout)
        if p.dropout.ENABLED or p.scoring.SCORED:
            position = backward_steps.first_query(p, tile, entry, end, exists)
        # Unless LATE, these waits and the load of lse come before the products. Between them, they would queue behind a product's
        # reads of shared memory.
        p.q.wait(step)
        if not LATE:
            lse = backward_steps.load_lse(p, step, score_layout)
        p.dout.wait(step)
        # (1) S = Q K^T
        started_scores = start_transposed_product(keys, q, zeros, p.SHAPE.USED)
        # (2) dP = dO V^T
        started = start_transposed_product(values, dout, zeros, p.SHAPE.USED_V)
        products = warpgroup_mma_wait(PRODUCTS, deps=(started_scores,))
        if LATE:
            lse = backward_steps.load_lse(p, step, score_layout)
        # (a) P = exp2(S - lse)
        weights = backward_steps.scores_to_weights(p, tile, products, lse, words, existing, stream, terms, position, KIND)
        operand = gl.convert_layout(backward_steps.round_weights(p, weights), operand_layout)
        if p.scoring.SCORED and not p.scoring.SIGNED:
            # The derivative is applied here, so that its inputs need not stay in registers during the products.
            weights = p.scoring.times_derivative(weights, products, terms, position, tile.first)
        if LATE:
            dweights = warpgroup_mma_wait(0, deps=(started,))
        if p.SHAPE.PARTS == 2 and LATE:
            # (3) dV += P^T dO
            started_dv = start_product(operand, dout, dv)
            delta = p.delta.index(p.dout.place(step) + opaque_zero(step)).load(column)
        else:
            delta = p.delta.index(p.dout.place(step) + opaque_zero(step)).load(column)
            # (3) dV += P^T dO
            started_dv = start_product(operand, dout, dv)
        if not LATE:
            dweights = warpgroup_mma_wait(PRODUCTS, deps=(started,))
        elif p.SHAPE.PARTS == 1:
            # The assembler would serialize all products if delta were read here. This wait returns at once.
            p.dout.wait(step)
        # (b) dS = P (dP - delta)
        dscores = backward_steps.compute_dscores(p, weights, dweights, delta[None, :])
        if p.scoring.SIGNED:
            dscores = p.scoring.times_derivative(dscores, products, terms, position, tile.first)
        dscores = dscores.to(dtype)
        # Keys lie along the rows of the buffer, as in dQ's product, so the tensor cores read its left operand without a transpose.
        own.tiles.index(step % p.SHAPE.PARTS).permute((1, 0)).store(dscores)
        operand = gl.convert_layout(dscores, operand_layout)
        fence_async_shared()
        if p.SHAPE.PARTS == 2:
            own.dscores.commit(step)
        else:
            barrier()
        sent = sent_before(p, step, own.GROUP)
        if p.SHAPE.GROUP_PIECES == 1:
            # (5) dQ += dS K
            started_dq = _start_dq(p, own, other, step, turn, own.GROUP, p.SHAPE.PIECE_COLUMNS[own.GROUP])
            units = _load_units(p, step, delta)
            # (4) dK += dS^T Q
            started_dk = start_product(operand, q, dk)
            dv, dq = wait_for_both(started_dv, (started_dq,), PRODUCTS)
            _hand_over_dq(p, own, dq[0], units, sent)
            dk = wait_for_sums(started_dk, 0)
            p.q.release(step)
        else:
            # (4) dK += dS^T Q
            started_dk = start_product(operand, q, dk)
            # (5) dQ += dS K
            started_dq = _start_dq(p, own, other, step, turn, 0)
            dv, dk = wait_for_both(started_dv, started_dk, 1)
            units = _load_units(p, step, delta)
            p.q.release(step)
            dq = warpgroup_mma_wait(0, deps=(started_dq,))
            started_dq = _start_dq(p, own, other, step, turn, 1, p.SHAPE.PIECE_COLUMNS[1])
            _hand_over_dq(p, own, dq, units, sent)
            dq = warpgroup_mma_wait(0, deps=(started_dq,))
            _hand_over_dq(p, own, dq, units, sent + 1)
        step += 1
    return (dv, dk), step


@gluon.jit
def _add_steps_from_129(p, own, other, tile, state, step, turn, begin, end, exists, zeros, KIND: gl.constexpr):
    """Does the same as ``_add_steps`` for head_dim 129 to 192. Sums of dK and dV take 160 registers a thread, so fewer products are
    under way. state: (dV, pieces of dK)."""
    dv, dk = state
    dtype: gl.constexpr = p.q.data.dtype
    score_layout: gl.constexpr = zeros.type.layout
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    of_dv: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    of_dk: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    PIECES: gl.constexpr = p.SHAPE.ACROSS
    existing = backward_steps.existing_key_words(p, tile, score_layout)
    for entry in range(begin, end):
        dout = p.dout.stage(step)
        words = entry
        if KIND != FULL:
            words = backward_steps.mask_words(p, tile, entry, exists, KIND, score_layout)
        # (1) S = Q K^T
        p.q.wait(step)
        keys = stage_pieces(p.k, turn, opaque_zero(step) + own.GROUP * PIECES, PIECES)
        started = start_pieces_product(keys, stage_pieces(p.q, step, 0, PIECES), zeros, PIECES * 64)
        products = warpgroup_mma_wait(0, deps=(started,))
        # (a) P = exp2(S - lse)
        lse = backward_steps.load_lse(p, step, score_layout)
        weights = backward_steps.scores_to_weights(p, tile, products, lse, words, existing, 0, 0, entry, KIND)
        pairs = to_pairs(weights, dtype)
        # (2) dP - delta = dO V^T - delta
        p.dout.wait(step)
        delta = p.delta.index(p.dout.place(step) + opaque_zero(step)).load(column)
        values = p.v.stage(turn, opaque_zero(step) + own.GROUP)
        started = warpgroup_mma(values, dout.permute((1, 0)), negate_after(delta, pairs, score_layout), is_async=True)
        # (3) dV += P^T dO
        started_dv = warpgroup_mma(from_pairs(pairs, dtype, of_dv), dout, dv[0], is_async=True)
        dweights = warpgroup_mma_wait(1, deps=(started,))
        # (b) dS = P (dP - delta). Uses the weights in 16 bits, as weights in 32 bits would take registers beside all sums.
        pairs = multiply_pairs(pairs, dweights, dtype)
        own.tiles.index(step % 2).store(from_pairs(pairs, dtype, score_layout))
        operand = from_pairs(pairs, dtype, of_dk)
        # (4) dK += dS^T Q
        started_sums = (started_dv,)
        for piece in gl.static_range(PIECES):
            started_sums += (warpgroup_mma(operand, p.q.stage(step, piece), dk[piece], is_async=True),)
        fence_async_shared()
        own.dscores.commit(step)
        # Waits here, as there are no registers for the left operands of these products beside the sums of the next.
        of_values, first, second, third = warpgroup_mma_wait(0, deps=started_sums)
        dv, dk = (of_values,), (first, second, third)
        # (5) dQ += dS K
        sent = sent_before(p, step, own.GROUP)
        started_dq = _start_dq(p, own, other, step, turn, opaque_zero(step) + own.GROUP)
        units = _load_units(p, step, delta)
        p.q.release(step)
        dq = warpgroup_mma_wait(0, deps=(started_dq,))
        _hand_over_dq(p, own, dq, units, sent)
        if step % 2 == own.GROUP:
            started_dq = _start_dq(p, own, other, step, turn, opaque_zero(step) + 2)
            dq = warpgroup_mma_wait(0, deps=(started_dq,))
            _hand_over_dq(p, own, dq, units, sent + 1)
        step += 1
    return (dv, dk), step


@gluon.jit
def _add_kind(p, own, other, tile, state, step, turn, begin, end, exists, stream, terms, zeros, KIND: gl.constexpr):
    if p.SHAPE.DIM > 128:
        state, step = _add_steps_from_129(p, own, other, tile, state, step, turn, begin, end, exists, zeros, KIND)
    else:
        state, step = _add_steps(p, own, other, tile, state, step, turn, begin, end, exists, stream, terms, zeros, KIND)
    return state, step


@gluon.jit
def _add_head(p, own, other, tile, state, step, turn, batch_head, zeros):
    """Adds all steps of a tile with one query head."""
    stream = p.dropout.stream(batch_head)
    terms = p.scoring.load_head_terms(p.heads, batch_head)
    if p.table.SPARSE:
        # A column that keeps nothing takes one empty step.
        exists = tile.end > tile.begin
        stop = gl.where(exists, tile.bits, tile.runs + 1)
        state, step = _add_kind(p, own, other, tile, state, step, turn, tile.runs, stop, exists, stream, terms, zeros, RUNS)
        state, step = _add_kind(p, own, other, tile, state, step, turn, tile.bits, tile.end, True, stream, terms, zeros, BITS)
    return _add_kind(p, own, other, tile, state, step, turn, tile.begin, tile.runs, True, stream, terms, zeros, FULL)


@gluon.jit
def _new_state(p):
    dv = new_sums(p.SHAPE.KEYS, p.SHAPE.DIM_V, p.SHAPE.USED_V)
    if p.SHAPE.DIM > 128:
        piece = gl.zeros([p.SHAPE.KEYS, 64], gl.float32, layout=PIECE_LAYOUT)
        dk = (piece, piece, piece)
    else:
        dk = new_sums(p.SHAPE.KEYS, p.SHAPE.DIM, p.SHAPE.USED)
    return dv, dk


@gluon.jit
def compute_part(p, own, other):
    """Runs a computing warp group."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.QUERIES, 16])
    zeros = gl.zeros([p.SHAPE.KEYS, p.SHAPE.QUERIES], gl.float32, layout=score_layout)
    step = 0
    turn = 0
    whole = p.scheduler.tile(turn)
    while whole.first >= 0:
        tile = whole.part_from(own.GROUP * p.SHAPE.KEYS)
        state = _new_state(p)
        p.k.wait(turn)
        p.v.wait(turn)
        for member in range(p.heads.group if p.SHAPE.TOGETHER else 1):
            state, step = _add_head(p, own, other, tile, state, step, turn, tile.batch_head + member, zeros)
        dv, dk = state
        if p.SHAPE.PARTS == 2:
            # Waits until the other group's dQ has read these keys.
            own.done.commit(turn)
            other.done.wait(turn)
        if p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0):
            backward_steps.add_sums(p, tile, dk, 0, own.GROUP)
            backward_steps.add_sums(p, tile, dv, 1, own.GROUP)
        else:
            _store_results(p, tile, dk, dv, turn, own.GROUP)
        fence_async_shared()
        own.ready.commit(turn)
        turn += 1
        whole = p.scheduler.tile(turn)


@gluon.jit
def _store_results(p, tile, dk, dv, turn, GROUP: gl.constexpr):
    """Stores a group's dK and dV in the buffers of its keys and values, and in global memory if a document ends there."""
    ACROSS: gl.constexpr = p.SHAPE.ACROSS
    values = p.v.stage(turn, GROUP)
    if p.dropout.ENABLED:
        dv = scale_sums(dv, 1.0 / p.dropout.share())
    store_columns(values, dv)
    if ACROSS == 1:
        store_columns(p.k.stage(turn, GROUP), scale_sums(dk, p.scale))
    else:
        for piece in gl.static_range(ACROSS):
            store_columns(p.k.stage(turn, opaque_zero(turn) + (GROUP * ACROSS + piece)), scale_sums((dk[piece],), p.scale))
    if p.SHAPE.OWN_STARTS:
        if tile.stop - tile.first < p.SHAPE.KEYS:
            # TMA would also overwrite rows beyond the document's end, which belong to the next document.
            barrier()
            batch, head = p.heads.of(tile.batch_head)
            kv_head = head // p.heads.group
            copy_rows(p.grads.dk, p.grads.pointers.dk, batch, kv_head, tile.first, tile.stop, p.k.stage(turn, GROUP))
            copy_rows(p.grads.dv, p.grads.pointers.dv, batch, kv_head, tile.first, tile.stop, values)
