"""The tables of packed documents in place, for patterns whose queries each keep one run of keys.

    1. lay_out       where each document starts and ends                                         one program
    2. find_spans    the run of each query; the key blocks that a query block touches and fills  one program per query block
    3. count_spans   how many query blocks touch and fill a key block                            one program per key block
    4. fill_spans    both tables, and the tiles of blocks that are not full                      one program per block of either

The key blocks that a query block touches are treated as one range, and the full ones as a range within it. A tile's number is then
that of the query block's first tile plus a column difference, which both tables can compute.

Blocks may start where documents start instead, see ``masks/document_blocks.py``: then find_own_spans takes the place of find_spans,
and says where. Tokens behind a document that belong to no document lie in its last blocks, and in blocks of their own. The order of
blocks is document by document, the longest first: see ``masks.table.groups_of``.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...kernels.launch.launch import launch

# Fields of a query block: the key blocks that it touches and fills, LOW .. HIGH - 1 and FULL_LOW .. FULL_HIGH - 1 within, both
# HIGH if it fills none; how many it touches, and how many of these it does not fill. Of blocks by document also the ``Group`` that
# is its document.
_LOW = tl.constexpr(0)
_FULL_LOW = tl.constexpr(1)
_FULL_HIGH = tl.constexpr(2)
_HIGH = tl.constexpr(3)
_TOUCHED = tl.constexpr(4)
_PARTIAL = tl.constexpr(5)
_GROUP_FIRST = tl.constexpr(6)
_GROUP_STOP = tl.constexpr(7)
_GROUP_BEFORE = tl.constexpr(8)
_SPAN_FIELDS = 9

_ITEM = tl.constexpr(8)  # fields of a work item: see ``Table.work``
_TILES_TOGETHER = 16
_DOCUMENTS_TOGETHER = 512
_ROWS_TOGETHER = 512  # more do not fit the registers of one warp


class SpanTable(NamedTuple):
    """The tensors of a table of one mask: see ``masks.table.Table``. work: None where ``splits.py`` makes it."""

    row_ptr: Any
    row_split: Any
    row_order: Any
    col_idx: Any
    tile_idx: Any
    work: Any = None


class Group(NamedTuple):
    """Block rows first .. stop - 1, which follow each other in the order, after ``before`` others."""

    first: Any
    stop: Any
    before: Any


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["documents", "tokens", "longest"])
def lay_out_kernel(cu_seqlens, layout, documents, tokens, longest, CHUNK: tl.constexpr):
    """layout: (2, documents) int32, the first token and the tokens of each document. Ends that decrease or exceed the tokens cannot
    be reported without synchronizing, so they are clamped: documents neither overlap nor exceed the tokens."""
    reached = documents * 0
    for first in range(0, documents, CHUNK):
        document = first + tl.arange(0, CHUNK)
        some = document < documents
        start = tl.load(cu_seqlens + document, mask=some, other=0).to(tl.int64)
        stop = tl.load(cu_seqlens + document + 1, mask=some, other=0).to(tl.int64)
        start = tl.maximum(tl.associative_scan(tl.maximum(tl.minimum(start, tokens), 0).to(tl.int32), 0, _larger), reached)
        stop = tl.maximum(tl.associative_scan(tl.maximum(tl.minimum(stop, tokens), 0).to(tl.int32), 0, _larger), start)
        tl.store(layout + document, start, mask=some)
        tl.store(layout + documents + document, tl.minimum(stop - start, longest), mask=some)
        reached = tl.maximum(tl.max(stop, 0), reached)


@triton.jit
def _locate_row(totals, row, total, rows, group, CHUNK: tl.constexpr):
    """(entries of the block rows above this one, its position in the order). Within its ``Group``, heavier block rows come first,
    and of equally heavy ones the upper."""
    begin = row * 0
    rank = row * 0 + group.before
    for first in range(0, rows, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs = tl.load(totals + other, mask=other < rows, other=-1)
        begin += tl.sum(tl.where(other < row, theirs, 0), 0)
        ahead = (theirs > total) | ((theirs == total) & (other < row))
        rank += tl.sum((ahead & (group.first <= other) & (other < group.stop)).to(tl.int32), 0)
    return begin, rank


@triton.jit
def _bisect_left(index, begin, end, value):
    """For each lane the first of begin .. end - 1 whose index is at least ``value``, or end; the index must ascend there."""
    while tl.max(end - begin, 0) > 0:
        unsettled = begin < end
        middle = (begin + end) // 2
        below = tl.load(index + middle, mask=unsettled, other=0) < value
        begin = tl.where(unsettled & below, middle + 1, begin)
        end = tl.where(unsettled & (below == 0), middle, end)
    return begin


@triton.jit(do_not_specialize=["documents", "rows", "before", "lines"])
def find_spans_kernel(queries, keys, runs, spans, bounds, documents, rows, before, lines, BLOCK: tl.constexpr):
    """queries, keys: from ``lay_out``. runs: (2, lines) int32, first and stop of each query of one long document, ``before`` of
    them above position 0. bounds: (2, rows * BLOCK) int32, the same for each packed query on the packed key axis. spans:
    (_SPAN_FIELDS, rows)."""
    row = tl.program_id(0)
    token = row * BLOCK + tl.arange(0, BLOCK)
    zero = token * 0
    # If several documents start at the same token, all except the last are empty.
    document = tl.maximum(_bisect_left(queries, zero, zero + documents, token + 1) - 1, 0)
    local = token - tl.load(queries + document)
    q_len = tl.load(queries + documents + document)
    k_start = tl.load(keys + document)
    k_len = tl.load(keys + documents + document)
    some = (local >= 0) & (local < q_len)
    line = before + local + k_len - q_len
    first = tl.load(runs + line, mask=some, other=0)
    stop = tl.minimum(tl.load(runs + lines + line, mask=some, other=0), k_len)
    _store_span(spans, bounds, row, rows, first, stop, k_start, token >= 0, BLOCK)


@triton.jit
def _store_span(spans, bounds, row, rows, first, stop, shift, exists, BLOCK: tl.constexpr):
    """Stores the runs of a query block, which ``shift`` moves to their place, and the key blocks that it touches and fills. exists:
    which queries have a say in what it fills."""
    some = first < stop
    first = tl.where(some, shift + first, 0)
    stop = tl.where(some, shift + stop, 0)
    place = row * BLOCK + tl.arange(0, BLOCK)
    tl.store(bounds + place, first)
    tl.store(bounds + rows * BLOCK + place, stop)

    all_keep = tl.sum((some | (exists == 0)).to(tl.int32), 0) == BLOCK
    low = tl.min(tl.where(some, first, 0x7FFFFFFF), 0) // BLOCK
    high = (tl.max(stop, 0) + BLOCK - 1) // BLOCK
    low = tl.minimum(low, high)  # if none keeps anything
    full_low = (tl.max(first, 0) + BLOCK - 1) // BLOCK
    full_high = tl.minimum(tl.min(tl.where(exists, stop, 0x7FFFFFFF), 0) // BLOCK, high)
    fills = all_keep & (full_low < full_high)
    full_low = tl.where(fills, full_low, high)
    full_high = tl.where(fills, full_high, high)
    tl.store(spans + _LOW * rows + row, low)
    tl.store(spans + _FULL_LOW * rows + row, full_low)
    tl.store(spans + _FULL_HIGH * rows + row, full_high)
    tl.store(spans + _HIGH * rows + row, high)
    tl.store(spans + _TOUCHED * rows + row, high - low)
    tl.store(spans + _PARTIAL * rows + row, (high - low) - (full_high - full_low))


@triton.jit(do_not_specialize=["documents", "rows", "tokens", "lines"])
def find_own_spans_kernel(
    layout, runs, spans, bounds, starts, documents, rows, tokens, lines, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """``find_spans_kernel`` for these blocks, with bounds on the axis of whole blocks. starts: (rows + 2,) int32; past the last
    block the number of tokens, and in the end how many blocks there are."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    document, first_token, first_row, end, above = row * 0 - 1, row * 0, row * 0, row * 0, row * 0
    own_blocks = row * 0
    for begin in range(0, documents, CHUNK):
        other = begin + lane
        start, stop, blocks = _load_extents(layout, other, documents, tokens, BLOCK)
        first = above + tl.cumsum(blocks, 0) - blocks
        mine = (first <= row) & (row < first + blocks)
        document = tl.maximum(document, tl.max(tl.where(mine, other, -1), 0))
        first_token += tl.sum(tl.where(mine, start, 0), 0)
        first_row += tl.sum(tl.where(mine, first, 0), 0)
        own_blocks += tl.sum(tl.where(mine, blocks, 0), 0)
        end += tl.sum(tl.where(mine, stop, 0), 0)
        above += tl.sum(blocks, 0)
    inside = document >= 0
    begin = tl.where(inside, first_token + (row - first_row) * BLOCK, tokens)
    end = tl.where(inside, end, tokens)
    tl.store(starts + row, begin)
    tl.store(starts + rows, tokens, mask=row == rows - 1)
    tl.store(starts + rows + 1, above, mask=row == rows - 1)

    before = row * 0
    for others in range(0, documents, CHUNK):
        other = others + lane
        _, _, blocks = _load_extents(layout, other, documents, tokens, BLOCK)
        longer = (blocks > own_blocks) | ((blocks == own_blocks) & (other < document))
        before += tl.sum(tl.where(longer, blocks, 0), 0)
    # Blocks of no document come last.
    first_row = tl.where(inside, first_row, above)
    tl.store(spans + _GROUP_FIRST * rows + row, first_row)
    tl.store(spans + _GROUP_STOP * rows + row, tl.where(inside, first_row + own_blocks, rows))
    tl.store(spans + _GROUP_BEFORE * rows + row, before)

    token = begin + tl.arange(0, BLOCK)
    exists = token < end
    line = layout + tl.maximum(document, 0)
    start, length = tl.load(line), tl.load(line + documents)
    position = token - start
    some = exists & (position >= 0) & (position < length)
    first = tl.load(runs + position, mask=some, other=0)
    stop = tl.minimum(tl.load(runs + lines + position, mask=some, other=0), length)
    _store_span(spans, bounds, row, rows, first, stop, first_row * BLOCK + start - first_token, exists, BLOCK)


@triton.jit
def _load_extents(layout, document, documents, tokens, BLOCK: tl.constexpr):
    """(the first token of each document, where its last block ends, how many blocks it has). Tokens before the first document, if
    there are any, lie in its blocks, and so do those behind a document."""
    starts = layout + document
    start = tl.load(starts, mask=(document > 0) & (document < documents), other=0)
    start = tl.where(document < documents, start, tokens)
    stop = tl.load(starts + 1, mask=document + 1 < documents, other=0)
    stop = tl.where(document + 1 < documents, stop, tokens)
    return start, stop, (stop - start + BLOCK - 1) // BLOCK


@triton.jit
def _load_group(spans, starts, row, rows):
    """The ``Group`` of a block by document; all blocks, if they do not start at ``starts``."""
    group = Group(0, rows, 0)
    if starts is not None:
        first, stop = tl.load(spans + _GROUP_FIRST * rows + row), tl.load(spans + _GROUP_STOP * rows + row)
        group = Group(first, stop, tl.load(spans + _GROUP_BEFORE * rows + row))
    return group


@triton.jit
def _load_spans(spans, row, rows):
    """(low, full_low, full_high, high) of query blocks; empty past the last."""
    some = row < rows
    low = tl.load(spans + _LOW * rows + row, mask=some, other=0)
    full_low = tl.load(spans + _FULL_LOW * rows + row, mask=some, other=0)
    full_high = tl.load(spans + _FULL_HIGH * rows + row, mask=some, other=0)
    return low, full_low, full_high, tl.load(spans + _HIGH * rows + row, mask=some, other=0)


@triton.jit(do_not_specialize=["rows", "k_rows"])
def count_spans_kernel(spans, counts, rows, k_rows, ROWS: tl.constexpr):
    """counts: (2, k_rows) int32, how many query blocks touch a key block, and how many fill it."""
    column = tl.program_id(0)
    touched = column * 0
    full = column * 0
    for begin in range(0, rows, ROWS):
        low, full_low, full_high, high = _load_spans(spans, begin + tl.arange(0, ROWS), rows)
        touched += tl.sum(((low <= column) & (column < high)).to(tl.int32), 0)
        full += tl.sum(((full_low <= column) & (column < full_high)).to(tl.int32), 0)
    tl.store(counts + column, touched)
    tl.store(counts + k_rows + column, full)


@triton.jit
def _name_blocks(starts, block, some):
    """The names of blocks in entries: their numbers, or the tokens with which they start."""
    names = block
    if starts is not None:
        names = tl.load(starts + block, mask=some, other=0)
    return names


@triton.jit
def _store_row(table, starts, group, row, rank, begin, partial, end, rows, BLOCK: tl.constexpr):
    """Writes the bounds of a row. rank: see ``_locate_row``. Also writes the work item of a row of blocks that start at ``starts``:
    see ``document_tables``."""
    tl.store(table.row_ptr + row, begin)
    tl.store(table.row_ptr + rows, end, mask=row == rows - 1)
    tl.store(table.row_split + row * 2, partial)
    tl.store(table.row_split + row * 2 + 1, end)
    tl.store(table.row_order + rank, row)
    if starts is not None:
        item = table.work + rank * _ITEM
        start = tl.load(starts + row)
        tl.store(item, start)
        tl.store(item + 1, begin)
        tl.store(item + 2, partial)
        tl.store(item + 3, end)
        tl.store(item + 4, end)
        tl.store(item + 5, tl.load(starts + rows + 1))
        tl.store(item + 6, row * BLOCK - start)
        tl.store(item + 7, tl.load(starts + group.stop))


@triton.jit
def _fill_row(spans, bounds, table, new_runs, starts, row, rows, BLOCK: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr):
    """A query block's part of by_query, and its tiles."""
    low, full_low, full_high, high = _load_spans(spans, row, rows)
    touched = high - low
    full = full_high - full_low
    group = _load_group(spans, starts, row, rows)
    begin, rank = _locate_row(spans + _TOUCHED * rows, row, touched, rows, group, ROWS)
    end = begin + touched
    _store_row(table, starts, group, row, rank, begin, begin + full, end, rows, BLOCK)
    for start in range(0, full, BLOCK):
        e = start + tl.arange(0, BLOCK)
        tl.store(table.col_idx + begin + e, _name_blocks(starts, full_low + e, e < full), mask=e < full)
        tl.store(table.tile_idx + begin + e, e * 0, mask=e < full)

    first_tile, _ = _locate_row(spans + _PARTIAL * rows, row, 0, rows, Group(0, rows, 0), ROWS)
    token = tl.arange(0, BLOCK)
    first = tl.load(bounds + row * BLOCK + token)[None, :]
    stop = tl.load(bounds + (rows + row) * BLOCK + token)[None, :]
    before = full_low - low
    for start in range(0, touched - full, TILES):
        e = start + tl.arange(0, TILES)
        some = e < touched - full
        column = low + tl.where(e < before, e, e + full)
        tl.store(table.col_idx + begin + full + e, _name_blocks(starts, column, some), mask=some)
        tl.store(table.tile_idx + begin + full + e, first_tile + e, mask=some)
        key = column[:, None] * BLOCK
        here = tl.minimum(tl.maximum(first - key, 0), BLOCK)
        there = tl.minimum(tl.maximum(stop - key, 0), BLOCK)
        place = (first_tile + e).to(tl.int64)[:, None] * BLOCK + token[None, :]
        tl.store(new_runs + place, tl.where(here < there, here | (there << 16), 0), mask=some[:, None])


@triton.jit
def _fill_column(spans, counts, table, starts, column, rows, k_rows, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """A key block's part of by_key."""
    touched = tl.load(counts + column)
    group = _load_group(spans, starts, column, k_rows)
    begin, rank = _locate_row(counts, column, touched, k_rows, group, ROWS)
    partial = begin + tl.load(counts + k_rows + column)
    end = begin + touched
    _store_row(table, starts, group, column, rank, begin, partial, end, k_rows, BLOCK)
    first_tile = column * 0
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        low, full_low, full_high, high = _load_spans(spans, row, rows)
        is_full = (full_low <= column) & (column < full_high)
        is_partial = (low <= column) & (column < high) & (is_full == 0)
        tiles = (high - low) - (full_high - full_low)
        tile = first_tile + tl.cumsum(tiles, 0) - tiles + column - low
        tile -= tl.where(column < full_low, 0, full_high - full_low)
        entry = begin + tl.cumsum(is_full.to(tl.int32), 0) - 1
        name = _name_blocks(starts, row, row < rows)
        tl.store(table.col_idx + entry, name, mask=is_full)
        tl.store(table.tile_idx + entry, row * 0, mask=is_full)
        entry = partial + tl.cumsum(is_partial.to(tl.int32), 0) - 1
        tl.store(table.col_idx + entry, name, mask=is_partial)
        tl.store(table.tile_idx + entry, tile, mask=is_partial)
        begin += tl.sum(is_full.to(tl.int32), 0)
        partial += tl.sum(is_partial.to(tl.int32), 0)
        first_tile += tl.sum(tiles, 0)


@triton.jit(do_not_specialize=["rows", "k_rows"])
def fill_spans_kernel(
    spans, counts, bounds, new_runs, by_query, by_key, starts, rows, k_rows,
    BLOCK: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """by_query, by_key: ``SpanTable``. starts: (rows + 2,) int32, where each block starts and, in the end, how many have tokens;
    None, and so is work, if blocks start at multiples of their size."""
    program = tl.program_id(0)
    if program < rows:
        _fill_row(spans, bounds, by_query, new_runs, starts, program, rows, BLOCK, TILES, ROWS)
    else:
        _fill_column(spans, counts, by_key, starts, program - rows, rows, k_rows, BLOCK, ROWS)


def lay_out(cu_seqlens: torch.Tensor, tokens: int, longest: int) -> torch.Tensor:
    """(2, documents) int32: see ``lay_out_kernel``."""
    documents = len(cu_seqlens) - 1
    layout = torch.empty((2, documents), dtype=torch.int32, device=cu_seqlens.device)
    constants = {"CHUNK": min(_DOCUMENTS_TOGETHER, triton.next_power_of_2(documents))}
    launch(lay_out_kernel, (1, 1), [cu_seqlens, layout, documents, tokens, longest], constants, {"num_warps": 4})
    return layout


def fill_spans(
    queries, keys, runs, rows: int, k_rows: int, before: int, entries: int, tiles: int, block: int, tokens: int | None = None
):
    """``SpanTable`` of by_query and of by_key, tile_runs, and starts: see ``fill_spans_kernel``. queries, keys: of ``lay_out``.
    rows, k_rows: blocks of the packed axes. before: lines above position 0. entries, tiles: capacities. tokens: of all documents,
    for blocks that start where documents start; then each table also has its work items."""
    kind, documents, lines = {"dtype": torch.int32, "device": runs.device}, queries.shape[1], runs.shape[1]
    shapes = (_SPAN_FIELDS, rows), (2, rows * block), (2, k_rows), (tiles, block)
    spans, bounds, counts, new_runs = (torch.empty(shape, **kind) for shape in shapes)
    constants = {"BLOCK": block}
    if tokens is None:
        starts, arguments = None, [queries, keys, runs, spans, bounds, documents, rows, before, lines]
        launch(find_spans_kernel, (rows, 1), arguments, constants, {"num_warps": 4})
    else:
        starts = torch.empty(rows + 2, **kind)
        arguments = [queries, runs, spans, bounds, starts, documents, rows, tokens, lines]
        chunk = {"CHUNK": min(_DOCUMENTS_TOGETHER, triton.next_power_of_2(documents))}
        launch(find_own_spans_kernel, (rows, 1), arguments, constants | chunk, {"num_warps": 4})
    together = {"ROWS": _ROWS_TOGETHER}
    launch(count_spans_kernel, (k_rows, 1), [spans, counts, rows, k_rows], together, {"num_warps": 4})
    tables = []
    for length in (rows, k_rows):
        shapes = (1, length + 1), (1, length, 2), (1, length), (entries,), (entries,), (1, length, _ITEM.value)
        tables.append(SpanTable(*(torch.empty(shape, **kind) for shape in (shapes[:-1] if starts is None else shapes))))
    arguments = [spans, counts, bounds, new_runs, *tables, starts, rows, k_rows]
    constants |= {"TILES": _TILES_TOGETHER, **together}
    launch(fill_spans_kernel, (rows + k_rows, 1), arguments, constants, {"num_warps": 4}, (starts is not None,))
    return *tables, new_runs, starts
