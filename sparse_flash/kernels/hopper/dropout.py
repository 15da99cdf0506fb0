"""Dropout of a tile where it lies, in the registers of a wgmma accumulator: see ``variant.definition.kept_by_dropout``.

Words are those of ``kernels.dropout``. As with ``masks``, each choice is one piece of assembly: comparisons written in Gluon
would all be made before the numbers are there, and kept as truth values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.philox import stream_of_line, words_of_pairs

# $1: a number, $2: the word of its pair, $3: how far left the pair's half has to go, $4: what it must reach.
_IS_DROPPED = gl.constexpr("{ .reg .pred p; .reg .b32 t; shl.b32 t, $2, $3; setp.lt.u32 p, t, $4; ")


@gluon.jit
def line_stream(p, line):
    """What tells a line's draws from others', three scalars; of no use without dropout. line: batch * heads + head."""
    stream = (line, line, line)
    if p.DROPOUT:
        stream = stream_of_line(p.seed, line)
    return stream


@gluon.jit
def zero_dropped(p, weights, stream, first_query, first_key):
    """(queries, keys) weights, with 0 where dropout drops the pair."""
    choose: gl.constexpr = _IS_DROPPED + "selp.f32 $0, 0f00000000, $1, p; }"
    return _chosen(p, choose, weights, stream, first_query, first_key, False)


@gluon.jit
def negate_dropped(p, weights, stream, first_query, first_key):
    """(keys, queries) weights, none below 0, with the sign that says whether dropout drops the pair."""
    choose: gl.constexpr = _IS_DROPPED + ".reg .f32 n; neg.f32 n, $1; selp.f32 $0, n, $1, p; }"
    return _chosen(p, choose, weights, stream, first_query, first_key, True)


@gluon.jit
def _chosen(p, choose: gl.constexpr, weights, stream, first_query, first_key, BY_KEY: gl.constexpr):
    layout: gl.constexpr = weights.type.layout
    row = gl.arange(0, weights.shape[0], layout=gl.SliceLayout(1, layout)).to(gl.uint32)[:, None]
    column = gl.arange(0, weights.shape[1], layout=gl.SliceLayout(0, layout)).to(gl.uint32)[None, :]
    if BY_KEY:
        query, token = column, row
    else:
        query, token = row, column
    words = words_of_pairs(stream, query, token, first_query, first_key)
    shift = 16 - (query & 8) * 2
    threshold = (p.dropout_p * 4294967296.0).to(gl.uint32)
    return gl.inline_asm_elementwise(
        choose, "=f,f,r,r,r", [weights, words, shift, threshold], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def kept_operand(weights, dtype: gl.constexpr):
    """Weights that ``negate_dropped`` gave, with 0 for what is dropped, in 16 bits."""
    # Rounding sets negative numbers to 0 for nothing.
    bfloat: gl.constexpr = "cvt.rn.relu.bf16x2.f32 $0, $2, $1;"
    half: gl.constexpr = "cvt.rn.relu.f16x2.f32 $0, $2, $1;"
    if dtype == gl.bfloat16:
        kept = gl.inline_asm_elementwise(bfloat, "=r,f,f", [weights], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        kept = gl.inline_asm_elementwise(half, "=r,f,f", [weights], dtype=gl.float16, is_pure=True, pack=2)
    return kept


@gluon.jit
def score_gradients(weights, dweights, delta):
    """dS of weights that ``negate_dropped`` gave: weights * (dweights where they are kept, else 0, - delta)."""
    # In assembly, so that no number of it is worked out before, where the signs were made, and kept.
    derive: gl.constexpr = (
        "{ .reg .f32 a, k; abs.f32 a, $1; neg.f32 a, a; mul.f32 a, a, $3; max.f32 k, $1, 0f00000000; fma.rn.f32 $0, k, $2, a; }"
    )
    return gl.inline_asm_elementwise(derive, "=f,f,f,f", [weights, dweights, delta], dtype=gl.float32, is_pure=True, pack=1)
