"""The portable backward kernels: two passes that recompute the attention weights from lse, without atomics.

One pass walks the keys of each query tile and computes dQ; the other then walks the queries of each key tile, through the
transposed table, and computes dK and dV. Each output is written once by one program in a fixed order, so gradients
repeat bit for bit.

Source: arXiv:2307.08691, Alg. 2; two passes as in the Triton tutorial's fused attention.
"""

import torch
import triton
import triton.language as tl

from .common import (
    BITS,
    FULL,
    LOG2_E,
    RUNS,
    dense_bounds,
    kept_pairs,
    load_tile,
    ordered_tile,
    row_bounds,
    step_position,
    store_tile,
)
from .configs import grad_kv_config, grad_q_config, padded_head_dim
from .launch import NOT_SPECIALIZED, described, launch, length_variant, row_count, table_arguments


@triton.jit
def _walk_keys(
    dq,
    q,
    dout,
    lse,
    delta,
    k_tensor,
    v_tensor,
    batch,
    kv_head,
    table,
    begin,
    end,
    first_query,
    q_len,
    kv_len,
    score_scale,
    DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Adds dS K of entries begin .. end - 1, all of one kind, to the dQ of a query tile. lse: (TILE_M,) in base 2."""
    STEPS: tl.constexpr = TABLE_BLOCK // TILE_N if SPARSE else 1
    last = end * STEPS
    position = step_position(table[0], begin * STEPS, last, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
    for step in tl.range(begin * STEPS, last):
        upcoming = step_position(table[0], step + 1, last, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
        k = load_tile(k_tensor, batch, kv_head, position, TILE_N, DIM)
        v = load_tile(v_tensor, batch, kv_head, position, TILE_N, DIM)
        scores = tl.dot(q, k.T, input_precision="ieee")
        weights = tl.math.exp2(scores * score_scale - lse[:, None])
        if KIND != FULL:
            block_start = position - (step % STEPS) * TILE_N
            row_start = first_query // TABLE_BLOCK * TABLE_BLOCK
            q_in_block = (first_query - row_start + tl.arange(0, TILE_M))[:, None]
            kv_in_block = (position - block_start + tl.arange(0, TILE_N))[None, :]
            left = (q_len - row_start, kv_len - block_start)
            kept = kept_pairs(table, step // STEPS, q_in_block, kv_in_block, left[0], left[1], TABLE_BLOCK, SPARSE, KIND)
            weights = tl.where(kept, weights, 0.0)
        dweights = tl.dot(dout, v.T, input_precision="ieee")
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
        position = upcoming
    return dq


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
    DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """dQ, and for the next pass delta = rowsum(dOut * Out) - dLse, which the softmax's derivative subtracts from each dP
    of a row: one program a query tile and head."""
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
    dout = load_tile(dout_tensor, batch, head, first_query, TILE_M, DIM)
    query = first_query + tl.arange(0, TILE_M)
    line = tl.program_id(1).to(tl.int64) * q_len + query
    lse = tl.load(lse_ptr + line, mask=query < q_len, other=0.0) * LOG2_E
    out = load_tile(out_tensor, batch, head, first_query, TILE_M, DIM)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + line, mask=query < q_len, other=0.0)
    tl.store(delta_ptr + line, delta, mask=query < q_len)
    dq = tl.zeros([TILE_M, DIM], tl.float32)
    # fmt: off
    dq = _walk_keys(dq, q, dout, lse, delta, k_tensor, v_tensor, batch, kv_head, table, bounds[0], bounds[1], first_query, q_len,
                    kv_len, score_scale, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, FULL)
    for KIND in tl.static_range(RUNS, BITS + 1 if SPARSE else BITS):
        if bounds[KIND] < bounds[KIND + 1]:
            dq = _walk_keys(dq, q, dout, lse, delta, k_tensor, v_tensor, batch, kv_head, table, bounds[KIND], bounds[KIND + 1],
                            first_query, q_len, kv_len, score_scale, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, KIND)
    # fmt: on
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
    table,
    begin,
    end,
    first_key,
    q_len,
    kv_len,
    score_scale,
    DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Adds dS^T Q and P^T dOut of entries begin .. end - 1, all of one kind, to the dK and dV of a key tile."""
    STEPS: tl.constexpr = TABLE_BLOCK // TILE_M if SPARSE else 1
    last = end * STEPS
    position = step_position(table[0], begin * STEPS, last, STEPS, TILE_M, TABLE_BLOCK, SPARSE)
    for step in tl.range(begin * STEPS, last):
        upcoming = step_position(table[0], step + 1, last, STEPS, TILE_M, TABLE_BLOCK, SPARSE)
        query = position + tl.arange(0, TILE_M)
        q = load_tile(q_tensor, batch, head, position, TILE_M, DIM)
        lse = tl.load(lse_base + query) if KIND == FULL else tl.load(lse_base + query, mask=query < q_len, other=0.0)
        scores = tl.dot(k, q.T, input_precision="ieee")
        weights = tl.math.exp2(scores * score_scale - (lse * LOG2_E)[None, :])
        if KIND != FULL:
            block_start = position - (step % STEPS) * TILE_M
            col_start = first_key // TABLE_BLOCK * TABLE_BLOCK
            q_in_block = (position - block_start + tl.arange(0, TILE_M))[None, :]
            kv_in_block = (first_key - col_start + tl.arange(0, TILE_N))[:, None]
            left = (q_len - block_start, kv_len - col_start)
            kept = kept_pairs(table, step // STEPS, q_in_block, kv_in_block, left[0], left[1], TABLE_BLOCK, SPARSE, KIND)
            weights = tl.where(kept, weights, 0.0)
        dout = load_tile(dout_tensor, batch, head, position, TILE_M, DIM)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        dweights = tl.dot(v, dout.T, input_precision="ieee")
        # Loaded only here: one delta a column costs sixteen registers a thread, and the products above need them all.
        delta = tl.load(delta_base + query) if KIND == FULL else tl.load(delta_base + query, mask=query < q_len, other=0.0)
        dscores = weights * (dweights - delta[None, :])
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
    DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """dK and dV: one program a key tile and key head, over the ``group`` query heads that share it."""
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
    v = load_tile(v_tensor, batch, kv_head, first_key, TILE_N, DIM)
    dk = tl.zeros([TILE_N, DIM], tl.float32)
    dv = tl.zeros([TILE_N, DIM], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        line = (batch * heads + head).to(tl.int64) * q_len
        if SPARSE:
            mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
            bounds = row_bounds(col_ptr, col_split, mask, first_key // TABLE_BLOCK, kv_blocks)
        else:
            bounds = dense_bounds(q_len, TILE_M)
        # fmt: off
        dk, dv = _walk_queries(dk, dv, k, v, q_tensor, dout_tensor, lse_ptr + line, delta_ptr + line, batch, head, table, bounds[0],
                               bounds[1], first_key, q_len, kv_len, score_scale, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, FULL)
        for KIND in tl.static_range(RUNS, BITS + 1 if SPARSE else BITS):
            if bounds[KIND] < bounds[KIND + 1]:
                dk, dv = _walk_queries(dk, dv, k, v, q_tensor, dout_tensor, lse_ptr + line, delta_ptr + line, batch, head, table,
                                       bounds[KIND], bounds[KIND + 1], first_key, q_len, kv_len, score_scale,
                                       DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, KIND)
        # fmt: on
    store_tile(dk_tensor, dk * scale, batch, kv_head, first_key, TILE_N, DIM)
    store_tile(dv_tensor, dv, batch, kv_head, first_key, TILE_N, DIM)


def attention_backward(dout, dlse, q, k, v, out, lse, mask, scale, q_config=None, kv_config=None):
    """dq, dk, dv like q, k, v. dlse may be None.

    The others: unbroken rows, base and strides multiples of 16 bytes.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dim, block_size = padded_head_dim(head_dim), mask.block_size if mask else None

    delta = torch.empty_like(lse)
    dq = torch.empty_like(q)
    config = q_config or grad_q_config(q.dtype, head_dim, block_size, q.device)
    m, n = config.tile_m, config.tile_n
    arguments = [
        described(q, m, dim),
        described(k, n, dim),
        described(v, n, dim),
        described(out, m, dim),
        described(dout, m, dim),
        described(dq, m, dim),
        lse,
        lse if dlse is None else dlse.contiguous(),
        delta,
        *table_arguments(mask, mask and mask.by_query, lse),
        heads,
        heads // kv_heads,
        q_len,
        kv_len,
        mask.by_query.row_order.shape[1] if mask else 0,
        scale,
        scale * LOG2_E.value,
    ]
    constants = {"DIM": dim, "TILE_M": m, "TILE_N": n, "TABLE_BLOCK": block_size or n, "SPARSE": mask is not None}
    constants["HAS_DLSE"] = dlse is not None
    grid = (row_count(mask and mask.by_query, q_len, m, block_size), batch * heads)
    launch(grad_q_kernel, grid, arguments, constants, config.options, length_variant(q_len))

    dk, dv = torch.empty_like(k), torch.empty_like(v)
    config = kv_config or grad_kv_config(q.dtype, head_dim, block_size, q.device)
    m, n = config.tile_m, config.tile_n
    arguments = [
        described(q, m, dim),
        described(k, n, dim),
        described(v, n, dim),
        described(dout, m, dim),
        described(dk, n, dim),
        described(dv, n, dim),
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
    ]
    constants = {"DIM": dim, "TILE_M": m, "TILE_N": n, "TABLE_BLOCK": block_size or m, "SPARSE": mask is not None}
    grid = (row_count(mask and mask.by_key, kv_len, n, block_size), batch * kv_heads)
    launch(grad_kv_kernel, grid, arguments, constants, config.options, length_variant(q_len))
    return dq, dk, dv
