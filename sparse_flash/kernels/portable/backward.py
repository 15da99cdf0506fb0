"""The portable backward kernels: two passes that recompute the attention weights from lse.

One pass walks the keys of each query tile and computes dQ; the other then walks the queries of each key tile, through the
transposed table, and computes dK and dV. Each output is written once by one program in a fixed order, so gradients
repeat bit for bit. The gradient of a relative bias alone is added up by atomic additions, in the first pass.

Source: arXiv:2307.08691, Alg. 2; two passes as in the Triton tutorial's fused attention.
"""

import torch
import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..common.tiles import (
    BITS,
    CUT,
    FULL,
    LOG2_E,
    RUNS,
    dense_bounds,
    kept_pairs,
    load_tile,
    of_kept_pairs,
    ordered_tile,
    row_bounds,
    step_position,
    store_tile,
)
from ..common.variant import kernel_terms, launch_options, within_memory
from ..launch import tuned
from ..launch.launch import NOT_SPECIALIZED, Recording, described, length_variant, row_count, run_within_memory, table_arguments
from ..launch.replay import known_call
from .configs import grad_kv_config, grad_q_config
from .dropout import dropout_stream, kept_by_dropout
from .lengths import cut_entry, valid_entries, valid_tokens
from .scores import add_bias_gradient, scored, store_bias_gradient, times_derivative_of_cap, times_derivative_of_function


@triton.jit
def _walk_keys(
    dq,
    beyond,
    q,
    dout,
    lse,
    delta,
    k_tensor,
    v_tensor,
    batch,
    head,
    line,
    stream,
    kv_head,
    table,
    begin,
    end,
    first_query,
    q_len,
    kv_len,
    valid,
    score_scale,
    terms,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    SCORED: tl.constexpr,
    REACH: tl.constexpr,
    SCORE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Adds dS K of entries begin .. end - 1, all of one kind, to the dQ of a query tile, and to ``beyond`` what
    ``add_bias_gradient`` says. lse: (TILE_M,) in base 2. valid: for KIND CUT the first key that exists, the one past the
    last, and the entries' kind."""
    STEPS: tl.constexpr = TABLE_BLOCK // TILE_N if SPARSE else 1
    last = end * STEPS
    position = step_position(table[0], begin * STEPS, last, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
    for step in tl.range(begin * STEPS, last, num_stages=1 if KIND == CUT else None):
        upcoming = step_position(table[0], step + 1, last, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
        k = load_tile(k_tensor, batch, kv_head, position, TILE_N, DIM)
        v = load_tile(v_tensor, batch, kv_head, position, TILE_N, DIM_V)
        if KIND == CUT:
            key = position + tl.arange(0, TILE_N)
            exists = (key >= valid[0]) & (key < valid[1])
            k = tl.where(exists[:, None], k, 0.0)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if SCORED:
            place = (batch, head, line, first_query + (kv_len - q_len), position)
            changed = scored(scores, score_scale, place, terms, REACH, SCORE, TILE_M, TILE_N, False, KIND)
            weights = tl.math.exp2(changed - lse[:, None])
        else:
            weights = tl.math.exp2(scores * score_scale - lse[:, None])
        if KIND != FULL:
            block_start = position - (step % STEPS) * TILE_N
            row_start = first_query // TABLE_BLOCK * TABLE_BLOCK
            q_in_block = (first_query - row_start + tl.arange(0, TILE_M))[:, None]
            kv_in_block = (position - block_start + tl.arange(0, TILE_N))[None, :]
            left = (q_len - row_start, kv_len - block_start)
            if KIND == CUT:
                weights = of_kept_pairs(weights, 0.0, valid[2], table, step // STEPS, q_in_block, kv_in_block, TABLE_BLOCK, SPARSE)
            else:
                kept = kept_pairs(table, step // STEPS, q_in_block, kv_in_block, left[0], left[1], TABLE_BLOCK, SPARSE, KIND)
                weights = tl.where(kept, weights, 0.0)
        if SCORED:
            # Not after the next product, beside which the scores would be kept.
            weights = times_derivative_of_function(
                weights, scores, score_scale, place, terms, REACH, DERIVATIVE, TILE_M, TILE_N, False, KIND
            )
            if terms.rel_bias_gradient is None:
                weights = times_derivative_of_cap(weights, scores, score_scale, terms)
        dweights = tl.dot(dout, v.T, input_precision="ieee")
        if terms.seed is not None:
            survives = kept_by_dropout(terms, stream, first_query, position, TILE_M, TILE_N, False)
            dweights = tl.where(survives, dweights, 0.0) * (1.0 / (1.0 - terms.dropout_p))
        dscores = weights * (dweights - delta[:, None])
        if KIND == CUT:
            dscores = tl.where(exists[None, :], dscores, 0.0)
        if terms.rel_bias_gradient is not None:
            # A query that does not exist may hold anything, and so may its row.
            dbiased = tl.where((lse < float("inf"))[:, None], dscores, 0.0)
            beyond = add_bias_gradient(beyond, dbiased, head, position - place[3], terms, REACH, TILE_M, TILE_N)
            dscores = times_derivative_of_cap(dscores, scores, score_scale, terms)
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
        position = upcoming
    return dq, beyond


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def grad_q_kernel(
    q_tensor,
    k_tensor,
    v_tensor,
    out_tensor,
    dout_tensor,
    dq_tensor,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    mask_index,
    row_ptr,
    row_split,
    row_order,
    col_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    mask_batch_stride,
    mask_head_stride,
    heads,
    group,
    q_len,
    kv_len,
    q_blocks,
    scale,
    score_scale,
    terms,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    SCORED: tl.constexpr,
    REACH: tl.constexpr,
    SCORE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """dQ, and for the next pass delta = rowsum(dOut * Out) - dLse, which the softmax's derivative subtracts from each dP
    of a row: one program a query tile and head. DIM: padded head_dim of q, k and dQ, DIM_V: of v, out and dOut."""
    slot = tl.program_id(0)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    table = (col_idx, tile_idx, tile_runs, tile_bits)
    if SPARSE:
        mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
        row, first_query = ordered_tile(row_order, mask, q_blocks, slot, TILE_M, TABLE_BLOCK)
        bounds = row_bounds(row_ptr, row_split, mask, row, q_blocks)
    else:
        first_query = slot * TILE_M
        bounds = dense_bounds(kv_len, TILE_N)
    q = load_tile(q_tensor, batch, head, first_query, TILE_M, DIM)
    dout = load_tile(dout_tensor, batch, head, first_query, TILE_M, DIM_V)
    query = first_query + tl.arange(0, TILE_M)
    row_line = tl.program_id(1).to(tl.int64) * q_len + query
    lse = tl.load(lse_ptr + row_line, mask=query < q_len, other=0.0) * LOG2_E
    out = load_tile(out_tensor, batch, head, first_query, TILE_M, DIM_V)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row_line, mask=query < q_len, other=0.0)
    first, last = valid_tokens(terms.q_starts, terms.q_lens, batch, q_len)
    first_key, last_key = valid_tokens(terms.kv_starts, terms.kv_lens, batch, kv_len)
    Q_CUT: tl.constexpr = terms.q_starts is not None or terms.q_lens is not None
    KV_CUT: tl.constexpr = terms.kv_starts is not None or terms.kv_lens is not None
    if Q_CUT:  # a tile of no valid query has no keys
        last_key = tl.where((first_query < last) & (first_query + TILE_M > first), last_key, first_key)
        exists = (query >= first) & (query < last)
        delta = tl.where(exists, delta, 0.0)
    if Q_CUT or KV_CUT or SCORED:
        lse = tl.where(lse == -float("inf"), float("inf"), lse)  # weights of a query that keeps nothing are 0, not NaN
    tl.store(delta_ptr + row_line, delta, mask=query < q_len)
    dq = tl.zeros([TILE_M, DIM], tl.float32)
    line = tl.program_id(1)
    stream = dropout_stream(terms, line)
    beyond = ()
    if terms.rel_bias_gradient is not None:
        beyond = tl.zeros([TILE_M], tl.float32), tl.zeros([TILE_M], tl.float32)
    KINDS: tl.constexpr = BITS + 1 if SPARSE else RUNS if Q_CUT or KV_CUT else BITS
    # fmt: off
    if Q_CUT or KV_CUT:
        entries = valid_entries(col_idx, bounds, first_key, last_key, kv_len, TABLE_BLOCK if SPARSE else TILE_N, SPARSE)
        if KV_CUT or not SPARSE:
            for number in range(2 * KINDS):
                begin, end = cut_entry(entries, number, KINDS)
                if begin < end:
                    dq, beyond = _walk_keys(dq, beyond, q, dout, lse, delta, k_tensor, v_tensor, batch, head, line, stream,
                                            kv_head, table, begin, end, first_query, q_len, kv_len,
                                            (first_key, last_key, number // 2), score_scale, terms, DIM, DIM_V, TILE_M,
                                            TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH, SCORE, DERIVATIVE, CUT)
    for KIND in tl.static_range(FULL, KINDS):
        if Q_CUT or KV_CUT:
            begin, end = entries[KIND][1], entries[KIND][2]
        else:
            begin, end = bounds[KIND], bounds[KIND + 1]
        if KIND == FULL:  # noqa: SIM114
            dq, beyond = _walk_keys(dq, beyond, q, dout, lse, delta, k_tensor, v_tensor, batch, head, line, stream, kv_head, table,
                                    begin, end, first_query, q_len, kv_len, (0, 0, 0), score_scale, terms, DIM, DIM_V, TILE_M,
                                    TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH, SCORE, DERIVATIVE, KIND)
        elif begin < end:
            dq, beyond = _walk_keys(dq, beyond, q, dout, lse, delta, k_tensor, v_tensor, batch, head, line, stream, kv_head, table,
                                    begin, end, first_query, q_len, kv_len, (0, 0, 0), score_scale, terms, DIM, DIM_V, TILE_M,
                                    TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH, SCORE, DERIVATIVE, KIND)
    # fmt: on
    if terms.rel_bias_gradient is not None:
        store_bias_gradient(beyond, head, terms, REACH)
    if Q_CUT:
        dq = tl.where(exists[:, None], dq, 0.0)
    store_tile(dq_tensor, dq * scale, batch, head, first_query, TILE_M, DIM)


@triton.jit
def _walk_queries(
    dk,
    dv,
    k,
    v,
    q_tensor,
    dout_tensor,
    lse_base,
    delta_base,
    batch,
    head,
    line,
    stream,
    table,
    begin,
    end,
    first_key,
    q_len,
    kv_len,
    valid,
    score_scale,
    terms,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    SCORED: tl.constexpr,
    REACH: tl.constexpr,
    SCORE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Adds dS^T Q and P^T dOut of entries begin .. end - 1, all of one kind, to the dK and dV of a key tile; with
    dropout, to dK twice that. valid: for KIND CUT the first query that exists, the one past the last, and the entries'
    kind."""
    STEPS: tl.constexpr = TABLE_BLOCK // TILE_M if SPARSE else 1
    last = end * STEPS
    if terms.seed is not None:
        log2_share = tl.math.log2(tl.full([1], 1.0 - terms.dropout_p, tl.float32))
    position = step_position(table[0], begin * STEPS, last, STEPS, TILE_M, TABLE_BLOCK, SPARSE)
    for step in tl.range(begin * STEPS, last, num_stages=1 if KIND == CUT else None):
        upcoming = step_position(table[0], step + 1, last, STEPS, TILE_M, TABLE_BLOCK, SPARSE)
        query = position + tl.arange(0, TILE_M)
        q = load_tile(q_tensor, batch, head, position, TILE_M, DIM)
        lse = tl.load(lse_base + query) if KIND == FULL else tl.load(lse_base + query, mask=query < q_len, other=0.0)
        if KIND == CUT:
            exists = (query >= valid[0]) & (query < valid[1])
            q = tl.where(exists[:, None], q, 0.0)
        scores = tl.dot(k, q.T, input_precision="ieee")
        if SCORED and (SCORE is not None or terms.rel_bias is not None):
            # Either may drop all of a query's pairs: their weights are then 0, not NaN.
            lse = tl.where(lse == -float("inf"), float("inf"), lse)
        log2_sum = lse * LOG2_E
        if terms.seed is not None:  # weights are divided by the share that dropout keeps
            log2_sum += log2_share
        if SCORED:
            place = (batch, head, line, position + (kv_len - q_len), first_key)
            changed = scored(scores, score_scale, place, terms, REACH, SCORE, TILE_M, TILE_N, True, KIND)
            weights = tl.math.exp2(changed - log2_sum[None, :])
        else:
            weights = tl.math.exp2(scores * score_scale - log2_sum[None, :])
        if KIND != FULL:
            block_start = position - (step % STEPS) * TILE_M
            col_start = first_key // TABLE_BLOCK * TABLE_BLOCK
            q_in_block = (position - block_start + tl.arange(0, TILE_M))[None, :]
            kv_in_block = (first_key - col_start + tl.arange(0, TILE_N))[:, None]
            left = (q_len - block_start, kv_len - col_start)
            if KIND == CUT:
                weights = of_kept_pairs(weights, 0.0, valid[2], table, step // STEPS, q_in_block, kv_in_block, TABLE_BLOCK, SPARSE)
            else:
                kept = kept_pairs(table, step // STEPS, q_in_block, kv_in_block, left[0], left[1], TABLE_BLOCK, SPARSE, KIND)
                weights = tl.where(kept, weights, 0.0)
        if KIND == CUT:
            weights = tl.where(exists[None, :], weights, 0.0)
        dout = load_tile(dout_tensor, batch, head, position, TILE_M, DIM_V)
        if KIND == CUT:
            dout = tl.where(exists[:, None], dout, 0.0)
        if terms.seed is not None:
            # What is dropped goes as the sign, so that no mask has to be kept beside the sums.
            survives = kept_by_dropout(terms, stream, position, first_key, TILE_M, TILE_N, True)
            weights = tl.where(survives, weights, -weights)
            dv = tl.dot(tl.maximum(weights, 0.0).to(dout.dtype), dout, dv, input_precision="ieee")
        else:
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        if SCORED and terms.seed is None:
            # Not after the next product, beside which the scores would be kept.
            weights = times_derivative_of_function(
                weights, scores, score_scale, place, terms, REACH, DERIVATIVE, TILE_M, TILE_N, True, KIND
            )
            weights = times_derivative_of_cap(weights, scores, score_scale, terms)
        dweights = tl.dot(v, dout.T, input_precision="ieee")
        # Loaded only here: one delta a column costs sixteen registers a thread, and the products above need them all.
        delta = tl.load(delta_base + query) if KIND == FULL else tl.load(delta_base + query, mask=query < q_len, other=0.0)
        if terms.seed is not None:
            # Twice the kept weights as a sum, not as twice the maximum above, beside which they would be kept.
            twice = (weights + tl.abs(weights)) * dweights
            dscores = twice - tl.abs(weights) * (delta * (2.0 * (1.0 - terms.dropout_p)))[None, :]
        else:
            dscores = weights * (dweights - delta[None, :])
        if SCORED and terms.seed is not None:
            dscores = times_derivative_of_function(
                dscores, scores, score_scale, place, terms, REACH, DERIVATIVE, TILE_M, TILE_N, True, KIND
            )
            dscores = times_derivative_of_cap(dscores, scores, score_scale, terms)
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
        position = upcoming
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def grad_kv_kernel(
    q_tensor,
    k_tensor,
    v_tensor,
    dout_tensor,
    dk_tensor,
    dv_tensor,
    lse_ptr,
    delta_ptr,
    mask_index,
    col_ptr,
    col_split,
    col_order,
    row_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    mask_batch_stride,
    mask_head_stride,
    heads,
    group,
    q_len,
    kv_len,
    kv_blocks,
    scale,
    score_scale,
    terms,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    SCORED: tl.constexpr,
    REACH: tl.constexpr,
    SCORE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
):
    """dK and dV: one program a key tile and key head, over the ``group`` query heads that share it. DIM, DIM_V: see
    ``grad_q_kernel``."""
    slot = tl.program_id(0)
    kv_heads = heads // group
    batch = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    table = (row_idx, tile_idx, tile_runs, tile_bits)
    first_key = slot * TILE_N
    if SPARSE:
        # The heads of a group may have masks of different orders; any one order visits every key block once.
        mask = tl.load(mask_index + batch * mask_batch_stride + kv_head * group * mask_head_stride)
        _, first_key = ordered_tile(col_order, mask, kv_blocks, slot, TILE_N, TABLE_BLOCK)
    k = load_tile(k_tensor, batch, kv_head, first_key, TILE_N, DIM)
    v = load_tile(v_tensor, batch, kv_head, first_key, TILE_N, DIM_V)
    dk = tl.zeros([TILE_N, DIM], tl.float32)
    dv = tl.zeros([TILE_N, DIM_V], tl.float32)
    first, last = valid_tokens(terms.kv_starts, terms.kv_lens, batch, kv_len)
    first_query, last_query = valid_tokens(terms.q_starts, terms.q_lens, batch, q_len)
    Q_CUT: tl.constexpr = terms.q_starts is not None or terms.q_lens is not None
    KV_CUT: tl.constexpr = terms.kv_starts is not None or terms.kv_lens is not None
    if KV_CUT:  # a tile of no valid key has no queries
        last_query = tl.where((first_key < last) & (first_key + TILE_N > first), last_query, first_query)
    KINDS: tl.constexpr = BITS + 1 if SPARSE else RUNS if Q_CUT or KV_CUT else BITS
    for member in range(group):
        head = kv_head * group + member
        line = batch * heads + head
        stream = dropout_stream(terms, line)
        rows = line.to(tl.int64) * q_len
        if SPARSE:
            mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
            bounds = row_bounds(col_ptr, col_split, mask, first_key // TABLE_BLOCK, kv_blocks)
        else:
            bounds = dense_bounds(q_len, TILE_M)
        lse, delta = lse_ptr + rows, delta_ptr + rows
        # fmt: off
        if Q_CUT or KV_CUT:
            entries = valid_entries(row_idx, bounds, first_query, last_query, q_len, TABLE_BLOCK if SPARSE else TILE_M, SPARSE)
            if Q_CUT or not SPARSE:
                for number in range(2 * KINDS):
                    begin, end = cut_entry(entries, number, KINDS)
                    if begin < end:
                        dk, dv = _walk_queries(dk, dv, k, v, q_tensor, dout_tensor, lse, delta, batch, head, line, stream, table,
                                               begin, end, first_key, q_len, kv_len, (first_query, last_query, number // 2),
                                               score_scale, terms, DIM, DIM_V, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH,
                                               SCORE, DERIVATIVE, CUT)
        for KIND in tl.static_range(FULL, KINDS):
            if Q_CUT or KV_CUT:
                begin, end = entries[KIND][1], entries[KIND][2]
            else:
                begin, end = bounds[KIND], bounds[KIND + 1]
            if KIND == FULL:  # noqa: SIM114
                dk, dv = _walk_queries(dk, dv, k, v, q_tensor, dout_tensor, lse, delta, batch, head, line, stream, table, begin,
                                       end, first_key, q_len, kv_len, (0, 0, 0), score_scale, terms, DIM, DIM_V, TILE_M,
                                       TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH, SCORE, DERIVATIVE, KIND)
            elif begin < end:
                dk, dv = _walk_queries(dk, dv, k, v, q_tensor, dout_tensor, lse, delta, batch, head, line, stream, table, begin,
                                       end, first_key, q_len, kv_len, (0, 0, 0), score_scale, terms, DIM, DIM_V, TILE_M,
                                       TILE_N, TABLE_BLOCK, SPARSE, SCORED, REACH, SCORE, DERIVATIVE, KIND)
        # fmt: on
    if KV_CUT:
        key = first_key + tl.arange(0, TILE_N)
        exists = (key >= first) & (key < last)
        dk, dv = tl.where(exists[:, None], dk, 0.0), tl.where(exists[:, None], dv, 0.0)
    if terms.seed is not None:
        dk *= 0.5
    store_tile(dk_tensor, dk * scale, batch, kv_head, first_key, TILE_N, DIM)
    store_tile(dv_tensor, dv, batch, kv_head, first_key, TILE_N, DIM_V)


def attention_backward(dout, dlse, q, k, v, out, lse, mask, scale, terms=None, q_config=None, kv_config=None):
    """dq, dk, dv like q, k, v, and the gradient of terms.rel_bias where that is learned. dlse may be None.

    The others: unbroken rows, base and strides multiples of 16 bytes.
    """
    drel_bias = torch.zeros_like(terms.rel_bias) if terms is not None and terms.learned else None
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_head_dim = v.shape[1:]
    dim, dim_v = padded_head_dim(head_dim), padded_head_dim(v_head_dim)
    block_size = mask.block_size if mask else None

    has_dlse = dlse is not None
    tensors = _tensors(dout, dlse, q, k, v, out, lse)
    *_, dlse, delta, dq, dk, dv = tensors
    recording = Recording(mask, _key(dout, has_dlse, q, k, v, out, scale), tensors)
    given, switches, kinds = kernel_terms(terms, drel_bias)

    def run_grad_q(config):
        m, n = config.tile_m, config.tile_n
        arguments = [
            described(q, m, dim),
            described(k, n, dim),
            described(v, n, dim_v),
            described(out, m, dim_v),
            described(dout, m, dim_v),
            described(dq, m, dim),
            lse,
            dlse,
            delta,
            *table_arguments(mask, mask and mask.by_query, lse),
            heads,
            heads // kv_heads,
            q_len,
            kv_len,
            mask.by_query.row_order.shape[1] if mask else 0,
            scale,
            scale * LOG2_E.value,
            given,
        ]
        constants = {"DIM": dim, "DIM_V": dim_v, "TILE_M": m, "TILE_N": n, "TABLE_BLOCK": block_size or n}
        constants |= {"SPARSE": mask is not None, **switches, "HAS_DLSE": has_dlse}
        grid = (row_count(mask and mask.by_query, q_len, m, block_size), batch * heads)
        options = launch_options(config, given, switches, m)
        recording.launch(grad_q_kernel, (grid, arguments, constants, options), (*length_variant(q_len), *kinds))

    shape = q.device, q.dtype, dim, dim_v, block_size
    if q_config is not None:
        run_grad_q(q_config)
    else:
        config = grad_q_config(q.dtype, head_dim, block_size, q.device, v_head_dim)
        config = within_memory(config, given, switches, max(dim, dim_v))
        more = drel_bias is not None, has_dlse
        run_within_memory(run_grad_q, config, lambda: ("grad_q", *shape, kinds, *switches.values(), *more))

    kv_given, kv_switches, kv_kinds = kernel_terms(terms)

    def run_grad_kv(config):
        m, n = config.tile_m, config.tile_n
        arguments = [
            described(q, m, dim),
            described(k, n, dim),
            described(v, n, dim_v),
            described(dout, m, dim_v),
            described(dk, n, dim),
            described(dv, n, dim_v),
            lse,
            delta,
            *table_arguments(mask, mask and mask.by_key, lse),
            heads,
            heads // kv_heads,
            q_len,
            kv_len,
            mask.by_key.row_order.shape[1] if mask else 0,
            scale,
            scale * LOG2_E.value,
            kv_given,
        ]
        constants = {"DIM": dim, "DIM_V": dim_v, "TILE_M": m, "TILE_N": n, "TABLE_BLOCK": block_size or m}
        constants |= {"SPARSE": mask is not None, **kv_switches}
        grid = (row_count(mask and mask.by_key, kv_len, n, block_size), batch * kv_heads)
        options = launch_options(config, kv_given, kv_switches, n)
        recording.launch(grad_kv_kernel, (grid, arguments, constants, options), (*length_variant(q_len), *kv_kinds))

    if kv_config is not None:
        run_grad_kv(kv_config)
    else:
        config = grad_kv_config(q.dtype, head_dim, block_size, q.device, v_head_dim)
        run_within_memory(run_grad_kv, config, lambda: ("grad_kv", *shape, kv_kinds, *kv_switches.values()))
    if terms is None and q_config is None and kv_config is None:
        recording.finish()
    return (dq, dk, dv) if drel_bias is None else (dq, dk, dv, drel_bias)


def repeated_backward(dout, dlse, q, k, v, out, lse, mask, scale):
    """The same without terms by launches that were made before, or None; any tensors."""
    known = known_call(mask, _key(dout, dlse is not None, q, k, v, out, scale))
    if known is None:
        return None
    tensors = _tensors(dout, dlse, q, k, v, out, lse)
    return tensors[-3:] if known.again(tensors) else None


def _key(dout, has_dlse: bool, q, k, v, out, scale) -> tuple:
    layout = q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), out.stride(), dout.stride(), q.dtype, q.device
    return grad_q_kernel.fn, tuned.times_read(), *layout, has_dlse, scale


def _tensors(dout, dlse, q, k, v, out, lse) -> tuple[torch.Tensor, ...]:
    dlse = lse if dlse is None else dlse.contiguous()
    return q, k, v, out, dout, lse, dlse, torch.empty_like(lse), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
