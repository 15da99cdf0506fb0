"""The log-sums of ``log_sums`` for Hopper: a loading warp and two computing warp groups, each with 64 rows.

Where a row is one token, rows stay in shared memory, and the products of the next tile of columns run while this tile is summed.
Where a row spans several tokens, products add up token by token, and rows are loaded with the columns.
"""

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon import Constants, record
from ..common.layout import addressable
from ..common.tiles import LOG2_E
from ..hopper.descriptors import gluon_descriptor
from ..hopper.products import pieces_of, pieces_times_transposed
from ..hopper.ring import Ring, ring_beside, ring_of, tiles
from ..launch.launch import launch
from .log_sums import ABOVE, LEAST, NONE, STEPS, UNSEEN

HALF = gl.constexpr(64)  # rows of a warp group
WIDTH = gl.constexpr(64)  # columns of a tile in shared memory


@dataclass(frozen=True)
class LogSumShape:
    """The constants of the kernel: see ``log_sums_kernel`` for SPAN, PER_ROW, PER_BLOCK and STARTS."""

    DIM: int
    SPAN: int
    PER_ROW: int
    PER_BLOCK: int
    STARTS: bool
    KEYS: int  # columns of a step
    STAGES: int

    @property
    def PIECES(self) -> int:
        return self.DIM // 64

    @property
    def RESIDENT(self) -> bool:
        return self.SPAN == 1


@record
class LogSumArguments:
    """Holds what the warps share."""

    rows: tma.tensor_descriptor
    cols: tma.tensor_descriptor
    until: gl.tensor
    sums: gl.tensor
    totals: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    line: gl.tensor
    first_row: gl.tensor  # of the launch
    count: gl.tensor  # rows of the launch
    tile: gl.tensor
    blocks: gl.tensor
    factor: gl.tensor
    start: gl.tensor  # the first column that exists
    begin: gl.tensor  # columns that are read: begin .. end - 1, in whole tiles
    end: gl.tensor
    left: Ring
    right: Ring
    SHAPE: gl.constexpr


@gluon.jit
def _load_rows(p, n, step):
    for half in gl.static_range(2):
        for piece in gl.static_range(p.SHAPE.PIECES):
            place = [p.batch, p.head, p.first_row + p.tile * (2 * HALF) + half * HALF, step * p.SHAPE.DIM + piece * WIDTH]
            p.left.load(n, p.rows, place, half * p.SHAPE.PIECES + piece)


@gluon.jit
def _load(p):
    """Runs the loading warp. If rows are resident, it loads pairs of tiles, and one tile more."""
    BYTES: gl.constexpr = p.SHAPE.KEYS * p.SHAPE.DIM * 2
    ROW_BYTES: gl.constexpr = 2 * HALF * p.SHAPE.DIM * 2
    n = 0
    if p.SHAPE.RESIDENT:
        p.left.expect(0, ROW_BYTES)
        _load_rows(p, 0, 0)
    end = p.end
    if p.SHAPE.RESIDENT:
        end = p.begin + gl.cdiv(gl.maximum(p.end - p.begin, 0), 2 * p.SHAPE.KEYS) * (2 * p.SHAPE.KEYS) + 1
    for first in range(p.begin, end, p.SHAPE.KEYS):
        for step in range(p.SHAPE.SPAN):
            p.right.acquire(n)
            p.right.expect(n, BYTES)
            if not p.SHAPE.RESIDENT:
                p.left.expect(n, ROW_BYTES)
                _load_rows(p, n, p.SHAPE.SPAN - 1 - step)
            for piece in gl.static_range(p.SHAPE.PIECES):
                p.right.load(n, p.cols, [p.batch, p.kv_head, first, step * p.SHAPE.DIM + piece * WIDTH], piece)
            n += 1


@gluon.jit
def _summed(products, factor, PER_BLOCK: gl.constexpr):
    """(64, blocks) log-sums in base 2."""
    of_blocks = products.reshape([HALF, products.shape[1] // PER_BLOCK, PER_BLOCK])
    most = gl.max(of_blocks, 2) * factor
    most = gl.where(most < UNSEEN, 0.0, most)  # see ``log_sums._by_block``
    return most + gl.log2(gl.sum(gl.exp2(of_blocks * factor - most.expand_dims(2)), 2))


@gluon.jit
def _folded(p, products, state, first, inside, sees, MASKED: gl.constexpr):
    """Stores a tile's log-sums, and returns the rows' (origin, maximum, sum) with them; all by row of ``products``."""
    origin, running_max, running_sum = state
    row_layout: gl.constexpr = gl.SliceLayout(1, products.type.layout)
    if MASKED:
        column = first + gl.arange(0, p.SHAPE.KEYS, layout=gl.SliceLayout(0, products.type.layout))
        seen = (column[None, :] < sees[:, None]) & (column >= p.start)[None, :]
        products = gl.where(seen, products, LEAST)
    sums = _summed(products, p.factor, p.SHAPE.PER_BLOCK)
    block_layout: gl.constexpr = sums.type.layout
    most = gl.convert_layout(gl.max(sums, 1), row_layout)
    new_max = gl.maximum(running_max, most)
    shifted = gl.exp2(sums - gl.convert_layout(new_max, gl.SliceLayout(1, block_layout))[:, None])
    running_sum = running_sum * gl.exp2(running_max - new_max) + gl.convert_layout(gl.sum(shifted, 1), row_layout)
    origin = gl.where(running_max < UNSEEN, new_max + ABOVE, origin)
    from_origin = (sums - gl.convert_layout(origin, gl.SliceLayout(1, block_layout))[:, None]) * STEPS
    steps = gl.minimum(gl.maximum(from_origin, -32767.0), 32767.0)
    whole = gl.where(sums > UNSEEN, gl.floor(steps + 0.5), NONE).to(gl.int16)
    number = first // p.SHAPE.PER_BLOCK + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, block_layout))
    row = gl.convert_layout(inside, gl.SliceLayout(1, block_layout))
    row_block = p.line.to(gl.int64) * gl.cdiv(p.count, p.SHAPE.PER_ROW) + row // p.SHAPE.PER_ROW
    target = (row_block * p.blocks * p.SHAPE.PER_ROW + row % p.SHAPE.PER_ROW)[:, None] + (number * p.SHAPE.PER_ROW)[None, :]
    gl.store(p.sums + target, whole, mask=(row < p.count)[:, None] & (number < p.blocks)[None, :])
    return origin, new_max, running_sum


@gluon.jit
def _compute(p, GROUP: gl.constexpr):
    """Runs a computing warp group."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.KEYS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    PIECES: gl.constexpr = p.SHAPE.PIECES
    zeros = gl.zeros([HALF, p.SHAPE.KEYS], gl.float32, layout=layout)
    inside = p.tile * (2 * HALF) + GROUP * HALF + gl.arange(0, HALF, layout=row_layout)
    exists = inside < p.count
    sees = gl.load(p.until + p.first_row + inside, mask=exists, other=2147483647)
    # First the columns that all rows see, in whole tiles; then the columns that some rows see.
    STEP: gl.constexpr = p.SHAPE.KEYS * (2 if p.SHAPE.RESIDENT else 1)
    seen_by_all = gl.minimum(gl.min(sees, 0), p.end)
    if p.SHAPE.STARTS:
        seen_by_all = gl.where(p.start > p.begin, p.begin, seen_by_all)
    whole = p.begin + gl.maximum(seen_by_all - p.begin, 0) // STEP * STEP
    floor = gl.full([HALF], LEAST, gl.float32, layout=row_layout)
    state = gl.zeros([HALF], gl.float32, layout=row_layout), floor, gl.zeros([HALF], gl.float32, layout=row_layout)
    n = 0
    if p.SHAPE.RESIDENT:
        p.left.wait(0)
        rows = pieces_of(p.left, 0, GROUP * PIECES, PIECES)
        p.right.wait(0)
        started = pieces_times_transposed(rows, pieces_of(p.right, 0, 0, PIECES), zeros, WIDTH)
        # Two tiles at a time: the products in flight then have registers of their own, without moves.
        for MASKED in gl.static_range(2):
            for first in range(whole if MASKED else p.begin, p.end if MASKED else whole, 2 * p.SHAPE.KEYS):
                products = warpgroup_mma_wait(0, deps=(started,))
                p.right.release(n)
                p.right.wait(n + 1)
                other = pieces_times_transposed(rows, pieces_of(p.right, n + 1, 0, PIECES), zeros, WIDTH)
                state = _folded(p, products, state, first, inside, sees, MASKED)
                products = warpgroup_mma_wait(0, deps=(other,))
                p.right.release(n + 1)
                n += 2
                p.right.wait(n)
                started = pieces_times_transposed(rows, pieces_of(p.right, n, 0, PIECES), zeros, WIDTH)
                state = _folded(p, products, state, first + p.SHAPE.KEYS, inside, sees, MASKED)
        warpgroup_mma_wait(0, deps=(started,))
        p.right.release(n)
    else:
        for MASKED in gl.static_range(2):
            for first in range(whole if MASKED else p.begin, p.end if MASKED else whole, p.SHAPE.KEYS):
                products = zeros
                for step in range(p.SHAPE.SPAN):
                    p.left.wait(n)
                    p.right.wait(n)
                    for piece in gl.static_range(PIECES):
                        left, right = p.left.stage(n, GROUP * PIECES + piece), p.right.stage(n, piece)
                        products = warpgroup_mma(left, right.permute((1, 0)), products, is_async=True)
                    products = warpgroup_mma_wait(PIECES, deps=(products,))
                    p.right.release(n - 1, pred=step > 0)
                    n += 1
                products = warpgroup_mma_wait(0, deps=(products,))
                p.right.release(n - 1)
                state = _folded(p, products, state, first, inside, sees, MASKED)
    origin, running_max, running_sum = state
    total = gl.minimum(running_max - origin + gl.log2(gl.maximum(running_sum, 1.0e-30)), 32767.0 / STEPS)
    total = gl.where(running_max < UNSEEN, 0.0, total)  # of rows that see nothing
    gl.store(p.totals + p.line.to(gl.int64) * p.count + inside, total, mask=exists)


@gluon.jit(do_not_specialize=["lines", "heads", "group", "first_row", "count", "blocks"])
def hopper_log_sums_kernel(
    rows, cols, until, starts, sums, totals, lines, heads, group, first_row, count, blocks, factor, SHAPE: gl.constexpr
):
    """A program has 128 rows of one head: see ``log_sums_kernel``. rows, cols: descriptors of (batch, heads, rows, SPAN * DIM)."""
    tile, line = gl.cdiv(count, 2 * HALF) - 1 - gl.program_id(0) // lines, gl.program_id(0) % lines
    batch, head = line // heads, line % heads
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    inside = tile * (2 * HALF) + gl.arange(0, 2 * HALF, layout=layout)
    end = gl.max(gl.load(until + first_row + inside, mask=inside < count, other=0), 0)
    start = first_row * 0
    if SHAPE.STARTS:
        start = gl.load(starts + batch)
    STAGES: gl.constexpr = SHAPE.STAGES
    PIECES: gl.constexpr = SHAPE.PIECES
    right = ring_of(tiles(cols.dtype, STAGES * PIECES, SHAPE.KEYS, WIDTH), STAGES, PIECES, CONSUMERS=2)
    LEFT: gl.constexpr = 1 if SHAPE.RESIDENT else STAGES
    left = ring_beside(right, tiles(cols.dtype, LEFT * 2 * PIECES, HALF, WIDTH), LEFT, 2 * PIECES)
    # Makes the initialized barriers visible to TMA, which signals them.
    fence_async_shared()
    p = LogSumArguments(
        rows=rows,
        cols=cols,
        until=until,
        sums=sums,
        totals=totals,
        batch=batch,
        head=head,
        kv_head=head // group,
        line=line,
        first_row=first_row,
        count=count,
        tile=tile,
        blocks=blocks,
        factor=factor,
        start=start,
        begin=gl.minimum(start // SHAPE.KEYS * SHAPE.KEYS, end),  # rows before all existing columns wait for one tile too
        end=end,
        left=left,
        right=right,
        SHAPE=SHAPE,
    )
    gl.warp_specialize([(_compute, (p, 0)), (_compute, (p, 1)), (_load, (p,))], [4, 1], [240, 24])


def supports(rows: torch.Tensor, per_kv_block: int) -> bool:
    """Whether the kernel takes such rows."""
    return rows.dtype in (torch.float16, torch.bfloat16) and rows.shape[3] in (64, 128) and per_kv_block >= 4


def log_sums(rows, columns, until, starts, sums, totals, span, factor, per_q_block, per_kv_block, first, count) -> None:
    """Writes sums and totals: see ``log_sums_kernel``. The rest as for ``scores_of_blocks``."""
    batch, heads, _, dim = rows.shape
    rows, columns = (addressable(_in_spans(x, span) if span > 1 else x) for x in (rows, columns))
    keys = max(per_kv_block, 128 if span == 1 else 256)
    shape = LogSumShape(dim, span, per_q_block, per_kv_block, starts is not None, keys, (4 if span == 1 else 2) * 128 // dim)
    arguments = [gluon_descriptor(rows, [1, 1, HALF.value, WIDTH.value]), gluon_descriptor(columns, [1, 1, keys, WIDTH.value])]
    arguments += [until, until if starts is None else starts, sums, totals, batch * heads, heads, heads // columns.shape[1]]
    arguments += [first, count, sums.shape[3], factor * LOG2_E.value]
    grid = triton.cdiv(count, 2 * HALF.value) * batch * heads, 1
    launch(hopper_log_sums_kernel, grid, arguments, {"SHAPE": Constants(shape)}, {"num_warps": 4})


def _in_spans(x: torch.Tensor, span: int) -> torch.Tensor:
    """(batch, heads, ceil(tokens / span), span * dim), zeros past the end; a copy unless tokens follow each other in memory."""
    rest = -x.shape[2] % span
    x = torch.nn.functional.pad(x, (0, 0, 0, rest)) if rest else x
    x = x if x.stride(2) == x.shape[3] else x.contiguous()
    return x.unflatten(2, (-1, span)).flatten(3)
