"""Rules: which blocks of a row its scores keep, as bits.

``keep``, ``mass`` and ``budget`` look for the least score that is kept, bit by bit: the scores as integers in the same order.
"""

import torch
import triton
import triton.language as tl

from ..launch.launch import launch

FLOOR_RULE, RELATIVE, MASS, COUNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_KINDS = {"floor": FLOOR_RULE, "relative": RELATIVE, "mass": MASS, "keep": COUNT, "budget": COUNT}
_NEVER = tl.constexpr(-2147483648)  # of blocks that may not be kept
_ALWAYS = tl.constexpr(2147483647)  # of blocks that are kept in any case, under COUNT
_TOGETHER = 1 << 14  # scores that a program holds in registers
_ROUNDING = 1e-6


@triton.jit
def _bits_of(words, row, number, width, exists):
    """Whether the bits of these blocks are set in a row's words: 0 or 1."""
    word = tl.load(words + row.to(tl.int64) * width + number // 32, mask=exists, other=0)
    return (word >> (number % 32)) & 1


@triton.jit
def _ordered(scores, possible):
    """Scores as integers in the same order; the least for blocks that may not be kept, for -inf and NaN."""
    integers = (scores + 0.0).to(tl.int32, bitcast=True)  # no -0.0
    integers = tl.where(integers < 0, integers ^ 0x7FFFFFFF, integers)
    return tl.where(possible & (scores == scores) & (scores > -float("inf")), integers, _NEVER)


@triton.jit
def _scores_at(scores, allowed, forced, line, row, rows, number, blocks, width, COUNTED: tl.constexpr):
    """(ordered scores, whether forced: 0 or 1) of some blocks of a row; forced ones first, if they count."""
    exists = number < blocks
    possible = _bits_of(allowed, row, number, width, exists) != 0
    is_forced = _bits_of(forced, row, number, width, exists)
    values = tl.load(scores + (line.to(tl.int64) * rows + row) * blocks + number, mask=exists, other=-float("inf"))
    ordered = _ordered(values, possible & exists)
    if COUNTED:
        ordered = tl.where(is_forced != 0, _ALWAYS, ordered)
    return ordered, is_forced


@triton.jit
def _weights_of(ordered):
    """The scores of ordered integers, 0 for negative ones."""
    return tl.where(ordered > 0, ordered, 0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "blocks", "width", "heads", "first_row", "all_rows"])
def keep_bits_kernel(
    scores, allowed, forced, numbers, bits, rows, blocks, width, heads, first_row, all_rows, threshold,
    KIND: tl.constexpr, TOGETHER: tl.constexpr, COPIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program has a row of one head, or with TOGETHER the row of all heads of a batch entry.

    scores: (batch, heads, rows, blocks) float32. allowed, forced: (rows, width) int32 of bits, what may be kept and what is in any
    case. numbers: (rows,) int32, how many blocks COUNT keeps. threshold: float32, the number of the other kinds. bits: (batch,
    heads * COPIES, all_rows, width) int32, to which the kept blocks are added; ``first_row`` is the first that is written.
    """
    row, line = tl.program_id(0) % rows, tl.program_id(0) // rows
    COUNTED: tl.constexpr = KIND == COUNT
    first_line, lines = line, 1
    if TOGETHER:
        first_line, lines = line * heads, heads
    block = tl.arange(0, BLOCKS)
    chunks = tl.cdiv(blocks, BLOCKS)
    # Of COUNT and MASS, the largest score with enough at or above it: its bits from the highest on, then how many equal it.
    least = tl.full((), _NEVER + 1, tl.int32)
    spare = tl.full((), 0, tl.int32)
    if KIND == RELATIVE:
        most = tl.full((), _NEVER, tl.int32)
        for piece in range(chunks):
            values, _ = _scores_at(scores, allowed, forced, first_line, row, rows, piece * BLOCKS + block, blocks, width, COUNTED)
            most = tl.maximum(most, tl.max(values, 0))
        part = _weights_of(most) * threshold
        least = tl.maximum(part.to(tl.int32, bitcast=True), 0)
    elif KIND == FLOOR_RULE:
        least = tl.full((), 0, tl.float32) + threshold
        least = least.to(tl.int32, bitcast=True)
    else:
        wanted_count = tl.load(numbers + row)
        wanted_mass = 0.0
        if KIND == MASS:
            for piece in range(chunks):
                values, _ = _scores_at(
                    scores, allowed, forced, first_line, row, rows, piece * BLOCKS + block, blocks, width, COUNTED
                )
                wanted_mass += tl.sum(_weights_of(values), 0)
            wanted_mass *= threshold
        # Weights are not negative, so their order needs 31 bits; other scores are found from the least integer on.
        low = tl.full((), _NEVER + 1, tl.int64)
        high = tl.full((), _ALWAYS, tl.int64)
        if KIND == MASS:
            low = tl.full((), 0, tl.int64)
        for _ in range(32):
            middle = (low + high + 1) >> 1
            enough = _reaches(
                scores, allowed, forced, first_line, lines, row, rows, blocks, width, middle.to(tl.int32), wanted_count,
                wanted_mass, chunks, block, KIND, BLOCKS,
            )  # fmt: skip
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        least = low.to(tl.int32)
        above_count, above_mass = _above(
            scores, allowed, forced, first_line, lines, row, rows, blocks, width, least, chunks, block, KIND, BLOCKS
        )
        if KIND == MASS:
            one = tl.maximum(_weights_of(least), 1.0e-38)
            spare = tl.ceil(tl.minimum((wanted_mass - above_mass) / one, 1.0e9)).to(tl.int32)
        else:
            spare = wanted_count - above_count
    shift = tl.arange(0, 32)
    for member in range(lines):
        for piece in range(chunks):
            number = piece * BLOCKS + block
            values, is_forced = _scores_at(scores, allowed, forced, first_line + member, row, rows, number, blocks, width, COUNTED)
            if (KIND == COUNT) | (KIND == MASS):
                equal = ((values == least) & (values > _NEVER)).to(tl.int32)
                kept = (values > least) | ((equal != 0) & (tl.cumsum(equal, 0) <= spare))
                spare -= tl.sum(equal, 0)
            else:
                kept = (values >= least) & (values > _NEVER)
            kept = kept | (is_forced != 0)
            word = tl.sum(tl.reshape(kept.to(tl.int32), (BLOCKS // 32, 32)) << shift[None, :], 1)
            place = piece * (BLOCKS // 32) + tl.arange(0, BLOCKS // 32)
            for copy in tl.static_range(COPIES):
                of_head = ((first_line + member) * COPIES + copy).to(tl.int64)
                target = bits + (of_head * all_rows + first_row + row) * width + place
                before = tl.load(target, mask=place < width, other=0)
                tl.store(target, before | word, mask=place < width)


@triton.jit
def _reaches(
    scores, allowed, forced, first_line, lines, row, rows, blocks, width, least, wanted_count, wanted_mass, chunks, block,
    KIND: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Whether the blocks with at least this score are as many, or weigh as much, as is wanted."""
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float32)
    for member in range(lines):
        for piece in range(chunks):
            values, _ = _scores_at(
                scores, allowed, forced, first_line + member, row, rows, piece * BLOCKS + block, blocks, width, KIND == COUNT
            )
            if KIND == MASS:
                mass += tl.sum(tl.where(values >= least, _weights_of(values), 0.0), 0)
            else:
                count += tl.sum((values >= least).to(tl.int32), 0)
    return mass >= wanted_mass if KIND == MASS else count >= wanted_count


@triton.jit
def _above(
    scores, allowed, forced, first_line, lines, row, rows, blocks, width, least, chunks, block, KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """(how many blocks, how much weight) above a score."""
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float32)
    for member in range(lines):
        for piece in range(chunks):
            values, _ = _scores_at(
                scores, allowed, forced, first_line + member, row, rows, piece * BLOCKS + block, blocks, width, KIND == COUNT
            )
            mass += tl.sum(tl.where(values > least, _weights_of(values), 0.0), 0)
            count += tl.sum((values > least).to(tl.int32), 0)
    return count, mass


def keep_bits(
    scores: torch.Tensor,
    allowed: torch.Tensor,
    forced: torch.Tensor,
    numbers: torch.Tensor,
    bits: torch.Tensor,
    first_row: int,
    rule: str,
    threshold: float,
) -> None:
    """Adds the blocks that a rule keeps to ``bits``; see ``keep_bits_kernel``. numbers: (rows,) int32, of "keep" and "budget" how
    many blocks of each row, of all heads together for "budget"."""
    batch, heads, rows, blocks = scores.shape
    together = rule == "budget"
    copies = bits.shape[1] // heads
    arguments = [scores, allowed, forced, numbers, bits, rows, blocks, bits.shape[3], heads, first_row, bits.shape[2]]
    wide = max(32, min(_TOGETHER, triton.next_power_of_2(blocks)))
    constants = {"KIND": _KINDS[rule].value, "TOGETHER": together, "COPIES": copies, "BLOCKS": wide}
    grid = rows * batch * (1 if together else heads), 1
    warps = min(16, max(1, wide // 512))
    launch(keep_bits_kernel, grid, [*arguments, float(threshold)], constants, {"num_warps": warps})
