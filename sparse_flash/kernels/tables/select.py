"""Tables of the blocks that maps keep, selected from another mask's entries: counts by row, then the entries of both tables.

The same as ``masks.select_blocks.select_in_torch`` in tensor operations, which says what the results are.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from ..launch.launch import Recording, launch_or_repeat, launch_or_repeat_alike
from .splits import split_rows_kernel, split_rows_launch, work_shapes

_TOGETHER = 256  # entries of a row, or rows, read at a time


@triton.jit
def _is_kept(maps, mask, row, col, rows, cols, exists, BITS: tl.constexpr):
    """Whether a map keeps the blocks (row, col): 0 or 1."""
    line = (mask * rows + row).to(tl.int64)
    if BITS:
        word = tl.load(maps + line * ((cols + 31) // 32) + col // 32, mask=exists, other=0)
        kept = (word >> (col % 32)) & 1
    else:
        kept = (tl.load(maps + line * cols + col, mask=exists, other=0) != 0).to(tl.int32)
    return kept


@triton.jit
def _load_entries(maps, entries, mask, line, entry, end, rows, cols, BY_KEY: tl.constexpr, BITS: tl.constexpr):
    """(other axis of each entry, whether its block is kept: 0 or 1)."""
    exists = entry < end
    other = tl.load(entries.col_idx + entry, mask=exists, other=0)
    if BY_KEY:
        kept = _is_kept(maps, mask, other, line, rows, cols, exists, BITS)
    else:
        kept = _is_kept(maps, mask, line, other, rows, cols, exists, BITS)
    return other, kept


@triton.jit
def _count_row(
    maps, entries, counts, totals, masks, mask, line, lines, rows, cols,
    BY_KEY: tl.constexpr, BITS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Counts a row's kept entries: full blocks; these and run tiles; all. counts: (3, masks, lines). totals: (masks,)."""
    begin, end = tl.load(entries.row_ptr + line), tl.load(entries.row_ptr + line + 1)
    runs, bits = tl.load(entries.row_split + line * 2), tl.load(entries.row_split + line * 2 + 1)
    full, no_bits, total = begin * 0, begin * 0, begin * 0
    for first in range(begin, end, TOGETHER):
        entry = first + tl.arange(0, TOGETHER)
        _, kept = _load_entries(maps, entries, mask, line, entry, end, rows, cols, BY_KEY, BITS)
        full += tl.sum(tl.where(entry < runs, kept, 0))
        no_bits += tl.sum(tl.where(entry < bits, kept, 0))
        total += tl.sum(kept)
    plane = masks.to(tl.int64) * lines
    place = counts + mask.to(tl.int64) * lines + line
    tl.store(place, full)
    tl.store(place + plane, no_bits)
    tl.store(place + 2 * plane, total)
    tl.atomic_add(totals + mask, total, sem="relaxed")


@triton.jit
def _select_row(
    maps, entries, selected, counts, totals, masks, mask, line, lines, rows, cols,
    BY_KEY: tl.constexpr, BITS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Writes a row's kept entries behind the kept entries of earlier masks and rows, in the order of the table. Also writes the
    rank of the row among the rows of its mask, heaviest first."""
    plane = masks.to(tl.int64) * lines
    of_mask = counts + mask.to(tl.int64) * lines
    total = tl.load(of_mask + 2 * plane + line)
    place, rank = total * 0, total * 0
    for first in range(0, mask, TOGETHER):
        earlier = first + tl.arange(0, TOGETHER)
        place += tl.sum(tl.load(totals + earlier, mask=earlier < mask, other=0))
    for first in range(0, lines, TOGETHER):
        other = first + tl.arange(0, TOGETHER)
        of_other = tl.load(of_mask + 2 * plane + other, mask=other < lines, other=-1)
        place += tl.sum(tl.where(other < line, of_other, 0))
        rank += tl.sum(((of_other > total) | ((of_other == total) & (other < line))).to(tl.int32))
    row_ptr = selected.row_ptr + mask * (lines + 1) + line
    tl.store(row_ptr, place)
    if line == lines - 1:
        tl.store(row_ptr + 1, place + total)
    row_split = selected.row_split + (mask * lines + line).to(tl.int64) * 2
    tl.store(row_split, place + tl.load(of_mask + line))
    tl.store(row_split + 1, place + tl.load(of_mask + plane + line))
    tl.store(selected.row_order + mask * lines + rank, line)

    begin, end = tl.load(entries.row_ptr + line), tl.load(entries.row_ptr + line + 1)
    for first in range(begin, end, TOGETHER):
        entry = first + tl.arange(0, TOGETHER)
        other, kept = _load_entries(maps, entries, mask, line, entry, end, rows, cols, BY_KEY, BITS)
        number = place + tl.cumsum(kept, 0) - 1
        tl.store(selected.col_idx + number, other, mask=kept != 0)
        tile = tl.load(entries.tile_idx + entry, mask=entry < end, other=0)
        tl.store(selected.tile_idx + number, tile, mask=kept != 0)
        place += tl.sum(kept)


@triton.jit(do_not_specialize=["masks", "rows", "cols"])
def count_entries_kernel(
    maps, by_query, by_key, counts, totals, masks, rows, cols, BITS: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """A program counts a row of one of the two tables, by query first.

    maps: (masks, rows, cols) bool, or (masks, rows, ceil(cols / 32)) int32 of bits. by_query, by_key: tables of one mask.
    counts: int32, (3, masks, rows), then (3, masks, cols). totals: (2, masks) int32, zeros.
    """
    number = tl.program_id(0)
    if number < masks * rows:
        _count_row(
            maps, by_query, counts, totals, masks, number // rows, number % rows, rows, rows, cols, False, BITS, TOGETHER
        )  # fmt: skip
    else:
        number -= masks * rows
        counts += 3 * masks.to(tl.int64) * rows
        _count_row(
            maps, by_key, counts, totals + masks, masks, number // cols, number % cols, cols, rows, cols, True, BITS, TOGETHER
        )  # fmt: skip


@triton.jit(do_not_specialize=["masks", "rows", "cols"])
def select_entries_kernel(
    maps, by_query, by_key, selected, selected_by_key, counts, totals, masks, rows, cols,
    BITS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A program writes a row of one of the two tables, selected and selected_by_key, except its work items. The rest as for
    ``count_entries_kernel``, which fills counts and totals."""
    number = tl.program_id(0)
    if number < masks * rows:
        _select_row(
            maps, by_query, selected, counts, totals, masks, number // rows, number % rows, rows, rows, cols, False, BITS, TOGETHER
        )  # fmt: skip
    else:
        number -= masks * rows
        counts += 3 * masks.to(tl.int64) * rows
        totals += masks
        _select_row(
            maps, by_key, selected_by_key, counts, totals, masks, number // cols, number % cols, cols, rows, cols, True, BITS,
            TOGETHER,
        )  # fmt: skip


def select_tables(
    maps: torch.Tensor, by_query, by_key, shape: tuple[int, int], room: int, of_splits: tuple[int, int, int, int], within
) -> list:
    """Both tables of the entries that each map keeps: see ``masks.table.Table``.

    maps: as ``count_entries_kernel`` takes them, contiguous. by_query, by_key: tables of one mask. shape: rows and columns of the
    maps. room: the most entries that may be kept in all. of_splits: the last arguments of ``split_rows_launch``. within: the mask
    of the tables, which keeps the launches; None if they are made for this call alone.
    """
    maps = maps if maps.dtype == torch.int32 else maps.view(torch.uint8)
    run = partial(_run, maps, by_query, by_key, shape, room, of_splits)
    if within is None:
        made = launch_or_repeat(None, None, None, (maps,), run)
    else:
        made = launch_or_repeat_alike(select_entries_kernel, within, (shape, room, of_splits), (maps,), run)
    parts = len(by_query)
    return [by_query._make(made[:parts]), by_query._make(made[parts : 2 * parts])]


def _run(maps, by_query, by_key, shape, room, of_splits, recording: Recording) -> list[torch.Tensor]:
    (masks, (rows, cols)), kind = (maps.shape[0], shape), {"dtype": torch.int32, "device": maps.device}
    made = []
    for lines, more in ((rows, of_splits[0]), (cols, of_splits[1])):
        shapes = (masks, lines + 1), (masks, lines, 2), (masks, lines), (max(2, room),), (max(2, room),)
        made += [recording.fresh(torch.empty(size, **kind)) for size in (*shapes, *work_shapes(masks, lines, more))]
    table, table_by_key = by_query._make(made[: len(made) // 2]), by_query._make(made[len(made) // 2 :])
    counts = recording.fresh(torch.empty(3 * masks * (rows + cols), **kind))
    totals = recording.each_time(partial(torch.zeros, (2, masks), **kind))
    constants, options = {"BITS": maps.dtype == torch.int32, "TOGETHER": _TOGETHER}, {"num_warps": 4}
    grid, sizes = (masks * (rows + cols), 1), (counts, totals, masks, rows, cols)
    recording.launch(count_entries_kernel, (grid, [maps, by_query, by_key, *sizes], constants, options))
    recording.launch(select_entries_kernel, (grid, [maps, by_query, by_key, table, table_by_key, *sizes], constants, options))
    recording.launch(split_rows_kernel, split_rows_launch(table[:3], table_by_key[:3], table[5:], table_by_key[5:], *of_splits))
    return made
