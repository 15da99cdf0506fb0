"""Tiles in 16 bits as pairs of columns, an int32 each: (rows, columns // 2).

Where single 16-bit numbers cross a loop, the compiler unpacks and repacks them, and holds each in a register of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def split_columns(tile):
    """Returns even and odd columns."""
    return tile.reshape([tile.shape[0], tile.shape[1] // 2, 2]).split()


@gluon.jit
def to_pairs(tile, dtype: gl.constexpr):
    """Returns a float32 tile as pairs."""
    low, high = split_columns(tile)
    return gl.inline_asm_elementwise(_round_pair(dtype), "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def from_pairs(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """Returns pairs as a tile in 16 bits."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    whole = gl.join(low, high).reshape([pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(whole.to(dtype, bitcast=True), layout)


@gluon.jit
def multiply_pairs(pairs, tile, dtype: gl.constexpr):
    """Returns pairs times a float32 tile, as pairs."""
    low, high = split_columns(tile)
    multiply: gl.constexpr = _multiply_pair(dtype)
    return gl.inline_asm_elementwise(multiply, "=r,r,f,f", [pairs, low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def negate_after(numbers, pairs, layout: gl.constexpr):
    """Returns minus ``numbers`` in each row, as a float32 tile with twice the columns of ``pairs``. The compiler computes it after
    ``pairs``, which are finite and nonnegative, as it cannot know that pairs times 0 are 0."""
    low, high = split_columns(numbers[None, :] + gl.zeros([pairs.shape[0], numbers.shape[0]], gl.float32, layout=layout))
    after: gl.constexpr = "{ .reg .f32 x, y; mov.b32 x, $2; neg.f32 y, $3; fma.rn.f32 $0, x, 0f00000000, y; neg.f32 $1, $4; }"
    low, high = gl.inline_asm_elementwise(
        after, "=f,=f,r,f,f", [pairs, low, high], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(low, high).reshape([pairs.shape[0], pairs.shape[1] * 2]), layout)


@gluon.constexpr_function
def _round_pair(dtype):
    return f"cvt.rn.{_name(dtype)}x2.f32 $0, $2, $1;"


@gluon.constexpr_function
def _multiply_pair(dtype):
    if dtype == gl.bfloat16:
        unpack = "shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;"
    else:
        unpack = "mov.b32 {x, y}, $1; cvt.f32.f16 a, x; cvt.f32.f16 b, y;"
    multiply = f"mul.f32 a, a, $2; mul.f32 b, b, $3; cvt.rn.{_name(dtype)}x2.f32 $0, b, a;"
    return f"{{ .reg .b16 x, y; .reg .f32 a, b; {unpack} {multiply} }}"


@gluon.constexpr_function
def _name(dtype):
    return "bf16" if dtype == gl.bfloat16 else "f16"
