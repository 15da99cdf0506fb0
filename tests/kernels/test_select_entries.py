"""Kernels select the same tables as operations do, from maps and from bits."""

import pytest
import strategies
import torch
from accepted import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE, heavy_rows_split

import sparse_flash as sf
from sparse_flash.choosers.rules_kernels import pack_block_bits
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.masks.methods import from_block_maps, resolve_within
from sparse_flash.masks.select_blocks import select_by_kernel, select_in_torch


def drawn(masks, grid, density, seed, within):
    """(maps of blocks, the tables that limit them)"""
    maps = torch.rand(masks, *grid.shape, generator=torch.Generator().manual_seed(seed)) < density
    return maps.to(DEVICE), resolve_within(within, grid, torch.device(DEVICE))


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
)
def test_kernels_select_the_entries_that_operations_select(within, lengths, size, masks, density, bits, seed):
    grid = BlockGrid(*lengths, size)
    maps, limit = drawn(masks, grid, density, seed, within)
    room = masks * len(limit.by_query.col_idx)
    with heavy_rows_split():
        wanted = select_in_torch(maps, limit.by_query, limit.by_key, grid.shape)
        found = select_by_kernel(pack_block_bits(maps) if bits else maps, limit.by_query, limit.by_key, grid.shape, room)
    for ours, theirs in zip(found, wanted, strict=True):
        count = int(theirs.row_ptr[-1, -1])
        for name in ("col_idx", "tile_idx"):
            assert torch.equal(getattr(ours, name)[:count], getattr(theirs, name)[:count]), name
        for name in ("row_ptr", "row_split", "row_order", "work", "splits"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).dtype == torch.int32 and getattr(ours, name).is_contiguous()


@needs_triton
@pytest.mark.parametrize("within", [None, "causal"])
def test_rows_longer_than_a_programs_step_are_selected_step_by_step(within, monkeypatch):
    from sparse_flash.kernels.packed import select

    monkeypatch.setattr(select, "_ENTRIES", 16)
    grid = BlockGrid(16 * 5, 16 * 50, 16)
    maps, limit = drawn(2, grid, 0.5, 0, within)
    wanted = from_block_maps(maps[None], grid, limit)
    tables = select_by_kernel(pack_block_bits(maps), limit.by_query, limit.by_key, grid.shape, int(maps.sum()))
    for ours, theirs in zip(tables, (wanted.by_query, wanted.by_key), strict=True):
        count = int(theirs.row_ptr[-1, -1])
        assert count and torch.equal(ours.col_idx[:count], theirs.col_idx[:count]) and torch.equal(ours.row_ptr, theirs.row_ptr)
