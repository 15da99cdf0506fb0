"""Moves rows of tensors from one order to another, at the rate of a copy: packed documents, and tokens in tiles.

A row of the target is one of the source, a constant, or the sum of rows of the source that lie at equal distances.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from ..launch.launch import launch

_BYTES = 8192  # of a tile: each of 128 threads has four loads of 16 bytes under way
_MOST_BYTES_OF_A_ROW, _MOST_ROWS = 1024, 1024  # of a tile
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

INTEGERS = ["rows", "outers", "inners", "pieces", "source_outer", "source_inner", "source_row", "source_column", "target_outer"]
INTEGERS += ["target_inner", "target_row"]


@triton.jit(do_not_specialize=INTEGERS)
def take_rows_kernel(
    source,
    target,
    index,
    copies,
    rows,
    outers,
    inners,
    pieces,
    source_outer: tl.int64,
    source_inner: tl.int64,
    source_row: tl.int64,
    source_column: tl.int64,
    target_outer: tl.int64,
    target_inner: tl.int64,
    target_row: tl.int64,
    FILL: tl.constexpr,
    SUMS: tl.constexpr,
    STRIDED: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program writes a tile of ROWS x COLUMNS elements; the programs for all of the same rows are adjacent.

    outers, inners: lengths of two other axes. pieces: of a row, PIECE elements each; all strides but source_column, which a
    STRIDED source has, are in such pieces. copies: see ``take_rows_into``; read if SUMS.
    """
    column_tiles = tl.cdiv(pieces * PIECE, COLUMNS)
    tile = tl.program_id(0)
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile //= column_tiles
    inner, outer = (tile % inners).to(tl.int64), (tile // inners % outers).to(tl.int64)
    row = tile // inners // outers * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    taken = tl.load(index + row, mask=exists, other=-1)
    some = (taken >= 0)[:, None] & (column < pieces * PIECE)
    source_row *= PIECE
    place = source + (outer * source_outer + inner * source_inner) * PIECE + taken.to(tl.int64)[:, None] * source_row
    place += column.to(tl.int64) * source_column if STRIDED else column
    values = tl.load(place, mask=some, other=FILL)
    if SUMS:
        wide: tl.constexpr = tl.float64 if target.dtype.element_ty == tl.float64 else tl.float32
        total = values.to(wide)
        count = tl.load(copies + row, mask=exists, other=0)
        step = tl.load(copies + rows + row, mask=exists, other=0).to(tl.int64)[:, None] * source_row
        for number in range(1, tl.max(count, 0)):
            place += step
            total += tl.load(place, mask=some & (number < count)[:, None], other=0).to(wide)
        values = total.to(target.dtype.element_ty)
    place = target + (outer * target_outer + inner * target_inner) * PIECE + row.to(tl.int64)[:, None] * (target_row * PIECE)
    tl.store(place + column, values, mask=exists[:, None] & (column < pieces * PIECE))


def take_rows_into(
    source: torch.Tensor,
    index: torch.Tensor,
    fill: float,
    target: torch.Tensor,
    dim: int = 0,
    copies: torch.Tensor | None = None,
) -> None:
    """Writes to row r of the target, along ``dim``, row index[r] of the source, or ``fill`` where the index is -1.

    source, target: of the same shape except in ``dim``, with elements of 1 to 8 bytes, real. The target's last dimension is
    contiguous. index: (rows,) int32. copies: (2, rows) int32, counts and distances: row r becomes the sum of count source rows,
    the one at index[r] and those at each distance after it, in float32 or wider; for dtypes in ``SUMMED``. The sum's order is
    fixed.
    """
    if not target.numel():
        return None
    before, after = (_merge_axes(source, target, axes) for axes in (range(dim), range(dim + 1, source.dim())))
    columns = after.pop() if after and after[-1][2] == 1 else (1, 1, 1)
    others = [(1, 0, 0), (1, 0, 0), *before, *after]
    if len(others) > 4:  # a contiguous source has one axis before, and columns
        return take_rows_into(source.contiguous(), index, fill, target, dim, copies)
    if copies is None and fill == 0:
        source, target = (tensor.view(_WORDS[tensor.element_size()]) for tensor in (source, target))
    (outers, *outer), (inners, *inner) = others[-2:]
    width, source_column, _ = columns
    strides = outer[0], inner[0], source.stride(dim), outer[1], inner[1], target.stride(dim)
    size, strided = source.element_size(), source_column != 1
    piece = 1 if strided else gcd(16 // size, width, *strides)
    *of_source, of_target_outer, of_target_inner, of_target_row = (stride // piece for stride in strides)
    rows = target.shape[dim]
    arguments = [source, target, index, index if copies is None else copies, rows, outers, inners, width // piece]
    arguments += [*of_source, source_column, of_target_outer, of_target_inner, of_target_row]
    tile_columns = min(triton.next_power_of_2(width), _MOST_BYTES_OF_A_ROW // size)
    tile_rows = min(_MOST_ROWS, _BYTES // (tile_columns * size))
    constants = {"FILL": fill, "SUMS": copies is not None, "STRIDED": strided, "PIECE": piece}
    constants |= {"ROWS": tile_rows, "COLUMNS": tile_columns}
    grid = triton.cdiv(rows, tile_rows) * outers * inners * triton.cdiv(width, tile_columns), 1
    launch(take_rows_kernel, grid, arguments, constants, {"num_warps": 4})
    return None


def _merge_axes(source: torch.Tensor, target: torch.Tensor, axes: range) -> list[tuple[int, int, int]]:
    """(length, stride of the source, of the target) of these axes. Those of one element are left out, and neighbours that one
    stride covers in both tensors are merged."""
    merged: list[tuple[int, int, int]] = []
    for axis in axes:
        length, strides = source.shape[axis], (source.stride(axis), target.stride(axis))
        if merged and merged[-1][1:] == tuple(length * stride for stride in strides):
            length *= merged.pop()[0]
        if length != 1:
            merged.append((length, *strides))
    return merged
