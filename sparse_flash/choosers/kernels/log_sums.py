"""Log-sums of logits by block of keys, in one pass over the products of rows and columns; no logit is stored.

For each row, and each block of columns, the base-2 logarithm of the sum of exp2(logit) over the block's columns that the row sees.
A block's share of the row is then exp2(log-sum - the row's log-sum).
"""

from functools import partial
from types import ModuleType

import torch
import triton
import triton.language as tl

from ...kernels.common.config import Config, padded_head_dim
from ...kernels.common.layout import as_contiguous_rows
from ...kernels.common.tiles import LOG2_E
from ...kernels.launch.launch import Recording, integers_key, launch_or_repeat_alike, run_within_memory
from ...kernels.portable.softmax import update

UNSEEN_PRODUCT = tl.constexpr(-1.0e30)  # of products that a row does not see, finite
UNSEEN_BELOW = tl.constexpr(-1.0e20)  # logits below this are of columns that the row does not see


@triton.jit
def _load_tile(base, first, tokens, token_stride, step, dim, head_dim, SPAN: tl.constexpr, TILE: tl.constexpr):
    """(TILE, DIM) tile: token ``step`` of each of TILE spans of SPAN tokens, from span ``first`` on; zeros past the end."""
    token = (first + tl.arange(0, TILE)) * SPAN + step
    pointers = base + token.to(tl.int64)[:, None] * token_stride + dim[None, :]
    return tl.load(pointers, mask=(token < tokens)[:, None] & (dim < head_dim)[None, :], other=0.0)


@triton.jit
def _log_sum_by_block(products, factor, TILE_M: tl.constexpr, BLOCKS: tl.constexpr, PER_BLOCK: tl.constexpr):
    """(TILE_M, BLOCKS) log-sums of (TILE_M, BLOCKS * PER_BLOCK) products, times ``factor`` in base 2; -inf of unseen blocks."""
    if PER_BLOCK == 1:
        sums = products * factor
    else:
        of_blocks = tl.reshape(products, (TILE_M, BLOCKS, PER_BLOCK))
        most = tl.max(of_blocks, 2) * factor
        # Fused, LEAST * factor - most is not 0 but the rounding of the product, a large number of either sign.
        most = tl.where(most < UNSEEN_BELOW, 0.0, most)
        sums = most + tl.math.log2(tl.sum(tl.math.exp2(of_blocks * factor - most[:, :, None]), 2))
    return sums


@triton.jit
def _clip_to_bounds(sees, row, bounds):
    """Returns how many existing columns each row sees; 0 for rows that do not exist. bounds: of the batch entry."""
    return tl.where(row < tl.load(bounds + 2), tl.minimum(sees, tl.load(bounds + 1)), 0)


@triton.jit(do_not_specialize=["heads", "group", "first_row", "row_end", "rows_tokens", "cols_tokens", "blocks"])
def log_sums_kernel(
    rows, cols, until, bounds, sums,
    heads, group, first_row, row_end, rows_tokens, cols_tokens, blocks, factor,
    head_dim, q_batch, q_head, q_token, k_batch, k_head, k_token,
    SPAN: tl.constexpr, PER_ROW: tl.constexpr, PER_BLOCK: tl.constexpr, BOUNDED: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """A program has TILE_M rows of one head.

    rows: (batch, heads, rows_tokens, head_dim), cols: (batch, heads / group, cols_tokens, head_dim): see ``Features``, also for
    SPAN and factor, here in base 2. until: (rows,) int32, how many columns each row sees. bounds: (batch, 3) int32, the first
    column that exists, the first past them, and the first row past the existing. first_row, row_end: the rows of this launch;
    first_row begins a block. sums: (batch, heads, row blocks, blocks, PER_ROW) float32, for the rows of a block of queries
    together; not written where no row of a program sees a column. PER_ROW, PER_BLOCK: rows of a block of queries, columns of a
    block of keys.
    """
    count = row_end - first_row
    tiles = tl.cdiv(count, TILE_M)
    # Under causal masks, the last rows see most columns, and begin first.
    tile, batch_head = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    row = first_row + tile * TILE_M + tl.arange(0, TILE_M)
    exists = row < row_end
    dim = tl.arange(0, DIM)
    rows += batch * q_batch + head * q_head
    cols += batch * k_batch + head // group * k_head
    sees = tl.load(until + row, mask=exists, other=0)
    start = 0
    if BOUNDED:
        start = tl.load(bounds + 3 * batch)
        sees = _clip_to_bounds(sees, row, bounds + 3 * batch)
    most = tl.max(sees, 0)
    if SPAN == 1:
        query = _load_tile(rows, first_row + tile * TILE_M, rows_tokens, q_token, 0, dim, head_dim, 1, TILE_M)
    inside = tile * TILE_M + tl.arange(0, TILE_M)
    row_block = batch_head.to(tl.int64) * tl.cdiv(count, PER_ROW) + inside // PER_ROW
    target = sums + (row_block * blocks * PER_ROW + inside % PER_ROW)[:, None]
    # First the columns that all rows see, in whole tiles; then the columns that some rows see.
    begin = start // TILE_N * TILE_N
    whole = tl.min(tl.where(exists, sees, 2147483647), 0) // TILE_N * TILE_N
    if BOUNDED:
        whole = tl.where(start % TILE_N > 0, begin, whole)
    whole = tl.maximum(whole, begin)
    for MASKED in tl.static_range(2):
        for first in range(whole if MASKED else begin, most if MASKED else whole, TILE_N):
            if SPAN == 1:
                key = _load_tile(cols, first, cols_tokens, k_token, 0, dim, head_dim, 1, TILE_N)
                products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            else:
                products = tl.zeros((TILE_M, TILE_N), tl.float32)
                for step in range(SPAN):
                    back = SPAN - 1 - step
                    part = _load_tile(rows, first_row + tile * TILE_M, rows_tokens, q_token, back, dim, head_dim, SPAN, TILE_M)
                    key = _load_tile(cols, first, cols_tokens, k_token, step, dim, head_dim, SPAN, TILE_N)
                    products = tl.dot(part, tl.trans(key), products, input_precision=PRECISION)
            if MASKED:
                column = first + tl.arange(0, TILE_N)
                seen = (column[None, :] < sees[:, None]) & (column >= start)[None, :]
                products = tl.where(seen, products, UNSEEN_PRODUCT)
            number = first // PER_BLOCK + tl.arange(0, TILE_N // PER_BLOCK)
            of_blocks = _log_sum_by_block(products, factor, TILE_M, TILE_N // PER_BLOCK, PER_BLOCK)
            tl.store(target + number[None, :] * PER_ROW, of_blocks, mask=exists[:, None] & (number < blocks)[None, :])


@triton.jit
def _load_sums(
    sums, place, blocks, start, sees, exists, first, PER_ROW: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """(rows, BLOCKS) log-sums of the blocks from ``first`` on, -inf of blocks that were not written."""
    number = first + tl.arange(0, BLOCKS)
    written = (number[None, :] * PER_BLOCK < sees[:, None]) & ((number[None, :] + 1) * PER_BLOCK > start)
    load = written & exists[:, None] & (number < blocks)[None, :]
    row = tl.arange(0, exists.shape[0])
    return tl.load(sums + (place * blocks + number[None, :]) * PER_ROW + row[:, None], mask=load, other=float("-inf"))


@triton.jit(do_not_specialize=["blocks", "row_blocks", "count", "heads", "first_row"])
def shares_kernel(
    sums, until, bounds, scores, blocks, row_blocks, count, heads, first_row,
    PER_ROW: tl.constexpr, PER_ROW_PAD: tl.constexpr, PER_BLOCK: tl.constexpr, BOUNDED: tl.constexpr, MEAN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program makes the scores of all blocks of keys, BLOCKS at a time, for one block of queries and head. sums, until,
    bounds: see ``log_sums_kernel``. scores: (batch, heads, row_blocks, blocks) float32. count: rows of a head. PER_ROW: rows of a
    block of queries."""
    row_block, batch_head = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    batch = batch_head // heads
    row = row_block * PER_ROW + tl.arange(0, PER_ROW_PAD)
    exists = (tl.arange(0, PER_ROW_PAD) < PER_ROW) & (row < count)
    sees = tl.load(until + first_row + row, mask=exists, other=0)
    start = 0
    if BOUNDED:
        start = tl.load(bounds + 3 * batch)
        sees = _clip_to_bounds(sees, first_row + row, bounds + 3 * batch)
        exists = exists & (first_row + row < tl.load(bounds + 3 * batch + 2))
    there = tl.maximum(tl.sum(exists.to(tl.float32), 0), 1.0)
    seen = tl.minimum(tl.cdiv(tl.max(sees, 0), PER_BLOCK), blocks)
    target = scores + tl.program_id(0).to(tl.int64) * blocks
    place = batch_head.to(tl.int64) * row_blocks + row_block
    found = _load_sums(sums, place, blocks, start, sees, exists, 0, PER_ROW, PER_BLOCK, BLOCKS)
    most = tl.maximum(tl.max(found, 1), UNSEEN_PRODUCT)
    total = tl.sum(tl.math.exp2(found - most[:, None]), 1)
    for first in range(BLOCKS, seen, BLOCKS):
        more = _load_sums(sums, place, blocks, start, sees, exists, first, PER_ROW, PER_BLOCK, BLOCKS)
        _, _, most, total = update(most, total, more, 1.0)
    whole = most + tl.math.log2(tl.maximum(total, 1.0e-30))
    for first in range(0, blocks, BLOCKS):
        if first > 0:
            found = _load_sums(sums, place, blocks, start, sees, exists, first, PER_ROW, PER_BLOCK, BLOCKS)
        weights = tl.math.exp2(found - whole[:, None])
        score = tl.sum(weights, 0) / there if MEAN else tl.max(weights, 0)
        number = first + tl.arange(0, BLOCKS)
        tl.store(target + number, score, mask=number < blocks)


# By whether a row is one token; measured: docs/performance/kernels.md.
CONFIGS = {True: Config(128, 128, 8, 2), False: Config(128, 128, 8, 3)}


def prepare(features) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns as the kernel takes them."""
    return as_contiguous_rows(features.rows), as_contiguous_rows(features.columns)


def launch_log_sums(recording: Recording, features, rows, columns, sums: torch.Tensor, first: int, count: int) -> None:
    """Writes sums of rows first .. first + count - 1: see ``log_sums_kernel``. rows, columns: from ``prepare``."""
    until, bounds = features.until, features.bounds
    batch, heads, tokens, head_dim = rows.shape
    sizes = head_dim, *rows.stride()[:3], *columns.stride()[:3]
    arguments = [rows, columns, until, until if bounds is None else bounds, sums, heads, heads // columns.shape[1]]
    arguments += [first, first + count, tokens, columns.shape[2], sums.shape[3], features.factor * LOG2_E.value, *sizes]
    constants = {"SPAN": features.span, "PER_ROW": features.per_q_block, "PER_BLOCK": features.per_kv_block}
    constants |= {"BOUNDED": bounds is not None}
    constants |= {"DIM": padded_head_dim(head_dim), "PRECISION": "ieee" if rows.dtype == torch.float32 else "tf32"}

    def run(config: Config) -> None:
        tiles = {"TILE_M": config.tile_m, "TILE_N": max(config.tile_n, features.per_kv_block)}
        grid = triton.cdiv(count, config.tile_m) * batch * heads, 1
        recording.launch(log_sums_kernel, (grid, arguments, constants | tiles, config.options), integers_key(sizes))

    # Wide heads take more shared memory than some chips have.
    run_within_memory(run, CONFIGS[features.span == 1], lambda: ("log_sums", rows.device, rows.dtype, *constants.values()))


def scores_of_blocks(features, kv_blocks: int, low: int, high: int, by: ModuleType) -> torch.Tensor:
    """See ``rules_torch.score_blocks``. features: bounds contiguous. by: this module, or what replaces it on a chip."""
    rows, columns = by.prepare(features)
    inputs = rows, columns, features.until, *(() if features.bounds is None else (features.bounds,))
    of_features = features.span, features.factor, features.per_q_block, features.per_kv_block, features.takes_max
    run = partial(_run, features, rows, columns, kv_blocks, low, high, by)
    return launch_or_repeat_alike(shares_kernel, None, (by.__name__, *of_features, kv_blocks, low, high), inputs, run)[0]


def _run(features, rows, columns, kv_blocks, low, high, by, recording: Recording) -> list[torch.Tensor]:
    batch, heads = rows.shape[:2]
    until, bounds, per_q_block, first = features.until, features.bounds, features.per_q_block, low * features.per_q_block
    count = min(high * per_q_block, features.row_count) - first
    shapes = (batch, heads, high - low, kv_blocks), (batch, heads, high - low, kv_blocks, per_q_block)
    scores, sums = (recording.fresh(torch.empty(one, dtype=torch.float32, device=until.device)) for one in shapes)
    by.launch_log_sums(recording, features, rows, columns, sums, first, count)
    rows_at_once = triton.next_power_of_2(per_q_block)
    wide = min(8192 // max(8, rows_at_once), triton.next_power_of_2(kv_blocks))
    arguments = [sums, until, until if bounds is None else bounds, scores, kv_blocks, high - low, count, heads, first]
    constants = {"PER_ROW": per_q_block, "PER_ROW_PAD": rows_at_once, "PER_BLOCK": features.per_kv_block}
    constants |= {"BOUNDED": bounds is not None, "MEAN": not features.takes_max, "BLOCKS": max(16, wide)}
    recording.launch(shares_kernel, (((high - low) * batch * heads, 1), arguments, constants, {"num_warps": 4}))
    return [scores]
