"""Hopper's backward pass where one tile is of all query heads that share a key head. Without such a GPU its kernel is simulated."""

import pytest
from oracle import DEVICE, tiles

from sparse_flash.core import hopper

pytest.importorskip("triton.experimental.gluon")
from gluon_on_cpu import MASKS, assert_right

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
