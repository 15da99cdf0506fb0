"""Tables of a call, made on the device: what each tile of queries visits itself, and for each key block the other queries that
picked it.

Their shapes depend only on the shape of the picks: no host synchronization, safe in CUDA graphs. Kernels compute a call in rounds,
so partial results take bounded memory; lists are ordered by round.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...kernels.common.grid import tile_and_batch_head
from ...kernels.launch.launch import launch
from .division import Round, SelectionSizes, count_entries, padded_count
from .tiles import VisitedBlocks

_UNKNOWN = tl.constexpr(0x7FFFFFFF)  # above every key of a sort
_CUT = tl.constexpr(1 << 30)
_QUERIES_TOGETHER = 32  # that one program of ``selection_keys_kernel`` reads
_ALWAYS_ROWS = 8192


class Pieces(NamedTuple):
    """Lists in even pieces; heavy ones are divided.

    items: (rounds, pieces, 5) int32, heaviest first: the column, the first entry, the first one whose keys all precede it, the end,
    and the number of the piece, column by column. Pieces past the last are empty.
    starts: (rounds, columns + 1) int32: the number of each column's first piece, and the end of the last.
    """

    items: torch.Tensor
    starts: torch.Tensor


class ColumnLists(NamedTuple):
    """For each key block of a round's batch-heads the queries that picked it. column: batch-head of the round * key blocks + block.

    entries: (picks,) int32: query * slots + number among the listed picks of the query, with queries numbered within the round.
    items, starts: see ``Pieces``. counts: (batch, pickers, q_len) int32, how many picks of a query are listed.
    """

    entries: torch.Tensor
    items: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _sum_within_run(key_a, bits_a, count_a, key_b, bits_b, count_b):
    """Sums within runs of equal keys."""
    same = key_a == key_b
    return key_b, bits_b | tl.where(same, bits_a, 0), count_b + tl.where(same, count_a, 0)


@triton.jit(do_not_specialize=["q_len", "offset"])
def visited_blocks_kernel(
    picks, visited, counts, blocks, bits, q_len, offset,
    LEAST: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The blocks that the tiles of QUERIES queries visit: blocks that at least LEAST of them picked, and blocks that the causal
    limit cuts for their first query.

    picks: (pickers, q_len, SLOTS) int32. visited: like picks, int8. counts: (pickers, tiles, 2) int32, how many blocks are whole,
    and how many there are. blocks: (pickers, tiles, WIDTH) int32, ascending within whole and cut ones. bits: like blocks, int64 if
    WIDE, otherwise int32; bit i: query i of the tile picked the block. offset: position of the first query.
    """
    table = tl.program_id(0).to(tl.int64)
    tile, picker = tile_and_batch_head((q_len + QUERIES - 1) // QUERIES)
    number = tl.arange(0, PADDED)
    query = tile * QUERIES + number // SLOTS
    exists = (number < QUERIES * SLOTS) & (query < q_len)
    first_pick = (picker.to(tl.int64) * q_len + tile * QUERIES) * SLOTS
    pick = tl.load(picks + first_pick + number, mask=exists, other=-1)
    position = query + offset
    kept = exists & (pick >= 0) & (pick <= position // BLOCK) & (position >= 0)
    cut = (pick + 1) * BLOCK - 1 > tile * QUERIES + offset
    key = tl.where(kept, tl.where(cut, _CUT, 0) + pick * PADDED + number, _UNKNOWN)
    key = tl.sort(key)
    kept = key != _UNKNOWN
    cut = kept & ((key & _CUT) != 0)
    number = key % PADDED
    bit = tl.full([PADDED], 1, tl.int64 if WIDE else tl.int32) << (number // SLOTS)
    one = kept.to(tl.int32)
    _, together, before = tl.associative_scan((key // PADDED, bit, one), 0, _sum_within_run)
    _, _, after = tl.associative_scan((key // PADDED, bit, one), 0, _sum_within_run, reverse=True)
    visits = kept & (cut | (before + after > LEAST))
    entry = visits & (after == 1)
    place = tl.cumsum(entry.to(tl.int32), 0) - 1
    fits = entry & (place < WIDTH)
    tl.store(blocks + table * WIDTH + place, (key & (_CUT - 1)) // PADDED, mask=fits)
    tl.store(bits + table * WIDTH + place, together, mask=fits)
    tl.store(counts + table * 2, tl.sum((entry & (cut == 0)).to(tl.int32), 0))
    tl.store(counts + table * 2 + 1, tl.sum(entry.to(tl.int32), 0))
    tl.store(visited + first_pick + number, visits.to(tl.int8), mask=kept)


def visited_blocks(picks: torch.Tensor, sizes: SelectionSizes) -> VisitedBlocks:
    """picks: (batch, kv_heads * pickers, q_len, slots) int32, contiguous."""
    # Three quarters of a tile, two queries at least: docs/performance/selection.md, "Tile sizes", has the figures of other shares.
    together, slots, least = sizes.tile_queries, sizes.slots, max(2, -(-sizes.tile_queries * 3 // 4))
    tiles, picked = triton.cdiv(sizes.q_len, together), together * slots
    # Blocks that ``least`` queries picked, and blocks that the causal limit cuts.
    width = min(picked, sizes.key_blocks, picked // least + (together - 1) // sizes.block + 2)
    wide = together > 32

    def empty(*shape, dtype=torch.int32):
        return torch.empty((*picks.shape[:2], *shape), dtype=dtype, device=picks.device)

    visited = empty(sizes.q_len, slots, dtype=torch.int8)
    counts, blocks = empty(tiles, 2), empty(tiles, width)
    bits = empty(tiles, width, dtype=torch.int64 if wide else torch.int32)
    arguments = [picks, visited, counts, blocks, bits, sizes.q_len, sizes.kv_len - sizes.q_len]
    constants = {"LEAST": least, "WIDTH": width, "SLOTS": slots, "QUERIES": together, "PADDED": padded_count(picked)}
    constants |= {"BLOCK": sizes.block, "WIDE": wide}
    options = {"num_warps": max(1, min(8, padded_count(picked) // 256))}
    launch(visited_blocks_kernel, (tiles * picks.shape[0] * picks.shape[1], 1), arguments, constants, options)
    return VisitedBlocks(counts, blocks, bits, visited)


@triton.jit(do_not_specialize=["batch_heads", "q_len", "offset", "key_blocks", "heads_together", "queries_together", "dropped"])
def selection_keys_kernel(
    picks, visited, keys, entries, counts,
    batch_heads, q_len, offset, key_blocks, heads_together, queries_together, dropped,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, PICKERS: tl.constexpr, BLOCK: tl.constexpr, VISITED: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Writes one number for each pick, to sort by: its round, its column in the lists by key block, and whether it is whole.

    picks: (batch_heads * PICKERS, q_len, SLOTS) int32. visited: like picks, int8, which picks are in no list; used if VISITED.
    keys: like picks; int16 keys are less 32,768. entries: like picks, int32, query * SLOTS + number among the listed picks of the
    query, within the round. counts: (batch_heads * PICKERS, q_len) int32, how many picks are listed. dropped: the key of unlisted
    picks. heads_together, queries_together: batch-heads and queries of a round.
    """
    unit = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    exists = unit < batch_heads * PICKERS * q_len.to(tl.int64)
    slot = tl.arange(0, PADDED)
    at = unit[:, None] * SLOTS + slot[None, :]
    some = exists[:, None] & (slot < SLOTS)[None, :]
    pick = tl.load(picks + at, mask=some, other=-1)
    picker = (unit // q_len).to(tl.int32)
    query = (unit % q_len).to(tl.int32)
    position = query + offset
    listed = some & (pick >= 0) & (pick <= (position // BLOCK)[:, None]) & (position >= 0)[:, None]
    if VISITED:
        listed = listed & (tl.load(visited + at, mask=listed, other=1) == 0)
    whole = (pick + 1) * BLOCK - 1 <= position[:, None]
    batch_head = picker // PICKERS
    ranges = (q_len + queries_together - 1) // queries_together
    round_number = batch_head // heads_together * ranges + query // queries_together
    column = (round_number * heads_together + batch_head % heads_together)[:, None] * key_blocks + pick
    key = tl.where(listed, column * 2 + whole.to(tl.int32), dropped)
    if keys.dtype.element_ty == tl.int16:
        key -= 32768
    tl.store(keys + at, key.to(keys.dtype.element_ty), mask=some)
    within = (picker % (PICKERS * heads_together)) * queries_together + query % queries_together
    rank = tl.cumsum(listed.to(tl.int32), 1) - 1
    tl.store(entries + at, within[:, None] * SLOTS + rank, mask=some)
    tl.store(counts + unit, tl.sum(listed.to(tl.int32), 1), mask=exists)


def column_lists(
    picks: torch.Tensor, visited: VisitedBlocks | None, sizes: SelectionSizes, rounds: list[Round], most: int
) -> ColumnLists:
    """Returns the lists of all picks, or of the picks that ``visited`` leaves. most: entries of a piece."""
    columns = rounds[0].heads * sizes.key_blocks
    keys = len(rounds) * columns * 2
    key = torch.empty_like(picks, dtype=torch.int16 if keys < 1 << 16 else torch.int32)
    entries, counts = torch.empty_like(picks), torch.empty(picks.shape[:3], dtype=torch.int32, device=picks.device)
    arguments = [picks, picks if visited is None else visited.picks, key, entries, counts, sizes.batch_heads]
    arguments += [sizes.q_len, sizes.kv_len - sizes.q_len, sizes.key_blocks, rounds[0].heads, rounds[0].stride, keys]
    constants = {"SLOTS": sizes.slots, "PADDED": padded_count(sizes.slots), "PICKERS": sizes.pickers}
    constants |= {"BLOCK": sizes.block, "VISITED": visited is not None, "TOGETHER": _QUERIES_TOGETHER}
    programs = triton.cdiv(counts.numel(), _QUERIES_TOGETHER)
    launch(selection_keys_kernel, (programs, 1), arguments, constants, {"num_warps": 4}, (key.dtype,))
    key, order = key.view(-1).sort(stable=True)
    first = -(1 << 15) if key.dtype == torch.int16 else 0
    bounds = torch.searchsorted(key, torch.arange(first, first + keys + 1, dtype=key.dtype, device=key.device), out_int32=True)
    begin, whole, end = (part.view(len(rounds), columns) for part in (bounds[:-1:2], bounds[1::2], bounds[2::2]))
    count = columns + count_entries(sizes, rounds) // most
    pieces = divide_lists(begin, whole, end, count, most, sizes.tile_queries)
    return ColumnLists(entries.view(-1)[order], *pieces, counts)


def always_pieces(always, rows_of_query: int) -> Pieces:
    """The columns of what is always kept, a BlockMask of one mask. rows_of_query: query heads of a key head."""
    bounds, entries = always.by_key.row_ptr, always.by_key.col_idx.shape[0]
    most = max(1, _ALWAYS_ROWS // (always.block_size * rows_of_query))
    return divide_lists(bounds[:, :-1], bounds[:, :-1], bounds[:, 1:], bounds.shape[1] - 1 + entries // most, most, 1)


def divide_lists(begin: torch.Tensor, whole: torch.Tensor, end: torch.Tensor, count: int, most: int, unit: int) -> Pieces:
    """Lists begin .. end - 1, (rounds, columns) int32, in ``count`` pieces of up to ``most`` entries, multiples of ``unit``."""
    length = end - begin
    pieces = (length + most - 1) // most
    ends = pieces.cumsum(1, dtype=torch.int32)
    number = torch.arange(count, dtype=torch.int32, device=begin.device).expand(begin.shape[0], count)
    column = torch.searchsorted(ends, number.contiguous(), right=True).clamp(max=begin.shape[1] - 1)
    divided, nth = pieces.gather(1, column), number - (ends - pieces).gather(1, column)
    size = (length.gather(1, column) + divided - 1) // divided.clamp(min=1)
    size = (size + unit - 1) // unit * unit
    stop = end.gather(1, column)
    first = torch.minimum(begin.gather(1, column) + nth * size, stop)
    last = torch.where(nth < divided, torch.minimum(first + size, stop), first)
    middle = torch.minimum(torch.maximum(whole.gather(1, column), first), last)
    items = torch.stack([column.to(torch.int32), first, middle, last, number], 2)
    order = (last - first).argsort(dim=1, descending=True, stable=True)
    return Pieces(items.gather(1, order[..., None].expand(items.shape)), torch.nn.functional.pad(ends, (1, 0)))
