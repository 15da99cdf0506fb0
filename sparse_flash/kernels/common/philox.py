"""The random numbers of dropout, computed again where they are needed. Source: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011)."""

import triton
import triton.language as tl


@triton.jit
def stream_of_batch_head(seed, batch_head):
    """Three scalars that make a batch-head's draws distinct. batch_head: batch * heads + head. seed: pointer."""
    word = batch_head.to(tl.uint32)
    key, q_mask, k_mask, _ = _philox_4x32(tl.load(seed).to(tl.uint64), word, word * 0, word * 0, word * 0)
    return key, q_mask, k_mask


@triton.jit
def draw_words(stream, query, token, first_query, first_key):
    """The words from which pairs of a tile draw: the lower half if query // 8 % 2 is 0, otherwise the upper half.

    query, token: uint32, within the tile, of shapes that broadcast to it. first_query, first_key: the tile's first tokens.

    Written per pair, so layouts stay. The four pairs of a draw are in one thread, and the compiler, which knows in which bits their
    tokens differ, draws once for them.
    """
    key, q_mask, k_mask = stream
    q_group = _group(query) ^ (first_query.to(tl.uint32) // 2) ^ q_mask
    k_group = _group(token) ^ (first_key.to(tl.uint32) // 2) ^ k_mask
    # Queries come first: the first round's product depends only on them.
    even, odd = _philox_2x32(key, q_group, k_group)
    return tl.where(token // 8 % 2 == 0, even, odd)


@triton.jit
def _group(token):
    """token // 16 * 8 + token % 8. The last bit is added separately, so that the compiler sees that an odd token and the token 8
    before it share a group."""
    return token // 16 * 8 + (token & 6) + (token & 1)


@triton.jit
def _philox_2x32(key, c0, c1):
    """Philox-2x32-7."""
    for _ in tl.static_range(7):
        product = c0.to(tl.uint64) * 0xD256D193
        c0, c1 = (product >> 32).to(tl.uint32) ^ c1 ^ key, product.to(tl.uint32)
        key += 0x9E3779B9
    return c0, c1


@triton.jit
def _philox_4x32(seed, c0, c1, c2, c3):
    """Philox-4x32-10. Unlike ``tl.philox``, it multiplies once for both halves of each product."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3
