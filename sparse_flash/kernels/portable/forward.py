"""The portable forward kernel: FlashAttention-2's online softmax over the blocks that a table lists.

Source: arXiv:2307.08691, Alg. 1; arXiv:2205.14135, Alg. 5 (block-sparse). Dense attention uses the same body without a table.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import tiles
from ..common.config import padded_head_dim
from ..common.layout import as_addressable, empty_out, is_addressable, layouts, restore_out
from ..common.tiles import CUT, FULL, LN_2
from ..common.variant import kernel_variant
from ..launch.launch import NOT_SPECIALIZED, launch_or_repeat
from . import row_loop
from .dropout import dropout_stream, kept_by_dropout
from .lengths import has_padding, is_valid
from .passes import Passes
from .scores import compute_scores
from .sinks import add_sink
from .softmax import init_softmax, log_of_sum, update


class _Operands(NamedTuple):
    """A tile of q, the tensors of keys and values, and dropout's random stream."""

    q: Any
    k_tensor: Any
    v_tensor: Any
    stream: Any


@triton.jit
def _add_keys(state, operands, tile, entries, table, sizes, scoring, KIND: tl.constexpr):
    """Folds entries of one kind into the softmax state of a query tile. Comments number the products of a step:

    (1) S = Q K^T           P = exp2(S - running_max)
    (2) O += P V
    """
    accumulator, running_max, running_sum = state
    variant = scoring.variant
    TILE_N: tl.constexpr = sizes.TILE_N
    STEPS: tl.constexpr = table.BLOCK // TILE_N if table.SPARSE else 1
    last = entries.end * STEPS
    first = entries.begin * STEPS
    position = tiles.step_position(table, first, last, TILE_N)
    for step in tl.range(first, last, num_stages=1 if KIND == CUT else None):
        # The table is read one step ahead, so no key load waits for it.
        upcoming = tiles.step_position(table, step + 1, last, TILE_N)
        place = row_loop.locate_step(tile, position, sizes)
        k = tiles.load_tile(operands.k_tensor, tile.batch, tile.kv_head, position, TILE_N, sizes.DIM)
        scores = tl.dot(operands.q, k.T, input_precision="ieee")  # (1)
        if scoring.SCORED:
            scores = compute_scores(scores, place, sizes, scoring, KIND)
        factor = 1.0 if scoring.SCORED else scoring.scale
        if KIND != FULL:
            block = row_loop.locate_in_block(place, step, table, sizes)
            if KIND != CUT:
                kept = tiles.kept_pairs(table, step // STEPS, block, KIND)
            scores *= factor
            factor = 1.0
            if KIND == CUT:
                scores = tiles.where_kept(scores, -float("inf"), entries.kind, table, step // STEPS, block)
                exists = is_valid(entries.valid, position + tl.arange(0, TILE_N))
                scores = tl.where(exists[None, :], scores, -float("inf"))
            else:
                scores = tl.where(kept, scores, -float("inf"))
        weights, rescale, running_max, running_sum = update(running_max, running_sum, scores, factor)
        accumulator = accumulator * rescale[:, None]
        if variant.seed is not None:
            survives = kept_by_dropout(variant, operands.stream, place, sizes)
            # A zero that the compiler does not know; otherwise it would select after rounding, between unpacked register halves.
            weights = tl.where(survives, weights, tl.minimum(variant.dropout_p, 0.0))
        v = tiles.load_tile(operands.v_tensor, tile.batch, tile.kv_head, position, TILE_N, sizes.DIM_V)
        if KIND == CUT:  # a weight of 0 times NaN is NaN
            v = tl.where(exists[:, None], v, 0.0)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")  # (2)
        position = upcoming
    return accumulator, running_max, running_sum


@triton.jit
def _compute_tile(q_tensor, k_tensor, v_tensor, out_tensor, lse_ptr, rows, table, sizes, scoring):
    """out and lse of this program's tile of queries."""
    variant = scoring.variant
    TILE_M: tl.constexpr = sizes.TILE_M
    count = row_loop.count_tiles(rows.count, sizes.q_len, TILE_M, table.BLOCK, table.SPARSE)
    slot, batch_head = row_loop.slot_and_batch_head(count)
    tile, bounds = row_loop.query_tile(slot, batch_head, rows, table, sizes)
    q = tiles.load_tile(q_tensor, tile.batch, tile.head, tile.first, TILE_M, sizes.DIM)
    state = init_softmax(TILE_M, sizes.DIM_V)
    valid, valid_keys = row_loop.load_axis_ranges(tile.first, tile.batch, sizes, variant)
    operands = _Operands(q, k_tensor, v_tensor, dropout_stream(variant, tile))
    state = row_loop.add_row(_add_keys, state, operands, tile, bounds, valid_keys, table, sizes, scoring)
    if variant.sinks is not None:
        state = add_sink(state, tl.load(variant.sinks + tile.head))
    accumulator, running_max, running_sum = state
    query = tile.first + tl.arange(0, TILE_M)
    exists = None
    if has_padding(variant.q_starts, variant.q_lens):
        exists = is_valid(valid, query)
        accumulator = tl.where(exists[:, None], accumulator, 0.0)
    total, log = log_of_sum(running_max, running_sum, exists)
    divisor = total
    if variant.seed is not None:
        divisor *= 1.0 - variant.dropout_p
    tiles.store_tile(out_tensor, accumulator / divisor[:, None], tile.batch, tile.head, tile.first, TILE_M, sizes.DIM_V)
    tl.store(lse_ptr + tile.batch_head.to(tl.int64) * sizes.q_len + query, log * LN_2, mask=query < sizes.q_len)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_forward_kernel(
    q_tensor, k_tensor, v_tensor, out_tensor, lse_ptr,
    table, mask_batch_stride, mask_head_stride, heads, group, q_len, kv_len, q_blocks,
    score_scale, variant,
    SHAPE: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """One program per query tile and head. score_scale: scale * log2(e). group: query heads that share a key head. SHAPE:
    ``LoopShape``. variant, SCORE, DERIVATIVE: see ``common.variant``."""
    _compute_tile(
        q_tensor, k_tensor, v_tensor, out_tensor, lse_ptr,
        tiles.TableRows(table, mask_batch_stride, mask_head_stride, q_blocks),
        tiles.TableEntries(*table[4:], SHAPE.BLOCK, SHAPE.SPARSE),
        row_loop.Sizes(heads, group, q_len, kv_len, SHAPE.DIM, SHAPE.DIM_V, SHAPE.TILE_M, SHAPE.TILE_N, False),
        row_loop.Scoring(score_scale, variant, SHAPE.SCORED, SHAPE.REACH, SCORE, DERIVATIVE),
    )  # fmt: skip


def attention_forward(call, of_copies: tuple = ()):
    """out (batch, heads, q_len, v's head_dim) in q's memory order, lse (batch, heads, q_len) float32. call: an ``AttentionCall``.
    of_copies: ``layouts`` of q, k and v if they are copies."""
    key = attention_forward_kernel.fn, of_copies
    return tuple(launch_or_repeat(call.launches, key, call.table, call.inputs(), partial(_run, call))[:2])


def _run(call, recording):
    (q, k, v), mask = call[:3], call.table
    if not all(map(is_addressable, (q, k, v))):
        ready = [as_addressable(t) for t in (q, k, v)]
        out, lse = attention_forward(call.on(*ready), layouts(ready))
        return restore_out(out, ready[0], q, v), lse
    out = recording.fresh(empty_out(q, v.shape[3]))
    lse = recording.fresh(torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
    dim = padded_head_dim(q.shape[3])
    # Under lengths, tiles of k and v share memory. If tiles of v have fewer columns and fewer than 64, ptxas 12.8 (Triton 3.6) adds
    # to an unset register for v's second address.
    dim_v = max(padded_head_dim(v.shape[3]), min(64, dim))
    passes = Passes(recording, {"q": q, "k": k, "v": v, "out": out, "lse": lse}, mask, call.scale, dim, dim_v)
    passes.run("forward", attention_forward_kernel, kernel_variant(call.rest, sinks=call.sinks))
    return out, lse
