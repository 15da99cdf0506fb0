"""From products to scores, and back: what a variant does to a tile in the registers of a wgmma accumulator. As ``portable/scores``;
without a variant, kernels disable all of this at compile time.

A tile's scores wait for their product. What is one piece of assembly here waits with them: the compiler would compute its parts
before, and keep them in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.gluon import record
from ..common.tiles import LOG2_E


@record
class ScoredLine:
    """The query head that a tile belongs to."""

    batch: gl.tensor
    head: gl.tensor
    slope: gl.tensor  # of ALiBi, in base 2; anything without it


@record
class ScoreTerms:
    """How products become scores: see ``common.variant``. scale: times log2(e). offset: of the last query from the last key. last:
    the last key's position, if there is a user's function."""

    scale: gl.tensor
    offset: gl.tensor
    last: gl.tuple
    variant: gl.tuple
    SCORED: gl.constexpr
    REACH: gl.constexpr
    SCORE: gl.constexpr
    DERIVATIVE: gl.constexpr
    BY_KEY: gl.constexpr  # whether tiles have keys along their rows
    SIGNED: gl.constexpr  # whether signs of weights say what dropout dropped, and the derivative may change them

    @gluon.jit
    def place(self, heads, line):
        """The ``ScoredLine`` of a line, batch * heads + head."""
        batch, head = heads.of_line(line)
        slope = self.scale
        if self.variant.alibi_slopes is not None:
            slope = gl.load(self.variant.alibi_slopes + line) * self._unit()
        return ScoredLine(batch, head, slope)

    @gluon.jit
    def factor(self):
        """From what ``scored`` returns to base 2."""
        if not self.SCORED:
            factor = self.scale
        elif self.SCORE is None:
            factor = 1.0
        else:
            factor = LOG2_E
        return factor

    @gluon.jit
    def scored(self, products, place, first_query, first_key):
        """Scores in base 2, or natural ones if the user's function makes them."""
        scores = self._before_function(products, place, first_query, first_key)
        if self.SCORE is not None:
            scores = self._of_function(self.SCORE, scores, place, first_query, first_key)
        return scores

    @gluon.jit
    def times_derivative(self, values, products, place, first_query, first_key):
        """values times the derivative of scores by scaled products."""
        if self.variant.softcap is not None:
            tanh = self._tanh(products)
            values *= 1.0 - tanh * tanh
        if self.DERIVATIVE is not None:
            before = self._before_function(products, place, first_query, first_key)
            values *= self._of_function(self.DERIVATIVE, before, place, first_query, first_key)
        return values

    @gluon.jit
    def _unit(self):
        """Of scores before the user's function: base 2, or natural if there is one."""
        if self.SCORE is None:
            unit = LOG2_E
        else:
            unit = 1.0
        return unit

    @gluon.jit
    def _tanh(self, products):
        """tanh of products * scale / softcap, from an exponential that may overflow: 1 - 2 / inf is 1. Off by up to about 2^-22,
        near 0 too, which a large cap multiplies: the back end refuses one."""
        grow: gl.constexpr = (
            "{ .reg .f32 a; mul.f32 a, $1, $2; ex2.approx.ftz.f32 a, a; add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 a, a; "
            "fma.rn.f32 $0, a, 0fC0000000, 0f3F800000; }"
        )
        # The exponent of e^2x in base 2. scale is in base 2 already.
        steepness = self.scale * (2.0 / self.variant.softcap)
        return gl.inline_asm_elementwise(grow, "=f,f,f", [products, steepness], dtype=gl.float32, is_pure=True, pack=1)

    @gluon.jit
    def _before_function(self, products, place, first_query, first_key):
        """Capped and biased scores, in units of ``_unit``."""
        if self.variant.softcap is not None:
            scores = self._tanh(products) * (self.variant.softcap * self._unit())
        else:
            scores = products * (self.scale * (self._unit() / LOG2_E))
        if self.variant.alibi_slopes is not None:
            # Converting each distance would take as long as its exponential: convert rows and columns, then subtract.
            row, column = self._indices(scores)
            if self.BY_KEY:
                near, far = column, row + (first_key - first_query - self.offset)
            else:
                near, far = row, column + (first_key - first_query - self.offset)
            apart = far.to(gl.float32) - near.to(gl.float32)
            scores -= gl.abs(apart) * place.slope
        if self.variant.rel_bias is not None:
            row, column = self._indices(scores)
            REACH: gl.constexpr = self.REACH
            if self.BY_KEY:
                apart = row + (first_key - first_query - self.offset) - column
            else:
                apart = column + (first_key - first_query - self.offset) - row
            biases = self.variant.rel_bias + place.head * (2 * REACH + 1) + REACH
            scores += gl.load(biases + gl.minimum(gl.maximum(apart, -REACH), REACH)) * self._unit()
        return scores

    @gluon.jit
    def _of_function(self, FUNCTION: gl.constexpr, scores, place, first_query, first_key):
        """Evaluates the user's score function, or its derivative, on a step. Past the last token it gets the last token's position,
        as it may read a table there."""
        row, column = self._indices(scores)
        if self.BY_KEY:
            q_pos, k_pos = column + (first_query + self.offset), row + first_key
        else:
            q_pos, k_pos = row + (first_query + self.offset), column + first_key
        q_pos, k_pos = gl.minimum(q_pos, self.last[0]), gl.minimum(k_pos, self.last[0])
        return FUNCTION(scores, place.batch, place.head, q_pos, k_pos, self.variant.params)

    @gluon.jit
    def _indices(self, scores):
        layout: gl.constexpr = scores.type.layout
        row = gl.arange(0, scores.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        column = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        return row, column


@gluon.jit
def new_terms(
    variant,
    scale,
    q_len,
    kv_len,
    SCORED: gl.constexpr,
    REACH: gl.constexpr,
    SCORE: gl.constexpr,
    DERIVATIVE: gl.constexpr,
    BY_KEY: gl.constexpr,
    SIGNED: gl.constexpr,
):
    last = (kv_len - 1,) if SCORE is not None else ()
    return ScoreTerms(scale, kv_len - q_len, last, variant, SCORED, REACH, SCORE, DERIVATIVE, BY_KEY, SIGNED)
