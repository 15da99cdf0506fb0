"""Tables of the blocks that a map keeps, chosen on the device from the table of another mask."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .table import PART_FIELDS, Table, work_of_whole_rows


class Listing(NamedTuple):
    """The entries of one mask's table, to choose from at run time. All but ``exists`` are int32.

    block: (n,) which block of the row-major grid each is; the first stands before all entries and for none, and so do those
    past the last.
    exists: (n,) bool, whether it is an entry.
    col_tile: (2, 1, n) col_idx and tile_idx of the table. ptr: (rows + 1,) row_ptr of the table.
    split: (rows * 2,) row_split of the table. bounds: (rows * 4,) row by row, where it begins, its run tiles begin, its bit
    tiles begin, it ends.
    """

    block: torch.Tensor
    exists: torch.Tensor
    col_tile: torch.Tensor
    ptr: torch.Tensor
    split: torch.Tensor
    bounds: torch.Tensor


def listing_of(table: Table, row_stride: int, col_stride: int) -> Listing:
    """The entries of a table of one mask, whose (row, col) is block row * row_stride + col * col_stride of the grid."""
    ptr, split = table.row_ptr[0], table.row_split[0]
    # So many that what follows col_idx in memory starts on 16 bytes, which kernels are compiled for.
    past = -(len(table.col_idx) + 1) % 4
    cols, tiles = (torch.nn.functional.pad(t, (1, past)) for t in (table.col_idx, table.tile_idx))
    entry = counted(len(cols), ptr.device) - 1
    row = torch.searchsorted(ptr[1:], entry, right=True, out_int32=True)
    exists = (entry >= 0) & (row < len(ptr) - 1)
    block = torch.where(exists, row * row_stride + cols * col_stride, 0)
    bounds = torch.cat([ptr[:-1, None], split, ptr[1:, None]], 1)
    return Listing(block, exists, torch.stack([cols, tiles])[:, None], ptr, split.flatten(), bounds.flatten())


def chosen(maps: torch.Tensor, listings: tuple[Listing, Listing]) -> list[Table]:
    """The tables of the entries that each map, a row of (masks, blocks) bool, keeps of the listings, by operations whose shapes
    do not depend on the maps' contents. As the order stays that of the listing, a running count is all that it takes."""
    masks, listed = len(maps), len(listings[0].block)
    backwards = torch.arange(masks * listed - 1, -1, -1, device=maps.device).view(masks, listed)
    parts = torch.zeros((masks, 2, PART_FIELDS), dtype=torch.int32, device=maps.device)
    tables = []
    for listing in listings:
        kept = maps.index_select(1, listing.block) & listing.exists
        count = kept.view(-1).cumsum(0, dtype=torch.int32).view(masks, listed)
        # Each kept entry goes to its place, the others to what is left, from the end: no place is written twice or left out.
        place = count + backwards.masked_fill(kept, -1)
        col_tile = torch.empty((2, masks * listed), dtype=torch.int32, device=maps.device)
        col_tile[:, place] = listing.col_tile
        # The count before an entry is that at the one before it, and the first of each mask is none.
        ptr = count.index_select(1, listing.ptr)
        split = count.index_select(1, listing.split).view(masks, -1, 2)
        bounds = count.index_select(1, listing.bounds).view(masks, -1, 4)
        order = torch.argsort(bounds[..., 3] - bounds[..., 0], dim=-1, descending=True, stable=True)
        by_weight = bounds.gather(1, order[..., None].expand(bounds.shape))
        order = order.to(torch.int32)
        tables.append(Table(ptr, split, order, *col_tile, work_of_whole_rows(order, by_weight), parts))
    return tables


def table_of_all(tile: torch.Tensor, cut_row: bool, cut_col: bool) -> Table:
    """All blocks row by row. Cut ones are the last of their row, or all of the last row, so that they follow the full ones."""
    rows, cols = tile.shape
    ptr = counted(rows + 1, tile.device) * cols
    runs = ptr[1:] - int(cut_col)
    if cut_row:
        runs[-1] = ptr[-2]
    order = counted(rows, tile.device)
    col_idx = counted(cols, tile.device).repeat(rows)
    work = work_of_whole_rows(order, torch.stack([ptr[:-1], runs, ptr[1:], ptr[1:]], -1))
    split = torch.stack([runs, ptr[1:]], -1)
    parts = ptr.new_zeros((1, 2, PART_FIELDS))
    return Table(ptr[None], split[None], order[None], col_idx, tile.reshape(-1), work[None], parts)


def counted(stop: int, device: torch.device) -> torch.Tensor:
    return torch.arange(stop, dtype=torch.int32, device=device)
