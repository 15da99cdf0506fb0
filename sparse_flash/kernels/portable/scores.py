"""From products to scores in base 2, and back, under a variant, in the forward and both backward passes. Without a variant, this is
disabled at compile time."""

import triton
import triton.language as tl

from ..common.tiles import CUT, LN_2, LOG2_E
from .row_loop import arange_2d


@triton.jit
def _positions(place, sizes):
    """The positions of a step's first query and key: the last query aligns with the last key."""
    return place.first_query + (sizes.kv_len - sizes.q_len), place.first_key


@triton.jit
def _first_distance(place, sizes):
    """k_pos - q_pos of the first pair of a step."""
    q_pos, k_pos = _positions(place, sizes)
    return k_pos - q_pos


@triton.jit
def _tanh(products, scoring):
    """tanh of products * scale / softcap, with a relative error of a few roundings, as a large cap multiplies small values."""
    power = products * (scoring.scale * (2.0 / scoring.variant.softcap))  # e^2x is 2^power, x being tanh's argument
    large = 1.0 - 2.0 / (1.0 + tl.math.exp2(power))  # may overflow, as 1 - 2 / inf is 1; cancels near 0
    square = power * power
    # tanh(x) / power for power below 1, fitted for the least relative error, 3e-8.
    small = (6.6487053e-4 - 2.945801e-5 * square) * (square * square) + (0.34657358 - 1.3875669e-2 * square)
    return tl.where(square < 1.0, power * small, large)


@triton.jit
def _beyond_reach(first_distance, sizes, REACH: tl.constexpr):
    """Whether all pairs of a step are at least REACH apart, on one side: they share one element of rel_bias."""
    return (first_distance - (sizes.TILE_M - 1) >= REACH) | (first_distance + (sizes.TILE_N - 1) <= -REACH)


@triton.jit
def _add_bias(scores, place, sizes, scoring, UNIT: tl.constexpr, KIND: tl.constexpr):
    """Biased scores. scores and the result: times UNIT."""
    variant = scoring.variant
    REACH: tl.constexpr = scoring.REACH
    TILE_M: tl.constexpr = sizes.TILE_M
    TILE_N: tl.constexpr = sizes.TILE_N
    BY_KEY: tl.constexpr = sizes.BY_KEY
    first_distance = _first_distance(place, sizes)
    if variant.alibi_slopes is not None:
        # Converting each distance would take as long as its exponential: convert rows and columns, then add.
        keys = arange_2d(first_distance, TILE_N, BY_KEY).to(tl.float32)
        distance = keys - arange_2d(0, TILE_M, not BY_KEY).to(tl.float32)
        scores -= (tl.load(variant.alibi_slopes + place.tile.batch_head) * UNIT) * tl.abs(distance)
    if variant.rel_bias is not None:
        biases = variant.rel_bias + place.tile.head * (2 * REACH + 1) + REACH
        if KIND == CUT or UNIT == 1.0:
            # Triton 3.6 cannot compile the other branches if loads of a cut entry or of the user's function determine the layout of
            # the scores.
            apart = arange_2d(first_distance, TILE_N, BY_KEY) - arange_2d(0, TILE_M, not BY_KEY)
            scores += tl.load(biases + tl.minimum(tl.maximum(apart, -REACH), REACH)) * UNIT
        elif _beyond_reach(first_distance, sizes, REACH):
            scores += tl.load(biases + tl.where(first_distance > 0, REACH, -REACH)) * UNIT
        else:
            # Loads each of the tile's TILE_M + TILE_N - 1 distances once and spreads them. Loads per pair would also determine the
            # layout of the scores, which would then go through shared memory in every step.
            STRIP: tl.constexpr = 2 * max(TILE_M, TILE_N)
            number = first_distance - (TILE_M - 1) + tl.arange(0, STRIP)
            strip = tl.load(biases + tl.minimum(tl.maximum(number, -REACH), REACH)) * UNIT
            pair = tl.arange(0, TILE_M * TILE_N)
            if BY_KEY:
                spread = tl.gather(strip, pair // TILE_M - pair % TILE_M + (TILE_M - 1), 0)
                scores += tl.reshape(spread, (TILE_N, TILE_M))
            else:
                spread = tl.gather(strip, pair % TILE_N - pair // TILE_N + (TILE_M - 1), 0)
                scores += tl.reshape(spread, (TILE_M, TILE_N))
    return scores


@triton.jit
def _cap_and_bias(products, place, sizes, scoring, NATURAL: tl.constexpr, KIND: tl.constexpr):
    """Capped and biased scores, natural or in base 2."""
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    if scoring.variant.softcap is not None:
        scores = _tanh(products, scoring) * (scoring.variant.softcap * UNIT)
    else:
        scores = products * (scoring.scale * (LN_2 * UNIT))
    return _add_bias(scores, place, sizes, scoring, UNIT, KIND)


@triton.jit
def _call_function(FUNCTION: tl.constexpr, scores, place, sizes, variant):
    """Evaluates the user's score function, or its derivative, on a step. Positions past the last token are clamped, so that it
    reads tables within bounds."""
    first_q, first_k = _positions(place, sizes)
    q_pos = tl.minimum(arange_2d(first_q, sizes.TILE_M, not sizes.BY_KEY), sizes.kv_len - 1)
    k_pos = tl.minimum(arange_2d(first_k, sizes.TILE_N, sizes.BY_KEY), sizes.kv_len - 1)
    return FUNCTION(scores, place.tile.batch, place.tile.head, q_pos, k_pos, variant.params)


@triton.jit
def compute_scores(products, place, sizes, scoring, KIND: tl.constexpr):
    """Scores in base 2."""
    NATURAL: tl.constexpr = scoring.SCORE is not None
    scores = _cap_and_bias(products, place, sizes, scoring, NATURAL, KIND)
    if NATURAL:
        scores = _call_function(scoring.SCORE, scores, place, sizes, scoring.variant) * LOG2_E
    return scores


@triton.jit
def times_derivative_of_function(values, products, place, sizes, scoring, KIND: tl.constexpr):
    """values times the derivative of scores by biased products, for the arguments of ``compute_scores``."""
    if scoring.DERIVATIVE is not None:
        biased = _cap_and_bias(products, place, sizes, scoring, True, KIND)
        values *= _call_function(scoring.DERIVATIVE, biased, place, sizes, scoring.variant)
    return values


@triton.jit
def times_derivative_of_cap(values, products, scoring):
    """values times the derivative of capped products by scaled products."""
    if scoring.variant.softcap is not None:
        tanh = _tanh(products, scoring)
        values *= 1.0 - tanh * tanh
    return values


@triton.jit
def _bias_bins(head, scoring):
    """Pointer to a head's gradient of rel_bias at distance 0."""
    return scoring.variant.rel_bias_gradient + head * (2 * scoring.REACH + 1) + scoring.REACH


@triton.jit
def add_bias_gradient(beyond, dbiased, place, sizes, scoring):
    """Adds a step's gradient, (TILE_M, TILE_N), to the gradient of rel_bias. beyond: (below, above), per-query sums past the
    largest distance on either side; returned updated."""
    below, above = beyond
    REACH: tl.constexpr = scoring.REACH
    TILE_M: tl.constexpr = sizes.TILE_M
    TILE_N: tl.constexpr = sizes.TILE_N
    first_distance = _first_distance(place, sizes)
    if _beyond_reach(first_distance, sizes, REACH):
        of_queries = tl.sum(dbiased, 1)
        below += tl.where(first_distance > 0, 0.0, of_queries)
        above += tl.where(first_distance > 0, of_queries, 0.0)
    else:
        # Rotates each row by its index, so diagonals become columns, with TILE_N sums for each wrap.
        bins = _bias_bins(place.tile.head, scoring)
        number = tl.arange(0, TILE_M)[:, None] + tl.arange(0, TILE_N)[None, :]
        turned = tl.gather(dbiased, number % TILE_N, 1)
        for turn in tl.static_range((TILE_M + TILE_N - 2) // TILE_N + 1):
            sums = tl.sum(tl.where(number // TILE_N == turn, turned, 0.0), 0)
            distance = first_distance + tl.arange(0, TILE_N) - turn * TILE_N
            distance = tl.minimum(tl.maximum(distance, -REACH), REACH)
            tl.atomic_add(bins + distance, sums, mask=sums != 0.0, sem="relaxed")
    return below, above


@triton.jit
def store_bias_gradient(beyond, head, scoring):
    """Adds the sums of ``add_bias_gradient``, once per program."""
    bins = _bias_bins(head, scoring)
    tl.atomic_add(bins - scoring.REACH, tl.sum(beyond[0]), sem="relaxed")
    tl.atomic_add(bins + scoring.REACH, tl.sum(beyond[1]), sem="relaxed")
