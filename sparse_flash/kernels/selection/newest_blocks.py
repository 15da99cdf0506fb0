"""Portable kernels that choose blocks of keys for few queries of a cache, the newest ones, and keep the mean keys they choose by.

Sequences have lengths of their own, on the device. Programs share the blocks of a query: each keeps the best of some, and the last
one to arrive picks among what all of them kept. One launch, and bitwise repeatable.
"""

import torch
import triton
import triton.language as tl

from ..common.config import padded_head_dim
from ..launch.launch import launch_or_repeat
from ..launch.memory import cached_until_cleared
from ..portable.decode import Cache, DecodePlan, load_pages, rows_of_cache, strides_in_vectors

_NONE = tl.constexpr(1 << 30)  # instead of a block
_NOTHING = tl.constexpr(-(1 << 63))  # below the key of any score
_LAST = tl.constexpr(0x7FFFFFFF)  # all bits of a column, or of an int32 but its sign
_COLUMNS = 32  # blocks of a program; docs/performance/selection.md, "Tile sizes", has figures
_PIECE = 512  # candidates that the last program reads at a time
_TOKENS = 64  # of a step over a block's keys


@triton.jit
def _to_sort_keys(scores, column, possible):
    """int64 keys whose order is that of the scores; of equal scores the first column is the largest. What is not possible, negative
    infinity and NaN are nothing."""
    # Both zeros are equal.
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & _LAST)).to(tl.int64)
    key = (order << 32) | (column ^ _LAST).to(tl.int64)
    return tl.where(possible & (scores > -float("inf")), key, _NOTHING)


@triton.jit
def _scores(q, means, column, possible, q_head_stride, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SHARED: tl.constexpr):
    """(columns,) float32 products of a query, summed over the heads that share its choice, with mean keys."""
    dim = tl.arange(0, DIM)
    inside = dim < HEAD_DIM
    query = tl.zeros([DIM], tl.float32)
    for member in tl.static_range(SHARED):
        query += tl.load(q + member * q_head_stride + dim, mask=inside, other=0.0).to(tl.float32)
    place = column.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    keys = tl.load(means + place, mask=possible[:, None] & inside[None, :], other=0.0)
    return tl.sum(keys * query[None, :], 1)


@triton.jit
def _merge_candidates(candidates, count, SLOTS: tl.constexpr, PIECE: tl.constexpr):
    """The SLOTS largest of so many keys."""
    best = tl.full([SLOTS], _NOTHING, tl.int64)
    for start in tl.range(0, count, PIECE):
        place = start + tl.arange(0, PIECE)
        # Other multiprocessors wrote them: bypass this one's L1 cache.
        some = tl.load(candidates + place, mask=place < count, other=_NOTHING, cache_modifier=".cg")
        best = tl.topk(tl.reshape(tl.join(best, tl.topk(some, SLOTS)), [2 * SLOTS]), SLOTS)
    return best


@triton.jit
def _store_picks(picks, best, own, exists, CHOSEN: tl.constexpr, SLOTS: tl.constexpr):
    """The best and the own block in ascending order, then -1."""
    slot = tl.arange(0, SLOTS)
    block = tl.where((best != _NOTHING) & (slot < CHOSEN), (best & 0xFFFFFFFF).to(tl.int32) ^ _LAST, _NONE)
    block = tl.sort(tl.where((slot == CHOSEN) & exists, own, block))
    tl.store(picks + slot, tl.where(block == _NONE, -1, block), mask=slot <= CHOSEN)


_CHOICE_NUMBERS = ["pickers", "q_len", "length", "width"]
_CHOICE_NUMBERS += ["q_batch_stride", "q_head_stride", "q_token_stride", "mean_batch_stride", "mean_head_stride"]


@triton.jit(do_not_specialize=_CHOICE_NUMBERS)
def pick_decode_blocks_kernel(
    q, means, picks, candidates, arrived, kv_lens,
    q_batch_stride: tl.int64, q_head_stride: tl.int64, q_token_stride: tl.int64,
    mean_batch_stride: tl.int64, mean_head_stride: tl.int64,
    pickers, q_len, length, width,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, PIECE: tl.constexpr, HAS_LENS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program for a query and COLUMNS of the blocks.

    q: (batch, pickers x SHARED, q_len, HEAD_DIM), the last tokens of each sequence. means: (batch, key heads, blocks, HEAD_DIM)
    float32; width: heads that pick per key head. picks: (batch, pickers, q_len, CHOSEN + 1) int32. length: tokens that the means
    have room for; kv_lens: (batch,) int32, if HAS_LENS. SLOTS: CHOSEN + 1 or more, COLUMNS at most, both powers of two.
    candidates: SLOTS int64 for each program, if SPLIT. arrived: int32 zeros, one for each query, and zeros again afterwards.
    """
    row, number, count = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    query, picker = row % q_len, row // q_len % pickers
    batch = (row // q_len // pickers).to(tl.int64)
    tokens = tl.minimum(tl.load(kv_lens + batch), length) if HAS_LENS else length
    position = tokens - q_len + query
    own = tl.maximum(position, 0) // BLOCK
    column = number * COLUMNS + tl.arange(0, COLUMNS)
    # Blocks before the own one are whole, so their means exist.
    possible = column < own
    q += batch * q_batch_stride + (picker * SHARED).to(tl.int64) * q_head_stride + query * q_token_stride
    means += batch * mean_batch_stride + (picker // width).to(tl.int64) * mean_head_stride
    picks += row.to(tl.int64) * (CHOSEN + 1)
    key = _to_sort_keys(_scores(q, means, column, possible, q_head_stride, HEAD_DIM, DIM, SHARED), column, possible)
    best = tl.topk(key, SLOTS)
    if SPLIT:
        candidates += row.to(tl.int64) * count * SLOTS
        tl.store(candidates + number * SLOTS + tl.arange(0, SLOTS), best)
        # Every thread must have written its part before one of them signals it.
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == count - 1:
            tl.store(arrived + row, 0)
            _store_picks(picks, _merge_candidates(candidates, count * SLOTS, SLOTS, PIECE), own, position >= 0, CHOSEN, SLOTS)
    else:
        _store_picks(picks, best, own, position >= 0, CHOSEN, SLOTS)


@triton.jit
def _mean_of_block(k, pages, cache, token, BLOCK: tl.constexpr):
    """(DIM,) float32 mean of the keys of a block that begins with this token."""
    dim = tl.arange(0, cache.DIM)[None, :]
    total = tl.zeros([cache.TILE_N, cache.DIM], tl.float32)
    for step in tl.static_range(0, BLOCK, cache.TILE_N):
        page = load_pages(pages, cache, token + step)
        row = rows_of_cache(cache, page, token + step + tl.arange(0, cache.TILE_N), cache.k_page_stride, cache.k_token_stride)
        total += tl.load(k + row + dim, mask=dim < cache.HEAD_DIM, other=0.0).to(tl.float32)
    return tl.sum(total, 0) / BLOCK


_MEANS_NUMBERS = ["heads", "capacity", "blocks", "table_stride"]
_MEANS_NUMBERS += ["k_page_stride", "k_head_stride", "k_token_stride", "mean_batch_stride", "mean_head_stride"]


@triton.jit(do_not_specialize=_MEANS_NUMBERS)
def update_means_kernel(
    k_ptr, means, kv_lens, block_table,
    k_page_stride: tl.int64, k_head_stride: tl.int64, k_token_stride: tl.int64, table_stride: tl.int64,
    mean_batch_stride: tl.int64, mean_head_stride: tl.int64,
    heads, capacity, blocks,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE_N: tl.constexpr, HAS_LENS: tl.constexpr,
    PAGE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program for a key head and one of the last whole blocks of a sequence, the number of programs on the second axis.

    means: (batch, heads, blocks or more, HEAD_DIM) float32. The rest as for ``decode_kernel``.
    """
    batch_head = tl.program_id(0)
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    tokens = tl.minimum(tl.load(kv_lens + batch), capacity) if HAS_LENS else capacity
    whole = tl.maximum(tokens, 0) // BLOCK
    block = whole - tl.num_programs(1) + tl.program_id(1)
    if (block >= 0) & (block < blocks):
        k = k_ptr + head * k_head_stride * VECTOR
        if PAGE == 0:
            k += batch * k_page_stride * VECTOR
        mean = _mean_of_block(
            k, block_table + batch * table_stride,
            Cache(k_ptr, k_ptr, k_page_stride, k_head_stride, k_token_stride, k_page_stride, k_head_stride, k_token_stride,
                  block_table, table_stride, tokens, HEAD_DIM, DIM, HEAD_DIM, DIM, TILE_N, PAGE, VECTOR, False, False),
            block * BLOCK, BLOCK,
        )  # fmt: skip
        means += batch * mean_batch_stride + head * mean_head_stride + block.to(tl.int64) * HEAD_DIM
        dim = tl.arange(0, DIM)
        tl.store(means + dim, mean, mask=dim < HEAD_DIM)


def pick_decode_blocks(
    q: torch.Tensor, means: torch.Tensor, kv_lens: torch.Tensor | None, length: int, keep: int, block_size: int, heads: int
) -> torch.Tensor:
    """(batch, heads, q_len, keep) int32, ascending, then -1: a query's own block and the best of the blocks that end before it.

    q: (batch, heads or a multiple, q_len, head_dim), the last tokens of each sequence; query heads that share a choice follow each
    other. means: (batch, key heads, blocks, head_dim) float32, whose blocks are contiguous. kv_lens: (batch,) int32, or None for
    ``length`` tokens, which the means have room for. The last dimensions are contiguous.
    """
    inputs = (q, means) if kv_lens is None else (q, means, kv_lens)
    sizes = length, keep, block_size, heads, kv_lens is not None

    def run(recording):
        plan = _choice_plan(tuple(q.shape), q.stride(), tuple(means.shape), means.stride(), *sizes)
        picks = recording.fresh(torch.empty((q.shape[0], heads, q.shape[2], keep), dtype=torch.int32, device=q.device))
        arguments = [q, means, picks, *plan.workspace(recording, picks, torch.int64), picks if kv_lens is None else kv_lens]
        recording.launch(pick_decode_blocks_kernel, (plan.grid, [*arguments, *plan.numbers], plan.constants, plan.options))
        return (picks,)

    return launch_or_repeat(pick_decode_blocks_kernel, None, sizes, inputs, run)[0]


@cached_until_cleared
def _choice_plan(q_shape, q_strides, means_shape, means_strides, length, keep, block_size, heads, has_lens) -> DecodePlan:
    batch, q_heads, q_len, head_dim = q_shape
    slots = max(2, triton.next_power_of_2(keep))
    columns = max(_COLUMNS, slots)
    programs = max(1, triton.cdiv(means_shape[2], columns))
    constants = {"HEAD_DIM": head_dim, "DIM": padded_head_dim(head_dim), "BLOCK": block_size, "SHARED": q_heads // heads}
    constants |= {"CHOSEN": keep - 1, "SLOTS": slots, "COLUMNS": columns, "PIECE": max(_PIECE, slots)}
    constants |= {"HAS_LENS": has_lens, "SPLIT": programs > 1}
    rows = batch * heads * q_len
    numbers = *q_strides[:3], *means_strides[:2], heads, q_len, length, heads // means_shape[1]
    return DecodePlan(
        (rows, programs), rows * programs * slots if programs > 1 else 0, numbers, constants, {"num_warps": 2 if slots <= 32 else 8}
    )


def update_means(
    means: torch.Tensor,
    k: torch.Tensor,
    blocks: int,
    touched: int,
    block_size: int,
    kv_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """Writes the means of the last ``touched`` whole blocks of each sequence, if means has them: it has ``blocks``.

    means: (batch, heads, blocks or more, head_dim) float32, whose blocks are contiguous. k, kv_lens, block_table: as for
    ``attention_decode`` in ``decode``.
    """
    inputs = [t for t in (k, means, kv_lens, block_table) if t is not None]
    sizes = blocks, touched, block_size

    def run(recording):
        pages = None if block_table is None else tuple(block_table.shape)
        layout = tuple(k.shape), k.stride(), means.shape[0], means.stride()
        plan = _means_plan(k.dtype, *layout, *sizes, pages, kv_lens is not None)
        arguments = [k, means, means if kv_lens is None else kv_lens, means if block_table is None else block_table, *plan.numbers]
        recording.launch(update_means_kernel, (plan.grid, arguments, plan.constants, plan.options))

    launch_or_repeat(update_means_kernel, None, (*sizes, kv_lens is None), inputs, run)


@cached_until_cleared
def _means_plan(dtype, k_shape, k_strides, batch, means_strides, blocks, touched, block_size, pages, has_lens) -> DecodePlan:
    """pages: the shape of the block table, or None."""
    heads, head_dim = k_shape[1], k_shape[3]
    vector, strides = strides_in_vectors(dtype, k_strides)
    constants = {"HEAD_DIM": head_dim, "DIM": padded_head_dim(head_dim), "BLOCK": block_size, "TILE_N": min(block_size, _TOKENS)}
    constants |= {"HAS_LENS": has_lens, "PAGE": 0 if pages is None else k_shape[2], "VECTOR": vector}
    capacity = k_shape[2] if pages is None else k_shape[2] * pages[1]
    numbers = *strides, 0 if pages is None else pages[1], *means_strides[:2], heads, capacity, blocks
    return DecodePlan((batch * heads, touched), 0, numbers, constants, {"num_warps": 4})
