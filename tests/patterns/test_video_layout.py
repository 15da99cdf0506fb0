"""The order of a video's tokens by tiles: there and back, and attention in it."""

import warnings
from itertools import product

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_patterns import in_tile_order

import sparse_flash as sf

RAGGED = sf.VideoLayout(3, 5, 7, (2, 4, 4), prefix=6, suffix=3)


@settings(max_examples=60)
@given(layout=strategies.layouts)
def test_tiles_come_first_with_their_tokens_before_copies_then_prefix_and_suffix_and_raster_order_comes_back(layout):
    frame, row, column = layout.positions.T
    raster = layout.prefix + (frame * layout.height + row) * layout.width + column
    held = in_tile_order(layout)
    beside = [*range(layout.prefix), *range(layout.tokens - layout.suffix, layout.tokens)]
    tiled = layout.to_tiles(torch.arange(layout.tokens), 0)
    assert torch.equal(layout.to_raster(tiled, 0), torch.arange(layout.tokens))
    token = tiled.numpy()
    size = int(np.prod(layout.tile))
    assert len(held) == layout.length and token[layout.length - len(beside) :].tolist() == beside
    for position, cell in enumerate(held):
        first = position // size * size
        if cell == "beside" or cell is None:
            assert layout.positions[position].tolist() == [-1, -1, -1]
        else:
            assert layout.positions[position].tolist() == list(cell) and token[position] == raster[position]
        if cell is None:
            assert token[position] in token[first : first + sum(one is not None for one in held[first : first + size])]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch before 2.13 traces no Pattern objects")
@pytest.mark.parametrize("dynamic", [False, None, True])
def test_compiled_code_reorders_several_tensors_in_one_graph(dynamic):
    def attend(q, k, v):
        layout = sf.VideoLayout(3, 5, 7, (2, 4, 4), prefix=6, suffix=3)
        mask = sf.tile_window(layout, (1, 1, 1)) | sf.local(30)
        return RAGGED.to_raster(sf.attention(*(layout.to_tiles(x, 2) for x in (q, k, v)), mask), 2)

    qkv = torch.randn(3, 1, 2, RAGGED.tokens, 16)
    wanted = RAGGED.to_raster(
        sf.attention(*(RAGGED.to_tiles(x, 2) for x in qkv), RAGGED & (sf.tile_window(RAGGED, 1) | sf.local(30))), 2
    )
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)(*qkv), wanted)


def test_fake_tensors_are_reordered():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, RAGGED.tokens)
        assert RAGGED.to_raster(RAGGED.to_tiles(x, 1), 1).shape == x.shape


def test_attention_in_tile_order_is_dense_attention_in_the_users_order():
    q, k, v, dout = torch.randn(4, 1, 2, RAGGED.tokens, 16, dtype=torch.float64)
    results = []
    for tiled in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if tiled:
            out = sf.attention(*(RAGGED.to_tiles(x, 2) for x in leaves), RAGGED)
            copies, out = out, RAGGED.to_raster(out, 2)
            torch.testing.assert_close(copies, RAGGED.to_tiles(out, 2))  # padding stays copies
        else:
            out = torch.nn.functional.scaled_dot_product_attention(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@settings(max_examples=40)
@given(grid=st.tuples(*[st.integers(1, 40)] * 3), block_size=st.sampled_from([64, 128]))
def test_proposed_tile_has_the_least_padding_of_tiles_that_are_nearly_square(grid, block_size):
    layout = sf.VideoLayout.of(*grid, block_size=block_size, prefix=5, suffix=4)
    assert (layout.block_size, layout.grid, layout.prefix, layout.suffix) == (block_size, grid, 5, 4)
    axes = [axis for axis in range(3) if grid[axis] > 1]
    for tile in product([1, 2, 4, 8, 16, 32], repeat=3):
        plane = [tile[axis] for axis in axes if axis] or [block_size]
        flat = all(tile[axis] == 1 for axis in range(3) if axis not in axes)
        if flat and np.prod(tile) == block_size and max(plane) <= 4 * min(plane) and tile[0] <= min(plane):
            assert layout.tiled <= sf.VideoLayout(*grid, tile).tiled


@pytest.mark.parametrize("spec", ["neighborhood((4, 8, 8), 3)", "neighborhood((4, 8, 8), 3) | last_tokens(77)"])
def test_a_grid_beside_text_is_refused_and_a_layout_holds_both(spec):
    with pytest.raises(
        ValueError, match=r"must name the 333 tokens .* it names 256; .*shifted.*VideoLayout with prefix= and suffix="
    ):
        sf.compile_mask(spec, 256 + 77)
    with pytest.raises(ValueError, match="must say what each query keeps; it does not for 77 of 333, from 0 to 76"):
        sf.compile_mask("shifted(neighborhood((4, 8, 8), 3), 77)", 77 + 256)
    layout = sf.VideoLayout(4, 8, 8, prefix=77)
    kept = sf.compile_mask(sf.tile_window(layout, (1, 1, 1)), layout.length).to_dense().numpy()
    assert kept.any(1).all() and kept[:, layout.tiled :].all() and kept[layout.tiled :].all()


@pytest.mark.parametrize(
    "tile, height, warns", [((2, 4, 8), 8, True), ((2, 8, 8), 8, False), ((1, 4, 8), 7, False), ((4, 4, 4), 7, True)]
)
def test_causal_over_tiles_warns_if_queries_then_see_later_frames(tile, height, warns):
    layout = sf.VideoLayout(4, height, 8, tile=tile, suffix=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mask = sf.compile_mask(f"causal & {layout}", layout.length)
    assert [w.filename for w in caught] == [__file__] * warns
    frames = torch.from_numpy(layout.positions[:, 0])
    seen = mask.to_dense() & (frames[:, None] >= 0) & (frames[:, None] < frames)
    assert seen.any() == warns
