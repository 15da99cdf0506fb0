"""Hopper's backward pass where one tile is of all query heads that share a key head. Without such a GPU its kernel is simulated."""

import pytest
from oracle import DEVICE, tiles

import sparse_flash as sf
from sparse_flash.backends import hopper

pytest.importorskip("triton.experimental.gluon")
from gluon_on_cpu import MASKS, assert_right

from sparse_flash.kernels.hopper import division

parametrize = pytest.mark.parametrize
# (name of a mask, head_dim, heads, key heads, batch)
CASES = [("causal", 64, 4, 1, 1), ("bits", 96, 4, 1, 1), ("empty rows and columns", 64, 3, 1, 1), ("blocks of 256", 64, 2, 1, 1)]
CASES += [("blocks of 64", 128, 4, 2, 2)]


@pytest.fixture(autouse=True)
def on_hopper(poison):
    if DEVICE == "cuda" and (reason := hopper.why_unavailable()):
        pytest.skip(reason)


@parametrize("name, head_dim, heads, kv_heads, batch", CASES)
def test_gradients_are_right(name, head_dim, heads, kv_heads, batch):
    with tiles(together=True):
        assert_right(*MASKS[name], seed=len(name), head_dim=head_dim, heads=heads, kv_heads=kv_heads, batch=batch)


def test_split_columns_are_summed_by_head():
    with tiles(together=True):
        assert_right("causal | sinks(130)", 512, split=True, kv_heads=1)


@parametrize(
    "spec, tokens, block_size, kv_heads, short",
    [
        ("causal & local(1024)", 65_536, 128, 8, True),
        ("causal & local(4096)", 65_536, 128, 8, False),  # 33 blocks
        ("causal & local(1024)", 8_192, 128, 8, False),  # 512 tiles for 132 programs
        ("causal & local(1024)", 262_144, 128, 1, False),  # a column may be a thirty-second of one head's work
    ],
)
def test_short_columns_of_many_tiles_are_computed_together(spec, tokens, block_size, kv_heads, short):
    table = sf.compile_mask(spec, tokens, block_size=block_size, progress=False).by_key
    columns, blocks = table.row_order.shape[1], table.col_idx.numel()
    assert division.has_short_columns(kv_heads, columns, blocks, block_size, 132) == short
