"""Sink logits, which are added to each query's softmax (arXiv:2309.17453): in the state of a forward pass, and their gradient."""

import triton
import triton.language as tl

from ..common.tiles import LOG2_E
from .softmax import merge


@triton.jit
def add_sink(state, sink):
    """The softmax state after one more natural score, sink, whose value is 0. sink: of each row, or of all rows; -inf adds
    nothing."""
    return merge(state, None, (sink.to(tl.float32) * LOG2_E,), 1)


@triton.jit
def sink_terms(sink, lse, delta):
    """Each query's term of the gradient of its head's sink: minus the sink's weight times delta = rowsum(dOut * Out) - dLse.
    lse: in base 2, +inf for queries with neither keys nor sink and for nonexistent ones, whose delta may be NaN."""
    weight = tl.math.exp2(sink.to(tl.float32) * LOG2_E - lse)
    return tl.where(lse == float("inf"), 0.0, -weight * delta)
