"""The running softmax of rows of scores, in base 2: ``update`` adds scores, ``merge`` adds partial results, ``finish`` divides.

A row's state is (accumulator, running_max, running_sum): the values times weights exp2(score - running_max), and the sum of these
weights. running_max starts at ``FLOOR``. Source: arXiv:2307.08691, Alg. 1.
"""

import triton
import triton.language as tl

from ..common.tiles import FLOOR


@triton.jit
def init_softmax(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The initial state of ROWS rows."""
    return tl.zeros([ROWS, DIM], tl.float32), tl.full([ROWS], FLOOR, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def update(running_max, running_sum, scores, factor, HEADROOM: tl.constexpr = 0.0):
    """(weights, rescale of the accumulator, running_max, running_sum) after ``scores``, (rows, keys). factor: positive, makes
    scores base 2. HEADROOM: the largest weight is 2^HEADROOM, so that small weights are not lost in 16 bits."""
    new_max = tl.maximum(running_max, tl.max(scores, 1) * factor - HEADROOM)
    weights = tl.math.exp2(scores * factor - new_max[:, None])
    rescale = tl.math.exp2(running_max - new_max)
    return weights, rescale, new_max, running_sum * rescale + tl.sum(weights, 1)


@triton.jit
def merge(state, values, logs, COUNT: tl.constexpr):
    """The state after COUNT partial results. values: tuple of (rows, DIM), or None if all are 0. logs: tuple of (rows,), in base 2,
    -inf for empty results."""
    accumulator, running_max, running_sum = state
    new_max = running_max
    for number in tl.static_range(COUNT):
        new_max = tl.maximum(new_max, logs[number])
    rescale = tl.math.exp2(running_max - new_max)
    running_sum *= rescale
    accumulator *= rescale[:, None]
    for number in tl.static_range(COUNT):
        weight = tl.math.exp2(logs[number] - new_max)
        running_sum += weight
        if values is not None:
            accumulator += values[number] * weight[:, None]
    return accumulator, new_max, running_sum


@triton.jit
def log_of_sum(running_max, running_sum, exists=None):
    """(the sum to divide by, its log in base 2: -inf if a row keeps nothing or does not exist)."""
    keeps_nothing = running_sum == 0.0
    if exists is not None:
        keeps_nothing |= ~exists
    total = tl.where(keeps_nothing, 1.0, running_sum)
    return total, tl.where(keeps_nothing, -float("inf"), running_max + tl.math.log2(total))


@triton.jit
def finish(state):
    """(out, ``log_of_sum``) of rows. out is 0 for rows that keep nothing."""
    accumulator, running_max, running_sum = state
    total, log = log_of_sum(running_max, running_sum)
    return accumulator / total[:, None], log
