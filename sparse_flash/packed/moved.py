"""Packed documents on an axis of whole blocks, and the BlockMask of that axis. For patterns that ``in_place.py`` does not support.

Each document starts in a new block, and keeps the entries of the first rows and columns of one long document's table. Its last
block of keys has a new tile if it ends inside. If queries and keys differ in number, the queries start as far into their first
block as their first position lies within one. PyTorch operations of fixed shapes: on a GPU nothing synchronizes with the host.
"""

from typing import NamedTuple

import torch

from ..compat.constants import constant_in_graphs
from ..masks.block_mask import BlockMask
from ..masks.cache import fake_tensors_if_needed
from ..masks.select_blocks import RowArrays, build_work
from .documents import BLOCK, Axis, PackedDocuments, lay_out_blocks, most_blocks, read_sizes
from .long_document import long_document


class MovedDocuments(NamedTuple):
    """mask: of all documents. queries, keys: their axes."""

    mask: BlockMask
    queries: Axis
    keys: Axis


def move_documents(pattern, queries: PackedDocuments, keys: PackedDocuments | None) -> MovedDocuments:
    """The document axes, and the mask under which each document attends only to itself, by the pattern. keys: None if shared."""
    q_side, k_side = read_sizes(queries, keys)
    documents = _round_up_documents(q_side.cu_seqlens.shape[0] - 1)
    sizes, entries = _make_plan(pattern, *q_side[1:], *k_side[1:], keys is None, documents, q_side.cu_seqlens.device)
    return _assemble(q_side, k_side, fake_tensors_if_needed(entries), sizes)


@constant_in_graphs
def _make_plan(
    pattern, q_tokens, q_longest, k_tokens, k_longest, shares_documents, documents, device
) -> tuple[list[int], list[torch.Tensor]]:
    """(the sizes for ``_assemble``, the entries of the long document)."""
    document = long_document(pattern, q_longest, k_longest, shares_documents, device)
    # One block more, whose last row is that of tokens of no document.
    q_blocks = most_blocks(q_tokens, documents, 0 if shares_documents else BLOCK - 1) + 1
    k_blocks = most_blocks(k_tokens, documents) + 1
    capacity = document.most_entries(q_blocks, k_blocks, -(-k_longest // BLOCK))
    return [q_blocks, k_blocks, document.before, document.k_blocks, capacity, *map(len, document.mask.tiles)], document.entries


def _round_up_documents(documents: int) -> int:
    """How many documents a plan is made for: in compiled code the next power of two, so that few numbers are compiled for."""
    if not torch.compiler.is_compiling():
        return documents
    most = 1
    while most < documents:
        most *= 2
    return most


def _assemble(queries: PackedDocuments, keys: PackedDocuments, entries: list[torch.Tensor], sizes: list[int]) -> MovedDocuments:
    """sizes: blocks of both axes; the blocks before the long document's first key, and its columns; how many entries there is
    room for; the long document's run and bit tiles."""
    q_blocks, k_blocks, before, columns, capacity, run_tiles, bit_tiles = sizes
    known, known_tiles, tile_runs, tile_bits = entries
    q_len, k_len = queries.extents()[1], keys.extents()[1]
    q_axis, q_first, q_count = lay_out_blocks(queries, q_blocks, skipped=(k_len - q_len) % BLOCK)
    k_axis, k_first, k_count = lay_out_blocks(keys, k_blocks)

    # Which entries of the long document each row keeps. A document's queries and keys end in the same block.
    row = torch.arange(q_blocks, device=q_len.device)
    document = torch.searchsorted(q_first + q_count, row, right=True)
    inside = document < q_len.shape[0]
    document = torch.where(inside, document, 0)
    long_row = row + (before + k_count - q_count - q_first)[document]
    last_col, width = k_count[document] - 1, (k_len % BLOCK)[document]
    begin, end = (torch.searchsorted(known, long_row * columns + col) for col in (0, last_col + 1))
    last_entry = torch.where(inside, end - begin, 0).cumsum(0)

    entry = torch.arange(capacity, device=row.device)
    of_row = torch.searchsorted(last_entry, entry, right=True)
    exists = of_row < q_blocks
    of_row = torch.where(exists, of_row, 0)
    taken = torch.where(exists, end[of_row] + entry - last_entry[of_row], 0)
    local, kind, tile = known[taken] % columns, known_tiles[taken] % 3, known_tiles[taken] // 3

    # Blocks that the end of a document cuts have a tile for each row, of either kind, after the long document's tiles.
    is_cut = (width[of_row] > 0) & (local == last_col[of_row])
    tile = torch.where(is_cut, of_row + torch.where(kind == 2, bit_tiles, run_tiles), tile)
    kind = torch.where(is_cut, kind.clamp(min=1), kind)
    last = known_tiles[(end - 1).clamp(min=0)]
    width = width[:, None].int()
    run = torch.where((last % 3 == 1)[:, None], tile_runs[torch.where(last % 3 == 1, last // 3, 0)], BLOCK << 16)
    first, stop = run & 0xFFFF, torch.minimum(run >> 16, width)
    tile_runs = _append_tiles(tile_runs, torch.where(first < stop, first | (stop << 16), 0), run_tiles)
    bits = tile_bits[torch.where(last % 3 == 2, last // 3, 0)]
    left = width - 32 * torch.arange(BLOCK // 32, dtype=torch.int32, device=row.device)
    kept_bits = torch.where(left >= 32, -1, (1 << left.clamp(0, 31)) - 1)
    tile_bits = _append_tiles(tile_bits, bits & kept_bits[:, None], bit_tiles)

    col = k_first[document][of_row] + local
    rows, by_query = sort_entries(torch.where(exists, 3 * of_row + kind, 3 * q_blocks), col, tile, q_blocks)
    k_rows, by_key = sort_entries(torch.where(exists, 3 * col + kind, 3 * k_blocks), of_row, tile, k_blocks)
    work, work_by_key = build_work(rows, k_rows, k_blocks, q_blocks)
    tensors = [tile_runs.new_zeros(1, 1), *rows, *by_query, *work, *k_rows, *by_key, *work_by_key, tile_runs, tile_bits]
    return MovedDocuments(BlockMask.from_tensors(q_axis.rows, k_axis.rows, BLOCK, tensors), q_axis, k_axis)


def _append_tiles(tiles: torch.Tensor, more: torch.Tensor, count: int) -> torch.Tensor:
    """Both, ``count`` tiles and more: a length that is known only as an argument's is no number in a backward graph."""
    return torch.cat([tiles, more]).narrow(0, 0, count + len(more))


def sort_entries(key: torch.Tensor, col: torch.Tensor, tile: torch.Tensor, rows: int) -> tuple[RowArrays, list[torch.Tensor]]:
    """((row_ptr, row_split, row_order), [col_idx, tile_idx]) of one mask: see ``Table``. key: of each entry 3 * row + kind, 0 full,
    1 run tile, 2 bit tile; 3 * rows where there is none. Entries with the same key are in the order of columns."""
    key, order = key.sort(stable=True)
    bounds = torch.searchsorted(key, torch.arange(3 * rows + 1, device=key.device)).int()
    row_ptr, row_split = bounds[::3].contiguous(), bounds[:-1].view(rows, 3)[:, 1:].contiguous()
    row_order = row_ptr.diff().argsort(descending=True, stable=True).int()
    return (row_ptr[None], row_split[None], row_order[None]), [col[order].int(), tile[order].int()]
