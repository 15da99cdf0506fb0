"""Attention over key blocks that each query picked, for Hopper: ``picked_parts`` of ``forward``, with the same lists and results.

Persistent programs: warps that gather queries, a warp that loads keys and values, and two warp groups that compute, each a tile of
64 gathered rows at a time.

- A block of 64 or 128 keys stays in shared memory during the loop over its list, and the next item's arrives meanwhile. It is one
  step, so there is no running softmax.
- Larger blocks are visited in steps of 128 keys, by both warp groups together, each with a tile of its own.

Sources: arXiv:2511.11571 and arXiv:2508.18224 (queries gathered by key block); arXiv:2407.08608, sec. 3 (warp roles).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ...kernels.common.config import padded_head_dim
from ...kernels.common.gluon import record
from ...kernels.common.tiles import FLOOR, LOG2_E
from ...kernels.hopper.descriptors import gluon_descriptor
from ...kernels.hopper.products import start_transposed_product
from ...kernels.hopper.ring import Ring, allocate_tiles, new_linked_ring, new_ring
from ...kernels.launch.launch import launch, multiprocessors
from . import hopper_gathering as gathering
from .hopper_gathering import GATHERING_WARPS, ROWS
from .tiles import constants_of

# Tiles of gathered queries in shared memory, by padded head_dim and keys of a step; and blocks of keys with their values.
STAGES = {(64, 64): 8, (64, 128): 8, (128, 64): 8, (128, 128): 5}
KEY_STAGES = gl.constexpr(2)


@record
class PartsArguments:
    """Holds what the warps share."""

    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    queries: gathering.RowTensor
    rows: gathering.RowOrigins  # of the gathering warps
    part_ptr: gl.tensor
    lse_ptr: gl.tensor
    lists: gathering.Lists
    score_scale: gl.tensor
    q: Ring  # one stage per tile of gathered rows
    k: Ring  # one stage per item, or, if blocks take several steps, for each step of two tiles
    v: Ring
    DIM: gl.constexpr
    KEYS: gl.constexpr  # of a step
    STEPS: gl.constexpr  # of a block

    @gluon.jit
    def tiles_of(self, item):
        """How many tiles an item takes: whole pairs where both warp groups visit the same keys. The last one may have no rows."""
        tiles = self.lists.steps(item.whole, item.end)
        if self.STEPS > 1:
            tiles = (tiles + 1) // 2 * 2
        return tiles


@gluon.jit
def _gather(p):
    """The gathering warps: the queries of each tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    turn = 0
    tiles = 0
    item = p.lists.item(turn)
    while item.begin < item.end:
        block = p.lists.locate_block(item)
        upcoming = p.lists.item(turn + 1)
        entry, exists = p.lists.load_entries(item.whole, item.end, 0, layout)
        for step in range(p.tiles_of(item)):
            p.rows.publish(p.lists.rows_of(entry, exists, block, layout))
            # Read a tile ahead, so no copy waits for it.
            entry, exists = p.lists.load_entries(item.whole, item.end, step + 1, layout)
            p.q.acquire(tiles)
            p.queries.copy(p.q.stage(tiles), p.rows, block.batch, ROWS if p.STEPS == 1 else ROWS // 2)
            p.q.commit_copies(tiles)
            tiles += 1
        turn += 1
        item = upcoming


@gluon.jit
def _load(p):
    """The loading warp: keys and values of each item, once or for every two tiles."""
    turn = 0
    loads = 0
    item = p.lists.item(turn)
    while item.begin < item.end:
        block = p.lists.locate_block(item)
        upcoming = p.lists.item(turn + 1)
        if p.STEPS == 1:
            gathering.load_keys(p, loads, block, block.position, p.KEYS)
            loads += 1
        else:
            for _ in range(p.tiles_of(item) // 2):
                for step in range(p.STEPS):
                    gathering.load_keys(p, loads, block, block.position + step * p.KEYS, p.KEYS)
                    loads += 1
        turn += 1
        item = upcoming


@gluon.jit
def _compute(p, GROUP: gl.constexpr):
    """A computing warp group: every second tile, whatever its item."""
    KEYS: gl.constexpr = p.KEYS
    STEPS: gl.constexpr = p.STEPS
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = p.q.data.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, p.DIM, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    part_layout: gl.constexpr = gathering.storing_layout(p.DIM, WARPS)
    row_layout: gl.constexpr = gl.SliceLayout(1, part_layout)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout=score_layout)
    no_sums = gl.zeros([ROWS, p.DIM], gl.float32, layout=sum_layout)
    turn = 0
    tiles = 0
    loads = 0
    item = p.lists.item(turn)
    while item.begin < item.end:
        block = p.lists.locate_block(item)
        upcoming = p.lists.item(turn + 1)
        tiles_of_item = p.tiles_of(item)
        if STEPS == 1:
            p.k.wait(loads)
            p.v.wait(loads)
        for step in range((tiles + GROUP) % 2, tiles_of_item, 2):
            entry, exists = p.lists.load_entries(item.whole, item.end, step, row_layout)
            p.q.wait(tiles + step)
            # The rows were copied by threads; products read them as TMA does.
            fence_async_shared()
            maximum = gl.full([ROWS], FLOOR, gl.float32, layout=gl.SliceLayout(1, score_layout))
            total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, score_layout))
            started = no_sums
            for number in gl.static_range(STEPS):
                load = loads + number
                if STEPS > 1:
                    p.k.wait(load)
                started_scores = start_transposed_product(p.q.stage(tiles + step), p.k.stage(load), zeros, p.DIM)
                if number == 0:
                    scores = warpgroup_mma_wait(0, deps=(started_scores,))
                    sums = started
                else:
                    scores, sums = warpgroup_mma_wait(0, deps=(started_scores, started))
                    p.k.release(load - 1)
                if number == STEPS - 1:
                    p.q.release(tiles + step)
                highest = gl.maximum(gl.max(scores, 1) * p.score_scale, maximum)
                weights = gl.exp2(scores * p.score_scale - highest[:, None])
                if number > 0:
                    rescale = gl.exp2(maximum - highest)
                    total *= rescale
                    sums *= gl.convert_layout(rescale, gl.SliceLayout(1, sum_layout))[:, None]
                total += gl.sum(weights, 1)
                maximum = highest
                operand = gl.convert_layout(weights.to(dtype), operand_layout)
                if STEPS > 1:
                    p.v.wait(load)
                started = warpgroup_mma(operand, p.v.stage(load), sums, use_acc=number > 0, is_async=True)
            if STEPS > 1:
                loads += STEPS
            rows = p.lists.rows_of(entry, exists, block, row_layout)
            # Rows that keep nothing: every score is -inf.
            keeps_nothing = total == 0.0
            total = gl.where(keeps_nothing, 1.0, total)
            lse = gl.where(keeps_nothing, -float("inf"), maximum + gl.log2(total))
            gl.store(p.lse_ptr + rows.place, gl.convert_layout(lse, row_layout), mask=rows.exists)
            share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, sum_layout))
            sums = warpgroup_mma_wait(0, deps=(started,))
            if STEPS > 1:
                p.k.release(loads - 1)
            part = gl.convert_layout((sums * share[:, None]).to(dtype), part_layout)
            gathering.store_by_rows(p.part_ptr, part, rows.place * p.DIM, rows.exists)
        tiles += tiles_of_item
        if STEPS == 1:
            p.k.release(loads)
            loads += 1
        turn += 1
        item = upcoming


@gluon.jit(do_not_specialize=gathering.NOT_SPECIALIZED)
def picked_parts_kernel(
    q_ptr, k_tensor, v_tensor, part_ptr, lse_ptr, entries, items, item, item_count,
    q_batch_stride, q_head_stride, q_token_stride, q_pieces,
    first_head, first_query, stride, kv_heads, q_len, offset, key_blocks,
    score_scale,
    STAGES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """part_ptr: (entries of a round, MEMBERS, DIM), lse_ptr the same without DIM, in base 2. C.TILE_N: keys of a step."""
    DIM: gl.constexpr = C.DIM
    KEYS: gl.constexpr = C.TILE_N
    dtype: gl.constexpr = k_tensor.dtype
    q = new_ring(allocate_tiles(dtype, STAGES, ROWS, DIM), STAGES, FILLS=32 * GATHERING_WARPS)
    k = new_ring(allocate_tiles(dtype, KEY_STAGES, KEYS, DIM), KEY_STAGES, CONSUMERS=2)
    v = new_linked_ring(k, allocate_tiles(dtype, KEY_STAGES, KEYS, DIM), KEY_STAGES)
    # Makes the initialized barriers visible to TMA, which signals them.
    fence_async_shared()
    lists = gathering.Lists(
        entries, items + item * 5, item_count, first_head, first_query, stride, kv_heads, q_len, key_blocks, C.BLOCK, 1, C
    )
    p = PartsArguments(
        k_tensor=k_tensor,
        v_tensor=v_tensor,
        queries=gathering.RowTensor(q_ptr, q_batch_stride, q_head_stride, q_token_stride, q_pieces),
        rows=gathering.allocate_shared_rows(),
        part_ptr=part_ptr,
        lse_ptr=lse_ptr,
        lists=lists,
        score_scale=score_scale,
        q=q,
        k=k,
        v=v,
        DIM=DIM,
        KEYS=KEYS,
        STEPS=C.BLOCK // KEYS,
    )
    # Running sums of larger blocks take more, and so the gathering warps hold fewer addresses at once.
    REGISTERS: gl.constexpr = [200, 80, 24] if C.BLOCK == KEYS else [224, 40, 24]
    gl.warp_specialize([(_compute, (p, 0)), (_compute, (p, 1)), (_gather, (p,)), (_load, (p,))], [4, GATHERING_WARPS, 1], REGISTERS)


def picked_parts(operands, lists, parts, part_lse, sizes, round, scale: float) -> None:
    """Writes parts and part_lse of one round. Arguments as in ``forward``; see ``selection.hopper.supports``."""
    q, k, v = operands[:3]
    dim, keys = padded_head_dim(q.shape[3]), gathering.keys_at_a_time(sizes.block)
    block = [1, 1, keys, dim]
    arguments = [q, gluon_descriptor(k, block), gluon_descriptor(v, block), parts, part_lse]
    arguments += [
        *gathering.list_arguments(lists, round),
        *gathering.row_arguments(q),
        *sizes.integers(round),
        scale * LOG2_E.value,
    ]
    constants = {"STAGES": STAGES[dim, keys], "C": constants_of(sizes, dim, dim, keys)}
    grid = min(lists.items.shape[1], multiprocessors(q.device)), 1
    launch(picked_parts_kernel, grid, arguments, constants, {"num_warps": 4})
