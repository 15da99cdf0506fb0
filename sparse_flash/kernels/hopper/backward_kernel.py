"""The backward kernel for Hopper: the record that its warps share, its roles, and the warps that load and send tiles. The computing
warps are in ``paired_backward`` and ``wide_backward``.

Programs are persistent. TMA adds tiles of dQ to an fp32 array in global memory: a sending warp starts it, so that computing warps
wait for no addition. Scores are transposed, with keys along rows, so that the weights in registers are the left operand of dV.

Sources: arXiv:2205.14135, Alg. 4 (one pass, dQ accumulated); arXiv:2407.08608, sec. 3 (warp roles).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..common.gluon import async_add, async_load, async_store, store_wait, view, view_for_tma
from .backward_arguments import BackwardArguments, BackwardInputs, Gradients, NarrowBuffers, PairedGroup, WideBuffers
from .dropout import new_dropout
from .lengths import PAST_THE_END, load_existing, new_barrier, new_lengths
from .narrow_backward import compute_tiles
from .paired_backward import compute_part, sent_before
from .ring import allocate_tiles, new_linked_ring, new_ring
from .scheduler import Heads, Queue, TableArguments, new_scheduler, schedule
from .scores import new_scoring
from .wide_backward import compute_gradients, compute_weights

# New lengths, heads or masks never recompile.
NOT_SPECIALIZED = [
    "mask_batch_stride",
    "mask_head_stride",
    "heads",
    "group",
    "q_len",
    "padded_q_len",
    "padded_kv_len",
    "kv_rows",
    "splits",
    "items",
    "work_tiles",
    "heads_together",
]


@gluon.jit
def _load_keys(p, tile, cuts, ring, turn, tensor, batch, kv_head, first_key, ACROSS: gl.constexpr = 1):
    """Loads keys or values of a tile. Like all functions below that take ``cuts``, it returns ``cuts``: how often the barrier for
    tiles with nonexistent tokens was used."""
    ring.acquire(turn)
    source = [batch, kv_head, first_key, 0]
    if p.lengths.KV_CUT and tile.cuts.is_own_cut(first_key, p.lengths.kv_len, p.SHAPE.TILE):
        for piece in gl.static_range(ring.PIECES):
            row = first_key + piece * p.SHAPE.KEYS
            first, last = tile.cuts.own_first - row, tile.cuts.own_last - row
            cuts = load_existing(ring, turn, tensor, [batch, kv_head, row, 0], p.arrived, cuts, first, last, piece)
        ring.commit(turn)
    else:
        ring.expect(turn, ring.PIECES * ring.data.shape[1] * ring.data.shape[2] * 2)
        _load_pieces(ring, turn, tensor, source, ACROSS)
    return cuts


@gluon.jit
def _load_pieces(ring, n, tensor, source, ACROSS: gl.constexpr):
    """Starts the copies of a stage's pieces, row by row of pieces. ACROSS: pieces that are side by side."""
    for piece in gl.static_range(ring.PIECES):
        row = source[2] + piece // ACROSS * ring.data.shape[1]
        ring.load(n, tensor, [source[0], source[1], row, piece % ACROSS * ring.data.shape[2]], piece)


@gluon.jit
def _expect_steps(p, tile, cuts, ring, step, tensor, source, position, BESIDE: gl.constexpr):
    """Expects a step's queries, or their gradients, and BESIDE bytes more. With lengths, it also loads the queries or gradients."""
    if p.lengths.Q_CUT:
        if tile.cuts.is_cut(position, p.lengths.q_len, p.SHAPE.QUERIES):
            first, last = tile.cuts.other_first - position, tile.cuts.other_last - position
            cuts = load_existing(ring, step, tensor, source, p.arrived, cuts, first, last)
            ring.expect(step, BESIDE)
        else:
            ring.expect(step, ring.PIECES * ring.data.shape[1] * ring.data.shape[2] * 2 + BESIDE)
            ring.load(step, tensor, source)
    else:
        ring.expect(step, ring.PIECES * ring.data.shape[1] * ring.data.shape[2] * 2 + BESIDE)
    return cuts


@gluon.jit
def _load_queries(p, tile, cuts, step, batch, head, row, position, first_query):
    ROWS: gl.constexpr = 2 if p.SHAPE.FIXED else 1
    source = [batch, head, first_query, 0]
    p.q.acquire(step)
    cuts = _expect_steps(p, tile, cuts, p.q, step, p.inputs.q, source, position, p.SHAPE.QUERIES * 4 * ROWS)
    stage = p.q.place(step)
    if p.SHAPE.FIXED:
        async_load(p.inputs.unit_rows, [row + position], p.q.full_barrier(step), p.unit.index(stage))
    async_load(p.inputs.lse_rows, [row + position], p.q.full_barrier(step), p.lse.index(stage))
    if not p.lengths.Q_CUT:
        _load_pieces(p.q, step, p.inputs.q, source, p.SHAPE.ACROSS)
    return cuts


@gluon.jit
def _load_dout(p, tile, cuts, step, batch, head, row, position, first_query):
    source = [batch, head, first_query, 0]
    p.dout.acquire(step)
    cuts = _expect_steps(p, tile, cuts, p.dout, step, p.inputs.dout, source, position, p.SHAPE.QUERIES * 4)
    async_load(p.inputs.delta_rows, [row + position], p.dout.full_barrier(step), p.delta.index(p.dout.place(step)))
    if not p.lengths.Q_CUT:
        p.dout.load(step, p.inputs.dout, source)
    return cuts


@gluon.jit
def _first_row(p, tile):
    """Returns the first row of a tile's batch-head. A query's position is added to it."""
    row = tile.batch_head * p.grads.padded_q_len
    if p.SHAPE.OWN_STARTS:
        # A column that keeps nothing takes an empty step at position 0, as TMA needs a multiple of 16 bytes.
        row += gl.where(tile.end > tile.begin, tile.to_padded, 0)
    return row


@gluon.jit
def _first_key(p, tile):
    """Returns the first key of a tile. A column that keeps nothing takes one empty step: of zeros, from past the end, as weights of
    0 times NaN are NaN."""
    return gl.where(tile.end > tile.begin, tile.first, PAST_THE_END)


@gluon.jit
def _load_steps(p, tile, cuts, step, first, turn, batch, head, kv_head, row):
    """Loads the queries and their gradients for all steps of a tile with one query head, and with the first step the tile's keys
    and values. row: from ``_first_row``. Returns ``cuts`` and the next step."""
    position = tile.position
    entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
    for _ in range(gl.maximum(tile.end - tile.begin, 1)):
        first_query = gl.where(tile.end > tile.begin, position, PAST_THE_END)
        # The table is read one step ahead, so no load waits for it.
        entry = p.scheduler.next_step(tile, entry)
        upcoming = p.scheduler.position(tile, entry, tile.end)
        cuts = _load_queries(p, tile, cuts, step, batch, head, row, position, first_query)
        if step == first:
            if p.k.STAGES == 1:
                cuts = _load_keys(p, tile, cuts, p.k, turn, p.inputs.k, batch, kv_head, _first_key(p, tile), p.SHAPE.ACROSS)
            cuts = _load_keys(p, tile, cuts, p.v, turn, p.inputs.v, batch, kv_head, _first_key(p, tile))
        cuts = _load_dout(p, tile, cuts, step, batch, head, row, position, first_query)
        position = upcoming
        step += 1
    return cuts, step


@gluon.jit
def _load_tiles(p):
    """Runs the loading warp: loads each tile's keys and values, and each step's queries and their gradients, in order of use."""
    step = 0
    turn = 0
    cuts = 0
    # If shared memory holds the keys of one tile only, the tile's first queries are requested first, as they need not wait.
    AHEAD: gl.constexpr = p.k.STAGES > 1
    tile = p.scheduler.tile(turn)
    while tile.first >= 0:
        batch, head = p.heads.of(tile.batch_head)
        kv_head = head // p.heads.group
        if AHEAD:
            cuts = _load_keys(p, tile, cuts, p.k, turn, p.inputs.k, batch, kv_head, _first_key(p, tile))
        row, first = _first_row(p, tile), step
        for _ in range(p.heads.group if p.SHAPE.TOGETHER else 1):
            cuts, step = _load_steps(p, tile, cuts, step, first, turn, batch, head, kv_head, row)
            head += 1
            row += p.grads.padded_q_len
        turn += 1
        tile = p.scheduler.tile(turn)
    if AHEAD:
        # After its last tile a program computes the first scores of one more, and discards them.
        cuts = _load_keys(p, tile, cuts, p.k, turn, p.inputs.k, 0, 0, 0)
        _load_queries(p, tile, cuts, step, 0, 0, 0, 0, 0)


@gluon.jit
def _send(p, own):
    """Runs a sending warp: adds pieces of dQ to global memory, and at the end of a tile stores its dK and dV and releases their
    buffers. own: ``NarrowBuffers``, ``PairedGroup`` or ``WideBuffers``."""
    step = 0
    turn = 0
    whole = p.scheduler.tile(turn)
    while whole.first >= 0:
        row = _first_row(p, whole)
        last = step + (p.heads.group if p.SHAPE.TOGETHER else 1) * gl.maximum(whole.end - whole.begin, 1) - 1
        for _ in range(p.heads.group if p.SHAPE.TOGETHER else 1):
            step = _send_dq(p, own, whole, turn, row, step, last)
            row += p.grads.padded_q_len
        if p.SHAPE.NARROW:
            _send_narrow_results(p, own, whole, turn, step + turn)
        elif p.SHAPE.WIDE:
            _send_wide_results(p, own, whole, turn)
        else:
            _send_paired_results(p, own, whole.part_from(own.GROUP * p.SHAPE.KEYS), turn)
        if p.k.STAGES == 1:
            p.scheduler.slots.release(turn)
        turn += 1
        whole = p.scheduler.tile(turn)


@gluon.jit
def _send_dq(p, own, tile, turn, row, step, last):
    """Adds dQ of all steps of a tile with one query head. row: from ``_first_row``. last: the tile's last step. Returns the next
    step."""
    entry = p.scheduler.first_step(tile.first, tile.begin, tile.runs, tile.end)
    for _ in range(gl.maximum(tile.end - tile.begin, 1)):
        sum_row = (row + p.scheduler.position(tile, entry, tile.end)) // 64 * (p.SHAPE.DIM // 4)
        if p.SHAPE.NARROW:
            own.dq.wait(step + turn)
            # The warps that hand over dQ have finished all products with the values.
            p.v.release(turn, pred=step == last)
            _send_rows(p, own.dq, step + turn, sum_row, 0)
        elif p.SHAPE.WIDE:
            _send_halves(p, own.dq, step, sum_row)
        else:
            sent = sent_before(p, step, own.GROUP)
            for number in gl.static_range(p.SHAPE.GROUP_PIECES):
                _send_rows(p, own.dq, sent + number, sum_row, own.GROUP + number)
            if p.SHAPE.ACROSS > 1:
                if step % 2 == own.GROUP:
                    _send_rows(p, own.dq, sent + 1, sum_row, 2)
        entry = p.scheduler.next_step(tile, entry)
        step += 1
    return step


@gluon.jit
def _send_rows(p, ring, sent, row, PIECE: gl.constexpr):
    """Adds a piece of dQ of a step whose sums are from ``row`` on."""
    tensor = p.grads.dq_rows
    # The second piece has as many rows as are sent at once; the others may have more.
    BOXES: gl.constexpr = 1 if PIECE == 1 else ring.data.shape[0]
    ring.wait(sent)
    for box in gl.static_range(BOXES):
        rows = view(ring.data.index(box), tensor.dtype, [p.SHAPE.SENT_ROWS, 256], tensor.layout)
        async_add(tensor, [row + (PIECE * 16 + box * p.SHAPE.SENT_ROWS), 0], rows)
    store_wait(0)
    ring.release(sent)


@gluon.jit
def _send_halves(p, ring, step, row):
    """Adds dQ of a step, from ``row`` on, in halves of pieces."""
    ROWS: gl.constexpr = p.SHAPE.SENT_ROWS
    HALVES: gl.constexpr = 2 * p.SHAPE.PIECES
    for half in gl.static_range(HALVES):
        sent = step * HALVES + half
        ring.wait(sent)
        rows = view(ring.stage(sent), p.grads.dq_rows.dtype, [ROWS, 256], p.grads.dq_rows.layout)
        async_add(p.grads.dq_rows, [row + half * ROWS, 0], rows)
        # TMA may still read all buffers except one.
        store_wait(ring.STAGES - 1)
        if half >= ring.STAGES - 1:
            ring.release(sent - (ring.STAGES - 1))
    if ring.STAGES > 1:
        store_wait(0)
        ring.release(step * HALVES + HALVES - 1)


@gluon.jit
def _send_narrow_results(p, own, tile, turn, sent):
    """Stores dK and dV of a tile in their tensors, from the buffers of its keys and of dQ, and releases both. Sums, and what
    remains of a document, have been stored by the computing warps."""
    grads = p.grads
    own.dq.wait(sent)
    if not (p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0)):
        if not p.SHAPE.OWN_STARTS or tile.stop - tile.first >= p.SHAPE.KEYS:
            batch, head = p.heads.of(tile.batch_head)
            position = [batch, head // p.heads.group, tile.first, 0]
            async_store(grads.dk, position, view_for_tma(p.k.stage(turn), grads.dk))
            values = view(own.dq.data, grads.dv.dtype, [1, 1, p.SHAPE.KEYS, p.SHAPE.DIM], grads.dv.layout)
            async_store(grads.dv, position, values)
            store_wait(0)
    own.dq.release(sent)
    p.k.release(turn)


@gluon.jit
def _send_paired_results(p, own, tile, turn):
    """Stores dK and dV of a group in their tensors, from the buffers of its keys and values, and releases both. Sums, and what
    remains of a document, have been stored by the computing warps."""
    grads = p.grads
    own.ready.wait(turn)
    if not (p.SHAPE.ADDED or (p.SHAPE.SPLIT_SUMS and tile.split > 0)):
        if not p.SHAPE.OWN_STARTS or tile.stop - tile.first >= p.SHAPE.KEYS:
            batch, head = p.heads.of(tile.batch_head)
            kv_head = head // p.heads.group
            for piece in gl.static_range(p.SHAPE.ACROSS):
                keys = view_for_tma(p.k.stage(turn, own.GROUP * p.SHAPE.ACROSS + piece), grads.dk)
                async_store(grads.dk, [batch, kv_head, tile.first, piece * p.SHAPE.WIDTH], keys)
            async_store(grads.dv, [batch, kv_head, tile.first, 0], view_for_tma(p.v.stage(turn, own.GROUP), grads.dv))
            store_wait(0)
    p.k.release(turn)


@gluon.jit
def _send_wide_results(p, own, tile, turn):
    """Stores dV and dK of a tile in their tensors, unless they were added to sums, and releases the buffers of values and keys."""
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


@gluon.jit
def _run_narrow(p):
    dscores = allocate_tiles(p.inputs.q.dtype, 1, p.SHAPE.QUERIES, p.SHAPE.KEYS)
    dq = gl.allocate_shared_memory(gl.float32, [1, p.SHAPE.SENT_ROWS, 256], p.grads.dq_rows.layout)
    own = NarrowBuffers(dscores, new_ring(dq, 1))
    # TMA signals the barriers, so it must see that they are initialized.
    fence_async_shared()
    gl.warp_specialize(
        [(compute_tiles, (p, own)), (_load_tiles, (p,)), (_send, (p, own)), (schedule, (p.scheduler,))], [1, 1, 1], [24, 24, 24]
    )


@gluon.jit
def _new_group(p, GROUP: gl.constexpr):
    # No barrier may be without use. Triton gives its memory to others, such as the scheduler's queue, while it is a barrier.
    tiles = allocate_tiles(p.inputs.q.dtype, p.SHAPE.PARTS, p.SHAPE.QUERIES, p.SHAPE.KEYS)
    dscores = p.k
    done = p.k
    if p.SHAPE.PARTS == 2:
        dscores = new_linked_ring(p.q, tiles, 2)
        done = new_linked_ring(p.k, p.k.data, 1)
    dq = gl.allocate_shared_memory(gl.float32, [16 // p.SHAPE.SENT_ROWS, p.SHAPE.SENT_ROWS, 256], p.grads.dq_rows.layout)
    ready = new_linked_ring(p.k, p.k.data, 1)
    return PairedGroup(tiles, dscores, new_ring(dq, 1), done, ready, GROUP)


@gluon.jit
def _run_paired(p):
    """Runs a role for each part of a tile, or one role if a tile has one part."""
    first = _new_group(p, 0)
    second = first
    if p.SHAPE.PARTS == 2:
        second = _new_group(p, 1)
    # TMA signals the barriers, so it must see that they are initialized.
    fence_async_shared()
    if p.SHAPE.PARTS == 2:
        gl.warp_specialize(
            [
                (compute_part, (p, first, second)),
                (compute_part, (p, second, first)),
                (_load_tiles, (p,)),
                (_send, (p, first)),
                (_send, (p, second)),
                (schedule, (p.scheduler,)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [(compute_part, (p, first, first)), (_load_tiles, (p,)), (_send, (p, first)), (schedule, (p.scheduler,))],
            [1, 1, 1],
            [24, 24, 24],
        )


@gluon.jit
def _run_wide(p):
    dtype: gl.constexpr = p.inputs.q.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PASSED: gl.constexpr = 2 if p.scoring.SIGNED else 1
    weights = gl.allocate_shared_memory(dtype, [PASSED, 4, p.SHAPE.KEYS * p.SHAPE.QUERIES // 4], plain)
    dscores = allocate_tiles(dtype, 1, p.SHAPE.KEYS, p.SHAPE.QUERIES)
    DQ_STAGES: gl.constexpr = 3 - PASSED
    dq = gl.allocate_shared_memory(gl.float32, [DQ_STAGES, p.SHAPE.SENT_ROWS, 256], p.grads.dq_rows.layout)
    own = WideBuffers(
        weights=new_linked_ring(p.q, weights, 1, PIECES=PASSED),
        dscores=new_linked_ring(p.q, dscores, 1),
        dq=new_ring(dq, DQ_STAGES),
        dk=new_linked_ring(p.k, p.k.data, 1),
        dv=new_linked_ring(p.v, p.v.data, 1),
    )
    # TMA signals the barriers, so it must see that they are initialized.
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_weights, (p, own)),
            (compute_gradients, (p, own)),
            (_load_tiles, (p,)),
            (_send, (p, own)),
            (schedule, (p.scheduler,)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_backward_kernel(
    q_tensor, k_tensor, v_tensor, dout_tensor, lse_rows, delta_rows, unit_rows, dq_rows, dk_tensor, dv_tensor, pointers,
    table, mask_batch_stride, mask_head_stride,
    heads, group, q_len, padded_q_len, padded_kv_len, kv_rows, splits, items, work_tiles, heads_together,
    scale, score_scale, variant,
    SHAPE: gl.constexpr, SCORE: gl.constexpr, DERIVATIVE: gl.constexpr,
):  # fmt: skip
    """Makes the record that the warps share, and runs the roles. Descriptors are arguments, not in a record, as Triton 3.6 and 3.7
    take none within a tuple; so are integers, as Triton specializes those within one."""
    dtype: gl.constexpr = q_tensor.dtype
    PIECES: gl.constexpr = SHAPE.PARTS * SHAPE.ACROSS
    k_tiles = allocate_tiles(dtype, SHAPE.K_STAGES * PIECES, SHAPE.KEYS, SHAPE.WIDTH)
    k = new_ring(k_tiles, SHAPE.K_STAGES, PIECES, CONSUMERS=SHAPE.PARTS)
    v_tiles = allocate_tiles(dtype, SHAPE.PARTS, SHAPE.KEYS, SHAPE.DIM_V)
    v = new_ring(v_tiles, 1) if SHAPE.WIDE or SHAPE.NARROW else new_linked_ring(k, v_tiles, 1, SHAPE.PARTS)
    q_tiles = allocate_tiles(dtype, SHAPE.Q_STAGES * SHAPE.ACROSS, SHAPE.QUERIES, SHAPE.WIDTH)
    q = new_ring(q_tiles, SHAPE.Q_STAGES, SHAPE.ACROSS, CONSUMERS=SHAPE.READERS)
    dout = new_linked_ring(q, allocate_tiles(dtype, SHAPE.DOUT_STAGES, SHAPE.QUERIES, SHAPE.DIM_V), SHAPE.DOUT_STAGES)
    lse = gl.allocate_shared_memory(gl.float32, [SHAPE.Q_STAGES, SHAPE.QUERIES], lse_rows.layout)
    delta = gl.allocate_shared_memory(gl.float32, [SHAPE.DOUT_STAGES, SHAPE.QUERIES], delta_rows.layout)
    unit = lse
    if SHAPE.FIXED:
        unit = gl.allocate_shared_memory(gl.float32, [SHAPE.Q_STAGES, SHAPE.QUERIES], unit_rows.layout)
    table = TableArguments(*table, mask_batch_stride, mask_head_stride, SHAPE.BLOCK, SHAPE.SPARSE, SHAPE.OWN_STARTS)
    heads_of = Heads(heads, group)
    lengths = new_lengths(variant, q_len, q_len)
    kv_len = q_len  # if no warp uses it, as another number would cost a shared value
    if SHAPE.SCORED or lengths.ANY:
        kv_len = k_tensor.shape[2]
        lengths = new_lengths(variant, q_len, kv_len)
    arrived = k.full
    if lengths.ANY:
        arrived = new_barrier()
    queue = Queue(pointers.queue, items, work_tiles, heads_together)
    scheduler = new_scheduler(
        k, table, heads_of, queue, q_len, lengths, SHAPE.TILE, SHAPE.QUERIES, True, SHAPE.SPLIT, SHAPE.PARTS, SHAPE.TOGETHER
    )
    dropout = new_dropout(variant)
    SIGNED: gl.constexpr = dropout.ENABLED and DERIVATIVE is not None
    p = BackwardArguments(
        inputs=BackwardInputs(q_tensor, k_tensor, v_tensor, dout_tensor, lse_rows, delta_rows, unit_rows),
        grads=Gradients(
            dq_rows=dq_rows,
            dk=dk_tensor,
            dv=dv_tensor,
            pointers=pointers,
            padded_q_len=padded_q_len,
            padded_kv_len=padded_kv_len,
            kv_rows=kv_rows,
            splits=splits,
        ),
        table=table,
        heads=heads_of,
        scale=scale,
        scoring=new_scoring(
            variant, score_scale, q_len, kv_len, SHAPE.SCORED, SHAPE.REACH, SCORE, DERIVATIVE, BY_KEY=True, SIGNED=SIGNED
        ),
        lengths=lengths,
        arrived=arrived,
        dropout=dropout,
        scheduler=scheduler,
        k=k,
        v=v,
        q=q,
        dout=dout,
        lse=lse,
        unit=unit,
        delta=delta,
        SHAPE=SHAPE,
    )
    if SHAPE.NARROW:
        _run_narrow(p)
    elif SHAPE.WIDE:
        _run_wide(p)
    else:
        _run_paired(p)
