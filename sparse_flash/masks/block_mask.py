"""BlockMask: the lookup table that kernels iterate over. The class docstring defines its format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask

from ..compat.dynamo import mark_lengths_dynamic, outside_graphs, outside_inference, with_fixed_lengths
from ..compat.pytorch import is_recorded
from .costs import is_dense_as_fast
from .grid import EMPTY, FULL, PARTIAL, BlockGrid, check_index
from .pattern import Pattern
from .select_blocks import arange_int32
from .table import FullBlocks, PartialBlocks, Table, bands_of, ordered_bounds, work_of_whole_rows
from .tiles import dense_batches, unpack_bits, unpack_runs

if TYPE_CHECKING:
    from . import methods

Device: TypeAlias = torch.device | str

# Masks made on the host, by the address of ``by_query.work``.
_host_masks: WeakValueDictionary[int, BlockMask] = WeakValueDictionary()


def _public(names: Iterable[str]) -> list[str]:
    """What ``dir`` shows of a BlockMask: what users read of it, and not what the package keeps with it."""
    fields = "q_len kv_len block_size keeps_all mask_index by_query by_key tile_runs tile_bits device masks nbytes "
    makers = "from_blocks from_bsr from_dense from_flex from_lists from_mask_mod per_batch per_head select to transpose "
    contents = "density block_density block_states kept_blocks kept_keys to_dense is_causal equal"
    return [name for name in names if name in (fields + makers + contents).split() or name.startswith("__")]


class _ShowsPublicNames(type):
    def __dir__(cls) -> list[str]:
        return _public(super().__dir__())


@dataclass(frozen=True, eq=False)
class BlockMask(metaclass=_ShowsPublicNames):
    """Which blocks of the attention matrix to visit, and which pairs to keep in partial blocks.

    Create one with ``compile_mask``, ``BlockMask.from_blocks`` or ``BlockMask.per_head``. Immutable.

    q_len, kv_len: tokens. block_size: tokens on a side of a block. keeps_all: every pair is kept; known without reading the device.
    mask_index: (batch | 1, heads | 1) int32, which stored mask each head uses.
    by_query: ``Table`` whose rows are query blocks, for the forward pass and dQ.
    by_key: ``Table`` whose rows are key blocks, for dK and dV.
    tile_runs: (run tiles, block) int32, ``first | stop << 16``: query row r of the tile keeps keys first .. stop - 1.
    tile_bits: (bit tiles, block, ceil(block / 32)) int32: row r keeps key c if bit c % 32 of word c // 32 is set.
    coarse: the same mask in blocks of 128, which ``attention`` passes to GPU kernels instead; None where they are faster on these
    blocks, and for masks made at run time.
    from_host: whether the table was made on the host, once, so that others may be derived from it.
    document_order: whether the rows of both tables are in order of documents (``groups_of``); known for tables made on the host.
    slow: whether dense attention, or causal attention if no query sees a later key, is predicted to be as fast; known of copies on
    GPUs of masks made on the host.

    A full block lies entirely inside the lengths, so kernels need no bounds check there; a block cut off by the end of the queries
    or keys has a tile, even if it keeps all its pairs. Five lines decode the whole format::

        for r in range(q_blocks):
            begin, end = t.row_ptr[m, r], t.row_ptr[m, r + 1]
            runs, bits = t.row_split[m, r]                       # begin <= runs <= bits <= end
            for e in range(begin, end):                          # block (r, t.col_idx[e]):
                tile = None if e < runs else (tile_runs if e < bits else tile_bits)[t.tile_idx[e]]
    """

    q_len: int
    kv_len: int
    block_size: int
    keeps_all: bool
    mask_index: torch.Tensor
    by_query: Table
    by_key: Table
    tile_runs: torch.Tensor
    tile_bits: torch.Tensor
    coarse: BlockMask | None = None
    from_host: bool = False
    document_order: bool = False
    slow: bool = False

    # The mask whose blocks these are a choice of, made on the device: then launches are kept with that one, for all such masks.
    selected_from: ClassVar[BlockMask | None] = None
    starts: ClassVar[None] = None  # blocks start at multiples of their size, except in ``by_document``

    if TYPE_CHECKING:  # ``methods`` defines what makes masks, above this module and the compiler, and attaches it
        from_blocks = staticmethod(methods.from_blocks)
        from_bsr = staticmethod(methods.from_bsr)
        from_dense = staticmethod(methods.from_dense)
        from_flex = staticmethod(methods.from_flex)
        from_lists = staticmethod(methods.from_lists)
        from_mask_mod = staticmethod(methods.from_mask_mod)
        per_batch = staticmethod(methods.per_batch)
        per_head = staticmethod(methods.per_head)
        select = methods.select
        transpose = methods.transpose
        in_blocks_of = methods.in_blocks_of
        tall = property(methods.tall)
        by_document = property(methods.by_document)

    def __post_init__(self) -> None:
        # Otherwise torch.compile would recompile for each table length and number of stored masks, and each mask has its own.
        if torch.compiler.is_compiling():
            return
        for table in (self.by_query, self.by_key):
            for tensor in (table.col_idx, table.tile_idx, table.row_ptr, table.row_split, table.row_order):
                mark_lengths_dynamic(tensor, 0)
            for tensor in (table.work, table.splits):
                mark_lengths_dynamic(tensor, 0, 1)
        for tensor in self.tiles:
            mark_lengths_dynamic(tensor, 0)
        if self.from_host and type(self.by_query.work) is torch.Tensor and not self.by_query.work.is_meta:
            _host_masks.setdefault(self.by_query.work.data_ptr(), self)

    def _does_not_combine(self, *_: object) -> NoReturn:
        raise TypeError(
            "compiled masks do not combine; combine patterns with & | ~ and compile the result, or make a mask of to_dense() "
            "tensors by BlockMask.from_dense"
        )

    __and__ = __rand__ = __or__ = __ror__ = __invert__ = _does_not_combine

    def stored_index(self, batch: int, head: int) -> int:
        """Which stored mask a head uses."""
        batches, heads = self.mask_index.shape  # 1 stands for any number
        batch = check_index("batch", batch, batches) if batches > 1 else 0
        head = check_index("head", head, heads) if heads > 1 else 0
        return int(self.mask_index[batch, head])

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.q_len, self.kv_len, self.block_size

    @cached_property
    def keeps_causal(self) -> bool:
        """Whether each query keeps exactly the keys up to its own index, by the table, which is read once: for masks on a CPU."""
        rows, tokens = self.grid.q_blocks, self.q_len
        if tokens != self.kv_len or (np.diff(self.mask_bounds(), prepend=0) != rows * (rows + 1) // 2).any():
            return False
        return self.is_causal and bool((self.kept_pairs() == tokens * (tokens + 1) // 2).all())

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
        """Queries in a row of ``by_query``."""
        return self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all tables and tiles."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """mask_index, by_query's tensors, by_key's tensors, tile_runs, tile_bits."""
        return [self.mask_index, *self.by_query, *self.by_key, *self.tiles]

    def constants(self) -> list[torch.Tensor]:
        """``tensors()`` as constants of a compiled graph: separate tensors, whose lengths are not dynamic."""
        return [with_fixed_lengths(t.detach()) for t in self.tensors()]

    @classmethod
    def from_tensors(
        cls, q_len: int, kv_len: int, block_size: int, tensors: list[torch.Tensor], keeps_all: bool = False
    ) -> BlockMask:
        """The reverse of ``tensors()``."""
        size = len(Table._fields)
        by_query, by_key = Table(*tensors[1 : 1 + size]), Table(*tensors[1 + size : 1 + 2 * size])
        tile_runs, tile_bits = tensors[1 + 2 * size :]
        return cls(q_len, kv_len, block_size, keeps_all, tensors[0], by_query, by_key, tile_runs, tile_bits)

    @classmethod
    def find_by_tensors(cls, q_len: int, kv_len: int, block_size: int, tensors: list[torch.Tensor]) -> BlockMask:
        """The mask made on the host that has these tensors, for operators, which receive nothing else. Tables that are derived from
        that mask, and remembered launches, come with it. Without such a mask, ``from_tensors``."""
        found = _host_masks.get(tensors[1 + Table._fields.index("work")].data_ptr())
        if found is not None and found.sizes == (q_len, kv_len, block_size):
            pairs = zip(found.tensors(), tensors, strict=True)
            if all(one.data_ptr() == other.data_ptr() and one.shape == other.shape for one, other in pairs):
                return found
        return cls.from_tensors(q_len, kv_len, block_size, tensors)

    @outside_inference
    def to(self, device: Device) -> BlockMask:
        """The same mask on another device (itself if already there). Returns the same copy as long as that is held anywhere, so
        modules that share a mask share one after each was moved."""
        device = torch.empty(0, device=device).device  # resolves "cuda" to the current GPU
        if device == self.device:
            return self
        if is_recorded(device):
            return self._copied_to(device)
        moved = self._copies.get(device)
        if moved is None:
            moved = self._copies[device] = self._copied_to(device)
        return moved

    @cached_property
    def _copies(self) -> WeakValueDictionary[torch.device, BlockMask]:
        return WeakValueDictionary()

    def _copied_to(self, device: torch.device) -> BlockMask:
        moved = BlockMask.from_tensors(*self.sizes, [t.to(device) for t in self.tensors()], self.keeps_all)
        coarse, slow = self.coarse and self.coarse.to(device), self.slow
        if self.from_host and self.device.type == "cpu" and (table := self.kernel_table(True)):
            slow = is_dense_as_fast(table)
        return replace(moved, coarse=coarse, from_host=self.from_host, document_order=self.document_order, slow=slow)

    def kernel_table(self, on_gpu: bool) -> BlockMask | None:
        """Returns what a back end iterates over: on a GPU the coarse mask, if there is one; None if every pair is kept."""
        mask = self.coarse if on_gpu and self.coarse is not None else self
        return None if mask.keeps_all else mask

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Every kept block of every stored mask, as ``Table.entries`` gives it."""
        return self.by_query.entries()

    def bands(self, number: int = 0, step: int = 1) -> Iterator[tuple[FullBlocks, PartialBlocks]]:
        """The kept blocks of a stored mask, some rows of them at a time, a multiple of ``step``: the full ones as runs, so that a
        dense mask takes little more memory than its table."""
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
        column = np.arange(self.block_size)
        dense = (column >= first[:, :, None]) & (column < stop[:, :, None])
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
        """Block states: 0 empty, 1 partial, 2 full (keeps all of its existing pairs).

        (q_blocks, kv_blocks) int8, or (batch | 1, heads | 1, q_blocks, kv_blocks) for several masks.
        """
        rows, cols, kind, tile = self.entries()
        full = self.pairs_of(kind, tile) == self.grid.heights(rows) * self.grid.widths(cols)
        states = np.full((self.masks, *self.grid.shape), EMPTY, np.int8)
        states[self.entry_masks, rows, cols] = np.where(full, FULL, PARTIAL)
        return self._spread_over_heads(torch.from_numpy(states))

    def kept_blocks(self) -> torch.Tensor:
        """Which blocks the mask visits, on its device without host synchronization; the reverse of ``from_blocks``.

        (q_blocks, kv_blocks) bool, or (batch | 1, heads | 1, q_blocks, kv_blocks) for several masks.
        """
        ends = self.by_query.row_ptr[:, 1:].flatten().contiguous()
        cols = self.by_query.col_idx
        row = torch.searchsorted(ends, arange_int32(len(cols), self.device), right=True)
        # Entries beyond row_ptr's last may hold anything, and go to the row past the last.
        kept = torch.zeros(len(ends) + 1, self.grid.kv_blocks, dtype=torch.bool, device=self.device)
        index = row * self.grid.kv_blocks + torch.where(row < len(ends), cols, 0)
        kept.view(-1).scatter_(0, index, True)  # kept[row, cols] = True would copy from the host
        return self._spread_over_heads(kept[:-1].view(self.masks, *self.grid.shape))

    def kept_keys(self, query: int, batch: int = 0, head: int = 0) -> torch.Tensor:
        """Which keys a query keeps: (kv_len,) bool on the CPU, in memory and time linear in kv_len."""
        row, within = divmod(check_index("query", query, self.q_len), self.block_size)
        return self.kept_by_queries(self.stored_index(batch, head), row, slice(within, within + 1))[0]

    def kept_by_queries(self, number: int, row: int, within: slice) -> torch.Tensor:
        """Which keys neighbouring queries of one block row keep: (queries, kv_len) bool on the CPU. number: of the stored mask.
        within: the queries, counted from the first of the block row."""
        table, queries = self.by_query, within.stop - within.start
        begin, end = table.row_ptr[number, row : row + 2].tolist()
        runs, bits = table.row_split[number, row].tolist()
        cols, tile = (t[begin:end].cpu().numpy().astype(np.int64) for t in (table.col_idx, table.tile_idx))
        full, kind = runs - begin, 1 + (np.arange(runs, end) >= bits)
        kept = np.zeros((queries, self.grid.kv_blocks, self.block_size), bool)
        kept[:, cols[:full]] = True
        kept[:, cols[full:]] = self.tile_pairs(kind, tile[full:], within).swapaxes(0, 1)
        return torch.from_numpy(kept.reshape(queries, -1))[:, : self.kv_len]

    @outside_graphs
    def to_dense(self) -> torch.Tensor:
        """True where a pair is kept: (q_len, kv_len) bool, or (batch | 1, heads | 1, q_len, kv_len) for several masks.

        Takes q_len x kv_len bytes per mask: for inspecting short masks and for tests.
        """
        rows, cols, kind, tile = self.entries()
        size = self.block_size
        dense = np.zeros((self.masks, self.grid.q_blocks, self.grid.kv_blocks, size, size), bool)
        for part in dense_batches(len(rows), size):
            dense[self.entry_masks[part], rows[part], cols[part]] = self.tile_pairs(kind[part], tile[part])
        pairs = dense.transpose(0, 1, 3, 2, 4).reshape(self.masks, self.grid.q_blocks * size, -1)
        return self._spread_over_heads(torch.from_numpy(pairs[:, : self.q_len, : self.kv_len].copy()))

    def _spread_over_heads(self, per_mask: torch.Tensor) -> torch.Tensor:
        per_mask = per_mask.to(self.device)
        return per_mask[0] if self.mask_index.numel() == 1 else per_mask[self.mask_index.long()]

    def equal(self, other: BlockMask) -> bool:
        """Whether both keep the same pairs in the same table (compiled tables are canonical)."""
        mine, theirs = ([m.mask_index, *m.by_query.in_use(), *m.by_key.in_use(), *m.tiles] for m in (self, other))
        return self.sizes == other.sizes and all(torch.equal(a, b.to(a.device)) for a, b in zip(mine, theirs, strict=True))

    def __dir__(self) -> list[str]:
        return _public(super().__dir__())

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __repr__(self) -> str:
        return (
            f"BlockMask(q_len={self.q_len}, kv_len={self.kv_len}, block_size={self.block_size}, masks={self.masks}, "
            f"batch_heads={tuple(self.mask_index.shape)}, nbytes={self.nbytes}, device={str(self.device)!r})"
        )


def check_batch_and_heads(entries: Sequence[int], batch: int, heads: int) -> None:
    """Raises ValueError unless a mask with so many entries, (batch, heads), has one of each for all, or as many as a call."""
    for name, size, wanted in (("batch", entries[0], batch), ("heads", entries[1], heads)):
        if size != 1 and size != wanted:  # Dynamo does not compare symbolic sizes with "in"
            for_all = ", or 1 for a mask of all" if wanted > 1 else ""
            raise ValueError(f"the mask's {name} must be q's, {wanted}{for_all}; got {size}; make it for {wanted}")


# Anything that can stand for a mask.
MaskLike: TypeAlias = Pattern | str | BlockMask | FlexMask

# Lets torch.load read a saved mask without weights_only=False.
torch.serialization.add_safe_globals([BlockMask, Table])
