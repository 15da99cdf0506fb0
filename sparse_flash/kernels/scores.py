"""From products to scores in base 2, and back: what terms do to them, for the forward pass and both backward passes.

A tile of scores is of queries by keys or of keys by queries: positions say which, by their shapes. Kernels switch all this off
at compile time where there are no such terms.
"""

import triton
import triton.language as tl

from .common import LN_2, LOG2_E


@triton.jit
def _capped(products, terms):
    if terms.softcap is not None:
        # tanh by an exponential that cannot overflow.
        shrunk = tl.math.exp2(tl.abs(products) * (-2.0 * LOG2_E / terms.softcap))
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        products = tl.where(products < 0.0, -tanh, tanh) * terms.softcap
    return products


@triton.jit
def _biased(scores, head, line, q_pos, k_pos, terms, REACH: tl.constexpr):
    if terms.alibi_slopes is not None:
        scores -= tl.load(terms.alibi_slopes + line) * tl.abs(q_pos - k_pos).to(tl.float32)
    if terms.rel_bias is not None:
        distance = tl.minimum(tl.maximum(k_pos - q_pos, -REACH), REACH)
        scores += tl.load(terms.rel_bias + head * (2 * REACH + 1) + REACH + distance)
    return scores


@triton.jit
def scored(products, score_scale, batch, head, line, q_pos, k_pos, terms, REACH: tl.constexpr, SCORE: tl.constexpr):
    """Scores in base 2. score_scale: scale * log2(e). line: batch * heads + head."""
    scores = _capped(products * (score_scale * LN_2), terms)
    scores = _biased(scores, head, line, q_pos, k_pos, terms, REACH)
    if SCORE is not None:
        scores = SCORE(scores, batch, head, q_pos, k_pos, terms.params)
    return scores * LOG2_E


@triton.jit
def dscored(
    dscores,
    products,
    score_scale,
    batch,
    head,
    line,
    q_pos,
    k_pos,
    terms,
    REACH: tl.constexpr,
    DERIVATIVE: tl.constexpr,
):
    """(gradient of the biased products, gradient of scaled products) from that of scores, from the products once more."""
    capped = _capped(products * (score_scale * LN_2), terms)
    if DERIVATIVE is not None:
        biased = _biased(capped, head, line, q_pos, k_pos, terms, REACH)
        dscores *= DERIVATIVE(biased, batch, head, q_pos, k_pos, terms.params)
    dproducts = dscores
    if terms.softcap is not None:
        share = capped / terms.softcap
        dproducts = dscores * (1.0 - share * share)
    return dscores, dproducts


@triton.jit
def add_bias_gradient(dbiased, head, first_distance, terms, REACH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Adds a tile's gradient, (TILE_M, TILE_N), to that of rel_bias. first_distance: k_pos - q_pos of its first pair."""
    bins = terms.rel_bias_gradient + head * (2 * REACH + 1) + REACH
    if (first_distance - (TILE_M - 1) >= REACH) | (first_distance + (TILE_N - 1) <= -REACH):
        # Wholly beyond the largest distance: one number.
        side = tl.where(first_distance > 0, REACH, -REACH)
        tl.atomic_add(bins + side, tl.sum(dbiased), sem="relaxed")
    else:
        # Each row turned by its number, so that diagonals become columns: TILE_N sums for each time that they wrap around.
        column = tl.arange(0, TILE_M)[:, None] + tl.arange(0, TILE_N)[None, :]
        turned = tl.gather(dbiased, column % TILE_N, 1)
        for turn in tl.static_range((TILE_M + TILE_N - 2) // TILE_N + 1):
            sums = tl.sum(tl.where(column // TILE_N == turn, turned, 0.0), 0)
            distance = first_distance + tl.arange(0, TILE_N) - turn * TILE_N
            distance = tl.minimum(tl.maximum(distance, -REACH), REACH)
            tl.atomic_add(bins + distance, sums, mask=sums != 0.0, sem="relaxed")
