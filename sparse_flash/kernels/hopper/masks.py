"""Element masks of partial blocks, applied to a tile of scores in place, in the registers of a wgmma accumulator.

Each selection between a score and its replacement is one piece of inline assembly. Comparisons written in Gluon do not wait for the
scores: the compiler makes all of them before the product is ready, and packs and unpacks 64 predicates per thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Scores and weights of pairs that a mask drops: -inf and 0, in PTX notation.
LOWEST = gl.constexpr("0fFF800000")
ZERO = gl.constexpr("0f00000000")


@gluon.jit
def where_run(scores, first, stop, position, otherwise: gl.constexpr):
    """Returns scores where first <= position < stop, and ``otherwise`` elsewhere. first, stop, position: int32 tensors, broadcast
    against scores."""
    # One comparison instead of two: below first, the difference wraps to a large unsigned number.
    choose: gl.constexpr = "{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, " + otherwise + ", p; }"
    return gl.inline_asm_elementwise(
        choose, "=f,f,r,r", [scores, position - first, stop - first], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _where_bit(scores, words, bit, otherwise: gl.constexpr):
    choose: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, " + otherwise + ", p; }"
    )
    return gl.inline_asm_elementwise(choose, "=f,f,r,r", [scores, words, bit], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _word_indices(ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """Returns row and column indices of a tile's 32-bit words, for the threads that hold its scores in ``layout``."""
    parts = gl.zeros([ROWS, COLS], gl.int32, layout=layout).reshape([ROWS, COLS // 32, 32])
    of_words: gl.constexpr = gl.SliceLayout(2, parts.type.layout)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_words))
    columns = gl.arange(0, COLS // 32, layout=gl.SliceLayout(0, of_words))
    return rows, columns


@gluon.jit
def load_row_words(words, ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, layout: gl.constexpr):
    """Returns words[r * STRIDE + c // 32], for ``where_bits``."""
    rows, columns = _word_indices(ROWS, COLS, layout)
    return gl.load(words + rows[:, None] * STRIDE + columns[None, :])


@gluon.jit
def load_run_words(runs, position, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """Returns words for ``where_bits`` from runs[r], which holds a run's first key in the low half and its end in the high half.
    position: of column 0."""
    rows, columns = _word_indices(ROWS, COLS, layout)
    run = gl.load(runs + rows)
    return _run_bits((run & 0xFFFF)[:, None], (run >> 16)[:, None], columns[None, :] * 32 + position)


@gluon.jit
def words_below(stop, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """Returns words for ``where_bits`` that keep columns 0 .. stop - 1 of all rows."""
    rows, columns = _word_indices(ROWS, COLS, layout)
    return _run_bits((rows * 0)[:, None], (rows * 0 + stop)[:, None], columns[None, :] * 32)


@gluon.jit
def words_within(first, stop, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """Returns words for ``where_bits`` that keep columns first .. stop - 1 of all rows."""
    rows, columns = _word_indices(ROWS, COLS, layout)
    return _run_bits((rows * 0 + first)[:, None], (rows * 0 + stop)[:, None], columns[None, :] * 32)


@gluon.jit
def _run_bits(first, stop, position):
    # In PTX, a shift of 32 or more gives 0.
    make: gl.constexpr = "{ .reg .b32 a, b; shl.b32 a, -1, $1; shl.b32 b, -1, $2; not.b32 b, b; and.b32 $0, a, b; }"
    low = gl.maximum(first - position, 0)
    high = gl.maximum(stop - position, 0)
    return gl.inline_asm_elementwise(make, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def where_bits(scores, words, otherwise: gl.constexpr):
    """Returns (rows, columns) scores where bit c % 32 of words[r, c // 32] is set, and ``otherwise`` elsewhere."""
    ROWS: gl.constexpr = scores.shape[0]
    COLS: gl.constexpr = scores.shape[1]
    parts = scores.reshape([ROWS, COLS // 32, 32])
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, parts.type.layout)))
    # Bits 1 and 2 of a column's index come from the thread, which shifts each word by them once; the rest are constants.
    shifted = words[:, :, None] >> (bit & 6)[None, None, :]
    kept = _where_bit(parts, shifted, (1 << (bit & 25))[None, None, :], otherwise)
    return gl.convert_layout(kept.reshape([ROWS, COLS]), scores.type.layout)


@gluon.jit
def load_column_words(words, ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr, layout: gl.constexpr):
    """Returns words[c * STRIDE + r // 32], (ROWS // 32, COLS), for ``where_column_bits``."""
    parts = gl.zeros([ROWS, COLS], gl.int32, layout=layout).reshape([ROWS // 32, 32, COLS])
    of_words: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    rows = gl.arange(0, ROWS // 32, layout=gl.SliceLayout(1, of_words))
    columns = gl.arange(0, COLS, layout=gl.SliceLayout(0, of_words))
    return gl.load(words + columns[None, :] * STRIDE + rows[:, None])


@gluon.jit
def where_column_bits(scores, words, otherwise: gl.constexpr):
    """Returns (rows, columns) scores, with queries along columns, where bit r % 32 of words[r // 32, c] is set, and ``otherwise``
    elsewhere."""
    ROWS: gl.constexpr = scores.shape[0]
    COLS: gl.constexpr = scores.shape[1]
    parts = scores.reshape([ROWS // 32, 32, COLS])
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, parts.type.layout)))
    kept = _where_bit(parts, words[:, None, :], (1 << bit)[None, :, None], otherwise)
    return gl.convert_layout(kept.reshape([ROWS, COLS]), scores.type.layout)


@gluon.jit
def row_words(first, stop, ROWS: gl.constexpr, layout: gl.constexpr):
    """Returns words for ``where_rows`` with all bits set in rows first .. stop - 1, and none in others."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    return gl.where((rows >= first) & (rows < stop), -1, 0)


@gluon.jit
def where_rows(numbers, words):
    """Returns fp32 numbers in rows that exist, and 0 in others, even if these hold NaN. words: from ``row_words``."""
    keep: gl.constexpr = "and.b32 $0, $1, $2;"
    return gl.inline_asm_elementwise(keep, "=f,f,r", [numbers, words[:, None]], dtype=gl.float32, is_pure=True, pack=1)
