"""The choice of key blocks for each query: streams the scores of blocks and keeps the best in registers.

A program has the queries of one tile and one head that picks. It visits the blocks that end before the own block of its last query,
some columns at a time, so no tensor holds all scores. What it keeps of each row is a set of the best scores so far, unordered. A
column enters where it beats the lowest of the set, and the loop over a tile ends when no row has such a column; so most tiles cost
one maximum. Of equal scores the first block stays: a later one does not beat it, and of several lowest ones the last leaves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.common.config import Config, padded_head_dim
from ...kernels.common.grid import tile_and_batch_head
from ...kernels.common.layout import as_addressable
from ...kernels.common.tiles import LOG2_E, Rows, load_tile
from ...kernels.launch.launch import descriptor_or_rows, integers_key, launch

_NONE = tl.constexpr(1 << 30)  # instead of a block: plus the number of the slot that holds none
_KEYS = 64  # of a step of "max" and "wide"


# tile_m: queries of a program. tile_n: blocks of a step. Given scores come few columns at a time, because each column that enters
# costs a pass over the tile; products would then be too narrow. docs/performance/selection.md, "Tile sizes", has the figures.
_CONFIGS = {
    "given": Config(64, 16, 4, 1),
    "mean": Config(64, 64, 4, 1),
    "max": Config(64, 16, 4, 2),
    "wide": Config(128, 16, 4, 4),  # of "max", where query heads do not share picks and hardware addresses tiles
    "softmax": Config(64, 64, 4, 2),
}


@triton.jit
def _keep_best(scores, column, least, own, best, block, BOUNDED: tl.constexpr):
    """Takes the columns of a tile that its rows may choose, ``least`` (if BOUNDED) to ``own`` - 1, into their sets. A set's lowest
    score is negative infinity while it has room."""
    possible = (column < own[:, None]) & (scores == scores)  # NaN is never the best
    if BOUNDED:
        possible = possible & (column >= least[:, None])
    scores = tl.where(possible, scores, -float("inf"))
    peak = tl.max(scores, 1)
    lowest = tl.min(best, 1)
    while tl.max((peak > lowest).to(tl.int32), 0) > 0:
        better = peak > lowest
        first = tl.min(tl.where(scores == peak[:, None], column, _NONE), 1)
        leaves = tl.max(tl.where(best == lowest[:, None], block, -1), 1)
        enters = better[:, None] & (block == leaves[:, None])
        best = tl.where(enters, peak[:, None], best)
        block = tl.where(enters, first[:, None], block)
        scores = tl.where(better[:, None] & (column == first[:, None]), -float("inf"), scores)
        peak = tl.max(scores, 1)
        lowest = tl.min(best, 1)
    return best, block


@triton.jit
def _sum_of_largest(
    rows, keys, batch, key_head, number, some, q_head,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(TILE,) largest products with a key of a block, summed over the query heads that share picks. rows: of the first head."""
    total = tl.zeros((rows.shape[0],), tl.float32)
    # Not unrolled: the queries of all heads at once would not fit.
    for _ in range(SHARED):
        query = tl.load(rows, mask=some, other=0.0)
        rows += q_head
        most = tl.full((rows.shape[0],), -float("inf"), tl.float32)
        for step in range(0, BLOCK, KEYS):
            values = load_tile(keys, batch, key_head, number * BLOCK + step, KEYS, DIM)
            most = tl.maximum(most, tl.max(tl.dot(query, tl.trans(values), input_precision=PRECISION), 1))
        total += most
    return total


@triton.jit
def _weights_of_blocks(
    rows, keys, logs, position, column, some, dim, head_dim, compressed, q_head, k_token, log_head, factor,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(TILE, COLUMNS) weights of the tokens of blocks, over the query heads that share picks. A compressed key that has tokens
    in several blocks counts for each by its strides there.

    rows: of the first head's queries. logs: of their softmax sums, natural, -inf where a query reads nothing; log_head: from one
    head's to the next. compressed: how many keys. factor: of products, log2(e) included.
    """
    PER_BLOCK: tl.constexpr = BLOCK // STRIDE
    REACH: tl.constexpr = LENGTH // STRIDE
    scores = tl.zeros((position.shape[0], column.shape[1]), tl.float32)
    for step in range(1 - REACH, PER_BLOCK):
        number = column * PER_BLOCK + step
        exists = (number >= 0) & (number < compressed)
        load = tl.trans(exists) & (dim < head_dim)[None, :]
        values = tl.load(keys + tl.trans(number).to(tl.int64) * k_token + dim[None, :], mask=load, other=0.0)
        seen = exists & (number * STRIDE + (LENGTH - 1) <= position[:, None])
        weights = tl.zeros_like(scores)
        rows_of_head, logs_of_head = rows, logs
        # Not unrolled: the queries of all heads at once would not fit.
        for _ in range(SHARED):
            query = tl.load(rows_of_head, mask=some, other=0.0)
            log = tl.load(logs_of_head) * LOG2_E
            rows_of_head += q_head
            logs_of_head += log_head
            # A query that reads nothing sees nothing either.
            log = tl.where(log == -float("inf"), 0.0, log)
            products = tl.dot(query, tl.trans(values), input_precision=PRECISION) * factor
            weights += tl.where(seen, tl.math.exp2(products - log[:, None]), 0.0)
        inside = tl.minimum(step + REACH, PER_BLOCK) - tl.maximum(step, 0)
        scores += weights * inside.to(tl.float32)
    return scores


@triton.jit(do_not_specialize=["heads", "q_len", "kv_len", "offset", "width", "compressed"])
def pick_blocks_kernel(
    source, keys, picks, bounds, logs,
    heads, q_len, kv_len, offset, width, compressed, factor,
    head_dim, q_batch, q_head, q_token, k_batch, k_head, k_token,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr,
    KIND: tl.constexpr, BOUNDED: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """source: q, (batch, heads x SHARED, q_len, head_dim), or scores, (batch, heads, q_len, columns). keys: what a key head's
    scores are products with, (batch, key heads, blocks or tokens or compressed keys, head_dim). picks: (batch, heads, q_len,
    CHOSEN + 1) int32. heads: that pick. width: how many of them share a key head. bounds: if BOUNDED, (q_len, 2) int32: the first
    column that a query may choose, and its own. logs, compressed, factor: of the kind "softmax", see ``_weights_of_blocks``; key i
    is of LENGTH tokens from i * STRIDE on."""
    tiles = tl.cdiv(q_len, TILE)
    tile, batch_head = tile_and_batch_head(tiles)
    tile = tiles - 1 - tile  # late queries, which have most blocks, begin first
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)
    exists = token < q_len
    if BOUNDED:
        least = tl.load(bounds + 2 * token, mask=exists, other=_NONE)
        first = tl.load(bounds + 2 * token + 1, mask=exists, other=0) * BLOCK
    else:
        first = token + offset
        least = first  # unused
    own = tl.where(exists & (first >= 0), first // BLOCK, 0)
    slot = tl.arange(0, SLOTS)[None, :]
    room = (slot < CHOSEN) & (token >= 0)[:, None]
    best = tl.where(room, -float("inf"), float("inf"))
    block = _NONE + slot + tl.zeros((TILE, SLOTS), tl.int32)
    dim = tl.arange(0, DIM)
    if CHOSEN > 0:
        rows = source + batch * q_batch + head * SHARED * q_head
        if KIND == "given":
            rows += token.to(tl.int64)[:, None] * q_token
        else:
            rows += token.to(tl.int64)[:, None] * q_token + dim[None, :]
            if KIND != "max":
                keys += batch * k_batch + head // width * k_head
        some = exists[:, None] & (dim < head_dim)[None, :]
        if KIND == "mean":
            # The mean of scores is the score of the mean, except for a factor that changes no order.
            query = tl.zeros((TILE, DIM), tl.float32)
            for _ in tl.static_range(SHARED):
                query += tl.load(rows, mask=some, other=0.0).to(tl.float32)
                rows += q_head
        begin, end = 0, tl.max(own, 0)
        if BOUNDED:
            # A multiple, so that loads of neighbouring columns stay wide.
            begin = tl.min(least, 0) // COLUMNS * COLUMNS
        if KIND == "max":
            # Triton pipelines one loop over the steps of all blocks. A loop in each block would wait for its first keys.
            STEPS: tl.constexpr = BLOCK // KEYS if SHARED == 1 else 1
            columns = tl.arange(0, COLUMNS)[None, :]
            scores = tl.full((TILE, COLUMNS), -float("inf"), tl.float32)
            key_batch, key_head = batch.to(tl.int32), (head // width).to(tl.int32)
            if SHARED == 1:
                query = tl.load(rows, mask=some, other=0.0)
            for step in range(begin * STEPS, end * STEPS):
                number = step // STEPS
                if SHARED == 1:
                    values = load_tile(keys, key_batch, key_head, step * KEYS, KEYS, DIM)
                    most = tl.max(tl.dot(query, tl.trans(values), input_precision=PRECISION), 1)
                else:
                    most = _sum_of_largest(
                        rows, keys, key_batch, key_head, number, some, q_head, SHARED, BLOCK, KEYS, DIM, PRECISION
                    )  # fmt: skip
                here = columns == number % COLUMNS
                if STEPS > 1:
                    earlier = tl.where(here & (step % STEPS > 0), scores, -float("inf"))
                    scores = tl.where(here, tl.maximum(earlier, most[:, None]), scores)
                else:
                    scores = tl.where(here, most[:, None], scores)
                if (step + 1) % (COLUMNS * STEPS) == 0 or step + 1 == end * STEPS:
                    # Columns from ``end`` on still have earlier scores, but are before no query's own block.
                    column = number // COLUMNS * COLUMNS + columns
                    best, block = _keep_best(scores, column, least, own, best, block, BOUNDED)
        else:
            for start in range(begin, end, COLUMNS):
                column = start + tl.arange(0, COLUMNS)[None, :]
                if KIND == "given":
                    scores = tl.load(rows + column, mask=(column < own[:, None]) & exists[:, None], other=0.0).to(tl.float32)
                elif KIND == "mean":
                    # Blocks before an own block are whole, so their means exist.
                    means = tl.load(
                        keys + tl.trans(column).to(tl.int64) * k_token + dim[None, :],
                        mask=(tl.trans(column) < kv_len // BLOCK) & (dim < head_dim)[None, :],
                        other=0.0,
                    )
                    scores = tl.dot(query, tl.trans(means), input_precision=PRECISION)
                else:
                    head_logs = logs + (batch * heads + head) * SHARED * q_len + tl.minimum(token, q_len - 1)
                    scores = _weights_of_blocks(
                        rows, keys, head_logs, first, column, some, dim, head_dim, compressed, q_head, k_token, q_len, factor,
                        SHARED, BLOCK, LENGTH, STRIDE, PRECISION,
                    )  # fmt: skip
                best, block = _keep_best(scores, column, least, own, best, block, BOUNDED)
    is_own = (slot == CHOSEN) & (first >= 0)[:, None]
    block = tl.sort(tl.where(is_own, own[:, None], tl.where(room, block, _NONE)), 1)
    place = picks + (batch_head.to(tl.int64) * q_len + token)[:, None] * (CHOSEN + 1) + slot
    tl.store(place, tl.where(block < _NONE, block, -1), mask=exists[:, None] & (slot < CHOSEN + 1))


def pick_blocks(source: Tensor, keys: Tensor | None, choice, bounds: Tensor | None, lse: Tensor | None) -> Tensor:
    """As ``selection.choice.choose``. Of the kind "mean" keys are the means of whole blocks. Last dimensions are contiguous."""
    kind, heads, keep, block_size, kv_len, length, stride = choice
    q_len, config, given, keys = source.shape[2], _CONFIGS[kind], kind == "given", source if keys is None else keys
    keys = as_addressable(keys) if kind == "max" else keys
    shared, dim = source.shape[1] // heads, 16 if given else padded_head_dim(source.shape[3])
    sizes = 1 if given else source.shape[3], *source.stride()[:3], *keys.stride()[:3]
    specialized, step = (keys.dtype, *integers_key(sizes)), min(block_size, _KEYS)
    tiles = descriptor_or_rows(keys, step, dim) if kind == "max" else keys
    if isinstance(tiles, Rows):
        specialized += integers_key(tiles[1:])
    elif kind == "max" and shared == 1:
        config = _CONFIGS["wide"]
    picks = torch.empty((source.shape[0], heads, q_len, keep), dtype=torch.int32, device=source.device)
    arguments = [source, tiles, picks, picks if bounds is None else bounds, picks if lse is None else lse]
    arguments += [heads, q_len, kv_len, kv_len - q_len, 1 if given else heads // keys.shape[1], keys.shape[2]]
    arguments += [source.shape[-1] ** -0.5 * LOG2_E.value, *sizes]
    constants = {"BLOCK": block_size, "CHOSEN": keep - 1, "SLOTS": max(2, triton.next_power_of_2(keep)), "SHARED": shared}
    constants |= {"KIND": kind, "BOUNDED": bounds is not None, "TILE": config.tile_m, "COLUMNS": config.tile_n, "KEYS": step}
    constants |= {"LENGTH": length, "STRIDE": stride, "DIM": dim, "PRECISION": _precision(source)}
    grid = triton.cdiv(q_len, config.tile_m) * source.shape[0] * heads, 1
    launch(pick_blocks_kernel, grid, arguments, constants, config.options, specialized)
    return picks


def _precision(source: Tensor) -> str:
    """Returns the precision of products of float32: tf32 loses less of sums of 16-bit numbers than these had lost."""
    if not source.is_cuda or torch.cuda.get_device_capability(source.device) < (8, 0):
        return "ieee"
    return "tf32x3" if source.dtype == torch.float32 else "tf32"
