"""The portable backward kernels: two passes that recompute the attention weights from lse, without atomics.

One pass walks the keys of each query tile and computes dQ; the other walks the queries of each key tile, through the
transposed table, and computes dK and dV. Each output is written once by one program in a fixed order, so gradients
repeat bit for bit.

Source: arXiv:2307.08691, Alg. 2; two passes as in the Triton tutorial's fused attention.
"""

import torch
import triton
import triton.language as tl

from .common import BITS, BOUNDS, FULL, LOG2_E, RUNS, kept_pairs, load_tile, step_position, store_tile
from .configs import grad_kv_config, grad_q_config, padded_head_dim
from .forward import mask_strides

DELTA_ROWS = 64


@triton.jit
def delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    out_batch_stride,
    out_head_stride,
    out_stride,
    dout_batch_stride,
    dout_head_stride,
    dout_stride,
    dlse_batch_stride,
    dlse_head_stride,
    dlse_stride,
    heads,
    q_len,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = rowsum(dOut * Out) - dLse: what the softmax's derivative subtracts from each dP of a row."""
    first = tl.program_id(0) * ROWS
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    out_base = out_ptr + batch * out_batch_stride + head * out_head_stride
    dout_base = dout_ptr + batch * dout_batch_stride + head * dout_head_stride
    out = load_tile(out_base, first, q_len, out_stride, HEAD_DIM, DIM, ROWS, True)
    dout = load_tile(dout_base, first, q_len, dout_stride, HEAD_DIM, DIM, ROWS, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row = first + tl.arange(0, ROWS)
    if HAS_DLSE:
        dlse_base = dlse_ptr + batch * dlse_batch_stride + head * dlse_head_stride
        delta -= tl.load(dlse_base + row.to(tl.int64) * dlse_stride, mask=row < q_len, other=0.0)
    tl.store(delta_ptr + tl.program_id(1).to(tl.int64) * q_len + row, delta, mask=row < q_len)


@triton.jit
def _walk_keys(
    dq,
    q,
    dout,
    lse,
    delta,
    k_base,
    v_base,
    k_stride,
    v_stride,
    col_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    begin,
    end,
    first_query,
    q_len,
    kv_len,
    score_scale,
    HEAD_DIM: tl.constexpr,
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
    position = step_position(col_idx, begin * STEPS, last, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
    for step in tl.range(begin * STEPS, last):
        upcoming = step_position(col_idx, step + 1, last, STEPS, TILE_N, TABLE_BLOCK, SPARSE)
        k = load_tile(k_base, position, kv_len, k_stride, HEAD_DIM, DIM, TILE_N, KIND != FULL)
        v = load_tile(v_base, position, kv_len, v_stride, HEAD_DIM, DIM, TILE_N, KIND != FULL)
        scores = tl.dot(q, k.T, input_precision="ieee")
        weights = tl.math.exp2(scores * score_scale - lse[:, None])
        if KIND != FULL:
            block_start = position - (step % STEPS) * TILE_N
            row_start = first_query // TABLE_BLOCK * TABLE_BLOCK
            kept = kept_pairs(
                tile_idx,
                tile_runs,
                tile_bits,
                step // STEPS,
                (first_query - row_start + tl.arange(0, TILE_M))[:, None],
                (position - block_start + tl.arange(0, TILE_N))[None, :],
                q_len - row_start,
                kv_len - block_start,
                TABLE_BLOCK,
                KIND,
            )
            weights = tl.where(kept, weights, 0.0)
        dweights = tl.dot(dout, v.T, input_precision="ieee")
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
        position = upcoming
    return dq


@triton.jit
def grad_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    mask_index,
    row_ptr,
    row_split,
    row_order,
    col_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    q_batch_stride,
    q_head_stride,
    q_stride,
    k_batch_stride,
    k_head_stride,
    k_stride,
    v_batch_stride,
    v_head_stride,
    v_stride,
    dout_batch_stride,
    dout_head_stride,
    dout_stride,
    dq_batch_stride,
    dq_head_stride,
    dq_stride,
    mask_batch_stride,
    mask_head_stride,
    heads,
    group,
    q_len,
    kv_len,
    q_blocks,
    scale,
    score_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """dQ: one program a query tile and head."""
    slot = tl.program_id(0)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    if SPARSE:
        TILES: tl.constexpr = TABLE_BLOCK // TILE_M
        mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
        row = mask * q_blocks + tl.load(row_order + mask * q_blocks + slot // TILES)
        first_query = (row - mask * q_blocks) * TABLE_BLOCK + slot % TILES * TILE_M
        begin = tl.load(row_ptr + row + mask)
        runs = tl.load(row_split + row * 2)
        bits = tl.load(row_split + row * 2 + 1)
        end = tl.load(row_ptr + row + mask + 1)
    else:
        first_query = slot * TILE_M
        begin = 0
        runs = kv_len // TILE_N
        bits = runs
        end = runs
    k_base = k_ptr + batch.to(tl.int64) * k_batch_stride + (head // group).to(tl.int64) * k_head_stride
    v_base = v_ptr + batch.to(tl.int64) * v_batch_stride + (head // group).to(tl.int64) * v_head_stride
    q_base = q_ptr + batch.to(tl.int64) * q_batch_stride + head.to(tl.int64) * q_head_stride
    dout_base = dout_ptr + batch.to(tl.int64) * dout_batch_stride + head.to(tl.int64) * dout_head_stride
    q = load_tile(q_base, first_query, q_len, q_stride, HEAD_DIM, DIM, TILE_M, True)
    dout = load_tile(dout_base, first_query, q_len, dout_stride, HEAD_DIM, DIM, TILE_M, True)
    query = first_query + tl.arange(0, TILE_M)
    line = tl.program_id(1).to(tl.int64) * q_len + query
    lse = tl.load(lse_ptr + line, mask=query < q_len, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + line, mask=query < q_len, other=0.0)
    dq = tl.zeros([TILE_M, DIM], tl.float32)
    # fmt: off
    dq = _walk_keys(dq, q, dout, lse, delta, k_base, v_base, k_stride, v_stride, col_idx, tile_idx, tile_runs, tile_bits, begin, runs,
                    first_query, q_len, kv_len, score_scale, HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, FULL)
    if SPARSE:
        dq = _walk_keys(dq, q, dout, lse, delta, k_base, v_base, k_stride, v_stride, col_idx, tile_idx, tile_runs, tile_bits, runs, bits,
                        first_query, q_len, kv_len, score_scale, HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, RUNS)
        dq = _walk_keys(dq, q, dout, lse, delta, k_base, v_base, k_stride, v_stride, col_idx, tile_idx, tile_runs, tile_bits, bits, end,
                        first_query, q_len, kv_len, score_scale, HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, BITS)
    else:
        dq = _walk_keys(dq, q, dout, lse, delta, k_base, v_base, k_stride, v_stride, col_idx, tile_idx, tile_runs, tile_bits, end,
                        tl.cdiv(kv_len, TILE_N), first_query, q_len, kv_len, score_scale, HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK,
                        SPARSE, BOUNDS)
    # fmt: on
    dq_base = dq_ptr + batch.to(tl.int64) * dq_batch_stride + head.to(tl.int64) * dq_head_stride
    store_tile(dq_base, dq * scale, first_query, q_len, dq_stride, HEAD_DIM, DIM, TILE_M)


@triton.jit
def _walk_queries(
    dk,
    dv,
    k,
    v,
    q_base,
    dout_base,
    lse_base,
    delta_base,
    q_stride,
    dout_stride,
    row_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    begin,
    end,
    first_key,
    q_len,
    kv_len,
    score_scale,
    HEAD_DIM: tl.constexpr,
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
    position = step_position(row_idx, begin * STEPS, last, STEPS, TILE_M, TABLE_BLOCK, SPARSE)
    for step in tl.range(begin * STEPS, last):
        upcoming = step_position(row_idx, step + 1, last, STEPS, TILE_M, TABLE_BLOCK, SPARSE)
        query = position + tl.arange(0, TILE_M)
        q = load_tile(q_base, position, q_len, q_stride, HEAD_DIM, DIM, TILE_M, KIND != FULL)
        if KIND == FULL:
            lse = tl.load(lse_base + query)
        else:
            lse = tl.load(lse_base + query, mask=query < q_len, other=0.0)
        scores = tl.dot(k, q.T, input_precision="ieee")
        weights = tl.math.exp2(scores * score_scale - (lse * LOG2_E)[None, :])
        if KIND != FULL:
            block_start = position - (step % STEPS) * TILE_M
            col_start = first_key // TABLE_BLOCK * TABLE_BLOCK
            kept = kept_pairs(
                tile_idx,
                tile_runs,
                tile_bits,
                step // STEPS,
                (position - block_start + tl.arange(0, TILE_M))[None, :],
                (first_key - col_start + tl.arange(0, TILE_N))[:, None],
                q_len - block_start,
                kv_len - col_start,
                TABLE_BLOCK,
                KIND,
            )
            weights = tl.where(kept, weights, 0.0)
        dout = load_tile(dout_base, position, q_len, dout_stride, HEAD_DIM, DIM, TILE_M, KIND != FULL)
        dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        dweights = tl.dot(v, dout.T, input_precision="ieee")
        if KIND == FULL:
            delta = tl.load(delta_base + query)
        else:
            delta = tl.load(delta_base + query, mask=query < q_len, other=0.0)
        dscores = weights * (dweights - delta[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
        position = upcoming
    return dk, dv


@triton.jit
def grad_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    mask_index,
    col_ptr,
    col_split,
    col_order,
    row_idx,
    tile_idx,
    tile_runs,
    tile_bits,
    q_batch_stride,
    q_head_stride,
    q_stride,
    k_batch_stride,
    k_head_stride,
    k_stride,
    v_batch_stride,
    v_head_stride,
    v_stride,
    dout_batch_stride,
    dout_head_stride,
    dout_stride,
    dk_batch_stride,
    dk_head_stride,
    dk_stride,
    dv_batch_stride,
    dv_head_stride,
    dv_stride,
    mask_batch_stride,
    mask_head_stride,
    heads,
    group,
    q_len,
    kv_len,
    kv_blocks,
    scale,
    score_scale,
    HEAD_DIM: tl.constexpr,
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
    TILES: tl.constexpr = TABLE_BLOCK // TILE_N if SPARSE else 1
    # The heads of a group may have masks of different orders; any one order visits every key block once.
    first_key = slot * TILE_N
    if SPARSE:
        mask = tl.load(mask_index + batch * mask_batch_stride + kv_head * group * mask_head_stride)
        first_key = tl.load(col_order + mask * kv_blocks + slot // TILES) * TABLE_BLOCK + slot % TILES * TILE_N
    k_base = k_ptr + batch.to(tl.int64) * k_batch_stride + kv_head.to(tl.int64) * k_head_stride
    v_base = v_ptr + batch.to(tl.int64) * v_batch_stride + kv_head.to(tl.int64) * v_head_stride
    k = load_tile(k_base, first_key, kv_len, k_stride, HEAD_DIM, DIM, TILE_N, True)
    v = load_tile(v_base, first_key, kv_len, v_stride, HEAD_DIM, DIM, TILE_N, True)
    dk = tl.zeros([TILE_N, DIM], tl.float32)
    dv = tl.zeros([TILE_N, DIM], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        q_base = q_ptr + batch.to(tl.int64) * q_batch_stride + head.to(tl.int64) * q_head_stride
        dout_base = dout_ptr + batch.to(tl.int64) * dout_batch_stride + head.to(tl.int64) * dout_head_stride
        line = (batch * heads + head).to(tl.int64) * q_len
        # fmt: off
        if SPARSE:
            mask = tl.load(mask_index + batch * mask_batch_stride + head * mask_head_stride)
            col = mask * kv_blocks + first_key // TABLE_BLOCK
            begin = tl.load(col_ptr + col + mask)
            runs = tl.load(col_split + col * 2)
            bits = tl.load(col_split + col * 2 + 1)
            end = tl.load(col_ptr + col + mask + 1)
            dk, dv = _walk_queries(dk, dv, k, v, q_base, dout_base, lse_ptr + line, delta_ptr + line, q_stride, dout_stride, row_idx,
                                   tile_idx, tile_runs, tile_bits, begin, runs, first_key, q_len, kv_len, score_scale,
                                   HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, FULL)
            dk, dv = _walk_queries(dk, dv, k, v, q_base, dout_base, lse_ptr + line, delta_ptr + line, q_stride, dout_stride, row_idx,
                                   tile_idx, tile_runs, tile_bits, runs, bits, first_key, q_len, kv_len, score_scale,
                                   HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, RUNS)
            dk, dv = _walk_queries(dk, dv, k, v, q_base, dout_base, lse_ptr + line, delta_ptr + line, q_stride, dout_stride, row_idx,
                                   tile_idx, tile_runs, tile_bits, bits, end, first_key, q_len, kv_len, score_scale,
                                   HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, BITS)
        else:
            whole = q_len // TILE_M
            dk, dv = _walk_queries(dk, dv, k, v, q_base, dout_base, lse_ptr + line, delta_ptr + line, q_stride, dout_stride, row_idx,
                                   tile_idx, tile_runs, tile_bits, 0, whole, first_key, q_len, kv_len, score_scale,
                                   HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, FULL)
            dk, dv = _walk_queries(dk, dv, k, v, q_base, dout_base, lse_ptr + line, delta_ptr + line, q_stride, dout_stride, row_idx,
                                   tile_idx, tile_runs, tile_bits, whole, tl.cdiv(q_len, TILE_M), first_key, q_len, kv_len, score_scale,
                                   HEAD_DIM, DIM, TILE_M, TILE_N, TABLE_BLOCK, SPARSE, BOUNDS)
        # fmt: on
    dk_base = dk_ptr + batch.to(tl.int64) * dk_batch_stride + kv_head.to(tl.int64) * dk_head_stride
    dv_base = dv_ptr + batch.to(tl.int64) * dv_batch_stride + kv_head.to(tl.int64) * dv_head_stride
    store_tile(dk_base, dk * scale, first_key, kv_len, dk_stride, HEAD_DIM, DIM, TILE_N)
    store_tile(dv_base, dv, first_key, kv_len, dv_stride, HEAD_DIM, DIM, TILE_N)


def attention_backward(dout, dlse, q, k, v, out, lse, mask, scale, q_config=None, kv_config=None):
    """dq, dk, dv like q, k, v. All with unbroken last dimensions; dlse may be None."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group, dim = heads // kv_heads, padded_head_dim(head_dim)
    block_size = mask.block_size if mask else None
    q_config = q_config or grad_q_config(q.dtype, head_dim, block_size)
    kv_config = kv_config or grad_kv_config(q.dtype, head_dim, block_size)
    q_blocks, kv_blocks = (mask.by_query.row_order.shape[1], mask.by_key.row_order.shape[1]) if mask else (0, 0)
    common = {"HEAD_DIM": head_dim, "DIM": dim, "SPARSE": mask is not None}

    delta = torch.empty_like(lse)
    delta_kernel[(triton.cdiv(q_len, DELTA_ROWS), batch * heads)](
        out,
        dout,
        lse if dlse is None else dlse,
        delta,
        *out.stride()[:3],
        *dout.stride()[:3],
        *(lse if dlse is None else dlse).stride(),
        heads,
        q_len,
        HAS_DLSE=dlse is not None,
        HEAD_DIM=head_dim,
        DIM=dim,
        ROWS=DELTA_ROWS,
        num_warps=4,
    )

    dq = torch.empty_like(q)
    tiles = q_blocks * (block_size // q_config.tile_m) if mask else triton.cdiv(q_len, q_config.tile_m)
    grad_q_kernel[(tiles, batch * heads)](
        q,
        k,
        v,
        dout,
        lse,
        delta,
        dq,
        *((mask.mask_index, *mask.by_query, *mask.tiles) if mask else (q,) * 8),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dout.stride()[:3],
        *dq.stride()[:3],
        *mask_strides(mask),
        heads,
        group,
        q_len,
        kv_len,
        q_blocks,
        scale,
        scale * LOG2_E.value,
        TILE_M=q_config.tile_m,
        TILE_N=q_config.tile_n,
        TABLE_BLOCK=block_size or q_config.tile_n,
        num_warps=q_config.num_warps,
        num_stages=q_config.num_stages,
        **common,
    )

    dk, dv = torch.empty_like(k), torch.empty_like(v)
    tiles = kv_blocks * (block_size // kv_config.tile_n) if mask else triton.cdiv(kv_len, kv_config.tile_n)
    grad_kv_kernel[(tiles, batch * kv_heads)](
        q,
        k,
        v,
        dout,
        lse,
        delta,
        dk,
        dv,
        *((mask.mask_index, *mask.by_key, *mask.tiles) if mask else (q,) * 8),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dout.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        *mask_strides(mask),
        heads,
        group,
        q_len,
        kv_len,
        kv_blocks,
        scale,
        scale * LOG2_E.value,
        TILE_M=kv_config.tile_m,
        TILE_N=kv_config.tile_n,
        TABLE_BLOCK=block_size or kv_config.tile_m,
        num_warps=kv_config.num_warps,
        num_stages=kv_config.num_stages,
        **common,
    )
    return dq, dk, dv
