"""The lookup table: kept blocks row by row, and the work items for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from .grid import FULL, BlockRuns, concat_ranges, runs_of, union
from .tiles import EMPTY_TILE, FULL_TILE, TilePool

# The fields of a work item, 32 bytes, one sector of a cache line: see ``Table.work``. The last one is for ``document_tables``.
ROW, BEGIN, RUNS, BITS, END, SPLIT, ITEMS, _ = range(8)
WORK_FIELDS, SPLIT_FIELDS = 8, 4

# A row is split if it has more blocks than _HEAVY_BLOCKS, more than _HEAVY_RATIO times the mean, and more than _HEAVY_SHARE of all
# blocks: one program would still work on it when the others are done. Each split has about _SPLIT_BLOCKS blocks, or _SPLIT_RATIO
# times the mean, and costs a pass over 64 KiB of results.
_HEAVY_BLOCKS, _HEAVY_RATIO, _HEAVY_SHARE = 64, 4, 1 / 32
# Groups of rows, such as documents, have this many rows at least, on average: operands of fewer stay in the L2 cache in any order.
_ROWS_OF_A_GROUP = 4
# Rows within a quarter of the heaviest count as equal, if three quarters of the rows are.
_ALIKE = 3 / 4
_SPLIT_BLOCKS, _SPLIT_RATIO = 32, 2
# A table made on a device has room for this many splits, as the host does not know its rows: see ``build_split_work``.
_SPLITS = 64
MOST_DERIVED = 1 << 22  # entries of a table beyond which deriving ``KernelTables`` takes seconds on the host, and gigabytes
# Runs of full blocks are handled as such where they are longer than this, on average; else block by block.
_LONG_RUN = 8
_BAND = 1 << 20  # blocks read at a time, at least: see ``bands_of``


class Entries(NamedTuple):
    """The kept blocks of one mask, in any order: rows, cols (blocks) and tile numbers or FULL_TILE, each (entries,) integers."""

    rows: np.ndarray
    cols: np.ndarray
    tiles: np.ndarray

    @classmethod
    def join(cls, parts: Iterable[Entries]) -> Entries:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def without_empty(self) -> Entries:
        """Without the blocks that keep nothing."""
        kept = self.tiles != EMPTY_TILE
        return Entries(*(axis[kept] for axis in self))


class Table(NamedTuple):
    """The kept blocks row by row (or column by column: then read row as column). All int32.

    row_ptr:   (masks, rows + 1)  row r of mask m has entries row_ptr[m, r] .. row_ptr[m, r + 1]
    row_split: (masks, rows, 2)   its full blocks end and run tiles begin at [..., 0]; run tiles end, bit tiles begin at [..., 1]
    row_order: (masks, rows)      the rows, heaviest first, so that no heavy row is left for the end, see ``weights_of``; under
                                  documents one document after the other, see ``groups_of``
    col_idx:   (entries,)         the block column of each entry, ascending within full, run and bit
    tile_idx:  (entries,)         the index into tile_runs or tile_bits; 0 for full blocks
    work:      (masks, items, 8)  all that a program needs to know of a row, contiguous, in the order of the rows. The fields are
                                  ROW, BEGIN (row_ptr[r]), RUNS and BITS (row_split[r]), END (row_ptr[r + 1]), SPLIT (0), ITEMS.
                                  A much heavier row has several splits instead: the same fields within the split, and in SPLIT
                                  its number from 1. Masks with fewer items are padded with empty items that name the row past
                                  the last. If there is room for splits, ITEMS of the very first item is the number of items
                                  that the mask with the most items uses; it is 0 everywhere else.
    splits:    (masks, splits, 4) the split rows: the row, its first split from 0, how many, 0; then rows of zeros. A row has at
                                  least two splits, so at most half of these rows are in use.

    ``col_idx`` and ``tile_idx`` may be longer than row_ptr indicates. A table made on a device, unless it is of documents, has its
    rows by weight only, and room for splits, which come first, row by row, then the other rows.
    """

    row_ptr: torch.Tensor
    row_split: torch.Tensor
    row_order: torch.Tensor
    col_idx: torch.Tensor
    tile_idx: torch.Tensor
    work: torch.Tensor
    splits: torch.Tensor

    @property
    def is_split(self) -> bool:
        """Whether rows may be split: whether there is room for splits."""
        return self.work.shape[1] > self.row_order.shape[1]

    def in_use(self) -> Table:
        """Without what ``col_idx`` and ``tile_idx`` hold past the last row's entries, which may be anything. Reads row_ptr."""
        count = int(self.row_ptr[-1, -1])
        return self._replace(col_idx=self.col_idx[:count], tile_idx=self.tile_idx[:count])

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Every entry of every mask: rows, cols, kind (0 full, 1 run tile, 2 bit tile), tile; int64 arrays in table order."""
        ptr, split = self.row_ptr.cpu().numpy(), self.row_split.cpu().numpy()
        counts = np.diff(np.stack([ptr[:, :-1], split[..., 0], split[..., 1], ptr[:, 1:]], -1))
        rows, kinds = (np.broadcast_to(index, counts.shape).ravel() for index in np.ogrid[: counts.shape[1], :3])
        count = int(ptr[-1, -1])
        cols, tile = (t[:count].cpu().numpy().astype(np.int64) for t in (self.col_idx, self.tile_idx))
        return np.repeat(rows, counts.ravel()), cols, np.repeat(kinds, counts.ravel()), tile

    def has_document_order(self) -> bool:
        """Whether one mask's table on the host has its rows in order of documents: see ``groups_of``."""
        return bool(groups_of(self.row_ptr[0].numpy(), self.row_split[0].numpy(), self.col_idx.numpy()).any())


class KernelTables(NamedTuple):
    """Tables derived from one mask's, which kernels iterate over instead: see ``tall`` and ``document_blocks``.

    block_size: keys of a block. row_queries: queries in a row of ``by_query``. by_key: None for tall rows, which are for forward.
    tiles: (run tiles, row_queries) and (bit tiles, row_queries, block_size / 32) int32; any bits past the end of their row.
    forward_us: predicted, of a head; 0 if not known. column_blocks: expected, on average; 0 if ``by_key`` says how many.
    """

    block_size: int
    row_queries: int
    mask_index: torch.Tensor
    by_query: Table
    by_key: Table | None
    tiles: tuple[torch.Tensor, torch.Tensor]
    starts: torch.Tensor | None
    document_order: bool
    forward_us: float = 0.0
    column_blocks: float = 0.0

    @property
    def from_host(self) -> bool:
        return True

    @property
    def whole_columns(self) -> torch.Tensor:
        """The work items of ``by_key``, which has no splits."""
        return cast(Table, self.by_key).work


def move_tables(tables: Any, device: torch.device) -> Any:
    """``KernelTables`` or None on another device, with all tensors in them."""
    if isinstance(tables, tuple):
        moved = (move_tables(one, device) for one in tables)
        return type(tables)(*moved) if hasattr(tables, "_fields") else tuple(moved)
    return tables.to(device) if isinstance(tables, torch.Tensor) else tables


class FullBlocks(NamedTuple):
    """The full blocks of one mask as runs [first, stop) of columns in a row, (runs,) int64 each, in order. shape: of the grid."""

    shape: tuple[int, int]
    rows: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    @classmethod
    def of(cls, shape: tuple[int, int], rows: np.ndarray, cols: np.ndarray) -> FullBlocks:
        """From single blocks, ordered by row and column."""
        return cls(shape, *(numbers.astype(np.int64) for numbers in runs_of(rows, cols)))

    @property
    def blocks(self) -> int:
        return int((self.stop - self.first).sum())

    def count_by_square(self, group: int) -> np.ndarray:
        """How many of the blocks lie in each square of group x group: (rows / group, cols / group) int64, rounded up."""
        rows, cols = (-(-count // group) for count in self.shape)
        # By square, the blocks of a row from ``first`` on grow by what is left of its square, then by the rest of a whole one.
        growth = np.zeros(rows * (cols + 2))
        for bound, sign in ((self.first, 1), (self.stop, -1)):
            col, inside = np.divmod(bound, group)
            square = self.rows // group * (cols + 2) + col
            for further, blocks in ((0, group - inside), (1, inside)):
                growth += sign * np.bincount(square + further, blocks, len(growth))
        return growth.reshape(rows, cols + 2).cumsum(1)[:, :cols].astype(np.int64)

    @property
    def ptr(self) -> np.ndarray:
        """(rows + 1,) int64: how many blocks there are before each row."""
        return np.append(0, np.cumsum(np.bincount(self.rows, self.stop - self.first, self.shape[0]).astype(np.int64)))

    def transposed(self) -> FullBlocks:
        """The same blocks with rows and columns exchanged."""
        shape = self.shape[1], self.shape[0]
        if _LONG_RUN * len(self.rows) < self.blocks:
            # A column's run begins where the block above is not full, and ends where that is and the block is not.
            here = BlockRuns.from_row_runs((shape[1] + 1, shape[0]), self.rows, self.first, self.stop, np.array(FULL))
            above = here.below()
            begins = here & ~above
            if _LONG_RUN * begins.count(FULL) < self.blocks:
                first, cols = begins.rows_and_cols(FULL)
                stop, cols_of_stop = (above & ~here).rows_and_cols(FULL)
                order = _stable_order(cols)
                return FullBlocks(shape, cols[order], first[order], stop[_stable_order(cols_of_stop)])
        lengths = self.stop - self.first
        rows, cols = np.repeat(self.rows, lengths), concat_ranges(self.first, lengths)
        order = _stable_order(cols)
        return FullBlocks.of(shape, cols[order], rows[order])


class PartialBlocks(NamedTuple):
    """The other blocks, (blocks,) int32 each, by row, kind and column. kinds: 1 run tile, 2 bit tile. tiles: numbers of a kind."""

    rows: np.ndarray
    cols: np.ndarray
    kinds: np.ndarray
    tiles: np.ndarray

    def transposed(self) -> PartialBlocks:
        order = _stable_order(self.cols * 3 + self.kinds)
        return PartialBlocks(self.cols[order], self.rows[order], self.kinds[order], self.tiles[order])


def sort_entries(
    entries: Entries, shape: tuple[int, int], pool: TilePool, full: FullBlocks | None = None
) -> tuple[FullBlocks, PartialBlocks, list[torch.Tensor]]:
    """One mask's entries as ``build_table`` expects them, and its run and bit tiles. full: further, full blocks."""
    rows, cols, tiles = (axis.astype(np.int32, copy=False) for axis in entries)
    is_full = tiles == FULL_TILE
    if full is None:
        full = FullBlocks.of(shape, *_sort_by_row(shape[1], rows[is_full], cols[is_full]))
    elif is_full.any():
        others = rows[is_full], cols[is_full], cols[is_full] + 1
        of_rows, first, stop = map(np.concatenate, zip(full[1:], others, strict=True))
        joined = BlockRuns.from_row_runs(shape, of_rows, first, stop, np.array(FULL))
        full = FullBlocks(shape, *joined.row_runs(FULL))
    if is_full.any():
        rows, cols, tiles = (axis[~is_full] for axis in (rows, cols, tiles))
    kinds = 1 + np.asarray(pool.is_bits, np.int32)[tiles]
    kinds_of_rows, cols, tiles = _sort_by_row(shape[1], rows * 3 + kinds, cols, tiles)
    rows, kinds = np.divmod(kinds_of_rows, 3)
    index, stacks = np.zeros(len(tiles), np.int32), []
    for kind in (1, 2):
        # Tiles are numbered by first appearance in the table, so equal masks have equal tables.
        of_kind = kinds == kind
        chosen = tiles[of_kind]
        number = np.full(len(pool.is_bits), -1, np.int32)
        number[chosen[::-1]] = np.arange(len(chosen), dtype=np.int32)[::-1]  # of several the last, so the first appearance
        used = np.flatnonzero(number >= 0)
        used = used[np.argsort(number[used])]
        number[used] = np.arange(len(used))
        index[of_kind] = number[chosen]
        stacks.append(torch.from_numpy(pad_to_two(pool.stack(used, is_bits=kind == 2))))
    return full, PartialBlocks(rows, cols, kinds, index), stacks


def _sort_by_row(n_cols: int, rows: np.ndarray, cols: np.ndarray, *others: np.ndarray) -> tuple[np.ndarray, ...]:
    """All of them, ordered by row and column."""
    key = rows * np.int64(n_cols) + cols
    if (key[1:] >= key[:-1]).all():
        return rows, cols, *others
    order = np.argsort(key, kind="stable")
    return tuple(axis[order] for axis in (rows, cols, *others))


def build_table(full: FullBlocks, partial: PartialBlocks) -> Table:
    """The table of one mask's blocks."""
    of_runs, of_bits = np.bincount(partial.rows * 2 + partial.kinds - 1, minlength=2 * full.shape[0]).reshape(-1, 2).T
    before = np.append(0, np.cumsum(of_runs + of_bits))
    of_full = full.ptr
    ptr = of_full + before
    bits = ptr[1:] - of_bits
    # Each partial block follows those before it and the full blocks of all rows up to this one.
    entry = of_full[partial.rows + 1] + np.arange(len(partial.rows))
    tiles, cols = np.zeros(ptr[-1], np.int32), np.ones(ptr[-1], np.int32)
    # A full block's column is the last one's plus 1, except where a run begins: steps, which are then summed up in place.
    lengths = full.stop - full.first
    cols[entry] = 0
    cols[np.cumsum(lengths) - lengths + before[full.rows]] = full.first - np.append(0, full.stop[:-1] - 1)[: len(lengths)]
    np.cumsum(cols, dtype=np.int32, out=cols)
    cols[entry], tiles[entry] = partial.cols, partial.tiles
    arrays = ptr[None], np.stack([bits - of_runs, bits], 1)[None], pad_to_two(cols), pad_to_two(tiles)
    return finish_table(*(torch.from_numpy(np.ascontiguousarray(a, np.int32)) for a in arrays))


def bands_of(table: Table, mask: int, cols: int, step: int = 1) -> Iterator[tuple[FullBlocks, PartialBlocks]]:
    """The reverse of ``build_table`` for one stored mask, some rows at a time, a multiple of ``step``, in bounded memory."""
    ptr, split = (bounds[mask].cpu().numpy().astype(np.int64) for bounds in (table.row_ptr, table.row_split))
    col_idx, tile_idx, rows = table.col_idx.cpu().numpy(), table.tile_idx.cpu().numpy(), len(ptr) - 1
    ends = np.append(np.arange(0, rows, step), rows)
    starts = np.searchsorted(ptr[ends], np.arange(ptr[0], ptr[-1], _BAND), side="right") - 1
    lows = union([np.zeros(1, np.int64), ends[starts]])
    for low, high in zip(lows.tolist(), [*lows[1:].tolist(), rows], strict=True):
        begin, end, row = ptr[low], ptr[high], np.arange(low, high)
        col, kinds = col_idx[begin:end], np.column_stack([ptr[low:high], split[low:high]])
        # A run begins where a column is not the next one, and where a row or a kind begins.
        begins = np.ones(end - begin + 1, bool)
        np.not_equal(col[1:], col[:-1] + 1, out=begins[1:-1])
        begins[kinds - begin] = True
        run_begin = np.flatnonzero(begins)
        run = np.searchsorted(run_begin, kinds[:, 0] - begin)
        runs = np.searchsorted(run_begin, kinds[:, 1] - begin) - run
        which = concat_ranges(run, runs)
        first = col[run_begin[which]].astype(np.int64)
        full = FullBlocks((rows, cols), np.repeat(row, runs), first, first + run_begin[which + 1] - run_begin[which])
        counts = np.column_stack([kinds[:, 2] - kinds[:, 1], ptr[low + 1 : high + 1] - kinds[:, 2]])
        entry = concat_ranges(kinds[:, 1], counts.sum(1))
        kind = np.repeat(np.tile(np.array([1, 2], np.int32), len(row)), counts.ravel())
        rows_of = np.repeat(row.astype(np.int32), counts.sum(1))
        yield full, PartialBlocks(rows_of, col_idx[entry], kind, tile_idx[entry])


def _stable_order(numbers: np.ndarray) -> np.ndarray:
    """The permutation that stably sorts (n,) integers, 0 to 2^31 - 1. NumPy sorts 16-bit ones in linear time, 32-bit ones not."""
    order = np.argsort((numbers & 0xFFFF).astype(np.uint16), kind="stable")
    high = (numbers >> 16).astype(np.uint16)
    return order[np.argsort(high[order], kind="stable")] if high.any() else order


def groups_of(ptr: np.ndarray, split: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """(rows,) integers: which group each row of one mask belongs to, from 0, the group with the heaviest row first. All 0 where
    there are no groups. ptr, split, cols: row_ptr, row_split and col_idx.

    Rows of one run of blocks that begin in the same block column, or end in the same one, form a group: under documents, causal or
    not, a document. Programs at work on rows of several long documents read more than the L2 cache holds.
    """
    count = np.diff(ptr)
    first, last = np.full(len(count), np.iinfo(np.int32).max), np.full(len(count), -1)
    for begin, end in pairwise(np.column_stack([ptr[:-1], split, ptr[1:]]).T):  # of each kind
        some = begin < end
        first[some] = np.minimum(first[some], cols[begin[some]])
        last[some] = np.maximum(last[some], cols[end[some] - 1])
    if ((last - first + 1 != count) & (count > 0)).any():
        return np.zeros(len(count), np.int64)
    ends, group = min((np.unique(side, return_inverse=True) for side in (first, last)), key=lambda found: len(found[0]))
    if len(count) < _ROWS_OF_A_GROUP * len(ends):
        return np.zeros(len(count), np.int64)
    heaviest = np.zeros(len(ends), np.int64)
    np.maximum.at(heaviest, group, count)
    rank = np.empty(len(ends), np.int64)
    rank[np.argsort(-heaviest, kind="stable")] = np.arange(len(ends))
    return rank[group]


def weights_of(count: np.ndarray) -> np.ndarray:
    """``count``, the blocks of rows, as they are ordered by: where most are about as heavy as the heaviest, these count as equal
    and stay in order of position, because neighbours read the same keys."""
    most = count.max(initial=0)
    alike = count >= _ALIKE * most
    return np.where(alike, most, count) if np.count_nonzero(alike) >= _ALIKE * len(count) else count


def work_of_whole_rows(order: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The work items of unsplit rows. order: (..., rows) int32. bounds: as from ``ordered_bounds``."""
    return torch.cat([order[..., None], bounds, bounds.new_zeros((*order.shape, WORK_FIELDS - SPLIT))], -1)


def most_splits(longest: int) -> int:
    """How many splits a table made on a device has room for. longest: the most blocks that a row may have."""
    return _SPLITS if longest >= 2 * _SPLIT_BLOCKS else 0


def split_limits() -> tuple[int, int]:
    """(splits, blocks) of tables made on a device.

    A row is heavy if it has 2 / splits of max(n, blocks) or more, n being the blocks in its mask's table. A heavy row of c blocks
    has c * splits // max(h, n // 4, blocks) splits, h being the blocks of all heavy rows: two or more, and no more than ``splits``
    in total, of 32 blocks or more, and 1 / 256 of n or more.
    """
    return _SPLITS, _SPLITS * _SPLIT_BLOCKS


def ordered_bounds(row_ptr: torch.Tensor, row_split: torch.Tensor, row_order: torch.Tensor) -> torch.Tensor:
    """(masks, rows, 4) int32, in the order of the rows: the start, start of run tiles, start of bit tiles and end of each."""
    bounds = torch.cat([row_ptr[:, :-1, None], row_split, row_ptr[:, 1:, None]], -1)
    return bounds.take_along_dim(row_order[..., None].long(), 1)


def build_split_work(
    row_ptr: torch.Tensor, row_split: torch.Tensor, row_order: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(work, splits) of a table made on a device, in operations of fixed shapes: see ``split_limits``. longest: the most blocks of
    a row. ``kernels/tables/splits.py`` does the same in one launch."""
    bounds, room = ordered_bounds(row_ptr, row_split, row_order), most_splits(longest)
    masks, rows = row_order.shape
    if not room:
        return work_of_whole_rows(row_order, bounds), row_order.new_zeros((masks, 2, SPLIT_FIELDS))
    pad = torch.nn.functional.pad
    # The row past the last is empty and stays whole.
    row, bounds = pad(row_order, (0, 1), value=rows), pad(bounds, (0, 0, 0, 1))
    count = bounds[..., 3] - bounds[..., 0]
    splits, least = split_limits()
    total = count.sum(-1, keepdim=True, dtype=torch.int32)
    heavy = count * splits >= 2 * total.clamp(min=least)
    in_heavy = (count * heavy).sum(-1, keepdim=True, dtype=torch.int32)
    parts = torch.where(heavy, count * splits // torch.maximum(in_heavy, total // 4).clamp(min=least), 1)
    end_item = parts.cumsum(-1, dtype=torch.int32)
    item = torch.arange(rows + room, dtype=torch.int32, device=row.device).expand(masks, -1).contiguous()
    row_of_item = torch.searchsorted(end_item, item, right=True).clamp(max=rows)
    fields = torch.cat([torch.stack([row, end_item - parts, parts, count], -1), bounds], -1)
    row_number, first, of_parts, length, begin, *inner, _ = fields.take_along_dim(row_of_item[..., None], 1).unbind(-1)
    low, high = (begin + length * n // of_parts for n in (item - first, item - first + 1))
    inner = [torch.minimum(torch.maximum(bound, low), high) for bound in inner]
    # The splits are the first items, in order, so a split has the number of its item.
    split_number = torch.where(of_parts > 1, item + 1, 0)
    work = torch.stack([row_number, low, *inner, high, split_number, *[torch.zeros_like(low)] * 2], -1)
    work[0, 0, ITEMS] = end_item[:, rows - 1].amax()
    split_rows = torch.stack([row, end_item - parts, parts, torch.zeros_like(row)], -1) * (parts > 1)[..., None]
    return work, pad(split_rows[:, :room], (0, 0, 0, max(0, room - rows - 1)))


def finish_table(row_ptr: torch.Tensor, row_split: torch.Tensor, col_idx: torch.Tensor, tile_idx: torch.Tensor) -> Table:
    """The table, on the CPU, with the order of its rows and its work items: whole rows, and splits of the heavy ones."""
    of_masks = zip(row_ptr.numpy(), row_split.numpy(), strict=True)
    orders, items, split_rows = zip(*(_plan_rows(*bounds, col_idx.numpy()) for bounds in of_masks), strict=True)
    work = np.zeros((len(items), max(map(len, items)), WORK_FIELDS), np.int32)
    work[..., ROW] = row_ptr.shape[1] - 1
    splits = np.zeros((len(items), max(2, *(int(one[:, 2].sum()) for one in split_rows)), SPLIT_FIELDS), np.int32)
    for mask in range(len(items)):
        work[mask, : len(items[mask])], splits[mask, : len(split_rows[mask])] = items[mask], split_rows[mask]
    if splits.any():
        work[0, 0, ITEMS] = work.shape[1]
    order = torch.from_numpy(np.stack(orders).astype(np.int32))
    return Table(row_ptr, row_split, order, col_idx, tile_idx, torch.from_numpy(work), torch.from_numpy(splits))


def _plan_rows(ptr: np.ndarray, split: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The order of the rows, the work items and the split rows of one mask: see ``Table``."""
    count, group = np.diff(ptr).astype(np.int64), groups_of(ptr, split, cols)
    mean = count.sum() / max(1, np.count_nonzero(count))
    heavy = count > max(_HEAVY_BLOCKS, _HEAVY_RATIO * mean, _HEAVY_SHARE * count.sum())
    parts = np.where(heavy, -(-count // max(_SPLIT_BLOCKS, int(_SPLIT_RATIO * mean))), 1)
    row = np.repeat(np.arange(len(count)), parts)
    part = concat_ranges(np.zeros_like(parts), parts)
    items = np.zeros((len(row), WORK_FIELDS), np.int32)
    begin, end = (ptr[row] + count[row] * n // parts[row] for n in (part, part + 1))
    items[:, ROW], items[:, BEGIN], items[:, END] = row, begin, end
    items[:, RUNS : BITS + 1] = split[row].clip(begin[:, None], end[:, None])
    items[:, SPLIT] = np.cumsum(heavy[row]) * heavy[row]
    items = items[np.lexsort((-weights_of(end - begin), group[row]))]
    first_split = np.cumsum(parts * heavy) - parts * heavy
    split_rows = np.stack([np.arange(len(count)), first_split, parts, 0 * parts], -1)[heavy]
    return np.lexsort((-weights_of(count), group)), items, split_rows.astype(np.int32)


def pad_to_two(tiles: np.ndarray) -> np.ndarray:
    # torch.compile treats lengths 0 and 1 as constants, and would recompile for a later mask with more tiles.
    return tiles if len(tiles) >= 2 else np.pad(tiles, [(0, 2 - len(tiles))] + [(0, 0)] * (tiles.ndim - 1))
