"""Attention over key blocks that each query picked: the backward kernels.

    1. rows_of_softmax   delta = rowsum(dOut * Out) - dLse of each query and head, and its lse in base 2
    2. picked_grads      a piece of a key block's list: sums of dK and dV, and a part of dQ for each query, pick and head
    3. always_grads      the same of what is always kept and not picked, without dQ
    4. sum_key_grads     adds up the sums of a key block's pieces, in order: dK and dV
    5. sum_query_grads   adds up a query's parts in the order of its picks, and walks what has none: dQ

There are no atomics: gradients repeat bit for bit. ``picked_grads`` also serves the gradient of the picked blocks' masses.

Source: arXiv:2307.08691, Alg. 2; arXiv:2511.11571 (queries gathered by key block).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..common.tiles import LOG2_E, load_tile, store_tile
from ..launch.launch import described, launch, rows_of
from .configs import selection_config
from .selection_tiles import (
    INTEGERS,
    ROWS,
    Lengths,
    RowsOfTile,
    SelectionSizes,
    Shared,
    Span,
    Turn,
    always_arguments,
    always_table,
    choices_of_rows,
    is_picked,
    lines_of_rows,
    load_rows,
    of_always,
    padded,
    queries_of_tile,
    rows_of_list,
    rows_of_tile,
    steps_of_list,
    store_rows,
    table_of_tile,
)

_PARTS_AHEAD = tl.constexpr(4)
_KEYS_OF_SUM = 64


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
    first, line = tl.program_id(0) * ROWS, tl.program_id(1)
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
    grid = triton.cdiv(q_len, ROWS.value), batch * heads
    launch(rows_of_softmax_kernel, grid, arguments, {"DIM_V": dim_v, "HAS_DLSE": dlse is not None}, {"num_warps": 4})


class _Block(NamedTuple):
    """TILE_N keys of a key block from ``position`` on, and how products become scores. part: their number among the block's steps.
    score_scale: times log2(e). STEPS: of a block."""

    k: Any
    v: Any
    position: Any
    part: Any
    scale: Any
    score_scale: Any
    DIM: Any
    DIM_V: Any
    TILE_N: Any
    STEPS: Any


class _Queries(NamedTuple):
    """What is gathered of queries."""

    q: Any
    dout: Any
    log2_sum: Any
    delta: Any


@triton.jit
def _keeps(block, rows, lengths):
    """Which keys (axis 0) do not follow which queries (axis 1)."""
    key = block.position + tl.arange(0, block.TILE_N)
    return key[:, None] <= (rows.query + lengths.offset)[None, :]


@triton.jit
def _add_grads(dk, dv, weights, q, rows, queries, block, lengths, shared):
    """(dk, dv, dS) after a step. weights: (keys, rows)."""
    at = lines_of_rows(rows, lengths, shared)
    dout = load_rows(queries.dout, rows, block.DIM_V)
    dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
    dweights = tl.dot(block.v, dout.T, input_precision="ieee")
    delta = tl.load(queries.delta + at, mask=rows.exists, other=0.0)
    dscores = (weights * (dweights - delta[None, :])).to(q.dtype)
    return tl.dot(dscores, q, dk, input_precision="ieee"), dv, dscores


@triton.jit
def _compute_grads(
    dk, dv, queries, part_ptr, entries, begin, end, line, block, span, lengths, shared,
    CUT: tl.constexpr, PARTS: tl.constexpr, MASSES: tl.constexpr,
):  # fmt: skip
    """Sums after queries begin .. end - 1 of a list, whose parts of dQ are stored if PARTS. CUT: whether keys may follow their
    query."""
    for step in tl.range(0, steps_of_list(begin, end, shared)):
        rows, entry = rows_of_list(entries, begin, end, step, line, span, lengths, shared)
        at = lines_of_rows(rows, lengths, shared)
        q = load_rows(queries.q, rows, block.DIM)
        scores = tl.dot(block.k, q.T, input_precision="ieee") * block.score_scale
        if MASSES:
            at = at * shared.SLOTS + entry % shared.SLOTS
            lse = tl.load(queries.log2_sum + at, mask=rows.exists, other=float("inf"))
            log2_sum = tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E
        else:
            log2_sum = tl.load(queries.log2_sum + at, mask=rows.exists, other=float("inf"))
        weights = tl.math.exp2(scores - log2_sum[None, :])
        if CUT:
            weights = tl.where(_keeps(block, rows, lengths), weights, 0.0)
        if MASSES:
            dmass = tl.load(queries.delta + at, mask=rows.exists, other=0.0)
            dscores = (weights * dmass[None, :]).to(q.dtype)
            dk = tl.dot(dscores, q, dk, input_precision="ieee")
        else:
            dk, dv, dscores = _add_grads(dk, dv, weights, q, rows, queries, block, lengths, shared)
        if PARTS:
            dq = tl.dot(dscores.T, block.k, input_precision="ieee") * block.scale
            part = (entry.to(tl.int64) * block.STEPS + block.part) * (shared.EVERY * shared.MEMBERS) + rows.number
            places = part_ptr + part[:, None] * block.DIM + tl.arange(0, block.DIM)[None, :]
            tl.store(places, dq.to(part_ptr.dtype.element_ty), mask=rows.exists[:, None], cache_modifier=".cs")
    return dk, dv


@triton.jit
def _store_sums(dk_ptr, dv_ptr, dk, dv, row, block):
    """row: of the first key, in float32 sums with a row for each key."""
    key = row + tl.arange(0, block.TILE_N)
    tl.store(dk_ptr + key[:, None] * block.DIM + tl.arange(0, block.DIM)[None, :], dk)
    tl.store(dv_ptr + key[:, None] * block.DIM_V + tl.arange(0, block.DIM_V)[None, :], dv)


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
    turn_choices,
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
    """One program per piece of a key block's list and TILE_N keys of the block. part_ptr: (entries of a turn, BLOCK // TILE_N, EVERY,
    MEMBERS, DIM), used if PARTS. dk_ptr, dv_ptr: (pieces of a turn, BLOCK, DIM or DIM_V) float32. MASSES: of the picked blocks'
    lse, log2_sum_ptr (batch, heads, q_len, SLOTS), whose gradient is delta_ptr; no dV, no dOut."""
    number, part = tl.program_id(0), tl.program_id(1)
    piece = items + (item + number) * 4
    begin, end = tl.load(piece + 1), tl.load(piece + 3)
    if begin < end:
        column = tl.load(piece)
        whole = tl.load(piece + 2)
        span = Span(line, choice, turn_choices)
        lengths = Lengths(kv_heads, q_len, offset, choices, key_blocks)
        shared = Shared(EVERY, MEMBERS, PICKERS, SLOTS, CHOICES, TOKENS, TILES)
        own = line + column // key_blocks
        position = column % key_blocks * BLOCK + part * TILE_N
        k = load_tile(k_tensor, own // kv_heads, own % kv_heads, position, TILE_N, DIM)
        v = k
        if not MASSES:
            v = load_tile(v_tensor, own // kv_heads, own % kv_heads, position, TILE_N, DIM_V)
        block = _Block(k, v, position, part, scale, score_scale, DIM, DIM_V, TILE_N, BLOCK // TILE_N)
        queries = _Queries(q_rows, dout_rows, log2_sum_ptr, delta_ptr)
        dk = tl.zeros([TILE_N, DIM], tl.float32)
        dv = tl.zeros([TILE_N, DIM_V], tl.float32)
        # fmt: off
        dk, dv = _compute_grads(dk, dv, queries, part_ptr, entries, begin, whole, own, block, span, lengths, shared,
                                True, PARTS, MASSES)
        dk, dv = _compute_grads(dk, dv, queries, part_ptr, entries, whole, end, own, block, span, lengths, shared,
                                False, PARTS, MASSES)
        # fmt: on
        _store_sums(dk_ptr, dv_ptr, dk, dv, number.to(tl.int64) * BLOCK + part * TILE_N, block)


def picked_grads(q, k, v, dout, log2_sum, delta, lists, parts, dk_sums, dv_sums, sizes: SelectionSizes, turn: Turn, scale: float):
    """Writes parts, unless None, and sums of one turn. lists: ``selection.tables.ColumnLists``. dout None: of masses; then v is k."""
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    n, config = key_step(q, v, sizes)
    count, masses = lists.items.shape[1], dout is None
    arguments = [rows_of(q, dim), described(k, n, dim), described(v, n, dim_v), rows_of(q if masses else dout, dim_v), log2_sum, delta]
    arguments += [delta if parts is None else parts, dk_sums, dv_sums, lists.entries, lists.items, turn.number * count]
    arguments += [*sizes.integers(turn), scale, scale * LOG2_E.value]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE_N": n, "BLOCK": sizes.block, "PARTS": parts is not None, "MASSES": masses}
    launch(picked_grads_kernel, (count, sizes.block // n), arguments, {**constants, **sizes.constants}, config.options)


def key_step(q, v, sizes: SelectionSizes, block: int | None = None):
    """(keys of a program of ``picked_grads``, its config). block: of keys, by default that of the picks."""
    dim = max(padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3]))
    config = selection_config("grad_kv", q.dtype, dim, block or sizes.block, q.device)
    return config.tile_n, config


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
    turn_choices,
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
    """One program per piece of a column of what is always kept, TILE_N of its keys, and line. items: (pieces, 4): column, first entry,
    unused, last. dk_ptr, dv_ptr: (lines of a turn, pieces, ALWAYS, DIM or DIM_V) float32. picks: (batch, kv_heads * PICKERS, choices,
    SLOTS). QUERIES: of a tile."""
    PARTS: tl.constexpr = ALWAYS // TILE_N
    TILES_OF_ENTRY: tl.constexpr = (ALWAYS + QUERIES - 1) // QUERIES
    STEPS: tl.constexpr = TILES_OF_ENTRY * PICKERS
    number, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    begin, end = tl.load(items + number * 4 + 1), tl.load(items + number * 4 + 3)
    if begin < end:
        column = tl.load(items + number * 4)
        lengths = Lengths(kv_heads, q_len, offset, choices, key_blocks)
        shared = Shared(EVERY, MEMBERS, PICKERS, SLOTS, CHOICES, TOKENS, TILES)
        always = always_table(row_ptr, row_split, row_idx, tile_idx, tile_runs, tile_bits, ALWAYS)
        own = line + tl.program_id(1)
        batch, kv_head = own // kv_heads, own % kv_heads
        position = column * ALWAYS + part * TILE_N
        k = load_tile(k_tensor, batch, kv_head, position, TILE_N, DIM)
        v = load_tile(v_tensor, batch, kv_head, position, TILE_N, DIM_V)
        block = _Block(k, v, position, part, scale, score_scale, DIM, DIM_V, TILE_N, 1)
        queries = _Queries(q_rows, dout_rows, log2_sum_ptr, delta_ptr)
        dk = tl.zeros([TILE_N, DIM], tl.float32)
        dv = tl.zeros([TILE_N, DIM_V], tl.float32)
        key = part * TILE_N + tl.arange(0, TILE_N)
        row = tl.arange(0, ROWS)
        for step in tl.range(begin * STEPS, end * STEPS, num_stages=1):
            entry = step // STEPS
            place = step % TILES_OF_ENTRY * QUERIES + row // MEMBERS
            query = tl.load(always.table.index + entry) * ALWAYS + place
            exists = (row < QUERIES * MEMBERS) & (place < ALWAYS) & (query < q_len)
            head = (kv_head * PICKERS + step % STEPS // TILES_OF_ENTRY) * MEMBERS + row % MEMBERS
            rows = RowsOfTile(row, query, head, row, exists, batch, kv_head)
            q = load_rows(q_rows, rows, DIM)
            at = lines_of_rows(rows, lengths, shared)
            log2_sum = tl.load(log2_sum_ptr + at, mask=exists, other=float("inf"))
            weights = tl.math.exp2(tl.dot(k, q.T, input_precision="ieee") * score_scale - log2_sum[None, :])
            choice_of_row = tl.where(exists, choices_of_rows(rows, lengths, shared), 0)
            picked = is_picked(picks, choice_of_row, exists, position // BLOCK, SLOTS, PADDED)
            kept = _keeps(block, rows, lengths) & (exists & ~picked)[None, :]
            place = tl.where(exists, place, 0)
            weights = of_always(tl.where(kept, weights, 0.0), 0.0, always, column, entry, place[None, :], key[:, None])
            dk, dv, _ = _add_grads(dk, dv, weights, q, rows, queries, block, lengths, shared)
        pieces = tl.num_programs(0) // PARTS
        _store_sums(dk_ptr, dv_ptr, dk, dv, (tl.program_id(1) * pieces + number).to(tl.int64) * ALWAYS + part * TILE_N, block)


def always_grads(
    q, k, v, dout, log2_sum, delta, picks, always, items, dk_sums, dv_sums, sizes: SelectionSizes, turn: Turn, scale: float
):  # fmt: skip
    """Writes sums of one turn's lines, over all queries. items: (1, pieces, 4) int32."""
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    n, config = key_step(q, v, sizes, sizes.smallest_block(always))
    arguments = [rows_of(q, dim), described(k, n, dim), described(v, n, dim_v), rows_of(dout, dim_v), log2_sum, delta]
    arguments += [dk_sums, dv_sums, picks, items, *always_arguments(always, True, delta)]
    arguments += [*sizes.integers(turn), scale, scale * LOG2_E.value]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE_N": n, "BLOCK": sizes.block, "PADDED": padded(sizes.slots)}
    constants |= {"ALWAYS": always.block_size, "QUERIES": ROWS.value // sizes.members, **sizes.constants}
    grid = items.shape[1] * (always.block_size // n), turn.lines
    launch(always_grads_kernel, grid, arguments, constants, config.options)


@triton.jit
def _sum_pieces(dk, dv, dk_ptr, dv_ptr, begin, end, within, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """dk and dv plus KEYS rows, from row ``within`` on, of the sums begin .. end - 1."""
    DIM: tl.constexpr = dk.shape[1]
    DIM_V: tl.constexpr = dv.shape[1]
    key = begin.to(tl.int64) * BLOCK + within + tl.arange(0, KEYS)
    for _ in tl.range(begin, end):
        dk += tl.load(dk_ptr + key[:, None] * DIM + tl.arange(0, DIM)[None, :])
        dv += tl.load(dv_ptr + key[:, None] * DIM_V + tl.arange(0, DIM_V)[None, :])
        key += BLOCK
    return dk, dv


@triton.jit(do_not_specialize=["first_start", "line", "kv_heads", "kv_len", "columns", "key_blocks", "always_pieces", "lines"])
def sum_key_grads_kernel(
    dk_rows,
    dv_rows,
    dk_ptr,
    dv_ptr,
    starts,
    dk_always,
    dv_always,
    always_starts,
    dk_before,
    dv_before,
    first_start,
    line,
    kv_heads,
    kv_len,
    key_blocks,
    always_pieces,
    scale,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALWAYS: tl.constexpr,
    CONTINUES: tl.constexpr,
    ENDS: tl.constexpr,
):
    """dK and dV of KEYS keys of a line. starts: the first piece of each column, and the end of the last; this turn's from first_start
    on. always_starts: the same of what is always kept, unless ALWAYS is 0. dk_before, dv_before: (lines of a turn, kv_len rounded
    up to KEYS, DIM or DIM_V) float32, sums of the turns before: read if CONTINUES, written unless ENDS."""
    first = tl.program_id(0) * KEYS
    within_turn = tl.program_id(1)
    own = line + within_turn
    column = within_turn * key_blocks + first // BLOCK
    dk = tl.zeros([KEYS, DIM], tl.float32)
    dv = tl.zeros([KEYS, DIM_V], tl.float32)
    row = within_turn.to(tl.int64) * tl.num_programs(0) * KEYS + first + tl.arange(0, KEYS)
    of_dk = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    of_dv = row[:, None] * DIM_V + tl.arange(0, DIM_V)[None, :]
    if CONTINUES:
        dk, dv = tl.load(dk_before + of_dk), tl.load(dv_before + of_dv)
    begin, end = tl.load(starts + first_start + column), tl.load(starts + first_start + column + 1)
    dk, dv = _sum_pieces(dk, dv, dk_ptr, dv_ptr, begin, end, first % BLOCK, BLOCK, KEYS)
    if ENDS:
        if ALWAYS != 0:
            begin, end = tl.load(always_starts + first // ALWAYS), tl.load(always_starts + first // ALWAYS + 1)
            before = within_turn * always_pieces
            dk, dv = _sum_pieces(dk, dv, dk_always, dv_always, before + begin, before + end, first % ALWAYS, ALWAYS, KEYS)
        store_tile(dk_rows, dk * scale, own // kv_heads, own % kv_heads, first, KEYS, DIM)
        store_tile(dv_rows, dv, own // kv_heads, own % kv_heads, first, KEYS, DIM_V)
    else:
        tl.store(dk_before + of_dk, dk)
        tl.store(dv_before + of_dv, dv)


def sum_key_grads(dk, dv, sums, lists, always_sums, always_pieces, before, always, sizes: SelectionSizes, turn: Turn, scale: float):
    """Writes dk and dv of one turn's lines, or with further turns of these lines to come, ``before``. sums, always_sums, before: of
    dk and dv. always_sums, always_pieces: None without ``always``. before: None if a turn has all choices of its lines."""
    dim, dim_v = padded_head_dim(dk.shape[3]), padded_head_dim(dv.shape[3])
    keys = keys_of_sum(sizes, always)
    items, starts = (lists.items, lists.starts) if always is None else (always_pieces.items, always_pieces.starts)
    arguments = [rows_of(dk, dim), rows_of(dv, dim_v), *sums, lists.starts, *(always_sums or sums), starts, *(before or sums)]
    arguments += [turn.number * lists.starts.shape[1], turn.line, sizes.kv_heads, sizes.kv_len, sizes.key_blocks, items.shape[1], scale]
    constants = {"DIM": dim, "DIM_V": dim_v, "KEYS": keys, "BLOCK": sizes.block, "ALWAYS": always.block_size if always else 0}
    constants |= {"CONTINUES": turn.choice > 0, "ENDS": turn.choice + turn.choices == sizes.choices}
    launch(sum_key_grads_kernel, (triton.cdiv(sizes.kv_len, keys), turn.lines), arguments, constants, {"num_warps": 4})


def keys_of_sum(sizes: SelectionSizes, always) -> int:
    """Keys of a program of ``sum_key_grads``."""
    return min(_KEYS_OF_SUM, sizes.smallest_block(always))


@triton.jit
def _grad_of_step(dq, q, dout, log2_sum, delta, k, v, kept, score_scale):
    """dq after a step. kept: (rows, keys)."""
    weights = tl.math.exp2(tl.dot(q, k.T, input_precision="ieee") * score_scale - log2_sum[:, None])
    weights = tl.where(kept, weights, 0.0)
    dscores = weights * (tl.dot(dout, v.T, input_precision="ieee") - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")


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
    turn_choices,
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
    """dQ of a tile of queries of the heads that share a choice. PARTS: how many parts a pick has; if 0, the tile walks its picks. Other
    arguments: see ``walk_picks_kernel``."""
    tile, picker = tl.program_id(0), tl.program_id(1)
    span = Span(line, choice, turn_choices)
    lengths = Lengths(kv_heads, q_len, offset, choices, key_blocks)
    shared = Shared(EVERY, MEMBERS, PICKERS, SLOTS, CHOICES, TOKENS, TILES)
    rows = rows_of_tile(tile, picker, span, lengths, shared)
    dq = tl.zeros([ROWS, DIM], tl.float32)
    until = (rows.query + lengths.offset)[:, None]
    step_key = tl.arange(0, TILE_N)
    if PARTS == 0 or ALWAYS != 0:
        at = lines_of_rows(rows, lengths, shared)
        q, dout = load_rows(q_rows, rows, DIM), load_rows(dout_rows, rows, DIM_V)
        log2_sum = tl.load(log2_sum_ptr + at, mask=rows.exists, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=rows.exists, other=0.0)
    if PARTS == 0:
        table, number = table_of_tile(tile, picker, span, lengths, shared)
        STEPS: tl.constexpr = BLOCK // TILE_N
        last = tl.load(walk_counts + table * 2 + 1) * STEPS
        block = tl.load(walk_blocks + table * WIDTH, mask=last > 0, other=0)
        for step in tl.range(0, last):
            position = block * BLOCK + step % STEPS * TILE_N
            block = tl.load(walk_blocks + table * WIDTH + (step + 1) // STEPS, mask=step + 1 < last, other=0)
            k = load_tile(k_tensor, rows.batch, rows.kv_head, position, TILE_N, DIM)
            v = load_tile(v_tensor, rows.batch, rows.kv_head, position, TILE_N, DIM_V)
            kept = (position + step_key)[None, :] <= until
            if CHOICES > 1:
                bit = (tl.load(walk_bits + table * WIDTH + step // STEPS) >> number) & 1
                kept = kept & (bit == 1)[:, None]
            dq = _grad_of_step(dq, q, dout, log2_sum, delta, k, v, kept, score_scale)
    if ALWAYS != 0:
        always = always_table(
            always_row_ptr, always_row_split, always_col_idx, always_tile_idx, always_tile_runs, always_tile_bits, ALWAYS
        )
        ALWAYS_STEPS: tl.constexpr = ALWAYS // TILE_N
        choice_of_row = choices_of_rows(rows, lengths, shared)
        first, end = queries_of_tile(tile, span, lengths, shared)
        for row in tl.range(first // ALWAYS, end // ALWAYS + 1):
            own = rows.exists & (rows.query // ALWAYS == row)
            query = tl.where(own, rows.query - row * ALWAYS, 0)
            for step in tl.range(tl.load(always.row_ptr + row) * ALWAYS_STEPS, tl.load(always.row_ptr + row + 1) * ALWAYS_STEPS,
                                 num_stages=1):  # fmt: skip
                start = step % ALWAYS_STEPS * TILE_N
                position = tl.load(always.table.index + step // ALWAYS_STEPS) * ALWAYS + start
                k = load_tile(k_tensor, rows.batch, rows.kv_head, position, TILE_N, DIM)
                v = load_tile(v_tensor, rows.batch, rows.kv_head, position, TILE_N, DIM_V)
                kept = own & ~is_picked(picks, choice_of_row, rows.exists, position // BLOCK, SLOTS, PADDED)
                kept = ((position + step_key)[None, :] <= until) & kept[:, None]
                of_row = of_always(
                    kept.to(tl.int32), 0, always, row, step // ALWAYS_STEPS, query[:, None], (start + step_key)[None, :]
                )  # fmt: skip
                dq = _grad_of_step(dq, q, dout, log2_sum, delta, k, v, of_row != 0, score_scale)
    dq *= scale
    if PARTS != 0:
        count = tl.load(listed + choices_of_rows(rows, lengths, shared), mask=rows.exists, other=0) * PARTS
        for part in tl.range(0, tl.max(count, 0), num_stages=_PARTS_AHEAD):
            at = (rows.choice.to(tl.int64) * (SLOTS * PARTS) + part) * (EVERY * MEMBERS) + rows.number
            places = part_ptr + at[:, None] * DIM + tl.arange(0, DIM)[None, :]
            dq += tl.load(places, mask=(part < count)[:, None], other=0.0).to(tl.float32)
    store_rows(dq_rows, dq, rows, DIM)


def sum_query_grads(
    q, k, v, dout, log2_sum, delta, picks, walks, lists, parts, always, dq, sizes: SelectionSizes, turn: Turn, scale: float
):  # fmt: skip
    """Writes dq of one turn. walks: ``selection.tables.TileWalks`` of all picks, or None: then every pick has parts."""
    dim, dim_v = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    config = selection_config("grad_q", q.dtype, max(dim, dim_v), sizes.smallest_block(always), q.device)
    n = config.tile_n
    arguments = [rows_of(q, dim), described(k, n, dim), described(v, n, dim_v), rows_of(dout, dim_v), rows_of(dq, dim)]
    arguments += [log2_sum, delta, picks, *(walks[1:] if walks else (picks, picks, picks)), lists.counts, parts if walks is None else q]
    arguments += [*always_arguments(always, False, delta), *sizes.integers(turn), scale, scale * LOG2_E.value]
    constants = {"DIM": dim, "DIM_V": dim_v, "TILE_N": n, "BLOCK": sizes.block}
    constants |= {"PARTS": 0 if walks else parts.shape[1], "WIDTH": walks.blocks.shape[3] if walks else 0, "PADDED": padded(sizes.slots)}
    constants |= {"ALWAYS": always.block_size if always else 0, **sizes.constants}
    launch(sum_query_grads_kernel, sizes.tiles_of(turn), arguments, constants, config.options)
