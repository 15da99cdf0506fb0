"""Moves rows of packed documents from one order to another, at the rate of a copy: a row of the target is one of the source, or a
constant."""

from math import gcd

import torch
import triton
import triton.language as tl

from ...kernels.launch.launch import launch

_BYTES = 8192  # of a tile: each of 128 threads has four loads of 16 bytes under way
_MOST_BYTES_OF_A_ROW, _MOST_ROWS = 1024, 1024  # of a tile
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element

INTEGERS = ["rows", "heads", "pieces", "source_head", "source_row", "source_column", "target_head", "target_row"]


@triton.jit(do_not_specialize=INTEGERS)
def take_rows_kernel(
    source,
    target,
    index,
    rows,
    heads,
    pieces,
    source_head: tl.int64,
    source_row: tl.int64,
    source_column: tl.int64,
    target_head: tl.int64,
    target_row: tl.int64,
    FILL: tl.constexpr,
    STRIDED: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program writes a tile of ROWS x COLUMNS elements of a head; the programs for all of the same rows are adjacent.

    pieces: of a row, PIECE elements each; all strides but source_column, which a STRIDED source has, are in such pieces.
    """
    column_tiles = tl.cdiv(pieces * PIECE, COLUMNS)
    tile = tl.program_id(0)
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    head = (tile // column_tiles % heads).to(tl.int64)
    row = tile // column_tiles // heads * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    taken = tl.load(index + row, mask=exists, other=-1)
    some = (taken >= 0)[:, None] & (column < pieces * PIECE)
    place = source + head * source_head * PIECE + taken.to(tl.int64)[:, None] * (source_row * PIECE)
    place += column.to(tl.int64) * source_column if STRIDED else column
    values = tl.load(place, mask=some, other=FILL)
    place = target + head * target_head * PIECE + row.to(tl.int64)[:, None] * (target_row * PIECE)
    tl.store(place + column, values, mask=exists[:, None] & (column < pieces * PIECE))


def take_rows_into(source: torch.Tensor, index: torch.Tensor, fill: float, target: torch.Tensor) -> None:
    """Writes to row r of the target row index[r] of the source, or ``fill`` where the index is -1.

    source: (n, heads, width), with elements of 1 to 8 bytes. target: (rows, heads, width), whose last dimension is contiguous.
    index: (rows,) int32.
    """
    if not target.numel():
        return
    if fill == 0:
        source, target = (tensor.view(_WORDS[tensor.element_size()]) for tensor in (source, target))
    rows, heads, width = target.shape
    size = source.element_size()
    if all(tensor.stride(1) == width and tensor.stride(2) == 1 for tensor in (source, target)):  # rows of all heads
        heads, width = 1, heads * width
    strided = width > 1 and source.stride(2) != 1
    strides = source.stride(1), source.stride(0), target.stride(1), target.stride(0)
    piece = 1 if strided else gcd(16 // size, width, *strides)
    source_head, source_row, target_head, target_row = (stride // piece for stride in strides)
    arguments = [source, target, index, rows, heads, width // piece]
    arguments += [source_head, source_row, source.stride(2), target_head, target_row]
    tile_columns = min(triton.next_power_of_2(width), _MOST_BYTES_OF_A_ROW // size)
    tile_rows = min(_MOST_ROWS, _BYTES // (tile_columns * size))
    constants = {"FILL": fill, "STRIDED": strided, "PIECE": piece, "ROWS": tile_rows, "COLUMNS": tile_columns}
    launch(
        take_rows_kernel,
        (triton.cdiv(rows, tile_rows) * heads * triton.cdiv(width, tile_columns), 1),
        arguments,
        constants,
        {"num_warps": 4},
    )
