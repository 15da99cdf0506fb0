"""The backward pass for Hopper: one pass over key tiles computes dK and dV, and accumulates dQ along the way.

Persistent programs: a scheduler warp, a loading warp, eight computing warps, and a sending warp that hands results to TMA, which
adds tiles of dQ to an fp32 array in global memory. Scores are transposed, with keys along rows: this makes them the left operand of
dV without a pass through shared memory. The scores of the next step, or of the next tile's first step, are computed during this
step's other products, to keep the tensor cores busy while the exponentials run.

Tiles are added to dQ in order of arrival, and a floating-point sum depends on its order. For bitwise repeatable gradients, tiles
are added as integers, in units of a power of two per query: see ``bound_kernel``.

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.config import padded_head_dim
from ..common.gluon import async_add, async_store, barrier, fresh_zero, of_tensor, record, store_wait, view
from ..common.tiles import BITS, FULL, LOG2_E, RUNS, load_tile, store_tile
from ..launch import tuned
from ..launch.launch import Recording, multiprocessors, rows_of, table_arguments
from ..launch.launch import described as described_for_triton
from ..launch.replay import known_call
from .backward_steps import (
    NOT_SPECIALIZED,
    BackwardInputs,
    dscores_of,
    existing_keys,
    first_line,
    first_query,
    kept_weights,
    load_tiles,
    mask_words,
    rounded,
    weights_of,
)
from .configs import DQ_OF_WEIGHTS, backward_config, backward_keys, backward_of_variant
from .descriptors import FLOAT_LAYOUT, ROW_LAYOUT, blocks_by_document, described, heads_together, tile_queue
from .dropout import Dropout
from .lengths import TokenLengths, new_lengths, own_barrier
from .products import (
    both_finished,
    copy_rows,
    scaled_by,
    store_columns,
    times,
    times_transposed,
    used_columns,
    zero_sums,
)
from .ring import Ring, ring_beside, ring_of
from .scheduler import Heads, Scheduler, TableArguments, new_scheduler, schedule
from .scores import ScoreTerms
from .variant import PLAIN, HopperVariant, hopper_variant
from .wide_backward import wide_backward_kernel

ROWS = 64  # tokens per program of bound_kernel and prepare_kernel


@record
class Gradients:
    """Where gradients go. Rows of dQ hold sums in register order. So do those of dK and dV: with ADDED of all tiles, with SPLIT of
    each split of a column, until ``combine_columns_kernel``."""

    dq_rows: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    bases: gl.tuple  # the addresses of dK and dV, with blocks of documents
    dkv_rows: tma.tensor_descriptor
    padded_q_len: gl.tensor
    padded_kv_len: gl.tensor
    kv_lines: gl.tensor
    splits: gl.tensor  # tiles of splits per head
    ADDED: gl.constexpr  # whether query heads share dK and dV
    SPLIT: gl.constexpr  # whether columns may be split; not with ADDED, which adds up splits too
    FIXED: gl.constexpr  # whether gradients are independent of the order in which tiles are added


@record
class BackwardArguments:
    """What the warps share."""

    inputs: BackwardInputs
    grads: Gradients
    table: TableArguments
    heads: Heads
    scale: gl.tensor
    scoring: ScoreTerms
    lengths: TokenLengths
    arrived: gl.shared_memory_descriptor  # the loading warp's own barrier, with lengths
    dropout: Dropout
    scheduler: Scheduler
    k: Ring  # one stage per tile
    v: Ring
    q: Ring  # one stage per step
    dout: Ring  # released with q
    lse: gl.shared_memory_descriptor  # loaded with q
    unit: gl.shared_memory_descriptor  # loaded with q
    delta: gl.shared_memory_descriptor  # loaded with dout
    dscores: gl.shared_memory_descriptor
    dq: Ring  # one stage, through which every step sends dQ, piece by piece, and every tile dK and dV
    DIM: gl.constexpr
    USED: gl.constexpr  # of DIM columns; the others are zeros
    KEYS: gl.constexpr  # per tile
    QUERIES: gl.constexpr  # per step
    COLUMNS: gl.constexpr  # of a piece of dQ: as many as there is room for at a time
    PIECES: gl.constexpr  # that have columns in use
    RAGGED: gl.constexpr  # whether a dense walk's last tile has fewer keys


@gluon.jit
def _send(p):
    """The sending warp: adds tiles of dQ to global memory, and at the end of a tile stores its dK and dV, or adds them. It also
    releases what the step has used, as the computing warps would have to wait for each other to do so."""
    ROWS: gl.constexpr = p.QUERIES * p.COLUMNS // 256
    ALL_PIECES: gl.constexpr = p.DIM // p.COLUMNS
    # Units of integer sums, which lie beside q, are read with every piece.
    RELEASED: gl.constexpr = p.PIECES - 1 if p.grads.FIXED else 0
    grads = p.grads
    step = 0
    sent = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        line = first_line(p, tile)
        entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
        steps = gl.maximum(tile.end - tile.begin, 1)
        last = step + steps - 1
        for _ in range(steps):
            position = p.scheduler.position(tile, entry, tile.end)
            rows = view(p.dq.data, grads.dq_rows.dtype, [ROWS, 256], grads.dq_rows.layout)
            for piece in gl.static_range(p.PIECES):
                p.dq.wait(sent)
                if piece == RELEASED:
                    # The warps that hand over dQ have finished all products with what is released.
                    p.q.release(step)
                    p.v.release(turn, pred=step == last)
                async_add(grads.dq_rows, [((line + position) // p.QUERIES * ALL_PIECES + piece) * ROWS, 0], rows)
                store_wait(0)
                p.dq.release(sent)
                sent += 1
            entry = gl.where(entry + 1 >= tile.end, tile.begin, entry + 1)
            step += 1
        sent = _send_keys(p, tile, turn, sent)
        p.k.release(turn)
        if p.k.STAGES == 1:
            p.scheduler.slots.release(turn)
        turn += 1
        tile = p.scheduler.tile(turn)


@gluon.jit
def _send_keys(p, tile, turn, sent):
    """Stores dK and dV of a tile, or adds them, from the buffer of its keys, and that of dQ."""
    grads = p.grads
    batch, head = p.heads.of_line(tile.line)
    kv_head = head // p.heads.group
    place = p.k.stage(turn)
    if grads.ADDED:
        # With FIXED, finish_kernel sums them later over query heads.
        head_line = tile.line if grads.FIXED else batch * (p.heads.queries // p.heads.group) + kv_head
        line = head_line * grads.padded_kv_len + tile.first
        if p.table.OWN_STARTS:
            line += tile.to_place
        if p.scheduler.SPLIT:
            # An item of another mask that this one does not use names the column past the last: its rows lie past the end of all.
            line = gl.where(tile.first < grads.padded_kv_len, line, 2 * grads.kv_lines)
        sent = _send_sums(p, line, place, sent, grads.FIXED)
    elif p.table.OWN_STARTS:
        if tile.stop - tile.first == p.KEYS:
            sent = _send_results(p, batch, kv_head, tile.first, place, sent)
        else:
            # The computing warps have stored them.
            p.dq.wait(sent)
            p.dq.release(sent)
            sent += 1
    elif grads.SPLIT:
        if tile.split > 0:
            sent = _send_sums(p, (tile.line * grads.splits + tile.split - 1) * p.KEYS, place, sent, True)
        else:
            sent = _send_results(p, batch, kv_head, tile.first, place, sent)
    else:
        sent = _send_results(p, batch, kv_head, tile.first, place, sent)
    return sent


@gluon.jit
def _send_results(p, batch, kv_head, first_key, place, sent):
    """Stores dK and dV of a tile in their tensors."""
    grads = p.grads
    p.dq.wait(sent)
    async_store(grads.dk, [batch, kv_head, first_key, 0], of_tensor(place, grads.dk))
    if grads.SPLIT:
        # As many turns as for a split; this one did not use the buffer.
        p.dq.release(sent)
        sent += 1
        p.dq.wait(sent)
    values = view(p.dq.data, grads.dv.dtype, [1, 1, p.KEYS, p.DIM], grads.dv.layout)
    async_store(grads.dv, [batch, kv_head, first_key, 0], values)
    store_wait(0)
    p.dq.release(sent)
    return sent + 1


@gluon.jit
def _send_sums(p, line, place, sent, ALONE: gl.constexpr):
    """Stores dK and dV of a tile in fp32, from ``line`` on, or adds them to what is there unless it is ALONE."""
    HALF: gl.constexpr = p.KEYS * p.DIM // 512
    grads = p.grads
    low = view(p.dq.data, gl.float32, [HALF, 256], grads.dkv_rows.layout)
    high = view(place, gl.float32, [HALF, 256], grads.dkv_rows.layout)
    for grad in range(2):
        row = (line + grad * grads.kv_lines) // p.KEYS * (2 * HALF)
        p.dq.wait(sent)
        _send_rows(grads, row, low, ALONE)
        _send_rows(grads, row + HALF, high, ALONE)
        store_wait(0)
        p.dq.release(sent)
        sent += 1
    return sent


@gluon.jit
def _send_rows(grads, row, rows, ALONE: gl.constexpr):
    if ALONE:
        async_store(grads.dkv_rows, [row, 0], rows)
    else:
        async_add(grads.dkv_rows, [row, 0], rows)


@gluon.jit
def _in_register_order(grad, WARPS_DOWN: gl.constexpr, ALTERNATING: gl.constexpr = False):
    """A gradient tile as rows of 256 elements in the order in which threads hold them: each thread writes whole 16-byte units,
    adjacent to its neighbours'. ``finish_kernel`` restores the order. ALTERNATING: warps that divide columns take turns."""
    ROWS: gl.constexpr = grad.shape[0]
    DIM: gl.constexpr = grad.shape[1]
    ACROSS: gl.constexpr = gl.num_warps() // WARPS_DOWN
    pieces = grad.reshape([WARPS_DOWN, 2, 8, ACROSS, DIM // (16 * ACROSS), 2, 4, 2])
    pieces = pieces.permute((1, 4, 3, 0, 2, 6, 5, 7) if ALTERNATING else (1, 3, 4, 0, 2, 6, 5, 7))
    return pieces.reshape([ROWS * DIM // 256, 256])


@gluon.jit
def _walk(p, tile, state, step, last, turn, begin, end, exists, stream, place, zeros, dq_zeros, KIND: gl.constexpr):
    """Adds steps begin .. end - 1, all of one kind, to dK, dV and dQ.

    state: dK, dV and the scores of the step, (keys, queries). last: the tile's last step, during which the scores of the next
    tile's first step are computed; or, with room for the keys of one tile only, scores that nobody reads.
    """
    dk, dv, scores = state
    dtype: gl.constexpr = p.q.data.dtype
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    PRODUCTS: gl.constexpr = len(dk)  # that make one, here and in scores
    SENT: gl.constexpr = 2 if p.grads.ADDED or p.grads.SPLIT else 1  # how often a tile's end goes through the buffer of dQ
    score_layout: gl.constexpr = zeros.type.layout
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    existing = existing_keys(p, tile, score_layout)
    for entry in range(begin, end):
        q = p.q.stage(step)
        dout = p.dout.stage(step)
        values = p.v.stage(turn, fresh_zero(step))
        words, position = entry, entry
        if KIND != FULL:
            words = mask_words(p, tile, entry, exists, KIND, score_layout)
        if p.dropout.ENABLED or p.scoring.SCORED:
            position = first_query(p, tile, entry, end, exists)
        p.dout.wait(step)
        started = times_transposed(values, dout, zeros, p.USED)
        products = scores
        weights = weights_of(p, tile, products, step, words, existing, stream, place, position, KIND)
        if p.scoring.SCORED:
            # Here, so that the derivative's values need not stay in registers during the products.
            operand = gl.convert_layout(kept_weights(p, weights), operand_layout)
            if not p.scoring.SIGNED:
                weights = p.scoring.times_derivative(weights, products, place, position, tile.first)
        dweights = warpgroup_mma_wait(0, deps=(started,))
        if p.PIECES > 1:
            delta = p.delta.index(p.dout.place(step)).load(column)
        if not p.scoring.SCORED:
            operand = gl.convert_layout(kept_weights(p, weights), operand_layout)
        started_dv = times(operand, dout, dv)
        # What follows must stay behind the product's start; the compiler would move it before.
        if p.PIECES == 1:
            delta = p.delta.index(p.dout.place(step) + fresh_zero(step)).load(column)
        else:
            # With dQ in pieces, the assembler serializes all products if delta is read here. This returns at once.
            p.dout.wait(step)
        dscores = dscores_of(p, weights, dweights, delta[None, :])
        if p.scoring.SIGNED:
            dscores = p.scoring.times_derivative(dscores, products, place, position, tile.first)
        p.dscores.index(0).store(dscores.to(dtype))
        ds_operand = gl.convert_layout(dscores.to(dtype), operand_layout)
        started_dk = times(ds_operand, q, dk)
        fence_async_shared()
        barrier()
        keys = p.k.stage(turn, fresh_zero(step))
        stored = p.dscores.index(fresh_zero(step))
        sent = step * p.PIECES + turn * SENT
        if p.PIECES == 1:
            started_dq = warpgroup_mma(stored.permute((1, 0)), keys, dq_zeros, use_acc=False, is_async=True)
            dv, dk = both_finished(started_dv, started_dk, 1)
        else:
            # dQ takes twice the registers here, which hold one piece beside the next one's product.
            left = keys.slice(0, p.COLUMNS, dim=1)
            started_left = warpgroup_mma(stored.permute((1, 0)), left, dq_zeros, use_acc=False, is_async=True)
            dv, dk = both_finished(started_dv, started_dk, 1)
            dq_left = warpgroup_mma_wait(0, deps=(started_left,))
            right = keys.slice(p.COLUMNS, p.COLUMNS, dim=1)
            started_dq = warpgroup_mma(stored.permute((1, 0)), right, dq_zeros, use_acc=False, is_async=True)
            _hand_over_queries(p, dq_left, step, sent)
        upcoming_turn = turn
        if p.k.STAGES > 1:
            upcoming_turn = turn + (step == last).to(gl.int32)
            p.q.wait(step + 1)
            p.k.wait(upcoming_turn)
        else:
            p.q.wait(step + 1, pred=step != last)
        upcoming_q = p.q.stage(step + 1)
        upcoming_keys = p.k.stage(upcoming_turn)
        started_scores = times_transposed(upcoming_keys, upcoming_q, zeros, p.USED)
        dq = warpgroup_mma_wait(PRODUCTS, deps=(started_dq,))
        _hand_over_queries(p, dq, step, sent + p.PIECES - 1)

        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        step += 1
    return (dk, dv, scores), step


@gluon.jit
def _hand_over_queries(p, dq, step, sent):
    """Hands a piece of dQ of a step to the sending warp."""
    WARPS_DOWN: gl.constexpr = p.QUERIES // 16
    p.dq.acquire(sent)
    if p.grads.FIXED:
        unit = p.unit.index(p.q.place(step)).load(gl.SliceLayout(1, dq.type.layout))
        rows = _in_register_order(rounded(dq * unit[:, None]), WARPS_DOWN, True)
        view(p.dq.data, gl.int32, rows.shape, p.grads.dq_rows.layout).store(rows)
    else:
        p.dq.data.store(_in_register_order(dq, WARPS_DOWN, True))
    fence_async_shared()
    p.dq.commit(sent)


@gluon.jit
def _compute(p):
    """The computing warps: each group of four holds 64 keys."""
    WARPS: gl.constexpr = gl.num_warps()
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, p.QUERIES, 16])
    # Two warp groups share dQ: each takes half its queries, or with 64 queries half its columns.
    DOWN: gl.constexpr = p.QUERIES // 16  # warps
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, WARPS // DOWN], [16, p.COLUMNS * DOWN // WARPS, 16])
    zeros = gl.zeros([p.KEYS, p.QUERIES], gl.float32, layout=score_layout)
    dq_zeros = gl.zeros([p.QUERIES, p.COLUMNS], gl.float32, layout=dq_layout)

    scores = zeros
    if p.k.STAGES > 1:
        scores = _first_scores(p, 0, 0, zeros)
    step = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        last = step + gl.maximum(tile.end - tile.begin, 1) - 1
        if p.k.STAGES == 1:
            scores = _first_scores(p, turn, step, zeros)
        state = (zero_sums(p.KEYS, p.DIM, p.USED), zero_sums(p.KEYS, p.DIM, p.USED), scores)
        stream = p.dropout.stream(tile.line)
        place = p.scoring.place(p.heads, tile.line)
        p.v.wait(turn)
        if p.table.SPARSE:
            # A column that keeps nothing takes one empty step.
            exists = tile.end > tile.begin
            stop = gl.where(exists, tile.bits, tile.runs + 1)
            state, step = _walk(p, tile, state, step, last, turn, tile.runs, stop, exists, stream, place, zeros, dq_zeros, RUNS)
            state, step = _walk(p, tile, state, step, last, turn, tile.bits, tile.end, True, stream, place, zeros, dq_zeros, BITS)
        state, step = _walk(p, tile, state, step, last, turn, tile.begin, tile.runs, True, stream, place, zeros, dq_zeros, FULL)
        dk, dv, scores = state
        _hand_over(p, tile, turn, step, dk, dv)
        turn += 1
        tile = p.scheduler.tile(turn)


@gluon.jit
def _first_scores(p, turn, step, zeros):
    """The scores of a tile's first step, where no step before has computed them."""
    p.k.wait(turn)
    p.q.wait(step)
    started = times_transposed(p.k.stage(turn), p.q.stage(step), zeros, p.USED)
    return warpgroup_mma_wait(0, deps=(started,))


@gluon.jit
def _hand_over(p, tile, turn, step, dk, dv):
    """Hands dK and dV of a tile to the sending warp, through the buffer of its keys, and that of dQ once the last tile of dQ has
    left."""
    place = p.k.stage(turn)
    step *= p.PIECES
    if p.grads.ADDED:
        _hand_over_sums(p, dk, dv, step + 2 * turn, place)
    elif p.grads.SPLIT:
        if tile.split > 0:
            _hand_over_sums(p, dk, dv, step + 2 * turn, place)
        else:
            _hand_over_results(p, tile, dk, dv, step + 2 * turn, place)
    else:
        _hand_over_results(p, tile, dk, dv, step + turn, place)


@gluon.jit
def _hand_over_results(p, tile, dk, dv, sent, place):
    """Hands over dK and dV in their dtype: dK through ``place``, dV through the buffer of dQ."""
    dtype: gl.constexpr = p.k.data.dtype
    store_columns(place, scaled_by(dk, p.scale))
    if p.dropout.ENABLED:
        dv = scaled_by(dv, 1.0 / (1.0 - p.dropout.p))
    p.dq.acquire(sent)
    if p.grads.SPLIT:
        fence_async_shared()
        p.dq.commit(sent)
        sent += 1
        p.dq.acquire(sent)
    values = view(p.dq.data, dtype, [p.KEYS, p.DIM], p.k.data.layout)
    store_columns(values, dv)
    if p.table.OWN_STARTS:
        if tile.stop - tile.first < p.KEYS:
            # TMA would also store rows beyond the document's end, which are its neighbour's.
            barrier()
            batch, head = p.heads.of_line(tile.line)
            kv_head = head // p.heads.group
            copy_rows(p.grads.dk, p.grads.bases[0], batch, kv_head, tile.first, tile.stop, place)
            copy_rows(p.grads.dv, p.grads.bases[1], batch, kv_head, tile.first, tile.stop, values)
    fence_async_shared()
    p.dq.commit(sent)


@gluon.jit
def _hand_over_sums(p, dk, dv, sent, place):
    """Hands over dK and dV in fp32."""
    _hand_over_halves(p, dk, sent, place)
    _hand_over_halves(p, dv, sent + 1, place)


@gluon.jit
def _hand_over_halves(p, grad, sent, place):
    """Hands over dK or dV in fp32, in register order: half through the buffer of dQ, half through ``place``. Columns that are not
    in use come last, and hold what was there."""
    HALF: gl.constexpr = p.KEYS * p.DIM // 512
    p.dq.acquire(sent)
    low = view(p.dq.data, gl.float32, [HALF, 256], p.grads.dkv_rows.layout)
    high = view(place, gl.float32, [HALF, 256], p.grads.dkv_rows.layout)
    FIRST: gl.constexpr = p.KEYS * grad[0].shape[1] // 512
    _store_halves(grad[0], p.KEYS // 16, low.slice(0, FIRST), high.slice(0, FIRST))
    if len(grad) > 1:
        REST: gl.constexpr = p.KEYS * grad[1].shape[1] // 512
        _store_halves(grad[1], p.KEYS // 16, low.slice(FIRST, REST), high.slice(FIRST, REST))
    fence_async_shared()
    p.dq.commit(sent)


@gluon.jit
def _store_halves(grad, WARPS_DOWN: gl.constexpr, low_rows, high_rows):
    HALF: gl.constexpr = low_rows.shape[0]
    low, high = _in_register_order(grad, WARPS_DOWN).reshape([2, HALF, 256]).permute((1, 2, 0)).split()
    low_rows.store(low)
    high_rows.store(high)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_kernel(
    q_tensor,
    k_tensor,
    v_tensor,
    dout_tensor,
    dq_rows,
    dk_tensor,
    dv_tensor,
    dk_ptr,
    dv_ptr,
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
    splits,
    items,
    tiles,
    heads_together,
    queue,
    scale,
    score_scale,
    seed,
    dropout_p,
    variant,
    DIM: gl.constexpr,
    USED: gl.constexpr,
    PIECES: gl.constexpr,
    OWN_STARTS: gl.constexpr,
    KEYS: gl.constexpr,
    QUERIES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    DOUT_STAGES: gl.constexpr,
    TABLE_BLOCK: gl.constexpr,
    SPARSE: gl.constexpr,
    ADDED: gl.constexpr,
    SPLIT: gl.constexpr,
    FIXED: gl.constexpr,
    DROPOUT: gl.constexpr,
    RAGGED: gl.constexpr,
    SCORED: gl.constexpr,
    REACH: gl.constexpr,
    SCORE: gl.constexpr,
    DERIVATIVE: gl.constexpr,
):
    dtype: gl.constexpr = q_tensor.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    K_STAGES: gl.constexpr = KEYS // 64
    k = ring_of(gl.allocate_shared_memory(dtype, [K_STAGES, KEYS, DIM], flat), K_STAGES)
    v = ring_of(gl.allocate_shared_memory(dtype, [1, KEYS, DIM], flat), 1)
    q = ring_of(gl.allocate_shared_memory(dtype, [Q_STAGES, QUERIES, DIM], flat), Q_STAGES)
    dout = ring_beside(q, gl.allocate_shared_memory(dtype, [DOUT_STAGES, QUERIES, DIM], flat), DOUT_STAGES)
    lse = gl.allocate_shared_memory(gl.float32, [Q_STAGES, QUERIES], lse_rows.layout)
    delta = gl.allocate_shared_memory(gl.float32, [DOUT_STAGES, QUERIES], delta_rows.layout)
    unit = lse
    if FIXED:
        unit = gl.allocate_shared_memory(gl.float32, [Q_STAGES, QUERIES], unit_rows.layout)
    dscores = gl.allocate_shared_memory(dtype, [1, KEYS, QUERIES], flat)
    dq = ring_of(gl.allocate_shared_memory(gl.float32, [QUERIES * DIM // (256 * PIECES), 256], dq_rows.layout), 1)
    table = TableArguments(
        mask_index=mask_index,
        mask_batch_stride=mask_batch_stride,
        mask_head_stride=mask_head_stride,
        work=work,
        entries=row_idx,
        tile_idx=tile_idx,
        tile_runs=tile_runs,
        tile_bits=tile_bits,
        BLOCK=TABLE_BLOCK,
        SPARSE=SPARSE,
        OWN_STARTS=OWN_STARTS,
    )
    heads_of = Heads(heads, group)
    lengths = new_lengths(variant, q_len, q_len)
    kv_len = q_len  # what warps share is only what they use
    if SCORED or lengths.ANY:
        kv_len = k_tensor.shape[2]
        lengths = new_lengths(variant, q_len, kv_len)
    arrived = k.full
    if lengths.ANY:
        arrived = own_barrier()
    scheduler = new_scheduler(
        k, table, heads_of, heads_together, items, tiles, queue, q_len, lengths, KEYS, STEP=QUERIES, BY_KEY=True, SPLIT=SPLIT
    )
    # Makes the initialized barriers visible to TMA, which signals them.
    fence_async_shared()
    p = BackwardArguments(
        inputs=BackwardInputs(q_tensor, k_tensor, v_tensor, dout_tensor, lse_rows, delta_rows, unit_rows),
        grads=Gradients(
            dq_rows=dq_rows,
            dk=dk_tensor,
            dv=dv_tensor,
            bases=(dk_ptr, dv_ptr) if OWN_STARTS else (),
            dkv_rows=dkv_rows,
            padded_q_len=padded_q_len,
            padded_kv_len=padded_kv_len,
            kv_lines=kv_lines,
            splits=splits,
            ADDED=ADDED,
            SPLIT=SPLIT and not ADDED,
            FIXED=FIXED,
        ),
        table=table,
        heads=heads_of,
        scale=scale,
        scoring=ScoreTerms(
            score_scale,
            kv_len - q_len,
            (kv_len - 1,) if SCORE is not None else (),
            variant,
            SCORED,
            REACH,
            SCORE,
            DERIVATIVE,
            BY_KEY=True,
            SIGNED=DROPOUT and DERIVATIVE is not None,
        ),
        lengths=lengths,
        arrived=arrived,
        dropout=Dropout(seed, dropout_p, DROPOUT),
        scheduler=scheduler,
        k=k,
        v=v,
        q=q,
        dout=dout,
        lse=lse,
        unit=unit,
        delta=delta,
        dscores=dscores,
        dq=dq,
        DIM=DIM,
        USED=USED,
        KEYS=KEYS,
        QUERIES=QUERIES,
        COLUMNS=DIM // PIECES,
        PIECES=(USED * PIECES + DIM - 1) // DIM,
        RAGGED=RAGGED,
    )
    gl.warp_specialize([(_compute, (p,)), (load_tiles, (p,)), (_send, (p,)), (schedule, (scheduler,))], [1, 1, 1], [24, 24, 24])


@triton.jit(do_not_specialize=["kv_heads"])
def bound_kernel(k_tensor, v_tensor, bounds_ptr, kv_heads, variant, DIM: tl.constexpr, DIM_V: tl.constexpr, TILE: tl.constexpr):
    """The largest element of K and the largest norm of a row of V, for each key head, into (2, heads) zeros.

    They bound dQ. For a query it is sum P (dP - delta) K, where the P sum to 1, and |dP| <= |dOut| |V|; dropout sets some dP to 0
    and divides only at the end. So each tile's share of dQ, and their sum, is less than 2^31 times some power of two, and integers
    sum to the same in any order. That unit is 2^-30 of the bound: some 2^-18 of dQ over 16,384 keys of random directions, while
    16-bit weights round to 2^-9.
    """
    batch = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    first = tl.program_id(0) * TILE
    k = load_tile(k_tensor, batch, head, first, TILE, DIM).to(tl.float32)
    v = load_tile(v_tensor, batch, head, first, TILE, DIM_V).to(tl.float32)
    token = first + tl.arange(0, TILE)
    if variant.kv_starts is not None:
        exist = (token >= tl.load(variant.kv_starts + batch))[:, None]
        k, v = tl.where(exist, k, 0.0), tl.where(exist, v, 0.0)
    if variant.kv_lens is not None:
        exist = (token < tl.load(variant.kv_lens + batch))[:, None]
        k, v = tl.where(exist, k, 0.0), tl.where(exist, v, 0.0)
    tl.atomic_max(bounds_ptr + tl.program_id(1), tl.max(tl.max(tl.abs(k), 1), 0))
    longest = tl.max(tl.sqrt_rn(tl.sum(v * v, 1)), 0)
    tl.atomic_max(bounds_ptr + tl.num_programs(1) + tl.program_id(1), longest)


@triton.jit
def _tokens_of(starts_ptr, place, length, BLOCK: tl.constexpr):
    """(the token at a place on the axis of whole blocks, the end of its block's tokens), or the end of the axis if blocks start at
    multiples of their size. starts_ptr: (blocks + 1,) int32, where each block starts, which is where the one before ends."""
    first = place
    stop = length
    if starts_ptr is not None:
        first = tl.load(starts_ptr + place // BLOCK) + place % BLOCK
        stop = tl.load(starts_ptr + place // BLOCK + 1)
    return first, stop


@triton.jit(do_not_specialize=["heads", "group", "q_len", "padded_q_len", "share"])
def prepare_kernel(
    out_tensor,
    dout_tensor,
    lse_ptr,
    dlse_ptr,
    dq_ptr,
    rows_ptr,
    bounds_ptr,
    starts_ptr,
    heads,
    group,
    q_len,
    padded_q_len,
    share,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    FIXED: tl.constexpr,
    DROPOUT: tl.constexpr,
    CUT: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    """What a query adds to every product, in rows padded to whole tiles: lse in base 2, +inf if the query keeps nothing, and
    delta = rowsum(dOut * Out) - dLse; with dropout, delta times the kept share, by which gradients are divided at the end. Also
    zeros, to which dQ is added. With FIXED, also the power of two that is the unit of its dQ. CUT: whether some queries may not
    exist, whose rows may be anything. starts_ptr: where blocks start, or None: see ``_tokens_of``."""
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    place = tl.program_id(0) * TILE
    first, stop = _tokens_of(starts_ptr, place, q_len, TABLE_BLOCK)
    out = load_tile(out_tensor, batch, head, first, TILE, DIM_V).to(tl.float32)
    dout = load_tile(dout_tensor, batch, head, first, TILE, DIM_V).to(tl.float32)
    query = first + tl.arange(0, TILE)
    line = tl.program_id(1).to(tl.int64) * q_len + query
    lse = tl.load(lse_ptr + line, mask=query < stop, other=-float("inf"))
    if CUT:
        dout = tl.where((lse > -float("inf"))[:, None], dout, 0.0)
    lse = tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E)
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + line, mask=query < stop, other=0.0)
    if CUT or starts_ptr is not None:
        delta = tl.where(lse < float("inf"), delta, 0.0)
    if DROPOUT:
        delta *= share
    padded = tl.program_id(1).to(tl.int64) * padded_q_len + (place + tl.arange(0, TILE))
    lines = tl.num_programs(1).to(tl.int64) * padded_q_len
    tl.store(rows_ptr + padded, lse)
    tl.store(rows_ptr + lines + padded, delta)
    if FIXED:
        kv_heads = tl.num_programs(1) // group
        bounds = bounds_ptr + tl.program_id(1) // group
        length = tl.sqrt_rn(tl.sum(dout * dout, 1))
        most = (length * tl.load(bounds + kv_heads) + tl.abs(delta)) * tl.load(bounds)
        # A number below 2^(e + 1) is at most 2^30 units of 2^(e - 29); the other half of the integer range absorbs rounding.
        exponent = tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - 127, -97)
        unit = ((29 - exponent + 127) << 23).to(tl.float32, bitcast=True)
        # Without a bound the unit is NaN, as a float sum would be.
        tl.store(rows_ptr + 2 * lines + padded, tl.where(most < float("inf"), unit, float("nan")))
    tl.store(
        dq_ptr + padded[:, None] * DIM + tl.arange(0, DIM)[None, :], tl.zeros([TILE, DIM], tl.int32).to(dq_ptr.dtype.element_ty)
    )


@triton.jit
def _from_register_order(sums, TILE: tl.constexpr, DIM: tl.constexpr, ACROSS: tl.constexpr, PIECES: tl.constexpr):
    """The reverse of ``_in_register_order``: a (TILE, DIM) tile from TILE * DIM numbers. ACROSS: warps that take turns along a row.
    PIECES: of its columns, one after the other."""
    ALONG: tl.constexpr = DIM // (16 * ACROSS * PIECES)
    parts = sums.reshape(PIECES, 2, ALONG, ACROSS, TILE // 16, 8, 4, 2, 2).permute(4, 1, 5, 0, 3, 2, 7, 6, 8)
    return parts.reshape(TILE, DIM)


@triton.jit
def _store_rows(rows, tile, batch, head, first, stop, TILE: tl.constexpr, DIM: tl.constexpr):
    """``store_tile`` of rows first .. stop - 1. rows: ``Rows``, as no descriptor ends there."""
    PIECE: tl.constexpr = 128 // rows.base.dtype.element_ty.primitive_bitwidth
    row, column = first + tl.arange(0, TILE), tl.arange(0, DIM)
    begin = batch.to(tl.int64) * rows.batch_stride + head.to(tl.int64) * rows.head_stride + row.to(tl.int64) * rows.token_stride
    exists = (row < stop)[:, None]
    if rows.pieces is not None:
        exists = exists & (column < rows.pieces * PIECE)[None, :]
    tl.store(rows.base + (begin * PIECE)[:, None] + column[None, :], tile.to(rows.base.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["heads", "group", "padded_len", "factor"])
def finish_kernel(
    grad_tensor,
    sums_ptr,
    unit_ptr,
    starts_ptr,
    heads,
    group,
    padded_len,
    factor,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ACROSS: tl.constexpr,
    PIECES: tl.constexpr,
    FIXED: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    """A gradient from its sums, which are in register order: times a factor, in the dtype and memory order of its tensor. TILE:
    rows of the added tiles. ACROSS, PIECES: see ``_from_register_order``. group: how many consecutive sums make one gradient.
    FIXED: sums are integers, in units of a power of two per row. starts_ptr: where blocks start, or None: see ``_tokens_of``."""
    first = tl.program_id(0) * TILE
    sums = tl.zeros([TILE * DIM], tl.float32)
    for member in range(group):
        line = (tl.program_id(1).to(tl.int64) * group + member) * padded_len + first
        sums += tl.load(sums_ptr + line * DIM + tl.arange(0, TILE * DIM)).to(tl.float32)
    grad = _from_register_order(sums, TILE, DIM, ACROSS, PIECES) * factor
    if FIXED:
        unit = tl.load(unit_ptr + tl.program_id(1).to(tl.int64) * padded_len + first + tl.arange(0, TILE))
        grad = grad / unit[:, None]
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    if starts_ptr is None:
        store_tile(grad_tensor, grad, batch, head, first, TILE, DIM)
    else:
        token, stop = _tokens_of(starts_ptr, first, 0, TABLE_BLOCK)
        _store_rows(grad_tensor, grad, batch, head, token, stop, TILE, DIM)


@triton.jit(do_not_specialize=["heads", "listed", "mask_batch_stride", "mask_head_stride", "dk_factor", "dv_factor"])
def combine_columns_kernel(
    dk_tensor,
    dv_tensor,
    sums_ptr,
    split_columns,
    mask_index,
    mask_batch_stride,
    mask_head_stride,
    heads,
    listed,
    dk_factor,
    dv_factor,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    """dK and dV of split columns: the sum over their splits, in order. A program computes a tile of one of the two, of a head and
    of one of the lines of ``Table.splits``. listed: their number, and that of the splits."""
    TILES: tl.constexpr = TABLE_BLOCK // TILE
    is_dv = tl.program_id(0) % 2
    part = tl.program_id(0) // 2 % TILES
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
    entry = split_columns + (mask * listed + tl.program_id(0) // (2 * TILES)) * 4
    column, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if count > 0:
        line = tl.program_id(1).to(tl.int64) * listed * TILES + first * TILES + part
        first_key = column * TABLE_BLOCK + part * TILE
        if is_dv == 1:
            sums_ptr += tl.num_programs(1).to(tl.int64) * listed * (TABLE_BLOCK * DIM)
            dv = _sum_of_splits(sums_ptr, line, count, TILE, DIM_V, TILES)
            store_tile(dv_tensor, dv * dv_factor, batch, head, first_key, TILE, DIM_V)
        else:
            dk = _sum_of_splits(sums_ptr, line, count, TILE, DIM, TILES)
            store_tile(dk_tensor, dk * dk_factor, batch, head, first_key, TILE, DIM)


@triton.jit
def _sum_of_splits(sums_ptr, line, count, TILE: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr):
    sums = tl.zeros([TILE * DIM], tl.float32)
    for _ in range(count):
        sums += tl.load(sums_ptr + line * (TILE * DIM) + tl.arange(0, TILE * DIM))
        line += TILES
    return _from_register_order(sums, TILE, DIM, 1, 1)


def attention_backward(dout, dlse, q, k, v, out, lse, mask, scale, variant=None, deterministic=False, config=None):
    """dq, dk, dv like q, k, v. dlse may be None. Unless ``deterministic``, the summation order of dQ differs from run to run, as
    does that of dK and dV if query heads share them.

    Other tensors: float16 or bfloat16, contiguous rows, base and strides multiples of 16 bytes; head_dim 33 to 256, of v the same,
    or 65 to 128 if it is 129 or more. mask: table blocks of 64 to 256.
    """
    of_variant = hopper_variant(variant)
    by_document = blocks_by_document(q, v, mask, of_variant is PLAIN)
    walked = mask if by_document is None else by_document
    room = _room(q, k, v, walked, deterministic)
    dlse = None if dlse is None else dlse.contiguous()
    tensors = _tensors(dout, dlse, q, k, v, out, lse, variant, of_variant, deterministic, room)
    key = _key(dout, dlse, q, k, v, out, scale, of_variant, deterministic, config)
    recording = Recording(mask, key, tensors, tensors[_ROOMS], room)
    _launch(recording, tensors, room, walked, scale, dlse is not None, deterministic, of_variant, config)
    recording.finish()
    return tensors[_GRADIENTS]


def repeated_backward(dout, dlse, q, k, v, out, lse, mask, scale, variant=None, deterministic=False):
    """``attention_backward`` by replayed launches, or None if there are none; any tensors."""
    of_variant = hopper_variant(variant)
    known = known_call(mask, _key(dout, dlse, q, k, v, out, scale, of_variant, deterministic))
    if known is None:
        return None
    dlse = None if dlse is None else dlse.contiguous()
    tensors = _tensors(dout, dlse, q, k, v, out, lse, variant, of_variant, deterministic, known.facts)
    return tensors[_GRADIENTS] if known.again(tensors) else None


def _key(dout, dlse, q, k, v, out, scale, of_variant: HopperVariant, deterministic: bool, config=None) -> tuple:
    layout = q.shape, q.stride(), k.shape, k.stride(), v.stride(), out.stride(), dout.stride(), q.dtype, q.device
    more = scale, config, dlse is None, deterministic, of_variant.key
    return attention_backward_kernel.fn, tuned.times_read(), *layout, *more


_GRADIENTS, _ROOMS = slice(7, 10), slice(10, 12)
_OWN = 15  # tensors of a call, before those of its variant


def _tensors(
    dout, dlse, q, k, v, out, lse, variant, of_variant: HopperVariant, deterministic: bool, room: "_Room"
) -> tuple[torch.Tensor, ...]:
    device = q.device
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    workspace = torch.empty(room.dq_sums + room.rows, dtype=torch.float32, device=device)
    kv_sums = workspace
    if room.kv_sums:
        fill = torch.zeros if room.added and not deterministic else torch.empty
        kv_sums = fill(room.kv_sums, dtype=torch.float32, device=device)
    bounds = torch.zeros((2, k.shape[0] * k.shape[1]), dtype=torch.float32, device=device) if deterministic else lse
    dlse = lse if dlse is None else dlse
    seed = lse if of_variant.dropout_p is None else variant.seed
    own = q, k, v, dout, out, lse, dlse, dq, dk, dv, workspace, kv_sums, bounds, tile_queue(device), seed
    return *own, *of_variant.given.tensors()


class _Room(NamedTuple):
    """Sums in fp32, or integers of that size. padded_q, padded_kv: tokens, in whole blocks: no block extends into the next head's
    rows. dq_sums: element count. rows: of lse, delta and, if sums are integers, units. kv_sums: of dK and dV, if several tiles
    contribute to one; otherwise 0. added: whether they are those of all tiles, as query heads share them, or of ``splits`` tiles of
    splits per head."""

    padded_q: int
    padded_kv: int
    dq_sums: int
    rows: int
    kv_sums: int
    added: bool
    splits: int


def _room(q, k, v, mask, deterministic: bool) -> _Room:
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dim, dim_v = padded_head_dim(head_dim), padded_head_dim(v.shape[3])
    keys = backward_keys(dim, mask and mask.block_size)
    block_size = mask.block_size if mask else keys
    padded_q, padded_kv = (triton.cdiv(length, block_size) * block_size for length in (q_len, kv_len))
    if mask and mask.starts is not None:
        padded_q = padded_kv = (len(mask.starts) - 1) * block_size
    lines = batch * heads * padded_q
    # If query heads share dK and dV, these are also summed in fp32: in order of arrival, or one after the other. Splits of columns
    # are then added like other tiles.
    added = heads > kv_heads
    split = mask is not None and mask.by_key.is_split and not deterministic
    splits = mask.by_key.splits.shape[1] * (block_size // keys) if split else 0
    kv_lines = batch * (heads if deterministic else kv_heads) * (padded_kv if added else splits * keys)
    return _Room(padded_q, padded_kv, lines * dim, (3 if deterministic else 2) * lines, kv_lines * (dim + dim_v), added, splits)


def _launch(recording, tensors, room: _Room, mask, scale, has_dlse: bool, deterministic: bool, of_variant, config) -> None:
    q, k, v, dout, out, lse, dlse, dq, dk, dv, workspace, kv_sums, bounds, queue, seed = tensors[:_OWN]
    dropout_p = of_variant.dropout_p
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group, dim, dim_v = heads // kv_heads, padded_head_dim(head_dim), padded_head_dim(v.shape[3])
    if config is None and of_variant is not PLAIN:
        config = backward_of_variant(dim, mask and mask.block_size, of_variant.switches["SCORED"])
    config = config or backward_config(q.dtype, dim, mask.block_size if mask else None, q.device, dim_v)
    block_size = mask.block_size if mask else config.keys
    rows_options = {"num_warps": max(4, dim // 32)}  # of kernels that compute whole rows
    sums = workspace[: room.dq_sums].view(torch.int32 if deterministic else torch.float32).view(-1, 256)
    rows = workspace[room.dq_sums :].view(-1, batch * heads * room.padded_q)
    row_lse, row_delta, row_unit = rows[0], rows[1], rows[2 if deterministic else 0]
    starts = mask.starts if mask else None
    share = 1.0 - (dropout_p or 0.0)
    if deterministic:
        arguments = [described_for_triton(k, ROWS, dim), described_for_triton(v, ROWS, dim_v), bounds, kv_heads, of_variant.given]
        grid = (triton.cdiv(kv_len, ROWS), batch * kv_heads)
        constants = {"DIM": dim, "DIM_V": dim_v, "TILE": ROWS}
        recording.launch(bound_kernel, (grid, arguments, constants, rows_options), of_variant.kinds)

    arguments = [
        described_for_triton(out, ROWS, dim_v),
        described_for_triton(dout, ROWS, dim_v),
        lse,
        dlse,
        sums,
        rows,
        bounds,
        starts,
        heads,
        group,
        q_len,
        room.padded_q,
        share,
    ]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE": ROWS}
    constants |= {"HAS_DLSE": has_dlse, "FIXED": deterministic, "DROPOUT": dropout_p is not None}
    constants["CUT"] = of_variant.given.q_starts is not None or of_variant.given.q_lens is not None
    constants["TABLE_BLOCK"] = 0 if starts is None else block_size
    recording.launch(prepare_kernel, ((room.padded_q // ROWS, batch * heads), arguments, constants, rows_options))

    work = (mask.whole_columns if deterministic else mask.by_key.work) if mask else lse
    items = work.shape[1] if mask else triton.cdiv(kv_len, config.keys)
    tiles = items * (block_size // config.keys) * batch * heads
    index, _, _, _, row_idx, tile_idx, tile_runs, tile_bits, *strides = table_arguments(mask, mask and mask.by_key, lse)
    tile_of_q, tile_of_k, tile_of_v = [1, 1, config.queries, dim], [1, 1, config.keys, dim], [1, 1, config.keys, dim_v]
    inputs = [described(q, tile_of_q), described(k, tile_of_k), described(v, tile_of_v)]
    inputs += [described(dout, [1, 1, config.queries, dim_v])]
    results = [described(dk, tile_of_k), described(dv, tile_of_v)]
    constants = {"DIM": dim, "USED": used_columns(head_dim)}
    if dim > 128:
        kernel = wide_backward_kernel
        grads = [sums, *results, kv_sums]
        # Sums of values that are narrower than keys are whole.
        constants |= {"DIM_V": dim_v, "USED_V": used_columns(v.shape[3]) if dim_v == dim else dim_v}
        constants["OF_WEIGHTS"] = DQ_OF_WEIGHTS[constants["USED"]]
    else:
        kernel = attention_backward_kernel
        kv_rows = kv_sums[: room.kv_sums or room.dq_sums].view(-1, 256)
        grads = [described(sums, [config.queries * dim // (256 * config.pieces), 256], FLOAT_LAYOUT), *results]
        grads += [None, None] if starts is None else [dk, dv]
        grads += [described(kv_rows, [config.keys * dim // 512, 256], FLOAT_LAYOUT)]
        constants |= {"PIECES": config.pieces, "OWN_STARTS": starts is not None}
    arguments = [
        *inputs,
        *grads,
        *(described(row, [config.queries], ROW_LAYOUT) for row in (row_lse, row_delta, row_unit)),
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
        # As many as key heads, or as query heads if each has its own sums.
        room.kv_sums // (dim + dim_v) or batch * kv_heads * room.padded_kv,
        room.splits,
        items,
        tiles,
        min(heads_together(2 * (dim + dim_v), q_len, mask, by_key=True), batch * heads),
        queue,
        scale / share,
        scale * LOG2_E.value,
        seed,
        dropout_p or 0.0,
        of_variant.given,
    ]
    constants |= {"KEYS": config.keys, "QUERIES": config.queries}
    constants |= {"Q_STAGES": config.q_stages, "DOUT_STAGES": config.dout_stages}
    constants |= {"TABLE_BLOCK": block_size, "SPARSE": mask is not None}
    constants |= {"ADDED": room.added, "SPLIT": room.splits > 0}
    constants |= {"FIXED": deterministic, "DROPOUT": dropout_p is not None, "RAGGED": mask is None and kv_len % config.keys > 0}
    constants |= of_variant.switches
    grid = (min(tiles, config.programs * multiprocessors(q.device)), 1)
    recording.launch(kernel, (grid, arguments, constants, config.options), of_variant.kinds)

    across = config.options["num_warps"] * 16 // config.queries
    finished = [(dq, sums, 1, room.padded_q, scale / share, config.queries, dim, across, config.pieces)]
    if room.added:
        dk_sums, dv_sums = kv_sums.split([room.kv_sums // (dim + dim_v) * width for width in (dim, dim_v)])
        members = group if deterministic else 1
        finished += [(dk, dk_sums, members, room.padded_kv, scale / share, config.keys, dim, 1, 1)]
        finished += [(dv, dv_sums, members, room.padded_kv, 1.0 / share, config.keys, dim_v, 1, 1)]
    for grad, added, members, length, factor, tile, width, across, pieces in finished:
        batch, heads = grad.shape[:2]
        target = described_for_triton(grad, tile, width) if starts is None else rows_of(grad, width)
        arguments = [target, added, row_unit, starts, heads, members, length, factor]
        constants = {"DIM": width, "TILE": tile, "ACROSS": across, "PIECES": pieces, "FIXED": added.dtype == torch.int32}
        constants["TABLE_BLOCK"] = 0 if starts is None else block_size
        recording.launch(finish_kernel, ((length // tile, batch * heads), arguments, constants, rows_options))
    if room.splits and not room.added:
        prepared = combine_columns_launch(dk, dv, kv_sums, mask, config.keys, (scale / share, 1.0 / share))
        recording.launch(combine_columns_kernel, prepared)


def combine_columns_launch(dk, dv, kv_sums, mask, keys: int, factors: tuple[float, float]):
    """(grid, arguments, constants, options). keys: of the tiles that were summed. factors: of dK and dV."""
    batch, heads = dk.shape[:2]
    dims, table = [padded_head_dim(grad.shape[3]) for grad in (dk, dv)], mask.by_key.splits
    index, *_, mask_batch_stride, mask_head_stride = table_arguments(mask, mask.by_key, kv_sums)
    arguments = [described_for_triton(grad, keys, dim) for grad, dim in zip((dk, dv), dims, strict=True)]
    arguments += [kv_sums, table, index, mask_batch_stride, mask_head_stride, heads, table.shape[1], *factors]
    # A split column has two splits or more, so the second half of the lines is never in use.
    grid = (2 * (table.shape[1] // 2) * (mask.block_size // keys), batch * heads)
    constants = {"DIM": dims[0], "DIM_V": dims[1], "TILE": keys, "TABLE_BLOCK": mask.block_size}
    return grid, arguments, constants, {"num_warps": 8}
