"""The kernels that run before and after the backward kernel for Hopper, along whole rows: they bound dQ, prepare what a step needs
of each query, and make gradients of their sums."""

import triton
import triton.language as tl

from ..common.grid import tile_and_batch_head
from ..common.tiles import LOG2_E, load_tile, store_tile
from ..portable.sinks import sink_terms


@triton.jit(do_not_specialize=["kv_heads", "kv_len"])
def bound_kernel(
    k_tensor, v_tensor, bounds_ptr, kv_heads, kv_len, variant, DIM: tl.constexpr, DIM_V: tl.constexpr, TILE: tl.constexpr
):
    """Stores the largest element of K and the largest norm of a row of V, for each key head, into (2, heads) zeros.

    Both bound dQ. The dQ of a query is the sum of P (dP - delta) K, where the P sum to 1, and |dP| <= |dOut| |V|. Dropout sets some
    dP to 0, and gradients are divided by its share only at the end. So the dQ of each tile, and the sum over tiles, are less than
    2^31 times a power of two. In units of that power, sums are integers, and the same in any order. The unit is 2^-30 of the bound:
    about 2^-18 of dQ over 16,384 keys of random directions, while 16-bit weights round to 2^-9.
    """
    tiles = (kv_len + TILE - 1) // TILE
    tile, batch_head = tile_and_batch_head(tiles)
    batch = batch_head // kv_heads
    head = batch_head % kv_heads
    first = tile * TILE
    k = load_tile(k_tensor, batch, head, first, TILE, DIM).to(tl.float32)
    v = load_tile(v_tensor, batch, head, first, TILE, DIM_V).to(tl.float32)
    token = first + tl.arange(0, TILE)
    if variant.kv_starts is not None:
        exist = (token >= tl.load(variant.kv_starts + batch))[:, None]
        k, v = tl.where(exist, k, 0.0), tl.where(exist, v, 0.0)
    if variant.kv_lens is not None:
        exist = (token < tl.load(variant.kv_lens + batch))[:, None]
        k, v = tl.where(exist, k, 0.0), tl.where(exist, v, 0.0)
    tl.atomic_max(bounds_ptr + batch_head, tl.max(tl.max(tl.abs(k), 1), 0))
    longest = tl.max(tl.sqrt_rn(tl.sum(v * v, 1)), 0)
    tl.atomic_max(bounds_ptr + tl.num_programs(0) // tiles + batch_head, longest)


@triton.jit
def _tokens_of(starts_ptr, padded, length, BLOCK: tl.constexpr):
    """Returns (the token at a position on the axis of whole blocks, the end of its block's tokens). Without starts_ptr, blocks
    start at multiples of their size, and the end is that of the axis. starts_ptr: (blocks + 1,) int32, where each block starts,
    which is where the one before ends."""
    first = padded
    stop = length
    if starts_ptr is not None:
        first = tl.load(starts_ptr + padded // BLOCK) + padded % BLOCK
        stop = tl.load(starts_ptr + padded // BLOCK + 1)
    return first, stop


@triton.jit(do_not_specialize=["heads", "group", "q_len", "padded_q_len", "share"])
def prepare_kernel(
    out_tensor, dout_tensor, lse_ptr, dlse_ptr, dq_ptr, rows_ptr, bounds_ptr, starts_ptr, sinks, sink_sums,
    heads, group, q_len, padded_q_len, share,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE: tl.constexpr, HAS_DLSE: tl.constexpr, FIXED: tl.constexpr,
    DROPOUT: tl.constexpr, CUT: tl.constexpr, TABLE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores rows for the steps, padded to whole tiles: lse in base 2, +inf if the query keeps nothing; and delta =
    rowsum(dOut * Out) - dLse. With dropout, delta is multiplied by the kept share, by which gradients are divided at the end. Also
    stores zeros, to which dQ is added. With FIXED, also stores the power of two that is the unit of the query's dQ. CUT: whether
    some queries may not exist, whose rows of out and dout may hold anything. starts_ptr: see ``_tokens_of``. sinks: (heads,), or
    None if no gradient of sinks is needed. sink_sums: (batch, heads, tiles), the sum of a tile's ``sink_terms``."""
    tile, batch_head = tile_and_batch_head(padded_q_len // TILE)
    batch_heads = tl.num_programs(0) // (padded_q_len // TILE)
    batch = batch_head // heads
    head = batch_head % heads
    first_padded = tile * TILE
    first, stop = _tokens_of(starts_ptr, first_padded, q_len, TABLE_BLOCK)
    out = load_tile(out_tensor, batch, head, first, TILE, DIM_V).to(tl.float32)
    dout = load_tile(dout_tensor, batch, head, first, TILE, DIM_V).to(tl.float32)
    query = first + tl.arange(0, TILE)
    row = batch_head.to(tl.int64) * q_len + query
    lse = tl.load(lse_ptr + row, mask=query < stop, other=-float("inf"))
    if CUT:
        dout = tl.where((lse > -float("inf"))[:, None], dout, 0.0)
    lse = tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E)
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row, mask=query < stop, other=0.0)
    delta = tl.where(lse == float("inf"), 0.0, delta)
    if sinks is not None:
        terms = sink_terms(tl.load(sinks + head), lse, delta)
        tl.store(sink_sums + batch_head * (padded_q_len // TILE) + tile, tl.sum(terms, 0))
    if DROPOUT:
        delta *= share
    padded = batch_head.to(tl.int64) * padded_q_len + (first_padded + tl.arange(0, TILE))
    rows = batch_heads.to(tl.int64) * padded_q_len
    tl.store(rows_ptr + padded, lse)
    tl.store(rows_ptr + rows + padded, delta)
    if FIXED:
        kv_heads = batch_heads // group
        bounds = bounds_ptr + batch_head // group
        length = tl.sqrt_rn(tl.sum(dout * dout, 1))
        most = (length * tl.load(bounds + kv_heads) + tl.abs(delta)) * tl.load(bounds)
        # A number below 2^(e + 1) is at most 2^30 units of 2^(e - 29); the other half of the integer range absorbs rounding.
        exponent = tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - 127, -97)
        unit = ((29 - exponent + 127) << 23).to(tl.float32, bitcast=True)
        # Without a bound the unit is NaN, as a float sum would be.
        tl.store(rows_ptr + 2 * rows + padded, tl.where(most < float("inf"), unit, float("nan")))
    tl.store(
        dq_ptr + padded[:, None] * DIM + tl.arange(0, DIM)[None, :], tl.zeros([TILE, DIM], tl.int32).to(dq_ptr.dtype.element_ty)
    )


@triton.jit
def _from_register_order(sums, TILE: tl.constexpr, DIM: tl.constexpr):
    """Reverses ``to_register_order``: returns a (TILE, DIM) tile from TILE * DIM numbers."""
    return sums.reshape(DIM // 8, TILE // 16, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(TILE, DIM)


@triton.jit
def _store_rows(rows, tile, batch, head, first, stop, TILE: tl.constexpr, DIM: tl.constexpr):
    """Stores rows first .. stop - 1 of a tile. rows: ``Rows``, as no descriptor ends at ``stop``."""
    PIECE: tl.constexpr = 128 // rows.base.dtype.element_ty.primitive_bitwidth
    row, column = first + tl.arange(0, TILE), tl.arange(0, DIM)
    begin = batch.to(tl.int64) * rows.batch_stride + head.to(tl.int64) * rows.head_stride + row.to(tl.int64) * rows.token_stride
    exists = (row < stop)[:, None]
    if rows.pieces is not None:
        exists = exists & (column < rows.pieces * PIECE)[None, :]
    tl.store(rows.base + (begin * PIECE)[:, None] + column[None, :], tile.to(rows.base.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["heads", "group", "padded_len", "factor"])
def finish_kernel(
    grad_tensor, sums_ptr, unit_ptr, starts_ptr, heads, group, padded_len, factor,
    DIM: tl.constexpr, TILE: tl.constexpr, FIXED: tl.constexpr, TABLE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes a gradient of its sums, which are in register order: multiplies them by a factor, and converts them to the dtype and
    memory order of the gradient. group: how many consecutive sums make one gradient. TILE: rows of the added tiles. FIXED: whether
    sums are integers, in units of a power of two per row. starts_ptr: see ``_tokens_of``."""
    # Begins with the sums that were added to last, which are in the L2 cache.
    tiles = padded_len // TILE
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_head, first = number // tiles, number % tiles * TILE
    sums = tl.zeros([TILE * DIM], tl.float32)
    for member in range(group):
        row = (batch_head.to(tl.int64) * group + member) * padded_len + first
        sums += tl.load(sums_ptr + row * DIM + tl.arange(0, TILE * DIM)).to(tl.float32)
    grad = _from_register_order(sums, TILE, DIM) * factor
    if FIXED:
        unit = tl.load(unit_ptr + batch_head.to(tl.int64) * padded_len + first + tl.arange(0, TILE))
        grad = grad / unit[:, None]
    batch, head = batch_head // heads, batch_head % heads
    if starts_ptr is None:
        store_tile(grad_tensor, grad, batch, head, first, TILE, DIM)
    else:
        token, stop = _tokens_of(starts_ptr, first, 0, TABLE_BLOCK)
        _store_rows(grad_tensor, grad, batch, head, token, stop, TILE, DIM)


@triton.jit(do_not_specialize=["heads", "listed", "mask_batch_stride", "mask_head_stride", "dk_factor", "dv_factor"])
def combine_columns_kernel(
    dk_tensor, dv_tensor, sums_ptr, split_columns, mask_index, mask_batch_stride, mask_head_stride,
    heads, listed, dk_factor, dv_factor,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE: tl.constexpr, TABLE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores dK and dV of split columns: sums over their splits, in order. A program computes a tile of dK or of dV, of one head
    and one entry of ``Table.splits``. listed: the number of these entries, and of splits, for each mask."""
    TILES: tl.constexpr = TABLE_BLOCK // TILE
    tile, batch_head = tile_and_batch_head(2 * (listed // 2) * TILES)
    is_dv = tile % 2
    part = tile // 2 % TILES
    batch = batch_head // heads
    head = batch_head % heads
    mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
    entry = split_columns + (mask * listed + tile // (2 * TILES)) * 4
    column, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if count > 0:
        split = batch_head.to(tl.int64) * listed * TILES + first * TILES + part
        first_key = column * TABLE_BLOCK + part * TILE
        if is_dv == 1:
            sums_ptr += (tl.num_programs(0) // (2 * (listed // 2) * TILES)).to(tl.int64) * listed * (TABLE_BLOCK * DIM)
            dv = _sum_of_splits(sums_ptr, split, count, TILE, DIM_V, TILES)
            store_tile(dv_tensor, dv * dv_factor, batch, head, first_key, TILE, DIM_V)
        else:
            dk = _sum_of_splits(sums_ptr, split, count, TILE, DIM, TILES)
            store_tile(dk_tensor, dk * dk_factor, batch, head, first_key, TILE, DIM)


@triton.jit
def _sum_of_splits(sums_ptr, split, count, TILE: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr):
    sums = tl.zeros([TILE * DIM], tl.float32)
    for _ in range(count):
        sums += tl.load(sums_ptr + split * (TILE * DIM) + tl.arange(0, TILE * DIM))
        split += TILES
    return _from_register_order(sums, TILE, DIM)
