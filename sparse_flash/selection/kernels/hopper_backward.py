"""Gradients of attention over key blocks that each query picked, for Hopper: ``picked_grads`` of ``backward``, with the same
lists and results.

Persistent programs: four warps that gather queries and their gradients, and eight that compute, and load keys and values.
Scores are transposed, with keys along rows: this makes them the left operand of dV without a pass through shared memory.

- Larger blocks come in parts of 128 keys, each an item of its own, with a part of dQ of its own.
- Of 128 keys, each warp group holds 64, with their dK and dV; both share every tile of 64 gathered rows. The scores of
  the next tile are computed during this tile's other products, to keep the tensor cores busy while the exponentials run.
- Of a block of 64 keys, each warp group holds all, and takes every second tile. While one waits, the other computes. At the end of
  an item the second hands its dK and dV to the first.

Sources: arXiv:2205.14135, Alg. 4; arXiv:2511.11571 (queries gathered by key block); arXiv:2407.08608, sec. 3 (warp roles).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ...kernels.common.config import padded_head_dim
from ...kernels.common.gluon import barrier, copy_elements, opaque_zero, record
from ...kernels.common.tiles import LOG2_E
from ...kernels.hopper.descriptors import gluon_descriptor
from ...kernels.hopper.products import start_transposed_product
from ...kernels.hopper.ring import Ring, allocate_tiles, new_linked_ring, new_ring
from ...kernels.launch.launch import launch, multiprocessors
from . import hopper_gathering as gathering
from .hopper_gathering import GATHERING_WARPS, ROWS
from .tiles import constants_of

# Tiles of gathered queries, and of their gradients, in shared memory, by padded head_dim.
STAGES = {64: 6, 128: 4}
# Rows whose addresses the gathering warps hold at once, in few registers.
TOGETHER = gl.constexpr(32)


@record
class GradsArguments:
    """Holds what the warps share."""

    k_tensor: tma.tensor_descriptor
    v_tensor: tma.tensor_descriptor
    queries: gathering.RowTensor
    douts: gathering.RowTensor
    rows: gathering.RowOrigins  # of the gathering warps
    log2_sum_ptr: gl.tensor
    delta_ptr: gl.tensor
    part_ptr: gl.tensor
    dk_ptr: gl.tensor
    dv_ptr: gl.tensor
    lists: gathering.Lists
    offset: gl.tensor
    scale: gl.tensor
    score_scale: gl.tensor
    k: Ring  # one stage, per item
    v: Ring
    q: Ring  # one stage per tile
    dout: Ring  # likewise; released with q
    log2_sum: gl.shared_memory_descriptor  # copied with q
    delta: gl.shared_memory_descriptor  # copied with dout
    dscores: gl.shared_memory_descriptor  # of each warp group, or of both
    positions: gl.shared_memory_descriptor  # likewise: of a tile's queries, from the block's first key
    sums: Ring  # one stage, through which the second warp group of a block of 64 keys hands dK, then dV
    DIM: gl.constexpr


@gluon.jit
def _gather(p):
    """The gathering warps: each tile's queries, their gradients, and the two numbers of each."""
    turn = 0
    tiles = 0
    item = p.lists.item(turn)
    while item.begin < item.end:
        upcoming = p.lists.item(turn + 1)
        tiles = _gather_list(p, item.begin, item.whole, p.lists.locate_block(item), tiles)
        tiles = _gather_list(p, item.whole, item.end, p.lists.locate_block(item), tiles)
        turn += 1
        item = upcoming


@gluon.jit
def _gather_list(p, begin, end, block, tiles):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    entry, exists = p.lists.load_entries(begin, end, 0, layout)
    for step in range(p.lists.steps(begin, end)):
        rows = p.lists.rows_of(entry, exists, block, layout)
        # Read a tile ahead, so no copy waits for it.
        entry, exists = p.lists.load_entries(begin, end, step + 1, layout)
        p.rows.publish(rows)
        index = p.lists.index_of(rows, block)
        p.q.acquire(tiles)
        p.queries.copy(p.q.stage(tiles), p.rows, block.batch, TOGETHER)
        copy_elements(p.log2_sum.index(p.q.place(tiles)), p.log2_sum_ptr + index, mask=rows.exists)
        p.q.commit_copies(tiles)
        p.douts.copy(p.dout.stage(tiles), p.rows, block.batch, TOGETHER)
        copy_elements(p.delta.index(p.q.place(tiles)), p.delta_ptr + index, mask=rows.exists)
        p.dout.commit_copies(tiles)
        tiles += 1
    return tiles


@gluon.jit
def _load_item_keys(p, turn, item):
    """Starts the copy of an item's keys and values, once no warp needs the item before any more."""
    if item.begin < item.end:
        block = p.lists.locate_block(item)
        gathering.load_keys(p, turn, block, block.position, p.lists.KEYS)


@gluon.jit
def _mask_causal(p, weights, begin, end, step, block, GROUP: gl.constexpr):
    """Weights, keys along rows, set to 0 where a key follows its query."""
    layout: gl.constexpr = weights.type.layout
    number_layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # Through shared memory, as every thread needs a quarter of the positions.
    entry, exists = p.lists.load_entries(begin, end, step, number_layout)
    rows = p.lists.rows_of(entry, exists, block, number_layout)
    positions = p.positions.index(GROUP)
    positions.store(rows.query + (p.offset - block.position))
    position = positions.load(gl.SliceLayout(0, layout))
    key = gl.arange(0, weights.shape[0], layout=gl.SliceLayout(1, layout))
    return gl.where(key[:, None] <= position[None, :], weights, 0.0)


@gluon.jit
def _start_dweights(p, v, tile, zeros):
    """Starts the gradients of a tile's weights less delta: sums that begin there need no registers for it later."""
    delta = p.delta.index(p.q.place(tile)).load(gl.SliceLayout(0, zeros.type.layout))
    return warpgroup_mma(v, p.dout.stage(tile).permute((1, 0)), zeros - delta[None, :], is_async=True)


@gluon.jit
def _store_dq(p, dq, rows, COLUMN: gl.constexpr = 0):
    """Stores the parts of dQ of a tile, or their columns from COLUMN on."""
    part = gl.convert_layout((dq * p.scale).to(p.q.data.dtype), gathering.storing_layout(dq.shape[1], gl.num_warps()))
    gathering.store_by_rows(p.part_ptr + COLUMN, part, rows.place * p.DIM, rows.exists)


@gluon.jit
def _store_key_grad(p, pointer, grad, item):
    """Stores dK or dV of an item."""
    layout: gl.constexpr = grad.type.layout
    key = item.number.to(gl.int64) * p.lists.KEYS + gl.arange(0, p.lists.KEYS, layout=gl.SliceLayout(1, layout))
    gl.store(pointer + (key * p.DIM)[:, None] + gl.arange(0, p.DIM, layout=gl.SliceLayout(0, layout))[None, :], grad)


@gluon.jit
def _add_shared_tiles(p, state, begin, end, block, tiles, last, zeros, dq_zeros, CUT: gl.constexpr):
    """Adds entries begin .. end - 1 to dK and dV. state: dK, dV and the scores of the next tile, (keys, rows). tiles: gathered
    before. last: the item's last tile, during which scores are computed that nobody reads."""
    dk, dv, scores = state
    dtype: gl.constexpr = p.q.data.dtype
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, zeros.type.layout)
    row_layout: gl.constexpr = gl.SliceLayout(1, gathering.storing_layout(p.DIM, gl.num_warps()))
    for step in range(p.lists.steps(begin, end)):
        v = p.v.stage(0, opaque_zero(tiles))
        q, dout = p.q.stage(tiles), p.dout.stage(tiles)
        entry, exists = p.lists.load_entries(begin, end, step, row_layout)
        p.dout.wait(tiles)
        # The rows were copied by threads; products read them as TMA does.
        fence_async_shared()
        if not CUT:
            started = _start_dweights(p, v, tiles, zeros)
        log2_sum = p.log2_sum.index(p.q.place(tiles)).load(column)
        weights = gl.exp2(scores * p.score_scale - log2_sum[None, :])
        if CUT:
            # Positions and a product under way would not fit the registers together.
            weights = _mask_causal(p, weights, begin, end, step, block, 0)
            started = _start_dweights(p, v, tiles, zeros)
        dweights = warpgroup_mma_wait(0, deps=(started,))
        started_dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), operand_layout), dout, dv, is_async=True)
        dscores = (weights * dweights).to(dtype)
        p.dscores.index(0).store(dscores)
        started_dk = warpgroup_mma(gl.convert_layout(dscores, operand_layout), q, dk, is_async=True)
        k = p.k.stage(0, opaque_zero(tiles))
        fence_async_shared()
        barrier()
        stored = p.dscores.index(opaque_zero(tiles))
        started_dq = warpgroup_mma(stored.permute((1, 0)), k, dq_zeros, use_acc=False, is_async=True)
        dv, dk = warpgroup_mma_wait(1, deps=(started_dv, started_dk))
        p.q.wait(tiles + 1, pred=tiles != last)
        fence_async_shared()
        started_scores = start_transposed_product(k, p.q.stage(tiles + 1), zeros, p.DIM)
        p.q.release(tiles)
        dq = warpgroup_mma_wait(1, deps=(started_dq,))
        _store_dq(p, dq, p.lists.rows_of(entry, exists, block, row_layout))
        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        tiles += 1
    return (dk, dv, scores), tiles


@gluon.jit
def _compute_shared_tiles(p):
    """The computing warps of items of 128 keys: each group of four holds 64."""
    KEYS: gl.constexpr = p.lists.KEYS
    WARPS: gl.constexpr = gl.num_warps()
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, p.DIM, 16])
    # Each group takes half the columns of dQ.
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, p.DIM * 4 // WARPS, 16])
    zeros = gl.zeros([KEYS, ROWS], gl.float32, layout=score_layout)
    key_zeros = gl.zeros([KEYS, p.DIM], gl.float32, layout=key_layout)
    dq_zeros = gl.zeros([ROWS, p.DIM], gl.float32, layout=dq_layout)
    turn = 0
    tiles = 0
    item = p.lists.item(turn)
    _load_item_keys(p, turn, item)
    while item.begin < item.end:
        block = p.lists.locate_block(item)
        upcoming = p.lists.item(turn + 1)
        last = tiles + p.lists.steps(item.begin, item.whole) + p.lists.steps(item.whole, item.end) - 1
        p.k.wait(turn)
        p.v.wait(turn)
        p.q.wait(tiles)
        fence_async_shared()
        started = start_transposed_product(p.k.stage(0), p.q.stage(tiles), zeros, p.DIM)
        state = (key_zeros, key_zeros, warpgroup_mma_wait(0, deps=(started,)))
        state, tiles = _add_shared_tiles(p, state, item.begin, item.whole, block, tiles, last, zeros, dq_zeros, True)
        state, tiles = _add_shared_tiles(p, state, item.whole, item.end, block, tiles, last, zeros, dq_zeros, False)
        dk, dv, _ = state
        p.k.release(turn)
        # The next keys and values arrive while these gradients are stored.
        _load_item_keys(p, turn + 1, upcoming)
        _store_key_grad(p, p.dk_ptr, dk, item)
        _store_key_grad(p, p.dv_ptr, dv, item)
        turn += 1
        item = upcoming


@gluon.jit
def _add_own_tiles(p, dk, dv, begin, end, block, tiles, zeros, dq_zeros, GROUP: gl.constexpr, CUT: gl.constexpr):
    """(dK, dV, the number of tiles) after a warp group's tiles of entries begin .. end - 1."""
    dtype: gl.constexpr = p.q.data.dtype
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, zeros.type.layout)
    row_layout: gl.constexpr = gl.SliceLayout(1, gathering.storing_layout(p.DIM // 2, gl.num_warps()))
    steps = p.lists.steps(begin, end)
    for step in range((tiles + GROUP) % 2, steps, 2):
        place = tiles + step
        k, v = p.k.stage(0, opaque_zero(place)), p.v.stage(0, opaque_zero(place))
        q, dout = p.q.stage(place), p.dout.stage(place)
        entry, exists = p.lists.load_entries(begin, end, step, row_layout)
        p.q.wait(place)
        p.dout.wait(place)
        # The rows were copied by threads; products read them as TMA does.
        fence_async_shared()
        started_scores = start_transposed_product(k, q, zeros, p.DIM)
        if not CUT:
            started = _start_dweights(p, v, place, zeros)
        scores = warpgroup_mma_wait(0 if CUT else 1, deps=(started_scores,))
        log2_sum = p.log2_sum.index(p.q.place(place)).load(column)
        weights = gl.exp2(scores * p.score_scale - log2_sum[None, :])
        if CUT:
            # Positions and a product under way would not fit the registers together.
            weights = _mask_causal(p, weights, begin, end, step, block, GROUP)
            started = _start_dweights(p, v, place, zeros)
        dweights = warpgroup_mma_wait(0, deps=(started,))
        started_dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), operand_layout), dout, dv, is_async=True)
        dscores = (weights * dweights).to(dtype)
        p.dscores.index(GROUP).store(dscores)
        started_dk = warpgroup_mma(gl.convert_layout(dscores, operand_layout), q, dk, is_async=True)
        fence_async_shared()
        barrier()
        # dQ takes twice the registers here: they hold half its columns at a time.
        HALF: gl.constexpr = p.DIM // 2
        stored = p.dscores.index(GROUP + opaque_zero(place)).permute((1, 0))
        keys = p.k.stage(0, opaque_zero(place))
        dv = warpgroup_mma_wait(1, deps=(started_dv,))
        started_left = warpgroup_mma(stored, keys.slice(0, HALF, dim=1), dq_zeros, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(1, deps=(started_dk,))
        p.q.release(place)
        started_right = warpgroup_mma(stored, keys.slice(HALF, HALF, dim=1), dq_zeros, use_acc=False, is_async=True)
        rows = p.lists.rows_of(entry, exists, block, row_layout)
        left = warpgroup_mma_wait(1, deps=(started_left,))
        _store_dq(p, left, rows)
        right = warpgroup_mma_wait(0, deps=(started_right,))
        _store_dq(p, right, rows, HALF)
    return dk, dv, tiles + steps


@gluon.jit
def _compute_own_tiles(p, GROUP: gl.constexpr):
    """A computing warp group of blocks of 64 keys: every second tile, whatever its item."""
    KEYS: gl.constexpr = p.lists.KEYS
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.DIM // 2, 16])
    zeros = gl.zeros([KEYS, ROWS], gl.float32, layout=score_layout)
    key_zeros = gl.zeros([KEYS, p.DIM], gl.float32, layout=key_layout)
    dq_zeros = gl.zeros([ROWS, p.DIM // 2], gl.float32, layout=dq_layout)
    turn = 0
    tiles = 0
    item = p.lists.item(turn)
    if GROUP == 0:
        _load_item_keys(p, turn, item)
    while item.begin < item.end:
        block = p.lists.locate_block(item)
        upcoming = p.lists.item(turn + 1)
        p.k.wait(turn)
        p.v.wait(turn)
        dk, dv = key_zeros, key_zeros
        dk, dv, tiles = _add_own_tiles(p, dk, dv, item.begin, item.whole, block, tiles, zeros, dq_zeros, GROUP, True)
        dk, dv, tiles = _add_own_tiles(p, dk, dv, item.whole, item.end, block, tiles, zeros, dq_zeros, GROUP, False)
        p.k.release(turn)
        if GROUP == 0:
            _load_item_keys(p, turn + 1, upcoming)
            p.sums.wait(2 * turn)
            dk += p.sums.stage(0).load(key_layout)
            p.sums.release(2 * turn)
            _store_key_grad(p, p.dk_ptr, dk, item)
            p.sums.wait(2 * turn + 1)
            dv += p.sums.stage(0).load(key_layout)
            p.sums.release(2 * turn + 1)
            _store_key_grad(p, p.dv_ptr, dv, item)
        else:
            p.sums.acquire(2 * turn)
            p.sums.stage(0).store(dk)
            p.sums.commit(2 * turn)
            p.sums.acquire(2 * turn + 1)
            p.sums.stage(0).store(dv)
            p.sums.commit(2 * turn + 1)
        turn += 1
        item = upcoming


@gluon.jit(do_not_specialize=gathering.NOT_SPECIALIZED)
def picked_grads_kernel(
    q_ptr, k_tensor, v_tensor, dout_ptr, log2_sum_ptr, delta_ptr, part_ptr, dk_ptr, dv_ptr, entries, items, item, item_count,
    q_batch_stride, q_head_stride, q_token_stride, q_pieces,
    dout_batch_stride, dout_head_stride, dout_token_stride, dout_pieces,
    first_head, first_query, stride, kv_heads, q_len, offset, key_blocks,
    scale, score_scale,
    STAGES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """part_ptr: (entries of a round, parts of a block, MEMBERS, DIM). dk_ptr, dv_ptr: (pieces of a round, BLOCK, DIM)
    float32. C.TILE_N: keys of an item, which is a part of a block."""
    DIM: gl.constexpr = C.DIM
    KEYS: gl.constexpr = C.TILE_N
    dtype: gl.constexpr = k_tensor.dtype
    GROUPS: gl.constexpr = 128 // KEYS  # partitions that compute
    THREADS: gl.constexpr = 32 * GATHERING_WARPS
    q = new_ring(allocate_tiles(dtype, STAGES, ROWS, DIM), STAGES, FILLS=THREADS)
    dout = new_linked_ring(q, allocate_tiles(dtype, STAGES, ROWS, DIM), STAGES, FILLS=THREADS)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    log2_sum = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], numbers)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], numbers)
    k = new_ring(allocate_tiles(dtype, 1, KEYS, DIM), 1, CONSUMERS=GROUPS)
    v = new_linked_ring(k, allocate_tiles(dtype, 1, KEYS, DIM), 1)
    dscores = allocate_tiles(dtype, GROUPS, KEYS, ROWS)
    positions = gl.allocate_shared_memory(gl.int32, [GROUPS, ROWS], numbers)
    sums = k
    if GROUPS > 1:
        of_sums: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        sums = new_ring(gl.allocate_shared_memory(gl.float32, [1, KEYS, DIM], of_sums), 1)
    # Makes the initialized barriers visible to TMA, which signals them.
    fence_async_shared()
    lists = gathering.Lists(
        entries, items + item * 5, item_count, first_head, first_query, stride, kv_heads, q_len, key_blocks, KEYS,
        C.BLOCK // KEYS, C,
    )  # fmt: skip
    p = GradsArguments(
        k_tensor=k_tensor,
        v_tensor=v_tensor,
        queries=gathering.RowTensor(q_ptr, q_batch_stride, q_head_stride, q_token_stride, q_pieces),
        douts=gathering.RowTensor(dout_ptr, dout_batch_stride, dout_head_stride, dout_token_stride, dout_pieces),
        rows=gathering.allocate_shared_rows(),
        log2_sum_ptr=log2_sum_ptr,
        delta_ptr=delta_ptr,
        part_ptr=part_ptr,
        dk_ptr=dk_ptr,
        dv_ptr=dv_ptr,
        lists=lists,
        offset=offset,
        scale=scale,
        score_scale=score_scale,
        k=k,
        v=v,
        q=q,
        dout=dout,
        log2_sum=log2_sum,
        delta=delta,
        dscores=dscores,
        positions=positions,
        sums=sums,
        DIM=DIM,
    )
    # Registers: as many as can be for the sums, and as few for the addresses, as fit twelve warps.
    if GROUPS == 1:
        gl.warp_specialize([(_compute_shared_tiles, (p,)), (_gather, (p,))], [GATHERING_WARPS], [40])
    else:
        gl.warp_specialize(
            [(_compute_own_tiles, (p, 0)), (_compute_own_tiles, (p, 1)), (_gather, (p,))], [4, GATHERING_WARPS], [232, 40]
        )


def keys_per_part(q, v, sizes) -> int:
    """Returns the keys of a part of dQ."""
    return gathering.keys_at_a_time(sizes.block)


def picked_grads(operands, lists, parts, dk_sums, dv_sums, sizes, round, scale: float) -> None:
    """Writes parts and sums of one round. Arguments as in ``backward``; see ``selection.hopper.supports``."""
    q, k, v, dout, log2_sum, delta = operands
    dim, keys = padded_head_dim(q.shape[3]), gathering.keys_at_a_time(sizes.block)
    block = [1, 1, keys, dim]
    arguments = [q, gluon_descriptor(k, block), gluon_descriptor(v, block), dout, log2_sum, delta, parts]
    arguments += [dk_sums, dv_sums, *gathering.list_arguments(lists, round)]
    arguments += [*gathering.row_arguments(q), *gathering.row_arguments(dout), *sizes.integers(round), scale, scale * LOG2_E.value]
    constants = {"STAGES": STAGES[dim], "C": constants_of(sizes, dim, dim, keys)}
    grid = min(lists.items.shape[1] * (sizes.block // keys), multiprocessors(q.device)), 1
    launch(picked_grads_kernel, grid, arguments, constants, {"num_warps": keys // 16})
