"""The choice of ``pick_blocks`` by the largest product with a key, for Hopper: a loading warp, and three computing warp groups, 64
queries each. While one group takes maxima and keeps the best blocks, products of the others run."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from ...kernels.common.compat import Constants
from ...kernels.common.gluon import record
from ...kernels.common.layout import as_addressable
from ...kernels.hopper import products, ring
from ...kernels.hopper.descriptors import gluon_descriptor
from ...kernels.launch.launch import launch

GROUP_ROWS = gl.constexpr(64)
GROUPS = gl.constexpr(3)
ROWS = gl.constexpr(192)
WIDTH = gl.constexpr(64)  # columns of a tile in shared memory
COLUMNS = gl.constexpr(16)  # scores of a row that are collected before ``_keep_best`` takes the best
_NONE = gl.constexpr(1 << 30)  # as in ``pick_blocks``
_STAGES = gl.constexpr(5)  # blocks of keys in shared memory
_MOST_KEPT = 32  # blocks that a query keeps; four threads hold them in registers


@dataclass(frozen=True)
class PickShape:
    """CHOSEN: blocks that a query picks in addition to its own. SLOTS: a power of two, at least CHOSEN + 1. BOUNDED: whether
    ``bounds`` tells which ones a query may choose."""

    DIM: int
    BLOCK: int
    CHOSEN: int
    SLOTS: int
    BOUNDED: bool

    @property
    def PIECES(self) -> int:
        return self.DIM // WIDTH.value


@record
class PickArguments:
    """Holds what the warps share."""

    rows: tma.tensor_descriptor
    keys: tma.tensor_descriptor
    picks: gl.tensor
    bounds: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    key_head: gl.tensor
    batch_head: gl.tensor
    q_len: gl.tensor
    offset: gl.tensor
    first: gl.tensor  # query of the program
    begin: gl.tensor  # blocks that any of its queries may pick: begin .. end - 1
    end: gl.tensor
    left: ring.Ring
    right: ring.Ring
    SHAPE: gl.constexpr


@gluon.jit
def _load(p):
    """Runs the loading warp."""
    PIECES: gl.constexpr = p.SHAPE.PIECES
    p.left.expect(0, ROWS * p.SHAPE.DIM * 2)
    for tile in gl.static_range(GROUPS * PIECES):
        row = p.first + tile // PIECES * GROUP_ROWS
        p.left.load(0, p.rows, [p.batch, p.head, row, tile % PIECES * WIDTH], tile)
    for block in range(p.begin, p.end):
        n = block - p.begin
        p.right.acquire(n)
        p.right.expect(n, p.SHAPE.BLOCK * p.SHAPE.DIM * 2)
        for piece in gl.static_range(PIECES):
            p.right.load(n, p.keys, [p.batch, p.key_head, block * p.SHAPE.BLOCK, piece * WIDTH], piece)


@gluon.jit
def _choices(bounds, token, exists, offset, SHAPE: gl.constexpr):
    """(the first block that each query may choose, its own; negative: none). A query that does not exist has none."""
    if SHAPE.BOUNDED:
        least = gl.load(bounds + 2 * token, mask=exists, other=_NONE)
        own = gl.load(bounds + 2 * token + 1, mask=exists, other=-1)
    else:
        least = gl.where(exists, 0, _NONE)
        own = gl.where(exists & (token + offset >= 0), (token + offset) // SHAPE.BLOCK, -1)
    return least, own


@gluon.jit
def _keep_best(scores, column, least, own, best, block):
    """Does what ``_keep_best`` of ``pick_blocks`` does, with the columns that a row may choose."""
    possible = (column < own[:, None]) & (column >= least[:, None]) & (scores == scores)
    scores = gl.where(possible, scores, -float("inf"))
    peak = gl.max(scores, 1)
    lowest = gl.min(best, 1)
    while gl.max((peak > lowest).to(gl.int32), 0) > 0:
        better = peak > lowest
        first = gl.min(gl.where(scores == peak[:, None], column, _NONE), 1)
        leaves = gl.max(gl.where(best == lowest[:, None], block, -1), 1)
        enters = better[:, None] & (block == leaves[:, None])
        best = gl.where(enters, peak[:, None], best)
        block = gl.where(enters, first[:, None], block)
        scores = gl.where(better[:, None] & (column == first[:, None]), -float("inf"), scores)
        peak = gl.max(scores, 1)
        lowest = gl.min(best, 1)
    return best, block


@gluon.jit
def _compute(p, GROUP: gl.constexpr):
    """Runs a computing warp group."""
    CHOSEN: gl.constexpr = p.SHAPE.CHOSEN
    SLOTS: gl.constexpr = p.SHAPE.SLOTS
    PIECES: gl.constexpr = p.SHAPE.PIECES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.BLOCK, 16])
    # Rows have the layout of the products' rows, so maxima stay in their threads.
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, narrow)
    zeros = gl.zeros([GROUP_ROWS, p.SHAPE.BLOCK], gl.float32, layout=layout)
    token = p.first + GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=row_layout)
    exists = token < p.q_len
    least, own = _choices(p.bounds, token, exists, p.offset, p.SHAPE)
    end = gl.maximum(gl.max(own, 0), p.begin)
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, narrow))[None, :]
    room = (slot < CHOSEN) & (token >= 0)[:, None]
    best = gl.where(room, -float("inf"), float("inf"))
    block = _NONE + slot + gl.zeros([GROUP_ROWS, SLOTS], gl.int32, layout=narrow)
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, narrow))[None, :]
    scores = gl.full([GROUP_ROWS, COLUMNS], -float("inf"), gl.float32, layout=narrow)
    p.left.wait(0)
    rows = products.stage_pieces(p.left, 0, GROUP * PIECES, PIECES)
    for n in range(end - p.begin):
        p.right.wait(n)
        started = products.start_pieces_product(rows, products.stage_pieces(p.right, n, 0, PIECES), zeros, WIDTH)
        found = warpgroup_mma_wait(0, deps=(started,))
        p.right.release(n)
        most = gl.convert_layout(gl.max(found, 1), row_layout)
        scores = gl.where(columns == n % COLUMNS, most[:, None], scores)
        if (n + 1) % COLUMNS == 0 or n + 1 == end - p.begin:
            # In the last tile, columns from ``end`` on have scores of the tile before. No query may choose them.
            best, block = _keep_best(scores, p.begin + n // COLUMNS * COLUMNS + columns, least, own, best, block)
    # Other groups may see more blocks.
    for other in range(end - p.begin, p.end - p.begin):
        p.right.wait(other)
        p.right.release(other)
    block = gl.where((slot == CHOSEN) & (own >= 0)[:, None], own[:, None], block)
    rank = gl.zeros([GROUP_ROWS, SLOTS], gl.int32, layout=narrow)
    for other in gl.static_range(SLOTS):
        rank += (gl.max(gl.where(slot == other, block, -1), 1)[:, None] < block).to(gl.int32)
    place = p.picks + (p.batch_head.to(gl.int64) * p.q_len + token)[:, None] * (CHOSEN + 1) + rank
    gl.store(place, gl.where(block < _NONE, block, -1), mask=exists[:, None] & (rank < CHOSEN + 1))


@gluon.jit(do_not_specialize=["heads", "width", "q_len", "offset"])
def hopper_pick_blocks_kernel(rows, keys, picks, bounds, heads, width, q_len, offset, SHAPE: gl.constexpr):
    """rows, keys: descriptors of (batch, heads, tokens, head_dim). For the rest see ``pick_blocks_kernel``."""
    tiles = gl.cdiv(q_len, ROWS)
    # Late queries have most blocks, and begin first.
    first, batch_head = (tiles - 1 - gl.program_id(0) % tiles) * ROWS, gl.program_id(0) // tiles
    head = batch_head % heads
    place = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [4], [0]))
    least, own = _choices(bounds, first + place, (place < ROWS) & (first + place < q_len), offset, SHAPE)
    begin = gl.min(least, 0)
    right = ring.new_ring(
        ring.allocate_tiles(keys.dtype, _STAGES * SHAPE.PIECES, SHAPE.BLOCK, WIDTH), _STAGES, SHAPE.PIECES, CONSUMERS=GROUPS
    )
    LEFT: gl.constexpr = GROUPS * SHAPE.PIECES
    left = ring.new_linked_ring(right, ring.allocate_tiles(keys.dtype, LEFT, GROUP_ROWS, WIDTH), 1, LEFT)
    # Makes the initialized barriers visible to TMA, which signals them.
    fence_async_shared()
    p = PickArguments(
        rows=rows,
        keys=keys,
        picks=picks,
        bounds=bounds,
        batch=batch_head // heads,
        head=head,
        key_head=head // width,
        batch_head=batch_head,
        q_len=q_len,
        offset=offset,
        first=first,
        begin=begin,
        end=gl.maximum(gl.max(own, 0), begin),
        left=left,
        right=right,
        SHAPE=SHAPE,
    )
    gl.warp_specialize([(_compute, (p, 0)), (_compute, (p, 1)), (_compute, (p, 2)), (_load, (p,))], [4, 4, 1], [160, 160, 24])


def supports(source: Tensor, choice) -> bool:
    """Whether the kernel makes this choice: each query head picks, by 16-bit products."""
    alone = choice.kind == "max" and choice.heads == source.shape[1] and 1 < choice.keep <= _MOST_KEPT
    return alone and source.element_size() == 2 and source.shape[3] <= 128 and choice.block_size in (64, 128)


def pick_blocks(source: Tensor, keys: Tensor, choice, bounds: Tensor | None) -> Tensor:
    """Does what ``selection.choice.choose`` does."""
    source, keys = as_addressable(source), as_addressable(keys)
    (batch, heads, q_len, head_dim), keep = source.shape, choice.keep
    picks = torch.empty((batch, heads, q_len, keep), dtype=torch.int32, device=source.device)
    slots = max(8, triton.next_power_of_2(keep))
    shape = PickShape(64 if head_dim <= 64 else 128, choice.block_size, keep - 1, slots, bounds is not None)
    arguments = [gluon_descriptor(x, [1, 1, n, WIDTH.value]) for x, n in ((source, GROUP_ROWS.value), (keys, choice.block_size))]
    arguments += [picks, picks if bounds is None else bounds, heads, heads // keys.shape[1], q_len, choice.kv_len - q_len]
    grid = triton.cdiv(q_len, ROWS.value) * batch * heads, 1
    launch(hopper_pick_blocks_kernel, grid, arguments, {"SHAPE": Constants(shape)}, {"num_warps": 4})
    return picks
