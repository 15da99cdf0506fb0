"""The tables and tiles of one or several masks, and which blocks and pairs they keep. ``BlockMask`` defines the format."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..compat.dynamo import outside_graphs
from .grid import EMPTY, FULL, PARTIAL, BlockGrid, check_index
from .table import FullBlocks, PartialBlocks, Table, bands_of, ordered_bounds, work_of_whole_rows
from .tiles import dense_batches, runs_to_dense, unpack_bits, unpack_runs


@dataclass(frozen=True, eq=False)
class MaskTables:
    """Fields of a ``BlockMask``, whose docstring describes them."""

    q_len: int
    kv_len: int
    block_size: int
    keeps_all: bool
    mask_index: torch.Tensor
    by_query: Table
    by_key: Table
    tile_runs: torch.Tensor
    tile_bits: torch.Tensor
    from_host: bool = False
    document_order: bool = False

    def having(self, **changes: Any) -> "MaskTables":
        """The same tables with other values of some fields, as a plain record."""
        return MaskTables(**{field.name: getattr(self, field.name) for field in fields(MaskTables)} | changes)

    def stored_index(self, batch: int, head: int) -> int:
        """Which stored mask a head uses."""
        batches, heads = self.mask_index.shape  # a size of 1 broadcasts
        batch = check_index("batch", batch, batches) if batches > 1 else 0
        head = check_index("head", head, heads) if heads > 1 else 0
        return int(self.mask_index[batch, head])

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.q_len, self.kv_len, self.block_size

    @cached_property
    def keeps_causal(self) -> bool:
        """Whether each query keeps exactly the keys up to its own index, by the table, which is read once: for masks on a CPU."""
        tokens = self.q_len
        return tokens == self.kv_len and bool((self.kept_pairs() == tokens * (tokens + 1) // 2).all()) and self.is_causal

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal masks on the CPU, as compiled tables are canonical. All else follows from the table by query."""
        digest = hashlib.sha256(repr(self.sizes).encode())
        for tensor in (self.mask_index, *self.by_query.in_use()[:5], *self.tiles):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
        return digest.digest()

    @property
    def grid(self) -> BlockGrid:
        return BlockGrid(*self.sizes)

    @property
    def device(self) -> torch.device:
        return self.mask_index.device

    @property
    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tile_runs, self.tile_bits

    @property
    def masks(self) -> int:
        """How many distinct masks are stored."""
        return self.by_query.row_ptr.shape[0]

    @cached_property
    def whole_columns(self) -> torch.Tensor:
        """``by_key.work`` with no column split."""
        t = self.by_key
        return work_of_whole_rows(t.row_order, ordered_bounds(t.row_ptr, t.row_split, t.row_order))

    @property
    def row_queries(self) -> int:
        return self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all tables and tiles."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """mask_index, by_query's tensors, by_key's tensors, tile_runs, tile_bits."""
        return [self.mask_index, *self.by_query, *self.by_key, *self.tiles]

    def bands(self, number: int = 0, step: int = 1) -> Iterator[tuple[FullBlocks, PartialBlocks]]:
        """The kept blocks of a stored mask, some rows of them at a time: see ``bands_of``."""
        return bands_of(self.by_query, number, self.grid.kv_blocks, step)

    def kept(self, number: int = 0) -> tuple[FullBlocks, PartialBlocks]:
        """The kept blocks of a stored mask in table order, the full ones as runs."""
        full, partial = zip(*self.bands(number), strict=True)
        runs = (np.concatenate(axes) for axes in zip(*(blocks[1:] for blocks in full), strict=True))
        return FullBlocks(self.grid.shape, *runs), PartialBlocks(*map(np.concatenate, zip(*partial, strict=True)))

    def mask_bounds(self) -> np.ndarray:
        """The end of each stored mask's entries."""
        return self.by_query.row_ptr[:, -1].cpu().numpy().astype(np.int64)

    def tile_pairs(self, kind: np.ndarray, tile: np.ndarray, rows: slice = slice(None)) -> np.ndarray:
        """Which pairs tiles keep, given kind and tile as from ``entries``: (n, block, block) bool, or some rows of these."""
        runs, bits = (t[:, rows].cpu().numpy() for t in self.tiles)
        first, stop = unpack_runs(runs[np.where(kind == 1, tile, 0)])
        dense = runs_to_dense(first[..., None], stop[..., None], self.block_size)
        dense[kind == 2] = unpack_bits(bits[tile[kind == 2]], self.block_size)
        dense[kind == 0] = True
        return dense

    def kept_pairs(self) -> np.ndarray:
        """(masks,) int64: how many (query, key) pairs each stored mask keeps."""
        kept = np.zeros(self.masks, np.int64)
        for number in range(self.masks):
            for full, partial in self.bands(number):
                kept[number] += full.blocks * self.block_size**2 + self.pairs_of(partial.kinds, partial.tiles).sum()
        return kept

    @cached_property
    def entry_masks(self) -> np.ndarray:
        bounds = self.mask_bounds()
        return np.repeat(np.arange(self.masks), np.diff(bounds, prepend=0))

    @cached_property
    def _pairs_of_tiles(self) -> tuple[np.ndarray, np.ndarray]:
        """How many pairs each run tile and each bit tile keeps."""
        runs, bits = (t.cpu().numpy() for t in self.tiles)
        first, stop = unpack_runs(runs)
        return (stop - first).sum(1, dtype=np.int64), np.bitwise_count(bits.view(np.uint32)).sum((1, 2), dtype=np.int64)

    def pairs_of(self, kind: np.ndarray, tile: np.ndarray) -> np.ndarray:
        """How many pairs blocks keep, given kind and tile as from ``entries``: (n,) int64."""
        pairs = np.full(len(kind), self.block_size**2, np.int64)
        for which, counts in enumerate(self._pairs_of_tiles, start=1):
            pairs[kind == which] = counts[tile[kind == which]]
        return pairs

    @property
    def density(self) -> float:
        """Kept pairs / all pairs, averaged over batch and heads."""
        return float(self.kept_pairs()[self.mask_index.cpu().numpy()].mean() / (self.q_len * self.kv_len))

    @property
    def block_density(self) -> float:
        """Visited blocks / all blocks, averaged over batch and heads."""
        visited = np.diff(self.mask_bounds(), prepend=0)
        return float(visited[self.mask_index.cpu().numpy()].mean() / (self.grid.q_blocks * self.grid.kv_blocks))

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key, under any of the stored masks."""
        size, key = self.block_size, np.arange(self.block_size)
        query = key[:, None]
        for full, partial in (band for number in range(self.masks) for band in self.bands(number)):
            rows, cols, kinds, tiles = (numbers.astype(np.int64) for numbers in partial)
            # The position of a block's first key relative to that of its first query.
            first = (cols - rows) * size - self.grid.offset
            if (first >= size).any() or (full.stop * size - 1 > full.rows * size + self.grid.offset).any():
                return False
            blocks = np.stack([first, kinds, tiles, self.grid.heights(rows), self.grid.widths(cols)])[:, first + size > 1]
            first, kind, tile, height, width = np.unique(blocks, axis=1)[..., None, None]
            later = (first + key > query) & (query < height) & (key < width)  # tiles may hold anything past the last token
            if (later & self.tile_pairs(kind.ravel(), tile.ravel())).any():
                return False
        return True

    @outside_graphs
    def block_states(self) -> torch.Tensor:
        """Block states: 0 empty, 1 partial, 2 full (keeps all of its existing pairs). (q_blocks, kv_blocks) int8, or (batch | 1,
        heads | 1, q_blocks, kv_blocks) for several masks."""
        rows, cols, kind, tile = self.by_query.entries()
        full = self.pairs_of(kind, tile) == self.grid.heights(rows) * self.grid.widths(cols)
        states = np.full((self.masks, *self.grid.shape), EMPTY, np.int8)
        states[self.entry_masks, rows, cols] = np.where(full, FULL, PARTIAL)
        return self._spread_over_heads(torch.from_numpy(states))

    def kept_blocks(self) -> torch.Tensor:
        """Which blocks the mask visits, on its device without host synchronization; the reverse of ``from_blocks``. (q_blocks,
        kv_blocks) bool, or (batch | 1, heads | 1, q_blocks, kv_blocks) for several masks."""
        ends = self.by_query.row_ptr[:, 1:].flatten().contiguous()
        cols = self.by_query.col_idx
        row = torch.searchsorted(ends, torch.arange(len(cols), dtype=torch.int32, device=self.device), right=True)
        # Entries beyond row_ptr's last may hold anything, and go to the row past the last.
        kept = torch.zeros(len(ends) + 1, self.grid.kv_blocks, dtype=torch.bool, device=self.device)
        index = row * self.grid.kv_blocks + torch.where(row < len(ends), cols, 0)
        kept.view(-1).scatter_(0, index, True)  # kept[row, cols] = True would copy from the host
        return self._spread_over_heads(kept[:-1].view(self.masks, *self.grid.shape))

    def kept_keys(self, query: int, batch: int = 0, head: int = 0) -> torch.Tensor:
        """Which keys a query keeps: (kv_len,) bool on the CPU, in memory and time linear in kv_len."""
        query = check_index("query", query, self.q_len)
        return self.kept_by_queries(self.stored_index(batch, head), query, query + 1)[0]

    def kept_by_queries(self, number: int, low: int, high: int) -> torch.Tensor:
        """Which keys queries low .. high - 1 of a stored mask keep: (queries, kv_len) bool on the CPU."""
        rows = range(low // self.block_size, -(-high // self.block_size))
        return torch.from_numpy(np.concatenate([self._kept_in_row(number, row, low, high) for row in rows])[:, : self.kv_len])

    def _kept_in_row(self, number: int, row: int, low: int, high: int) -> np.ndarray:
        """``kept_by_queries`` for the queries of a block row, and keys to the end of the last block."""
        table, size = self.by_query, self.block_size
        within = slice(max(low - row * size, 0), min(high - row * size, size))
        begin, end = table.row_ptr[number, row : row + 2].tolist()
        runs, bits = table.row_split[number, row].tolist()
        cols, tile = (t[begin:end].cpu().numpy().astype(np.int64) for t in (table.col_idx, table.tile_idx))
        full, kind = runs - begin, 1 + (np.arange(runs, end) >= bits)
        kept = np.zeros((within.stop - within.start, self.grid.kv_blocks, size), bool)
        kept[:, cols[:full]] = True
        kept[:, cols[full:]] = self.tile_pairs(kind, tile[full:], within).swapaxes(0, 1)
        return kept.reshape(len(kept), -1)

    @outside_graphs
    def to_dense(self) -> torch.Tensor:
        """True where a pair is kept: (q_len, kv_len) bool, or (batch | 1, heads | 1, q_len, kv_len) for several masks. For
        inspecting short masks."""
        rows, cols, kind, tile = self.by_query.entries()
        size = self.block_size
        dense = np.zeros((self.masks, self.grid.q_blocks, self.grid.kv_blocks, size, size), bool)
        for part in dense_batches(len(rows), size):
            dense[self.entry_masks[part], rows[part], cols[part]] = self.tile_pairs(kind[part], tile[part])
        pairs = dense.transpose(0, 1, 3, 2, 4).reshape(self.masks, self.grid.q_blocks * size, -1)
        return self._spread_over_heads(torch.from_numpy(pairs[:, : self.q_len, : self.kv_len].copy()))

    def _spread_over_heads(self, per_mask: torch.Tensor) -> torch.Tensor:
        per_mask = per_mask.to(self.device)
        return per_mask[0] if self.mask_index.numel() == 1 else per_mask[self.mask_index.long()]

    def equal(self, other: "MaskTables") -> bool:
        """Whether both keep the same pairs in the same table (compiled tables are canonical)."""
        mine, theirs = ([m.mask_index, *m.by_query.in_use(), *m.by_key.in_use(), *m.tiles] for m in (self, other))
        return self.sizes == other.sizes and all(torch.equal(a, b.to(a.device)) for a, b in zip(mine, theirs, strict=True))
