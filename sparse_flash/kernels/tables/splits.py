"""The work items of tables that are made on a device: whole rows, and splits of heavy rows. One launch makes the items of both
tables of a mask.

The same as ``masks.table.build_split_work``, which says what a split is, in tensor operations.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launch.launch import launch

WORK_FIELDS = tl.constexpr(8)
LINE_FIELDS = tl.constexpr(4)
_ITEMS_TOGETHER, _MASKS_TOGETHER = 128, 16


class RowTensors(NamedTuple):
    """The rows of a table of one mask, for kernels to read or write: see ``masks.table.Table``. rows: their number for each
    mask."""

    row_ptr: Any
    row_split: Any
    row_order: Any
    rows: Any


@triton.jit
def _load_row(table, mask, place, exists):
    """(row, its first entry, the end of its entries) of places in the order of rows; the row past the last where none exists."""
    row = tl.load(table.row_order + mask * table.rows + place, mask=exists, other=0)
    ptr = table.row_ptr + mask * (table.rows + 1) + row
    begin, end = tl.load(ptr, mask=exists, other=0), tl.load(ptr + 1, mask=exists, other=0)
    return tl.where(exists, row, table.rows), begin, end


@triton.jit
def _count_splits(table, mask, exists, least, SPLITS: tl.constexpr):
    """(masks, SPLITS / 2) int32: how many splits the heaviest rows have, 0 for whole rows. No more rows can have two or more."""
    place = tl.arange(0, SPLITS // 2)[None, :]
    ptr = table.row_ptr + mask * (table.rows + 1)
    total = tl.load(ptr + table.rows, mask=exists, other=0) - tl.load(ptr, mask=exists, other=0)
    _, begin, end = _load_row(table, mask[:, None], place, exists[:, None] & (place < table.rows))
    count = end - begin
    heavy = count * SPLITS >= 2 * tl.maximum(total, least)[:, None]
    in_heavy = tl.sum(tl.where(heavy, count, 0), 1)
    divided = tl.maximum(tl.maximum(in_heavy, total // 4), least)
    return tl.where(heavy, count * SPLITS // divided[:, None], 0)


@triton.jit
def _items_in_use(table, masks, least, SPLITS: tl.constexpr, MASKS: tl.constexpr):
    """The number of items of the mask that has most."""
    most = masks * 0
    for first in range(0, masks, MASKS):
        mask = first + tl.arange(0, MASKS)
        splits = _count_splits(table, mask, mask < masks, least, SPLITS)
        more = tl.sum(tl.maximum(splits - 1, 0), 1)
        most = tl.maximum(most, tl.max(more, 0))
    return table.rows + most


@triton.jit
def _write_items(
    table, work, masks, mask, chunk, least, SPLITS: tl.constexpr, ROOM: tl.constexpr, ITEMS: tl.constexpr, MASKS: tl.constexpr
):
    """A chunk of a mask's work items."""
    splits = _count_splits(table, mask + tl.arange(0, 1), tl.arange(0, 1) == 0, least, SPLITS)
    end_of_row = tl.cumsum(splits, 1)
    total = tl.sum(splits)
    item = chunk * ITEMS + tl.arange(0, ITEMS)
    is_split = item < total
    # Heavy rows are the first in order, and their splits the first items.
    before = end_of_row <= item[:, None]
    place = tl.where(is_split, tl.sum(before.to(tl.int32), 1), item - total + tl.sum((splits > 0).to(tl.int32)))
    number = tl.where(is_split, item - tl.max(tl.where(before, end_of_row, 0), 1), 0)
    here = tl.arange(0, SPLITS // 2)[None, :] == place[:, None]
    divisor = tl.where(is_split, tl.sum(tl.where(here, splits, 0), 1), 1)
    exists = place < table.rows
    row, begin, end = _load_row(table, mask, place, exists)
    bounds = table.row_split + (mask * table.rows + row) * 2
    runs, bits = tl.load(bounds, mask=exists, other=0), tl.load(bounds + 1, mask=exists, other=0)
    low, high = begin + (end - begin) * number // divisor, begin + (end - begin) * (number + 1) // divisor
    runs, bits = tl.minimum(tl.maximum(runs, low), high), tl.minimum(tl.maximum(bits, low), high)
    in_use = mask * 0
    if (ROOM > 0) & (mask == 0) & (chunk == 0):
        in_use = _items_in_use(table, masks, least, SPLITS, MASKS)

    field = tl.arange(0, WORK_FIELDS)[None, :]
    values = tl.where(field == 0, row[:, None], tl.where(field == 1, low[:, None], tl.where(field == 2, runs[:, None], 0)))
    values = tl.where(field == 3, bits[:, None], tl.where(field == 4, high[:, None], values))
    values = tl.where((field == 5) & is_split[:, None], item[:, None] + 1, values)
    values = tl.where((field == 6) & (item[:, None] == 0), in_use, values)
    first = work + mask.to(tl.int64) * (table.rows + ROOM) * WORK_FIELDS
    tl.store(first + item[:, None] * WORK_FIELDS + field, values, mask=(item < table.rows + ROOM)[:, None])


@triton.jit
def _write_lines(table, listed, mask, least, SPLITS: tl.constexpr, ROOM: tl.constexpr):
    """A mask's split rows, then lines of zeros."""
    LINES: tl.constexpr = ROOM if ROOM > 0 else 2
    splits = _count_splits(table, mask + tl.arange(0, 1), tl.arange(0, 1) == 0, least, SPLITS)
    line = tl.arange(0, SPLITS)
    here = tl.arange(0, SPLITS // 2)[None, :] == line[:, None]
    count = tl.sum(tl.where(here, splits, 0), 1)
    first = tl.sum(tl.where(here, tl.cumsum(splits, 1) - splits, 0), 1)
    row, _, _ = _load_row(table, mask, line, count > 0)
    field = tl.arange(0, LINE_FIELDS)[None, :]
    values = tl.where(field == 0, row[:, None], tl.where(field == 1, first[:, None], tl.where(field == 2, count[:, None], 0)))
    place = listed + (mask * LINES + line[:, None]) * LINE_FIELDS + field
    tl.store(place, tl.where((count > 0)[:, None], values, 0), mask=(line < LINES)[:, None])


@triton.jit(do_not_specialize=["rows", "k_rows", "masks", "least"])
def split_rows_kernel(
    by_query, by_key, work, k_work, rows, k_rows, masks, least,
    SPLITS: tl.constexpr, ROOM: tl.constexpr, K_ROOM: tl.constexpr, ITEMS: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    """A program writes ITEMS items of a mask, and a mask's first program its split rows. Axis 0 has the masks of the table by
    query, then the masks of the table by key. by_query, by_key, work: as for ``split_rows_launch``."""
    line, chunk = tl.program_id(0), tl.program_id(1)
    if line < masks:
        table = RowTensors(*by_query, rows)
        if chunk == 0:
            _write_lines(table, work[1], line, least, SPLITS, ROOM)
        _write_items(table, work[0], masks, line, chunk, least, SPLITS, ROOM, ITEMS, MASKS)
    else:
        table = RowTensors(*by_key, k_rows)
        if chunk == 0:
            _write_lines(table, k_work[1], line - masks, least, SPLITS, K_ROOM)
        _write_items(table, k_work[0], masks, line - masks, chunk, least, SPLITS, K_ROOM, ITEMS, MASKS)


def work_shapes(masks: int, rows: int, room: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The shapes of work and splits of a table of so many rows, with room for so many splits."""
    return (masks, rows + room, WORK_FIELDS.value), (masks, max(2, room), LINE_FIELDS.value)


def split_rows_launch(by_query, by_key, work, work_by_key, room: int, k_room: int, splits: int, least: int):
    """Returns (grid, arguments, constants, options).

    by_query, by_key: (row_ptr, row_split, row_order). work, work_by_key: (work, splits) of each table, which are written. room,
    k_room: splits that each has room for, ``splits`` or 0: then rows stay whole. splits, least: see ``masks.table.split_limits``.
    """
    masks, rows = by_query[2].shape
    arguments = [*map(tuple, (by_query, by_key, work, work_by_key)), rows, by_key[2].shape[1], masks, least]
    constants = {"SPLITS": splits, "ROOM": room, "K_ROOM": k_room, "ITEMS": _ITEMS_TOGETHER, "MASKS": _MASKS_TOGETHER}
    longest = max(work[0].shape[1], work_by_key[0].shape[1])
    return (2 * masks, triton.cdiv(longest, _ITEMS_TOGETHER)), arguments, constants, {"num_warps": 4}


def split_rows(by_query, by_key, *of_splits: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(work, splits) of each of a mask's two tables. Arguments as for ``split_rows_launch``."""
    results = [
        tuple(table[2].new_empty(shape) for shape in work_shapes(*table[2].shape, room))
        for table, room in zip((by_query, by_key), of_splits, strict=False)
    ]
    launch(split_rows_kernel, *split_rows_launch(by_query, by_key, *results, *of_splits))
    return results
