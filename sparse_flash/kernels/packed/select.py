"""Tables of the blocks that maps keep, selected from another table's entries: counts by row, then the entries.

The same as ``masks.select_blocks.select_in_torch`` in tensor operations, which says what the results are.
"""

import torch
import triton
import triton.language as tl

from ..launch.launch import launch

_ENTRIES = 256  # of a row, read at a time


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
def _load_entries(maps, index, mask, line, entry, end, rows, cols, BY_KEY: tl.constexpr, BITS: tl.constexpr):
    """(other axis of each entry, whether its block is kept: 0 or 1)."""
    exists = entry < end
    other = tl.load(index + entry, mask=exists, other=0)
    if BY_KEY:
        kept = _is_kept(maps, mask, other, line, rows, cols, exists, BITS)
    else:
        kept = _is_kept(maps, mask, line, other, rows, cols, exists, BITS)
    return other, kept


@triton.jit(do_not_specialize=["rows", "cols", "lines"])
def count_entries_kernel(
    maps, row_ptr, row_split, index, counts, rows, cols, lines,
    BY_KEY: tl.constexpr, BITS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """A program counts a row's kept entries: full blocks; these and run tiles; all.

    maps: (masks, rows, cols) bool, or (masks, rows, ceil(cols / 32)) int32 of bits. row_ptr, row_split, index: of the table to
    select from, whose rows are ``lines`` blocks of queries, or of keys with BY_KEY. counts: (masks, lines, 3) int32."""
    line, mask = tl.program_id(0) % lines, tl.program_id(0) // lines
    begin, end = tl.load(row_ptr + line), tl.load(row_ptr + line + 1)
    runs, bits = tl.load(row_split + line * 2), tl.load(row_split + line * 2 + 1)
    full, no_bits, total = begin * 0, begin * 0, begin * 0
    for first in range(begin, end, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        _, kept = _load_entries(maps, index, mask, line, entry, end, rows, cols, BY_KEY, BITS)
        full += tl.sum(tl.where(entry < runs, kept, 0))
        no_bits += tl.sum(tl.where(entry < bits, kept, 0))
        total += tl.sum(kept)
    place = counts + (mask * lines + line).to(tl.int64) * 3
    tl.store(place, full)
    tl.store(place + 1, no_bits)
    tl.store(place + 2, total)


@triton.jit(do_not_specialize=["rows", "cols", "lines"])
def select_entries_kernel(
    maps, row_ptr, index, tiles, selected_ptr, selected_index, selected_tiles, rows, cols, lines,
    BY_KEY: tl.constexpr, BITS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """A program writes a row's kept entries, in the order in which they stand. selected_ptr: (masks, lines + 1) int32. The rest as
    for ``count_entries_kernel``."""
    line, mask = tl.program_id(0) % lines, tl.program_id(0) // lines
    begin, end = tl.load(row_ptr + line), tl.load(row_ptr + line + 1)
    place = tl.load(selected_ptr + mask * (lines + 1) + line)
    for first in range(begin, end, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        other, kept = _load_entries(maps, index, mask, line, entry, end, rows, cols, BY_KEY, BITS)
        number = place + tl.cumsum(kept, 0) - 1
        tl.store(selected_index + number, other, mask=kept != 0)
        tile = tl.load(tiles + entry, mask=entry < end, other=0)
        tl.store(selected_tiles + number, tile, mask=kept != 0)
        place += tl.sum(kept)


def select_entries(
    maps: torch.Tensor, table, by_key: bool, shape: tuple[int, int], room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row_ptr, row_split, row_order, col_idx, tile_idx) of the entries that each map keeps: see ``masks.table.Table``.

    maps: as ``count_entries_kernel`` takes them, contiguous. table: of one mask, its rows blocks of keys if ``by_key``. shape: rows
    and columns of the maps. room: the most entries that may be kept in all.
    """
    maps = maps if maps.dtype == torch.int32 else maps.view(torch.uint8)
    masks, lines = maps.shape[0], table.row_ptr.shape[1] - 1
    counts = torch.empty((masks, lines, 3), dtype=torch.int32, device=maps.device)
    constants = {"BY_KEY": by_key, "BITS": maps.dtype == torch.int32, "ENTRIES": _ENTRIES}
    grid, options = (masks * lines, 1), {"num_warps": 4}
    launch(count_entries_kernel, grid, [maps, *table[:2], table.col_idx, counts, *shape, lines], constants, options)
    total = counts[..., 2]
    row_ptr = torch.nn.functional.pad(total.cumsum(1, dtype=torch.int32), (1, 0))
    row_ptr[1:] += row_ptr[:-1, -1:].cumsum(0, dtype=torch.int32)
    row_split = row_ptr[:, :-1, None] + counts[..., :2]
    row_order = torch.argsort(total, dim=1, descending=True, stable=True).to(torch.int32)
    index, tiles = torch.empty((2, max(2, room)), dtype=torch.int32, device=maps.device)
    arguments = [maps, table.row_ptr, table.col_idx, table.tile_idx, row_ptr, index, tiles, *shape, lines]
    launch(select_entries_kernel, grid, arguments, constants, options)
    return row_ptr, row_split, row_order, index, tiles
