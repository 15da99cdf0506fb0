"""Dropout's mask of a tile, drawn anew wherever it is needed: see ``scores.kept_by_dropout`` of the package."""

import triton
import triton.language as tl


@triton.jit
def kept_by_dropout(terms, line, first_query, first_key, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BY_KEY: tl.constexpr):
    """Which pairs of TILE_M queries and TILE_N keys dropout keeps: (TILE_M, TILE_N), or its transpose where BY_KEY.

    line: batch * heads + head. first_key: a multiple of 4, as four neighbouring keys share a counter.
    """
    threshold = tl.full([1, 1], terms.dropout_p * 4294967296.0, tl.float32).to(tl.uint32)
    query = (first_query + tl.arange(0, TILE_M)).to(tl.uint32)
    four = (first_key // 4 + tl.arange(0, TILE_N // 4)).to(tl.uint32)
    query, four = (query[None, :], four[:, None]) if BY_KEY else (query[:, None], four[None, :])
    # Not broadcast before they must be: the first rounds are then of rows and columns.
    head = tl.full([1, 1], line, tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(terms.seed), four, query, head, head * 0)
    even = tl.join(_above(w0, threshold), _above(w2, threshold))
    odd = tl.join(_above(w1, threshold), _above(w3, threshold))
    kept = tl.join(even, odd)  # [..., key // 2 % 2, key % 2]
    if BY_KEY:
        kept = tl.permute(kept, (0, 2, 3, 1))
        kept = tl.reshape(kept, (TILE_N, TILE_M))
    else:
        kept = tl.reshape(kept, (TILE_M, TILE_N))
    return kept != 0


@triton.jit
def _above(word, threshold):
    return (word >= threshold).to(tl.int8)
