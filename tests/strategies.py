"""Draws for the property tests: patterns and expressions of them, lengths, block sizes; and the brute-force definition."""

import numpy as np
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash import patterns
from sparse_flash.masks.fields import limits_of
from sparse_flash.masks.grid import BLOCK_SIZES

# Smaller than, equal to and larger than the table's blocks; powers of two and others.
units = st.sampled_from([1, 2, 7, 16, 24, 32, 64, 100, 128, 300])
block_sizes = st.sampled_from(BLOCK_SIZES)


def _documents(lengths):
    return sf.documents([0, *np.cumsum(lengths).tolist()])


def _neighborhood(axes, plain):
    shape, window, stride, dilation, causal = zip(*axes, strict=True)
    return sf.neighborhood(shape, window) if plain else sf.neighborhood(shape, window, stride, dilation, causal)


@st.composite
def _axes(draw):
    """Of one axis: extent, window, stride, dilation, whether it is causal."""
    extent = draw(st.integers(1, 12))
    window = draw(st.integers(1, min(extent, 6)))
    return extent, window, draw(st.integers(1, window)), draw(st.integers(1, extent // window)), draw(st.booleans())


def _from_blocks(rows, cols, seed, block):
    return sf.from_blocks(np.random.default_rng(seed).random((rows, cols)) < 0.5, block)


def number(limit, in_units):
    """Numbers for a field: up to 300 tokens, or fewer where they are units, as units are larger."""
    if limit.field == "block":
        return units
    if limit.form == "share":
        return st.floats(0.01, 1)
    number = st.integers(limit.least, min(limit.most, 9 if in_units else 300))
    return st.none() | number if limit.optional else number


def _by_its_fields(cls):
    """Patterns of a class whose fields all have limits."""
    _, limits = limits_of(cls)
    in_units = any(limit.field == "block" for limit in limits)
    fields = st.fixed_dictionaries({limit.field: number(limit, in_units) for limit in limits})
    return fields.map(lambda given: _made(cls, given)).filter(lambda made: made is not None)


def _made(cls, fields):
    """None for fields that do not go together."""
    try:
        return cls(**fields)
    except ValueError:
        return None


def _layout(extents, powers, prefix, suffix):
    return sf.video_layout(*extents, [2**power for power in powers], prefix, suffix)


extents, sides = st.tuples(*[st.integers(1, 7)] * 3), st.tuples(*[st.integers(0, 3)] * 3).filter(lambda powers: sum(powers) <= 8)
layouts = st.builds(_layout, extents, sides, st.integers(0, 40), st.integers(0, 40))


def _over_tiles(made, fields):
    """Patterns of tiles. fields: draws of the fields after the layout, by the layout."""
    drawn = layouts.flatmap(lambda layout: st.tuples(st.just(layout), *fields(layout)))
    return st.builds(lambda given, keep_beside: made(*given, keep_beside=keep_beside), drawn, st.booleans())


# Lists of numbers that depend on each other, arrays and other patterns.
of_lists = {
    "documents": st.builds(_documents, st.lists(st.integers(0, 200), min_size=1, max_size=6).filter(any)),
    "from_blocks": st.builds(_from_blocks, st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), units),
    "neighborhood": st.builds(_neighborhood, st.lists(_axes(), min_size=1, max_size=3), st.booleans()),
    "video_layout": layouts,
    "frame_window": _over_tiles(sf.frame_window, lambda layout: [st.integers(1, layout.tile_grid[0]), st.integers(0, 3)]),
    "radial": _over_tiles(sf.radial, lambda layout: [st.integers(0, 3)]),
    "tile_window": _over_tiles(sf.tile_window, lambda layout: [st.tuples(*(st.integers(1, tiles) for tiles in layout.tile_grid))]),
}
_others = {"last_tokens", "shifted", "from_mask_fn", *of_lists}
by_name = of_lists | {name: _by_its_fields(getattr(patterns, name)) for name in patterns.__all__ if name not in _others}
bare = st.one_of(*by_name.values())
by_name["shifted"] = st.builds(sf.shifted, bare, st.integers(0, 300), allow_uncovered=st.just(True))


def of_any_length(pattern):
    """The pattern, or where it names a number of tokens, one of the same meaning for sequences of other lengths."""
    return sf.shifted(pattern, 0, allow_uncovered=True) if pattern.named_tokens() else pattern


leaves = st.one_of(*by_name.values()).map(of_any_length)
by_name["last_tokens"] = _by_its_fields(sf.last_tokens)  # not among the leaves: packed documents and caches refuse it


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
