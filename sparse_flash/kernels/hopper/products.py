"""Products over head dimensions that are no power of two.

A tile in shared memory has 64, 128 or 256 columns. Its last columns may be zeros. If 80, 96 or 192 columns are in use, each product
is two products: over 64 columns and 16 or 32 more, or over 128 and 64 more. In registers, sums over such columns are a tuple of one
tensor, or of these two. If the zeros would cost another stage its shared memory, 192 columns are three tiles of 64 instead:
``stage_pieces``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .masks import where_rows


@gluon.jit
def start_transposed_product(left, right, zeros, USED: gl.constexpr):
    """Starts left times right transposed, summed over the columns in use. left, right: in shared memory."""
    if left.shape[1] == USED:
        started = warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        FIRST: gl.constexpr = left.shape[1] // 2
        REST: gl.constexpr = USED - FIRST
        first, with_first = left.slice(0, FIRST, dim=1), right.slice(0, FIRST, dim=1)
        started = warpgroup_mma(first, with_first.permute((1, 0)), zeros, use_acc=False, is_async=True)
        rest, with_rest = left.slice(FIRST, REST, dim=1), right.slice(FIRST, REST, dim=1)
        started = warpgroup_mma(rest, with_rest.permute((1, 0)), started, is_async=True)
    return started


@gluon.jit
def stage_pieces(ring, n, first, COUNT: gl.constexpr):
    """Returns COUNT pieces of a ring's stage, from ``first`` on: the columns of a tile, in order."""
    pieces = ()
    for number in gl.static_range(COUNT):
        pieces += (ring.stage(n, first + number),)
    return pieces


@gluon.jit
def start_pieces_product(left, right, zeros, USED: gl.constexpr):
    """Starts ``start_transposed_product`` of tiles from ``stage_pieces``."""
    if len(left) == 1:
        started = start_transposed_product(left[0], right[0], zeros, USED)
    else:
        started = warpgroup_mma(left[0], right[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
        for number in gl.static_range(1, len(left)):
            started = warpgroup_mma(left[number], right[number].permute((1, 0)), started, is_async=True)
    return started


@gluon.jit
def new_sums(ROWS: gl.constexpr, DIM: gl.constexpr, USED: gl.constexpr, DEPTH: gl.constexpr = 16):
    """Returns zeros, (ROWS, columns in use), fp32, as a tuple of one or two tensors, to which ``start_product`` adds. Each warp
    holds 16 rows. If there are more warps than that, several share the columns of the same rows. DEPTH: of one instruction's
    product, 256 bits of an operand."""
    WARPS: gl.constexpr = gl.num_warps()
    DOWN: gl.constexpr = ROWS // 16 if ROWS // 16 < WARPS else WARPS
    ACROSS: gl.constexpr = WARPS // DOWN
    if USED == DIM:
        whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, ACROSS], [16, DIM // ACROSS, DEPTH])
        sums = (gl.zeros([ROWS, DIM], gl.float32, layout=whole),)
    else:
        FIRST: gl.constexpr = DIM // 2
        REST: gl.constexpr = USED - FIRST
        first: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, ACROSS], [16, FIRST // ACROSS, DEPTH])
        rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, ACROSS], [16, REST // ACROSS, DEPTH])
        sums = (gl.zeros([ROWS, FIRST], gl.float32, layout=first), gl.zeros([ROWS, REST], gl.float32, layout=rest))
    return sums


@gluon.jit
def start_product(left, right, sums):
    """Starts the addition of left times right to sums. left: in registers, as an operand of sums[0]. right: in shared memory, with
    the columns of sums."""
    if len(sums) == 1:
        started = (warpgroup_mma(left, right, sums[0], is_async=True),)
    else:
        FIRST: gl.constexpr = sums[0].shape[1]
        REST: gl.constexpr = sums[1].shape[1]
        other = gl.convert_layout(left, gl.DotOperandLayout(0, sums[1].type.layout, 2))
        started = (
            warpgroup_mma(left, right.slice(0, FIRST, dim=1), sums[0], is_async=True),
            warpgroup_mma(other, right.slice(FIRST, REST, dim=1), sums[1], is_async=True),
        )
    return started


@gluon.jit
def wait_for_sums(started, PENDING: gl.constexpr):
    """Waits until all but the last PENDING products are done, then returns the sums of ``start_product``."""
    if len(started) == 1:
        sums = (warpgroup_mma_wait(PENDING, deps=started),)
    else:
        sums = warpgroup_mma_wait(PENDING, deps=started)
    return sums


@gluon.jit
def scale_rows(sums, factors):
    """Returns sums times factors, (rows,)."""
    result = ()
    for part in gl.static_range(len(sums)):
        result += (sums[part] * gl.convert_layout(factors, gl.SliceLayout(1, sums[part].type.layout))[:, None],)
    return result


@gluon.jit
def keep_rows(sums, words):
    """Returns sums, with 0 in rows whose words are 0: see ``where_rows``."""
    result = ()
    for part in gl.static_range(len(sums)):
        result += (where_rows(sums[part], gl.convert_layout(words, gl.SliceLayout(1, sums[part].type.layout))),)
    return result


@gluon.jit
def wait_for_both(started, others, PENDING: gl.constexpr):
    """Returns ``wait_for_sums`` of two results of ``start_product``, or of one and (a single product,)."""
    COUNT: gl.constexpr = len(started)
    sums = warpgroup_mma_wait(PENDING, deps=started + others)
    return sums[:COUNT], sums[COUNT:]


@gluon.jit
def scale_sums(sums, factor):
    """Returns sums times one factor."""
    result = ()
    for part in gl.static_range(len(sums)):
        result += (sums[part] * factor,)
    return result


@gluon.jit
def store_columns(tile, sums):
    """Stores sums in a tile in shared memory, in its dtype. Columns that are not in use do not change."""
    if len(sums) == 1:
        tile.store(sums[0].to(tile.dtype))
    else:
        FIRST: gl.constexpr = sums[0].shape[1]
        tile.slice(0, FIRST, dim=1).store(sums[0].to(tile.dtype))
        tile.slice(FIRST, sums[1].shape[1], dim=1).store(sums[1].to(tile.dtype))


@gluon.jit
def write_columns(pointer, STRIDE: gl.constexpr, sums, exists):
    """Stores sums in global memory, from ``pointer`` on, in rows of STRIDE elements, if the tile exists."""
    for part in gl.static_range(len(sums)):
        _write(pointer + part * sums[0].shape[1], STRIDE, sums[part], exists)


@gluon.jit
def _write(pointer, STRIDE: gl.constexpr, numbers, exists):
    layout: gl.constexpr = numbers.type.layout
    down = gl.arange(0, numbers.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    across = gl.arange(0, numbers.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(pointer + (down * STRIDE + across), numbers, mask=exists & (down + across >= 0))


@gluon.jit
def write_rows(tensor, base, batch, head, first, stop, sums):
    """Stores sums in rows first .. stop - 1 of a (batch, heads, tokens, head_dim) tensor; further sums are dropped. tensor: its
    descriptor. base: its address. The address and the strides are multiples of 16 bytes."""
    pointer, stride = _pointer_to_rows(tensor, base, batch, head, first)
    rows, columns = stop - first, tensor.shape[3] // 8 * 8
    for part in gl.static_range(len(sums)):
        _write_part(pointer, stride, rows, columns, sums[part], part * sums[0].shape[1])


@gluon.jit
def copy_rows(tensor, base, batch, head, first, stop, tile):
    """Copies a tile in shared memory as ``write_rows`` stores sums. All threads of the calling role must have written the tile."""
    WIDTH: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    pointer, stride = _pointer_to_rows(tensor, base, batch, head, first)
    _store_existing(pointer, stride, stop - first, tensor.shape[3] // 8 * 8, tile.load(layout), 0, layout)


@gluon.jit
def _pointer_to_rows(tensor, base, batch, head, first):
    """Returns (the address of row ``first`` of a head, the stride of rows)."""
    batch_stride, head_stride, stride = _in_units(tensor.strides[0]), _in_units(tensor.strides[1]), _in_units(tensor.strides[2])
    return base + (batch * batch_stride + head * head_stride + first * stride), stride


@gluon.jit
def _in_units(stride):
    """Returns the stride, in a form that shows the compiler that it is a multiple of 16 bytes."""
    return stride.to(gl.int64) // 8 * 8


@gluon.jit
def _write_part(pointer, stride, rows, columns, numbers, FIRST: gl.constexpr):
    # Threads that share a row exchange pairs of numbers, so that each stores 16 bytes.
    WIDTH: gl.constexpr = numbers.shape[1]
    REGISTERS: gl.constexpr = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]]
    LANES: gl.constexpr = [[0, 8], [8, 0] if WIDTH == 16 else [0, 16], [1, 0], [2, 0], [4, 0]]
    WARPS: gl.constexpr = [[16, 0], [32, 0]]
    COUNT: gl.constexpr = 3 if WIDTH == 16 else 4 + WIDTH // 64
    layout: gl.constexpr = gl.DistributedLinearLayout(REGISTERS[:COUNT], LANES, WARPS, [], [numbers.shape[0], WIDTH])
    _store_existing(pointer, stride, rows, columns, numbers, FIRST, layout)


@gluon.jit
def _store_existing(pointer, stride, rows, columns, numbers, FIRST: gl.constexpr, layout: gl.constexpr):
    """Stores the rows and columns that exist, in a layout with 16 bytes a thread. FIRST: the column of the first number."""
    down = gl.arange(0, numbers.shape[0], layout=gl.SliceLayout(1, layout))
    across = FIRST + gl.arange(0, numbers.shape[1], layout=gl.SliceLayout(0, layout))
    exist = (down < rows)[:, None] & (across < columns)[None, :]
    kept = gl.convert_layout(numbers.to(pointer.dtype.element_ty), layout)
    gl.store(pointer + (down.to(gl.int64) * stride)[:, None] + across[None, :], kept, mask=exist)
