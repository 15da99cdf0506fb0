"""Operations on block rows of tensors, in one pass each: merging results of the same queries over different keys, adding gradients,
copying rows."""

from itertools import chain

import torch
import triton
import triton.language as tl

from ..launch.launch import integers_key, launch

_BYTES = 8192  # of a tile: each of 128 threads has four loads of 16 bytes in flight for each tensor that it reads
_MOST_TOKENS = 1024


@triton.jit
def _tile_tokens(batch_heads, heads, TILE: tl.constexpr):
    """(batch, head, tokens) of a program's tile. The programs of all heads for the same tokens are adjacent."""
    batch_head = tl.program_id(0) % batch_heads
    token = (tl.program_id(0) // batch_heads).to(tl.int64) * TILE + tl.arange(0, TILE)
    return (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64), token


@triton.jit
def _pointers(tensor, strides, batch, head, token):
    """Pointers to tokens of a head. strides: of the tensor's axes, in order."""
    return tensor + batch * strides[0] + head * strides[1] + token * strides[2]


@triton.jit(do_not_specialize=["tokens", "batch_heads", "heads"])
def merge_kernel(
    out, part_out, lse, part_lse, tokens, batch_heads, heads, dim, out_strides, part_out_strides, lse_strides, part_lse_strides,
    TILE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Merges part_out and part_lse into out and lse. Unlike ``softmax.merge``, for results divided by their sums, with natural
    logs, also in float64."""
    batch, head, token = _tile_tokens(batch_heads, heads, TILE)
    theirs = tl.load(_pointers(part_lse, part_lse_strides, batch, head, token), mask=token < tokens, other=-float("inf"))
    # Queries that keep nothing in the part stay as they are, and their elements are not read.
    merges = theirs > -float("inf")
    merges |= theirs != theirs  # NaN stays visible
    lse_place = _pointers(lse, lse_strides, batch, head, token)
    mine = tl.load(lse_place, mask=merges, other=0)
    largest = tl.maximum(mine, theirs)
    weight, their_weight = tl.exp(mine - largest), tl.exp(theirs - largest)
    total = weight + their_weight
    # Several warps read the same lse, for different columns of a row; all must have read it before one writes it.
    tl.debug_barrier()
    tl.store(lse_place, largest + tl.log(total), mask=merges)
    column = tl.arange(0, DIM).to(tl.int64)[None, :]
    moved = merges[:, None] & (column < dim)
    out_place = _pointers(out, out_strides, batch, head, token[:, None]) + column * out_strides[3]
    part_place = _pointers(part_out, part_out_strides, batch, head, token[:, None])
    values = tl.load(out_place, mask=moved, other=0).to(total.dtype) * (weight / total)[:, None]
    part_values = tl.load(part_place + column * part_out_strides[3], mask=moved, other=0).to(total.dtype)
    values += part_values * (their_weight / total)[:, None]
    tl.store(out_place, values.to(out.dtype.element_ty), mask=moved)


@triton.jit(do_not_specialize=["tokens", "batch_heads", "heads"])
def move_kernel(
    whole, part, rows, first, addends, tokens, batch_heads, heads, dim, whole_strides, part_strides,
    LISTED: tl.constexpr, TAKES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Adds blocks of part to the listed rows of whole, or with TAKES copies these rows to part."""
    batch, head, listed = _tile_tokens(batch_heads, heads, TILE)
    exists, of_whole = listed < tokens, listed
    if LISTED:
        of_whole = tl.load(rows + listed // BLOCK, mask=exists, other=0) * BLOCK + listed % BLOCK
    column = tl.arange(0, DIM).to(tl.int64)[None, :]
    moved = exists[:, None] & (column < dim)
    place = _pointers(whole, whole_strides, batch, head, of_whole[:, None]) + column * whole_strides[3]
    parts = part + batch * part_strides[0] + head * part_strides[1] + column * part_strides[3]
    if TAKES:
        tl.store(parts + listed[:, None] * part_strides[2], tl.load(place, mask=moved), mask=moved)
    else:
        wide: tl.constexpr = tl.float64 if whole.dtype.element_ty == tl.float64 else tl.float32
        total = tl.load(place, mask=moved, other=0).to(wide)
        row = tl.program_id(0) // batch_heads * TILE // BLOCK
        for number in range(tl.load(first + row), tl.load(first + row + 1)):
            of_part = tl.load(addends + number) * BLOCK + listed % BLOCK
            total += tl.load(parts + of_part[:, None] * part_strides[2], mask=moved, other=0).to(wide)
        tl.store(place, total.to(whole.dtype.element_ty), mask=moved)


def merge_results(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merges results of the same queries over other keys into out and lse, in place. A query whose part_lse is -inf keeps its
    bits."""
    _launch(merge_kernel, [out, part_out, lse, part_lse], out.shape[2], _MOST_TOKENS, [])


def add_rows(
    whole: torch.Tensor, part: torch.Tensor, rows: torch.Tensor, block_size: int, addends: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Adds blocks of part to some block rows of whole, in place, and rounds once.

    whole, part: (batch, heads, tokens, head_dim), in blocks of block_size tokens. rows: (blocks,) int64, distinct. addends: (first,
    blocks), int64: row i gets part's blocks with the numbers blocks[first[i]] to blocks[first[i + 1] - 1], in this order.
    """
    switches = {"LISTED": True, "TAKES": False, "BLOCK": block_size}
    _launch(move_kernel, [whole, part], len(rows) * block_size, block_size, [rows, *addends], **switches)


def copy_rows(whole: torch.Tensor, part: torch.Tensor, rows: torch.Tensor | None, block_size: int) -> None:
    """Copies some block rows of whole to part. Shapes as for ``add_rows``. rows: may repeat; None: all."""
    switches = {"LISTED": rows is not None, "TAKES": True, "BLOCK": block_size}
    _launch(move_kernel, [whole, part], part.shape[2], _MOST_TOKENS, [whole if rows is None else rows, whole, whole], **switches)


def _launch(kernel, tensors: list[torch.Tensor], tokens: int, most: int, more: list[torch.Tensor], **switches: int) -> None:
    """most: tokens of a tile, at most. more: the kernel's arguments after the tensors. switches: compile-time ones, in order."""
    if not tokens:
        return
    batch, heads, _, dim = tensors[1].shape
    padded = triton.next_power_of_2(dim)
    tile = min(most, max(1, _BYTES // (padded * tensors[0].element_size())))
    strides = [tensor.stride() for tensor in tensors]
    arguments = [*tensors, *more, tokens, batch * heads, heads, dim, *strides]
    constants = {**switches, "TILE": tile, "DIM": padded}
    grid = triton.cdiv(tokens, tile) * batch * heads, 1
    launch(kernel, grid, arguments, constants, {"num_warps": 4}, integers_key([dim, *chain(*strides)]))
