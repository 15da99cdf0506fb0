"""BlockMask: the lookup table that kernels walk. Its format is decoded in the class docstring."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, singledispatch

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from . import coarsen, from_flex
from .grid import EMPTY, FULL, PARTIAL, BlockGrid
from .select_blocks import Listing, chosen, counted, listing_of, table_of_all
from .table import Entries, Table, at_least_two, table_of, transposed_table_of, with_work, work_of_whole_rows
from .tiles import EMPTY_TILE, FULL_TILE, TilePool, unpack_bits, unpack_runs

_DENSE_CHUNK = 1 << 24  # pairs decoded at a time
_CACHED_BLOCKS = 1 << 20  # of a mask that keeps every block; some 60 bytes each


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of the attention matrix to visit, and which pairs to keep in those that are kept in part.

    Make one with ``compile_mask``, ``BlockMask.from_blocks`` or ``BlockMask.per_head``. Immutable.

    q_len, kv_len: tokens. block_size: tokens on a side of a block. keeps_all: every pair is kept, known without a look
    at the device.
    mask_index: (batch | 1, heads | 1) int32, which of the stored masks each head uses.
    by_query: ``Table`` whose rows are query blocks, walked by the forward pass and dQ.
    by_key: ``Table`` whose rows are key blocks, walked by dK and dV.
    tile_runs: (run tiles, block) int32, ``first | stop << 16``: query row r of the tile keeps keys first .. stop - 1.
    tile_bits: (bit tiles, block, ceil(block / 32)) int32: row r keeps key c if bit c % 32 of word c // 32 is set.
    coarse: the same mask in blocks of 128, which ``attention`` gives to GPU kernels in its place; None where they are faster on
    these blocks, and for masks made at run time.

    A full block lies wholly inside the lengths, so that kernels need no bounds check there; a block cut short by the end
    of the queries or keys has a tile, even where it keeps all its pairs. Five lines decode the whole format::

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

    def __post_init__(self):
        # torch.compile would otherwise compile anew for each table length, and each mask has its own.
        if torch.compiler.is_compiling():
            return
        for tensor in (self.by_query.col_idx, self.by_query.tile_idx, self.by_key.col_idx, self.by_key.tile_idx, *self.tiles):
            tensor._dynamo_weak_dynamic_indices = {0}
        for tensor in (self.by_query.work, self.by_query.parts, self.by_key.work, self.by_key.parts):
            tensor._dynamo_weak_dynamic_indices = {1}

    @classmethod
    def from_entries(cls, grid: BlockGrid, entries: Entries, pool: TilePool) -> BlockMask:
        """One mask, the same for every batch and head, from kept blocks and their tiles."""
        rows, cols, tiles = entries
        if len(rows) >= 2**31:
            raise ValueError(f"the mask keeps {len(rows):,} blocks, more than 2^31 - 1; use a larger block_size")
        segment = np.zeros(len(tiles), np.int8)
        partial = np.flatnonzero(tiles != FULL_TILE)
        segment[partial] = 1 + np.asarray(pool.is_bits, bool)[tiles[partial]]
        # In 32 bits but for the key: dense masks of a million tokens take gigabytes.
        rows, cols, tiles = (axis.astype(np.int32, copy=False) for axis in entries)
        key = (rows * np.int64(3) + segment) * grid.kv_blocks + cols
        if (key[1:] < key[:-1]).any():
            order = np.argsort(key, kind="stable")
            rows, cols, tiles, segment = rows[order], cols[order], tiles[order], segment[order]
        index, stacks = np.zeros(len(tiles), np.int32), []
        for kind in (1, 2):
            # Tiles are numbered by first appearance in the table, so that equal masks have equal tables.
            used, first, inverse = np.unique(tiles[segment == kind], return_index=True, return_inverse=True)
            rank = np.argsort(np.argsort(first))
            index[segment == kind] = rank[inverse]
            stacks.append(torch.from_numpy(at_least_two(pool.stack(used[np.argsort(first)], is_bits=kind == 2))))
        keeps_all = len(tiles) == grid.q_blocks * grid.kv_blocks and _keeps_all(grid, rows, cols, tiles, pool)
        return cls(
            q_len=grid.q_len,
            kv_len=grid.kv_len,
            block_size=grid.block_size,
            keeps_all=bool(keeps_all),
            mask_index=torch.zeros((1, 1), dtype=torch.int32, device="cpu"),
            by_query=table_of(rows, cols, segment, index, grid.q_blocks),
            by_key=transposed_table_of(rows, cols, segment, index, grid.kv_blocks),
            tile_runs=stacks[0],
            tile_bits=stacks[1],
        )

    @classmethod
    def from_blocks(
        cls, blocks: torch.Tensor, block_size: int, q_len: int | None = None, kv_len: int | None = None, within=None
    ) -> BlockMask:
        """A mask of blocks from a block map computed at run time, on the map's device.

        blocks: (batch | 1, heads | 1, q_blocks, kv_blocks) or (q_blocks, kv_blocks) bool, True where a block is kept.
        block_size: tokens on a side of a block. q_len, kv_len: tokens; they default to whole blocks.
        within: which pairs of those blocks to keep, all by default: a Pattern or its spec text, or a BlockMask of one mask,
        of the same lengths and block size, on the map's device. Causal, say: the blocks on the diagonal get their tile, and
        those above are dropped.

        Only launches tensor operations of fixed shapes: no host synchronization, safe under CUDA graphs. A pattern is compiled
        at its first use with these lengths, which is on the host, and cached: use it once before a graph is captured. The
        table has room for every block that ``within`` keeps, as the number kept is not known on the host.
        """
        if not isinstance(blocks, torch.Tensor):
            raise TypeError(f"blocks must be a bool tensor; got {type(blocks).__name__}; use torch.tensor(...)")
        if blocks.dtype != torch.bool or blocks.dim() not in (2, 4):
            raise ValueError(
                "blocks must be a bool tensor of shape (batch | 1, heads | 1, q_blocks, kv_blocks) or (q_blocks, kv_blocks); "
                f"got {blocks.dtype} of shape {tuple(blocks.shape)}; compare or use .bool()"
            )
        blocks = blocks if blocks.dim() == 4 else blocks[None, None]
        q_blocks, kv_blocks = blocks.shape[2:]
        q_len = q_blocks * block_size if q_len is None else q_len
        kv_len = kv_blocks * block_size if kv_len is None else kv_len
        grid = BlockGrid(q_len, kv_len, block_size)
        if grid.shape != (q_blocks, kv_blocks):
            raise ValueError(
                f"blocks is a map of {q_blocks} x {kv_blocks} blocks, but {grid.q_len} x {grid.kv_len} tokens in blocks of "
                f"{block_size} are {grid.q_blocks} x {grid.kv_blocks}"
            )
        if within is None:
            keep_it = q_blocks * kv_blocks <= _CACHED_BLOCKS and not is_recorded(blocks.device)
            within = (_cached_of_all_blocks if keep_it else _of_all_blocks)(grid, blocks.device)
        else:
            within = one_mask("within", within, grid, blocks.device)
        listing = within._listing()
        batch, heads = blocks.shape[:2]
        if batch * heads * listing.block.numel() >= 2**31:  # of both tables
            raise ValueError(
                f"{batch} x {heads} maps of {q_blocks} x {kv_blocks} blocks are more than 2^30 - 1; use a larger block_size"
            )
        by_query, by_key = chosen(blocks.reshape(batch * heads, -1), listing)
        return cls(
            q_len=grid.q_len,
            kv_len=grid.kv_len,
            block_size=grid.block_size,
            keeps_all=False,
            mask_index=torch.arange(batch * heads, dtype=torch.int32, device=blocks.device).view(batch, heads),
            by_query=by_query,
            by_key=by_key,
            tile_runs=within.tile_runs,
            tile_bits=within.tile_bits,
        )

    @classmethod
    def from_dense(cls, kept: torch.Tensor, block_size: int = 128) -> BlockMask:
        """The mask of a bool tensor, True where a pair is kept, on its device.

        kept: (q_len, kv_len) or (batch | 1, heads | 1, q_len, kv_len) bool. For masks that exist as such a tensor: it takes a
        pass over all pairs on the host, which ``compile_mask`` does not. Equal masks of several heads are stored once.
        """
        if kept.dtype != torch.bool or kept.dim() not in (2, 4):
            raise ValueError(
                "kept must be a bool tensor of shape (q_len, kv_len) or (batch | 1, heads | 1, q_len, kv_len); got "
                f"{kept.dtype} of shape {tuple(kept.shape)}"
            )
        dense = (kept if kept.dim() == 4 else kept[None, None]).cpu().numpy()
        grid = BlockGrid(*dense.shape[2:], block_size)
        pool = TilePool(block_size)
        rows, cols = (axis.ravel() for axis in np.indices(grid.shape))
        below, beyond = grid.q_blocks * block_size - grid.q_len, grid.kv_blocks * block_size - grid.kv_len
        masks = []
        for one in dense.reshape(-1, *dense.shape[2:]):
            padded = np.pad(one, ((0, below), (0, beyond)))
            blocks = padded.reshape(grid.q_blocks, block_size, grid.kv_blocks, block_size).swapaxes(1, 2)
            tiles = pool.add_dense(blocks.reshape(-1, block_size, block_size))
            some = tiles != EMPTY_TILE
            masks.append(cls.from_entries(grid, Entries(rows[some], cols[some], tiles[some]), pool))
        return cls._of_heads(masks, dense.shape[:2]).to(kept.device)

    @classmethod
    def from_flex(cls, mask) -> BlockMask:
        """The same mask as one of FlexAttention, on its device: every pair that ``flex_attention`` would keep, and no other.

        mask: ``torch.nn.attention.flex_attention.BlockMask`` of square blocks. Its token rule is evaluated once, on the blocks
        that it lists as partial. A rule of flex_attention counts queries from 0, and so does this, whatever the lengths: the
        alignment at the end is that of patterns, not of tables. A ``score_mod`` is no part of a mask.
        """
        grid = from_flex.grid_of(mask)
        pool = TilePool(grid.block_size)
        masks = [cls.from_entries(grid, Entries(*entries), pool) for entries in from_flex.entries_of(mask, pool)]
        return cls._of_heads(masks, mask.kv_num_blocks.shape[:2]).to(mask.kv_indices.device)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable,
        batch: int | None,
        heads: int | None,
        q_len: int,
        kv_len: int | None = None,
        block_size: int = 128,
        device=None,
        *,
        progress: bool | None = None,
    ) -> BlockMask:
        """The mask of a function of FlexAttention, as of ``create_block_mask``: every pair for which it is true.

        mask_mod: called with (b, h, q_idx, kv_idx), int64 tensors without dimensions, under torch.vmap; returns a bool tensor. It
        may look numbers up in tensors on ``device``. Queries count from 0, as in FlexAttention, whatever the lengths: the
        alignment at the end is that of patterns, not of tables.
        batch, heads: how many of each; None for one mask of all. q_len, kv_len: tokens; kv_len defaults to q_len.
        device: where the function is evaluated and the table goes; the CPU by default.
        progress: whether to show a progress bar; None shows one where there are more than 2^28 pairs to look at.

        It looks at every pair, once for each batch entry and head that the function tells apart, in bounded memory: 65,536 tokens
        are 4 billion pairs, which take a CPU a minute or so, and a GPU seconds. Equal masks of several heads are stored once. A
        pattern is compiled without that; ``compile_mask`` takes causal masks, windows and documents of a million tokens.

        Raises TypeError or ValueError for a function that is not of this kind.
        """
        if not callable(mask_mod):
            raise TypeError(f"mask_mod must be a function of (b, h, q_idx, kv_idx); got {type(mask_mod).__name__}")
        for name, count in (("batch", batch), ("heads", heads)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be a positive integer, or None for one mask of all; got {count!r}")
        grid, shape = BlockGrid(q_len, q_len if kv_len is None else kv_len, block_size), (batch or 1, heads or 1)
        pool, stored = TilePool(block_size), {}
        masks = [[None] * shape[1] for _ in range(shape[0])]
        device = torch.device(device or "cpu")
        for served, entries in from_flex.all_entries_of(mask_mod, grid, shape, device, pool, progress):
            mask = cls.from_entries(grid, Entries(*entries), pool)
            mask = stored.setdefault(mask._digest, mask)
            for b, h in served:
                masks[b][h] = mask
        return cls._of_heads([mask for row in masks for mask in row], shape).to(device)

    @classmethod
    def _of_heads(cls, masks: list[BlockMask], shape: tuple[int, int]) -> BlockMask:
        """A mask for each head of each batch entry, of which there are ``shape``."""
        joined = cls.per_head(masks)
        return replace(joined, mask_index=joined.mask_index.view(shape))

    @classmethod
    def per_head(cls, masks, q_len=None, kv_len=None, block_size=128, device=None) -> BlockMask:
        """One mask for each query head; equal ones are stored once.

        masks: a list of patterns, spec texts and BlockMasks of one mask each. Patterns are compiled for the lengths and
        block size given, or for those of the first BlockMask in the list.
        """
        if isinstance(masks, (str, BlockMask)) or not isinstance(masks, Iterable):
            raise TypeError(f"per_head needs a list of patterns or masks, one for each head; got {type(masks).__name__}")
        masks = [of_flex(mask) if isinstance(mask, from_flex.FlexMask) else mask for mask in masks]
        if not masks:
            raise ValueError("per_head needs one pattern or mask for each query head; got an empty list")
        first = next((m for m in masks if isinstance(m, BlockMask)), None)
        if first is not None:
            q_len, kv_len, block_size = first.q_len, first.kv_len, first.block_size
            device = device or first.device
        compiled, cache = [], {}
        for item in masks:
            key = id(item) if isinstance(item, BlockMask) else item
            if key not in cache:
                cache[key] = as_block_mask(item, q_len=q_len, kv_len=kv_len, block_size=block_size).to("cpu")
            compiled.append(cache[key])
        for head, mask in enumerate(compiled):
            if mask.mask_index.numel() != 1:
                raise ValueError(f"per_head needs masks of one head each; mask {head} has {tuple(mask.mask_index.shape)}")
            if mask._shape_key != compiled[0]._shape_key:
                raise ValueError(
                    "per_head needs masks of one (q_len, kv_len, block_size); "
                    f"mask 0 has {compiled[0]._shape_key}, mask {head} has {mask._shape_key}"
                )
        digests = [mask._digest for mask in compiled]
        stored = dict(zip(digests, compiled, strict=True))
        numbers = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
        joined = _join([stored[digest] for digest in numbers])
        index = torch.tensor([[numbers[digest] for digest in digests]], dtype=torch.int32, device="cpu")
        return replace(joined, mask_index=index, coarse=None).with_coarse().to(device or "cpu")

    def select(self, head: int = 0, batch: int = 0) -> BlockMask:
        """The mask of one head of one batch entry, as a mask of its own, on its device."""
        mine = np.flatnonzero(self._entry_masks == self._stored(batch, head))
        rows, cols, kind, tile = (axis[mine] for axis in self.entries())
        pool, numbers = TilePool(self.block_size), np.full(len(rows), FULL_TILE, np.int64)
        for which, stored in ((1, self.tile_runs), (2, self.tile_bits)):
            chosen = np.flatnonzero(kind == which)
            used, inverse = np.unique(tile[chosen], return_inverse=True)
            tiles = stored.cpu().numpy()[used]
            if len(used):
                numbers[chosen] = (pool.add_runs(tiles) if which == 1 else pool.add_bits(tiles))[inverse]
        return BlockMask.from_entries(self.grid, Entries(rows, cols, numbers), pool).with_coarse().to(self.device)

    def _stored(self, batch: int, head: int) -> int:
        """Which stored mask a head uses."""
        index = self.mask_index
        return int(index[batch if index.shape[0] > 1 else 0, head if index.shape[1] > 1 else 0])

    def with_coarse(self) -> BlockMask:
        """The mask, and beside it the same in larger blocks, if kernels are faster on those."""
        rows, cols, *_ = self.entries()
        if not coarsen.pays(self.grid, self._entry_masks, rows, cols):
            return self
        return replace(self, coarse=self.in_blocks_of(coarsen.KERNEL_BLOCK))

    def in_blocks_of(self, block_size: int) -> BlockMask:
        """The same mask in larger blocks, on its device. Raises ValueError for a size that is not a multiple of its own."""
        if block_size % self.block_size:
            raise ValueError(f"block_size must be a multiple of the mask's {self.block_size}; got {block_size}")
        grid = BlockGrid(self.q_len, self.kv_len, block_size)
        rows, cols, kind, tile = self.entries()
        pool = TilePool(block_size)
        single = []
        for mask in range(self.masks):
            mine = np.flatnonzero(self._entry_masks == mask)

            def decode(index, mine=mine):
                return self.tile_pairs(kind[mine[index]], tile[mine[index]])

            entries = coarsen.merged(self.grid, rows[mine], cols[mine], self.entry_pairs[mine], decode, pool)
            single.append(BlockMask.from_entries(grid, Entries(*entries), pool))
        return replace(_join(single), mask_index=self.mask_index.cpu(), keeps_all=self.keeps_all).to(self.device)

    @property
    def _shape_key(self) -> tuple[int, int, int]:
        return self.q_len, self.kv_len, self.block_size

    @cached_property
    def fits(self) -> tuple:
        """All that says which q and k the mask is for."""
        return *self._shape_key, *self.mask_index.shape, self.device

    @cached_property
    def keeps_causal(self) -> bool:
        """Whether each query keeps the keys up to its own number and no others, by the table, whatever it was compiled from.
        Reads the table, once: for masks on a CPU."""
        rows = torch.arange(1, self.grid.q_blocks + 1, device=self.device)
        if self.q_len != self.kv_len or bool((self.by_query.row_ptr.diff() != rows).any()):
            return False
        row, col, kind, tile = self.entries()
        if (col > row).any() or (kind == 2).any():
            return False
        first, stop = unpack_runs(self.tile_runs.numpy())
        key = np.arange(self.block_size)
        # Rows of a tile past the last query may hold anything.
        until = np.minimum(self.block_size, self.q_len - row * self.block_size)
        whole = _first_unlike(first, stop, np.full_like(key, self.block_size))[tile] >= until
        lower = _first_unlike(first, stop, key + 1)[tile] >= until
        return bool(np.where(col == row, (kind == 1) & lower, (kind == 0) | whole).all())

    @cached_property
    def _digest(self) -> bytes:
        """Equal for equal masks on the CPU (compiled tables are canonical)."""
        digest = hashlib.sha256(repr(self._shape_key).encode())
        for tensor in self.tensors():
            digest.update(repr(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
        return digest.digest()

    @property
    def grid(self) -> BlockGrid:
        return BlockGrid(*self._shape_key)

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
        """``by_key.work`` with no column in parts."""
        t = self.by_key
        bounds = torch.cat([t.row_ptr[:, :-1, None], t.row_split, t.row_ptr[:, 1:, None]], -1)
        return work_of_whole_rows(t.row_order, bounds.take_along_dim(t.row_order[..., None].long(), 1))

    @property
    def nbytes(self) -> int:
        """Bytes of all tables and tiles."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """mask_index, the tensors of by_query, those of by_key, tile_runs, tile_bits."""
        return [self.mask_index, *self.by_query, *self.by_key, *self.tiles]

    def constants(self) -> list[torch.Tensor]:
        """``tensors()`` as constants of a compiled graph: tensors of their own, whose lengths are not marked dynamic, as nobody
        passes a constant another time."""
        return [t.detach() for t in self.tensors()]

    @classmethod
    def from_tensors(cls, q_len: int, kv_len: int, block_size: int, tensors: list[torch.Tensor], keeps_all=False) -> BlockMask:
        """The reverse of ``tensors()``."""
        size = len(Table._fields)
        by_query, by_key = Table(*tensors[1 : 1 + size]), Table(*tensors[1 + size : 1 + 2 * size])
        return cls(q_len, kv_len, block_size, keeps_all, tensors[0], by_query, by_key, *tensors[1 + 2 * size :])

    def to(self, device) -> BlockMask:
        """The same mask on another device (itself where it is there already)."""
        if torch.empty(0, device=device).device == self.device:  # resolves "cuda" to the current GPU
            return self
        moved = BlockMask.from_tensors(*self._shape_key, [t.to(device) for t in self.tensors()], self.keeps_all)
        return replace(moved, coarse=self.coarse and self.coarse.to(device))

    def walked(self, on_gpu: bool) -> BlockMask | None:
        """What a back end is given: on a GPU the coarse mask, where there is one; None where every pair is kept."""
        mask = self.coarse if on_gpu and self.coarse is not None else self
        return None if mask.keeps_all else mask

    def transpose(self) -> BlockMask:
        """The mask with queries and keys exchanged, same map of heads."""
        rows, cols, segment, tile = self.entries()
        pool = TilePool(self.block_size)
        numbers = np.full(len(rows), FULL_TILE, np.int64)
        size = self.block_size
        for low in range(0, len(rows), max(1, _DENSE_CHUNK // size**2)):
            part = slice(low, low + max(1, _DENSE_CHUNK // size**2))
            partial = segment[part] > 0
            if partial.any():
                dense = self.tile_pairs(segment[part][partial], tile[part][partial])
                numbers[part][partial] = pool.add_dense(dense.transpose(0, 2, 1))
        grid = BlockGrid(self.kv_len, self.q_len, size)
        which = np.searchsorted(self._mask_bounds(), np.arange(len(rows)), side="right")
        single = []
        for mask in range(self.masks):
            mine = which == mask
            single.append(BlockMask.from_entries(grid, Entries(cols[mine], rows[mine], numbers[mine]), pool))
        turned = replace(_join(single), mask_index=self.mask_index.cpu(), keeps_all=self.keeps_all)
        return turned.with_coarse().to(self.device)

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Every kept block of every stored mask: rows, cols, kind (0 full, 1 run tile, 2 bit tile), tile; int64 arrays in
        table order."""
        ptr, split = self.by_query.row_ptr.cpu().numpy(), self.by_query.row_split.cpu().numpy()
        counts = np.stack([split[..., 0] - ptr[:, :-1], split[..., 1] - split[..., 0], ptr[:, 1:] - split[..., 1]], -1)
        rows = np.broadcast_to(np.arange(ptr.shape[1] - 1)[None, :, None], counts.shape)
        kinds = np.broadcast_to(np.arange(3)[None, None, :], counts.shape)
        count = int(ptr[-1, -1])
        cols, tile = (t[:count].cpu().numpy().astype(np.int64) for t in (self.by_query.col_idx, self.by_query.tile_idx))
        return np.repeat(rows.ravel(), counts.ravel()), cols, np.repeat(kinds.ravel(), counts.ravel()), tile

    def _mask_bounds(self) -> np.ndarray:
        """Where the entries of each stored mask end."""
        return self.by_query.row_ptr[:, -1].cpu().numpy().astype(np.int64)

    def tile_pairs(self, kind: np.ndarray, tile: np.ndarray) -> np.ndarray:
        """Which pairs tiles keep, as ``entries`` names them: (n, block, block) bool."""
        runs, bits = (t.cpu().numpy() for t in self.tiles)
        first, stop = unpack_runs(runs[np.where(kind == 1, tile, 0)])
        column = np.arange(self.block_size)
        dense = (column >= first[:, :, None]) & (column < stop[:, :, None])
        dense[kind == 2] = unpack_bits(bits[tile[kind == 2]], self.block_size)
        dense[kind == 0] = True
        return dense

    def kept_pairs(self) -> np.ndarray:
        """(masks,) int64: how many (query, key) pairs each stored mask keeps."""
        return np.bincount(self._entry_masks, self.entry_pairs, self.masks).astype(np.int64)

    @cached_property
    def _entry_masks(self) -> np.ndarray:
        bounds = self._mask_bounds()
        return np.repeat(np.arange(self.masks), np.diff(bounds, prepend=0))

    @cached_property
    def entry_pairs(self) -> np.ndarray:
        _, _, kind, tile = self.entries()
        runs, bits = (t.cpu().numpy() for t in self.tiles)
        first, stop = unpack_runs(runs)
        in_runs = (stop - first).sum(1, dtype=np.int64)
        in_bits = np.bitwise_count(bits.view(np.uint32)).sum((1, 2), dtype=np.int64)
        pairs = np.full(len(kind), self.block_size**2, np.int64)
        pairs[kind == 1], pairs[kind == 2] = in_runs[tile[kind == 1]], in_bits[tile[kind == 2]]
        return pairs

    @property
    def density(self) -> float:
        """Kept pairs / all pairs, averaged over batch and heads."""
        return float(self.kept_pairs()[self.mask_index.cpu().numpy()].mean() / (self.q_len * self.kv_len))

    @property
    def block_density(self) -> float:
        """Visited blocks / all blocks, averaged over batch and heads."""
        visited = np.diff(self._mask_bounds(), prepend=0)
        return float(visited[self.mask_index.cpu().numpy()].mean() / (self.grid.q_blocks * self.grid.kv_blocks))

    def block_states(self) -> torch.Tensor:
        """States of blocks: 0 empty, 1 partial, 2 full (all of its pairs that exist are kept).

        (q_blocks, kv_blocks) int8, or (batch | 1, heads | 1, q_blocks, kv_blocks) for several masks.
        """
        rows, cols, *_ = self.entries()
        full = self.entry_pairs == self.grid.heights(rows) * self.grid.widths(cols)
        states = np.full((self.masks, *self.grid.shape), EMPTY, np.int8)
        states[self._entry_masks, rows, cols] = np.where(full, FULL, PARTIAL)
        return self._per_head(torch.from_numpy(states))

    def kept_blocks(self) -> torch.Tensor:
        """Which blocks the mask visits, on its device and without a host synchronization; the reverse of ``from_blocks``.

        (q_blocks, kv_blocks) bool, or (batch | 1, heads | 1, q_blocks, kv_blocks) for several masks.
        """
        ends = self.by_query.row_ptr[:, 1:].flatten().contiguous()
        cols = self.by_query.col_idx
        row = torch.searchsorted(ends, counted(len(cols), self.device), right=True)
        # Entries past the last that row_ptr names come to the row past the last.
        kept = torch.zeros(len(ends) + 1, self.grid.kv_blocks, dtype=torch.bool, device=self.device)
        kept.view(-1).scatter_(0, row * self.grid.kv_blocks + cols, True)  # kept[row, cols] = True would copy from the host
        return self._per_head(kept[:-1].view(self.masks, *self.grid.shape))

    def _listing(self) -> Listing:
        """The entries of one mask, to choose from; made once."""
        known = self.__dict__.get("_listed")
        if known is None:
            known = listing_of(self.by_query, self.by_key)
            if not is_recorded(self.device):
                self.__dict__["_listed"] = known
        return known

    def kept_keys(self, query: int, batch: int = 0, head: int = 0) -> torch.Tensor:
        """Which keys a query keeps: (kv_len,) bool on the CPU, in memory and time linear in kv_len."""
        return self._line(self.by_query, query, self.q_len, batch, head, axis=1)[: self.kv_len]

    def kept_queries(self, key: int, batch: int = 0, head: int = 0) -> torch.Tensor:
        """Which queries keep a key: (q_len,) bool on the CPU."""
        return self._line(self.by_key, key, self.kv_len, batch, head, axis=2)[: self.q_len]

    def _line(self, table: Table, token: int, length: int, batch: int, head: int, axis: int) -> torch.Tensor:
        if not 0 <= token < length:
            raise IndexError(f"the mask has tokens 0 to {length - 1} on that side; got {token}")
        mask = self._stored(batch, head)
        row, place = divmod(token, self.block_size)
        begin, end = table.row_ptr[mask, row : row + 2].tolist()
        runs, bits = table.row_split[mask, row].tolist()
        cols, tile = (t[begin:end].cpu().numpy().astype(np.int64) for t in (table.col_idx, table.tile_idx))
        entry = np.arange(begin, end)
        kept = np.zeros((self.grid.kv_blocks if axis == 1 else self.grid.q_blocks, self.block_size), bool)
        kept[cols] = self.tile_pairs((entry >= runs).astype(np.int64) + (entry >= bits), tile).take(place, axis)
        return torch.from_numpy(kept.reshape(-1))

    def to_dense(self) -> torch.Tensor:
        """True where a pair is kept: (q_len, kv_len) bool, or (batch | 1, heads | 1, q_len, kv_len) for several masks.

        Takes q_len x kv_len bytes a mask: for looking at short masks and for tests.
        """
        rows, cols, kind, tile = self.entries()
        size = self.block_size
        dense = np.zeros((self.masks, self.grid.q_blocks, self.grid.kv_blocks, size, size), bool)
        for low in range(0, len(rows), max(1, _DENSE_CHUNK // size**2)):
            part = slice(low, low + max(1, _DENSE_CHUNK // size**2))
            dense[self._entry_masks[part], rows[part], cols[part]] = self.tile_pairs(kind[part], tile[part])
        dense = dense.transpose(0, 1, 3, 2, 4).reshape(self.masks, self.grid.q_blocks * size, -1)
        return self._per_head(torch.from_numpy(dense[:, : self.q_len, : self.kv_len].copy()))

    def _per_head(self, per_mask: torch.Tensor) -> torch.Tensor:
        per_mask = per_mask.to(self.device)
        return per_mask[0] if self.mask_index.numel() == 1 else per_mask[self.mask_index.long()]

    def equal(self, other: BlockMask) -> bool:
        """Whether both keep the same pairs in the same table (compiled tables are canonical)."""
        mine, theirs = self.tensors(), other.tensors()
        return self._shape_key == other._shape_key and all(
            torch.equal(a, b.to(a.device)) for a, b in zip(mine, theirs, strict=True)
        )

    def __getstate__(self):
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __repr__(self):
        return (
            f"BlockMask(q_len={self.q_len}, kv_len={self.kv_len}, block_size={self.block_size}, masks={self.masks}, "
            f"batch_heads={tuple(self.mask_index.shape)}, nbytes={self.nbytes}, device={str(self.device)!r})"
        )


@singledispatch
def as_block_mask(mask, **lengths) -> BlockMask:
    """A BlockMask from whatever stands for one. The compiler registers patterns here, so that this module, which knows
    the table's format, need not know how tables are compiled."""
    raise TypeError(f"a mask must be a Pattern, its spec text or a BlockMask; got {type(mask).__name__}{_way_out(mask)}")


def _way_out(mask) -> str:
    """How to make a mask of what is none; nothing where there is no saying."""
    if isinstance(mask, torch.Tensor):
        return "; use BlockMask.from_dense for a bool tensor of pairs, from_blocks for one of blocks"
    if isinstance(mask, (list, tuple)):
        return "; use BlockMask.per_head for a mask of each head"
    if isinstance(mask, type):
        return f" {mask.__name__} itself; call it for a pattern"
    if callable(mask):
        return "; use from_mask_fn for a function of positions (q, kv), BlockMask.from_mask_mod for one of (b, h, q_idx, kv_idx)"
    return "; use 'full' to keep every pair" if mask is None else ""


@as_block_mask.register(BlockMask)
def _(mask, **lengths) -> BlockMask:
    return mask


_of_flex = WeakIdKeyDictionary()  # FlexAttention's mask -> (what it was made of, BlockMask)


@as_block_mask.register(from_flex.FlexMask)
def of_flex(mask, **lengths) -> BlockMask:
    """``BlockMask.from_flex``, once for each mask: again only where its function or tables were replaced by others."""
    if torch.compiler.is_compiling():
        raise TypeError(
            "torch.compile cannot look into a FlexAttention mask; make mask = BlockMask.from_flex(mask) outside of the compiled "
            "function and pass that"
        )
    made_of = from_flex.parts_of(mask)
    known = _of_flex.get(mask)
    if known is not None and all(a is b for a, b in zip(known[0], made_of, strict=True)):
        _keep_if_captured(known[1])
        return known[1]
    if is_recorded(mask.kv_indices.device):
        raise ValueError(
            "a FlexAttention mask is read on the host, which cannot be captured in a CUDA graph or traced; make mask = "
            "BlockMask.from_flex(mask) before, or call attention with it once before"
        )
    made = BlockMask.from_flex(mask)
    _of_flex[mask] = made_of, made
    return made


def of_another_library(mask) -> BlockMask:
    """A BlockMask from what is neither one nor a pattern. Raises TypeError, which says what a mask must be."""
    # torch.compile cannot trace into the dispatch.
    return of_flex(mask) if isinstance(mask, from_flex.FlexMask) else as_block_mask(mask)


def _keep_if_captured(mask: BlockMask) -> None:
    """What a CUDA graph is captured with stays for good, as replays read it."""
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[id(mask)] = mask


def compiled_once(pattern, q_len: int, kv_len: int, block_size: int, device: torch.device) -> BlockMask:
    """``as_block_mask`` of a pattern or its spec text, cached. Within torch.compile, a constant of the compiled graph; under a
    FakeTensorMode, of its tensors."""
    if not torch.compiler.is_compiling():
        mask = _cached_mask(pattern, q_len, kv_len, block_size, device)
        _keep_if_captured(mask)
        fake = torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if not fake:
            return mask
        tensors = [fake.from_tensor(t) for t in mask.tensors()]
        return BlockMask.from_tensors(q_len, kv_len, block_size, tensors, mask.keeps_all)
    # operator.index makes symbolic lengths plain numbers: a compiled graph holds one mask, and another length needs another.
    q_len, kv_len = operator.index(q_len), operator.index(kv_len)
    keeps_all, tensors = _constant_tables(pattern, q_len, kv_len, block_size, device)
    return BlockMask.from_tensors(q_len, kv_len, block_size, tensors, keeps_all)


_captured: dict[int, BlockMask] = {}


def _constant_tables(pattern, q_len, kv_len, block_size, device) -> tuple[bool, list[torch.Tensor]]:
    """A mask's tables as constants of the compiled graph: torch.compile looks into lists there, not into a BlockMask."""
    mask = _cached_mask(pattern, q_len, kv_len, block_size, device)
    with plain_tensors():
        return mask.keeps_all, mask.constants()


# What torch.compiler.assume_constant_result sets; calling that would import torch._dynamo, and with it triton.
_constant_tables._dynamo_marked_constant = True


@contextmanager
def plain_tensors():
    """Exporters show whatever is computed to their modes, and tables are made of plain tensors."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@lru_cache(maxsize=64)
def _cached_mask(pattern, q_len, kv_len, block_size, device) -> BlockMask:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the table of {pattern} for {q_len} queries and {kv_len} keys is not there yet, and cannot be made while a CUDA graph "
            "is captured; make the call once before, or pass compile_mask(...)"
        )
    # In a thread of its own: dispatch modes, inference mode, default devices and the memory pool of torch.compile's CUDA graphs
    # are a thread's, and a table that stays is to be of none of them.
    with ThreadPoolExecutor(1) as thread:
        lengths = {"q_len": q_len, "kv_len": kv_len, "block_size": block_size, "device": device}
        return thread.submit(as_block_mask, pattern, **lengths).result()


def one_mask(name: str, mask, grid: BlockGrid, device: torch.device) -> BlockMask:
    """What stands for a mask of these lengths and blocks as a BlockMask of one mask on ``device``; patterns from the cache.
    Raises ValueError, which calls it ``name``, where it does not fit."""
    if isinstance(mask, from_flex.FlexMask):
        mask = of_flex(mask)
    if not isinstance(mask, BlockMask):
        # torch.compile cannot trace into the dispatch.
        if not torch.compiler.is_compiling() and as_block_mask.dispatch(type(mask)) is as_block_mask.dispatch(object):
            return as_block_mask(mask)  # says what a mask must be
        return compiled_once(mask, *_lengths(grid), device)
    if mask.masks != 1 or mask.mask_index.numel() != 1:
        raise ValueError(f"{name} must be one mask for all heads; got one with {tuple(mask.mask_index.shape)} (batch, heads)")
    if mask._shape_key != _lengths(grid):
        raise ValueError(
            f"{name} must have the lengths and block size of the blocks, (q_len, kv_len, block_size) = {_lengths(grid)}; got "
            f"{mask._shape_key}; compile it for these, or pass the pattern itself"
        )
    if mask.device != device:
        raise ValueError(f"{name} is on {mask.device}, what it is to limit on {device}; use {name}.to({str(device)!r})")
    return mask


def _lengths(grid: BlockGrid) -> tuple[int, int, int]:
    return grid.q_len, grid.kv_len, grid.block_size


def _keeps_all(grid: BlockGrid, rows, cols, tiles, pool: TilePool) -> bool:
    kept = np.append(pool.kept, grid.block_size**2)
    return np.array_equal(kept[np.maximum(tiles, -1)], grid.heights(rows) * grid.widths(cols))


def _of_all_blocks(grid: BlockGrid, device: torch.device) -> BlockMask:
    """The mask that keeps every pair, made on the device: no copy from the host, which each replay of a graph would repeat."""
    size, cut_row, cut_col = grid.block_size, grid.q_len % grid.block_size, grid.kv_len % grid.block_size
    # Which tile says where a cut block ends: 0 in the last column, 1 in the last row, 2 in the corner.
    tile = torch.zeros(grid.shape, dtype=torch.int32, device=device)
    if cut_row:
        tile[-1] = 1
        tile[-1, -1:] += cut_col > 0
    heights = [size, cut_row or size, cut_row or size]
    widths = [cut_col or size, size, cut_col or size]
    token = counted(size, device)
    runs = [(token < h).to(torch.int32) * (w << 16) for h, w in zip(heights, widths, strict=True)]
    return BlockMask(
        q_len=grid.q_len,
        kv_len=grid.kv_len,
        block_size=size,
        keeps_all=True,
        mask_index=torch.zeros((1, 1), dtype=torch.int32, device=device),
        by_query=table_of_all(tile, cut_row > 0, cut_col > 0),
        by_key=table_of_all(tile.T, cut_col > 0, cut_row > 0),
        tile_runs=torch.stack(runs),
        tile_bits=torch.zeros((2, size, -(-size // 32)), dtype=torch.int32, device=device),
    )


_cached_of_all_blocks = lru_cache(maxsize=16)(_of_all_blocks)


def is_recorded(device: torch.device) -> bool:
    """Whether operations are only recorded now, for a CUDA graph or by torch.compile, or shown to a mode, which may put other
    tensors in their place: their results are not to be kept."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _join(masks: list[BlockMask]) -> BlockMask:
    """Several stored masks behind one table, their tiles pooled. mask_index is left as that of the first."""
    if len(masks) == 1:
        return masks[0]
    pools, index = [], []
    for kind in range(2):
        stacked = torch.cat([m.tiles[kind] for m in masks])
        pool, inverse = torch.unique(stacked.flatten(1), dim=0, return_inverse=True)
        pools.append(torch.from_numpy(at_least_two(pool.view(-1, *stacked.shape[1:]).numpy())))
        index.append(inverse.split([len(m.tiles[kind]) for m in masks]))
    tables = []
    for name in ("by_query", "by_key"):
        parts, base = [], 0
        for number, mask in enumerate(masks):
            table = getattr(mask, name)
            count = int(table.row_ptr[0, -1])
            ptr, split, tile = table.row_ptr, table.row_split, table.tile_idx[:count].long()
            entry = torch.arange(count, device=ptr.device)
            row = torch.searchsorted(ptr[0].contiguous(), entry, right=True) - 1
            kinds = torch.where(entry >= split[0, row, 1], 1, 0)
            remapped = torch.where(kinds == 1, index[1][number][tile.clamp(max=len(index[1][number]) - 1)], 0)
            in_runs = (entry >= split[0, row, 0]) & (kinds == 0)
            remapped = torch.where(in_runs, index[0][number][tile.clamp(max=len(index[0][number]) - 1)], remapped)
            parts.append((ptr + base, split + base, table.row_order, table.col_idx[:count], remapped.to(torch.int32)))
            base += count
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        joined[3:] = [torch.from_numpy(at_least_two(t.numpy())) for t in joined[3:]]
        tables.append(with_work(*joined))
    return replace(
        masks[0],
        keeps_all=all(m.keeps_all for m in masks),
        by_query=tables[0],
        by_key=tables[1],
        tile_runs=pools[0],
        tile_bits=pools[1],
    )


# torch.load takes a saved mask without weights_only=False.
torch.serialization.add_safe_globals([BlockMask, Table])


def _first_unlike(first: np.ndarray, stop: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(tiles,): the first row of each tile of runs that does not keep the keys 0 .. wanted - 1; the block size for none."""
    unlike = (first != 0) | (stop != wanted)
    return np.where(unlike.any(1), unlike.argmax(1), unlike.shape[1])
