"""Rules: which blocks of a row its scores keep, as bits.

``keep``, ``mass`` and ``budget`` look for the least score that is kept, bit by bit: the scores as integers in the same order.
"""

from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.launch.launch import Recording, launch_or_repeat_alike

FLOOR_RULE, MASS, COUNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_KINDS = {"floor": FLOOR_RULE, "mass": MASS, "keep": COUNT, "budget": COUNT}
_NEVER = tl.constexpr(-2147483648)  # of blocks that may not be kept
_ALWAYS = tl.constexpr(2147483647)  # of blocks that are kept in any case, under COUNT
_TOGETHER = 1 << 15  # scores that a program holds in registers


@triton.jit
def _load_bits(words, row, number, width, exists):
    """Whether the bits of these blocks are set in a row's words: 0 or 1."""
    word = tl.load(words + row.to(tl.int64) * width + number // 32, mask=exists, other=0)
    return (word >> (number % 32)) & 1


@triton.jit
def _to_sortable(scores, possible):
    """Scores as integers in the same order; the least for blocks that may not be kept, for -inf and NaN."""
    integers = (scores + 0.0).to(tl.int32, bitcast=True)  # no -0.0
    integers = tl.where(integers < 0, integers ^ 0x7FFFFFFF, integers)
    return tl.where(possible & (scores == scores) & (scores > -float("inf")), integers, _NEVER)


@triton.jit
def _from_sortable(ordered):
    """The scores of ordered integers, 0 for negative ones."""
    return tl.where(ordered > 0, ordered, 0).to(tl.float32, bitcast=True)


class ScoreRow(NamedTuple):
    """A row of scores, of one head or of several together: element i is block i % BLOCKS of head i // BLOCKS.

    scores, allowed, forced: see ``keep_bits_kernel``. batch_head: the first one. heads: how many.
    """

    scores: Any
    allowed: Any
    forced: Any
    batch_head: Any
    heads: Any
    row: Any
    rows: Any
    blocks: Any
    width: Any


@triton.jit
def _load_sortable(of, piece, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """(scores as integers, whether they are forced: 0 or 1) of piece ``piece`` of SIZE elements; forced ones first, if they
    count."""
    element = piece * SIZE + tl.arange(0, SIZE)
    number, head = element % BLOCKS, element // BLOCKS
    exists = (number < of.blocks) & (head < of.heads)
    possible = _load_bits(of.allowed, of.row, number, of.width, exists) != 0
    is_forced = _load_bits(of.forced, of.row, number, of.width, exists)
    place = ((of.batch_head + head).to(tl.int64) * of.rows + of.row) * of.blocks + number
    values = tl.load(of.scores + place, mask=exists, other=-float("inf"))
    ordered = _to_sortable(values, possible & exists)
    if KIND == COUNT:
        ordered = tl.where(is_forced != 0, _ALWAYS, ordered)
    return ordered, is_forced


@triton.jit
def _measure_piece(ordered, least, KIND: tl.constexpr):
    """How much of what the rule counts has at least this score: blocks, or weight."""
    if KIND == MASS:
        amount = tl.sum(tl.where(ordered >= least, _from_sortable(ordered), 0.0), 0)
    else:
        amount = tl.sum((ordered >= least).to(tl.int32), 0).to(tl.float32)
    return amount


@triton.jit
def _measure_row(of, pieces, least, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """``_measure_piece`` of a row in several pieces."""
    total = tl.full((), 0.0, tl.float32)
    for piece in range(pieces):
        ordered, _ = _load_sortable(of, piece, KIND, SIZE, BLOCKS)
        total += _measure_piece(ordered, least, KIND)
    return total


@triton.jit(do_not_specialize=["rows", "blocks", "width", "heads", "first_row", "all_rows"])
def keep_bits_kernel(
    scores, allowed, forced, numbers, bits, rows, blocks, width, heads, first_row, all_rows, threshold,
    KIND: tl.constexpr, TOGETHER: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """A program has a row of one head, or with TOGETHER the rows of all heads of a batch entry.

    scores: (batch, heads, rows, blocks) float32. allowed, forced: (rows, width) int32 of bits, what may be kept and what is in any
    case. numbers: (rows,) int32, how many blocks COUNT keeps. threshold: float32, the number of the other kinds. bits: (batch,
    heads, all_rows, width) int32, to which the kept blocks are written, or added with ADDS; ``first_row`` is the first
    that is written. SIZE: elements held in registers. BLOCKS: of a row, padded to a power of two, at least 32. WHOLE: whether one
    piece has all.
    """
    row, batch_head = tl.program_id(0) % rows, tl.program_id(0) // rows
    together = heads if TOGETHER else 1
    of = ScoreRow(scores, allowed, forced, batch_head * together, together, row, rows, blocks, width)
    pieces = tl.cdiv(together * BLOCKS, SIZE)
    first, _ = _load_sortable(of, 0, KIND, SIZE, BLOCKS)
    # COUNT and MASS need the largest score with enough at or above it, and how many scores that equal it are kept.
    spare = tl.full((), 0, tl.int32)
    if KIND == FLOOR_RULE:
        least = (tl.full((), 0, tl.float32) + threshold).to(tl.int32, bitcast=True)
    else:
        wanted = tl.load(numbers + row).to(tl.float32)
        low = tl.full((), _NEVER + 1, tl.int64)
        if KIND == MASS:
            wanted = _measure_piece(first, 0, KIND) if WHOLE else _measure_row(of, pieces, 0, KIND, SIZE, BLOCKS)
            wanted *= threshold
            low = tl.full((), 0, tl.int64)
        high = tl.full((), _ALWAYS, tl.int64)
        for _ in range(32):
            middle = (low + high + 1) >> 1
            bound = middle.to(tl.int32)
            amount = _measure_piece(first, bound, KIND) if WHOLE else _measure_row(of, pieces, bound, KIND, SIZE, BLOCKS)
            low = tl.where(amount >= wanted, middle, low)
            high = tl.where(amount >= wanted, high, middle - 1)
        least = low.to(tl.int32)
        above = tl.minimum(least, _ALWAYS - 1) + 1
        amount = _measure_piece(first, above, KIND) if WHOLE else _measure_row(of, pieces, above, KIND, SIZE, BLOCKS)
        left = wanted - tl.where(least == _ALWAYS, 0.0, amount)
        if KIND == MASS:
            left = tl.ceil(tl.minimum(left / tl.maximum(_from_sortable(least), 1.0e-38), 1.0e9))
        spare = left.to(tl.int32)
    shift = tl.arange(0, 32)
    for piece in range(pieces):
        ordered, is_forced = _load_sortable(of, piece, KIND, SIZE, BLOCKS)
        if (KIND == COUNT) | (KIND == MASS):
            equal = ((ordered == least) & (ordered > _NEVER)).to(tl.int32)
            kept = (ordered > least) | ((equal != 0) & (tl.cumsum(equal, 0) <= spare))
            spare -= tl.sum(equal, 0)
        else:
            kept = (ordered >= least) & (ordered > _NEVER)
        kept = kept | (is_forced != 0)
        words = tl.sum(tl.reshape(kept.to(tl.int32), (SIZE // 32, 32)) << shift[None, :], 1)
        word = piece * (SIZE // 32) + tl.arange(0, SIZE // 32)
        place, head = word % (BLOCKS // 32), word // (BLOCKS // 32)
        exists = (place < width) & (head < together)
        target = bits + ((of.batch_head + head).to(tl.int64) * all_rows + first_row + row) * width + place
        if ADDS:
            words |= tl.load(target, mask=exists, other=0)
        tl.store(target, words, mask=exists)


def apply_rule(
    scores: Tensor, allowed: Tensor, forced: Tensor, numbers: Tensor, bits: Tensor, first_row: int, rule: str, threshold: float,
    adds: bool,
) -> None:  # fmt: skip
    """Writes the blocks that a rule keeps to ``bits``, or adds them; see ``keep_bits_kernel``. numbers: ``Limits.numbers``."""
    inputs = scores, allowed, forced, numbers, bits
    run = partial(_run, *inputs, first_row, rule, threshold, adds)
    launch_or_repeat_alike(keep_bits_kernel, None, (first_row, rule, threshold, adds), inputs, run)


def _run(scores, allowed, forced, numbers, bits, first_row, rule, threshold, adds, recording: Recording) -> None:
    batch, heads, rows, blocks = scores.shape
    together = rule == "budget"
    arguments = [scores, allowed, forced, numbers, bits, rows, blocks, bits.shape[3], heads, first_row, bits.shape[2], threshold]
    padded = max(32, triton.next_power_of_2(blocks))
    needed = padded * triton.next_power_of_2(heads) if together else padded
    size = min(_TOGETHER, needed)
    constants = {"KIND": _KINDS[rule].value, "TOGETHER": together, "SIZE": size, "BLOCKS": padded}
    constants |= {"WHOLE": size == needed, "ADDS": adds}
    grid = rows * batch * (1 if together else heads), 1
    recording.launch(keep_bits_kernel, (grid, arguments, constants, {"num_warps": min(16, max(1, size // 512))}))
