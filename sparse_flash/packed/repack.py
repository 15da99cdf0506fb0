"""Packed documents on an axis of whole blocks: the place of each token, and the BlockMask of that axis. For patterns that
``in_place.py`` does not support.

Each document starts in a new block. So the table of one long document, compiled once, contains the tables of all of them: a shorter
one keeps the entries of its first rows and columns. Only its last block of keys has tiles of its own, if the document ends inside
it. If a document's numbers of queries and keys differ, its
queries start as far into their first block as their first position lies within one; its rows are then the last ones before the end
of its keys.

On a GPU nothing synchronizes with the host, and shapes depend only on the numbers of tokens and documents.
"""

from __future__ import annotations

from functools import cached_property
from operator import index
from typing import NamedTuple

import numpy as np
import torch

from ..compat.constants import constant_in_graphs
from ..compat.names import operator_name
from ..compat.pytorch import DynamicShapeError, is_plain_eager
from ..kernels.common.streams import current_device
from ..masks.block_mask import BlockMask
from ..masks.build import from_entries
from ..masks.cache import fake_tensors_if_needed, keep_if_captured, run_in_thread
from ..masks.compiler import compile_up_to
from ..masks.grid import BlockGrid, concat_ranges
from ..masks.memory import cached_until_cleared
from ..masks.pattern import short_text
from ..masks.select_blocks import build_work
from ..masks.table import SPLIT_FIELDS, WORK_FIELDS, Entries, most_splits
from ..masks.tiles import EMPTY_TILE, FULL_TILE, TilePool, dense_batches
from . import gather_rows

BLOCK = 128


class Axis(NamedTuple):
    """token_of_row: (blocks * BLOCK,) int32, the token at each place of the block axis, or -1 for none.
    row_of_token: (tokens,) int32, the reverse, -1 for a token of no document."""

    token_of_row: torch.Tensor
    row_of_token: torch.Tensor


class Packed(NamedTuple):
    """mask: of all documents. queries, keys: their axes."""

    mask: BlockMask
    queries: Axis
    keys: Axis


class PackedDocuments(NamedTuple):
    """The documents of queries or of keys. cu_seqlens: (documents + 1,) int32 or int64. tokens: of the packed axis. longest: no
    document exceeds this; tokens beyond it are dropped."""

    cu_seqlens: torch.Tensor
    tokens: int
    longest: int


class RepackPlan(NamedTuple):
    """Holds the host's numbers of a call; operators take them as a list of integers.

    q_tokens .. k_blocks: tokens, longest document and blocks of queries and keys. blocks_before_keys: block rows of the long
    document's table before position 0. entries: capacity. shares_documents: whether keys have the documents of the queries.
    has_bits: whether the table has bit tiles. run_tiles, bit_tiles: how many tiles the long document has.
    """

    q_tokens: int
    k_tokens: int
    q_longest: int
    k_longest: int
    q_blocks: int
    k_blocks: int
    blocks_before_keys: int
    entries: int
    shares_documents: int  # 0 or 1, as has_bits
    has_bits: int
    run_tiles: int
    bit_tiles: int


def repack_documents(pattern, queries: PackedDocuments, keys: PackedDocuments | None) -> Packed:
    """The document axes, and the mask under which each document attends only to itself, by the pattern.

    pattern: a Pattern or its spec text. keys: None if they share the documents of the queries.
    """
    shares_documents = keys is None
    keys = queries if keys is None else keys
    starts = queries.cu_seqlens, keys.cu_seqlens
    # index() turns symbolic lengths into plain numbers: a compiled graph holds the table of one long document.
    q_tokens, q_longest, k_tokens, k_longest = map(index, (*queries[1:], *keys[1:]))
    documents = _round_up_documents(starts[0].shape[0] - 1)
    plan, tables = _make_plan(pattern, q_tokens, q_longest, k_tokens, k_longest, documents, shares_documents, starts[0].device)
    run = _pack if is_plain_eager(*starts) else _pack_operator
    results = run(fake_tensors_if_needed(tables), *starts, plan)
    axes = Axis(*results[:2]), Axis(*results[2:4])
    q_len, kv_len = (axis.token_of_row.shape[0] for axis in axes)
    return Packed(BlockMask.from_tensors(q_len, kv_len, BLOCK, results[4:]), *axes)


@constant_in_graphs
def _make_plan(
    pattern, q_tokens, q_longest, k_tokens, k_longest, documents, shares_documents, device
) -> tuple[list[int], list[torch.Tensor]]:
    """(the fields of a RepackPlan, the tensors of the long document's mask)."""
    # Rounded to powers of two, to compile for few lengths.
    k_height, q_height = (next_power_of_two(-(-longest // BLOCK)) for longest in (k_longest, q_longest))
    document = long_document(pattern, k_height, 0 if shares_documents else q_height, device)
    q_blocks = most_blocks(q_tokens, documents, 0 if shares_documents else BLOCK - 1)
    k_blocks = most_blocks(k_tokens, documents)
    keep_if_captured(document, device)
    run_tiles, bit_tiles = map(len, document.mask.tiles)
    plan = RepackPlan(
        q_tokens=q_tokens,
        k_tokens=k_tokens,
        q_longest=q_longest,
        k_longest=k_longest,
        q_blocks=q_blocks,
        k_blocks=k_blocks,
        blocks_before_keys=document.before,
        entries=max(2, document.most_entries(q_blocks, k_blocks, -(-k_longest // BLOCK))),
        shares_documents=shares_documents,
        has_bits=document.has_bits,
        run_tiles=run_tiles,
        bit_tiles=bit_tiles,
    )
    return [*map(int, plan)], document.tables


def _round_up_documents(documents: int) -> int:
    """How many documents a plan is made for. In compiled code, where this is symbolic, the next power of two: code that is compiled
    for each number of documents would be compiled anew in each step of training."""
    if not torch.compiler.is_compiling():
        return documents
    most = 1
    while most < documents:
        most *= 2
    return most


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def most_blocks(tokens: int, documents: int, skipped: int = 0, block: int = BLOCK) -> int:
    """Enough blocks for any lengths, if up to ``skipped`` places before a document stay empty."""
    return max(1, (tokens + min(documents, tokens) * (block - 1 + skipped)) // block)


class LongDocument:
    """The table of a document of ``k_blocks`` blocks, with ``before`` blocks of queries before the first key."""

    def __init__(self, pattern, k_blocks: int, before: int, device):
        self.mask = compile_up_to(pattern, (before + k_blocks) * BLOCK, k_blocks * BLOCK, BLOCK, "cpu")
        if self.mask.mask_index.numel() > 1:
            raise ValueError(f"packed documents take one pattern for all; got {short_text(pattern)}; call once for each group")
        self.before = before
        self._device = device
        rows, cols, kinds, _ = self.mask.entries()
        # The number of entries in the first n rows and columns, for each n.
        entries = np.cumsum(np.bincount(np.maximum(rows, cols), minlength=k_blocks)[:k_blocks])
        self._densest = np.maximum.accumulate(entries / np.arange(1, k_blocks + 1))
        self._heaviest = [int(np.bincount(line, minlength=1).max()) for line in (rows, cols)]
        self.has_bits = bool((kinds == 2).any())

    @cached_property
    def tables(self) -> list[torch.Tensor]:
        """The mask's tensors on the device."""
        return run_in_thread(lambda: self.mask.to(self._device).tensors())

    def most_entries(self, q_blocks: int, k_blocks: int, longest: int) -> int:
        """An upper bound on the entries in this many blocks of documents of up to ``longest`` key blocks."""
        if self.before:
            return min(q_blocks * self._heaviest[0], k_blocks * self._heaviest[1])
        return int(q_blocks * self._densest[max(0, longest - 1)]) + 1


@cached_until_cleared(maxsize=64)
def long_document(pattern, k_blocks, before, device) -> LongDocument:
    return run_in_thread(LongDocument, pattern, k_blocks, before, device)


def _pack(tables: list[torch.Tensor], q_starts: torch.Tensor, k_starts: torch.Tensor, plan: list[int]) -> list[torch.Tensor]:
    """tables, plan: from ``_make_plan``. Returns the tensors of both axes, and those of the mask."""
    run = _pack_on_device if gather_rows.can_use_kernels(q_starts.device) else _pack_on_host
    return run(tables, q_starts, k_starts, RepackPlan(*plan))


@torch.library.custom_op(operator_name("pack_documents"), mutates_args=())
def _pack_operator(
    tables: list[torch.Tensor], q_starts: torch.Tensor, k_starts: torch.Tensor, plan: list[int]
) -> list[torch.Tensor]:
    return clone_aliases(_pack(tables, q_starts, k_starts, plan), tables)


def clone_aliases(results: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """``results`` as an operator must return them: distinct tensors, none of them an argument."""
    known, own = set(map(id, given)), []
    for tensor in results:
        own.append(tensor.clone() if id(tensor) in known else tensor)
        known.add(id(tensor))
    return own


@_pack_operator.register_fake
def _(tables, q_starts, k_starts, plan):
    plan, in_full = RepackPlan(*plan), has_full_tables(q_starts.device)

    def size(known: int) -> int | torch.SymInt:
        return fake_size(known, in_full)

    # All sizes are the plan's: a length that is known as that of an argument alone is no number in a backward graph.
    shapes = [(plan.q_blocks * BLOCK,), (plan.q_tokens,), (plan.k_blocks * BLOCK,), (plan.k_tokens,), (1, 1)]
    shapes += fake_table(plan.q_blocks, plan.entries, plan.k_blocks, in_full)
    shapes += fake_table(plan.k_blocks, plan.entries, plan.q_blocks, in_full)
    shapes.append((size(plan.run_tiles + plan.q_blocks), BLOCK))
    shapes.append((size(plan.bit_tiles + plan.q_blocks * plan.has_bits), BLOCK, BLOCK // 32))
    return [tables[0].new_empty(shape) for shape in shapes]


def has_full_tables(device: torch.device) -> bool:
    """Whether tables have the lengths of the plan, as kernels allocate them; else their lengths depend on the documents, which
    tensors on the device meta do not know."""
    return gather_rows.can_use_kernels(device) or device.type == "meta"


def fake_size(known: int, in_full: bool) -> int | torch.SymInt:
    """The plan's length, which bounds the other: one that depends on the documents."""
    if in_full:
        return known
    try:
        return torch.library.get_ctx().new_dynamic_size(min=1)
    except DynamicShapeError:
        return known


def fake_table(rows: int, entries: int, longest: int, in_full: bool) -> list[tuple]:
    """The shapes of a ``Table`` of one mask. longest: the most blocks that a row may have."""
    room = most_splits(longest)
    col_idx, tile_idx, items, splits = (fake_size(known, in_full) for known in (entries, entries, rows + room, max(2, room)))
    work = [(1, items, WORK_FIELDS), (1, splits, SPLIT_FIELDS)]
    return [(1, rows + 1), (1, rows, 2), (1, rows), (col_idx,), (tile_idx,), *work]


def _pack_on_device(tables, q_starts, k_starts, plan: RepackPlan) -> list[torch.Tensor]:
    """``_pack`` using kernels."""
    from ..kernels.packed.repack import fill_rows, find_rows

    long, before, shares_documents = _long_mask(tables, plan), plan.blocks_before_keys, bool(plan.shares_documents)
    tiles = long.tiles
    roomy = [_extend_tiles(tiles[0], plan.q_blocks), _extend_tiles(tiles[1], plan.q_blocks) if plan.has_bits else tiles[1]]
    layout = lay_out_documents(q_starts, k_starts, plan)
    with current_device(q_starts.device):
        axes: list[Axis] = []
        filled = []
        sides = (True, long.by_query, plan.q_blocks, plan.q_tokens), (False, long.by_key, plan.k_blocks, plan.k_tokens)
        for is_query, table, blocks, tokens in sides:
            axes.append(axes[0] if shares_documents and axes else _empty_axis(tokens, blocks, q_starts.device))
            records = find_rows(layout, table, blocks, before, BLOCK, axes[-1], is_query, shares_documents)
            filled.append(fill_rows(layout, records, table, tiles, roomy, plan.entries, before, BLOCK, is_query))
        work = build_work(filled[0][:3], filled[1][:3], plan.k_blocks, plan.q_blocks)
    return [*axes[0], *axes[1], long.mask_index, *filled[0], *work[0], *filled[1], *work[1], *roomy]


def lay_out_documents(q_starts: torch.Tensor, k_starts: torch.Tensor, plan) -> torch.Tensor:
    """``lay_out`` of kernels, with the numbers of a plan."""
    from ..kernels.packed.repack import lay_out

    longest = plan.q_longest, plan.k_longest
    with current_device(q_starts.device):
        return lay_out(q_starts, k_starts, plan.q_tokens, plan.k_tokens, *longest, BLOCK, bool(plan.shares_documents))


def _long_mask(tables: list[torch.Tensor], plan: RepackPlan) -> BlockMask:
    """The mask of the long document."""
    k_blocks = next_power_of_two(-(-plan.k_longest // BLOCK))
    return BlockMask.from_tensors((plan.blocks_before_keys + k_blocks) * BLOCK, k_blocks * BLOCK, BLOCK, tables)


def _empty_axis(tokens: int, blocks: int, device) -> Axis:
    token_of_row = torch.empty(blocks * BLOCK, dtype=torch.int32, device=device)
    return Axis(token_of_row, torch.full((tokens,), -1, dtype=torch.int32, device=device))


def _extend_tiles(tiles: torch.Tensor, more: int) -> torch.Tensor:
    roomy = tiles.new_empty((len(tiles) + more, *tiles.shape[1:]))
    roomy[: len(tiles)].copy_(tiles)
    return roomy


def _pack_on_host(tables, q_starts, k_starts, plan: RepackPlan) -> list[torch.Tensor]:
    """``_pack`` using NumPy: the reference for the kernels."""
    q_start, q_len = documents_on_host(q_starts, plan.q_tokens, plan.q_longest)
    k_start, k_len = (q_start, q_len) if plan.shares_documents else documents_on_host(k_starts, plan.k_tokens, plan.k_longest)
    skipped = np.where(q_len > 0, (k_len - q_len) % BLOCK, 0)
    q_blocks, k_blocks = -(-(skipped + q_len) // BLOCK), -(-k_len // BLOCK)
    q_first, k_first = (np.cumsum(blocks) - blocks for blocks in (q_blocks, k_blocks))
    device = q_starts.device

    grid = BlockGrid(plan.q_blocks * BLOCK, plan.k_blocks * BLOCK, BLOCK)
    entries, pool = _documents_entries(_long_mask(tables, plan), q_first, q_blocks, k_first, k_blocks, k_len)
    mask = from_entries(grid, entries, pool).to(device)
    q_axis = _axis(plan.q_tokens, plan.q_blocks, q_start, q_len, q_first * BLOCK + skipped, device)
    k_axis = q_axis if plan.shares_documents else _axis(plan.k_tokens, plan.k_blocks, k_start, k_len, k_first * BLOCK, device)
    return [*q_axis, *k_axis, *mask.tensors()]


def documents_on_host(cu_seqlens: torch.Tensor, tokens: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """(first token, tokens) of each document, clipped so that documents neither overlap nor exceed the tokens."""
    bounds = np.maximum.accumulate(np.clip(cu_seqlens.cpu().numpy().astype(np.int64), 0, tokens))
    return bounds[:-1], np.minimum(np.diff(bounds), longest)


def _axis(tokens: int, blocks: int, start, length, first_row, device) -> Axis:
    token, row = concat_ranges(start, length), concat_ranges(first_row, length)
    token_of_row, row_of_token = np.full(blocks * BLOCK, -1, np.int32), np.full(tokens, -1, np.int32)
    token_of_row[row], row_of_token[token] = token, row
    return Axis(torch.from_numpy(token_of_row).to(device), torch.from_numpy(row_of_token).to(device))


def _documents_entries(long: BlockMask, q_first, q_blocks, k_first, k_blocks, k_len) -> tuple[Entries, TilePool]:
    """The entries of all documents and the tiles they use, clipped in the last block of keys."""
    rows, cols, kinds, tiles = long.entries()
    before = (long.q_len - long.kv_len) // BLOCK
    pieces = [np.zeros((5, 0), np.int64)]
    for d in np.flatnonzero(q_blocks * k_blocks):
        line = before + k_blocks[d] - q_blocks[d]
        begin, end = np.searchsorted(rows, [line, line + q_blocks[d]])
        piece = slice(begin, end)
        width = np.where(cols[piece] == k_blocks[d] - 1, k_len[d] - cols[piece] * BLOCK, BLOCK)
        entries = np.stack([rows[piece] - line + q_first[d], cols[piece] + k_first[d], kinds[piece], tiles[piece], width])
        pieces.append(entries[:, cols[begin:end] < k_blocks[d]])
    rows, cols, *tile = np.concatenate(pieces, axis=1)
    pool = TilePool(BLOCK)
    different, which = np.unique(np.stack(tile), axis=1, return_inverse=True)
    numbers = np.full(different.shape[1], FULL_TILE)
    partial = np.flatnonzero((different[0] > 0) | (different[2] < BLOCK))
    for batch in dense_batches(len(partial), BLOCK):
        kind, number, width = different[:, partial[batch]]
        kept = long.tile_pairs(kind, number) & (np.arange(BLOCK) < width[:, None, None])
        numbers[partial[batch]] = pool.add_dense(kept)
    numbers = numbers[which.reshape(-1)]
    some = numbers != EMPTY_TILE
    return Entries(rows[some], cols[some], numbers[some]), pool
