"""Tables of the blocks that a map keeps, selected on the device from another mask's table."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

import torch

from ..compat.pytorch import is_plain_eager
from ..kernels.common.streams import current_gpu
from .table import SPLIT_FIELDS, Table, build_split_work, most_splits, split_limits, work_of_whole_rows


class Listing(NamedTuple):
    """The entries of one mask's tables, by_query and by_key, to select from at run time. n: the number of entries plus padding.

    block: (2, 1, n) int64, the row-major block of each entry; the first element precedes all entries and is padding, like those
    past the last entry.
    exists: (2, 1, n) bool, whether it is an entry rather than padding.
    col_tile: (2, 2, 1, n) int32, col_idx and tile_idx of both tables.
    ptr, split: int64, with the row count of the longer table: (2, 1, rows + 1 and up to 3 more) row_ptr, (2, 1, rows * 2)
    row_split.
    rows: the row count of each table.
    """

    block: torch.Tensor
    exists: torch.Tensor
    col_tile: torch.Tensor
    ptr: torch.Tensor
    split: torch.Tensor
    rows: tuple[int, int]


def build_listing(by_query: Table, by_key: Table) -> Listing:
    """The entries of one mask's two tables."""
    rows = by_query.row_ptr.shape[1] - 1, by_key.row_ptr.shape[1] - 1
    room = max(len(by_query.col_idx), len(by_key.col_idx)), max(rows)
    sides = _list_side(by_query, rows[1], 1, *room), _list_side(by_key, 1, rows[1], *room)
    block, exists, col_tile, *lines = (torch.stack(tensors) for tensors in zip(*sides, strict=True))
    ptr, split = (line[:, None].long() for line in lines)
    col_tile = col_tile.transpose(0, 1)[:, :, None].contiguous()
    return Listing(block[:, None].long(), exists[:, None], col_tile, ptr, split, rows)


def _list_side(table: Table, row_stride: int, col_stride: int, entries: int, rows: int) -> tuple[torch.Tensor, ...]:
    """(block, exists, col_tile, ptr, split) of one table, padded to this many entries and rows. Its (row, col) is block
    row * row_stride + col * col_stride of the grid."""
    ptr, split = table.row_ptr[0], table.row_split[0]
    # Padded so that what follows col_idx in memory is 16-byte aligned, as kernels are compiled for.
    past = -(entries + 1) % 4
    cols, tiles = (torch.nn.functional.pad(t, (1, entries - len(t) + past)) for t in (table.col_idx, table.tile_idx))
    entry = arange_int32(len(cols), ptr.device) - 1
    row = torch.searchsorted(ptr[1:], entry, right=True, out_int32=True)
    exists = (entry >= 0) & (row < len(ptr) - 1)
    block = torch.where(exists, row * row_stride + cols * col_stride, 0)
    # Padding rows begin and end before all entries. row_ptr is as long as keeps that of the next table 16-byte aligned.
    past = rows - len(split)
    ptr = torch.nn.functional.pad(ptr, (0, past + -(rows + 1) % 4))
    split = torch.nn.functional.pad(split.flatten(), (0, past * 2))
    return block, exists, torch.stack([cols, tiles]), ptr, split


def select_in_torch(maps: torch.Tensor, listing: Listing) -> list[Table]:
    """The tables by_query and by_key of the listed entries that each map, a row of (masks, blocks) bool, keeps; the operations'
    shapes do not depend on the maps' contents. The order stays that of the listing, so a running count suffices. One operation
    serves both tables, as launches are most of the cost."""
    masks, listed = len(maps), listing.block.shape[2]

    def of_masks(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.expand(2, masks, -1)

    kept = maps.expand(2, -1, -1).gather(2, of_masks(listing.block)) & listing.exists
    count = kept.view(-1).cumsum(0, dtype=torch.int32).view(2, -1)
    count[1].sub_(count[0, -1])
    # Each kept entry goes to its place, the others to the remaining places, from the end: every place is written exactly once. The
    # second table has the first places.
    backwards = torch.arange(count.numel() - 1, -1, -1, device=maps.device).view(2, -1)
    place = count + torch.where(kept.view(2, -1), backwards[:, -1:] - 1, backwards)
    col_tile = torch.empty((2, count.numel()), dtype=torch.int32, device=maps.device)
    col_tile[:, place.view(2, masks, listed)] = listing.col_tile
    col_tile = col_tile.view(2, 2, -1)
    # The count before an entry is the count at the previous one; the first entry of each mask is padding.
    count = count.view(2, masks, listed)
    # With several masks, padding would make copies of the slices below.
    ends = max(listing.rows) + 1
    ptr, split = (count.gather(2, of_masks(t)) for t in (listing.ptr if masks == 1 else listing.ptr[..., :ends], listing.split))
    order = torch.argsort(ptr[..., :ends].diff(dim=-1), dim=-1, descending=True, stable=True).to(torch.int32)
    split = split.view(2, masks, -1, 2)
    lines = []
    for side, rows in enumerate(listing.rows):
        # Padding rows have no entries, or fewer by the difference of row_ptr, so they come last in order.
        own_split, own_order = (t[side, :, :rows].contiguous() for t in (split, order))
        lines.append((ptr[side, :, : rows + 1].contiguous(), own_split, own_order))
    work = build_work(lines[0], lines[1], listing.rows[1], listing.rows[0])
    return [Table(*lines[side], col_tile[0, 1 - side], col_tile[1, 1 - side], *work[side]) for side in range(2)]


def select_by_kernel(maps: torch.Tensor, by_query: Table, by_key: Table, shape: tuple[int, int], room: int) -> list[Table]:
    """``select_in_torch``, by kernels, from one mask's tables themselves. maps: (masks, q_blocks, kv_blocks) bool, or int32 of
    bits, 32 blocks each. shape: of the grid. room: the most blocks that all maps may keep."""
    from ..kernels.packed.select import select_entries

    sides = [select_entries(maps, table, by_key is table, shape, room) for table in (by_query, by_key)]
    work = build_work(sides[0][:3], sides[1][:3], shape[1], shape[0])
    return [Table(*side, *own) for side, own in zip(sides, work, strict=True)]


RowArrays: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def build_work(by_query: RowArrays, by_key: RowArrays, longest: int, k_longest: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(work, splits) of the two tables of a mask made on their device, without synchronization.

    by_query, by_key: (row_ptr, row_split, row_order). longest, k_longest: the most blocks that a row of each may have.
    """
    if not can_launch_kernel(by_query[0]):
        return [build_split_work(*by_query, longest), build_split_work(*by_key, k_longest)]
    from ..kernels.packed.splits import split_rows

    return split_rows(by_query, by_key, most_splits(longest), most_splits(k_longest), *split_limits())


def can_launch_kernel(tensor: torch.Tensor) -> bool:
    """Whether a kernel may be launched on this tensor: on the current GPU, with nothing that has to see operations."""
    device = tensor.device
    if device.type != "cuda" or not is_plain_eager(tensor):
        return False
    return device.index == current_gpu() and _has_triton()  # type: ignore[misc]  # None only in builds without GPUs


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def build_dense_table(tile: torch.Tensor, cut_row: bool, cut_col: bool) -> Table:
    """All blocks row by row. Cut blocks come last in their row, or fill the last row, so they follow the full ones."""
    rows, cols = tile.shape
    ptr = arange_int32(rows + 1, tile.device) * cols
    runs = ptr[1:] - int(cut_col)
    if cut_row:
        runs[-1] = ptr[-2]
    order = arange_int32(rows, tile.device)
    col_idx = arange_int32(cols, tile.device).repeat(rows)
    work = work_of_whole_rows(order, torch.stack([ptr[:-1], runs, ptr[1:], ptr[1:]], -1))
    split = torch.stack([runs, ptr[1:]], -1)
    splits = ptr.new_zeros((1, 2, SPLIT_FIELDS))
    return Table(ptr[None], split[None], order[None], col_idx, tile.reshape(-1), work[None], splits)


def arange_int32(stop: int, device: torch.device) -> torch.Tensor:
    return torch.arange(stop, dtype=torch.int32, device=device)
