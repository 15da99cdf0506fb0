"""Attention over key blocks that each query picked: the backward kernels.

    1. preprocess_backward   delta = rowsum(dOut * Out) - dLse of each query and head, and its lse in base 2
    2. picked_grads      a piece of a key block's list: sums of dK and dV, and a part of dQ for each query, pick and head
    3. always_grads      the same of what is always kept and not picked, without dQ
    4. sum_key_grads     adds up the sums of a key block's pieces, in order: dK or dV
    5. sum_query_grads   adds up a query's parts in the order of its picks, and visits what is always kept: dQ

There are no atomics: gradients repeat bit for bit. ``picked_grads`` also serves the gradient of the picked blocks' masses.

Source: arXiv:2307.08691, Alg. 2; arXiv:2511.11571 (queries gathered by key block).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...kernels.common.config import padded_head_dim
from ...kernels.common.grid import tile_and_batch_head
from ...kernels.common.tiles import LOG2_E, load_tile, store_tile
from ...kernels.launch.launch import as_rows, descriptor_or_rows, launch
from . import tiles
from .configs import selection_config
from .division import Round, SelectionSizes
from .tiles import INTEGERS, ROWS

_PARTS_AHEAD = tl.constexpr(4)
_KEYS_OF_SUM = 32


@triton.jit(do_not_specialize=["heads", "q_len"])
def preprocess_backward_kernel(
    out_rows, dout_rows, lse_ptr, dlse_ptr, log2_sum_ptr, delta_ptr, heads, q_len, DIM_V: tl.constexpr, HAS_DLSE: tl.constexpr
):
    """log2_sum_ptr, delta_ptr: (batch, heads, q_len) float32. A query that keeps nothing gets a log2 sum of inf: weights of 0."""
    tile, batch_head = tile_and_batch_head(tl.cdiv(q_len, ROWS))
    first = tile * ROWS
    query = first + tl.arange(0, ROWS)
    at = batch_head.to(tl.int64) * q_len + query
    out = load_tile(out_rows, batch_head // heads, batch_head % heads, first, ROWS, DIM_V)
    dout = load_tile(dout_rows, batch_head // heads, batch_head % heads, first, ROWS, DIM_V)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, mask=query < q_len, other=0.0)
    lse = tl.load(lse_ptr + at, mask=query < q_len, other=0.0)
    tl.store(log2_sum_ptr + at, tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E), mask=query < q_len)
    tl.store(delta_ptr + at, delta, mask=query < q_len)


def preprocess_backward(out, dout, lse, dlse, log2_sum, delta) -> None:
    """Writes log2_sum and delta. dlse: None, or contiguous."""
    batch, heads, q_len, head_dim = out.shape
    dim_v = padded_head_dim(head_dim)
    arguments = [as_rows(out, dim_v), as_rows(dout, dim_v), lse, lse if dlse is None else dlse, log2_sum, delta, heads, q_len]
    grid = triton.cdiv(q_len, ROWS.value) * batch * heads, 1
    launch(preprocess_backward_kernel, grid, arguments, {"DIM_V": dim_v, "HAS_DLSE": dlse is not None}, {"num_warps": 4})


class _Block(NamedTuple):
    """Keys of a key block from ``position`` on. part: their number among the block's steps."""

    k: Any
    v: Any
    position: Any
    part: Any


@triton.jit
def _causal_mask_by_key(position, rows, call):
    """Which keys (axis 0) do not follow which queries (axis 1)."""
    key = position + tl.arange(0, call.C.TILE_N)
    return key[:, None] <= (rows.query + call.offset)[None, :]


@triton.jit
def _add_grads(dk, dv, weights, q, rows, v, call):
    """(dk, dv, dS) after a step. weights: (keys, rows)."""
    at = tiles.index_of_rows(rows, call)
    dout = tiles.load_rows(call.dout, rows, call.C.DIM_V)
    dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
    dweights = tl.dot(v, dout.T, input_precision="ieee")
    delta = tl.load(call.delta + at, mask=rows.exists, other=0.0)
    dscores = (weights * (dweights - delta[None, :])).to(q.dtype)
    return tl.dot(dscores, q, dk, input_precision="ieee"), dv, dscores


@triton.jit
def _compute_grads(
    dk, dv, part_ptr, entries, begin, end, batch_head, block, call, CUT: tl.constexpr
):  # fmt: skip
    """Sums after queries begin .. end - 1 of a list, whose parts of dQ are stored. CUT: whether keys may follow their query."""
    C: tl.constexpr = call.C
    for step in tl.range(0, tiles.steps_of_list(begin, end, call)):
        rows, entry = tiles.rows_of_list(entries, begin, end, step, batch_head, call)
        at = tiles.index_of_rows(rows, call)
        q = tiles.load_rows(call.q, rows, C.DIM)
        scores = tl.dot(block.k, q.T, input_precision="ieee") * call.score_scale
        if C.MASSES:
            at = at * C.SLOTS + entry % C.SLOTS
            lse = tl.load(call.log2_sum + at, mask=rows.exists, other=float("inf"))
            log2_sum = tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E
        else:
            log2_sum = tl.load(call.log2_sum + at, mask=rows.exists, other=float("inf"))
        weights = tl.math.exp2(scores - log2_sum[None, :])
        if CUT:
            weights = tl.where(_causal_mask_by_key(block.position, rows, call), weights, 0.0)
        if C.MASSES:
            dmass = tl.load(call.delta + at, mask=rows.exists, other=0.0)
            dscores = (weights * dmass[None, :]).to(q.dtype)
            dk = tl.dot(dscores, q, dk, input_precision="ieee")
        else:
            dk, dv, dscores = _add_grads(dk, dv, weights, q, rows, block.v, call)
        dq = tl.dot(dscores.T, block.k, input_precision="ieee") * call.scale
        part = (entry.to(tl.int64) * (C.BLOCK // C.TILE_N) + block.part) * C.MEMBERS + rows.number
        places = part_ptr + part[:, None] * C.DIM + tl.arange(0, C.DIM)[None, :]
        tl.store(places, dq.to(part_ptr.dtype.element_ty), mask=rows.exists[:, None], cache_modifier=".cs")
    return dk, dv


@triton.jit
def _zero_sums(KEYS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr):
    """dK and dV before the first step."""
    return tl.zeros([KEYS, DIM], tl.float32), tl.zeros([KEYS, DIM_V], tl.float32)


@triton.jit
def _store_sums(sums, values, row):
    """values: (keys, head_dim). row: of the first key, in float32 sums with a row for each key."""
    key = row + tl.arange(0, values.shape[0])
    tl.store(sums + key[:, None] * values.shape[1] + tl.arange(0, values.shape[1])[None, :], values)


@triton.jit
def _compute_piece(part_ptr, dk_ptr, dv_ptr, entries, piece, call):
    C: tl.constexpr = call.C
    part = tl.program_id(1)
    begin, end = tl.load(piece + 1), tl.load(piece + 3)
    if begin < end:
        whole = tl.load(piece + 2)
        batch_head, batch, kv_head, position = tiles.locate_piece(piece, call)
        position += part * C.TILE_N
        k = load_tile(call.k, batch, kv_head, position, C.TILE_N, C.DIM)
        v = k
        if not C.MASSES:
            v = load_tile(call.v, batch, kv_head, position, C.TILE_N, C.DIM_V)
        dk, dv = _zero_sums(C.TILE_N, C.DIM, C.DIM_V)
        block = _Block(k, v, position, part)
        dk, dv = _compute_grads(dk, dv, part_ptr, entries, begin, whole, batch_head, block, call, True)
        dk, dv = _compute_grads(dk, dv, part_ptr, entries, whole, end, batch_head, block, call, False)
        row = (tl.load(piece + 4).to(tl.int64) * (C.BLOCK // C.TILE_N) + part) * C.TILE_N
        _store_sums(dk_ptr, dk, row)
        if not C.MASSES:
            _store_sums(dv_ptr, dv, row)


@triton.jit(do_not_specialize=[*INTEGERS, "item"])
def picked_grads_kernel(
    q_rows, k_tensor, v_tensor, dout_rows, log2_sum_ptr, delta_ptr, part_ptr, dk_ptr, dv_ptr, entries, items, item,
    first_head, first_query, stride, kv_heads, q_len, offset, key_blocks,
    scale, score_scale,
    C: tl.constexpr,
):  # fmt: skip
    """One program per piece of a key block's list and TILE_N keys of the block. item: the round's first. part_ptr: (entries of a
    round, BLOCK // TILE_N, MEMBERS, DIM). dk_ptr, dv_ptr: (pieces of a round, BLOCK, DIM or DIM_V) float32.
    With MASSES, log2_sum_ptr is the picked blocks' lse, (batch, heads, q_len, SLOTS), whose gradient is delta_ptr; there is no dV
    and no dOut."""
    _compute_piece(
        part_ptr, dk_ptr, dv_ptr, entries, items + (item + tl.program_id(0)) * 5,
        tiles.PickedCall(q_rows, k_tensor, v_tensor, dout_rows, log2_sum_ptr, delta_ptr, None, None, scale, score_scale,
                         first_head, first_query, stride, kv_heads, q_len, offset, key_blocks, C),
    )  # fmt: skip


def picked_grads(
    operands: tiles.SelectionOperands, lists, parts, dk_sums, dv_sums, sizes: SelectionSizes, round: Round, scale: float
):
    """Writes parts and sums of one round. lists: ``lists.ColumnLists``. No dout for masses."""
    config = _config(operands.q, operands.v, sizes.block)
    n, count, masses = config.tile_n, lists.items.shape[1], operands.dout is None
    operands, widths = _arguments(operands._replace(dout=operands.q) if masses else operands, n)
    arguments = [*operands, parts, dk_sums, dv_sums, lists.entries, lists.items, round.number * count]
    arguments += [*sizes.integers(round), scale, scale * LOG2_E.value]
    constants = {"C": tiles.constants_of(sizes, *widths, MASSES=masses)}
    launch(picked_grads_kernel, (count, sizes.block // n), arguments, constants, config.options)


def _arguments(operands: tiles.SelectionOperands, tile_n: int) -> tuple[list, tuple[int, int, int]]:
    """Returns (the kernels' arguments q_rows .. delta_ptr, the constants DIM, DIM_V and TILE_N)."""
    q, k, v, dout, log2_sum, delta = operands
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    rows = as_rows(q, dim), descriptor_or_rows(k, tile_n, dim), descriptor_or_rows(v, tile_n, dim_v), as_rows(dout, dim_v)
    return [*rows, log2_sum, delta], (dim, dim_v, tile_n)


def keys_per_part(q, v, sizes: SelectionSizes) -> int:
    """Returns the keys of a program of ``picked_grads``."""
    return _config(q, v, sizes.block).tile_n


def _config(q, v, block: int):
    """block: the most keys of a program."""
    dim = max(padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3]))
    return selection_config("grad_kv", q.dtype, dim, block, q.device)


@triton.jit
def _compute_always_piece(dk_ptr, dv_ptr, items, call):
    C: tl.constexpr = call.C
    TILES_OF_ENTRY: tl.constexpr = (C.ALWAYS + C.QUERIES - 1) // C.QUERIES
    STEPS: tl.constexpr = TILES_OF_ENTRY * C.PICKERS
    PARTS: tl.constexpr = C.ALWAYS // C.TILE_N
    piece, part = items + tl.program_id(0) // PARTS * 5, tl.program_id(0) % PARTS
    begin, end = tl.load(piece + 1), tl.load(piece + 3)
    if begin < end:
        column = tl.load(piece)
        batch_head = call.first_head + tl.program_id(1)
        batch, kv_head = batch_head // call.kv_heads, batch_head % call.kv_heads
        position = (column * PARTS + part) * C.TILE_N
        k = load_tile(call.k, batch, kv_head, position, C.TILE_N, C.DIM)
        v = load_tile(call.v, batch, kv_head, position, C.TILE_N, C.DIM_V)
        dk, dv = _zero_sums(C.TILE_N, C.DIM, C.DIM_V)
        key = part * C.TILE_N + tl.arange(0, C.TILE_N)
        row = tl.arange(0, ROWS)
        for step in tl.range(begin * STEPS, end * STEPS, num_stages=1):
            entry = step // STEPS
            place = step % TILES_OF_ENTRY * C.QUERIES + row // C.MEMBERS
            query = tl.load(call.always.index + entry) * C.ALWAYS + place
            exists = (row < C.QUERIES * C.MEMBERS) & (place < C.ALWAYS) & (query < call.q_len)
            head = (kv_head * C.PICKERS + step % STEPS // TILES_OF_ENTRY) * C.MEMBERS + row % C.MEMBERS
            rows = tiles.RowsOfTile(row, query, head, row, exists, batch, kv_head)
            q = tiles.load_rows(call.q, rows, C.DIM)
            log2_sum = tl.load(call.log2_sum + tiles.index_of_rows(rows, call), mask=exists, other=float("inf"))
            weights = tl.math.exp2(tl.dot(k, q.T, input_precision="ieee") * call.score_scale - log2_sum[None, :])
            picked = tiles.is_picked(tl.where(exists, tiles.picks_of_rows(rows, call), 0), exists, position // C.BLOCK, call)
            kept = _causal_mask_by_key(position, rows, call) & (exists & ~picked)[None, :]
            place = tl.where(exists, place, 0)
            weights = tiles.where_always_kept(tl.where(kept, weights, 0.0), 0.0, call, column, entry, place[None, :], key[:, None])
            dk, dv, _ = _add_grads(dk, dv, weights, q, rows, v, call)
        number = tl.program_id(1) * (tl.num_programs(0) // PARTS) + tl.load(piece + 4)
        first = (number.to(tl.int64) * PARTS + part) * C.TILE_N
        _store_sums(dk_ptr, dk, first)
        _store_sums(dv_ptr, dv, first)


@triton.jit(do_not_specialize=INTEGERS)
def always_grads_kernel(
    q_rows, k_tensor, v_tensor, dout_rows, log2_sum_ptr, delta_ptr, dk_ptr, dv_ptr, picks, items, always,
    first_head, first_query, stride, kv_heads, q_len, offset, key_blocks,
    scale, score_scale,
    C: tl.constexpr,
):  # fmt: skip
    """One program per piece of a column of what is always kept, TILE_N of its keys, and batch-head. items: ``lists.Pieces``.
    dk_ptr, dv_ptr: (batch-heads of a round, pieces, ALWAYS, DIM or DIM_V) float32. always: see
    ``always_arguments``, by key."""
    _compute_always_piece(
        dk_ptr, dv_ptr, items,
        tiles.PickedCall(q_rows, k_tensor, v_tensor, dout_rows, log2_sum_ptr, delta_ptr, picks, always, scale, score_scale,
                         first_head, first_query, stride, kv_heads, q_len, offset, key_blocks, C),
    )  # fmt: skip


def always_grads(
    operands: tiles.SelectionOperands, picks, always, columns, dk_sums, dv_sums, sizes: SelectionSizes, round: Round, scale: float
):  # fmt: skip
    """Writes sums of one round's batch-heads, over all queries. columns: ``lists.Pieces``."""
    config = _config(operands.q, operands.v, sizes.smallest_block(always))
    operands, widths = _arguments(operands, config.tile_n)
    arguments = [*operands, dk_sums, dv_sums, picks, columns.items, tiles.always_arguments(always, True, operands[-1])]
    arguments += [*sizes.integers(round), scale, scale * LOG2_E.value]
    grid = columns.items.shape[1] * (always.block_size // config.tile_n), round.heads
    constants = {"C": tiles.constants_of(sizes, *widths, ALWAYS=always.block_size)}
    launch(always_grads_kernel, grid, arguments, constants, config.options)


@triton.jit
def _sum_pieces(total, sums, begin, end, within, BLOCK: tl.constexpr):
    """total plus its rows, from row ``within`` on, of the sums begin .. end - 1."""
    DIM: tl.constexpr = total.shape[1]
    key = begin.to(tl.int64) * BLOCK + within + tl.arange(0, total.shape[0])
    for _ in tl.range(begin, end):
        total += tl.load(sums + key[:, None] * DIM + tl.arange(0, DIM)[None, :])
        key += BLOCK
    return total


@triton.jit(do_not_specialize=["first_start", "first_head", "kv_heads", "key_blocks", "always_pieces"])
def sum_key_grads_kernel(
    grad_rows, sums, starts, always_sums, always_starts, before_ptr,
    first_start, first_head, kv_heads, key_blocks, always_pieces, factor,
    DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, ALWAYS: tl.constexpr, CONTINUES: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """dK or dV of KEYS keys of a batch-head. starts: the first piece of each column, and the end of the last; this round's from
    ``first_start`` on. always_starts: the same of what is always kept, unless ALWAYS is 0. before_ptr: (batch-heads of a round,
    kv_len rounded up to KEYS, DIM) float32, the sum of the rounds before: read if CONTINUES, written unless ENDS."""
    first = tl.program_id(0) * KEYS
    within = tl.program_id(1)
    column = within * key_blocks + first // BLOCK
    row = within.to(tl.int64) * tl.num_programs(0) * KEYS + first + tl.arange(0, KEYS)
    before = before_ptr + row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    total = tl.zeros([KEYS, DIM], tl.float32)
    begin, end = tl.load(starts + first_start + column), tl.load(starts + first_start + column + 1)
    changed = row
    if CONTINUES and not ENDS:
        changed = tl.where(begin < end, row, -1)  # most rounds reach few of the keys before them
    if CONTINUES:
        total = tl.load(before, mask=(changed >= 0)[:, None], other=0.0)
    total = _sum_pieces(total, sums, begin, end, first % BLOCK, BLOCK)
    if ENDS:
        if ALWAYS != 0:
            begin = within * always_pieces + tl.load(always_starts + first // ALWAYS)
            end = within * always_pieces + tl.load(always_starts + first // ALWAYS + 1)
            total = _sum_pieces(total, always_sums, begin, end, first % ALWAYS, ALWAYS)
        own = first_head + within
        store_tile(grad_rows, total * factor, own // kv_heads, own % kv_heads, first, KEYS, DIM)
    else:
        tl.store(before, total, mask=(changed >= 0)[:, None])


def sum_key_grads(grad, sums, lists, columns, always, sizes: SelectionSizes, round: Round, factor: float):
    """Writes dk or dv of one round's batch-heads, or with more rounds of these to come, ``sums.before``. sums: of ``pieces`` of
    lists, and of the pieces of what is ``always`` kept. columns: ``lists.Pieces``, None without ``always``."""
    dim, keys = padded_head_dim(grad.shape[3]), keys_per_sum(sizes, always)
    beside = (sums.pieces, lists.starts, 0) if columns is None else (sums.always, columns.starts, columns.items.shape[1])
    arguments = [as_rows(grad, dim), sums.pieces, lists.starts, *beside[:2], sums.pieces if sums.before is None else sums.before]
    arguments += [round.number * lists.starts.shape[1], round.head, sizes.kv_heads, sizes.key_blocks, beside[2], factor]
    constants = {"DIM": dim, "KEYS": keys, "BLOCK": sizes.block, "ALWAYS": tiles.block_of(always)}
    constants |= {"CONTINUES": round.query > 0, "ENDS": round.query + round.queries == sizes.q_len}
    launch(sum_key_grads_kernel, (triton.cdiv(sizes.kv_len, keys), round.heads), arguments, constants, {"num_warps": 4})


def keys_per_sum(sizes: SelectionSizes, always) -> int:
    """Keys of a program of ``sum_key_grads``."""
    return min(_KEYS_OF_SUM, sizes.smallest_block(always))


@triton.jit
def _always_grad(rows, first_query, last_query, call):
    """What is always kept and in no picked block gives to dQ, but for ``scale``."""
    C: tl.constexpr = call.C
    dq = tl.zeros([ROWS, C.DIM], tl.float32)
    at, picks = tiles.index_of_rows(rows, call), tiles.picks_of_rows(rows, call)
    q, dout = tiles.load_rows(call.q, rows, C.DIM), tiles.load_rows(call.dout, rows, C.DIM_V)
    log2_sum = tl.load(call.log2_sum + at, mask=rows.exists, other=float("inf"))
    delta = tl.load(call.delta + at, mask=rows.exists, other=0.0)
    for row in tl.range(first_query // C.ALWAYS, last_query // C.ALWAYS + 1):
        begin, end = tiles.steps_of_always(row, call)
        for step in tl.range(begin, end, num_stages=1):
            position, kept = tiles.find_unpicked_pairs(row, step, rows, picks, call)
            k = load_tile(call.k, rows.batch, rows.kv_head, position, C.TILE_N, C.DIM)
            v = load_tile(call.v, rows.batch, rows.kv_head, position, C.TILE_N, C.DIM_V)
            weights = tl.math.exp2(tl.dot(q, k.T, input_precision="ieee") * call.score_scale - log2_sum[:, None])
            weights = tl.where(kept, weights, 0.0)
            dscores = weights * (tl.dot(dout, v.T, input_precision="ieee") - delta[:, None])
            dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _compute_query_grads(dq_rows, part_ptr, listed, call):
    C: tl.constexpr = call.C
    tile, picker = tl.program_id(0), tl.program_id(1)
    rows = tiles.rows_of_tile(tile, picker, call)
    dq = tl.zeros([ROWS, C.DIM], tl.float32)
    if C.ALWAYS != 0:
        first, last = tiles.queries_of_tile(tile, call)
        dq = _always_grad(rows, first, last, call) * call.scale
    count = tl.load(listed + tiles.picks_of_rows(rows, call), mask=rows.exists, other=0) * C.PARTS
    for part in tl.range(0, tl.max(count, 0), num_stages=_PARTS_AHEAD):
        at = (rows.place.to(tl.int64) * (C.SLOTS * C.PARTS) + part) * C.MEMBERS + rows.number
        places = part_ptr + at[:, None] * C.DIM + tl.arange(0, C.DIM)[None, :]
        dq += tl.load(places, mask=(part < count)[:, None], other=0.0).to(tl.float32)
    tiles.store_rows(dq_rows, dq, rows, C.DIM)


@triton.jit(do_not_specialize=INTEGERS)
def sum_query_grads_kernel(
    q_rows, k_tensor, v_tensor, dout_rows, log2_sum_ptr, delta_ptr, dq_rows, picks, listed, part_ptr, always,
    first_head, first_query, stride, kv_heads, q_len, offset, key_blocks,
    scale, score_scale,
    C: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries of the heads that share picks, from C.PARTS parts of each pick. The rest as for
    ``visit_blocks_kernel``."""
    _compute_query_grads(
        dq_rows, part_ptr, listed,
        tiles.PickedCall(q_rows, k_tensor, v_tensor, dout_rows, log2_sum_ptr, delta_ptr, picks, always, scale, score_scale,
                         first_head, first_query, stride, kv_heads, q_len, offset, key_blocks, C),
    )  # fmt: skip


def sum_query_grads(
    operands: tiles.SelectionOperands, picks, lists, parts, always, dq, sizes: SelectionSizes, round: Round, scale: float
):  # fmt: skip
    """Writes dq of one round."""
    q, dim = operands.q, max(padded_head_dim(t.shape[3]) for t in (operands.q, operands.v))
    config = selection_config("grad_q", q.dtype, dim, sizes.smallest_block(always), q.device)
    operands, widths = _arguments(operands._replace(dout=q) if operands.dout is None else operands, config.tile_n)
    arguments = [*operands, as_rows(dq, widths[0]), picks, lists.counts, parts, tiles.always_arguments(always, False, operands[-1])]
    arguments += [*sizes.integers(round), scale, scale * LOG2_E.value]
    constants = {"C": tiles.constants_of(sizes, *widths, ALWAYS=tiles.block_of(always), PARTS=parts.shape[1])}
    launch(sum_query_grads_kernel, sizes.tiles_of(round), arguments, constants, config.options)
