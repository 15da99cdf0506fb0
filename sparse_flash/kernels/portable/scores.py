"""From products to scores in base 2, and back: what terms do to them, for the forward pass and both backward passes.

A tile of scores is of TILE_M queries by TILE_N keys, or where BY_KEY of keys by queries. Its place is (batch, head, line,
first_q, first_k): line is batch * heads + head, first_q and first_k are the positions of its first query and key. Kernels switch
all this off at compile time where there are no such terms.
"""

import triton
import triton.language as tl

from ..common.tiles import CUT, LN_2, LOG2_E


@triton.jit
def _column(first, COUNT: tl.constexpr, AS_ROWS: tl.constexpr):
    numbers = first + tl.arange(0, COUNT)
    return numbers[:, None] if AS_ROWS else numbers[None, :]


@triton.jit
def _tanh(products, score_scale, terms):
    """Of products * scale / softcap. By an exponential that may overflow: 1 - 2 / inf is 1."""
    grown = tl.math.exp2(products * (score_scale * (2.0 / terms.softcap)))
    return 1.0 - 2.0 / (1.0 + grown)


@triton.jit
def _beyond_reach(first_distance, REACH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Whether all pairs of a tile are at least REACH apart, on one side: they share one number of rel_bias. first_distance:
    k_pos - q_pos of its first pair."""
    return (first_distance - (TILE_M - 1) >= REACH) | (first_distance + (TILE_N - 1) <= -REACH)


@triton.jit
def _biased(
    scores,
    place,
    terms,
    UNIT: tl.constexpr,
    REACH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BY_KEY: tl.constexpr,
    KIND: tl.constexpr,
):
    """scores: times UNIT, as the result."""
    head, line, first_distance = place[1], place[2], place[4] - place[3]
    if terms.alibi_slopes is not None:
        # A conversion of each distance would take as long as its exponential: rows and columns are converted, and one added.
        keys = _column(first_distance, TILE_N, BY_KEY).to(tl.float32)
        distance = keys - _column(0, TILE_M, not BY_KEY).to(tl.float32)
        scores -= (tl.load(terms.alibi_slopes + line) * UNIT) * tl.abs(distance)
    if terms.rel_bias is not None:
        biases = terms.rel_bias + head * (2 * REACH + 1) + REACH
        if KIND == CUT or UNIT == 1.0:
            # Triton 3.6 does not compile the other branches where what is loaded beside them, by a cut walk or by the user's
            # function, chooses the layout of the scores.
            apart = _column(first_distance, TILE_N, BY_KEY) - _column(0, TILE_M, not BY_KEY)
            scores += tl.load(biases + tl.minimum(tl.maximum(apart, -REACH), REACH)) * UNIT
        elif _beyond_reach(first_distance, REACH, TILE_M, TILE_N):
            scores += tl.load(biases + tl.where(first_distance > 0, REACH, -REACH)) * UNIT
        else:
            # The tile has TILE_M + TILE_N - 1 distances: loaded once each, and spread. Loaded for each pair, they would also
            # choose the layout of the scores, which then pass through shared memory in every step.
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
def _before_function(
    products,
    score_scale,
    place,
    terms,
    REACH: tl.constexpr,
    NATURAL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BY_KEY: tl.constexpr,
    KIND: tl.constexpr,
):
    """Capped and biased scores, natural or in base 2."""
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    if terms.softcap is not None:
        scores = _tanh(products, score_scale, terms) * (terms.softcap * UNIT)
    else:
        scores = products * (score_scale * (LN_2 * UNIT))
    return _biased(scores, place, terms, UNIT, REACH, TILE_M, TILE_N, BY_KEY, KIND)


@triton.jit
def scored(
    products,
    score_scale,
    place,
    terms,
    REACH: tl.constexpr,
    SCORE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BY_KEY: tl.constexpr,
    KIND: tl.constexpr,
):
    """Scores in base 2. score_scale: scale * log2(e)."""
    NATURAL: tl.constexpr = SCORE is not None
    scores = _before_function(products, score_scale, place, terms, REACH, NATURAL, TILE_M, TILE_N, BY_KEY, KIND)
    if SCORE is not None:
        q_pos, k_pos = _column(place[3], TILE_M, not BY_KEY), _column(place[4], TILE_N, BY_KEY)
        scores = SCORE(scores, place[0], place[1], q_pos, k_pos, terms.params) * LOG2_E
    return scores


@triton.jit
def times_derivative_of_function(
    values,
    products,
    score_scale,
    place,
    terms,
    REACH: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BY_KEY: tl.constexpr,
    KIND: tl.constexpr,
):
    """values times the derivative of scores by biased products, for the arguments of ``scored``."""
    if DERIVATIVE is not None:
        biased = _before_function(products, score_scale, place, terms, REACH, True, TILE_M, TILE_N, BY_KEY, KIND)
        q_pos, k_pos = _column(place[3], TILE_M, not BY_KEY), _column(place[4], TILE_N, BY_KEY)
        values *= DERIVATIVE(biased, place[0], place[1], q_pos, k_pos, terms.params)
    return values


@triton.jit
def times_derivative_of_cap(values, products, score_scale, terms):
    """values times the derivative of capped products by scaled ones."""
    if terms.softcap is not None:
        tanh = _tanh(products, score_scale, terms)
        values *= 1.0 - tanh * tanh
    return values


@triton.jit
def add_bias_gradient(
    beyond, dbiased, head, first_distance, terms, REACH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """Adds a tile's gradient, (TILE_M, TILE_N), to that of rel_bias. first_distance: k_pos - q_pos of its first pair. beyond: sums
    for each query of what lies beyond the largest distance, on either side; (below, above), the result too."""
    below, above = beyond
    if _beyond_reach(first_distance, REACH, TILE_M, TILE_N):
        of_queries = tl.sum(dbiased, 1)
        below += tl.where(first_distance > 0, 0.0, of_queries)
        above += tl.where(first_distance > 0, of_queries, 0.0)
    else:
        # Each row turned by its number, so that diagonals become columns: TILE_N sums for each time that they wrap around.
        bins = terms.rel_bias_gradient + head * (2 * REACH + 1) + REACH
        column = tl.arange(0, TILE_M)[:, None] + tl.arange(0, TILE_N)[None, :]
        turned = tl.gather(dbiased, column % TILE_N, 1)
        for turn in tl.static_range((TILE_M + TILE_N - 2) // TILE_N + 1):
            sums = tl.sum(tl.where(column // TILE_N == turn, turned, 0.0), 0)
            distance = first_distance + tl.arange(0, TILE_N) - turn * TILE_N
            distance = tl.minimum(tl.maximum(distance, -REACH), REACH)
            tl.atomic_add(bins + distance, sums, mask=sums != 0.0, sem="relaxed")
    return below, above


@triton.jit
def store_bias_gradient(beyond, head, terms, REACH: tl.constexpr):
    """Adds what ``add_bias_gradient`` has summed, once a program."""
    bins = terms.rel_bias_gradient + head * (2 * REACH + 1) + REACH
    tl.atomic_add(bins - REACH, tl.sum(beyond[0]), sem="relaxed")
    tl.atomic_add(bins + REACH, tl.sum(beyond[1]), sem="relaxed")
