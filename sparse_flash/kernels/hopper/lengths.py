"""Lengths of sequences: which steps of a tile have existing tokens, and zeros instead of tokens that do not exist.

A tile's steps are numbered without gaps. First come whole steps of full blocks, then steps of full blocks with some nonexistent
keys, at the upper and at the lower end, then runs, then bits. ``Cuts`` has the difference between a step's number and its position
in the table.

Nonexistent tokens may hold anything, and 0 times infinity is not 0. Few tiles have such tokens. The loading warp waits for these
tiles and clears the tokens, so the computing warps need not know.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..common.gluon import async_load, barrier, opaque_zero, record, view_for_tma

PAST_THE_END = gl.constexpr(1 << 30)  # a token that no tensor has: TMA gives zeros
_CHUNK = gl.constexpr(128)
_ROWS, _COLUMNS = gl.constexpr(8), gl.constexpr(64)  # that the loading warp clears at a time


@record
class ExistingTokens:
    """Says that tokens first .. last - 1 of an axis exist."""

    first: gl.tensor
    last: gl.tensor


@record
class Cuts:
    """Holds a tile's steps and tokens as lengths leave them. Without lengths, the fields are arbitrary."""

    low: gl.tensor  # the first step with nonexistent keys at its lower end
    own: gl.tensor  # the first step with a mask tile
    shift_low: gl.tensor  # from the number of such a step to its position in the table
    shift_runs: gl.tensor
    shift_bits: gl.tensor
    other_first: gl.tensor  # tokens other_first .. other_last - 1 exist on the axis along which steps go
    other_last: gl.tensor
    own_first: gl.tensor  # tokens own_first .. own_last - 1 exist on the tile's own axis
    own_last: gl.tensor

    @gluon.jit
    def shift(self, step, bits):
        """Returns what to add to a step's number for its position in the table. bits: the tile's first step of bits."""
        partial = gl.where(step < bits, self.shift_runs, self.shift_bits)
        return gl.where(step < self.low, 0, gl.where(step < self.own, self.shift_low, partial))

    @gluon.jit
    def is_cut(self, position, length, STEP: gl.constexpr):
        """Whether some of a step's STEP tokens do not exist. Those past the axis do not count, as TMA reads zeros there."""
        return _is_cut(position, self.other_first, self.other_last, length, STEP)

    @gluon.jit
    def is_own_cut(self, position, length, TILE: gl.constexpr):
        """Whether some of the tile's own TILE tokens do not exist, in the same sense."""
        return _is_cut(position, self.own_first, self.own_last, length, TILE)


@gluon.jit
def _is_cut(position, first, last, length, COUNT: gl.constexpr):
    return (position < first) | ((position + COUNT > last) & (last < length))


@record
class TokenLengths:
    variant: gl.tuple
    q_len: gl.tensor
    kv_len: gl.tensor
    Q_CUT: gl.constexpr  # whether some queries may not exist
    KV_CUT: gl.constexpr
    ANY: gl.constexpr

    @gluon.jit
    def queries(self, batch):
        return _load_existing_tokens(self.variant.q_starts, self.variant.q_lens, batch, self.q_len)

    @gluon.jit
    def keys(self, batch):
        return _load_existing_tokens(self.variant.kv_starts, self.variant.kv_lens, batch, self.kv_len)


@gluon.jit
def _load_existing_tokens(starts, lens, batch, length):
    # Triton 3.6 fails if it knows that the first token is 0.
    first, last = opaque_zero(length), length
    if starts is not None:
        first = gl.minimum(gl.maximum(gl.load(starts + batch), 0), length)
    if lens is not None:
        last = gl.maximum(gl.minimum(gl.load(lens + batch), length), first)
    return ExistingTokens(first, last)


@gluon.jit
def new_lengths(variant, q_len, kv_len):
    Q_CUT: gl.constexpr = variant.q_starts is not None or variant.q_lens is not None
    KV_CUT: gl.constexpr = variant.kv_starts is not None or variant.kv_lens is not None
    return TokenLengths(variant, q_len, kv_len, Q_CUT, KV_CUT, Q_CUT or KV_CUT)


@gluon.jit
def _entries_below(entries, begin, end, block):
    """Returns how many of entries begin .. end - 1, which are ascending, lie in blocks before ``block``. Counts instead of
    searching, as each step of a search would wait for memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    count = begin * 0
    for start in range(begin, end, _CHUNK):
        entry = start + gl.arange(0, _CHUNK, layout=layout)
        blocks = gl.load(entries + entry, mask=entry < end, other=2147483647)
        count += gl.sum((blocks < block).to(gl.int32), 0)
    return count


@gluon.jit
def _find_existing_entries(table, begin, end, valid, length):
    """Returns (low, high): entries low .. high - 1, of begin .. end - 1, have existing tokens."""
    low, high = begin, end
    if valid.first > 0:
        low = begin + _entries_below(table.entries, begin, end, valid.first // table.BLOCK)
    if valid.last < length:
        high = begin + _entries_below(table.entries, begin, end, (valid.last + table.BLOCK - 1) // table.BLOCK)
    # Without an existing token, both count the same blocks, or one more.
    return low, gl.where(valid.first < valid.last, gl.maximum(low, high), low)


@gluon.jit
def cut_steps(lengths, table, batch, first, bounds, TILE: gl.constexpr, STEP: gl.constexpr, BY_KEY: gl.constexpr):
    """Returns (begin, runs, bits, end, ``Cuts``) of a tile, in steps. bounds: the first four, in entries of the table, or in steps
    without one."""
    STEPS: gl.constexpr = table.BLOCK // STEP if table.SPARSE else 1
    begin, runs, bits, end = bounds
    queries, keys = lengths.queries(batch), lengths.keys(batch)
    if BY_KEY:
        own, other, length = keys, queries, lengths.q_len
    else:
        own, other, length = queries, keys, lengths.kv_len
    has_own = (first < own.last) & (first + TILE > own.first)
    valid = ExistingTokens(other.first, gl.where(has_own, other.last, other.first))
    if table.SPARSE:
        low, high = _find_existing_entries(table, begin, runs, valid, length)
        runs_low, runs_high = _find_existing_entries(table, runs, bits, valid, length)
        bits_low, bits_high = _find_existing_entries(table, bits, end, valid, length)
    else:
        low = valid.first // STEP
        high = gl.where(valid.first < valid.last, (valid.last + STEP - 1) // STEP, low)
        runs_low, runs_high, bits_low, bits_high = high, high, high, high
    whole_low, whole_high = low, high
    if not BY_KEY:
        # By key, nonexistent queries get weights of 0 from their lse.
        if low < high:
            if table.SPARSE:
                below = gl.load(table.entries + low) * table.BLOCK < valid.first
                above = ((gl.load(table.entries + (high - 1)) + 1) * table.BLOCK > valid.last) & (valid.last < length)
            else:
                below = low * STEP < valid.first
                above = high * STEP > valid.last
            whole_low = low + below.to(gl.int32)
            whole_high = gl.maximum(whole_low, high - above.to(gl.int32))
    own_begin = high + (whole_low - low)
    bits_begin = own_begin + (runs_high - runs_low)
    stop = bits_begin + (bits_high - bits_low)
    if BY_KEY and not table.SPARSE:
        # A tile takes one step even if it keeps nothing: then all weights are 0.
        whole_low = gl.where(low < high, low, 0)
        whole_high = gl.where(low < high, high, 1)
        bits_begin, stop = whole_high, whole_high
    cuts = Cuts(
        low=high * STEPS,
        own=own_begin * STEPS,
        shift_low=(low - high) * STEPS,
        shift_runs=(runs_low - own_begin) * STEPS,
        shift_bits=(bits_low - bits_begin) * STEPS,
        other_first=other.first,
        other_last=other.last,
        own_first=own.first,
        own_last=own.last,
    )
    return whole_low * STEPS, whole_high * STEPS, bits_begin * STEPS, stop * STEPS, cuts


@gluon.jit
def load_existing(ring, n, tensor, source, arrived, turn, first, last, number=0):
    """Fills a piece of the stage of n, its only one or that with this number, with a tile, with zeros in rows outside first .. last
    - 1, without marking it full. arrived: the loading warp's own barrier. turn: how often this barrier was used before. Returns
    turn + 1."""
    tile = ring.stage(n, number)
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    mbarrier.expect(arrived, ROWS * COLUMNS * 2)
    async_load(tensor, source, arrived, view_for_tma(tile, tensor))
    mbarrier.wait(arrived, turn & 1)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for row in gl.static_range(0, ROWS, _ROWS):
        if (first > row) | (last < row + _ROWS):
            rows = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
            exist = ((rows >= first) & (rows < last))[:, None]
            for column in gl.static_range(0, COLUMNS, _COLUMNS):
                piece = tile.slice(row, _ROWS, dim=0).slice(column, _COLUMNS, dim=1)
                numbers = piece.load(layout)
                piece.store(gl.where(exist, numbers, gl.zeros_like(numbers)))
    fence_async_shared()
    barrier()
    return turn + 1


@gluon.jit
def new_barrier():
    """Returns a barrier for ``load_existing``."""
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    return arrived
