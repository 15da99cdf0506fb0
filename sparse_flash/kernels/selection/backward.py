"""Attention over key blocks that each query picked: the backward kernels.

    1. rows_of_softmax   delta = rowsum(dOut * Out) - dLse of each query and head, and its lse in base 2
    2. picked_grads      a piece of a key block's list: sums of dK and dV, and a part of dQ for each query, pick and head
    3. always_grads      the same of what is always kept and not picked, without dQ
    4. sum_key_grads     adds up the sums of a key block's pieces, in order: dK or dV
    5. sum_query_grads   adds up a query's parts in the order of its picks, and walks what has none: dQ

There are no atomics: gradients repeat bit for bit. ``picked_grads`` also serves the gradient of the picked blocks' masses.

Source: arXiv:2307.08691, Alg. 2; arXiv:2511.11571 (queries gathered by key block).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..common.grid import tile_and_batch_head
from ..common.tiles import LOG2_E, WalkedTable, load_tile, store_tile
from ..launch.launch import described, launch, rows_of
from .configs import selection_config
from .tiles import (
    INTEGERS,
    ROWS,
    Always,
    Lengths,
    RowsOfTile,
    SelectionOperands,
    SelectionSizes,
    Shared,
    Span,
    Turn,
    Walks,
    always_arguments,
    choices_of_rows,
    is_picked,
    kept_besides,
    lines_of_rows,
    load_rows,
    of_always,
    padded,
    queries_of_tile,
    rows_of_list,
    rows_of_tile,
    steps_of_always,
    steps_of_list,
    store_rows,
    table_of_tile,
    until_query,
)

_PARTS_AHEAD = tl.constexpr(4)
_KEYS_OF_SUM = 32


@triton.jit(do_not_specialize=["heads", "q_len"])
def rows_of_softmax_kernel(
    out_rows,
    dout_rows,
    lse_ptr,
    dlse_ptr,
    log2_sum_ptr,
    delta_ptr,
    heads,
    q_len,
    DIM_V: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """log2_sum_ptr, delta_ptr: (batch, heads, q_len) float32. A query that keeps nothing gets a log2 sum of inf: weights of 0."""
    tile, line = tile_and_batch_head(tl.cdiv(q_len, ROWS))
    first = tile * ROWS
    query = first + tl.arange(0, ROWS)
    at = line.to(tl.int64) * q_len + query
    out = load_tile(out_rows, line // heads, line % heads, first, ROWS, DIM_V)
    dout = load_tile(dout_rows, line // heads, line % heads, first, ROWS, DIM_V)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, mask=query < q_len, other=0.0)
    lse = tl.load(lse_ptr + at, mask=query < q_len, other=0.0)
    tl.store(log2_sum_ptr + at, tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E), mask=query < q_len)
    tl.store(delta_ptr + at, delta, mask=query < q_len)


def rows_of_softmax(out, dout, lse, dlse, log2_sum, delta) -> None:
    """Writes log2_sum and delta. dlse: None, or contiguous."""
    batch, heads, q_len, head_dim = out.shape
    dim_v = padded_head_dim(head_dim)
    arguments = [rows_of(out, dim_v), rows_of(dout, dim_v), lse, lse if dlse is None else dlse, log2_sum, delta, heads, q_len]
    grid = triton.cdiv(q_len, ROWS.value) * batch * heads, 1
    launch(rows_of_softmax_kernel, grid, arguments, {"DIM_V": dim_v, "HAS_DLSE": dlse is not None}, {"num_warps": 4})


class _Block(NamedTuple):
    """Keys of a key block from ``position`` on. part: their number among the block's steps."""

    k: Any
    v: Any
    position: Any
    part: Any


class _Widths(NamedTuple):
    """TILE_N: keys of a step. STEPS: of a block. score_scale: scale times log2(e)."""

    scale: Any
    score_scale: Any
    DIM: Any
    DIM_V: Any
    TILE_N: Any
    STEPS: Any


class _Gathered(NamedTuple):
    """What is gathered of queries. MASSES: whether log2_sum and delta are masses and their gradients, see ``picked_grads_kernel``.
    A constant comes last: without one, Triton 3.6 forgets those of the records, such as a stride of 1."""

    q: Any
    dout: Any
    log2_sum: Any
    delta: Any
    MASSES: Any


@triton.jit
def _keeps(position, rows, lengths, TILE_N: tl.constexpr):
    """Which keys (axis 0) do not follow which queries (axis 1)."""
    key = position + tl.arange(0, TILE_N)
    return key[:, None] <= (rows.query + lengths.offset)[None, :]


@triton.jit
def _add_grads(dk, dv, weights, q, rows, queries, v, lengths, shared, widths):
    """(dk, dv, dS) after a step. weights: (keys, rows)."""
    at = lines_of_rows(rows, lengths, shared)
    dout = load_rows(queries.dout, rows, widths.DIM_V)
    dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
    dweights = tl.dot(v, dout.T, input_precision="ieee")
    delta = tl.load(queries.delta + at, mask=rows.exists, other=0.0)
    dscores = (weights * (dweights - delta[None, :])).to(q.dtype)
    return tl.dot(dscores, q, dk, input_precision="ieee"), dv, dscores


@triton.jit
def _compute_grads(
    dk, dv, queries, part_ptr, entries, begin, end, line, block, span, lengths, shared, widths,
    CUT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sums after queries begin .. end - 1 of a list, whose parts of dQ are stored if PARTS. CUT: whether keys may follow their
    query."""
    for step in tl.range(0, steps_of_list(begin, end, shared)):
        rows, entry = rows_of_list(entries, begin, end, step, line, span, lengths, shared)
        at = lines_of_rows(rows, lengths, shared)
        q = load_rows(queries.q, rows, widths.DIM)
        scores = tl.dot(block.k, q.T, input_precision="ieee") * widths.score_scale
        if queries.MASSES:
            at = at * shared.SLOTS + entry % shared.SLOTS
            lse = tl.load(queries.log2_sum + at, mask=rows.exists, other=float("inf"))
            log2_sum = tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E
        else:
            log2_sum = tl.load(queries.log2_sum + at, mask=rows.exists, other=float("inf"))
        weights = tl.math.exp2(scores - log2_sum[None, :])
        if CUT:
            weights = tl.where(_keeps(block.position, rows, lengths, widths.TILE_N), weights, 0.0)
        if queries.MASSES:
            dmass = tl.load(queries.delta + at, mask=rows.exists, other=0.0)
            dscores = (weights * dmass[None, :]).to(q.dtype)
            dk = tl.dot(dscores, q, dk, input_precision="ieee")
        else:
            dk, dv, dscores = _add_grads(dk, dv, weights, q, rows, queries, block.v, lengths, shared, widths)
        if PARTS:
            dq = tl.dot(dscores.T, block.k, input_precision="ieee") * widths.scale
            part = (entry.to(tl.int64) * widths.STEPS + block.part) * (shared.EVERY * shared.MEMBERS) + rows.number
            places = part_ptr + part[:, None] * widths.DIM + tl.arange(0, widths.DIM)[None, :]
            tl.store(places, dq.to(part_ptr.dtype.element_ty), mask=rows.exists[:, None], cache_modifier=".cs")
    return dk, dv


@triton.jit
def _store_sums(sums, values, row):
    """values: (keys, head_dim). row: of the first key, in float32 sums with a row for each key."""
    key = row + tl.arange(0, values.shape[0])
    tl.store(sums + key[:, None] * values.shape[1] + tl.arange(0, values.shape[1])[None, :], values)


@triton.jit
def _compute_piece(
    k_tensor, v_tensor, part_ptr, dk_ptr, dv_ptr, entries, piece, queries, span, lengths, shared, widths,
    PARTS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    begin, end = tl.load(piece + 1), tl.load(piece + 3)
    if begin < end:
        column = tl.load(piece)
        whole = tl.load(piece + 2)
        own = span.line + column // lengths.key_blocks
        batch, kv_head = own // lengths.kv_heads, own % lengths.kv_heads
        position = (column % lengths.key_blocks * widths.STEPS + part) * widths.TILE_N
        k = load_tile(k_tensor, batch, kv_head, position, widths.TILE_N, widths.DIM)
        v = k
        if not queries.MASSES:
            v = load_tile(v_tensor, batch, kv_head, position, widths.TILE_N, widths.DIM_V)
        dk = tl.zeros([widths.TILE_N, widths.DIM], tl.float32)
        dv = tl.zeros([widths.TILE_N, widths.DIM_V], tl.float32)
        # fmt: off
        dk, dv = _compute_grads(dk, dv, queries, part_ptr, entries, begin, whole, own, _Block(k, v, position, part), span, lengths,
                                shared, widths, True, PARTS)
        dk, dv = _compute_grads(dk, dv, queries, part_ptr, entries, whole, end, own, _Block(k, v, position, part), span, lengths,
                                shared, widths, False, PARTS)
        # fmt: on
        row = (tl.load(piece + 4).to(tl.int64) * widths.STEPS + part) * widths.TILE_N
        _store_sums(dk_ptr, dk, row)
        if not queries.MASSES:
            _store_sums(dv_ptr, dv, row)


@triton.jit(do_not_specialize=[*INTEGERS, "item"])
def picked_grads_kernel(
    q_rows,
    k_tensor,
    v_tensor,
    dout_rows,
    log2_sum_ptr,
    delta_ptr,
    part_ptr,
    dk_ptr,
    dv_ptr,
    entries,
    items,
    item,
    line,
    choice,
    stride,
    kv_heads,
    q_len,
    offset,
    choices,
    key_blocks,
    scale,
    score_scale,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    MASSES: tl.constexpr,
    EVERY: tl.constexpr,
    MEMBERS: tl.constexpr,
    PICKERS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per piece of a key block's list and TILE_N keys of the block. item: the turn's first. part_ptr: (entries of a
    turn, BLOCK // TILE_N, EVERY, MEMBERS, DIM), used if PARTS. dk_ptr, dv_ptr: (pieces of a turn, BLOCK, DIM or DIM_V) float32.
    MASSES: of the picked blocks' lse, log2_sum_ptr (batch, heads, q_len, SLOTS), whose gradient is delta_ptr; no dV, no dOut."""
    # fmt: off
    _compute_piece(
        k_tensor, v_tensor, part_ptr, dk_ptr, dv_ptr, entries, items + (item + tl.program_id(0)) * 5,
        _Gathered(q_rows, dout_rows, log2_sum_ptr, delta_ptr, MASSES),
        Span(line, choice, stride),
        Lengths(kv_heads, q_len, offset, choices, key_blocks),
        Shared(EVERY, MEMBERS, PICKERS, SLOTS, CHOICES, TOKENS, TILES),
        _Widths(scale, score_scale, DIM, DIM_V, TILE_N, BLOCK // TILE_N),
        PARTS,
    )
    # fmt: on


def picked_grads(operands: SelectionOperands, lists, parts, dk_sums, dv_sums, sizes: SelectionSizes, turn: Turn, scale: float):
    """Writes parts, unless None, and sums of one turn. lists: ``selection.lists.ColumnLists``. No dout for masses."""
    q, k, v, dout, log2_sum, delta = operands
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    config = _config(q, v, sizes.block)
    n = config.tile_n
    count, masses = lists.items.shape[1], dout is None
    arguments = [
        rows_of(q, dim),
        described(k, n, dim),
        described(v, n, dim_v),
        rows_of(q if masses else dout, dim_v),
        log2_sum,
        delta,
    ]
    arguments += [delta if parts is None else parts, dk_sums, dv_sums, lists.entries, lists.items, turn.number * count]
    arguments += [*sizes.integers(turn), scale, scale * LOG2_E.value]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE_N": n, "BLOCK": sizes.block, "PARTS": parts is not None, "MASSES": masses}
    launch(picked_grads_kernel, (count, sizes.block // n), arguments, {**constants, **sizes.constants}, config.options)


def keys_of_part(q, v, sizes: SelectionSizes) -> int:
    """Returns the keys of a program of ``picked_grads``."""
    return _config(q, v, sizes.block).tile_n


def _config(q, v, block: int):
    """block: the most keys of a program."""
    dim = max(padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3]))
    return selection_config("grad_kv", q.dtype, dim, block, q.device)


@triton.jit
def _compute_always_piece(
    k_tensor, v_tensor, dk_ptr, dv_ptr, picks, items, always, queries, span, lengths, shared, widths,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = always.table.BLOCK
    TILES_OF_ENTRY: tl.constexpr = (SIZE + QUERIES - 1) // QUERIES
    STEPS: tl.constexpr = TILES_OF_ENTRY * shared.PICKERS
    piece, part = items + tl.program_id(0) // widths.STEPS * 5, tl.program_id(0) % widths.STEPS
    begin, end = tl.load(piece + 1), tl.load(piece + 3)
    if begin < end:
        column = tl.load(piece)
        own = span.line + tl.program_id(1)
        batch, kv_head = own // lengths.kv_heads, own % lengths.kv_heads
        position = (column * widths.STEPS + part) * widths.TILE_N
        k = load_tile(k_tensor, batch, kv_head, position, widths.TILE_N, widths.DIM)
        v = load_tile(v_tensor, batch, kv_head, position, widths.TILE_N, widths.DIM_V)
        dk = tl.zeros([widths.TILE_N, widths.DIM], tl.float32)
        dv = tl.zeros([widths.TILE_N, widths.DIM_V], tl.float32)
        key = part * widths.TILE_N + tl.arange(0, widths.TILE_N)
        row = tl.arange(0, ROWS)
        for step in tl.range(begin * STEPS, end * STEPS, num_stages=1):
            entry = step // STEPS
            place = step % TILES_OF_ENTRY * QUERIES + row // shared.MEMBERS
            query = tl.load(always.table.index + entry) * SIZE + place
            exists = (row < QUERIES * shared.MEMBERS) & (place < SIZE) & (query < lengths.q_len)
            head = (kv_head * shared.PICKERS + step % STEPS // TILES_OF_ENTRY) * shared.MEMBERS + row % shared.MEMBERS
            rows = RowsOfTile(row, query, head, row, exists, batch, kv_head)
            q = load_rows(queries.q, rows, widths.DIM)
            log2_sum = tl.load(queries.log2_sum + lines_of_rows(rows, lengths, shared), mask=exists, other=float("inf"))
            weights = tl.math.exp2(tl.dot(k, q.T, input_precision="ieee") * widths.score_scale - log2_sum[None, :])
            choice = tl.where(exists, choices_of_rows(rows, lengths, shared), 0)
            picked = is_picked(picks, choice, exists, position // BLOCK, shared.SLOTS, PADDED)
            kept = _keeps(position, rows, lengths, widths.TILE_N) & (exists & ~picked)[None, :]
            place = tl.where(exists, place, 0)
            weights = of_always(tl.where(kept, weights, 0.0), 0.0, always, column, entry, place[None, :], key[:, None])
            dk, dv, _ = _add_grads(dk, dv, weights, q, rows, queries, v, lengths, shared, widths)
        number = tl.program_id(1) * (tl.num_programs(0) // widths.STEPS) + tl.load(piece + 4)
        first = (number.to(tl.int64) * widths.STEPS + part) * widths.TILE_N
        _store_sums(dk_ptr, dk, first)
        _store_sums(dv_ptr, dv, first)


@triton.jit(do_not_specialize=INTEGERS)
def always_grads_kernel(
    q_rows,
    k_tensor,
    v_tensor,
    dout_rows,
    log2_sum_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    picks,
    items,
    row_ptr,
    row_split,
    row_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    line,
    choice,
    stride,
    kv_heads,
    q_len,
    offset,
    choices,
    key_blocks,
    scale,
    score_scale,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    ALWAYS: tl.constexpr,
    QUERIES: tl.constexpr,
    EVERY: tl.constexpr,
    MEMBERS: tl.constexpr,
    PICKERS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per piece of a column of what is always kept, TILE_N of its keys, and line. items: ``selection.lists.Pieces``.
    dk_ptr, dv_ptr: (lines of a turn, pieces, ALWAYS, DIM or DIM_V) float32. picks: (batch, kv_heads * PICKERS, choices, SLOTS).
    QUERIES: of a tile."""
    # fmt: off
    _compute_always_piece(
        k_tensor, v_tensor, dk_ptr, dv_ptr, picks, items,
        Always(row_ptr, row_split, WalkedTable(row_idx, tile_idx, tile_runs, tile_bits, ALWAYS, True)),
        _Gathered(q_rows, dout_rows, log2_sum_ptr, delta_ptr, False),
        Span(line, choice, stride),
        Lengths(kv_heads, q_len, offset, choices, key_blocks),
        Shared(EVERY, MEMBERS, PICKERS, SLOTS, CHOICES, TOKENS, TILES),
        _Widths(scale, score_scale, DIM, DIM_V, TILE_N, ALWAYS // TILE_N),
        BLOCK, PADDED, QUERIES,
    )
    # fmt: on


def always_grads(
    operands: SelectionOperands, picks, always, columns, dk_sums, dv_sums, sizes: SelectionSizes, turn: Turn, scale: float
):  # fmt: skip
    """Writes sums of one turn's lines, over all queries. columns: ``selection.lists.Pieces``."""
    items = columns.items
    q, k, v, dout, log2_sum, delta = operands
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    config = _config(q, v, sizes.smallest_block(always))
    n = config.tile_n
    arguments = [rows_of(q, dim), described(k, n, dim), described(v, n, dim_v), rows_of(dout, dim_v), log2_sum, delta]
    arguments += [dk_sums, dv_sums, picks, items, *always_arguments(always, True, delta)]
    arguments += [*sizes.integers(turn), scale, scale * LOG2_E.value]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE_N": n, "BLOCK": sizes.block, "PADDED": padded(sizes.slots)}
    constants |= {"ALWAYS": always.block_size, "QUERIES": ROWS.value // sizes.members, **sizes.constants}
    grid = items.shape[1] * (always.block_size // n), turn.lines
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


@triton.jit(do_not_specialize=["first_start", "line", "kv_heads", "key_blocks", "always_pieces"])
def sum_key_grads_kernel(
    grad_rows,
    sums,
    starts,
    always_sums,
    always_starts,
    before_ptr,
    first_start,
    line,
    kv_heads,
    key_blocks,
    always_pieces,
    factor,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALWAYS: tl.constexpr,
    CONTINUES: tl.constexpr,
    ENDS: tl.constexpr,
):
    """dK or dV of KEYS keys of a line. starts: the first piece of each column, and the end of the last; this turn's from
    ``first_start`` on. always_starts: the same of what is always kept, unless ALWAYS is 0. before_ptr: (lines of a turn, kv_len
    rounded up to KEYS, DIM) float32, the sum of the turns before: read if CONTINUES, written unless ENDS."""
    first = tl.program_id(0) * KEYS
    within_turn = tl.program_id(1)
    column = within_turn * key_blocks + first // BLOCK
    row = within_turn.to(tl.int64) * tl.num_programs(0) * KEYS + first + tl.arange(0, KEYS)
    before = before_ptr + row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    total = tl.zeros([KEYS, DIM], tl.float32)
    begin, end = tl.load(starts + first_start + column), tl.load(starts + first_start + column + 1)
    changed = row
    if CONTINUES and not ENDS:
        changed = tl.where(begin < end, row, -1)  # most turns reach few of the keys before them
    if CONTINUES:
        total = tl.load(before, mask=(changed >= 0)[:, None], other=0.0)
    total = _sum_pieces(total, sums, begin, end, first % BLOCK, BLOCK)
    if ENDS:
        if ALWAYS != 0:
            begin = within_turn * always_pieces + tl.load(always_starts + first // ALWAYS)
            end = within_turn * always_pieces + tl.load(always_starts + first // ALWAYS + 1)
            total = _sum_pieces(total, always_sums, begin, end, first % ALWAYS, ALWAYS)
        own = line + within_turn
        store_tile(grad_rows, total * factor, own // kv_heads, own % kv_heads, first, KEYS, DIM)
    else:
        tl.store(before, total, mask=(changed >= 0)[:, None])


def sum_key_grads(grad, sums, lists, columns, always, sizes: SelectionSizes, turn: Turn, factor: float):
    """Writes dk or dv of one turn's lines, or with more turns of these lines to come, ``sums.before``. sums: of ``pieces`` of
    lists, and of ``columns`` of what is always kept. columns: ``selection.lists.Pieces``, None without ``always``."""
    dim, keys = padded_head_dim(grad.shape[3]), keys_of_sum(sizes, always)
    beside = (sums.pieces, lists.starts, 0) if columns is None else (sums.columns, columns.starts, columns.items.shape[1])
    arguments = [rows_of(grad, dim), sums.pieces, lists.starts, *beside[:2], sums.pieces if sums.before is None else sums.before]
    arguments += [turn.number * lists.starts.shape[1], turn.line, sizes.kv_heads, sizes.key_blocks, beside[2], factor]
    constants = {"DIM": dim, "KEYS": keys, "BLOCK": sizes.block, "ALWAYS": always.block_size if always else 0}
    constants |= {"CONTINUES": turn.choice > 0, "ENDS": turn.choice + turn.choices == sizes.choices}
    launch(sum_key_grads_kernel, (triton.cdiv(sizes.kv_len, keys), turn.lines), arguments, constants, {"num_warps": 4})


def keys_of_sum(sizes: SelectionSizes, always) -> int:
    """Keys of a program of ``sum_key_grads``."""
    return min(_KEYS_OF_SUM, sizes.smallest_block(always))


class _Rows(NamedTuple):
    """What a tile of queries brings to its walk."""

    q: Any
    dout: Any
    log2_sum: Any
    delta: Any


@triton.jit
def _grad_of_step(dq, tile, k_tensor, v_tensor, rows, position, kept, widths):
    """dq after TILE_N keys. kept: (rows, keys)."""
    k = load_tile(k_tensor, rows.batch, rows.kv_head, position, widths.TILE_N, widths.DIM)
    v = load_tile(v_tensor, rows.batch, rows.kv_head, position, widths.TILE_N, widths.DIM_V)
    weights = tl.math.exp2(tl.dot(tile.q, k.T, input_precision="ieee") * widths.score_scale - tile.log2_sum[:, None])
    weights = tl.where(kept, weights, 0.0)
    dscores = weights * (tl.dot(tile.dout, v.T, input_precision="ieee") - tile.delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def _walk_picks(dq, tile, k_tensor, v_tensor, rows, table, number, walks, lengths, shared, widths):
    """Adds what a tile's picks give to dq."""
    blocks, bits = walks.blocks + table * walks.WIDTH, walks.bits + table * walks.WIDTH
    last = tl.load(walks.counts + table * 2 + 1) * widths.STEPS
    block = tl.load(blocks, mask=last > 0, other=0)
    for step in tl.range(0, last):
        position = (block * widths.STEPS + step % widths.STEPS) * widths.TILE_N
        block = tl.load(blocks + (step + 1) // widths.STEPS, mask=step + 1 < last, other=0)
        kept = until_query(rows, position, lengths, widths.TILE_N)
        if shared.CHOICES > 1:
            bit = (tl.load(bits + step // widths.STEPS) >> number) & 1
            kept = kept & (bit == 1)[:, None]
        dq = _grad_of_step(dq, tile, k_tensor, v_tensor, rows, position, kept, widths)
    return dq


@triton.jit
def _walk_always(
    dq, tile, k_tensor, v_tensor, rows, first_query, last_query, picks, always, lengths, shared, widths,
    BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Adds what is always kept and in no picked block."""
    choice = choices_of_rows(rows, lengths, shared)
    for row in tl.range(first_query // always.table.BLOCK, last_query // always.table.BLOCK + 1):
        begin, end = steps_of_always(always, row, widths.TILE_N)
        for step in tl.range(begin, end, num_stages=1):
            position, kept = kept_besides(
                always, row, step, rows, choice, picks, lengths, shared, widths.TILE_N, BLOCK, PADDED
            )  # fmt: skip
            dq = _grad_of_step(dq, tile, k_tensor, v_tensor, rows, position, kept, widths)
    return dq


@triton.jit
def _compute_query_grads(
    k_tensor, v_tensor, dq_rows, part_ptr, listed, picks, walks, always, queries, span, lengths, shared, widths,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile, picker = tl.program_id(0), tl.program_id(1)
    rows = rows_of_tile(tile, picker, span, lengths, shared)
    dq = tl.zeros([ROWS, widths.DIM], tl.float32)
    if PARTS == 0 or always.table.BLOCK != 0:
        at = lines_of_rows(rows, lengths, shared)
        q, dout = load_rows(queries.q, rows, widths.DIM), load_rows(queries.dout, rows, widths.DIM_V)
        log2_sum = tl.load(queries.log2_sum + at, mask=rows.exists, other=float("inf"))
        own = _Rows(q, dout, log2_sum, tl.load(queries.delta + at, mask=rows.exists, other=0.0))
        if PARTS == 0:
            table, number = table_of_tile(tile, picker, span, lengths, shared)
            dq = _walk_picks(dq, own, k_tensor, v_tensor, rows, table, number, walks, lengths, shared, widths)
        if always.table.BLOCK != 0:
            first, last = queries_of_tile(tile, span, lengths, shared)
            dq = _walk_always(
                dq, own, k_tensor, v_tensor, rows, first, last, picks, always, lengths, shared, widths, BLOCK, PADDED
            )  # fmt: skip
    dq *= widths.scale
    if PARTS != 0:
        count = tl.load(listed + choices_of_rows(rows, lengths, shared), mask=rows.exists, other=0) * PARTS
        for part in tl.range(0, tl.max(count, 0), num_stages=_PARTS_AHEAD):
            at = (rows.choice.to(tl.int64) * (shared.SLOTS * PARTS) + part) * (shared.EVERY * shared.MEMBERS) + rows.number
            places = part_ptr + at[:, None] * widths.DIM + tl.arange(0, widths.DIM)[None, :]
            dq += tl.load(places, mask=(part < count)[:, None], other=0.0).to(tl.float32)
    store_rows(dq_rows, dq, rows, widths.DIM)


@triton.jit(do_not_specialize=INTEGERS)
def sum_query_grads_kernel(
    q_rows,
    k_tensor,
    v_tensor,
    dout_rows,
    dq_rows,
    log2_sum_ptr,
    delta_ptr,
    picks,
    walk_counts,
    walk_blocks,
    walk_bits,
    listed,
    part_ptr,
    always_row_ptr,
    always_row_split,
    always_col_idx,
    always_tile_idx,
    always_tile_runs,
    always_tile_bits,
    line,
    choice,
    stride,
    kv_heads,
    q_len,
    offset,
    choices,
    key_blocks,
    scale,
    score_scale,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALWAYS: tl.constexpr,
    EVERY: tl.constexpr,
    MEMBERS: tl.constexpr,
    PICKERS: tl.constexpr,
    SLOTS: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    """dQ of a tile of queries of the heads that share a choice. PARTS: how many parts a pick has; if 0, the tile walks its picks.
    Other arguments: see ``walk_picks_kernel``."""
    # fmt: off
    _compute_query_grads(
        k_tensor, v_tensor, dq_rows, part_ptr, listed, picks,
        Walks(walk_counts, walk_blocks, walk_bits, WIDTH),
        Always(always_row_ptr, always_row_split,
               WalkedTable(always_col_idx, always_tile_idx, always_tile_runs, always_tile_bits, ALWAYS, True)),
        _Gathered(q_rows, dout_rows, log2_sum_ptr, delta_ptr, False),
        Span(line, choice, stride),
        Lengths(kv_heads, q_len, offset, choices, key_blocks),
        Shared(EVERY, MEMBERS, PICKERS, SLOTS, CHOICES, TOKENS, TILES),
        _Widths(scale, score_scale, DIM, DIM_V, TILE_N, BLOCK // TILE_N),
        BLOCK, PADDED, PARTS,
    )
    # fmt: on


def sum_query_grads(
    operands: SelectionOperands, picks, walks, lists, parts, always, dq, sizes: SelectionSizes, turn: Turn, scale: float
):  # fmt: skip
    """Writes dq of one turn. walks: ``selection.lists.TileWalks`` of all picks, or None: then every pick
    has parts."""
    q, k, v, dout, log2_sum, delta = operands
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    config = selection_config("grad_q", q.dtype, max(dim, dim_v), sizes.smallest_block(always), q.device)
    n = config.tile_n
    tables = (picks, picks, picks) if walks is None else (walks.counts, walks.blocks, walks.bits)
    arguments = [rows_of(q, dim), described(k, n, dim), described(v, n, dim_v), rows_of(q if dout is None else dout, dim_v)]
    arguments += [rows_of(dq, dim), log2_sum, delta, picks, *tables, lists.counts, parts if walks is None else q]
    arguments += [*always_arguments(always, False, delta), *sizes.integers(turn), scale, scale * LOG2_E.value]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE_N": n, "BLOCK": sizes.block}
    constants |= {"PARTS": parts.shape[1] if walks is None else 0, "WIDTH": 0 if walks is None else walks.blocks.shape[3]}
    constants |= {"PADDED": padded(sizes.slots), "ALWAYS": always.block_size if always else 0, **sizes.constants}
    launch(sum_query_grads_kernel, sizes.tiles_of(turn), arguments, constants, config.options)
