"""Weights in e4m3 for the forward kernel, with the functions that ``sixteen_bits`` names. Values are transposed in shared memory. A
product with ones sums the weights as they are rounded."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ..common.gluon import record
from .pairs import split_columns
from .products import new_sums, wait_for_sums
from .quads import from_quads
from .ring import allocate_tiles
from .softmax import fold_first_quads, fold_quads_lazily, reduce_threads, rescale_sums

_ONES = gl.constexpr(8)  # columns of ones that sum weights, the fewest of a product
_DEPTH = gl.constexpr(32)  # of one instruction's product
_QUERIES = gl.constexpr(64)  # that share a scale


class Scales(NamedTuple):
    """Pointers to float32, with operands in e4m3; otherwise None."""

    q: Any = None  # (batch, heads, blocks of 64 queries)
    k: Any = None  # (batch, kv_heads)
    v: Any = None  # as k
    lse: Any = None  # (batch, heads, q_len): to add to lse


NO_SCALES = Scales()


@record
class EightBits:
    scales: gl.tuple  # ``Scales``
    staged: gl.shared_memory_descriptor  # results, a tile for each warp group
    ones: gl.shared_memory_descriptor  # (_ONES, keys)

    @gluon.jit
    def first(self, scores, factor, stream, first_query, first_key):
        return fold_first_quads(scores, factor)

    @gluon.jit
    def next(self, scores, running_max, running_sum, factor, stream, first_query, first_key):
        kept, rescale, running_max = fold_quads_lazily(scores, running_max, factor)
        return kept, rescale, running_max, running_sum

    @gluon.jit
    def start_values(self, kept, values, sums):
        dtype: gl.constexpr = self.ones.dtype
        no_weights = new_sums(_QUERIES, _ONES, _ONES, _DEPTH)[0]
        weights = from_quads(kept, dtype, gl.DotOperandLayout(0, sums[0].type.layout, 4))
        again = gl.convert_layout(weights, gl.DotOperandLayout(0, no_weights.type.layout, 4))
        return (
            warpgroup_mma(weights, values.permute((1, 0)), gl.zeros_like(sums[0]), use_acc=False, is_async=True),
            warpgroup_mma(again, self.ones.permute((1, 0)), no_weights, use_acc=False, is_async=True),
        )

    @gluon.jit
    def add_values(self, started, sums, running_sum, PENDING: gl.constexpr):
        values, weights = wait_for_sums(started, PENDING)
        # The tensor cores' own sums keep about 14 bits, these 24.
        of_weights, _ = split_columns(weights)
        return (sums[0] + values,), running_sum + gl.convert_layout(of_weights, running_sum.type.layout)

    @gluon.jit
    def rescale(self, sums, running_sum, factors):
        return rescale_sums(sums, factors), running_sum * factors

    @gluon.jit
    def of_rows(self, running_max, running_sum, layout: gl.constexpr):
        return reduce_threads(running_max, running_sum, layout, True)

    @gluon.jit
    def load_scales(self, p, tile, first_query):
        """Returns the factors of scores and of values of a tile's queries of a warp group."""
        block = tile.batch_head * ((p.q_len + (_QUERIES - 1)) // _QUERIES) + first_query // _QUERIES
        of_queries = gl.load(self.scales.q + block, mask=(first_query >= 0) & (first_query < p.q_len), other=1.0)
        kv_batch_head = tile.batch_head // p.heads.group
        of_scores = p.scoring.factor() * of_queries * gl.load(self.scales.k + kv_batch_head)
        return of_scores, gl.load(self.scales.v + kv_batch_head)

    @gluon.jit
    def factor(self, p, scales):
        return scales[0]

    @gluon.jit
    def dequantize(self, p, tile, scales, by_row, lse, first_query):
        query = first_query + gl.arange(0, _QUERIES, layout=lse.type.layout)
        shift = self.scales.lse + tile.batch_head.to(gl.int64) * p.q_len + query
        return by_row * scales[1], lse + gl.load(shift, mask=query < p.q_len, other=0.0)

    @gluon.jit
    def staging(self, p, turn, HALF_INDEX: gl.constexpr):
        return self.staged.index(HALF_INDEX)


@gluon.jit
def new_eight_bits(scales, dtype: gl.constexpr, out_dtype: gl.constexpr, SHAPE: gl.constexpr):
    staged = allocate_tiles(out_dtype, SHAPE.GROUPS, _QUERIES, SHAPE.DIM_V)
    ones = allocate_tiles(dtype, 1, _ONES, SHAPE.KEYS).index(0)
    layout: gl.constexpr = gl.BlockedLayout([1, SHAPE.KEYS // 32], [8, 4], [1, 4], [1, 0])
    # By its bits: Triton 3.6's assembler repeats a converted constant wrongly.
    ones.store(gl.full([_ONES, SHAPE.KEYS], 0x38, gl.int8, layout=layout).to(dtype, bitcast=True))
    return EightBits(scales, staged, ones)
