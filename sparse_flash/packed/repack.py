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

from collections.abc import Callable
from functools import cached_property
from operator import index
from typing import NamedTuple

import numpy as np
import torch

from ..compat.constants import constant_in_graphs
from ..compat.names import operator_name
from ..compat.pytorch import DynamicShapeError, is_plain_eager
from ..kernels.common.streams import current_device
from ..masks.block_mask import BlockMask, compile_up_to
from ..masks.build import from_entries
from ..masks.cache import fake_tensors_if_needed, keep_if_captured, run_in_thread
from ..masks.grid import BlockGrid, concat_ranges
from ..masks.memory import cached_until_cleared
from ..masks.pattern import short_text
from ..masks.select_blocks import build_work
from ..masks.table import SPLIT_FIELDS, WORK_FIELDS, Entries, most_splits
from ..masks.tiles import FULL_TILE, TilePool, dense_batches
from . import gather_rows

BLOCK = 128

_Starts = tuple[torch.Tensor, torch.Tensor]  # cu_seqlens of queries and of keys


class Axis(NamedTuple):
    """token_of_row: (blocks * BLOCK,) int32, the token at each place of the block axis, or -1 for none.
    row_of_token: (tokens,) int32, the reverse, -1 for a token of no document."""

    token_of_row: torch.Tensor
    row_of_token: torch.Tensor

    def to_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_dim) -> (1, heads, places of the axis of blocks, head_dim)."""
        # Not by indexing, here and below: the gradient of an index is a copy into zeros.
        taken = gather_rows.take_rows(x, self.token_of_row, self.row_of_token, 0.0, True)
        return taken.transpose(0, 1).unsqueeze(0)

    def to_tokens(self, x: torch.Tensor, fill: float, heads_first: bool = False) -> torch.Tensor:
        """The reverse; ``fill`` for tokens of no document."""
        x = x.squeeze(0).transpose(0, 1)
        return gather_rows.take_rows(x, self.row_of_token, self.token_of_row, fill, heads_first)


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


class PackPlan(NamedTuple):
    """Holds the host's numbers of a call; operators take them as a list of integers.

    q_tokens .. k_longest: tokens and longest document of queries and keys. shares_documents: whether keys have the documents of the
    queries. q_blocks, k_blocks: of both axes. before: block rows of the long document's table before position 0. entries,
    run_tiles, bit_tiles: capacities.
    """

    q_tokens: int
    q_longest: int
    k_tokens: int
    k_longest: int
    shares_documents: int  # 0 or 1
    q_blocks: int
    k_blocks: int
    before: int
    entries: int
    run_tiles: int
    bit_tiles: int


def read_sizes(queries: PackedDocuments, keys: PackedDocuments | None) -> tuple[_Starts, tuple[int, int, int, int, bool]]:
    """(cu_seqlens of queries and of keys, the first fields of a ``PackPlan``). keys: None for the documents of the queries."""
    of_keys = queries if keys is None else keys
    # index() turns symbolic lengths into plain numbers: a compiled graph holds the table of one long document.
    q_tokens, q_longest, k_tokens, k_longest = map(index, (*queries[1:], *of_keys[1:]))
    return (queries.cu_seqlens, of_keys.cu_seqlens), (q_tokens, q_longest, k_tokens, k_longest, keys is None)


def repack_documents(pattern, queries: PackedDocuments, keys: PackedDocuments | None) -> Packed:
    """The document axes, and the mask under which each document attends only to itself, by the pattern.

    pattern: a Pattern or its spec text. keys: None if they share the documents of the queries.
    """
    starts, sizes = read_sizes(queries, keys)
    results = _pack(starts, *_make_plan(pattern, *sizes, _round_up_documents(starts[0].shape[0] - 1), starts[0].device))
    axes = Axis(*results[:2]), Axis(*results[2:4])
    q_len, kv_len = (axis.token_of_row.shape[0] for axis in axes)
    return Packed(BlockMask.from_tensors(q_len, kv_len, BLOCK, results[4:]), *axes)


@constant_in_graphs
def _make_plan(
    pattern, q_tokens, q_longest, k_tokens, k_longest, shares_documents, documents, device
) -> tuple[list[int], list[torch.Tensor]]:
    """(the fields of a PackPlan, the tensors of the long document's mask)."""
    document = long_document(pattern, *long_blocks(q_longest, k_longest, shares_documents), device)
    q_blocks = most_blocks(q_tokens, documents, 0 if shares_documents else BLOCK - 1)
    k_blocks = most_blocks(k_tokens, documents)
    keep_if_captured(document, device)
    entries = max(2, document.most_entries(q_blocks, k_blocks, -(-k_longest // BLOCK)))
    run_tiles, bit_tiles = map(len, document.mask.tiles)
    # A block of queries may cut one tile.
    tiles = run_tiles + q_blocks, bit_tiles + q_blocks * document.has_bits
    plan = q_tokens, q_longest, k_tokens, k_longest, shares_documents, q_blocks, k_blocks, document.before, entries, *tiles
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


def long_blocks(q_longest: int, k_longest: int, shares_documents: bool) -> tuple[int, int]:
    """(blocks of keys of the long document, of queries before its first key), powers of two, to compile for few lengths."""
    k_blocks, q_blocks = (1 << max(0, -(-longest // BLOCK) - 1).bit_length() for longest in (k_longest, q_longest))
    return k_blocks, 0 if shares_documents else q_blocks


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


def table_operator(name: str, on_device: Callable, on_host: Callable, axes: bool) -> Callable:
    """Makes a PyTorch operator. Returns a function of (cu_seqlens of queries and keys, fields of a PackPlan, tables) that calls the
    operator, or its body if the call is plain. It returns a mask's tensors; with ``axes``, the tensors of both axes come first.

    on_device, on_host: make them from (tables, q_starts, k_starts, plan), with kernels and with NumPy.
    """

    def run(tables: list[torch.Tensor], q_starts: torch.Tensor, k_starts: torch.Tensor, plan: list[int]) -> list[torch.Tensor]:
        make = on_device if gather_rows.can_use_kernels(q_starts.device) else on_host
        return make(tables, q_starts, k_starts, PackPlan(*plan))

    @torch.library.custom_op(operator_name(name), mutates_args=())
    def operator(tables: list[torch.Tensor], q_starts: torch.Tensor, k_starts: torch.Tensor, plan: list[int]) -> list[torch.Tensor]:
        return _clone_aliases(run(tables, q_starts, k_starts, plan), tables)

    @operator.register_fake
    def _(tables, q_starts, k_starts, plan):
        # All sizes are the plan's: a length that is known as that of an argument alone is no number in a backward graph.
        whole, device = PackPlan(*plan), q_starts.device
        of_axes = (whole.q_blocks * BLOCK, whole.q_tokens, whole.k_blocks * BLOCK, whole.k_tokens) if axes else ()
        return [tables[0].new_empty(shape) for shape in (*((size,) for size in of_axes), *_fake_mask(whole, device))]

    def call(starts: _Starts, plan: list[int], tables: list[torch.Tensor]) -> list[torch.Tensor]:
        return (run if is_plain_eager(*starts) else operator)(fake_tensors_if_needed(tables), *starts, plan)

    return call


def _clone_aliases(results: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """``results`` as an operator must return them: distinct tensors, none of them an argument."""
    known, own = set(map(id, given)), []
    for tensor in results:
        own.append(tensor.clone() if id(tensor) in known else tensor)
        known.add(id(tensor))
    return own


def _fake_mask(plan: PackPlan, device: torch.device) -> list[tuple]:
    """The shapes of the mask's tensors."""
    # Kernels allocate the lengths of the plan. Other lengths depend on the documents, which tensors on the device meta do not know.
    in_full = gather_rows.can_use_kernels(device) or device.type == "meta"

    def size(known: int) -> int | torch.SymInt:
        """The plan's length, which bounds the other: one that depends on the documents."""
        if in_full:
            return known
        try:
            return torch.library.get_ctx().new_dynamic_size(min=1)
        except DynamicShapeError:
            return known

    def table(rows: int, longest: int) -> list[tuple]:
        """Returns the shapes of a ``Table``. longest: the most blocks that a row may have."""
        room = most_splits(longest)
        col_idx, tile_idx, items, splits = map(size, (plan.entries, plan.entries, rows + room, max(2, room)))
        work = [(1, items, WORK_FIELDS), (1, splits, SPLIT_FIELDS)]
        return [(1, rows + 1), (1, rows, 2), (1, rows), (col_idx,), (tile_idx,), *work]

    tables = *table(plan.q_blocks, plan.k_blocks), *table(plan.k_blocks, plan.q_blocks)
    return [(1, 1), *tables, (size(plan.run_tiles), BLOCK), (size(plan.bit_tiles), BLOCK, BLOCK // 32)]


def _pack_on_device(tables, q_starts, k_starts, plan: PackPlan) -> list[torch.Tensor]:
    """tables, plan: from ``_make_plan``. Returns the tensors of both axes, then the mask's."""
    from .kernels.repack import fill_rows, find_rows

    long, before, shares_documents = _long_mask(tables, plan), plan.before, bool(plan.shares_documents)
    tiles = long.tiles
    roomy = [_extend_tiles(tiles[0], plan.run_tiles), _extend_tiles(tiles[1], plan.bit_tiles)]
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
    from .kernels.repack import lay_out

    longest = plan.q_longest, plan.k_longest
    with current_device(q_starts.device):
        return lay_out(q_starts, k_starts, plan.q_tokens, plan.k_tokens, *longest, BLOCK, bool(plan.shares_documents))


def _long_mask(tables: list[torch.Tensor], plan: PackPlan) -> BlockMask:
    """The mask of the long document."""
    k_blocks, before = long_blocks(plan.q_longest, plan.k_longest, bool(plan.shares_documents))
    return BlockMask.from_tensors((before + k_blocks) * BLOCK, k_blocks * BLOCK, BLOCK, tables)


def _empty_axis(tokens: int, blocks: int, device) -> Axis:
    token_of_row = torch.empty(blocks * BLOCK, dtype=torch.int32, device=device)
    return Axis(token_of_row, torch.full((tokens,), -1, dtype=torch.int32, device=device))


def _extend_tiles(tiles: torch.Tensor, capacity: int) -> torch.Tensor:
    if len(tiles) == capacity:
        return tiles
    roomy = tiles.new_empty((capacity, *tiles.shape[1:]))
    roomy[: len(tiles)].copy_(tiles)
    return roomy


def _pack_on_host(tables, q_starts, k_starts, plan: PackPlan) -> list[torch.Tensor]:
    """The same as ``_pack_on_device``, whose reference it is, using NumPy."""
    (q_start, q_len), (k_start, k_len) = documents_on_host(q_starts, k_starts, plan)
    skipped = np.where(q_len > 0, (k_len - q_len) % BLOCK, 0)
    q_blocks, k_blocks = -(-(skipped + q_len) // BLOCK), -(-k_len // BLOCK)
    q_first, k_first = (np.cumsum(blocks) - blocks for blocks in (q_blocks, k_blocks))
    device = q_starts.device

    grid = BlockGrid(plan.q_blocks * BLOCK, plan.k_blocks * BLOCK, BLOCK)
    entries, pool = _documents_entries(_long_mask(tables, plan), q_first, q_blocks, k_first, k_blocks, k_len)
    tensors = [tensor.to(device) for tensor in from_entries(grid, entries, pool).tensors()]
    q_axis = _axis(plan.q_tokens, plan.q_blocks, q_start, q_len, q_first * BLOCK + skipped, device)
    k_axis = q_axis if plan.shares_documents else _axis(plan.k_tokens, plan.k_blocks, k_start, k_len, k_first * BLOCK, device)
    return [*q_axis, *k_axis, *tensors]


def documents_on_host(q_starts, k_starts, plan: PackPlan) -> list[tuple[np.ndarray, np.ndarray]]:
    """(first token, tokens) of each document of queries and of keys, clipped: none overlaps another or exceeds the tokens."""
    sides = []
    for starts, tokens, longest in (q_starts, plan.q_tokens, plan.q_longest), (k_starts, plan.k_tokens, plan.k_longest):
        bounds = np.maximum.accumulate(np.clip(starts.cpu().numpy().astype(np.int64), 0, tokens))
        sides.append((bounds[:-1], np.minimum(np.diff(bounds), longest)))
    return sides


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
    return Entries(rows, cols, numbers[which.reshape(-1)]).without_empty(), pool


_pack = table_operator("pack_documents", _pack_on_device, _pack_on_host, axes=True)
