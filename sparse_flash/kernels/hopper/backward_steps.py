"""Parts of a step of the backward kernels for Hopper: its weights, their gradients, and sums in global memory.

``p`` is ``BackwardArguments``, the record that the warps of a kernel share.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.tiles import FULL, RUNS
from .dropout import round_kept, score_gradients
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
    entry = p.scheduler.entry_step(tile, step)
    mask_tile = gl.load(table.tile_idx + entry // STEPS, mask=exists, other=0)
    query = entry % STEPS * p.SHAPE.QUERIES
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
def _row_of_sums(p, tile, PART: gl.constexpr = 0):
    """Returns the row of the first key of a tile, or of its part PART, in sums of dK and dV. With FIXED, each query head has sums
    of its own, which ``finish_kernel`` adds."""
    if p.SHAPE.SPLIT_SUMS:
        row = (tile.batch_head * p.grads.splits + (tile.split - 1) * (p.SHAPE.TILE // 64) + PART) * 64
    else:
        batch, head = p.heads.of(tile.batch_head)
        sums = tile.batch_head if p.SHAPE.FIXED else batch * (p.heads.queries // p.heads.group) + head // p.heads.group
        row = sums * p.grads.padded_kv_len + tile.first
        if p.SHAPE.OWN_STARTS:
            row += tile.to_padded
    return row


@gluon.jit
def _round_to_int(numbers):
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [numbers], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def to_register_order(grad):
    """Returns a gradient tile as rows of 256 elements, in the order in which threads hold them: first what four warps hold, then
    what the next four do, of the next 64 rows, or of further columns. Each thread then writes whole units of 16 bytes, next to its
    neighbours': four registers that follow each other, two columns of a row and of the row 8 below. ``finish_kernel`` restores the
    order."""
    ROWS: gl.constexpr = grad.shape[0]
    DIM: gl.constexpr = grad.shape[1]
    ACROSS: gl.constexpr = gl.num_warps() * 16 // ROWS
    pieces = grad.reshape([ROWS // 64, 4, 2, 8, ACROSS, DIM // (16 * ACROSS), 2, 4, 2])
    return pieces.permute((0, 4, 5, 6, 1, 3, 7, 2, 8)).reshape([ROWS * DIM // 256, 256])


@gluon.jit
def dq_rows(p, dq, unit):
    """Returns a piece of dQ in register order, as integers if FIXED. unit: of its queries; only read with FIXED."""
    numbers = dq
    if p.SHAPE.FIXED:
        numbers = _round_to_int(dq * gl.convert_layout(unit, gl.SliceLayout(1, dq.type.layout))[:, None])
    return to_register_order(numbers)


@gluon.jit
def add_sums(p, tile, grad, WHICH: gl.constexpr, PART: gl.constexpr = 0):
    """Adds dK or dV of a tile, or of its part PART, to sums in global memory, or stores it there. tile: from the part's first key
    on. grad: a tuple of tensors, all as wide as the first, except possibly the last."""
    WIDTH: gl.constexpr = p.SHAPE.DIM_V if WHICH == 1 else p.SHAPE.DIM
    row = _row_of_sums(p, tile, PART)
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
def _pointers(pointer, numbers, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Returns (columns in register order, their addresses), for the columns from FIRST on of a tile of WIDTH columns, with 16 rows
    for each warp."""
    ALONG: gl.constexpr = numbers.shape[1] // 8
    ROWS: gl.constexpr = ALONG * (gl.num_warps() // 4)
    rows = to_register_order(numbers).reshape([ROWS, 512])
    # A thread holds 16 adjacent bytes of each row.
    layout: gl.constexpr = gl.BlockedLayout([ALONG, 4], [1, 32], [gl.num_warps() // 4, 4], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    row = row // ALONG * (WIDTH // 8) + (FIRST // 8 + row % ALONG)
    return gl.convert_layout(rows, layout), pointer + ((row * 512)[:, None] + column[None, :])
