"""Hopper's backward pass where one tile is of all query heads that share a key head. Without such a GPU its kernel is simulated."""

from contextlib import nullcontext

import pytest
import torch
from oracle import DEVICE, check, heavy_rows_split

import sparse_flash as sf
from sparse_flash.backends import hopper

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated

from sparse_flash.kernels.hopper import division

parametrize = pytest.mark.parametrize

HEAD_DIMS = {"causal": 64, "bits": 96, "whole blocks": 128, "empty rows and columns": 64, "blocks of 256": 64, "blocks of 64": 128}


@pytest.fixture(autouse=True)
def on_hopper(poison):
    if DEVICE == "cuda" and (reason := hopper.why_unavailable()):
        pytest.skip(reason)


@pytest.fixture
def short_columns(monkeypatch):
    """Columns of any mask are taken for short ones."""
    monkeypatch.setattr(division, "has_short_columns", lambda *sizes: True)


def simulated(seed: int):
    return emulated.gluon_on_cpu(seed=seed) if DEVICE == "cpu" else nullcontext()


@parametrize(
    "name, heads, kv_heads, batch", [*((name, 4, 1, 1) for name in HEAD_DIMS), ("causal", 6, 2, 2), ("blocks of 64", 6, 2, 2)]
)
def test_gradients_are_right(short_columns, name, heads, kv_heads, batch):
    spec, q_len, kv_len, block_size = emulated.MASKS[name]
    options = {"block_size": block_size, "dtype": torch.float16, "head_dim": HEAD_DIMS[name]}
    with simulated(len(name)):
        check("hopper", spec, q_len, kv_len, heads=heads, kv_heads=kv_heads, batch=batch, **options)


def test_split_columns_are_summed_by_head(short_columns):
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 512, 512, 128)
    assert mask.by_key.is_split
    with simulated(2):
        check("hopper", mask, 512, 512, dtype=torch.float16, heads=2, kv_heads=1, head_dim=64)


PROGRAMS = 132


@parametrize(
    "spec, tokens, block_size, kv_heads, short",
    [
        ("causal & local(1024)", 65_536, 128, 8, True),
        ("causal & (local(1024) | power_of_two)", 65_536, 128, 8, True),
        ("causal & (local(1024) | power_of_two)", 65_536, 64, 8, True),
        ("causal & local(4096)", 65_536, 128, 8, False),  # 33 blocks
        ("causal", 65_536, 128, 8, False),
        ("causal & local(1024)", 8_192, 128, 8, False),  # 512 tiles for 132 programs
        ("causal & local(1024)", 262_144, 128, 1, False),  # a column may be a thirty-second of one head's work
    ],
)
def test_short_columns_of_many_tiles_are_computed_together(spec, tokens, block_size, kv_heads, short):
    table = sf.compile_mask(spec, tokens, block_size=block_size, progress=False).by_key
    columns, blocks = table.row_order.shape[1], table.col_idx.numel()
    assert division.has_short_columns(kv_heads, columns, blocks, block_size, PROGRAMS) == short
