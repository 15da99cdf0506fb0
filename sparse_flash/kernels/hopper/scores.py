"""Changes of scores by a variant, and their derivatives, on a tile in the registers of a wgmma accumulator: see
``portable/scores``. Without a variant, kernels disable all of this at compile time.

Scores wait for their product. In Gluon, the compiler would compute all that does not depend on them before the product ends, and
keep it in registers. One piece of inline assembly waits as a whole.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.gluon import record
from ..common.tiles import LOG2_E


@record
class HeadTerms:
    """Holds what scores of a tile need of its query head."""

    batch: gl.tensor
    head: gl.tensor
    slope: gl.tensor  # of ALiBi, in units of ``_unit``; arbitrary without ALiBi


@record
class ScoringInputs:
    """Says how products become scores: see ``common.variant``."""

    scale: gl.tensor  # times log2(e)
    offset: gl.tensor  # from the last query to the last key
    last: gl.tuple  # the last key's position, with a user's function
    variant: gl.tuple
    SCORED: gl.constexpr
    REACH: gl.constexpr
    SCORE: gl.constexpr
    DERIVATIVE: gl.constexpr
    BY_KEY: gl.constexpr  # whether tiles have keys along their rows
    SIGNED: gl.constexpr  # whether signs of weights say what dropout dropped, and the derivative may change them

    @gluon.jit
    def load_head_terms(self, heads, batch_head):
        """Returns the ``HeadTerms`` of a batch-head of queries."""
        batch, head = heads.of(batch_head)
        slope = self.scale
        if self.variant.alibi_slopes is not None:
            slope = gl.load(self.variant.alibi_slopes + batch_head) * self._unit()
        return HeadTerms(batch, head, slope)

    @gluon.jit
    def factor(self):
        """Returns the factor that brings results of ``scored`` to base 2."""
        if not self.SCORED:
            factor = self.scale
        elif self.SCORE is None:
            factor = 1.0
        else:
            factor = LOG2_E
        return factor

    @gluon.jit
    def scored(self, products, terms, first_query, first_key):
        """Returns scores in base 2, or natural ones if there is a user's function."""
        scores = self._cap_and_bias(products, terms, first_query, first_key)
        if self.SCORE is not None:
            scores = self._call_function(self.SCORE, scores, terms, first_query, first_key)
        return scores

    @gluon.jit
    def times_derivative(self, values, products, terms, first_query, first_key):
        """Returns values times the derivative of scores by scaled products."""
        if self.variant.softcap is not None:
            tanh = self._tanh(products)
            values *= 1.0 - tanh * tanh
        if self.DERIVATIVE is not None:
            before = self._cap_and_bias(products, terms, first_query, first_key)
            values *= self._call_function(self.DERIVATIVE, before, terms, first_query, first_key)
        return values

    @gluon.jit
    def _unit(self):
        """Returns the unit of scores before the user's function: log2(e) for base 2, or 1 for natural ones if there is a
        function."""
        if self.SCORE is None:
            unit = LOG2_E
        else:
            unit = 1.0
        return unit

    @gluon.jit
    def _tanh(self, products):
        """Returns tanh of products * scale / softcap, from an exponential that may overflow: 1 - 2 / inf is 1. Its error is up to
        about 2^-22, near 0 too. A large cap multiplies this error, so the back end refuses it."""
        grow: gl.constexpr = (
            "{ .reg .f32 a; mul.f32 a, $1, $2; ex2.approx.ftz.f32 a, a; add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 a, a; "
            "fma.rn.f32 $0, a, 0fC0000000, 0f3F800000; }"
        )
        # From a product to the exponent of e^2x in base 2; scale is in base 2 already.
        steepness = self.scale * (2.0 / self.variant.softcap)
        return gl.inline_asm_elementwise(grow, "=f,f,f", [products, steepness], dtype=gl.float32, is_pure=True, pack=1)

    @gluon.jit
    def _cap_and_bias(self, products, terms, first_query, first_key):
        """Returns capped and biased scores, in units of ``_unit``."""
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
            scores -= gl.abs(apart) * terms.slope
        if self.variant.rel_bias is not None:
            row, column = self._indices(scores)
            REACH: gl.constexpr = self.REACH
            if self.BY_KEY:
                apart = row + (first_key - first_query - self.offset) - column
            else:
                apart = column + (first_key - first_query - self.offset) - row
            biases = self.variant.rel_bias + terms.head * (2 * REACH + 1) + REACH
            scores += gl.load(biases + gl.minimum(gl.maximum(apart, -REACH), REACH)) * self._unit()
        return scores

    @gluon.jit
    def _call_function(self, FUNCTION: gl.constexpr, scores, terms, first_query, first_key):
        """Evaluates the user's score function, or its derivative, on a step. Past the last token it gets the last token's position,
        as it may read a table there."""
        row, column = self._indices(scores)
        if self.BY_KEY:
            q_pos, k_pos = column + (first_query + self.offset), row + first_key
        else:
            q_pos, k_pos = row + (first_query + self.offset), column + first_key
        q_pos, k_pos = gl.minimum(q_pos, self.last[0]), gl.minimum(k_pos, self.last[0])
        return FUNCTION(scores, terms.batch, terms.head, q_pos, k_pos, self.variant.params)

    @gluon.jit
    def _indices(self, scores):
        layout: gl.constexpr = scores.type.layout
        row = gl.arange(0, scores.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        column = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        return row, column


@gluon.jit
def new_scoring(
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
    return ScoringInputs(scale, kv_len - q_len, last, variant, SCORED, REACH, SCORE, DERIVATIVE, BY_KEY, SIGNED)
