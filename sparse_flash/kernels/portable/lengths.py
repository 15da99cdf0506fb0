"""Lengths: which entries of a table row contain existing tokens, and which contain nonexistent ones."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

_CHUNK = tl.constexpr(256)


class ValidRange(NamedTuple):
    """Tokens first .. last - 1 of an axis exist."""

    first: Any
    last: Any


@triton.constexpr_function
def has_padding(starts, lens):
    """Whether an axis may have nonexistent tokens; known at compile time."""
    return starts is not None or lens is not None


@triton.jit
def load_valid_range(starts, lens, batch, length):
    """``ValidRange`` of a batch entry. starts, lens: pointers, or None."""
    first, last = length * 0, length
    if starts is not None:
        first = tl.maximum(tl.load(starts + batch), 0)
    if lens is not None:
        last = tl.minimum(tl.load(lens + batch), length)
    return ValidRange(first, last)


@triton.jit
def is_valid(valid, token):
    return (token >= valid.first) & (token < valid.last)


@triton.jit
def _entries_below(index, begin, end, block):
    """Counts the entries begin .. end - 1 in blocks before ``block``. A search would wait for memory in each step."""
    count = begin * 0
    for start in tl.range(begin, end, _CHUNK):
        entry = start + tl.arange(0, _CHUNK)
        blocks = tl.load(index + entry, mask=entry < end, other=2147483647)
        count += tl.sum((blocks < block).to(tl.int32), 0)
    return count


@triton.jit
def find_valid_entries(table, begin, end, valid, length, TILE: tl.constexpr):
    """(low, whole_begin, whole_end, high). Entries begin .. end - 1 are ascending. Entries low .. high - 1 have valid tokens. In
    entries whole_begin .. whole_end - 1, all tokens within the axis's length are valid. At most one entry is cut on each side.

    valid, length: of the axis that a program iterates over. TILE: of a dense loop, whose entries are all tiles of the axis; begin
    and end are unused.
    """
    first, last = valid.first, valid.last
    BLOCK: tl.constexpr = table.BLOCK if table.SPARSE else TILE
    low, high = begin, begin
    if first < last:
        if table.SPARSE:
            low = begin + _entries_below(table.index, begin, end, first // BLOCK) if first > 0 else begin
            high = begin + _entries_below(table.index, begin, end, (last + BLOCK - 1) // BLOCK) if last < length else end
        else:
            low, high = first // BLOCK, (last + BLOCK - 1) // BLOCK
    whole_begin, whole_end = low, high
    if low < high:
        if table.SPARSE:
            begin_cut = tl.load(table.index + low) * BLOCK < first
            end_cut = ((tl.load(table.index + high - 1) + 1) * BLOCK > last) & (last < length)
        else:
            begin_cut = low * BLOCK < first
            end_cut = high * BLOCK > last
        whole_begin = low + begin_cut.to(tl.int32)
        whole_end = tl.maximum(whole_begin, high - end_cut.to(tl.int32))
    return low, whole_begin, whole_end, high


@triton.jit
def find_valid_by_kind(table, bounds, valid, length, TILE: tl.constexpr):
    """``find_valid_entries`` for each kind of a row's entries; a dense loop has one kind, repeated three times.
    bounds: where each kind begins, and where the last ends."""
    full = find_valid_entries(table, bounds[0], bounds[1], valid, length, TILE)
    runs, bits = full, full
    if table.SPARSE:
        runs = find_valid_entries(table, bounds[1], bounds[2], valid, length, TILE)
        bits = find_valid_entries(table, bounds[2], bounds[3], valid, length, TILE)
    return full, runs, bits


@triton.jit
def find_cut_entry(entries, number, KINDS: tl.constexpr):
    """(begin, end) of the at most one cut entry on one side of one kind. number: 2 * kind + side."""
    begin, end = entries[0][0], entries[0][1]
    for other in tl.static_range(1, 2 * KINDS):
        begin = tl.where(number == other, entries[other // 2][other % 2 * 2], begin)
        end = tl.where(number == other, entries[other // 2][other % 2 * 2 + 1], end)
    return begin, end
