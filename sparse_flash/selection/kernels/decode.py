"""The portable kernel for few queries that each picked blocks of keys: visits the picked blocks of a cache and no others.

As in ``decode``, programs share a query's keys, and the last one of a tile to arrive combines their results in a fixed order: one
launch, and bitwise repeatable. A tile has the query heads that share picks as its rows.

Source: arXiv:2307.08691, Alg. 1 (softmax and the log of its sum); https://pytorch.org/blog/flash-decoding (the splits).
"""

import torch
import triton
import triton.language as tl

from ...kernels.common.tiles import LOG2_E, TableEntries
from ...kernels.launch.launch import launch_or_repeat_alike, multiprocessors
from ...kernels.launch.memory import cached_until_cleared
from ...kernels.portable import decode as portable
from ...kernels.portable.configs import decode_config, detect_gpu
from .division import padded_count


@triton.jit
def _compute_tile(queries, cache, splits, kv_head, position, steps, table):
    """out and lse of this program's rows, or its split of them. steps: over all picks of the query, which sees a sequence that ends
    with it. table: of the picks, without masks."""
    sequence = portable.locate_sequence(cache, queries.batch, kv_head, 0, position + 1)
    begin, end = portable.split_steps(steps, splits)
    state, tile = portable.init_state(cache.SHAPE), portable.load_queries(queries, position)
    state = portable.add_steps(state, tile, sequence, cache, portable.Steps(begin, end), table)
    portable.store_tile_or_split(state, queries, splits)


@triton.jit(do_not_specialize=[*portable.STRIDES, "pickers", "group", "members", "row_tiles", "q_len", "kv_len"])
def selection_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, split_results, arrived, kv_lens, block_table, k_scale, v_scale, picks,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_token_stride: tl.int64,
    k_page_stride: tl.int64, k_head_stride: tl.int64, k_token_stride: tl.int64,
    v_page_stride: tl.int64, v_head_stride: tl.int64, v_token_stride: tl.int64,
    out_batch_stride: tl.int64, out_head_stride: tl.int64, out_token_stride: tl.int64,
    scale_page_stride: tl.int64, scale_head_stride: tl.int64, table_stride: tl.int64,
    pickers, group, members, row_tiles, q_len, kv_len, score_scale,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """One program for a query, up to TILE_M of the heads that share its picks, and a split of its picked blocks.

    picks: (batch, pickers, q_len, SLOTS) int32, ascending, then -1. members: query heads that share picks. group: query heads that
    share a key head. row_tiles: tiles of members. The rest as for ``decode_kernel``.
    """
    tile, number = tl.program_id(0), tl.program_id(1)
    tiles, count = tl.num_programs(0), tl.num_programs(1)
    query = tile // row_tiles % q_len
    picker = tile // row_tiles // q_len % pickers
    batch = (tile // row_tiles // q_len // pickers).to(tl.int64)
    head = (picker * members).to(tl.int64)
    length = tl.maximum(tl.minimum(tl.load(kv_lens + batch), kv_len), 0) if SHAPE.HAS_LENS else kv_len
    position = length - q_len + query
    picks += ((batch * pickers + picker) * q_len + query) * SHAPE.SLOTS
    slot = tl.arange(0, SHAPE.PADDED)
    pick = tl.load(picks + slot, mask=slot < SHAPE.SLOTS, other=-1)
    # The first ones, as picks ascend.
    visited = tl.sum(((pick >= 0) & (pick * SHAPE.BLOCK <= position)).to(tl.int32), 0)
    _compute_tile(
        portable.Queries(q_ptr + query * q_token_stride * SHAPE.VECTOR, out_ptr + query * out_token_stride, lse_ptr + query,
                         lse_ptr, q_batch_stride, q_head_stride, q_token_stride, out_batch_stride, out_head_stride,
                         out_token_stride, batch, head, pickers * members, members, tile % row_tiles * SHAPE.TILE_M, q_len,
                         score_scale, SHAPE),
        portable.Cache(k_ptr, v_ptr, block_table, k_scale, v_scale, k_page_stride, k_head_stride, k_token_stride, v_page_stride,
                       v_head_stride, v_token_stride, scale_page_stride, scale_head_stride, table_stride, SHAPE),
        portable.Splits(tile, number, tiles, count, split_results, arrived), head // group, position,
        visited * (SHAPE.BLOCK // SHAPE.TILE_N),
        TableEntries(picks, picks, picks, picks, SHAPE.BLOCK, SHAPE.SPARSE),
    )  # fmt: skip


def selection_decode(
    q, k, v, picks, block_size, scale, *, kv_lens=None, block_table=None, k_scale=None, v_scale=None, splits=None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out (batch, heads, q_len, v's head_dim) in q's memory order, lse (batch, heads, q_len) float32. picks: contiguous. splits:
    programs that share a query's blocks; by default enough to fill the GPU."""
    inputs = [t for t in (q, k, v, picks, kv_lens, block_table, k_scale, v_scale) if t is not None]

    def run(recording):
        shapes = portable.CallShapes.of(q, k, v, kv_lens, block_table, k_scale)
        plan = _plan(shapes, tuple(picks.shape), block_size, splits)
        out, lse, arguments = plan.arguments(recording, q, k, v, kv_lens, block_table, k_scale, v_scale)
        arguments += [picks, *plan.numbers, scale * LOG2_E.value]
        recording.launch(selection_decode_kernel, (plan.grid, arguments, plan.constants, plan.options))
        return out, lse

    key = block_size, scale, kv_lens is None, splits
    return tuple(launch_or_repeat_alike(selection_decode_kernel, None, key, inputs, run)[:2])


@cached_until_cleared
def _plan(shapes: portable.CallShapes, picks: tuple[int, ...], block_size: int, splits: int | None) -> portable.DecodePlan:
    batch, heads, q_len, head_dim = shapes.q
    pickers, _, slots = picks[1:]
    members = heads // pickers
    gpu = detect_gpu(shapes.device)
    config = decode_config(shapes.dtype, head_dim, block_size, members, shapes.v_head_dim, gpu, shapes.scaled)
    row_tiles = -(-members // config.tile_m)
    tiles = batch * pickers * q_len * row_tiles
    # Two programs per multiprocessor, but none without a step.
    splits = splits or max(1, min(2 * multiprocessors(shapes.device) // tiles, slots * (block_size // config.tile_n)))
    numbers = pickers, heads // shapes.k[1], members, row_tiles, q_len, shapes.tokens
    of_picks = {"BLOCK": block_size, "SLOTS": slots, "PADDED": padded_count(slots)}
    return shapes.plan(config, members, tiles, splits, numbers, **of_picks)
