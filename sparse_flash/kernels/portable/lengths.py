"""Tokens that exist: which entries of a table's row hold any, and which hold some that do not."""

import triton
import triton.language as tl

_CHUNK = tl.constexpr(256)


@triton.jit
def valid_tokens(starts, lens, batch, length):
    """Tokens first .. last - 1 of a batch entry exist. starts, lens: pointers, or None."""
    first, last = length * 0, length
    if starts is not None:
        first = tl.maximum(tl.load(starts + batch), 0)
    if lens is not None:
        last = tl.minimum(tl.load(lens + batch), length)
    return first, last


@triton.jit
def _entries_below(index, begin, end, block):
    """How many of entries begin .. end - 1 lie in blocks before ``block``. By counting, as each step of a search waits for
    memory."""
    count = begin * 0
    for start in tl.range(begin, end, _CHUNK):
        entry = start + tl.arange(0, _CHUNK)
        blocks = tl.load(index + entry, mask=entry < end, other=2147483647)
        count += tl.sum((blocks < block).to(tl.int32), 0)
    return count


@triton.jit
def valid_of_kind(index, begin, end, first, last, length, BLOCK: tl.constexpr, SPARSE: tl.constexpr):
    """(low, whole_begin, whole_end, high): of entries begin .. end - 1, ascending, those from low to high - 1 have tokens among
    first .. last - 1, the walked axis's that exist; and all that they have within the axis's length exist from whole_begin to
    whole_end - 1. At most one is cut at either side.

    A dense walk's entries are all tiles of the axis, whatever begin and end are.
    """
    low, high = begin, begin
    if first < last:
        if SPARSE:
            low = begin + _entries_below(index, begin, end, first // BLOCK) if first > 0 else begin
            high = begin + _entries_below(index, begin, end, (last + BLOCK - 1) // BLOCK) if last < length else end
        else:
            low, high = first // BLOCK, (last + BLOCK - 1) // BLOCK
    whole_begin, whole_end = low, high
    if low < high:
        if SPARSE:
            begin_cut = tl.load(index + low) * BLOCK < first
            end_cut = ((tl.load(index + high - 1) + 1) * BLOCK > last) & (last < length)
        else:
            begin_cut = low * BLOCK < first
            end_cut = high * BLOCK > last
        whole_begin = low + begin_cut.to(tl.int32)
        whole_end = tl.maximum(whole_begin, high - end_cut.to(tl.int32))
    return low, whole_begin, whole_end, high


@triton.jit
def valid_entries(index, bounds, first, last, length, BLOCK: tl.constexpr, SPARSE: tl.constexpr):
    """What ``valid_of_kind`` says of each kind of a row's entries; a dense walk has one kind, said three times. bounds: where
    each kind begins, and where the last ends."""
    full = valid_of_kind(index, bounds[0], bounds[1], first, last, length, BLOCK, SPARSE)
    runs, bits = full, full
    if SPARSE:
        runs = valid_of_kind(index, bounds[1], bounds[2], first, last, length, BLOCK, SPARSE)
        bits = valid_of_kind(index, bounds[2], bounds[3], first, last, length, BLOCK, SPARSE)
    return full, runs, bits


@triton.jit
def cut_entry(entries, number, KINDS: tl.constexpr):
    """(begin, end) of the cut entries of one side of one kind: none, or one. number: 2 * kind + side."""
    begin, end = entries[0][0], entries[0][1]
    for other in tl.static_range(1, 2 * KINDS):
        begin = tl.where(number == other, entries[other // 2][other % 2 * 2], begin)
        end = tl.where(number == other, entries[other // 2][other % 2 * 2 + 1], end)
    return begin, end
