"""Tiles in e4m3 as quads, an int32 each: (rows, columns // 4), for the reason that ``pairs`` gives.

A thread's four numbers of 16 columns are one quad. In a product's operand, a quad is four adjacent columns; in its result, two
adjacent columns and the two eight to their right. So a result becomes an operand with its columns permuted within each 16, and
without an exchange between threads. What the operand is multiplied by has its rows in that order (``quantization``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def split_quads(tile):
    """Returns the four numbers of each quad, (rows, columns // 4) each."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    quads = tile.reshape([ROWS, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    low, high = quads.split()
    first, third = low.split()
    second, fourth = high.split()
    shape: gl.constexpr = [ROWS, COLUMNS // 4]
    return first.reshape(shape), second.reshape(shape), third.reshape(shape), fourth.reshape(shape)


@gluon.jit
def to_quads(tile):
    """Returns a float32 tile as quads."""
    first, second, third, fourth = split_quads(tile)
    code: gl.constexpr = (
        "{ .reg .b16 h<2>; cvt.rn.satfinite.e4m3x2.f32 h0, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h1, $4, $3; mov.b32 $0, {h0, h1}; }"
    )
    return gl.inline_asm_elementwise(code, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def from_quads(quads, dtype: gl.constexpr, layout: gl.constexpr):
    """Returns quads as an operand in e4m3, (rows, columns), columns in that order."""
    # Four copies of a quad are one register, which the assembly returns as four numbers. The assembler removes a plain move, gives
    # the next weights the same registers, and serializes products (Triton 3.6). A move in two halves stays.
    copies = gl.join(gl.join(quads, quads), gl.join(quads, quads))
    code: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, {a, b}; }"
    numbers = gl.inline_asm_elementwise(code, "=r,r,r,r,r", [copies], dtype=gl.int8, is_pure=True, pack=4)
    whole = numbers.reshape([quads.shape[0], quads.shape[1] * 4])
    return gl.convert_layout(whole.to(dtype, bitcast=True), layout)
