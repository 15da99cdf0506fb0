"""Packed documents on an axis of whole blocks: where their rows are moved, and the table, assembled from that of one long document.

    1. lay_out      where each document starts and ends on both axes                        one program
    2. find_rows    which entries of the long document's table each block row keeps         one program per block row
    3. fill_rows    copies these entries behind the entries of the rows above               one program per block row

A block row keeps the entries of its row in the long document's table whose columns lie inside the document. Columns ascend within
full, run and bit entries, so these form one range of each kind, found by bisection.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...kernels.launch.launch import launch
from ...kernels.tables.splits import RowTensors

# Fields of a document: first token and length of its queries and keys, and the first block of each. A last column holds the ends.
Q_START = tl.constexpr(0)
Q_LEN = tl.constexpr(1)
K_START = tl.constexpr(2)
K_LEN = tl.constexpr(3)
_Q_FIRST = tl.constexpr(4)
_K_FIRST = tl.constexpr(5)
DOCUMENT_FIELDS = 6

# Fields of a block row: where its full, run and bit entries begin in the long document's table and how many there are, how many
# full entries stay full, its document, and its total number of entries.
_BEGIN = tl.constexpr(0)
_COUNT = tl.constexpr(3)
_WHOLE = tl.constexpr(6)
_DOCUMENT = tl.constexpr(7)
_TOTAL = tl.constexpr(8)
ROW_FIELDS = 9

_DOCUMENTS_TOGETHER = 1024
ROWS_TOGETHER = 512  # more do not fit the registers of one warp


class RowBounds(NamedTuple):
    """The first full, run and bit entry of a row, and the end of the bit entries."""

    begin: Any
    runs: Any
    bits: Any
    end: Any


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _load_documents(cu_seqlens, document, documents, reached, tokens, longest):
    """(first token, tokens, the end that the chunk reached) of documents. Ends that decrease or exceed the tokens cannot be
    reported without synchronizing, so they are clamped: documents neither overlap nor exceed the tokens."""
    some = document < documents
    start = tl.load(cu_seqlens + document, mask=some, other=0).to(tl.int64)
    stop = tl.load(cu_seqlens + document + 1, mask=some, other=0).to(tl.int64)
    start = tl.maximum(tl.associative_scan(tl.maximum(tl.minimum(start, tokens), 0).to(tl.int32), 0, _larger), reached)
    stop = tl.maximum(tl.associative_scan(tl.maximum(tl.minimum(stop, tokens), 0).to(tl.int32), 0, _larger), start)
    return start, tl.where(some, tl.minimum(stop - start, longest), 0), tl.maximum(tl.max(stop, 0), reached)


@triton.jit(do_not_specialize=["documents", "q_tokens", "k_tokens", "q_longest", "k_longest"])
def lay_out_kernel(
    q_cu_seqlens,
    k_cu_seqlens,
    layout,
    documents,
    q_tokens,
    k_tokens,
    q_longest,
    k_longest,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SAME: tl.constexpr,
):
    """layout: (DOCUMENT_FIELDS, documents + 1) int32. SAME: keys share the documents of the queries."""
    q_reached = documents * 0
    k_reached = documents * 0
    q_blocks = documents * 0
    k_blocks = documents * 0
    for first in range(0, documents, CHUNK):
        document = first + tl.arange(0, CHUNK)
        some = document < documents
        out = layout + document
        q_start, q_len, q_reached = _load_documents(q_cu_seqlens, document, documents, q_reached, q_tokens, q_longest)
        k_start, k_len = q_start, q_len
        if not SAME:
            k_start, k_len, k_reached = _load_documents(k_cu_seqlens, document, documents, k_reached, k_tokens, k_longest)
        # Queries start where their position falls within a block.
        q_height = tl.where(q_len > 0, (((k_len - q_len) & (BLOCK - 1)) + q_len + BLOCK - 1) // BLOCK, 0)
        k_height = (k_len + BLOCK - 1) // BLOCK
        tl.store(out + Q_START * (documents + 1), q_start, mask=some)
        tl.store(out + Q_LEN * (documents + 1), q_len, mask=some)
        tl.store(out + K_START * (documents + 1), k_start, mask=some)
        tl.store(out + K_LEN * (documents + 1), k_len, mask=some)
        tl.store(out + _Q_FIRST * (documents + 1), q_blocks + tl.cumsum(q_height, 0) - q_height, mask=some)
        tl.store(out + _K_FIRST * (documents + 1), k_blocks + tl.cumsum(k_height, 0) - k_height, mask=some)
        q_blocks += tl.sum(q_height, 0)
        k_blocks += tl.sum(k_height, 0)
    tl.store(layout + _Q_FIRST * (documents + 1) + documents, q_blocks)
    tl.store(layout + _K_FIRST * (documents + 1) + documents, k_blocks)


@triton.jit
def bisect_left(index, begin, end, value):
    """For each lane the first of begin .. end - 1 whose index is at least ``value``, or end; the index must ascend there."""
    while tl.max(end - begin, 0) > 0:
        unsettled = begin < end
        middle = (begin + end) // 2
        below = tl.load(index + middle, mask=unsettled, other=0) < value
        begin = tl.where(unsettled & below, middle + 1, begin)
        end = tl.where(unsettled & (below == 0), middle, end)
    return begin


@triton.jit
def _document_of(firsts, documents, row):
    """The last document whose blocks start at or before ``row``: the owner of this block, if it has one."""
    lane = tl.arange(0, 2)
    return tl.max(bisect_left(firsts, lane * 0, lane * 0 + documents, row + 1), 0) - 1


@triton.jit
def _load_document_blocks(layout, documents, document):
    """(first query block, query blocks, first key block, key blocks, keys) of a document."""
    line = layout + document
    q_first = tl.load(line + _Q_FIRST * (documents + 1))
    q_blocks = tl.load(line + _Q_FIRST * (documents + 1) + 1) - q_first
    k_first = tl.load(line + _K_FIRST * (documents + 1))
    k_blocks = tl.load(line + _K_FIRST * (documents + 1) + 1) - k_first
    return q_first, q_blocks, k_first, k_blocks, tl.load(line + K_LEN * (documents + 1))


@triton.jit(do_not_specialize=["documents", "rows", "before"])
def find_rows_kernel(
    layout,
    row_ptr,
    row_split,
    col_idx,
    records,
    token_of_row,
    row_of_token,
    documents,
    rows,
    before,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    SAME: tl.constexpr,
):
    """records: (ROW_FIELDS, rows) int32. before: block rows of the long document's table above position 0.

    QUERIES: whether rows are query blocks, or key blocks in the transposed table.
    """
    row = tl.program_id(0)
    stride = documents + 1
    firsts = layout + (_Q_FIRST if QUERIES else _K_FIRST) * stride
    inside = row < tl.load(firsts + documents)
    document = tl.maximum(_document_of(firsts, documents, row), 0)
    q_first, q_blocks, k_first, k_blocks, k_len = _load_document_blocks(layout, documents, document)
    # A document's queries and keys end in the same block.
    q_line = before + k_blocks - q_blocks
    if QUERIES:
        local = row - q_first
        line = q_line + local
        least, most = 0, k_blocks
    else:
        local = row - k_first
        line = local
        least, most = q_line, q_line + q_blocks
    line = tl.where(inside, line, 0)

    lane = tl.arange(0, 4)
    begin, end = tl.load(row_ptr + line), tl.load(row_ptr + line + 1)
    runs, bits = tl.load(row_split + line * 2), tl.load(row_split + line * 2 + 1)
    starts = tl.where(lane == 0, begin, tl.where(lane == 1, runs, tl.where(lane == 2, bits, end)))
    stops = tl.where(lane == 0, runs, tl.where(lane == 1, bits, end))
    stops = bisect_left(col_idx, starts, stops, most)
    if not (QUERIES or SAME):
        starts = bisect_left(col_idx, starts, stops, least)
    count = tl.where(inside, stops - starts, 0)

    whole = tl.sum(tl.where(lane == 0, count, 0), 0)
    cut = k_len % BLOCK > 0
    if QUERIES:
        last = tl.max(tl.where(lane == 0, stops, 0), 0) - 1
        ends_there = tl.load(col_idx + last, mask=whole > 0, other=-1) == k_blocks - 1
        whole -= (cut & ends_there & (whole > 0)).to(tl.int32)
    else:
        whole = tl.where(cut & (local == k_blocks - 1), 0, whole)
    tl.store(records + (_BEGIN + lane) * rows + row, starts, mask=lane < 3)
    tl.store(records + (_COUNT + lane) * rows + row, count, mask=lane < 3)
    tl.store(records + _WHOLE * rows + row, whole)
    tl.store(records + _DOCUMENT * rows + row, document)
    tl.store(records + _TOTAL * rows + row, tl.sum(count, 0))

    if QUERIES or not SAME:
        field = Q_START if QUERIES else K_START
        first_token = tl.load(layout + field * stride + document)
        length = tl.load(layout + (field + 1) * stride + document)
        skipped = (k_len - length) & (BLOCK - 1)
        place = local * BLOCK + tl.arange(0, BLOCK) - skipped
        some = (place >= 0) & (place < tl.where(inside, length, 0))
        padded = row * BLOCK + tl.arange(0, BLOCK)
        tl.store(token_of_row + padded, tl.where(some, first_token + place, -1))
        tl.store(row_of_token + first_token + place, padded, mask=some)


class Group(NamedTuple):
    """Block rows first .. stop - 1, which follow each other in the order, after ``before`` others."""

    first: Any
    stop: Any
    before: Any


@triton.jit
def locate_row(totals, row, total, rows, group, CHUNK: tl.constexpr):
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
def store_row(table, row, rank, bounds):
    """Writes a row of a table of one mask. table: ``RowTensors``. rank: see ``locate_row``."""
    tl.store(table.row_ptr + row, bounds.begin)
    tl.store(table.row_ptr + table.rows, bounds.end, mask=row == table.rows - 1)
    tl.store(table.row_split + row * 2, bounds.runs)
    tl.store(table.row_split + row * 2 + 1, bounds.bits)
    tl.store(table.row_order + rank, row)


@triton.jit
def _write_cut_tile(tile_runs, tile_bits, new_runs, new_bits, slot, tile, width, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Writes tile ``slot``: a block (KIND 0: whole; 1: a run tile; 2: a bit tile) up to ``width`` keys."""
    token = tl.arange(0, BLOCK)
    if KIND == 2:
        WORDS: tl.constexpr = BLOCK // 32
        word = tl.arange(0, WORDS)[None, :]
        place = token[:, None] * WORDS + word
        words = tl.load(tile_bits + tile.to(tl.int64) * (BLOCK * WORDS) + place)
        left = width - word * 32
        kept = tl.where(left >= 32, -1, (1 << tl.maximum(tl.minimum(left, 31), 0)) - 1)
        tl.store(new_bits + slot.to(tl.int64) * (BLOCK * WORDS) + place, words & kept)
    else:
        first = token * 0
        stop = first + width
        if KIND == 1:
            run = tl.load(tile_runs + tile.to(tl.int64) * BLOCK + token)
            first = run & 0xFFFF
            stop = tl.minimum(run >> 16, width)
        tl.store(new_runs + slot.to(tl.int64) * BLOCK + token, tl.where(stop > first, first | (stop << 16), 0))


@triton.jit(do_not_specialize=["documents", "rows", "before", "run_tiles", "bit_tiles"])
def fill_rows_kernel(
    layout,
    records,
    row_ptr,
    row_split,
    row_order,
    old_col_idx,
    old_tile_idx,
    col_idx,
    tile_idx,
    old_runs,
    old_bits,
    new_runs,
    new_bits,
    documents,
    rows,
    before,
    run_tiles,
    bit_tiles,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Writes the entries of a block row, its bounds, its rank, and the tile of the entry that its document's end cuts.

    ROWS: rows processed at a time. run_tiles, bit_tiles: tile counts of the long document's table; the cut tiles of query block r
    are those numbers + r.
    """
    row = tl.program_id(0)
    total = tl.load(records + _TOTAL * rows + row)
    whole = tl.load(records + _WHOLE * rows + row)
    fulls = tl.load(records + _COUNT * rows + row)
    runs = tl.load(records + (_COUNT + 1) * rows + row)
    full_begin = tl.load(records + _BEGIN * rows + row)
    run_begin = tl.load(records + (_BEGIN + 1) * rows + row)
    bit_begin = tl.load(records + (_BEGIN + 2) * rows + row)
    document = tl.load(records + _DOCUMENT * rows + row)
    q_first, q_blocks, k_first, k_blocks, k_len = _load_document_blocks(layout, documents, document)
    begin, rank = locate_row(records + _TOTAL * rows, row, total, rows, Group(0, rows, 0), ROWS)
    bits = begin + fulls + runs
    table = RowTensors(row_ptr, row_split, row_order, rows)
    store_row(table, row, rank, RowBounds(begin, begin + whole, bits, begin + total))

    cut_width = k_len % BLOCK
    if QUERIES:
        shift = k_first
        cut_from = tl.where(cut_width > 0, k_blocks - 1, k_blocks)
    else:
        shift = q_first - (before + k_blocks - q_blocks)
        cut_from = tl.where((cut_width > 0) & (row - k_first == k_blocks - 1), 0, 0x7FFFFFFF)
    # Full entries that the end cuts become run entries and are sorted among them.
    cut_begin, cut_end = full_begin + whole, full_begin + fulls
    run_end = run_begin + runs
    for first in range(0, fulls, CHUNK):
        e = first + tl.arange(0, CHUNK)
        some = e < fulls
        col = tl.load(old_col_idx + full_begin + e, mask=some, other=0)
        place = begin + e
        tile = e * 0
        if cut_begin < cut_end:
            becomes_run = e >= whole
            low = tl.where(becomes_run & some, run_begin, run_end)
            place += tl.where(becomes_run, bisect_left(old_col_idx, low, low * 0 + run_end, col) - run_begin, 0)
            tile = tl.where(becomes_run, run_tiles + (row if QUERIES else col + shift), 0)
        tl.store(col_idx + place, col + shift, mask=some)
        tl.store(tile_idx + place, tile, mask=some)
    for first in range(0, runs, CHUNK):
        e = first + tl.arange(0, CHUNK)
        some = e < runs
        col = tl.load(old_col_idx + run_begin + e, mask=some, other=0)
        tile = tl.load(old_tile_idx + run_begin + e, mask=some, other=0)
        tile = tl.where(col >= cut_from, run_tiles + (row if QUERIES else col + shift), tile)
        place = begin + whole + e
        if cut_begin < cut_end:
            low = tl.where(some, cut_begin, cut_end)
            place += bisect_left(old_col_idx, low, low * 0 + cut_end, col) - cut_begin
        tl.store(col_idx + place, col + shift, mask=some)
        tl.store(tile_idx + place, tile, mask=some)
    bit_count = total - fulls - runs
    for first in range(0, bit_count, CHUNK):
        e = first + tl.arange(0, CHUNK)
        some = e < bit_count
        col = tl.load(old_col_idx + bit_begin + e, mask=some, other=0)
        tile = tl.load(old_tile_idx + bit_begin + e, mask=some, other=0)
        tile = tl.where(col >= cut_from, bit_tiles + (row if QUERIES else col + shift), tile)
        tl.store(col_idx + bits + e, col + shift, mask=some)
        tl.store(tile_idx + bits + e, tile, mask=some)

    if QUERIES:
        if cut_begin < cut_end:
            _write_cut_tile(old_runs, old_bits, new_runs, new_bits, run_tiles + row, row, cut_width, BLOCK, 0)
        if runs > 0:
            last = run_end - 1
            if tl.load(old_col_idx + last) >= cut_from:
                _write_cut_tile(
                    old_runs, old_bits, new_runs, new_bits, run_tiles + row, tl.load(old_tile_idx + last), cut_width, BLOCK, 1
                )
        if bit_count > 0:
            last = bit_begin + bit_count - 1
            if tl.load(old_col_idx + last) >= cut_from:
                _write_cut_tile(
                    old_runs, old_bits, new_runs, new_bits, bit_tiles + row, tl.load(old_tile_idx + last), cut_width, BLOCK, 2
                )


def lay_out(q_cu_seqlens, k_cu_seqlens, q_tokens: int, k_tokens: int, q_longest: int, k_longest: int, block: int, same: bool):
    """(DOCUMENT_FIELDS, documents + 1) int32: see the top of this module."""
    documents = len(q_cu_seqlens) - 1
    layout = torch.empty((DOCUMENT_FIELDS, documents + 1), dtype=torch.int32, device=q_cu_seqlens.device)
    arguments = [q_cu_seqlens, k_cu_seqlens, layout, documents, q_tokens, k_tokens, q_longest, k_longest]
    constants = {"BLOCK": block, "CHUNK": min(_DOCUMENTS_TOGETHER, triton.next_power_of_2(documents)), "SAME": same}
    launch(lay_out_kernel, (1, 1), arguments, constants, {"num_warps": 4}, (k_cu_seqlens.dtype,))
    return layout


def find_rows(layout, table, rows: int, before: int, block: int, maps, queries: bool, same: bool):
    """Returns (ROW_FIELDS, rows) int32 and fills ``maps``, (token_of_row, row_of_token)."""
    records = torch.empty((ROW_FIELDS, rows), dtype=torch.int32, device=layout.device)
    arguments = [layout, table.row_ptr, table.row_split, table.col_idx, records, *maps, layout.shape[1] - 1, rows, before]
    constants = {"BLOCK": block, "QUERIES": queries, "SAME": same}
    launch(find_rows_kernel, (rows, 1), arguments, constants, {"num_warps": 1})
    return records


def empty_table(rows: int, entries: int, device) -> list[torch.Tensor]:
    """Allocates row_ptr, row_split, row_order, col_idx and tile_idx of one mask."""
    shapes = (1, rows + 1), (1, rows, 2), (1, rows), (entries,), (entries,)
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]


def fill_rows(layout, records, table, tiles, new_tiles, entries: int, before: int, block: int, queries: bool):
    """(row_ptr, row_split, row_order, col_idx, tile_idx) of one mask; ``queries`` also writes the cut tiles.

    tiles: tile_runs and tile_bits of ``table``. new_tiles: with room for one more of each per block of queries. entries: the
    capacity.
    """
    rows, device = records.shape[1], layout.device
    row_ptr, row_split, row_order, col_idx, tile_idx = empty_table(rows, entries, device)
    arguments = [layout, records, row_ptr, row_split, row_order, table.col_idx, table.tile_idx, col_idx, tile_idx]
    arguments += [*tiles, *new_tiles, layout.shape[1] - 1, rows, before, *map(len, tiles)]
    constants = {"BLOCK": block, "CHUNK": 128, "ROWS": ROWS_TOGETHER, "QUERIES": queries}
    launch(fill_rows_kernel, (rows, 1), arguments, constants, {"num_warps": 1})
    return row_ptr, row_split, row_order, col_idx, tile_idx
