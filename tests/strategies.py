"""What the property tests draw: patterns and expressions of them, lengths, block sizes; and the brute-force definition."""

import numpy as np
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks.grid import BLOCK_SIZES

# Smaller than, equal to and larger than the table's blocks; powers of two and others.
units = st.sampled_from([1, 2, 7, 16, 24, 32, 64, 100, 128, 300])
block_sizes = st.sampled_from(BLOCK_SIZES)
factors = st.none() | st.integers(0, 5)


def _documents(lengths):
    return sf.documents([0, *np.cumsum(lengths).tolist()])


def _neighborhood(cells):
    return sf.neighborhood([extent for extent, _ in cells], [min(window, extent) for extent, window in cells])


def _from_blocks(rows, cols, seed, block):
    return sf.from_blocks(np.random.default_rng(seed).random((rows, cols)) < 0.5, block)


by_name = {
    "bigbird": st.builds(sf.bigbird, st.integers(1, 3), st.integers(1, 2), st.floats(0.01, 0.3), st.integers(0, 9), units),
    "block_diagonal": st.builds(sf.block_diagonal, units),
    "butterfly": st.builds(sf.butterfly, factors, units),
    "causal": st.just(sf.causal()),
    "dilated": st.builds(sf.dilated, st.integers(1, 9), st.integers(1, 5), units),
    "documents": st.builds(_documents, st.lists(st.integers(0, 200), min_size=1, max_size=6).filter(any)),
    "fixed": st.integers(1, 6).flatmap(lambda stride: st.builds(sf.fixed, st.just(stride), st.integers(1, stride), units)),
    "from_blocks": st.builds(_from_blocks, st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), units),
    "full": st.just(sf.full()),
    "global_tokens": st.builds(sf.global_tokens, st.integers(1, 300)),
    "local": st.builds(sf.local, st.integers(1, 300)),
    "longformer": st.builds(sf.longformer, st.integers(1, 100), st.integers(1, 100)),
    "neighborhood": st.builds(_neighborhood, st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=3)),
    "power_of_two": st.builds(sf.power_of_two, factors, units),
    "prefix": st.builds(sf.prefix, st.integers(1, 300)),
    "random": st.builds(sf.random, st.floats(0.01, 1), st.integers(0, 99), units),
    "sinks": st.builds(sf.sinks, st.integers(1, 300)),
    "strided": st.builds(sf.strided, st.integers(1, 9), units),
    "window": st.builds(sf.window, st.none() | st.integers(0, 300), st.none() | st.integers(0, 300)),
}
bare = st.one_of(*by_name.values())
by_name["shifted"] = st.builds(sf.shifted, bare, st.integers(0, 300), allow_uncovered=st.just(True))


def of_any_length(pattern):
    """The pattern, or where it names a number of tokens, one of the same meaning for sequences of other lengths."""
    return sf.shifted(pattern, 0, allow_uncovered=True) if pattern.named_tokens() else pattern


leaves = st.one_of(*by_name.values()).map(of_any_length)
by_name["last_tokens"] = st.builds(
    sf.last_tokens, st.integers(1, 300)
)  # not among the leaves: packed documents and caches refuse it


def _composed(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(pairs.map(lambda p: p[0] & p[1]), pairs.map(lambda p: p[0] | p[1]), inner.map(lambda p: ~p))


expressions = st.recursive(leaves, _composed, max_leaves=4)
HEAD_DIMS = (16, 40, 64, 80, 96, 128)
V_HEAD_DIMS = (*[None] * 5, 8, 24, 64, 72, 128)  # None (as q and k) half of the time
v_head_dims = st.sampled_from(V_HEAD_DIMS)
# (q_len, kv_len): equal, more keys, more queries, and one query as in decoding.
lengths = st.one_of(
    st.integers(1, 500).map(lambda n: (n, n)),
    st.tuples(st.integers(1, 500), st.integers(1, 500)),
    st.integers(1, 500).map(lambda n: (1, n)),
)


def dense(pattern, q_len, kv_len):
    """The mask by definition: the token rule on every pair, the last query at the position of the last key."""
    q, kv = np.arange(q_len) + kv_len - q_len, np.arange(kv_len)
    return np.broadcast_to(pattern.of_length(kv_len).token_rule(q[:, None], kv[None, :]), (q_len, kv_len))
