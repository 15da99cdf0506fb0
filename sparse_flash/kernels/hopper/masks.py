"""Element masks of partial blocks, applied to a tile of scores where it lies: in the registers of a wgmma accumulator."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def where_run(scores, first, stop, position, otherwise):
    """scores where first <= position < stop, else ``otherwise``: three int32 tensors, broadcast against scores."""
    # One comparison for two: below first, the difference wraps to a large unsigned number.
    inside = (position - first).to(gl.uint32, bitcast=True) < (stop - first).to(gl.uint32, bitcast=True)
    return gl.where(inside, scores, otherwise)


@gluon.jit
def where_row_bits(scores, words, otherwise, ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr):
    """(ROWS, COLS) scores, queries along rows: kept where bit c % 32 of words[r * STRIDE + c // 32] is set."""
    WORDS: gl.constexpr = COLS // 32
    parts = scores.reshape([ROWS, WORDS, 32])
    layout: gl.constexpr = parts.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    columns = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    word = gl.load(words + rows[:, None] * STRIDE + columns[None, :])
    kept = gl.where(((word[:, :, None] >> bit[None, None, :]) & 1) != 0, parts, otherwise)
    return gl.convert_layout(kept.reshape([ROWS, COLS]), scores.type.layout)


@gluon.jit
def where_column_bits(scores, words, otherwise, ROWS: gl.constexpr, COLS: gl.constexpr, STRIDE: gl.constexpr):
    """(ROWS, COLS) scores, queries along columns: kept where bit r % 32 of words[c * STRIDE + r // 32] is set."""
    WORDS: gl.constexpr = ROWS // 32
    parts = scores.reshape([WORDS, 32, COLS])
    layout: gl.constexpr = parts.type.layout
    rows = gl.arange(0, WORDS, layout=gl.SliceLayout(1, gl.SliceLayout(1, layout)))
    columns = gl.arange(0, COLS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    bit = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = gl.load(words + columns[None, :] * STRIDE + rows[:, None])
    kept = gl.where(((word[:, None, :] >> bit[None, :, None]) & 1) != 0, parts, otherwise)
    return gl.convert_layout(kept.reshape([ROWS, COLS]), scores.type.layout)
