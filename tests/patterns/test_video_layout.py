"""The order of a video's tokens by tiles: there and back, and attention in it."""

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


@pytest.mark.parametrize("way", ["eager", "compiled", "compiled for any length"])
def test_attention_in_tile_order_is_dense_attention_in_the_users_order_and_padding_stays_copies(way):
    if way != "eager" and torch.__version__ < "2.13":
        pytest.skip("PyTorch before 2.13 traces no Pattern objects")

    def attend(q, k, v):
        layout = sf.VideoLayout(3, 5, 7, (2, 4, 4), prefix=6, suffix=3)
        tiled = sf.attention(*(layout.to_tiles(x, 2) for x in (q, k, v)), sf.tile_window(layout, 2) | sf.local(30))
        return layout.to_raster(tiled, 2), tiled

    qkv = torch.randn(3, 1, 2, RAGGED.tokens, 16, dtype=torch.float64, requires_grad=True)
    call = attend if way == "eager" else torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic="any" in way)
    (out, tiled), wanted = call(*qkv), torch.nn.functional.scaled_dot_product_attention(*qkv)
    torch.testing.assert_close(tiled, RAGGED.to_tiles(out, 2))
    for one, other in ((out, wanted), [torch.autograd.grad(result.sin().sum(), qkv) for result in (out, wanted)]):
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
