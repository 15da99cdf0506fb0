"""The backward pass for Hopper at head_dim 129 to 192, with v of 65 to 128: tiles of 128 keys, shared by two warp groups.

Each warp group does for its 64 keys what all computing warps of ``narrow_backward`` do together. Sums of dK and dV take 160
registers a thread, so scores cannot be computed a step ahead; the other group keeps the tensor cores busy instead. The groups share
only dQ, for which each reads the gradients of scores of both. dQ has three pieces of 64 columns. Each group computes one of them,
and they alternate in computing the third.

Columns that are no power of two are pieces of 64 in shared memory, without zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon import async_add, async_store, fresh_zero, of_tensor, record, store_wait, view
from ..common.tiles import BITS, FULL, RUNS
from .backward_steps import (
    NOT_SPECIALIZED,
    BackwardInputs,
    existing_keys,
    existing_tokens,
    first_line,
    in_register_order,
    load_tiles,
    mask_words,
    rounded,
    weights_of,
)
from .dropout import Dropout
from .lengths import TokenLengths
from .pairs import from_pairs, in_pairs, minus_after, times_pairs
from .products import pieces_of, pieces_times_transposed
from .ring import Ring, ring_beside, ring_of
from .scheduler import Heads, Scheduler, TableArguments, new_scheduler, schedule
from .scores import ScoreTerms, new_terms
from .wide_backward import WideGradients, add_sums

PIECES = gl.constexpr(3)  # of 64 columns, of q and k
GROUP_KEYS = gl.constexpr(64)  # of a warp group
PIECE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@record
class PairedArguments:
    """Holds what the warps share. Names without a comment mean the same as in ``BackwardArguments``."""

    inputs: BackwardInputs
    grads: WideGradients  # dk in tiles of 64 columns, splits of 64 keys
    table: TableArguments
    heads: Heads
    scale: gl.tensor
    scoring: ScoreTerms
    lengths: TokenLengths
    arrived: gl.shared_memory_descriptor
    dropout: Dropout
    scheduler: Scheduler
    k: Ring  # released by both sending warps; pieces of the first group's keys, then of the second group's
    v: Ring  # as k
    q: Ring  # released by both warp groups
    dout: Ring
    lse: gl.shared_memory_descriptor
    unit: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    dscores: Ring  # of the first group; released by both groups
    other_dscores: Ring  # of the second group
    dq: Ring  # one stage, through which the first group sends pieces of dQ
    other_dq: Ring
    ready: Ring  # without data; full: dK and dV of the first group are in the buffers of k and v
    other_ready: Ring
    DIM: gl.constexpr  # of sums
    DIM_V: gl.constexpr
    KEYS: gl.constexpr  # of a warp group
    QUERIES: gl.constexpr
    RAGGED: gl.constexpr
    ACROSS: gl.constexpr


@gluon.jit
def _dscores_of(p, GROUP: gl.constexpr):
    return p.other_dscores if GROUP == 1 else p.dscores


@gluon.jit
def _dq_of(p, GROUP: gl.constexpr):
    return p.other_dq if GROUP == 1 else p.dq


@gluon.jit
def _ready_of(p, GROUP: gl.constexpr):
    return p.other_ready if GROUP == 1 else p.ready


@gluon.jit
def _sent_before(step, GROUP: gl.constexpr):
    """Returns how many pieces of dQ a group has sent before a step: one in each step, and the third in every second step."""
    return step + (step + (1 - GROUP)) // 2


@gluon.jit
def _queries_product(p, step, turn, piece, GROUP: gl.constexpr):
    """Starts the two products of a piece of a step's dQ. The second waits until the other group has stored its gradients of
    scores."""
    zeros = gl.zeros([p.QUERIES, 64], gl.float32, layout=PIECE_LAYOUT)
    own, others = _dscores_of(p, GROUP).stage(step), _dscores_of(p, 1 - GROUP).stage(step)
    keys = p.k.stage(turn, piece + GROUP * PIECES)
    started = warpgroup_mma(own.permute((1, 0)), keys, zeros, use_acc=False, is_async=True)
    _dscores_of(p, 1 - GROUP).wait(step)
    others_keys = p.k.stage(turn, piece + (1 - GROUP) * PIECES)
    return warpgroup_mma(others.permute((1, 0)), others_keys, started, is_async=True)


@gluon.jit
def _hand_over_queries(p, dq, units, sent, GROUP: gl.constexpr):
    """Hands a piece of dQ to the sending warp. units: of its queries; only read with FIXED."""
    ring = _dq_of(p, GROUP)
    ring.acquire(sent)
    if p.grads.FIXED:
        rows = in_register_order(rounded(dq * units[:, None]), 4)
        view(ring.data, gl.int32, rows.shape, p.grads.dq_rows.layout).store(rows)
    else:
        ring.data.store(in_register_order(dq, 4))
    fence_async_shared()
    ring.commit(sent)


@gluon.jit
def _walk(p, tile, state, step, turn, begin, end, exists, zeros, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Adds steps begin .. end - 1, all of one kind, to the group's dK and dV, and to dQ. tile: the part of the tile from the
    group's keys on. state: (dV, pieces of dK)."""
    dv, dk = state
    dtype: gl.constexpr = p.q.data.dtype
    score_layout: gl.constexpr = zeros.type.layout
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    of_dv: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    of_dk: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    existing = existing_keys(p, tile, score_layout)
    own = _dscores_of(p, GROUP)
    for entry in range(begin, end):
        dout = p.dout.stage(step)
        words = entry
        if KIND != FULL:
            words = mask_words(p, tile, entry, exists, KIND, score_layout)
        p.q.wait(step)
        keys = pieces_of(p.k, turn, fresh_zero(step) + GROUP * PIECES, PIECES)
        started = pieces_times_transposed(keys, pieces_of(p.q, step, 0, PIECES), zeros, PIECES * 64)
        products = warpgroup_mma_wait(0, deps=(started,))
        weights = weights_of(p, tile, products, step, words, existing, 0, 0, entry, KIND)
        pairs = in_pairs(weights, dtype)
        p.dout.wait(step)
        delta = p.delta.index(p.dout.place(step) + fresh_zero(step)).load(column)
        values = p.v.stage(turn, fresh_zero(step) + GROUP)
        started = warpgroup_mma(values, dout.permute((1, 0)), minus_after(delta, pairs, score_layout), is_async=True)
        started_dv = warpgroup_mma(from_pairs(pairs, dtype, of_dv), dout, dv, is_async=True)
        dweights = warpgroup_mma_wait(1, deps=(started,))
        # Uses the weights in 16 bits, as weights in 32 bits would take registers beside all sums.
        pairs = times_pairs(pairs, dweights, dtype)
        own.acquire(step)
        own.stage(step).store(from_pairs(pairs, dtype, score_layout))
        operand = from_pairs(pairs, dtype, of_dk)
        started_sums = (started_dv,)
        for piece in gl.static_range(PIECES):
            started_sums += (warpgroup_mma(operand, p.q.stage(step, piece), dk[piece], is_async=True),)
        fence_async_shared()
        own.commit(step)
        # Waits here, as there are no registers for the left operands of these products beside the sums of the next.
        dv, first, second, third = warpgroup_mma_wait(0, deps=started_sums)
        dk = first, second, third
        sent = _sent_before(step, GROUP)
        started_dq = _queries_product(p, step, turn, fresh_zero(step) + GROUP, GROUP)
        units = delta
        if p.grads.FIXED:
            units = p.unit.index(p.q.place(step)).load(gl.SliceLayout(1, PIECE_LAYOUT))
        p.q.release(step)
        dq = warpgroup_mma_wait(0, deps=(started_dq,))
        _hand_over_queries(p, dq, units, sent, GROUP)
        if step % 2 == GROUP:
            started_dq = _queries_product(p, step, turn, fresh_zero(step) + 2, GROUP)
            dq = warpgroup_mma_wait(0, deps=(started_dq,))
            _hand_over_queries(p, dq, units, sent + 1, GROUP)
        p.dscores.release(step)
        p.other_dscores.release(step)
        step += 1
    return (dv, dk), step


@gluon.jit
def _compute(p, GROUP: gl.constexpr):
    """Runs a computing warp group."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.QUERIES, 16])
    values_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DIM_V, 16])
    zeros = gl.zeros([p.KEYS, p.QUERIES], gl.float32, layout=score_layout)
    own = _dscores_of(p, GROUP)
    step = 0
    turn = 0
    whole = p.scheduler.tile(turn)
    while whole.first >= 0:
        tile = whole.from_row(GROUP * p.KEYS)
        piece = gl.zeros([p.KEYS, 64], gl.float32, layout=PIECE_LAYOUT)
        state = (gl.zeros([p.KEYS, p.DIM_V], gl.float32, layout=values_layout), (piece, piece, piece))
        p.k.wait(turn)
        p.v.wait(turn)
        if p.table.SPARSE:
            # A column that keeps nothing takes one empty step.
            exists = tile.end > tile.begin
            stop = gl.where(exists, tile.bits, tile.runs + 1)
            state, step = _walk(p, tile, state, step, turn, tile.runs, stop, exists, zeros, GROUP, RUNS)
            state, step = _walk(p, tile, state, step, turn, tile.bits, tile.end, True, zeros, GROUP, BITS)
        state, step = _walk(p, tile, state, step, turn, tile.begin, tile.runs, True, zeros, GROUP, FULL)
        dv, dk = state
        # Waits until the other group's dQ has read these keys.
        own.acquire(step - 1 + own.STAGES)
        if p.grads.ADDED:
            # With FIXED, finish_kernel sums them later over query heads.
            batch, head = p.heads.of_line(tile.line)
            head_line = tile.line if p.grads.FIXED else batch * (p.heads.queries // p.heads.group) + head // p.heads.group
            # False past the last key, and for an unused item, which only another mask uses: it names the column past the last.
            exists = tile.first < p.grads.padded_kv_len
            _add_sums(p, dk, dv, head_line * p.grads.padded_kv_len + tile.first, exists)
        elif p.grads.SPLIT:
            if tile.split > 0:
                split = 2 * (tile.split - 1) + GROUP
                _add_sums(p, dk, dv, (tile.line * p.grads.splits + split) * p.KEYS, True)
            else:
                _store_results(p, dk, dv, turn, GROUP)
        else:
            _store_results(p, dk, dv, turn, GROUP)
        fence_async_shared()
        _ready_of(p, GROUP).commit(turn)
        turn += 1
        whole = p.scheduler.tile(turn)


@gluon.jit
def _add_sums(p, dk, dv, line, exists):
    add_sums(p, dk, line, 0, exists)
    add_sums(p, (dv,), line, 1, exists)


@gluon.jit
def _store_results(p, dk, dv, turn, GROUP: gl.constexpr):
    """Stores a group's dK and dV in the buffers of its keys and values."""
    dtype: gl.constexpr = p.q.data.dtype
    p.v.stage(turn, GROUP).store(dv.to(dtype))
    for piece in gl.static_range(PIECES):
        p.k.stage(turn, fresh_zero(turn) + (GROUP * PIECES + piece)).store((dk[piece] * p.scale).to(dtype))


@gluon.jit
def _send(p, GROUP: gl.constexpr):
    """Runs a sending warp: adds a group's pieces of dQ to global memory, and at the end of a tile stores its dK and dV."""
    ROWS: gl.constexpr = p.QUERIES * 64 // 256
    ALL_PIECES: gl.constexpr = 4  # of sums, as of 256 columns
    grads = p.grads
    ring = _dq_of(p, GROUP)
    step = 0
    turn = 0
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        line = first_line(p, tile)
        batch, head = p.heads.of_line(tile.line)
        kv_head = head // p.heads.group
        entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
        for _ in range(gl.maximum(tile.end - tile.begin, 1)):
            row = (line + p.scheduler.position(tile, entry, tile.end)) // p.QUERIES * ALL_PIECES
            sent = _sent_before(step, GROUP)
            _send_piece(grads, ring, sent, (row + GROUP) * ROWS)
            if step % 2 == GROUP:
                _send_piece(grads, ring, sent + 1, (row + 2) * ROWS)
            entry = p.scheduler.next_step(tile, entry)
            step += 1
        first = tile.first + GROUP * p.KEYS
        _ready_of(p, GROUP).wait(turn)
        whole = True
        if grads.SPLIT:
            whole = tile.split == 0
        if not grads.ADDED:
            if whole:
                for piece in gl.static_range(PIECES):
                    keys = of_tensor(p.k.stage(turn, GROUP * PIECES + piece), grads.dk)
                    async_store(grads.dk, [batch, kv_head, first, piece * 64], keys)
                async_store(grads.dv, [batch, kv_head, first, 0], of_tensor(p.v.stage(turn, GROUP), grads.dv))
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
def _first_group(p):
    _compute(p, 0)


@gluon.jit
def _second_group(p):
    _compute(p, 1)


@gluon.jit
def _send_of_first(p):
    _send(p, 0)


@gluon.jit
def _send_of_second(p):
    _send(p, 1)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def paired_backward_kernel(
    q_tensor,
    k_tensor,
    v_tensor,
    dout_tensor,
    dq_rows,
    dk_tensor,
    dv_tensor,
    kv_sums,
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
    DIM_V: gl.constexpr,
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
    gl.static_assert(not (DROPOUT or SCORED))
    dtype: gl.constexpr = q_tensor.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k = ring_of(gl.allocate_shared_memory(dtype, [2 * PIECES, GROUP_KEYS, 64], flat), 1, 2 * PIECES, CONSUMERS=2)
    v = ring_beside(k, gl.allocate_shared_memory(dtype, [2, GROUP_KEYS, DIM_V], flat), 1, 2)
    q_data = gl.allocate_shared_memory(dtype, [Q_STAGES * PIECES, QUERIES, 64], flat)
    q = ring_of(q_data, Q_STAGES, PIECES, CONSUMERS=2)
    dout = ring_beside(q, gl.allocate_shared_memory(dtype, [DOUT_STAGES, QUERIES, DIM_V], flat), DOUT_STAGES)
    lse = gl.allocate_shared_memory(gl.float32, [Q_STAGES, QUERIES], lse_rows.layout)
    delta = gl.allocate_shared_memory(gl.float32, [DOUT_STAGES, QUERIES], delta_rows.layout)
    unit = lse
    if FIXED:
        unit = gl.allocate_shared_memory(gl.float32, [Q_STAGES, QUERIES], unit_rows.layout)
    dscores = ring_of(gl.allocate_shared_memory(dtype, [2, GROUP_KEYS, QUERIES], flat), 2, CONSUMERS=2)
    other_dscores = ring_of(gl.allocate_shared_memory(dtype, [2, GROUP_KEYS, QUERIES], flat), 2, CONSUMERS=2)
    dq = ring_of(gl.allocate_shared_memory(gl.float32, [QUERIES * 64 // 256, 256], dq_rows.layout), 1)
    other_dq = ring_of(gl.allocate_shared_memory(gl.float32, [QUERIES * 64 // 256, 256], dq_rows.layout), 1)
    index = mask_index, mask_batch_stride, mask_head_stride
    table = TableArguments(*index, work, row_idx, tile_idx, tile_runs, tile_bits, TABLE_BLOCK, SPARSE, False)
    heads_of = Heads(heads, group)
    lengths, kv_len = existing_tokens(variant, q_len, k_tensor, SCORED)
    scheduler = new_scheduler(
        k, table, heads_of, heads_together, items, tiles, queue, q_len, lengths, KEYS, QUERIES, True, SPLIT, CONSUMERS=2
    )
    ready, other_ready = ring_beside(k, k.data, 1), ring_beside(k, k.data, 1)
    # TMA signals the barriers, so it must see that they are initialized.
    fence_async_shared()
    p = PairedArguments(
        inputs=BackwardInputs(q_tensor, k_tensor, v_tensor, dout_tensor, lse_rows, delta_rows, unit_rows),
        grads=WideGradients(
            dq_rows=dq_rows,
            dk=dk_tensor,
            dv=dv_tensor,
            kv_sums=kv_sums,
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
        scoring=new_terms(variant, score_scale, q_len, kv_len, SCORED, REACH, SCORE, DERIVATIVE, BY_KEY=True, SIGNED=False),
        lengths=lengths,
        arrived=k.full,
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
        other_dscores=other_dscores,
        dq=dq,
        other_dq=other_dq,
        ready=ready,
        other_ready=other_ready,
        DIM=DIM,
        DIM_V=DIM_V,
        KEYS=GROUP_KEYS,
        QUERIES=QUERIES,
        RAGGED=RAGGED,
        ACROSS=PIECES,
    )
    gl.warp_specialize(
        [
            (_first_group, (p,)),
            (_second_group, (p,)),
            (load_tiles, (p,)),
            (_send_of_first, (p,)),
            (_send_of_second, (p,)),
            (schedule, (scheduler,)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )
