"""The backward pass for Hopper at head_dim 129 to 256: two warp groups with different roles, tiles of 64 keys, 64 queries a step.

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

from ..common.gluon import async_add, async_store, opaque_zero, record, store_wait, view, view_for_tma
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
from .products import new_sums, scale_sums, start_product, start_transposed_product, store_columns, wait_for_sums
from .ring import Ring, allocate_tiles, new_linked_ring, new_ring
from .scheduler import schedule


@record
class WideBuffers:
    weights: Ring  # a fill for each step, and one without data at the end of each tile, after the first group's last read of k
    dscores: Ring
    dq: Ring  # halves of pieces of dQ, for the sending warp
    dk: Ring  # without data; full: dK is in the buffer of k, or has been added
    dv: Ring  # without data; full: dV is in the buffer of v, or has been added


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
def _pointers(pointer, numbers, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Returns (columns in register order, their addresses), for the columns from FIRST on of a tile of 64 rows and WIDTH
    columns."""
    ALONG: gl.constexpr = numbers.shape[1] // 16
    rows = to_register_order(numbers, 4).reshape([2 * ALONG, 512])
    # A thread holds 16 adjacent bytes of each row.
    REGISTERS: gl.constexpr = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    LANES: gl.constexpr = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    WARPS: gl.constexpr = [[0, 128], [0, 256]]
    DOWN: gl.constexpr = 4 if ALONG == 2 else 5 if ALONG == 4 else 6 if ALONG == 8 else 7
    layout: gl.constexpr = gl.DistributedLinearLayout(REGISTERS[:DOWN], LANES, WARPS, [], [2 * ALONG, 512])
    row = gl.arange(0, 2 * ALONG, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    row = row // ALONG * (WIDTH // 16) + (FIRST // 16 + row % ALONG)
    return gl.convert_layout(rows, layout), pointer + ((row * 512)[:, None] + column[None, :])


@gluon.jit
def _start_dq(p, own, step, turn, sums, PIECE: gl.constexpr):
    """Starts the product of a piece of a step's dQ, in the registers of ``sums``."""
    keys = p.k.stage(turn, opaque_zero(step)).slice(PIECE * 64, 64, dim=1)
    return warpgroup_mma(own.dscores.stage(step).permute((1, 0)), keys, sums, use_acc=False, is_async=True)


@gluon.jit
def _hand_over_dq(p, own, dq, step, PIECE: gl.constexpr):
    """Hands a piece of a step's dQ to the sending warp, in halves."""
    numbers = dq
    if p.SHAPE.FIXED:
        unit = p.unit.index(p.q.place(step)).load(gl.SliceLayout(1, dq.type.layout))
        numbers = round_to_int(dq * unit[:, None])
    rows = to_register_order(numbers, 4)
    halves = rows.reshape([2, rows.shape[0] // 2, 256]).permute((1, 2, 0)).split()
    for half in gl.static_range(2):
        sent = (step * p.SHAPE.PIECES + PIECE) * 2 + half
        own.dq.acquire(sent)
        view(own.dq.stage(sent), numbers.dtype, halves[half].shape, p.grads.dq_rows.layout).store(halves[half])
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
    existing = existing_key_words(p, tile, score_layout)
    for entry in range(begin, end):
        dout = p.dout.stage(step)
        words = entry
        if KIND != FULL:
            words = mask_words(p, tile, entry, exists, KIND, score_layout)
        position = entry
        if p.dropout.ENABLED or p.scoring.SCORED:
            position = first_query(p, tile, entry, end, exists)
        # P = exp2(S - lse), where the previous step has computed (1) S = Q K^T
        weights = scores_to_weights(
            p, tile, scores, load_lse(p, step, score_layout), words, existing, stream, terms, position, KIND
        )
        operand = gl.convert_layout(round_weights(p, weights), operand_layout)
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
def _compute_weights(p, own):
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
def _compute_gradients(p, own):
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
            # dS = P (dP - delta), where the previous step has computed (2) dP = dO V^T
            dscores = compute_dscores(p, weights, dweights, delta)
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
        add_sums(p, tile, grad, WHICH)
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


@gluon.jit
def add_sums(p, tile, grad, WHICH: gl.constexpr, PART: gl.constexpr = 0):
    """Adds dK or dV of a tile, or of its part PART, to sums in global memory, or stores it there. tile: from the part's first key
    on. grad: a tuple of tensors, all as wide as the first, except possibly the last."""
    WIDTH: gl.constexpr = p.SHAPE.DIM_V if WHICH == 1 else p.SHAPE.DIM
    row = row_of_sums(p, tile, PART)
    exists = True
    if p.SHAPE.ADDED:
        # False past the last key, and for an unused item, which only another mask uses: it names the column past the last.
        exists = tile.first < p.grads.padded_kv_len
    pointer = p.grads.pointers.kv_sums + row.to(gl.int64) * WIDTH
    if WHICH == 1:
        pointer += p.grads.kv_rows.to(gl.int64) * p.SHAPE.DIM
    for part in gl.static_range(len(grad)):
        _add_or_store(pointer, grad[part], part * grad[0].shape[1], WIDTH, p.SHAPE.ALONE, exists)


@gluon.jit
def _add_or_store(pointer, grad, FIRST: gl.constexpr, WIDTH: gl.constexpr, ALONE: gl.constexpr, exists):
    numbers, pointers = _pointers(pointer, grad, FIRST, WIDTH)
    layout: gl.constexpr = numbers.type.layout
    kept = exists & (gl.arange(0, 512, layout=gl.SliceLayout(0, layout)) >= 0)[None, :]
    if ALONE:
        gl.store(pointers, numbers, mask=kept)
    else:
        gl.atomic_add(pointers, numbers, mask=kept, sem="relaxed")


@gluon.jit
def _send(p, own):
    """Runs the sending warp: adds dQ to global memory, stores dK and dV, and releases their buffers."""
    ROWS: gl.constexpr = own.dq.data.shape[1]
    ALL_HALVES: gl.constexpr = 2 * p.SHAPE.ALL_PIECES
    step = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        row = first_row(p, tile)
        entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
        for _ in range(gl.maximum(tile.end - tile.begin, 1)):
            sum_row = (row + p.scheduler.position(tile, entry, tile.end)) // p.SHAPE.QUERIES * (ALL_HALVES * ROWS)
            for half in gl.static_range(2 * p.SHAPE.PIECES):
                sent = step * (2 * p.SHAPE.PIECES) + half
                own.dq.wait(sent)
                rows = view(own.dq.stage(sent), p.grads.dq_rows.dtype, [ROWS, 256], p.grads.dq_rows.layout)
                async_add(p.grads.dq_rows, [sum_row + half * ROWS, 0], rows)
                # TMA may still read all buffers except one.
                store_wait(own.dq.STAGES - 1)
                if half >= own.dq.STAGES - 1:
                    own.dq.release(sent - (own.dq.STAGES - 1))
            if own.dq.STAGES > 1:
                store_wait(0)
                own.dq.release(step * (2 * p.SHAPE.PIECES) + 2 * p.SHAPE.PIECES - 1)
            entry = p.scheduler.next_step(tile, entry)
            step += 1
        batch, head = p.heads.of(tile.batch_head)
        position = [batch, head // p.heads.group, tile.first, 0]
        own.dv.wait(turn)
        if not (p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0)):
            async_store(p.grads.dv, position, view_for_tma(p.v.stage(turn), p.grads.dv))
            store_wait(0)
        p.v.release(turn)
        own.dk.wait(turn)
        if not (p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0)):
            async_store(p.grads.dk, position, view_for_tma(p.k.stage(turn), p.grads.dk))
            store_wait(0)
        p.k.release(turn)
        p.scheduler.slots.release(turn)
        turn += 1
        tile = p.scheduler.tile(turn)


@gluon.jit
def wide_backward(p):
    """Runs the roles."""
    dtype: gl.constexpr = p.inputs.q.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PASSED: gl.constexpr = 2 if p.scoring.SIGNED else 1
    weights = gl.allocate_shared_memory(dtype, [PASSED, 4, p.SHAPE.KEYS * p.SHAPE.QUERIES // 4], plain)
    dscores = allocate_tiles(dtype, 1, p.SHAPE.KEYS, p.SHAPE.QUERIES)
    DQ_STAGES: gl.constexpr = 3 - PASSED
    dq = gl.allocate_shared_memory(gl.float32, [DQ_STAGES, p.SHAPE.QUERIES * 64 // 512, 256], p.grads.dq_rows.layout)
    own = WideBuffers(
        weights=new_ring(weights, 1, PIECES=PASSED),
        dscores=new_ring(dscores, 1),
        dq=new_ring(dq, DQ_STAGES),
        dk=new_linked_ring(p.k, p.k.data, 1),
        dv=new_linked_ring(p.v, p.v.data, 1),
    )
    # TMA signals the barriers, so it must see that they are initialized.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute_weights, (p, own)),
            (_compute_gradients, (p, own)),
            (load_tiles, (p,)),
            (_send, (p, own)),
            (schedule, (p.scheduler,)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
