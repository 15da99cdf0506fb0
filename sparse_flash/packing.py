"""Packed documents on an axis of whole blocks: where each token lies there, and the BlockMask of that axis.

Each document starts with a block of its own, so that the table of one long document, compiled once, holds the tables of all of
them: a shorter one keeps the entries of its first rows and columns. Only its last block of keys, where its end cuts it, has
tiles of its own. Where a document has not as many queries as keys, its queries start so far into their first block as their
first position lies in one, which makes its rows the last ones above the end of its keys.

On a GPU nothing waits for the host, and shapes depend on the numbers of tokens and documents alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from .backends import triton as portable
from .block_mask import PART_FIELDS, BlockMask, Entries, Table, as_block_mask
from .grid import BlockGrid
from .tiles import EMPTY_TILE, FULL_TILE, TilePool, dense_batches

BLOCK = 128


class Axis(NamedTuple):
    """token_of_row: (blocks * BLOCK,) int32, the token at each place of the axis of blocks, -1 where none is.
    row_of_token: (tokens,) int32, the reverse, -1 for a token of no document."""

    token_of_row: torch.Tensor
    row_of_token: torch.Tensor


class Packed(NamedTuple):
    """mask: of all documents. queries, keys: their axes."""

    mask: BlockMask
    queries: Axis
    keys: Axis


@dataclass(frozen=True, eq=False)
class Side:
    """The documents of queries or of keys. cu_seqlens: (documents + 1,) int32 or int64. tokens: of the packed axis.
    longest: tokens that no document exceeds; what is beyond them is left out."""

    cu_seqlens: torch.Tensor
    tokens: int
    longest: int

    def blocks(self, skipped: int = 0) -> int:
        """Blocks enough for any lengths, where up to ``skipped`` places before a document stay empty."""
        documents = min(len(self.cu_seqlens) - 1, self.tokens)
        return max(1, (self.tokens + documents * (BLOCK - 1 + skipped)) // BLOCK)


def pack(pattern, queries: Side, keys: Side | None) -> Packed:
    """The axes of documents, and the mask under which each attends to itself alone, by the pattern.

    pattern: a Pattern or its spec text. keys: None where they have the documents of the queries.
    """
    same = keys is None
    keys = queries if same else keys
    # Powers of two, so that few lengths are compiled.
    k_blocks, before = (_power_of_two(-(-side.longest // BLOCK)) for side in (keys, queries))
    device = queries.cu_seqlens.device
    document = _longest_document(pattern, k_blocks, 0 if same else before, device)
    return (_on_device if _by_kernels(device) else _on_host)(document, queries, keys, same)


def _by_kernels(device: torch.device) -> bool:
    """Where there is a GPU but no Triton, what runs is the torch back end, and that waits for the device anyway."""
    return device.type == "cuda" and portable.available() is None


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class _Document:
    """The table of a document of ``k_blocks`` blocks, with ``before`` blocks of queries before the first key."""

    def __init__(self, pattern, k_blocks: int, before: int, device):
        mask = as_block_mask(pattern, q_len=(before + k_blocks) * BLOCK, kv_len=k_blocks * BLOCK, block_size=BLOCK)
        rows, cols, kinds, _ = mask.entries()
        # Of the entries of the first n rows and columns, how many there are for each of n.
        entries = np.cumsum(np.bincount(np.maximum(rows, cols), minlength=k_blocks)[:k_blocks])
        self._dense_rows = np.maximum.accumulate(entries / np.arange(1, k_blocks + 1))
        self._heaviest = [int(np.bincount(line, minlength=1).max()) for line in (rows, cols)]
        self.before = before
        self.has_bits = bool((kinds == 2).any())
        self.mask = mask.to(device)
        self.no_parts = torch.zeros((1, 2, PART_FIELDS), dtype=torch.int32, device=device)

    def most_entries(self, q_blocks: int, k_blocks: int, longest: int) -> int:
        """As many entries as documents of up to ``longest`` blocks of keys can have in so many blocks together."""
        if self.before:
            return min(q_blocks * self._heaviest[0], k_blocks * self._heaviest[1])
        return int(q_blocks * self._dense_rows[max(0, longest - 1)]) + 1


@lru_cache(maxsize=64)
def _longest_document(pattern, k_blocks, before, device) -> _Document:
    return _Document(pattern, k_blocks, before, device)


def _on_device(document: _Document, queries: Side, keys: Side, same: bool) -> Packed:
    """``pack`` by kernels."""
    from .kernels.packed import fill_rows, find_rows, lay_out

    device = queries.cu_seqlens.device
    q_blocks, k_blocks = queries.blocks(0 if same else BLOCK - 1), keys.blocks()
    compiled, before = document.mask, document.before
    entries = max(2, document.most_entries(q_blocks, k_blocks, -(-keys.longest // BLOCK)))
    with portable.current_device(device):
        layout = lay_out(
            queries.cu_seqlens, keys.cu_seqlens, queries.tokens, keys.tokens, queries.longest, keys.longest, BLOCK, same
        )
        tiles = [_with_room(compiled.tile_runs, q_blocks)]
        tiles.append(_with_room(compiled.tile_bits, q_blocks) if document.has_bits else compiled.tile_bits)
        axes, tables = [], []
        for is_query, side, blocks in ((True, queries, q_blocks), (False, keys, k_blocks)):
            table = compiled.by_query if is_query else compiled.by_key
            axes.append(axes[0] if same and axes else _empty_axis(side, blocks, device))
            records = find_rows(layout, table, blocks, before, BLOCK, axes[-1], is_query, same)
            arrays = fill_rows(layout, records, table, compiled.tiles, tiles, entries, before, BLOCK, is_query)
            tables.append(Table(*arrays, document.no_parts))
    mask = BlockMask(q_blocks * BLOCK, k_blocks * BLOCK, BLOCK, False, compiled.mask_index, *tables, *tiles)
    return Packed(mask, *axes)


def _empty_axis(side: Side, blocks: int, device) -> Axis:
    token_of_row = torch.empty(blocks * BLOCK, dtype=torch.int32, device=device)
    return Axis(token_of_row, torch.full((side.tokens,), -1, dtype=torch.int32, device=device))


def _with_room(tiles: torch.Tensor, more: int) -> torch.Tensor:
    roomy = tiles.new_empty((len(tiles) + more, *tiles.shape[1:]))
    roomy[: len(tiles)].copy_(tiles)
    return roomy


def _on_host(document: _Document, queries: Side, keys: Side, same: bool) -> Packed:
    """``pack`` by NumPy: the definition of what the kernels do."""
    q_start, q_len = _documents(queries)
    k_start, k_len = (q_start, q_len) if same else _documents(keys)
    skipped = np.where(q_len > 0, (k_len - q_len) % BLOCK, 0)
    q_blocks, k_blocks = -(-(skipped + q_len) // BLOCK), -(-k_len // BLOCK)
    q_first, k_first = (np.cumsum(blocks) - blocks for blocks in (q_blocks, k_blocks))
    capacity = queries.blocks(0 if same else BLOCK - 1), keys.blocks()
    device = queries.cu_seqlens.device

    grid = BlockGrid(capacity[0] * BLOCK, capacity[1] * BLOCK, BLOCK)
    entries, pool = _documents_entries(document, q_first, q_blocks, k_first, k_blocks, k_len)
    mask = BlockMask.from_entries(grid, entries, pool).to(device)
    q_axis = _axis(queries, capacity[0], q_start, q_len, q_first * BLOCK + skipped, device)
    k_axis = q_axis if same else _axis(keys, capacity[1], k_start, k_len, k_first * BLOCK, device)
    return Packed(mask, q_axis, k_axis)


def _documents(side: Side) -> tuple[np.ndarray, np.ndarray]:
    """(first token, tokens) of each document, made such that they neither overlap nor leave the tokens."""
    bounds = np.maximum.accumulate(np.clip(side.cu_seqlens.cpu().numpy().astype(np.int64), 0, side.tokens))
    return bounds[:-1], np.minimum(np.diff(bounds), side.longest)


def _axis(side: Side, blocks: int, start, length, first_row, device) -> Axis:
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    token, row = np.repeat(start, length) + within, np.repeat(first_row, length) + within
    token_of_row, row_of_token = np.full(blocks * BLOCK, -1, np.int32), np.full(side.tokens, -1, np.int32)
    token_of_row[row], row_of_token[token] = token, row
    return Axis(torch.from_numpy(token_of_row).to(device), torch.from_numpy(row_of_token).to(device))


def _documents_entries(document: _Document, q_first, q_blocks, k_first, k_blocks, k_len) -> tuple[Entries, TilePool]:
    """The entries of all documents, and the tiles that they use, cut where the last block of keys is."""
    rows, cols, kinds, tiles = document.mask.entries()
    pieces = [np.zeros((5, 0), np.int64)]
    for d in np.flatnonzero(q_blocks * k_blocks):
        line = document.before + k_blocks[d] - q_blocks[d]
        begin, end = np.searchsorted(rows, [line, line + q_blocks[d]])
        piece = slice(begin, end)
        width = np.where(cols[piece] == k_blocks[d] - 1, k_len[d] - cols[piece] * BLOCK, BLOCK)
        piece = np.stack([rows[piece] - line + q_first[d], cols[piece] + k_first[d], kinds[piece], tiles[piece], width])
        pieces.append(piece[:, cols[begin:end] < k_blocks[d]])
    rows, cols, *tile = np.concatenate(pieces, axis=1)
    pool = TilePool(BLOCK)
    different, which = np.unique(np.stack(tile), axis=1, return_inverse=True)
    numbers = np.full(different.shape[1], FULL_TILE)
    partial = np.flatnonzero((different[0] > 0) | (different[2] < BLOCK))
    for batch in dense_batches(len(partial), BLOCK):
        kind, number, width = different[:, partial[batch]]
        kept = document.mask.tile_pairs(kind, number) & (np.arange(BLOCK) < width[:, None, None])
        numbers[partial[batch]] = pool.add_dense(kept)
    numbers = numbers[which.reshape(-1)]
    some = numbers != EMPTY_TILE
    return Entries(rows[some], cols[some], numbers[some]), pool


def take_rows(x: torch.Tensor, index: torch.Tensor, fill: float, heads_first: bool) -> torch.Tensor:
    """(rows, heads, head_dim): row r is x[index[r]], or ``fill`` where the index is -1.

    x: (n, heads, head_dim). index: (rows,) int32. heads_first: whether the result lies head by head in memory, or row by row.
    """
    rows, heads, dim = len(index), *x.shape[1:]
    if _by_kernels(x.device):
        from .kernels.packed import take_rows as by_kernel

        target = x.new_empty((heads, rows, dim)).transpose(0, 1) if heads_first else x.new_empty((rows, heads, dim))
        with portable.current_device(x.device):
            by_kernel(x, index, fill, target)
        return target
    taken = x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None, None], fill)
    return taken.transpose(0, 1).contiguous().transpose(0, 1) if heads_first else taken
