"""The log-sums of ``log_sums`` for Hopper: a loading warp, and computing warp groups of 64 rows each. One group sums while the
products of others run.

Where a row is one token, there are three groups, and rows stay in shared memory. Where a row spans several tokens, there are two;
products add up token by token, and rows are loaded with the columns.

The exponentials of a tile of columns are taken from a number that the row had before, so they wait for no maximum: the largest
logit of its first tile, or the largest log-sum of the tiles up to the last but one.
"""

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ...kernels.common.compat import Constants
from ...kernels.common.gluon import record
from ...kernels.common.layout import as_addressable
from ...kernels.common.tiles import LOG2_E
from ...kernels.hopper.descriptors import gluon_descriptor
from ...kernels.hopper.products import stage_pieces, start_pieces_product
from ...kernels.hopper.ring import Ring, new_linked_ring, new_ring
from ...kernels.hopper.ring import allocate_tiles as tiles_of
from ...kernels.launch.launch import Recording
from .log_sums import UNSEEN_BELOW, UNSEEN_PRODUCT

GROUP_ROWS = gl.constexpr(64)
WIDTH = gl.constexpr(64)  # columns of a tile in shared memory
CHUNK = 16_384  # tokens of the columns of a program
# The largest sum of exponentials. A log-sum that is more than 120 above the log-sums of all earlier tiles counts as 120 above.
MAX_SUM = gl.constexpr(1.0e36)


@dataclass(frozen=True)
class LogSumShape:
    """The constants of the kernel: see ``log_sums_kernel`` for SPAN, PER_ROW, PER_BLOCK and BOUNDED."""

    DIM: int
    SPAN: int
    PER_ROW: int
    PER_BLOCK: int
    BOUNDED: bool
    KEYS: int  # columns of a step
    STAGES: int

    @property
    def PIECES(self) -> int:
        return self.DIM // 64

    @property
    def RESIDENT(self) -> bool:
        return self.SPAN == 1

    @property
    def GROUPS(self) -> int:
        return 3 if self.RESIDENT else 2

    @property
    def ROWS(self) -> int:
        """Returns the rows of a program."""
        return self.GROUPS * GROUP_ROWS.value


@record
class LogSumArguments:
    """Holds what the warps share."""

    rows: tma.tensor_descriptor
    cols: tma.tensor_descriptor
    until: gl.tensor
    sums: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    kv_head: gl.tensor
    batch_head: gl.tensor
    first_row: gl.tensor  # of the launch
    count: gl.tensor  # rows of the launch
    tile: gl.tensor
    blocks: gl.tensor
    factor: gl.tensor
    start: gl.tensor  # the first column that exists
    stop: gl.tensor  # the first past them
    row_stop: gl.tensor  # the first row past the existing rows
    begin: gl.tensor  # the program's columns: begin .. end - 1, in whole tiles
    end: gl.tensor
    left: Ring
    right: Ring
    SHAPE: gl.constexpr


@gluon.jit
def _load_rows(p, n, step):
    for group in gl.static_range(p.SHAPE.GROUPS):
        row = p.first_row + p.tile * p.SHAPE.ROWS + group * GROUP_ROWS
        for piece in gl.static_range(p.SHAPE.PIECES):
            p.left.load(n, p.rows, [p.batch, p.head, row, step * p.SHAPE.DIM + piece * WIDTH], group * p.SHAPE.PIECES + piece)


@gluon.jit
def _load(p):
    """Runs the loading warp."""
    BYTES: gl.constexpr = p.SHAPE.KEYS * p.SHAPE.DIM * 2
    ROW_BYTES: gl.constexpr = p.SHAPE.ROWS * p.SHAPE.DIM * 2
    n = 0
    if p.SHAPE.RESIDENT:
        p.left.expect(0, ROW_BYTES)
        _load_rows(p, 0, 0)
    for first in range(p.begin, p.end, p.SHAPE.KEYS):
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
def _store_log_sums(p, products, state, first, inside, sees, MASKED: gl.constexpr):
    """Stores a tile's log-sums, and returns the rows' (number that exponentials are taken from, largest log-sum of the last tile)
    with them; all by row of ``products``."""
    origin, last = state
    row_layout: gl.constexpr = gl.SliceLayout(1, products.type.layout)
    BLOCKS: gl.constexpr = products.shape[1] // p.SHAPE.PER_BLOCK
    if MASKED:
        column = first + gl.arange(0, p.SHAPE.KEYS, layout=gl.SliceLayout(0, products.type.layout))
        seen = (column[None, :] < sees[:, None]) & (column >= p.start)[None, :]
        products = gl.where(seen, products, UNSEEN_PRODUCT)
    if first == p.begin:
        most = gl.max(products, 1) * p.factor
        origin = gl.where(most < UNSEEN_BELOW, 0.0, most)  # 0 of rows that see nothing
        last = origin
    weights = gl.exp2(products * p.factor - origin[:, None])
    total = gl.sum(weights.reshape([GROUP_ROWS, BLOCKS, p.SHAPE.PER_BLOCK]), 2)
    block_layout: gl.constexpr = total.type.layout
    sums = gl.log2(gl.minimum(total, MAX_SUM)) + gl.convert_layout(origin, gl.SliceLayout(1, block_layout))[:, None]
    number = first // p.SHAPE.PER_BLOCK + gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, block_layout))
    row = gl.convert_layout(inside, gl.SliceLayout(1, block_layout))
    row_block = p.batch_head.to(gl.int64) * gl.cdiv(p.count, p.SHAPE.PER_ROW) + row // p.SHAPE.PER_ROW
    target = (row_block * p.blocks * p.SHAPE.PER_ROW + row % p.SHAPE.PER_ROW)[:, None] + (number * p.SHAPE.PER_ROW)[None, :]
    gl.store(p.sums + target, sums, mask=(row < p.count)[:, None] & (number < p.blocks)[None, :])
    return gl.maximum(origin, last), gl.convert_layout(gl.max(sums, 1), row_layout)


@gluon.jit
def _products(p, n, zeros, GROUP: gl.constexpr):
    """(products of a group's rows and the columns of a tile, fill n + SPAN of the ring). Releases the columns."""
    PIECES: gl.constexpr = p.SHAPE.PIECES
    if p.SHAPE.RESIDENT:
        p.right.wait(n)
        rows, columns = stage_pieces(p.left, 0, GROUP * PIECES, PIECES), stage_pieces(p.right, n, 0, PIECES)
        products = warpgroup_mma_wait(0, deps=(start_pieces_product(rows, columns, zeros, WIDTH),))
        p.right.release(n)
        n += 1
    else:
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
    return products, n


@gluon.jit
def _compute(p, GROUP: gl.constexpr):
    """Runs a computing warp group."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.SHAPE.KEYS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros([GROUP_ROWS, p.SHAPE.KEYS], gl.float32, layout=layout)
    inside = p.tile * p.SHAPE.ROWS + GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=row_layout)
    exists = inside < p.count
    sees = gl.load(p.until + p.first_row + inside, mask=exists, other=0)
    if p.SHAPE.BOUNDED:
        sees = gl.where(p.first_row + inside < p.row_stop, gl.minimum(sees, p.stop), 0)
    end = gl.minimum(gl.max(sees, 0), p.end)
    sees = gl.where(exists, sees, 2147483647)  # rows past the end make no tile partial
    seen_by_all = gl.minimum(gl.min(sees, 0), end)
    if p.SHAPE.BOUNDED:
        seen_by_all = gl.where(p.start > p.begin, p.begin, seen_by_all)
    whole = p.begin + gl.maximum(seen_by_all - p.begin, 0) // p.SHAPE.KEYS * p.SHAPE.KEYS
    if p.SHAPE.RESIDENT:
        p.left.wait(0)
    nothing = gl.zeros([GROUP_ROWS], gl.float32, layout=row_layout)
    state = nothing, nothing
    n = 0
    # First the columns that all rows see, in whole tiles; then the columns that some rows see.
    for MASKED in gl.static_range(2):
        for first in range(whole if MASKED else p.begin, end if MASKED else whole, p.SHAPE.KEYS):
            products, n = _products(p, n, zeros, GROUP)
            state = _store_log_sums(p, products, state, first, inside, sees, MASKED)
    # Other groups may see more columns.
    for other in range(n, gl.cdiv(p.end - p.begin, p.SHAPE.KEYS) * p.SHAPE.SPAN):
        p.right.wait(other)
        p.right.release(other)


@gluon.jit(do_not_specialize=["batch_heads", "heads", "group", "first_row", "count", "blocks", "chunk"])
def hopper_log_sums_kernel(
    rows, cols, until, bounds, sums, batch_heads, heads, group, first_row, count, blocks, chunk, factor, SHAPE: gl.constexpr
):
    """A program has some rows of one head, and ``chunk`` columns: see ``log_sums_kernel``. rows, cols: descriptors of (batch,
    heads, rows, SPAN * DIM)."""
    # Under causal masks, the last rows see most columns, and begin first.
    tiles, program = gl.cdiv(count, SHAPE.ROWS), gl.program_id(0)
    if SHAPE.RESIDENT:
        tile, batch_head, part = tiles - 1 - program // batch_heads % tiles, program % batch_heads, program // batch_heads // tiles
    else:  # programs that run together share rows and columns in L2
        parts = gl.num_programs(0) // batch_heads // tiles
        tile, batch_head, part = tiles - 1 - program % tiles, program // tiles // parts, program // tiles % parts
    batch, head = batch_head // heads, batch_head % heads
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.arange(0, 256, layout=layout)
    inside = tile * SHAPE.ROWS + place
    exists = (place < SHAPE.ROWS) & (inside < count)
    begin = part * chunk
    end = gl.minimum(gl.max(gl.load(until + first_row + inside, mask=exists, other=0), 0), begin + chunk)
    start = first_row * 0
    stop, row_stop = start, start
    if SHAPE.BOUNDED:
        start = gl.load(bounds + 3 * batch)
        stop, row_stop = gl.load(bounds + 3 * batch + 1), gl.load(bounds + 3 * batch + 2)
        begin = gl.maximum(begin, start // SHAPE.KEYS * SHAPE.KEYS)
        end = gl.minimum(end, stop)
    if begin < end:
        STAGES: gl.constexpr = SHAPE.STAGES
        PIECES: gl.constexpr = SHAPE.PIECES
        right = new_ring(tiles_of(cols.dtype, STAGES * PIECES, SHAPE.KEYS, WIDTH), STAGES, PIECES, CONSUMERS=SHAPE.GROUPS)
        LEFT: gl.constexpr = 1 if SHAPE.RESIDENT else STAGES
        ROW_TILES: gl.constexpr = SHAPE.GROUPS * PIECES
        left = new_linked_ring(right, tiles_of(cols.dtype, LEFT * ROW_TILES, GROUP_ROWS, WIDTH), LEFT, ROW_TILES)
        # Makes the initialized barriers visible to TMA, which signals them.
        fence_async_shared()
        p = LogSumArguments(
            rows=rows,
            cols=cols,
            until=until,
            sums=sums,
            batch=batch,
            head=head,
            kv_head=head // group,
            batch_head=batch_head,
            first_row=first_row,
            count=count,
            tile=tile,
            blocks=blocks,
            factor=factor,
            start=start,
            stop=stop,
            row_stop=row_stop,
            begin=begin,
            end=end,
            left=left,
            right=right,
            SHAPE=SHAPE,
        )
        if SHAPE.GROUPS == 3:
            gl.warp_specialize(
                [(_compute, (p, 0)), (_compute, (p, 1)), (_compute, (p, 2)), (_load, (p,))], [4, 4, 1], [160, 160, 24]
            )
        else:
            gl.warp_specialize([(_compute, (p, 0)), (_compute, (p, 1)), (_load, (p,))], [4, 1], [240, 24])


def supports(rows: torch.Tensor, per_kv_block: int) -> bool:
    """Whether the kernel takes such rows."""
    return rows.dtype in (torch.float16, torch.bfloat16) and rows.shape[3] in (64, 128) and per_kv_block >= 4


def prepare(features) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns as the kernel takes them, (batch, heads, rows, span * dim)."""
    span = features.span
    rows, columns = (as_addressable(_in_spans(x, span) if span > 1 else x) for x in (features.rows, features.columns))
    return rows, columns


def launch_log_sums(recording: Recording, features, rows, columns, sums: torch.Tensor, first: int, count: int) -> None:
    """Does what ``log_sums.launch_log_sums`` does."""
    span, until, bounds, (batch, heads) = features.span, features.until, features.bounds, rows.shape[:2]
    dim, keys = rows.shape[3] // span, max(features.per_kv_block, 128 if span == 1 else 256)
    of_blocks = features.per_q_block, features.per_kv_block
    shape = LogSumShape(dim, span, *of_blocks, bounds is not None, keys, (4 if span == 1 else 2) * 128 // dim)
    arguments = [gluon_descriptor(x, [1, 1, size, WIDTH.value]) for x, size in ((rows, GROUP_ROWS.value), (columns, keys))]
    chunk = max(CHUNK // span, 2 * keys)
    arguments += [until, until if bounds is None else bounds, sums, batch * heads, heads, heads // columns.shape[1]]
    arguments += [first, count, sums.shape[3], chunk, features.factor * LOG2_E.value]
    grid = triton.cdiv(count, shape.ROWS) * batch * heads * triton.cdiv(columns.shape[2], chunk), 1
    recording.launch(hopper_log_sums_kernel, (grid, arguments, {"SHAPE": Constants(shape)}, {"num_warps": 4}))


def _in_spans(x: torch.Tensor, span: int) -> torch.Tensor:
    """(batch, heads, ceil(tokens / span), span * dim), zeros past the end; a copy unless tokens follow each other in memory."""
    rest = -x.shape[2] % span
    x = torch.nn.functional.pad(x, (0, 0, 0, rest)) if rest else x
    x = x if x.stride(2) == x.shape[3] else x.contiguous()
    return x.unflatten(2, (-1, span)).flatten(3)
