"""Rounds q, k and v to e4m3, for the forward kernel: q with a scale for each block of 64 tokens, k and v with one for each head.

q and k are rotated first: see ``core.eight_bits``. The mean of a head's keys is subtracted. It moves a query's scores alike,
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

CHUNK = tl.constexpr(1024)  # tokens that a program summarizes
SUMMARIZED = tl.constexpr(64)  # tokens at a time
ROUNDED = tl.constexpr(4)  # blocks of queries, or tiles of keys, that a program rounds, as rotations are made once
CHUNKS = tl.constexpr(32)  # such summaries that a program merges at a time
_LARGEST = tl.constexpr(E4M3_MAX)
_LEAST = tl.constexpr(MIN_AMAX)

NOT_SPECIALIZED = ["chunks", "heads", "batch_heads", "group", "tokens", "blocks", "tiles"]


class Operands(NamedTuple):
    """q: (batch, heads, q_len, DIM), k: (batch, kv_heads, kv_len, DIM), v: (batch, kv_heads, DIM, whole tiles of keys), all in
    e4m3, DIM 64 or 128. Scales, float32: of_q (batch, heads, blocks), of_k and of_v (batch, kv_heads). lse: (batch, heads, q_len)
    float32, to be added to lse."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    of_q: torch.Tensor
    of_k: torch.Tensor
    of_v: torch.Tensor
    lse: torch.Tensor


@triton.jit
def _signs(DIM: tl.constexpr):
    """Returns the matrix of ``core.eight_bits.rotate`` times sqrt(DIM), for DIM up to 16, as (DIM, DIM) float32."""
    row, column = tl.arange(0, DIM)[:, None], tl.arange(0, DIM)[None, :]
    bits = row & (column ^ (row >> 1 & 5))
    bits ^= bits >> 2
    return 1.0 - 2.0 * ((bits ^ (bits >> 1)) & 1)


@triton.jit
def _rotation(DIM: tl.constexpr):
    """Returns ``_signs`` for more, from two that take few instructions."""
    return (_signs(DIM // 16)[:, None, :, None] * _signs(16)[None, :, None, :]).reshape(DIM, DIM)


@triton.jit
def _rotated(tile, rotation):
    """Returns the rows of a tile, rotated by ``_rotation``, in float32."""
    return tl.dot(tile, rotation.to(tile.dtype)) * rotation.shape[0] ** -0.5


@triton.jit
def _summarize(tensor, batch, head, first, tokens, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """Returns the sum, the largest and the smallest number in each column of a chunk of tokens."""
    total, high = tl.zeros([SUMMARIZED, DIM], tl.float32), tl.full([SUMMARIZED, DIM], float("-inf"), tl.float32)
    low = -high
    rotation = _rotation(DIM)
    for row in range(first, first + CHUNK, SUMMARIZED):
        numbers = load_tile(tensor, batch, head, row, SUMMARIZED, DIM)
        numbers = _rotated(numbers, rotation) if ROTATED else numbers.to(tl.float32)
        exist = (row + tl.arange(0, SUMMARIZED) < tokens)[:, None]
        total += numbers
        high = tl.maximum(high, tl.where(exist, numbers, float("-inf")))
        low = tl.minimum(low, tl.where(exist, numbers, float("inf")))
    return tl.sum(total, 0), tl.max(high, 0), tl.min(low, 0)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def summarize_kernel(k_tensor, v_tensor, summary_ptr, heads, chunks, tokens, DIM: tl.constexpr):
    """Summarizes a chunk of keys, rotated, or of values. summary_ptr: (keys or values, batch-heads, chunks, 3, DIM) float32."""
    chunk, batch_head = tile_and_batch_head(2 * chunks)
    batch, head, first = batch_head // heads, batch_head % heads, chunk % chunks * CHUNK
    if chunk < chunks:
        total, high, low = _summarize(k_tensor, batch, head, first, tokens, DIM, True)
    else:
        total, high, low = _summarize(v_tensor, batch, head, first, tokens, DIM, False)
    item = chunk // chunks * (tl.num_programs(0) // (2 * chunks)) + batch_head
    place = summary_ptr + (item.to(tl.int64) * chunks + chunk % chunks) * 3 * DIM + tl.arange(0, DIM)
    tl.store(place, total)
    tl.store(place + DIM, high)
    tl.store(place + 2 * DIM, low)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def scale_kernel(summary_ptr, mean_ptr, scale_ptr, batch_heads, chunks, tokens, DIM: tl.constexpr):
    """Merges the summaries of a head's chunks, in order. mean_ptr: of keys, rotated, (batch-heads, DIM) float32. scale_ptr: of keys
    without their mean, and of values, (2, batch-heads) float32."""
    item = tl.program_id(0)
    columns = tl.arange(0, DIM)
    total, high = tl.zeros([DIM], tl.float32), tl.full([DIM], float("-inf"), tl.float32)
    low = -high
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        places = summary_ptr + (item * chunks + chunk).to(tl.int64)[:, None] * 3 * DIM + columns[None, :]
        exist = (chunk < chunks)[:, None]
        total += tl.sum(tl.load(places, mask=exist, other=0.0), 0)
        high = tl.maximum(high, tl.max(tl.load(places + DIM, mask=exist, other=float("-inf")), 0))
        low = tl.minimum(low, tl.min(tl.load(places + 2 * DIM, mask=exist, other=float("inf")), 0))
    mean = tl.where(item < batch_heads, total / tokens, 0.0)
    if item < batch_heads:
        tl.store(mean_ptr + item * DIM + columns, mean)
    largest = tl.maximum(tl.max(tl.maximum(high - mean, mean - low), 0), _LEAST)
    tl.store(scale_ptr + item, largest * (1.0 / _LARGEST))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def quantize_queries_kernel(
    q_tensor, eight_tensor, scale_ptr, mean_ptr, lse_ptr, heads, group, tokens, blocks, score_scale,
    DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rounds blocks of queries, rotated, and multiplies them by the mean key. score_scale: of scores, natural."""
    first, batch_head = tile_and_batch_head(tl.cdiv(blocks, ROUNDED))
    batch, head = batch_head // heads, batch_head % heads
    rotation = _rotation(DIM)
    mean = tl.load(mean_ptr + batch_head // group * DIM + tl.arange(0, DIM))
    for block in range(first * ROUNDED, tl.minimum((first + 1) * ROUNDED, blocks)):
        queries = _rotated(load_tile(q_tensor, batch, head, block * TILE, TILE, DIM), rotation)
        scale = tl.maximum(tl.max(tl.max(tl.abs(queries), 1), 0), _LEAST) * (1.0 / _LARGEST)
        store_tile(eight_tensor, queries * (1.0 / scale), batch, head, block * TILE, TILE, DIM)
        tl.store(scale_ptr + batch_head * blocks + block, scale)
        token = block * TILE + tl.arange(0, TILE)
        shift = tl.sum(queries * mean[None, :], 1) * score_scale
        tl.store(lse_ptr + batch_head.to(tl.int64) * tokens + token, shift, mask=token < tokens)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def quantize_keys_kernel(k_tensor, eight_tensor, scale_ptr, mean_ptr, heads, tokens, tiles, DIM: tl.constexpr, TILE: tl.constexpr):
    """Rounds tiles of keys, rotated and without their mean."""
    first, batch_head = tile_and_batch_head(tl.cdiv(tiles, ROUNDED))
    batch, head = batch_head // heads, batch_head % heads
    rotation = _rotation(DIM)
    mean, factor = tl.load(mean_ptr + batch_head * DIM + tl.arange(0, DIM)), 1.0 / tl.load(scale_ptr + batch_head)
    for tile in range(first * ROUNDED, tl.minimum((first + 1) * ROUNDED, tiles)):
        keys = _rotated(load_tile(k_tensor, batch, head, tile * TILE, TILE, DIM), rotation)
        exist = tile * TILE + tl.arange(0, TILE) < tokens
        keys = tl.where(exist[:, None], keys - mean[None, :], 0.0)
        store_tile(eight_tensor, keys * factor, batch, head, tile * TILE, TILE, DIM)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def quantize_values_kernel(v_tensor, eight_tensor, scale_ptr, heads, tiles, DIM: tl.constexpr, TILE: tl.constexpr):
    """Rounds a tile of values, and transposes it."""
    tile, batch_head = tile_and_batch_head(tiles)
    batch, head = batch_head // heads, batch_head % heads
    values = load_tile(v_tensor, batch, head, tile * TILE, TILE, DIM)
    eight = (values.to(tl.float32) * (1.0 / tl.load(scale_ptr + batch_head))).to(eight_tensor.dtype)
    # Keys 8a + 2b + c of 16 come to 4b + 2a + c.
    ordered = tl.permute(eight.reshape(TILE // 16, 2, 4, 2, DIM), (4, 0, 2, 1, 3))
    eight_tensor.store([batch, head, 0, tile * TILE], ordered.reshape(1, 1, DIM, TILE))


def quantize_operands(q, k, v, scale: float, recording) -> Operands:
    """Returns the operands of q, k and v, which TMA can address. recording: makes and notes the launches."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dim = columns_of_eight_bits(head_dim, v.shape[3])
    q_blocks, kv_tiles, chunks = -(-q_len // QUERIES), -(-kv_len // KEYS), -(-kv_len // CHUNK.value)

    def fresh(*shape, dtype=torch.float32):
        return recording.fresh(torch.empty(shape, dtype=dtype, device=q.device))

    eight = torch.float8_e4m3fn
    scales = fresh(2, batch, kv_heads)
    operands = Operands(
        fresh(batch, heads, q_len, dim, dtype=eight),
        fresh(batch, kv_heads, kv_len, dim, dtype=eight),
        fresh(batch, kv_heads, dim, kv_tiles * KEYS, dtype=eight),
        fresh(batch, heads, q_blocks),
        scales[0],
        scales[1],
        fresh(batch, heads, q_len),
    )
    summary, mean = fresh(2, batch * kv_heads, chunks, 3, dim), fresh(batch * kv_heads, dim)

    def launch(kernel, programs, *arguments, **constants):
        recording.launch(kernel, ((programs, 1), list(arguments), constants, {"num_warps": 4}), (q.dtype,))

    queries, keys, values = (descriptor_or_rows(t, rows, dim) for t, rows in ((q, QUERIES), (k, KEYS), (v, KEYS)))
    summarized = [descriptor_or_rows(t, SUMMARIZED.value, dim) for t in (k, v)]
    to_q, to_k = descriptor_or_rows(operands.q, QUERIES, dim), descriptor_or_rows(operands.k, KEYS, dim)
    to_v = descriptor_or_rows(operands.v, dim, KEYS)
    kv_batch_heads = batch * kv_heads
    launch(summarize_kernel, 2 * kv_batch_heads * chunks, *summarized, summary, kv_heads, chunks, kv_len, DIM=dim)
    launch(scale_kernel, 2 * kv_batch_heads, summary, mean, scales, kv_batch_heads, chunks, kv_len, DIM=dim)
    programs = batch * heads * -(-q_blocks // ROUNDED.value)
    rounded = queries, to_q, operands.of_q, mean, operands.lse
    launch(quantize_queries_kernel, programs, *rounded, heads, heads // kv_heads, q_len, q_blocks, scale, DIM=dim, TILE=QUERIES)
    programs = kv_batch_heads * -(-kv_tiles // ROUNDED.value)
    launch(quantize_keys_kernel, programs, keys, to_k, operands.of_k, mean, kv_heads, kv_len, kv_tiles, DIM=dim, TILE=KEYS)
    programs = kv_batch_heads * kv_tiles
    launch(quantize_values_kernel, programs, values, to_v, operands.of_v, kv_heads, kv_tiles, DIM=dim, TILE=KEYS)
    return operands
