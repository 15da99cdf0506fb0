"""Rounds q, k and v to e4m3, for the forward kernel: q in blocks of 64 tokens, k and v in blocks of 128, each with a scale.

q and k are rotated first: see ``variant.eight_bits``. The mean of a head's keys is subtracted. It moves a query's scores alike,
which softmax does not see; ``lse`` does, and gets q * mean back. Values are transposed, as products of e4m3 need both operands
contiguous along the axis that they sum over, and their keys are in ``quads``' order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common.eight_bits import E4M3_MAX, KEYS, MIN_AMAX, QUERIES, columns_of_eight_bits
from ..common.grid import tile_and_batch_head
from ..common.tiles import load_tile, store_tile
from ..launch.launch import descriptor_or_rows

SUMMED = tl.constexpr(512)  # keys that a program sums
CHUNKS = tl.constexpr(32)  # such sums that a program adds at a time
_LARGEST = tl.constexpr(E4M3_MAX)
_LEAST = tl.constexpr(MIN_AMAX)

NOT_SPECIALIZED = ["chunks", "heads", "group", "tokens", "blocks"]


class Operands(NamedTuple):
    """q: (batch, heads, q_len, DIM), k: (batch, kv_heads, kv_len, DIM), v: (batch, kv_heads, DIM, whole blocks of keys), all in
    e4m3, DIM 64 or 128. Scales, float32: of_q (batch, heads, blocks), of_k and of_v (batch, kv_heads, blocks). lse: (batch, heads,
    q_len) float32, to be added to lse."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    of_q: torch.Tensor
    of_k: torch.Tensor
    of_v: torch.Tensor
    lse: torch.Tensor


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_sums_kernel(k_tensor, sums_ptr, heads, chunks, DIM: tl.constexpr, TILE: tl.constexpr):
    """Sums ``SUMMED`` keys of a head. sums_ptr: (batch-heads, chunks, DIM) float32."""
    chunk, batch_head = tile_and_batch_head(chunks)
    total = tl.zeros([DIM], tl.float32)
    for row in range(0, SUMMED, TILE):
        keys = load_tile(k_tensor, batch_head // heads, batch_head % heads, chunk * SUMMED + row, TILE, DIM)
        total += tl.sum(keys.to(tl.float32), 0)
    tl.store(sums_ptr + (batch_head * chunks + chunk) * DIM + tl.arange(0, DIM), total)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_mean_kernel(sums_ptr, mean_ptr, chunks, tokens, DIM: tl.constexpr):
    """Adds the sums of a head, in order, and rotates the mean. mean_ptr: (batch-heads, DIM) float32."""
    batch_head = tl.program_id(0)
    columns = tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        places = sums_ptr + (batch_head * chunks + chunk)[:, None] * DIM + columns[None, :]
        total += tl.sum(tl.load(places, mask=(chunk < chunks)[:, None], other=0.0), 0)
    mean = tl.sum((total / tokens)[:, None] * _rotation(DIM), 0) * DIM**-0.5
    tl.store(mean_ptr + batch_head * DIM + columns, mean)


@triton.jit
def _signs(DIM: tl.constexpr):
    """Returns the matrix of ``variant.eight_bits.rotate`` times sqrt(DIM), for DIM up to 16, as (DIM, DIM) float32."""
    row, column = tl.arange(0, DIM)[:, None], tl.arange(0, DIM)[None, :]
    bits = row & (column ^ (row >> 1 & 5))
    bits ^= bits >> 2
    return 1.0 - 2.0 * ((bits ^ (bits >> 1)) & 1)


@triton.jit
def _rotation(DIM: tl.constexpr):
    """Returns ``_signs`` for more, from two that take few instructions."""
    return (_signs(DIM // 16)[:, None, :, None] * _signs(16)[None, :, None, :]).reshape(DIM, DIM)


@triton.jit
def _rotated(tile, DIM: tl.constexpr):
    """Returns the rows of a tile, rotated, in float32."""
    return tl.dot(tile, _rotation(DIM).to(tile.dtype)) * DIM**-0.5


@triton.jit
def _scale_of(numbers):
    """Returns (the factor that brings a block's numbers to e4m3's range, its inverse, the block's scale)."""
    largest = tl.maximum(tl.max(tl.max(tl.abs(numbers), 1), 0), _LEAST)
    return _LARGEST / largest, largest * (1.0 / _LARGEST)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def quantize_queries_kernel(
    q_tensor,
    eight_tensor,
    scale_ptr,
    mean_ptr,
    lse_ptr,
    heads,
    group,
    tokens,
    blocks,
    score_scale,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rounds a block of queries, rotated, and multiplies them by the mean key. score_scale: of scores, natural."""
    block, batch_head = tile_and_batch_head(blocks)
    batch, head = batch_head // heads, batch_head % heads
    queries = _rotated(load_tile(q_tensor, batch, head, block * TILE, TILE, DIM), DIM)
    factor, scale = _scale_of(queries)
    store_tile(eight_tensor, queries * factor, batch, head, block * TILE, TILE, DIM)
    tl.store(scale_ptr + batch_head * blocks + block, scale)
    mean = tl.load(mean_ptr + batch_head // group * DIM + tl.arange(0, DIM))
    token = block * TILE + tl.arange(0, TILE)
    shift = tl.sum(queries * mean[None, :], 1) * score_scale
    tl.store(lse_ptr + batch_head.to(tl.int64) * tokens + token, shift, mask=token < tokens)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def quantize_keys_kernel(k_tensor, eight_tensor, scale_ptr, mean_ptr, heads, tokens, blocks, DIM: tl.constexpr, TILE: tl.constexpr):
    """Rounds a block of keys, rotated and without their mean."""
    block, batch_head = tile_and_batch_head(blocks)
    batch, head = batch_head // heads, batch_head % heads
    keys = _rotated(load_tile(k_tensor, batch, head, block * TILE, TILE, DIM), DIM)
    mean = tl.load(mean_ptr + batch_head * DIM + tl.arange(0, DIM))
    exist = block * TILE + tl.arange(0, TILE) < tokens
    keys = tl.where(exist[:, None], keys - mean[None, :], 0.0)
    factor, scale = _scale_of(keys)
    store_tile(eight_tensor, keys * factor, batch, head, block * TILE, TILE, DIM)
    tl.store(scale_ptr + batch_head * blocks + block, scale)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def quantize_values_kernel(
    v_tensor, eight_tensor, scale_ptr, heads, blocks, DIM: tl.constexpr, TILE: tl.constexpr, GIVEN: tl.constexpr
):
    """Rounds a block of values, unless they are e4m3 (GIVEN), and transposes it."""
    block, batch_head = tile_and_batch_head(blocks)
    batch, head = batch_head // heads, batch_head % heads
    eight = load_tile(v_tensor, batch, head, block * TILE, TILE, DIM)
    if not GIVEN:
        values = eight.to(tl.float32)
        factor, scale = _scale_of(values)
        eight = (values * factor).to(eight_tensor.dtype)
        tl.store(scale_ptr + batch_head * blocks + block, scale)
    # Keys 8a + 2b + c of 16 come to 4b + 2a + c.
    ordered = tl.permute(eight.reshape(TILE // 16, 2, 4, 2, DIM), (4, 0, 2, 1, 3))
    eight_tensor.store([batch, head, 0, block * TILE], ordered.reshape(1, 1, DIM, TILE))


def quantize_operands(q, k, v, scale: float, recording) -> Operands:
    """Returns the operands of q, k and v, which TMA can address. recording: makes and notes the launches."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dim = columns_of_eight_bits(head_dim, v.shape[3])
    q_blocks, kv_blocks, chunks = -(-q_len // QUERIES), -(-kv_len // KEYS), -(-kv_len // SUMMED.value)

    def fresh(*shape, dtype=torch.float32):
        return recording.fresh(torch.empty(shape, dtype=dtype, device=q.device))

    eight = torch.float8_e4m3fn
    operands = Operands(
        fresh(batch, heads, q_len, dim, dtype=eight),
        fresh(batch, kv_heads, kv_len, dim, dtype=eight),
        fresh(batch, kv_heads, dim, kv_blocks * KEYS, dtype=eight),
        fresh(batch, heads, q_blocks),
        fresh(batch, kv_heads, kv_blocks),
        fresh(batch, kv_heads, kv_blocks),
        fresh(batch, heads, q_len),
    )
    sums, mean = fresh(batch * kv_heads, chunks, dim), fresh(batch * kv_heads, dim)

    def launch(kernel, programs, *arguments, **constants):
        recording.launch(kernel, ((programs, 1), list(arguments), constants, {"num_warps": 8}), (q.dtype,))

    queries, keys, values = (descriptor_or_rows(t, rows, dim) for t, rows in ((q, QUERIES), (k, KEYS), (v, KEYS)))
    to_q, to_k = descriptor_or_rows(operands.q, QUERIES, dim), descriptor_or_rows(operands.k, KEYS, dim)
    to_v = descriptor_or_rows(operands.v, dim, KEYS)
    kv_programs = batch * kv_heads * kv_blocks
    launch(key_sums_kernel, batch * kv_heads * chunks, keys, sums, kv_heads, chunks, DIM=dim, TILE=KEYS)
    launch(key_mean_kernel, batch * kv_heads, sums, mean, chunks, kv_len, DIM=dim)
    tail = heads // kv_heads, q_len, q_blocks, scale
    launch(
        quantize_queries_kernel,
        batch * heads * q_blocks,
        queries,
        to_q,
        operands.of_q,
        mean,
        operands.lse,
        heads,
        *tail,
        DIM=dim,
        TILE=QUERIES,
    )
    launch(quantize_keys_kernel, kv_programs, keys, to_k, operands.of_k, mean, kv_heads, kv_len, kv_blocks, DIM=dim, TILE=KEYS)
    tail = kv_heads, kv_blocks
    launch(quantize_values_kernel, kv_programs, values, to_v, operands.of_v, *tail, DIM=dim, TILE=KEYS, GIVEN=False)
    return operands


def expand_scales(scales, q, k) -> tuple[torch.Tensor, ...]:
    """Returns (of_q, of_k, of_v, lse) of ``Operands`` for e4m3 inputs. scales: (batch, heads or kv_heads) each."""
    counts = -(-q.shape[2] // QUERIES), -(-k.shape[2] // KEYS), -(-k.shape[2] // KEYS)
    by_block = [scale[..., None].expand(*scale.shape, count).contiguous() for scale, count in zip(scales, counts, strict=True)]
    return *by_block, torch.zeros(q.shape[:3], device=q.device)


def arrange_operands(q, k, v, of_q, of_k, of_v, lse, recording) -> Operands:
    """Returns the operands of e4m3 q, k and v, which TMA can address. The others are from ``expand_scales``."""
    batch, kv_heads, kv_len, _ = k.shape
    dim, blocks = columns_of_eight_bits(q.shape[3], v.shape[3]), -(-kv_len // KEYS)
    transposed = recording.fresh(torch.empty((batch, kv_heads, dim, blocks * KEYS), dtype=v.dtype, device=v.device))
    tensors = descriptor_or_rows(v, KEYS, dim), descriptor_or_rows(transposed, dim, KEYS), of_v
    constants = {"DIM": dim, "TILE": KEYS, "GIVEN": True}
    prepared = (batch * kv_heads * blocks, 1), [*tensors, kv_heads, blocks], constants, {"num_warps": 8}
    recording.launch(quantize_values_kernel, prepared, (v.dtype,))
    return Operands(q, k, transposed, of_q, of_k, of_v, lse)
