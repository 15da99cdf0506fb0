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
    w0, w1, w2, w3 = _philox(tl.load(terms.seed).to(tl.uint64), four, query, head, head * 0)
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
def _philox(seed, c0, c1, c2, c3):
    """Philox-4x32-10, as ``tl.philox``, which multiplies twice for the halves of each product."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _above(word, threshold):
    return (word >= threshold).to(tl.int8)
