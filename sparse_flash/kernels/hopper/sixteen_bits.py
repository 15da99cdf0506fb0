"""Weights in float16 and bfloat16 for the forward kernel. ``eight_bits`` has a record with the same functions:

first, next: from scores to the weights of a tile's first step, and of a later one, with the running maximum and sum.
start_values, add_values: start the products of weights and values, and add them to the sums when they are done.
rescale: multiplies the sums by the factors of ``next``. of_rows: maxima and sums, (64,).
load_scales, factor, dequantize: the scales of operands in e4m3. staging: where a warp group's output waits for TMA.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.gluon import record
from .dropout import Dropout
from .pairs import from_pairs, to_pairs
from .products import scale_rows, start_product, wait_for_sums
from .softmax import fold_by_maximum, fold_first_step, fold_lazily, new_row_state, reduce_threads, rescale_sums


@record
class SixteenBits:
    dropout: Dropout
    dtype: gl.constexpr
    # For scores that are more than scaled products, and with dropout: weights by the maximum so far. Otherwise it lags behind.
    VARIED: gl.constexpr

    @gluon.jit
    def first(self, scores, factor, stream, first_query, first_key):
        if self.VARIED:
            running_max, running_sum = new_row_state(scores)
            kept, _, running_max, running_sum = self.next(scores, running_max, running_sum, factor, stream, first_query, first_key)
        else:
            kept, running_max, running_sum = fold_first_step(scores, factor, self.dtype)
        return kept, running_max, running_sum

    @gluon.jit
    def next(self, scores, running_max, running_sum, factor, stream, first_query, first_key):
        if self.VARIED:
            weights, rescale, running_max, running_sum = fold_by_maximum(scores, running_max, running_sum, factor)
            if self.dropout.ENABLED:
                weights = self.dropout.zero_dropped(weights, stream, first_query, first_key)
            kept = to_pairs(weights, self.dtype)
        else:
            kept, rescale, running_max, running_sum = fold_lazily(scores, running_max, running_sum, factor, self.dtype)
        return kept, rescale, running_max, running_sum

    @gluon.jit
    def start_values(self, kept, values, sums):
        return start_product(from_pairs(kept, self.dtype, gl.DotOperandLayout(0, sums[0].type.layout, 2)), values, sums)

    @gluon.jit
    def add_values(self, started, sums, running_sum, PENDING: gl.constexpr):
        return wait_for_sums(started, PENDING), running_sum

    @gluon.jit
    def rescale(self, sums, running_sum, factors):
        if self.VARIED:
            sums = scale_rows(sums, factors)
        else:
            sums = rescale_sums(sums, factors)
        return sums, running_sum

    @gluon.jit
    def of_rows(self, running_max, running_sum, layout: gl.constexpr):
        if not self.VARIED:
            running_max, running_sum = reduce_threads(running_max, running_sum, layout, False)
        return running_max, running_sum

    @gluon.jit
    def load_scales(self, p, tile, first_query):
        return p.scoring.scale

    @gluon.jit
    def factor(self, p, scales):
        return p.scoring.factor()

    @gluon.jit
    def dequantize(self, p, tile, scales, by_row, lse, first_query):
        return by_row, lse

    @gluon.jit
    def staging(self, p, turn, HALF_INDEX: gl.constexpr):
        return p.q.stage(turn, HALF_INDEX)
