"""Draws for the property tests and the fuzzer: patterns, expressions, lengths, block sizes; and the brute-force definition.

A pattern is drawn by a ``random.Random``: the fuzzer's, or one whose numbers hypothesis chooses.
"""

from functools import partial
from random import Random

import numpy as np
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash import patterns
from sparse_flash.masks.fields import limits_of
from sparse_flash.masks.grid import BLOCK_SIZES

# Smaller than, equal to and larger than the table's blocks; powers of two and others.
UNITS = (1, 2, 7, 16, 24, 32, 64, 100, 128, 300)
block_sizes = st.sampled_from(BLOCK_SIZES)
randoms = st.randoms(use_true_random=False)


def _number(rng: Random, limit, in_units: bool):
    """A number for a field: up to 300 tokens, or fewer where they are units, as units are larger."""
    if limit.field == "block":
        return rng.choice(UNITS)
    if limit.form == "share":
        return rng.uniform(0.01, 1)
    if limit.optional and rng.random() < 0.3:
        return None
    return rng.randint(limit.least, min(limit.most, 9 if in_units else 300))


def number(limit, in_units: bool):
    return randoms.map(lambda rng: _number(rng, limit, in_units))


def _by_its_fields(cls, rng: Random):
    """A pattern of a class whose fields all have limits."""
    _, limits, _ = limits_of(cls)
    in_units = any(limit.field == "block" for limit in limits)
    return cls(**{limit.field: _number(rng, limit, in_units) for limit in limits})


def _documents(rng: Random):
    return sf.documents([0, *np.cumsum([rng.randint(0, 200) for _ in range(rng.randint(1, 6))]).tolist()])


def _from_blocks(rng: Random):
    shape = rng.randint(1, 9), rng.randint(1, 9)
    return sf.from_blocks(np.random.default_rng(rng.randint(0, 99)).random(shape) < 0.5, rng.choice(UNITS))


def _neighborhood(rng: Random):
    shape = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
    window = [rng.randint(1, min(extent, 6)) for extent in shape]
    if rng.random() < 0.5:
        return sf.neighborhood(shape, window)
    stride = [rng.randint(1, size) for size in window]
    dilation = [rng.randint(1, extent // size) for extent, size in zip(shape, window, strict=True)]
    return sf.neighborhood(shape, window, stride, dilation, [rng.random() < 0.5 for _ in shape])


def _layout(rng: Random):
    extents, powers = ([rng.randint(least, most) for _ in range(3)] for least, most in ((1, 7), (0, 3)))
    powers[2] = min(powers[2], 8 - powers[0] - powers[1])  # tiles have up to 256 tokens
    return sf.video_layout(*extents, [2**power for power in powers], rng.randint(0, 40), rng.randint(0, 40))


def _over_tiles(made, fields, rng: Random):
    """A pattern of tiles. fields: draws the fields after the layout."""
    layout = _layout(rng)
    return made(layout, *fields(rng, layout.tile_grid), keep_beside=rng.random() < 0.5)


def _shifted(rng: Random):
    inner = attempt(rng.choice(BARE), rng)
    return None if inner is None else sf.shifted(inner, rng.randint(0, 300))


BARE = [name for name in patterns.__all__ if name not in ("last_tokens", "shifted", "from_mask_fn")]
# By name, with those of lists of numbers that depend on each other, of arrays and of other patterns.
DRAWS = {name: partial(_by_its_fields, getattr(patterns, name)) for name in (*BARE, "last_tokens")} | {
    "documents": _documents,
    "from_blocks": _from_blocks,
    "neighborhood": _neighborhood,
    "video_layout": _layout,
    "frame_window": partial(_over_tiles, sf.frame_window, lambda rng, grid: (rng.randint(1, grid[0]), rng.randint(0, 3))),
    "radial": partial(_over_tiles, sf.radial, lambda rng, grid: (rng.randint(0, 3),)),
    "tile_window": partial(_over_tiles, sf.tile_window, lambda rng, grid: ([rng.randint(1, tiles) for tiles in grid],)),
    "shifted": _shifted,
}


def attempt(name: str, rng: Random):
    """A pattern of this name, or None for fields that do not go together."""
    try:
        return DRAWS[name](rng)
    except ValueError:
        return None


def of_any_length(pattern):
    """The pattern, or where it names a number of tokens, one of the same meaning for sequences of other lengths."""
    return sf.shifted(pattern, 0) if pattern.named_tokens() else pattern


by_name = {name: randoms.map(partial(attempt, name)).filter(lambda made: made is not None) for name in DRAWS}
layouts, bare = by_name["video_layout"], st.one_of(*(by_name[name] for name in BARE))
# Packed documents and caches refuse last_tokens.
leaves = st.one_of(bare, by_name["shifted"]).map(of_any_length)


def _composed(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(pairs.map(lambda p: p[0] & p[1]), pairs.map(lambda p: p[0] | p[1]), inner.map(lambda p: ~p))


expressions = st.recursive(leaves, _composed, max_leaves=4)
HEAD_DIMS = (16, 40, 64, 80, 96, 128)
V_HEAD_DIMS = (*[None] * 5, 8, 24, 64, 72, 128)  # None (as q and k) half of the time
# (q_len, kv_len): equal, more keys, more queries, and one query as in decoding.
lengths = st.one_of(
    st.integers(1, 500).map(lambda n: (n, n)),
    st.tuples(st.integers(1, 500), st.integers(1, 500)),
    st.integers(1, 500).map(lambda n: (1, n)),
)


def dense(pattern, q_len, kv_len):
    """The mask by definition: the token rule on every pair, the last query at the position of the last key."""
    q, kv = np.arange(q_len) + kv_len - q_len, np.arange(kv_len)
    return np.broadcast_to(pattern.bind_length(kv_len).token_rule(q[:, None], kv[None, :]), (q_len, kv_len))
