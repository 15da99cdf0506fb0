"""Kernels select the same tables as operations do, from maps and from bits."""

from unittest import mock

import strategies
import torch
from accepted import needs_triton
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import DEVICE, heavy_rows_split

import sparse_flash as sf
from sparse_flash.choosers.choose import pack_block_bits
from sparse_flash.masks import select_blocks
from sparse_flash.masks.block_mask import resolve_within
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.masks.table import Table

LONG_ROWS = {"lengths": (16 * 5, 16 * 50), "size": 16, "masks": 2, "density": 0.5, "bits": True, "seed": 0, "step": 16}


@needs_triton
@settings(max_examples=20)
@given(
    within=st.none() | st.just(sf.causal()) | strategies.expressions,
    lengths=strategies.lengths,
    size=st.sampled_from([16, 32, 64]),
    masks=st.integers(1, 3),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    bits=st.booleans(),
    seed=st.integers(0, 99),
    step=st.none(),
)
@example(within=None, **LONG_ROWS)
@example(within=sf.causal(), **LONG_ROWS)
def test_kernels_select_the_entries_that_operations_select(within, lengths, size, masks, density, bits, seed, step):
    """step: entries that a program selects at a time, other than the usual number."""
    from sparse_flash.kernels.tables import select

    grid = BlockGrid(*lengths, size)
    maps = (torch.rand(masks, *grid.shape, generator=torch.Generator().manual_seed(seed)) < density).to(DEVICE)
    limit = resolve_within(within, grid, maps.device)
    with heavy_rows_split(), mock.patch.object(select, "_TOGETHER", step or select._TOGETHER):
        wanted = select_blocks.select_in_torch(maps, limit.by_query, limit.by_key, grid.shape)
        with mock.patch.object(select_blocks, "can_launch_kernel", lambda maps: True):
            made = select_blocks._select_both(pack_block_bits(maps) if bits else maps, limit.by_query, limit.by_key, grid.shape)
    found = Table(*made[: len(made) // 2]), Table(*made[len(made) // 2 :])
    for ours, theirs in zip(found, wanted, strict=True):
        count = int(theirs.row_ptr[-1, -1])
        assert count or not step
        for name in ("col_idx", "tile_idx"):
            assert torch.equal(getattr(ours, name)[:count], getattr(theirs, name)[:count]), name
        for name in ("row_ptr", "row_split", "row_order", "work", "splits"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).dtype == torch.int32 and getattr(ours, name).is_contiguous()
