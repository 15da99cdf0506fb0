"""Parts of the backward kernels for Hopper: the loading warp, and a step's weights from its scores.

``p`` is ``BackwardArguments``, the record that the warps of a kernel share.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.gluon import async_load
from ..common.tiles import FULL, RUNS
from .dropout import round_kept, score_gradients
from .lengths import PAST_THE_END, load_existing
from .masks import ZERO, load_column_words, row_words, where_column_bits, where_rows, where_run


@gluon.jit
def first_query(p, tile, step, stop, exists):
    """Returns the first query of a step, for the computing warps. Without a table, they count steps from the tile's first step: see
    ``Scheduler.first_step``."""
    table = p.table
    STEPS: gl.constexpr = table.BLOCK // p.SHAPE.QUERIES
    if table.SPARSE:
        entry = step
        if p.lengths.ANY:
            entry += tile.cuts.shift(step, tile.bits)
        block = gl.load(table.entries + entry // STEPS, mask=exists, other=0)
        position = block * table.BLOCK + step % STEPS * p.SHAPE.QUERIES
    else:
        begin = 0
        if p.lengths.ANY:
            begin = tile.begin
        step += p.scheduler.first_step(tile.first // p.SHAPE.TILE * p.SHAPE.TILE, begin, stop, stop) - begin
        position = gl.where(step < stop, step, step - (stop - begin)) * p.SHAPE.QUERIES
    return position


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
def first_row(p, tile):
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
    """Loads the queries and their gradients for all steps of a tile with one query head, and with the tile's first step its values.
    row: from ``first_row``. Returns ``cuts`` and the next step."""
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
def load_tiles(p):
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
            cuts = _load_keys(p, tile, cuts, p.k, turn, p.inputs.k, batch, kv_head, _first_key(p, tile), p.SHAPE.ACROSS)
        row, first = first_row(p, tile), step
        if p.SHAPE.TOGETHER:
            for _ in range(p.heads.group):
                cuts, step = _load_steps(p, tile, cuts, step, first, turn, batch, head, kv_head, row)
                head += 1
                row += p.grads.padded_q_len
        else:
            cuts, step = _load_steps(p, tile, cuts, step, first, turn, batch, head, kv_head, row)
        turn += 1
        tile = p.scheduler.tile(turn)
    if AHEAD:
        # After its last tile a program computes the first scores of one more, and discards them.
        cuts = _load_keys(p, tile, cuts, p.k, turn, p.inputs.k, 0, 0, 0, p.SHAPE.ACROSS)
        _load_queries(p, tile, cuts, step, 0, 0, 0, 0, 0)


@gluon.jit
def _position_in_block(p, tile):
    """Returns the position of a tile's first key within its block."""
    first = tile.first
    if p.SHAPE.OWN_STARTS:
        first += tile.to_padded
    return first % p.table.BLOCK


@gluon.jit
def mask_words(p, tile, step, exists, KIND: gl.constexpr, layout: gl.constexpr):
    """Returns the words of a step's mask tile, by query; zeros if the step does not exist."""
    table = p.table
    STEPS: gl.constexpr = table.BLOCK // p.SHAPE.QUERIES
    entry = step
    if p.lengths.ANY:
        entry += tile.cuts.shift(step, tile.bits)
    mask_tile = gl.load(table.tile_idx + entry // STEPS, mask=exists, other=0)
    query = step % STEPS * p.SHAPE.QUERIES
    if KIND == RUNS:
        columns = gl.arange(0, p.SHAPE.QUERIES, layout=gl.SliceLayout(0, layout))
        words = gl.load(table.tile_runs + mask_tile * table.BLOCK + query + columns, mask=exists & (columns >= 0), other=0)
    else:
        WORDS: gl.constexpr = table.BLOCK // 32
        first = table.tile_bits + (mask_tile.to(gl.int64) * table.BLOCK + query) * WORDS + _position_in_block(p, tile) // 32
        words = load_column_words(first, p.SHAPE.KEYS, p.SHAPE.QUERIES, WORDS, layout)
    return words


@gluon.jit
def _masked(p, tile, weights, words, KIND: gl.constexpr):
    """Sets weights of a step, (keys, queries), to 0 if its mask tile does not keep them."""
    if KIND == RUNS:
        rows = gl.arange(0, p.SHAPE.KEYS, layout=gl.SliceLayout(1, weights.type.layout))[:, None] + _position_in_block(p, tile)
        masked = where_run(weights, (words & 0xFFFF)[None, :], (words >> 16)[None, :], rows, ZERO)
    else:
        masked = where_column_bits(weights, words, ZERO)
    return masked


@gluon.jit
def round_weights(p, weights):
    """Returns weights of a step in 16 bits, with 0 for dropped pairs: the left operand of dV's product."""
    dtype: gl.constexpr = p.q.data.dtype
    if p.dropout.ENABLED:
        kept = round_kept(weights, dtype)
    else:
        kept = weights.to(dtype)
    return kept


@gluon.jit
def existing_key_words(p, tile, layout: gl.constexpr):
    """Returns words for ``where_rows``, which clears weights of keys that do not exist. The words are read only if such keys may
    have arbitrary scores."""
    existing = tile.first
    if p.lengths.KV_CUT:
        existing = row_words(tile.cuts.own_first - tile.first, tile.cuts.own_last - tile.first, p.SHAPE.KEYS, layout)
    elif p.SHAPE.RAGGED and p.scoring.SCORED:
        existing = row_words(0, p.inputs.k.shape[2] - tile.first, p.SHAPE.KEYS, layout)
    return existing


@gluon.jit
def load_lse(p, step, layout: gl.constexpr):
    """Returns lse of a step's queries. layout: of its scores, (keys, queries)."""
    return p.lse.index(p.q.place(step)).load(gl.SliceLayout(0, layout))


@gluon.jit
def scores_to_weights(p, tile, products, lse, words, existing, stream, terms, position, KIND: gl.constexpr):
    """Returns weights of a step, (keys, queries), from its products. lse: from ``load_lse``. Weights of dropped pairs are
    negative."""
    scores = products
    if p.scoring.SCORED:
        scores = p.scoring.scored(products, terms, position, tile.first)
    weights = gl.exp2(scores * p.scoring.factor() - lse[None, :])
    if p.scoring.SCORE is not None:
        # A score function may give NaN for queries that keep nothing, whose lse is infinite here.
        weights = gl.where((lse < float("inf"))[None, :], weights, 0.0)
    if KIND != FULL:
        weights = _masked(p, tile, weights, words, KIND)
    if p.lengths.KV_CUT or (p.SHAPE.RAGGED and p.scoring.SCORED):
        # A score function may give any number for keys that do not exist.
        weights = where_rows(weights, existing)
    elif p.SHAPE.RAGGED:
        # Keys that do not exist have score 0, which may be far above lse, so their weights could be infinite, and dQ NaN. Finite
        # weights are multiplied by rows of zeros. Existing keys have weights of at most 1, so this limit does not change them.
        weights = gl.minimum(weights, 1.0, propagate_nan=tl.PropagateNan.ALL)
    if p.dropout.ENABLED:
        # A negative sign marks dropped pairs, so no words or predicates stay in registers beside the sums.
        weights = p.dropout.negate_dropped(weights, stream, position, tile.first)
    return weights


@gluon.jit
def compute_dscores(p, weights, dweights, delta):
    """Returns gradients of a step's scores, (keys, queries). delta: (1, queries)."""
    if p.dropout.ENABLED:
        dscores = score_gradients(weights, dweights, delta)
    else:
        dscores = weights * (dweights - delta)
    return dscores


@gluon.jit
def row_of_sums(p, tile, PART: gl.constexpr = 0):
    """Returns the row of the first key of a tile, or of its part PART, in sums of dK and dV. With FIXED, each query head has sums
    of its own, which ``finish_kernel`` adds."""
    if p.SHAPE.SPLIT_SUMS:
        row = (tile.batch_head * p.grads.splits + (tile.split - 1) * p.SHAPE.PARTS + PART) * p.SHAPE.KEYS
    else:
        batch, head = p.heads.of(tile.batch_head)
        sums = tile.batch_head if p.SHAPE.FIXED else batch * (p.heads.queries // p.heads.group) + head // p.heads.group
        row = sums * p.grads.padded_kv_len + tile.first
        if p.SHAPE.OWN_STARTS:
            row += tile.to_padded
    return row


@gluon.jit
def round_to_int(numbers):
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [numbers], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def to_register_order(grad, WARPS_DOWN: gl.constexpr, ALTERNATING: gl.constexpr = False):
    """Returns a gradient tile as rows of 256 elements, in the order in which threads hold them. Each thread then writes whole units
    of 16 bytes, next to its neighbours': four registers that follow each other, two columns of a row and of the row 8 below.
    ``finish_kernel`` restores the order. ALTERNATING: units of warps that divide columns alternate."""
    ROWS: gl.constexpr = grad.shape[0]
    DIM: gl.constexpr = grad.shape[1]
    ACROSS: gl.constexpr = gl.num_warps() // WARPS_DOWN
    pieces = grad.reshape([WARPS_DOWN, 2, 8, ACROSS, DIM // (16 * ACROSS), 2, 4, 2])
    pieces = pieces.permute((5, 4, 3, 0, 2, 6, 1, 7) if ALTERNATING else (5, 3, 4, 0, 2, 6, 1, 7))
    return pieces.reshape([ROWS * DIM // 256, 256])
