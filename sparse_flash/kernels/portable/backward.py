"""The portable backward kernels: two passes that recompute the attention weights from lse.

The first pass iterates over the keys of each query tile and computes dQ. The second pass iterates over the queries of each key
tile, through the transposed table, and computes dK and dV. One program writes each output once, in a fixed order, so gradients
repeat bit for bit. Only the gradient of a relative bias is accumulated with atomics, in the first pass. Comments number the
products of a step; the second pass computes them transposed:

    (1) S = Q K^T           P = exp2(S - lse)       lse and S in base 2
    (2) dP = dO V^T         dS = P (dP - delta)     delta = rowsum(dO * O) - dLse
    (3) dV += P^T dO
    (4) dK += dS^T Q
    (5) dQ += dS K

Both passes may share one launch. The second pass then cannot wait for the first pass's delta, and computes delta in each step.

Sources: arXiv:2307.08691, Alg. 2; two passes as in the Triton tutorial's fused attention; one launch: Y. Zhao, From online safe
softmax to FlashAttention-2 (2023), Alg. 7. There a program has a row and the column of the same number; here each has a program.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import tiles
from ..common.config import padded_head_dim
from ..common.layout import as_addressable, is_addressable, layouts, restore_layout
from ..common.tiles import CUT, FULL, LOG2_E
from ..common.variant import kernel_variant
from ..launch.launch import NOT_SPECIALIZED, launch_or_repeat, multiprocessors
from . import row_loop
from .configs import takes_one_launch
from .dropout import dropout_stream, kept_by_dropout
from .lengths import has_padding, is_valid
from .passes import Passes
from .scores import add_bias_gradient, compute_scores, store_bias_gradient, times_derivative_of_cap, times_derivative_of_function
from .sinks import sink_terms


class _Tensors(NamedTuple):
    """Tensors of all heads, arguments of the kernels; None if a pass does not use one. delta: None if both passes compute it.

    Records come before fields that may be None, here and in ``_KeyOperands``: after None, Triton 3.6 loses a record's constants,
    such as a length of 1.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    out: Any
    lse: Any
    delta: Any
    dlse: Any


class _QueryOperands(NamedTuple):
    """A query tile, with lse in base 2; the tensors of keys and values; dropout's random stream."""

    q: Any
    dout: Any
    lse: Any
    delta: Any
    k_tensor: Any
    v_tensor: Any
    stream: Any


@triton.jit
def _add_keys(state, operands, tile, entries, table, sizes, scoring, KIND: tl.constexpr):
    """Adds entries of one kind to a query tile's dQ, and to ``beyond`` as in ``add_bias_gradient``."""
    dq, beyond = state
    variant = scoring.variant
    TILE_N: tl.constexpr = sizes.TILE_N
    STEPS: tl.constexpr = table.BLOCK // TILE_N if table.SPARSE else 1
    last = entries.end * STEPS
    first = entries.begin * STEPS
    position = tiles.step_position(table, first, last, TILE_N)
    for step in tl.range(first, last, num_stages=1 if KIND == CUT else None):
        upcoming = tiles.step_position(table, step + 1, last, TILE_N)
        place = row_loop.locate_step(tile, position, sizes)
        k = tiles.load_tile(operands.k_tensor, tile.batch, tile.kv_head, position, TILE_N, sizes.DIM)
        v = tiles.load_tile(operands.v_tensor, tile.batch, tile.kv_head, position, TILE_N, sizes.DIM_V)
        if KIND == CUT:
            exists = is_valid(entries.valid, position + tl.arange(0, TILE_N))
            k = tl.where(exists[:, None], k, 0.0)
        scores = tl.dot(operands.q, k.T, input_precision="ieee")  # (1)
        if scoring.SCORED:
            changed = compute_scores(scores, place, sizes, scoring, KIND)
            weights = tl.math.exp2(changed - operands.lse[:, None])
        else:
            weights = tl.math.exp2(scores * scoring.scale - operands.lse[:, None])
        if KIND != FULL:
            block = row_loop.locate_in_block(place, step, table, sizes)
            if KIND == CUT:
                weights = tiles.where_kept(weights, 0.0, entries.kind, table, step // STEPS, block)
            else:
                weights = tl.where(tiles.kept_pairs(table, step // STEPS, block, KIND), weights, 0.0)
        if scoring.SCORED:
            # Before the next product, so that the scores do not stay in registers during it.
            weights = times_derivative_of_function(weights, scores, place, sizes, scoring, KIND)
            if variant.rel_bias_gradient is None:
                weights = times_derivative_of_cap(weights, scores, scoring)
        dweights = tl.dot(operands.dout, v.T, input_precision="ieee")  # (2)
        if variant.seed is not None:
            survives = kept_by_dropout(variant, operands.stream, place, sizes)
            dweights = tl.where(survives, dweights, 0.0) * (1.0 / (1.0 - variant.dropout_p))
        dscores = weights * (dweights - operands.delta[:, None])
        if KIND == CUT:
            dscores = tl.where(exists[None, :], dscores, 0.0)
        if variant.rel_bias_gradient is not None:
            # A nonexistent query may be NaN, and so may its row.
            dbiased = tl.where((operands.lse < float("inf"))[:, None], dscores, 0.0)
            beyond = add_bias_gradient(beyond, dbiased, place, sizes, scoring)
            dscores = times_derivative_of_cap(dscores, scores, scoring)
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")  # (5)
        position = upcoming
    return dq, beyond


@triton.jit
def _delta(out_tensor, dlse, dout, tile, query, first_query, sizes):
    """delta = rowsum(dOut * Out) - dLse of queries. dlse: starts at the head's first query, or None."""
    out = tiles.load_tile(out_tensor, tile.batch, tile.head, first_query, sizes.TILE_M, sizes.DIM_V)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + query, mask=query < sizes.q_len, other=0.0)
    return delta


@triton.jit
def _compute_grad_q(slot, batch_head, tensors, dq_tensor, scale, rows, table, sizes, scoring):
    """dQ and delta of a tile of queries."""
    variant = scoring.variant
    TILE_M: tl.constexpr = sizes.TILE_M
    tile, bounds = row_loop.query_tile(slot, batch_head, rows, table, sizes)
    q = tiles.load_tile(tensors.q, tile.batch, tile.head, tile.first, TILE_M, sizes.DIM)
    dout = tiles.load_tile(tensors.dout, tile.batch, tile.head, tile.first, TILE_M, sizes.DIM_V)
    query = tile.first + tl.arange(0, TILE_M)
    first_row = tile.batch_head.to(tl.int64) * sizes.q_len
    # +inf past the last query, so that it adds 0 to the gradient of rel_bias.
    lse = tl.load(tensors.lse + first_row + query, mask=query < sizes.q_len, other=float("inf")) * LOG2_E
    dlse = None if tensors.dlse is None else tensors.dlse + first_row
    delta = _delta(tensors.out, dlse, dout, tile, query, tile.first, sizes)
    valid, valid_keys = row_loop.load_axis_ranges(tile.first, tile.batch, sizes, variant)
    Q_CUT: tl.constexpr = has_padding(variant.q_starts, variant.q_lens)
    if Q_CUT:
        exists = is_valid(valid, query)
        delta = tl.where(exists, delta, 0.0)
    if Q_CUT or has_padding(variant.kv_starts, variant.kv_lens) or scoring.SCORED or variant.sinks is not None:
        lse = tl.where(lse == -float("inf"), float("inf"), lse)  # weights of 0, not NaN, for queries that keep nothing
    if tensors.delta is not None:
        tl.store(tensors.delta + first_row + query, delta, mask=query < sizes.q_len)
    if variant.sinks is not None:
        terms = sink_terms(tl.load(variant.sinks + tile.head), lse, delta)
        tl.store(variant.sinks_gradient + first_row + query, terms, mask=query < sizes.q_len)
    dq = tl.zeros([TILE_M, sizes.DIM], tl.float32)
    operands = _QueryOperands(q, dout, lse, delta, tensors.k, tensors.v, dropout_stream(variant, tile))
    beyond = ()
    if variant.rel_bias_gradient is not None:
        beyond = tl.zeros([TILE_M], tl.float32), tl.zeros([TILE_M], tl.float32)
    dq, beyond = row_loop.add_row(_add_keys, (dq, beyond), operands, tile, bounds, valid_keys, table, sizes, scoring)
    if variant.rel_bias_gradient is not None:
        store_bias_gradient(beyond, tile.head, scoring)
    if Q_CUT:
        dq = tl.where(exists[:, None], dq, 0.0)
    tiles.store_tile(dq_tensor, dq * scale, tile.batch, tile.head, tile.first, TILE_M, sizes.DIM)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def grad_q_kernel(
    q_tensor, k_tensor, v_tensor, out_tensor, dout_tensor, dq_tensor, lse_ptr, dlse_ptr, delta_ptr,
    table, mask_batch_stride, mask_head_stride, heads, group, q_len, kv_len, q_blocks,
    scale, score_scale, variant,
    SHAPE: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """dQ, and delta = rowsum(dOut * Out) - dLse for the next pass: one program per query tile and head. Other arguments: see
    ``attention_forward_kernel``."""
    slot, batch_head = row_loop.slot_and_batch_head(row_loop.count_tiles(q_blocks, q_len, SHAPE.TILE_M, SHAPE.BLOCK, SHAPE.SPARSE))
    _compute_grad_q(
        slot, batch_head,
        _Tensors(q_tensor, k_tensor, v_tensor, dout_tensor, out_tensor, lse_ptr, delta_ptr, dlse_ptr if SHAPE.HAS_DLSE else None),
        dq_tensor, scale,
        tiles.TableRows(table, mask_batch_stride, mask_head_stride, q_blocks),
        tiles.TableEntries(*table[4:], SHAPE.BLOCK, SHAPE.SPARSE),
        row_loop.Sizes(heads, group, q_len, kv_len, SHAPE.DIM, SHAPE.DIM_V, SHAPE.TILE_M, SHAPE.TILE_N, False),
        row_loop.Scoring(score_scale, variant, SHAPE.SCORED, SHAPE.REACH, SCORE, DERIVATIVE),
    )  # fmt: skip


class _KeyOperands(NamedTuple):
    """A key tile, and the tensors of queries; lse, delta and dlse start at the head's first query. out_tensor, dlse: used only
    without delta. stream: dropout's random stream."""

    k: Any
    v: Any
    q_tensor: Any
    dout_tensor: Any
    out_tensor: Any
    lse: Any
    delta: Any
    dlse: Any
    stream: Any


@triton.jit
def _load_per_query(base, query, q_len, KIND: tl.constexpr):
    """Loads a number for each of a step's queries, all of which exist in full entries."""
    return tl.load(base + query) if KIND == FULL else tl.load(base + query, mask=query < q_len, other=0.0)


@triton.jit
def _add_queries(state, operands, tile, entries, table, sizes, scoring, KIND: tl.constexpr):
    """Adds entries of one kind to a key tile's dK and dV; with dropout, dK gets twice its sum."""
    dk, dv = state
    k, v = operands.k, operands.v
    variant = scoring.variant
    TILE_M: tl.constexpr = sizes.TILE_M
    STEPS: tl.constexpr = table.BLOCK // TILE_M if table.SPARSE else 1
    last = entries.end * STEPS
    if variant.seed is not None:
        log2_share = tl.math.log2(tl.full([1], 1.0 - variant.dropout_p, tl.float32))
    first = entries.begin * STEPS
    position = tiles.step_position(table, first, last, TILE_M)
    for step in tl.range(first, last, num_stages=1 if KIND == CUT else None):
        upcoming = tiles.step_position(table, step + 1, last, TILE_M)
        place = row_loop.locate_step(tile, position, sizes)
        query = position + tl.arange(0, TILE_M)
        if operands.delta is None:
            # Before the products: together with their results, a tile of out would not fit in registers.
            dout = tiles.load_tile(operands.dout_tensor, tile.batch, tile.head, position, TILE_M, sizes.DIM_V)
            delta = _delta(operands.out_tensor, operands.dlse, dout, tile, query, position, sizes)
        q = tiles.load_tile(operands.q_tensor, tile.batch, tile.head, position, TILE_M, sizes.DIM)
        lse = _load_per_query(operands.lse, query, sizes.q_len, KIND)
        if KIND == CUT:
            exists = is_valid(entries.valid, query)
            q = tl.where(exists[:, None], q, 0.0)
        scores = tl.dot(k, q.T, input_precision="ieee")  # (1)
        if scoring.SCORED and (scoring.SCORE is not None or variant.rel_bias is not None):
            # Either may drop all of a query's pairs, whose weights must then be 0, not NaN.
            lse = tl.where(lse == -float("inf"), float("inf"), lse)
        log2_sum = lse * LOG2_E
        if variant.seed is not None:  # weights are divided by the share that dropout keeps
            log2_sum += log2_share
        if scoring.SCORED:
            changed = compute_scores(scores, place, sizes, scoring, KIND)
            weights = tl.math.exp2(changed - log2_sum[None, :])
        else:
            weights = tl.math.exp2(scores * scoring.scale - log2_sum[None, :])
        if KIND != FULL:
            block = row_loop.locate_in_block(place, step, table, sizes)
            if KIND == CUT:
                weights = tiles.where_kept(weights, 0.0, entries.kind, table, step // STEPS, block)
            else:
                weights = tl.where(tiles.kept_pairs(table, step // STEPS, block, KIND), weights, 0.0)
        if KIND == CUT:
            weights = tl.where(exists[None, :], weights, 0.0)
        if operands.delta is not None:
            dout = tiles.load_tile(operands.dout_tensor, tile.batch, tile.head, position, TILE_M, sizes.DIM_V)
        if KIND == CUT:
            dout = tl.where(exists[:, None], dout, 0.0)
        if variant.seed is not None:
            # The sign marks dropped pairs, so no mask stays in registers next to the sums.
            survives = kept_by_dropout(variant, operands.stream, place, sizes)
            weights = tl.where(survives, weights, -weights)
            dv = tl.dot(tl.maximum(weights, 0.0).to(dout.dtype), dout, dv, input_precision="ieee")  # (3)
        else:
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")  # (3)
        if scoring.SCORED and variant.seed is None:
            # Before the next product, so that the scores do not stay in registers during it.
            weights = times_derivative_of_function(weights, scores, place, sizes, scoring, KIND)
            weights = times_derivative_of_cap(weights, scores, scoring)
        dweights = tl.dot(v, dout.T, input_precision="ieee")  # (2)
        # Loaded late: one delta per column takes sixteen registers per thread, which the products above need.
        if operands.delta is not None:
            delta = _load_per_query(operands.delta, query, sizes.q_len, KIND)
        elif KIND == CUT:
            delta = tl.where(exists, delta, 0.0)
        if variant.seed is not None:
            # Twice the kept weights as a sum. Twice the maximum above would stay in registers next to the weights.
            twice = (weights + tl.abs(weights)) * dweights
            dscores = twice - tl.abs(weights) * (delta * (2.0 * (1.0 - variant.dropout_p)))[None, :]
        else:
            dscores = weights * (dweights - delta[None, :])
        if scoring.SCORED and variant.seed is not None:
            dscores = times_derivative_of_function(dscores, scores, place, sizes, scoring, KIND)
            dscores = times_derivative_of_cap(dscores, scores, scoring)
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")  # (4)
        position = upcoming
    return dk, dv


@triton.jit
def _compute_grad_kv(slot, batch_head, tensors, dk_tensor, dv_tensor, scale, rows, table, sizes, scoring):
    """dK and dV of a key tile. batch_head: batch * kv_heads + key head."""
    variant = scoring.variant
    TILE_N: tl.constexpr = sizes.TILE_N
    kv_heads = sizes.heads // sizes.group
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    first = slot * TILE_N
    if table.SPARSE:
        # Masks of a group's heads may have different orders; any one order visits every key block once.
        mask = tiles.load_mask_number(rows, batch, kv_head * sizes.group)
        _, first = tiles.ordered_tile(rows, mask, slot, TILE_N, table.BLOCK)
    k = tiles.load_tile(tensors.k, batch, kv_head, first, TILE_N, sizes.DIM)
    v = tiles.load_tile(tensors.v, batch, kv_head, first, TILE_N, sizes.DIM_V)
    dk = tl.zeros([TILE_N, sizes.DIM], tl.float32)
    dv = tl.zeros([TILE_N, sizes.DIM_V], tl.float32)
    valid, valid_queries = row_loop.load_axis_ranges(first, batch, sizes, variant)
    for member in range(sizes.group):
        head = kv_head * sizes.group + member
        tile = row_loop.Tile(batch, head, kv_head, batch * sizes.heads + head, first)
        stream = dropout_stream(variant, tile)
        first_row = tile.batch_head.to(tl.int64) * sizes.q_len
        if table.SPARSE:
            bounds = tiles.row_bounds(rows, tiles.load_mask_number(rows, batch, head), first // table.BLOCK)
        else:
            bounds = tiles.dense_bounds(sizes.q_len, sizes.TILE_M)
        delta = None if tensors.delta is None else tensors.delta + first_row
        dlse = None if tensors.dlse is None else tensors.dlse + first_row
        operands = _KeyOperands(k, v, tensors.q, tensors.dout, tensors.out, tensors.lse + first_row, delta, dlse, stream)
        dk, dv = row_loop.add_row(_add_queries, (dk, dv), operands, tile, bounds, valid_queries, table, sizes, scoring)
    if has_padding(variant.kv_starts, variant.kv_lens):
        exists = is_valid(valid, first + tl.arange(0, TILE_N))
        dk, dv = tl.where(exists[:, None], dk, 0.0), tl.where(exists[:, None], dv, 0.0)
    if variant.seed is not None:
        dk *= 0.5
    tiles.store_tile(dk_tensor, dk * scale, batch, kv_head, first, TILE_N, sizes.DIM)
    tiles.store_tile(dv_tensor, dv, batch, kv_head, first, TILE_N, sizes.DIM_V)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def grad_kv_kernel(
    q_tensor, k_tensor, v_tensor, dout_tensor, dk_tensor, dv_tensor, lse_ptr, delta_ptr,
    table, mask_batch_stride, mask_head_stride, heads, group, q_len, kv_len, kv_blocks,
    scale, score_scale, variant,
    SHAPE: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """dK and dV: one program per key tile and key head, over the ``group`` query heads that share it."""
    count = row_loop.count_tiles(kv_blocks, kv_len, SHAPE.TILE_N, SHAPE.BLOCK, SHAPE.SPARSE)
    slot, batch_head = row_loop.slot_and_batch_head(count)
    _compute_grad_kv(
        slot, batch_head,
        _Tensors(q_tensor, k_tensor, v_tensor, dout_tensor, None, lse_ptr, delta_ptr, None),
        dk_tensor, dv_tensor, scale,
        tiles.TableRows(table, mask_batch_stride, mask_head_stride, kv_blocks),
        tiles.TableEntries(*table[4:], SHAPE.BLOCK, SHAPE.SPARSE),
        row_loop.Sizes(heads, group, q_len, kv_len, SHAPE.DIM, SHAPE.DIM_V, SHAPE.TILE_M, SHAPE.TILE_N, True),
        row_loop.Scoring(score_scale, variant, SHAPE.SCORED, SHAPE.REACH, SCORE, DERIVATIVE),
    )  # fmt: skip


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def grad_qkv_kernel(
    q_tensor, k_tensor, v_tensor, out_tensor, dout_tensor, dq_tensor, dk_tensor, dv_tensor, lse_ptr, dlse_ptr, columns, kv_blocks,
    rows, mask_batch_stride, mask_head_stride, heads, group, q_len, kv_len, q_blocks,
    scale, score_scale, variant,
    SHAPE: tl.constexpr, SCORE: tl.constexpr, DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """``grad_kv_kernel`` and ``grad_q_kernel`` in one grid. Each key head has the programs of its key tiles, which take longer,
    then the programs of the query tiles of all query heads that share it. columns, rows: the tables by key and by query."""
    dlse = dlse_ptr if SHAPE.HAS_DLSE else None
    tensors = _Tensors(q_tensor, k_tensor, v_tensor, dout_tensor, out_tensor, lse_ptr, None, dlse)
    key_tiles = row_loop.count_tiles(kv_blocks, kv_len, SHAPE.TILE_N, SHAPE.BLOCK, SHAPE.SPARSE)
    query_tiles = row_loop.count_tiles(q_blocks, q_len, SHAPE.TILE_M, SHAPE.BLOCK, SHAPE.SPARSE)
    slot, batch_head = row_loop.slot_and_batch_head(key_tiles + group * query_tiles)
    # Records are arguments, not variables: as variables, their constants would become tensors.
    # fmt: off
    if slot < key_tiles:
        _compute_grad_kv(
            slot, batch_head, tensors, dk_tensor, dv_tensor, scale,
            tiles.TableRows(columns, mask_batch_stride, mask_head_stride, kv_blocks),
            tiles.TableEntries(*columns[4:], SHAPE.BLOCK, SHAPE.SPARSE),
            row_loop.Sizes(heads, group, q_len, kv_len, SHAPE.DIM, SHAPE.DIM_V, SHAPE.TILE_M, SHAPE.TILE_N, True),
            row_loop.Scoring(score_scale, variant, SHAPE.SCORED, SHAPE.REACH, SCORE, DERIVATIVE),
        )
    else:
        _compute_grad_q(
            (slot - key_tiles) % query_tiles, batch_head * group + (slot - key_tiles) // query_tiles, tensors, dq_tensor, scale,
            tiles.TableRows(rows, mask_batch_stride, mask_head_stride, q_blocks),
            tiles.TableEntries(*rows[4:], SHAPE.BLOCK, SHAPE.SPARSE),
            row_loop.Sizes(heads, group, q_len, kv_len, SHAPE.DIM, SHAPE.DIM_V, SHAPE.TILE_M, SHAPE.TILE_N, False),
            row_loop.Scoring(score_scale, variant, SHAPE.SCORED, SHAPE.REACH, SCORE, DERIVATIVE),
        )
    # fmt: on


def attention_backward(call, dout, dlse, out, lse):
    """dq, dk, dv like q, k, v, then the gradient of rel_bias and the terms of the gradient of sinks, (batch, heads, q_len), each if
    it is learned. call: an ``AttentionCall``. dlse may be None."""
    dlse, learned = None if dlse is None else dlse.contiguous(), call.rest is not None and call.rest.learned
    inputs = dout, out, lse, *(() if dlse is None else (dlse,)), *call.inputs()
    # Hooks of saved tensors may have changed their layouts.
    key = grad_q_kernel.fn, dlse is None, *layouts(inputs)
    run = partial(_run, call, dout, dlse, out, lse)
    gradients = launch_or_repeat(None if learned else call.launches, key, call.table, inputs, run)
    return tuple(gradients[: 3 + learned + (call.learned_sinks is not None)])


def _run(call, dout, dlse, out, lse, recording):
    (q, k, v), mask, variant, sinks = call[:3], call.table, call.rest, call.learned_sinks
    if not all(map(is_addressable, (dout, out, q, k, v))):
        dout, out, *ready = (as_addressable(t) for t in (dout, out, q, k, v))
        gradients = attention_backward(call.on(*ready), dout, dlse, out, lse)
        return *map(restore_layout, gradients[:3], ready, (q, k, v)), *gradients[3:]
    learned = variant is not None and variant.learned
    drel_bias = torch.zeros_like(variant.rel_bias) if learned else None
    (heads, q_len), (kv_heads, kv_len) = q.shape[1:3], k.shape[1:3]
    tokens = len(q) * (heads * q_len + kv_heads * kv_len)
    one_launch = not learned and takes_one_launch(tokens, multiprocessors(q.device))  # without atomics, which a learned bias needs
    dq, dk, dv = (recording.fresh(torch.empty_like(t)) for t in (q, k, v))
    of_sinks = None if sinks is None else recording.fresh(torch.empty_like(lse))
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv, "lse": lse}
    tensors["dlse"] = lse if dlse is None else dlse
    dims = padded_head_dim(q.shape[3]), padded_head_dim(v.shape[3])
    passes = Passes(recording, tensors, mask, call.scale, *dims, dlse is not None)
    of_queries = kernel_variant(variant, drel_bias, sinks, of_sinks)
    if one_launch:
        passes.run("grad_qkv", grad_qkv_kernel, of_queries)
    else:
        tensors["delta"] = recording.fresh(torch.empty_like(lse))
        passes.run("grad_q", grad_q_kernel, of_queries)
        passes.run("grad_kv", grad_kv_kernel, kernel_variant(variant))
    return [t for t in (dq, dk, dv, drel_bias, of_sinks) if t is not None]
