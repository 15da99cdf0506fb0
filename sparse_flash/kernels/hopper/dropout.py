"""Dropout of a tile in place, in the registers of a wgmma accumulator: see ``core.definition.kept_by_dropout``.

``common/philox`` makes the words. As in ``masks``, each selection is one piece of inline assembly: the compiler would make all
comparisons written in Gluon before the values exist, and keep them as predicates.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.gluon import record
from ..common.philox import draw_words, stream_of_batch_head

# $1: a number, $2: the word of its pair, $3: the shift that moves the pair's half to the top, $4: the threshold to reach.
_IS_DROPPED = gl.constexpr("{ .reg .pred p; .reg .b32 t; shl.b32 t, $2, $3; setp.lt.u32 p, t, $4; ")


@record
class Dropout:
    variant: gl.tuple
    ENABLED: gl.constexpr

    @gluon.jit
    def stream(self, batch_head):
        """Returns three scalars that make the draws of each batch-head different. Without dropout, they are arbitrary."""
        stream = (batch_head, batch_head, batch_head)
        if self.ENABLED:
            stream = stream_of_batch_head(self.variant.seed, batch_head)
        return stream

    @gluon.jit
    def zero_dropped(self, weights, stream, first_query, first_key):
        """Returns (queries, keys) weights, with 0 for dropped pairs."""
        choose: gl.constexpr = _IS_DROPPED + "selp.f32 $0, 0f00000000, $1, p; }"
        return self._chosen(choose, weights, stream, first_query, first_key, False)

    @gluon.jit
    def negate_dropped(self, weights, stream, first_query, first_key):
        """Returns (keys, queries) nonnegative weights, with the sign set for dropped pairs."""
        choose: gl.constexpr = _IS_DROPPED + ".reg .f32 n; neg.f32 n, $1; selp.f32 $0, n, $1, p; }"
        return self._chosen(choose, weights, stream, first_query, first_key, True)

    @gluon.jit
    def share(self):
        """Returns the share of pairs that dropout keeps."""
        return 1.0 - self.variant.dropout_p

    @gluon.jit
    def _chosen(self, choose: gl.constexpr, weights, stream, first_query, first_key, BY_KEY: gl.constexpr):
        layout: gl.constexpr = weights.type.layout
        row = gl.arange(0, weights.shape[0], layout=gl.SliceLayout(1, layout)).to(gl.uint32)[:, None]
        column = gl.arange(0, weights.shape[1], layout=gl.SliceLayout(0, layout)).to(gl.uint32)[None, :]
        if BY_KEY:
            query, token = column, row
        else:
            query, token = row, column
        words = draw_words(stream, query, token, first_query, first_key)
        shift = 16 - (query & 8) * 2
        threshold = (self.variant.dropout_p * 4294967296.0).to(gl.uint32)
        return gl.inline_asm_elementwise(
            choose, "=f,f,r,r,r", [weights, words, shift, threshold], dtype=gl.float32, is_pure=True, pack=1
        )


@gluon.jit
def new_dropout(variant):
    ENABLED: gl.constexpr = variant.seed is not None
    return Dropout(variant, ENABLED)


@gluon.jit
def round_kept(weights, dtype: gl.constexpr):
    """Returns weights from ``negate_dropped`` in 16 bits, with 0 for dropped pairs."""
    # Rounding with relu sets negative numbers to 0 for free.
    bfloat: gl.constexpr = "cvt.rn.relu.bf16x2.f32 $0, $2, $1;"
    half: gl.constexpr = "cvt.rn.relu.f16x2.f32 $0, $2, $1;"
    if dtype == gl.bfloat16:
        kept = gl.inline_asm_elementwise(bfloat, "=r,f,f", [weights], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        kept = gl.inline_asm_elementwise(half, "=r,f,f", [weights], dtype=gl.float16, is_pure=True, pack=2)
    return kept


@gluon.jit
def score_gradients(weights, dweights, delta):
    """Returns dS for weights from ``negate_dropped``: weights * ((dweights if kept else 0) - delta)."""
    # In Gluon, the compiler would compute parts of this where the signs are made, and keep them in registers.
    derive: gl.constexpr = (
        "{ .reg .f32 a, k; abs.f32 a, $1; neg.f32 a, a; mul.f32 a, a, $3; max.f32 k, $1, 0f00000000; fma.rn.f32 $0, k, $2, a; }"
    )
    return gl.inline_asm_elementwise(derive, "=f,f,f,f", [weights, dweights, delta], dtype=gl.float32, is_pure=True, pack=1)
