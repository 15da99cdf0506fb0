"""Tables of the blocks that a map keeps, selected on the device from another mask's table."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TypeAlias

import torch

from ..compat.pytorch import is_plain_eager
from ..kernels.common.streams import current_gpu
from .table import SPLIT_FIELDS, Table, build_split_work, most_splits, split_limits, work_of_whole_rows

_HAS_TRITON = find_spec("triton") is not None
RowArrays: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def select_in_torch(maps: torch.Tensor, by_query: Table, by_key: Table, shape: tuple[int, int]) -> list[Table]:
    """The tables by_query and by_key of the entries of one mask's tables that each map keeps, in operations of fixed shapes. maps:
    (masks, q_blocks, kv_blocks) bool, or (masks, q_blocks, ceil(kv_blocks / 32)) int32 of bits. shape: of the grid."""
    if maps.dtype != torch.bool:
        maps = ((maps[..., None] >> arange_int32(32, maps.device)) & 1).flatten(-2)[..., : shape[1]].bool()
    rows, entries = _select_entries(maps, by_query)
    columns, entries_by_key = _select_entries(maps.mT, by_key)
    work, work_by_key = build_work(rows, columns, shape[1], shape[0])
    return [Table(*rows, *entries, *work), Table(*columns, *entries_by_key, *work_by_key)]


def _select_entries(maps: torch.Tensor, table: Table) -> tuple[RowArrays, tuple[torch.Tensor, torch.Tensor]]:
    """((row_ptr, row_split, row_order), (col_idx, tile_idx)) of the entries that each map keeps, in the order of the table. maps:
    (masks, rows, cols) bool."""
    masks, rows, listed = len(maps), maps.shape[1], len(table.col_idx)
    ptr, split = table.row_ptr[0].long(), table.row_split[0].long()
    row = torch.searchsorted(ptr[1:], torch.arange(listed, device=maps.device), right=True)
    exists = row < rows  # col_idx may hold anything past the last row's entries
    kept = maps[:, torch.where(exists, row, 0), torch.where(exists, table.col_idx, 0)] & exists
    kept_before = torch.nn.functional.pad(kept.flatten().cumsum(0), (1, 0))
    # The kept entries come first, in order. The others are written to one more place, which is cut off.
    target = torch.where(kept.flatten(), kept_before[:-1], masks * listed)
    cols, tiles = (numbers.new_zeros(masks * listed + 2) for numbers in (table.col_idx, table.tile_idx))
    cols[target], tiles[target] = table.col_idx.repeat(masks), table.tile_idx.repeat(masks)
    first_entry = torch.arange(masks, device=maps.device)[:, None] * listed
    new_ptr, new_split = (kept_before[first_entry + bounds].int() for bounds in (ptr, split.flatten()))
    order = torch.argsort(new_ptr.diff(dim=-1), dim=-1, descending=True, stable=True).int()
    size = max(2, masks * listed)
    return (new_ptr, new_split.view(masks, rows, 2), order), (cols[:size], tiles[:size])


def select_by_kernel(
    maps: torch.Tensor, by_query: Table, by_key: Table, shape: tuple[int, int], room: int, within: object = None
) -> list[Table]:
    """``select_in_torch`` by kernels. room: the most blocks that all maps may keep. within: the BlockMask of the tables, with which
    launches are kept; None: they are not."""
    from ..kernels.tables.select import select_tables

    of_splits = most_splits(shape[1]), most_splits(shape[0]), *split_limits()
    return [Table(*made) for made in select_tables(maps, by_query, by_key, shape, room, of_splits, within)]


def build_work(by_query: RowArrays, by_key: RowArrays, longest: int, k_longest: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(work, splits) of the two tables of a mask made on their device, without synchronization.

    by_query, by_key: (row_ptr, row_split, row_order). longest, k_longest: the most blocks that a row of each may have.
    """
    if not can_launch_kernel(by_query[0]):
        return [build_split_work(*by_query, longest), build_split_work(*by_key, k_longest)]
    from ..kernels.tables.splits import split_rows

    return split_rows(by_query, by_key, most_splits(longest), most_splits(k_longest), *split_limits())


def can_launch_kernel(tensor: torch.Tensor) -> bool:
    """Whether a kernel may be launched on this tensor: on the current GPU, with nothing that has to see operations."""
    device = tensor.device
    if device.type != "cuda" or not is_plain_eager(tensor):
        return False
    return device.index == current_gpu() and _HAS_TRITON  # type: ignore[misc]  # None only in builds without GPUs


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
