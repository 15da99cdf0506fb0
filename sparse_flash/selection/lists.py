"""Tables of a selection: what each tile of queries walks itself, and for each key block the other queries that picked it.

They are made on the device, by operations whose shapes depend only on those of the picks: no host synchronization, safe in CUDA
graphs. Kernels compute a call in turns, so parts of results take bounded memory; lists are ordered by turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..masks.block_mask import BlockMask

if TYPE_CHECKING:
    from ..kernels.selection.tiles import SelectionSizes, Turn

# Below this block size, a part for each query and pick takes longer than walking the union of a tile's picks.
SMALL_BLOCK = 64
# A tile walks a block that this share of its choices picked. On an H200 (bf16, 65,536 tokens, prototypes of 2026-11-20), three
# quarters were within 4 % of the best of a quarter, a half and three quarters, or the best, for groups of 4 and 16, and picks that
# change from query to query with a chance of 0.05, 0.2 and 1.
WALKED_SHARE = 3, 4
# Rows of a piece of a list in the forward pass: enough to hide the load of the key block. 512 to 2,048 were level.
_FORWARD_ROWS = 1024
# A piece of the backward pass has this many times the mean list of a key block, so few blocks are divided.
_BACKWARD_MEANS = 2
_ALWAYS_ROWS = 8192


class Turns(NamedTuple):
    """lines: lines (batch * kv_heads + key head) of a turn. choices: of each line. all: the turns (``Turn``)."""

    lines: int
    choices: int
    all: tuple[Turn, ...]


class TileWalks(NamedTuple):
    """The blocks that tiles of queries walk: for each cluster of choices whose queries fill a tile.

    walked: (batch, pickers, choices, slots) int8, 1 for picks that are walked; arbitrary for picks that keep nothing.
    counts: (batch, pickers, clusters, 2) int32: how many blocks keep every pair, and how many there are.
    blocks: (batch, pickers, clusters, width) int32: those that keep every pair, ascending, then those that the causal limit cuts.
    bits: like blocks, int32, or int64 for more than 32 choices: bit c is set if choice c of the cluster picked the block.
    """

    walked: torch.Tensor
    counts: torch.Tensor
    blocks: torch.Tensor
    bits: torch.Tensor


class Pieces(NamedTuple):
    """Lists in even pieces; heavy ones are divided.

    items: (turns, pieces, 5) int32, heaviest first: the column, the first entry, the first one whose keys all precede it, the end,
    and the number of the piece, column by column. Pieces past the last are empty.
    starts: (turns, columns + 1) int32: the number of each column's first piece, and the end of the last.
    """

    items: torch.Tensor
    starts: torch.Tensor


class ColumnLists(NamedTuple):
    """For each key block of a turn's lines (column: line of the turn * key blocks + block) the queries that picked it.

    entries: (picks,) int32: choice * slots + number among the listed picks of the choice, with choices numbered within the turn.
    items, starts: see ``Pieces``. counts: (batch, pickers, choices) int32, how many picks of a choice are listed.
    """

    entries: torch.Tensor
    items: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


def walks_alone(sizes: SelectionSizes) -> bool:
    """Whether tiles walk all picks, and none is listed: their rows share a choice, or blocks are small."""
    return sizes.tiled.choices == 1 or sizes.block < SMALL_BLOCK


def least_walked(sizes: SelectionSizes) -> int:
    """How many of a tile's choices must pick a block for the tile to walk it."""
    of, share = sizes.tiled.choices, WALKED_SHARE
    return 1 if walks_alone(sizes) else max(2, -(-of * share[0] // share[1]))


def turns_of(sizes: SelectionSizes, bytes_of_entry: int, bytes_of_line: int, workspace: int) -> Turns:
    """As few turns as fit, and as grids allow, whose second axis has the lines and pickers of a turn. sizes: ``SelectionSizes``.
    bytes_of_entry: of a pick's parts. bytes_of_line: of what does not depend on the choices of a turn. workspace: bytes; at least
    one tile of one line is computed at a time, whatever it takes."""
    from ..kernels.common.grid import SECOND_AXIS
    from ..kernels.selection.tiles import Turn

    of_choice = sizes.pickers * sizes.slots * bytes_of_entry
    lines, choices = workspace // max(1, of_choice * sizes.choices + bytes_of_line), sizes.choices
    if lines == 0 and of_choice > 0:
        # What a whole line takes gets at most half: it would leave nothing for parts of long lines.
        unit = sizes.tiled.choices
        fitting = max(unit, (workspace - min(bytes_of_line, workspace // 2)) // of_choice)
        ranges = -(-choices // fitting)
        choices = -(-choices // (ranges * unit)) * unit
    # As many lines in each turn.
    lines = -(-sizes.lines // -(-sizes.lines // min(sizes.lines, SECOND_AXIS // sizes.pickers, max(1, lines))))
    places = [(line, choice) for line in range(0, sizes.lines, lines) for choice in range(0, sizes.choices, choices)]
    found = (
        Turn(number, line, min(lines, sizes.lines - line), choice, min(choices, sizes.choices - choice), choices)
        for number, (line, choice) in enumerate(places)
    )
    return Turns(lines, choices, tuple(found))


def tile_walks(picks: torch.Tensor, sizes: SelectionSizes, least: int) -> TileWalks:
    """picks: (batch, pickers, choices, slots) int32, contiguous. least: see ``least_walked``."""
    from ..kernels.selection.lists import selection_walks

    return TileWalks(*selection_walks(picks, sizes, least))


def column_lists(picks: torch.Tensor, walks: TileWalks | None, sizes: SelectionSizes, turns: Turns, most: int) -> ColumnLists:
    """The lists of all picks, or of those that ``walks`` leaves. most: entries of a piece."""
    from ..kernels.selection.lists import selection_keys

    columns = turns.lines * sizes.key_blocks
    keys = len(turns.all) * columns * 2
    key, entries, counts = selection_keys(
        picks, None if walks is None else walks.walked, sizes, (turns.lines, turns.choices), keys
    )  # fmt: skip
    key, order = key.view(-1).sort(stable=True)
    first = -(1 << 15) if key.dtype == torch.int16 else 0
    bounds = torch.searchsorted(key, torch.arange(first, first + keys + 1, dtype=key.dtype, device=key.device), out_int32=True)
    begin, whole, end = (part.view(len(turns.all), columns) for part in (bounds[:-1:2], bounds[1::2], bounds[2::2]))
    room = turns.lines * sizes.pickers * turns.choices * sizes.slots
    pieces = in_pieces(begin, whole, end, columns + room // most, most, sizes.tiled.choices)
    return ColumnLists(entries.view(-1)[order], *pieces, counts)


def always_pieces(always: BlockMask, rows_of_query: int) -> Pieces:
    """The columns of what is always kept. rows_of_query: query heads of a key head."""
    bounds, entries = always.by_key.row_ptr, always.by_key.col_idx.shape[0]
    most = max(1, _ALWAYS_ROWS // (always.block_size * rows_of_query))
    return in_pieces(bounds[:, :-1], bounds[:, :-1], bounds[:, 1:], bounds.shape[1] - 1 + entries // most, most, 1)


def in_pieces(begin: torch.Tensor, whole: torch.Tensor, end: torch.Tensor, count: int, most: int, unit: int) -> Pieces:
    """Lists begin .. end - 1, each (turns, columns) int32, in pieces of at most ``most`` entries (a multiple of ``unit``) that are
    multiples of ``unit`` except the last of a list. count: at least as many as there can be."""
    length = end - begin
    pieces = (length + most - 1) // most
    ends = pieces.cumsum(1, dtype=torch.int32)
    number = torch.arange(count, dtype=torch.int32, device=begin.device).expand(begin.shape[0], count)
    column = torch.searchsorted(ends, number.contiguous(), right=True).clamp(max=begin.shape[1] - 1)
    divided, nth = pieces.gather(1, column), number - (ends - pieces).gather(1, column)
    size = (length.gather(1, column) + divided - 1) // divided.clamp(min=1)
    size = (size + unit - 1) // unit * unit
    stop = end.gather(1, column)
    first = torch.minimum(begin.gather(1, column) + nth * size, stop)
    last = torch.where(nth < divided, torch.minimum(first + size, stop), first)
    middle = torch.minimum(torch.maximum(whole.gather(1, column), first), last)
    items = torch.stack([column.to(torch.int32), first, middle, last, number], 2)
    order = (last - first).argsort(dim=1, descending=True, stable=True)
    return Pieces(items.gather(1, order[..., None].expand(items.shape)), torch.nn.functional.pad(ends, (1, 0)))


def forward_most(sizes: SelectionSizes) -> int:
    """Entries of a piece in the forward pass."""
    return max(1, _FORWARD_ROWS // sizes.rows_of_choice // sizes.tiled.choices) * sizes.tiled.choices


def backward_most(sizes: SelectionSizes, turns: Turns) -> int:
    """Entries of a piece in the backward pass."""
    mean = sizes.pickers * turns.choices * sizes.slots // sizes.key_blocks
    unit = sizes.tiled.choices
    return max(1, _BACKWARD_MEANS * mean // unit) * unit + unit
