"""Patterns over the tiles of a video: whole blocks, what is beside the video, and choosers beside them."""

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf

WHOLE = sf.VideoLayout(8, 8, 16)
RAGGED = sf.VideoLayout(5, 9, 11, (2, 4, 4), prefix=20, suffix=30)
MADE = [sf.tile_window(WHOLE, (1, 1, 2)), sf.frame_window(WHOLE, 1), sf.radial(WHOLE)]


@pytest.mark.parametrize("pattern", MADE, ids=str)
def test_tiles_that_divide_the_grid_leave_no_block_partial(pattern):
    mask = sf.compile_mask(pattern, WHOLE.length, block_size=WHOLE.block_size)
    assert set(mask.block_states().unique().tolist()) <= {0, 2} and 0 < mask.density == mask.block_density <= 1


@pytest.mark.parametrize(
    "over", [lambda layout: sf.tile_window(layout, 1), lambda layout: sf.frame_window(layout, 2, 0), sf.radial]
)
def test_text_next_to_a_video_sees_and_is_seen_by_all_by_default(over):
    pattern = over(RAGGED)
    kept = sf.compile_mask(pattern, RAGGED.length, block_size=32).to_dense()
    there = torch.from_numpy(RAGGED.exists(np.arange(RAGGED.length)))
    assert torch.equal(kept[RAGGED.tiled :], there.expand(50, -1)) and kept[:, RAGGED.tiled :].all()
    alone = type(pattern)(*(getattr(pattern, name) for name in pattern.__match_args__ if name != "keep_beside"), keep_beside=False)
    again = sf.compile_mask(RAGGED & (alone | sf.last_tokens(50)), RAGGED.length, block_size=32)
    assert again.equal(sf.compile_mask(pattern, RAGGED.length, block_size=32))


@pytest.mark.parametrize("pattern", [sf.tile_window(RAGGED, 9), sf.tile_window(RAGGED, (3, 7, 3)), sf.frame_window(RAGGED, 9)])
def test_a_window_larger_than_the_video_keeps_all_of_it(pattern):
    masks = [sf.compile_mask(one, RAGGED.length, block_size=32) for one in (pattern, RAGGED)]
    assert masks[0].equal(masks[1])


def test_layout_may_be_given_as_text():
    assert sf.radial(str(RAGGED)) == sf.radial(RAGGED) == sf.parse(sf.radial(RAGGED).to_spec())
    assert sf.tile_window(WHOLE, 1).to_spec() == f"tile_window({WHOLE}, (1, 1, 1), keep_beside=True)"


@st.composite
def over_a_layout(draw):
    """(an expression over one layout, the pairs of real keys that it keeps by its definition, (length, length) bool, which keys are
    real)."""
    layout = draw(strategies.layouts)
    real = layout.exists(np.arange(layout.length))

    def leaf(pattern):
        return pattern, strategies.dense(pattern, layout.length, layout.length)

    tiles = [sf.tile_window(layout, draw(st.integers(1, 3))), sf.frame_window(layout, 1), sf.radial(layout), layout]
    first = leaf(draw(st.sampled_from(tiles)))
    some = st.sampled_from([*tiles, sf.local(9), sf.sinks(5), sf.causal(), sf.last_tokens(3), sf.strided(7), sf.full()]).map(leaf)

    def composed(inner):
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda p: (p[0][0] & p[1][0], p[0][1] & p[1][1])),
            pairs.map(lambda p: (p[0][0] | p[1][0], p[0][1] | p[1][1])),
            inner.map(lambda p: (~p[0], ~p[1])),
        )

    drawn, kept = draw(st.recursive(some, composed, max_leaves=4))
    pattern, kept = draw(st.sampled_from([(first[0] | drawn, first[1] | kept), (~first[0] & drawn, ~first[1] & kept)]))
    if draw(st.booleans()):
        pattern, kept = ~pattern, ~kept
    return pattern, kept & real, real


@settings(max_examples=60)
@given(drawn=over_a_layout(), size=strategies.block_sizes, other=st.sampled_from(["local(5)", "full", "~causal"]))
def test_no_expression_over_a_layout_keeps_padding_and_all_keep_what_they_say_of_tokens(drawn, size, other):
    pattern, kept, real = drawn
    for first in (0, len(kept) // 3):
        table = sf.compile_mask(pattern, len(kept) - first, len(kept), size)
        np.testing.assert_array_equal(table.to_dense().numpy(), kept[first:])
    np.testing.assert_array_equal(strategies.dense(pattern, *kept.shape), kept)
    np.testing.assert_array_equal(strategies.dense(~pattern, *kept.shape), ~kept & real)
    assert sf.parse(pattern.to_spec()) == pattern
    heads = sf.compile_mask(sf.per_head([pattern, other]), len(kept), block_size=size).to_dense()[0].numpy()
    np.testing.assert_array_equal(heads, [kept, strategies.dense(sf.parse(other), *kept.shape) & real])


def test_an_expression_has_one_text_however_it_is_put_together():
    window, near, first = sf.tile_window(RAGGED, 1), sf.local(9), sf.sinks(3)
    assert window | near | first == window | (near | first) == RAGGED & (first | (near | window)) == RAGGED & near | window | first
    assert ~window | near | window == ~window | (near | window) == RAGGED & (~window | near | window)
    assert window | sf.radial(RAGGED) == sf.parse(f"{sf.radial(RAGGED)} | {window}") and window & near != RAGGED & window & near
    assert (window | "sampled(8, keep=2)") == RAGGED & (sf.parse("sampled(8, keep=2)") | window)


@pytest.mark.parametrize("layout", [sf.VideoLayout.of(33, 45, 80, prefix=256), sf.VideoLayout(33, 45, 80, suffix=100)], ids=str)
def test_of_a_hundred_thousand_tokens_few_blocks_are_evaluated(layout, monkeypatch):
    evaluated, base = [], type(layout).__mro__[1]
    token_tiles = base.token_tiles
    monkeypatch.setattr(base, "token_tiles", lambda *given: evaluated.append(len(given[1])) or token_tiles(*given))
    mask = sf.compile_mask(sf.tile_window(layout, 3), layout.length, block_size=layout.block_size)
    assert 0 < sum(evaluated) < 100 < mask.block_states().count_nonzero()
    assert 0.02 < mask.density < mask.block_density < 0.04


@pytest.mark.parametrize("chooser", ["sampled(8, budget=0.4, block=64)", "pooled(keep=2, block=64)", "pooled(mass=0.5, block=64)"])
def test_choosers_keep_whole_tiles_of_a_video_and_all_text(chooser):
    layout = sf.VideoLayout(3, 11, 15, (1, 8, 8), prefix=20, suffix=30)
    q, k, v = (layout.to_tiles(torch.randn(1, 2, layout.tokens, 16), 2) for _ in range(3))
    spec = f"{layout} & ({chooser} | last_tokens(50))"
    mask = sf.choose_blocks(spec, q, k)
    kept, there = mask.to_dense(), torch.from_numpy(layout.exists(np.arange(layout.length)))
    allowed = there.expand(layout.length, -1)
    beside = (kept == allowed)[..., layout.tiled :].all() and (kept == allowed)[..., layout.tiled :, :].all()
    assert beside and not (kept & ~allowed).any()
    tiles = kept[..., : layout.tiled, : layout.tiled].unflatten(-1, (-1, 64)).unflatten(-3, (-1, 64))
    of_tiles = allowed[: layout.tiled, : layout.tiled].unflatten(-1, (-1, 64)).unflatten(-3, (-1, 64))
    share = tiles.sum((-3, -1)) / of_tiles.sum((-3, -1))
    assert set(share.unique().tolist()) == {0.0, 1.0}  # whole tiles, and not all
    torch.testing.assert_close(sf.attention(q, k, v, spec), sf.attention(q, k, v, mask))
