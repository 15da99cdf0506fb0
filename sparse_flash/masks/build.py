"""Makes BlockMasks: from blocks and tiles, block maps, dense tensors, FlexAttention functions, per-head masks, and other
BlockMasks. ``BlockMask``'s class methods are the public names of these functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import torch

from ..compat.dynamo import outside_graphs, outside_inference
from ..compat.pytorch import in_differentiating_transform
from . import block_mask, coarsen, from_flex
from .block_mask import BlockMask, Device, MaskLike
from .cache import as_block_mask, from_flex_once, is_recorded, made_apart, one_mask
from .document_blocks import document_blocks
from .from_flex import FlexMask, MaskFunction
from .grid import BlockGrid, ranges
from .memory import remembered
from .pattern import Pattern, check_parameters
from .select_blocks import Listing, chosen, counted, listing_of, table_of_all
from .table import Entries, FullBlocks, PartialBlocks, at_least_two, in_table_order, table_of, with_work
from .tall import tall_rows
from .tiles import EMPTY_TILE, FULL_TILE, TilePool, dense_batches, tile_content, unique_rows
from .walked_tables import DocumentBlocks, TallRows

DERIVED = TypeVar("DERIVED")

_MOST_KEPT_BLOCKS = 1 << 20  # of a mask that keeps every block; some 60 bytes each


def from_entries(grid: BlockGrid, entries: Entries, pool: TilePool, full: FullBlocks | None = None) -> BlockMask:
    """One mask, the same for every batch and head, from kept blocks and their tiles. full: full blocks that are not among the
    entries."""
    check_blocks(len(entries.rows) + (0 if full is None else full.blocks))
    full, partial, stacks = in_table_order(entries, grid.shape, pool, full)
    by_query, by_key = table_of(full, partial), table_of(full.transposed(), partial.transposed())
    return BlockMask(
        q_len=grid.q_len,
        kv_len=grid.kv_len,
        block_size=grid.block_size,
        keeps_all=_keeps_all(grid, full, entries, pool),
        mask_index=torch.zeros((1, 1), dtype=torch.int32, device="cpu"),
        by_query=by_query,
        by_key=by_key,
        tile_runs=stacks[0],
        tile_bits=stacks[1],
        from_host=True,
        grouped=by_query.is_grouped() and by_key.is_grouped(),
    )


def check_blocks(count: int) -> None:
    """Raises ValueError for more blocks than a table can number."""
    if count >= 2**31:
        raise ValueError(f"the mask keeps {count:,} blocks, more than 2^31 - 1; use a larger block_size")


def _keeps_all(grid: BlockGrid, full: FullBlocks, entries: Entries, pool: TilePool) -> bool:
    partial = np.flatnonzero(entries.tiles != FULL_TILE)
    if full.blocks + len(partial) != grid.q_blocks * grid.kv_blocks:
        return False
    rows, cols, tiles = (axis[partial] for axis in entries)
    return np.array_equal(np.array(pool.kept, np.int64)[tiles], grid.heights(rows) * grid.widths(cols))


@outside_inference
def from_blocks(blocks: torch.Tensor, block_size: int, q_len: int | None, kv_len: int | None, within: MaskLike | None) -> BlockMask:
    """See ``BlockMask.from_blocks``."""
    if not isinstance(blocks, torch.Tensor):
        raise TypeError(f"blocks must be a bool tensor; got {type(blocks).__name__}; use torch.tensor(...)")
    if blocks.dtype != torch.bool or blocks.dim() not in (2, 4):
        raise ValueError(
            "blocks must be a bool tensor of shape (batch | 1, heads | 1, q_blocks, kv_blocks) or (q_blocks, kv_blocks); "
            f"got {blocks.dtype} of shape {tuple(blocks.shape)}; compare or use .bool()"
        )
    if 0 in blocks.shape:
        raise ValueError(f"blocks must not be empty; got shape {tuple(blocks.shape)}")
    if not torch.compiler.is_compiling() and in_differentiating_transform():
        raise NotImplementedError(
            "masks of blocks are not made under vmap or torch.func's transforms; make the mask before, or put what vmap would map "
            "over into the batch"
        )
    blocks = blocks if blocks.dim() == 4 else blocks[None, None]
    q_blocks, kv_blocks = blocks.shape[2:]
    if q_blocks == kv_blocks:  # of self-attention: one length is both
        q_len, kv_len = (kv_len or None) if q_len is None else q_len, q_len if kv_len is None else kv_len
    q_len = q_blocks * block_size if q_len is None else q_len
    kv_len = kv_blocks * block_size if kv_len is None else kv_len
    grid = BlockGrid(q_len, kv_len, block_size)
    if grid.shape != (q_blocks, kv_blocks):
        raise ValueError(
            f"blocks is a map of {q_blocks} x {kv_blocks} blocks, but {grid.q_len} x {grid.kv_len} tokens in blocks of "
            f"{block_size} are {grid.q_blocks} x {grid.kv_blocks}"
        )
    if within is None:
        keep_it = q_blocks * kv_blocks <= _MOST_KEPT_BLOCKS and not is_recorded(blocks.device)
        within = (_kept_of_all_blocks if keep_it else _of_all_blocks)(grid, blocks.device)
    else:
        within = one_mask("within", within, grid, blocks.device)
    listing = _listing(within)
    batch, heads = blocks.shape[:2]
    if batch * heads * listing.block.numel() >= 2**31:  # counting both tables
        raise ValueError(
            f"{batch} x {heads} maps of {q_blocks} x {kv_blocks} blocks are more than 2^30 - 1; use a larger block_size"
        )
    by_query, by_key = chosen(blocks.reshape(batch * heads, -1), listing)
    return BlockMask(
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


def _of_all_blocks(grid: BlockGrid, device: torch.device) -> BlockMask:
    """The mask that keeps every pair, made on the device: a copy from the host would repeat in each replay of a graph."""
    size, cut_row, cut_col = grid.block_size, grid.q_len % grid.block_size, grid.kv_len % grid.block_size
    # The tile that says where a cut block ends: 0 in the last column, 1 in the last row, 2 in the corner.
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


_kept_of_all_blocks = remembered(maxsize=16)(_of_all_blocks)


def _listing(mask: BlockMask) -> Listing:
    """The entries of one mask to choose from, made once per mask and kept as long as it lives."""
    known = mask.__dict__.get("_listed")
    if known is None:
        known = listing_of(mask.by_query, mask.by_key)
        if not is_recorded(mask.device):
            mask.__dict__["_listed"] = known
    return known


@outside_graphs
def from_dense(kept: torch.Tensor, block_size: int) -> BlockMask:
    """See ``BlockMask.from_dense``."""
    if not isinstance(kept, torch.Tensor):
        raise TypeError(f"kept must be a bool tensor; got {type(kept).__name__}; use torch.tensor(...)")
    if kept.dtype != torch.bool or kept.dim() not in (2, 4) or 0 in kept.shape:
        raise ValueError(
            "kept must be a bool tensor of shape (q_len, kv_len) or (batch | 1, heads | 1, q_len, kv_len), none of it 0; got "
            f"{kept.dtype} of shape {tuple(kept.shape)}; compare or use .bool()"
        )
    dense = (kept if kept.dim() == 4 else kept[None, None]).cpu().numpy()
    batch, heads, q_len, kv_len = dense.shape
    grid = BlockGrid(q_len, kv_len, block_size)
    pool = TilePool(block_size)
    rows, cols = (axis.ravel() for axis in np.indices(grid.shape))
    below, beyond = grid.q_blocks * block_size - grid.q_len, grid.kv_blocks * block_size - grid.kv_len
    masks = []
    for one in dense.reshape(-1, q_len, kv_len):
        padded = np.pad(one, ((0, below), (0, beyond)))
        blocks = padded.reshape(grid.q_blocks, block_size, grid.kv_blocks, block_size).swapaxes(1, 2)
        tiles = pool.add_dense(blocks.reshape(-1, block_size, block_size))
        some = tiles != EMPTY_TILE
        masks.append(from_entries(grid, Entries(rows[some], cols[some], tiles[some]), pool))
    return _of_heads(masks, batch, heads).to(kept.device)


@outside_inference
def of_flex(mask: FlexMask) -> BlockMask:
    """See ``BlockMask.from_flex``."""
    grid = from_flex.grid_of(mask)
    pool = TilePool(grid.block_size)
    masks = [from_entries(grid, Entries(*entries), pool) for entries in from_flex.entries_of(mask, pool)]
    return _of_heads(masks, *mask.kv_num_blocks.shape[:2]).to(mask.kv_indices.device)


@outside_graphs
def from_mask_mod(
    mask_mod: MaskFunction,
    batch: int | None,
    heads: int | None,
    q_len: int,
    kv_len: int | None,
    block_size: int,
    device: Device | None,
    progress: bool | None,
) -> BlockMask:
    """See ``BlockMask.from_mask_mod``."""
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function of (b, h, q_idx, kv_idx); got {type(mask_mod).__name__}")
    check_parameters(mask_mod, "from_mask_mod", ("b", "h", "q_idx", "kv_idx"), "from_mask_fn takes one of (q, kv)")
    for name, count in (("batch", batch), ("heads", heads)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} must be a positive integer, or None for one mask of all; got {count!r}")
    grid, shape = BlockGrid(q_len, q_len if kv_len is None else kv_len, block_size), (batch or 1, heads or 1)
    pool = TilePool(block_size)
    stored: dict[bytes, BlockMask] = {}
    masks: dict[tuple[int, int], BlockMask] = {}
    device = torch.device(device or "cpu")
    for served, entries in from_flex.all_entries_of(mask_mod, grid, shape, device, pool, progress):
        mask = from_entries(grid, Entries(*entries), pool)
        mask = stored.setdefault(mask.digest, mask)
        for b, h in served:
            masks[b, h] = mask
    return _of_heads([masks[b, h] for b in range(shape[0]) for h in range(shape[1])], *shape).to(device)


def _of_heads(masks: list[BlockMask], batch: int, heads: int) -> BlockMask:
    """A mask for each head of each batch entry."""
    joined = per_head(masks)
    return replace(joined, mask_index=joined.mask_index.view(batch, heads))


@outside_graphs
def per_head(
    masks: Iterable[MaskLike],
    q_len: int | None = None,
    kv_len: int | None = None,
    block_size: int = 128,
    device: Device | None = None,
) -> BlockMask:
    """See ``BlockMask.per_head``."""
    if isinstance(masks, (str, BlockMask)) or not isinstance(masks, Iterable):
        raise TypeError(f"per_head needs a list of patterns or masks, one for each head; got {type(masks).__name__}")
    masks = [from_flex_once(mask) if isinstance(mask, FlexMask) else mask for mask in masks]
    if not masks:
        raise ValueError("per_head needs one pattern or mask for each query head; got an empty list")
    first = next((m for m in masks if isinstance(m, BlockMask)), None)
    if first is not None:
        for name, given, own in (("q_len", q_len, first.q_len), ("kv_len", kv_len, first.kv_len)):
            if given is not None and given != own:
                raise ValueError(f"per_head got {name}={given} and a mask of {own}; leave {name} out, or compile the mask for it")
        q_len, kv_len, block_size = first.q_len, first.kv_len, first.block_size
        device = device or first.device
    compiled: list[BlockMask] = []
    cache: dict[object, BlockMask] = {}
    for item in masks:
        key = item if isinstance(item, (Pattern, str)) else id(item)
        if key not in cache:
            cache[key] = as_block_mask(item, q_len=q_len, kv_len=kv_len, block_size=block_size).to("cpu")
        compiled.append(cache[key])
    for head, mask in enumerate(compiled):
        if mask.mask_index.numel() != 1:
            raise ValueError(f"per_head needs masks of one head each; mask {head} has {tuple(mask.mask_index.shape)}")
        if mask.sizes != compiled[0].sizes:
            raise ValueError(
                "per_head needs masks of one (q_len, kv_len, block_size); "
                f"mask 0 has {compiled[0].sizes}, mask {head} has {mask.sizes}"
            )
    digests = [mask.digest for mask in compiled]
    stored = dict(zip(digests, compiled, strict=True))
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    joined = _stacked([stored[digest] for digest in numbers])
    index = torch.tensor([[numbers[digest] for digest in digests]], dtype=torch.int32, device="cpu")
    return with_coarse(replace(joined, mask_index=index, coarse=None)).to(device or "cpu")


def _stacked(masks: list[BlockMask]) -> BlockMask:
    """Several stored masks in one table, with their tiles pooled. mask_index stays that of the first."""
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
            parts.append((ptr + base, split + base, table.col_idx[:count], remapped.to(torch.int32)))
            base += count
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        joined[2:] = [torch.from_numpy(at_least_two(t.numpy())) for t in joined[2:]]
        tables.append(with_work(*joined))
    return replace(
        masks[0],
        keeps_all=all(m.keeps_all for m in masks),
        by_query=tables[0],
        by_key=tables[1],
        tile_runs=pools[0],
        tile_bits=pools[1],
        grouped=all(m.grouped for m in masks),
    )


@outside_graphs
def select(mask: BlockMask, head: int, batch: int) -> BlockMask:
    """See ``BlockMask.select``."""
    mine = np.flatnonzero(mask.entry_masks == mask.stored_index(batch, head))
    rows, cols, kind, tile = (axis[mine] for axis in mask.entries())
    pool, numbers = TilePool(mask.block_size), np.full(len(rows), FULL_TILE, np.int64)
    for which, stored in ((1, mask.tile_runs), (2, mask.tile_bits)):
        chosen = np.flatnonzero(kind == which)
        used, inverse = np.unique(tile[chosen], return_inverse=True)
        tiles = stored.cpu().numpy()[used]
        if len(used):
            numbers[chosen] = (pool.add_runs(tiles) if which == 1 else pool.add_bits(tiles))[inverse]
    return with_coarse(from_entries(mask.grid, Entries(rows, cols, numbers), pool)).to(mask.device)


@outside_graphs
def transpose(mask: BlockMask) -> BlockMask:
    """See ``BlockMask.transpose``."""
    rows, cols, segment, tile = mask.entries()
    pool = TilePool(mask.block_size)
    numbers = np.full(len(rows), FULL_TILE, np.int64)
    partial = np.flatnonzero(segment)
    # Each distinct tile is turned once, whatever the number of blocks that have it.
    first, alike = unique_rows(tile_content(segment, tile)[partial, None])
    turned_tiles = np.empty(len(first), np.int64)
    for part in dense_batches(len(first), mask.block_size):
        of_these = partial[first[part]]
        dense = mask.tile_pairs(segment[of_these], tile[of_these])
        turned_tiles[part] = pool.add_dense(dense.transpose(0, 2, 1))
    numbers[partial] = turned_tiles[alike]
    grid = BlockGrid(mask.kv_len, mask.q_len, mask.block_size)
    which = np.searchsorted(mask.mask_bounds(), np.arange(len(rows)), side="right")
    single = []
    for number in range(mask.masks):
        mine = which == number
        single.append(from_entries(grid, Entries(cols[mine], rows[mine], numbers[mine]), pool))
    turned = replace(_stacked(single), mask_index=mask.mask_index.cpu(), keeps_all=mask.keeps_all)
    return with_coarse(turned).to(mask.device)


@outside_graphs
def in_blocks_of(mask: BlockMask, block_size: int) -> BlockMask:
    """See ``BlockMask.in_blocks_of``."""
    grid = BlockGrid(mask.q_len, mask.kv_len, block_size)
    if block_size % mask.block_size:
        raise ValueError(f"block_size must be a multiple of the mask's {mask.block_size}; got {block_size}")
    pool, step = TilePool(block_size), block_size // mask.block_size
    single = []
    for number in range(mask.masks):
        full, entries = coarsen.merged(mask.grid, mask.bands(number, step), mask.tile_pairs, pool)
        single.append(from_entries(grid, entries, pool, full))
    return replace(_stacked(single), mask_index=mask.mask_index.cpu(), keeps_all=mask.keeps_all).to(mask.device)


def part_of(mask: BlockMask, rows: np.ndarray, cols: np.ndarray) -> BlockMask:
    """The mask of some block rows and columns, in the given order, all of them as whole blocks; on the CPU, as ``mask``.

    rows, cols: (n,) int64 block numbers, none of them twice; -1 stands for a block that keeps nothing. Tokens past the lengths of
    ``mask`` keep nothing, and nothing keeps them. Takes time and memory in proportion to the entries of those rows.
    """
    size, col_at = mask.block_size, np.full(mask.grid.kv_blocks, -1)
    present = np.flatnonzero(cols >= 0)
    col_at[cols[present]] = present
    present = np.flatnonzero(rows >= 0)
    tile_runs, runs_at = _cut_tiles(mask, mask.tile_runs)
    tile_bits, bits_at = _cut_tiles(mask, mask.tile_bits)
    single, keeps_all = [], True
    for number in range(mask.masks):
        ptr, split = (t[number].numpy().astype(np.int64) for t in (mask.by_query.row_ptr, mask.by_query.row_split))
        counts = np.diff(ptr)[rows[present]]
        entry = ranges(ptr[rows[present]], counts)
        row, whole_row = np.repeat(present, counts), np.repeat(rows[present], counts)
        kind = (entry >= split[whole_row, 0]).astype(np.int64) + (entry >= split[whole_row, 1])
        tile = mask.by_query.tile_idx.numpy()[entry].astype(np.int64)
        tile += np.select([kind == 1, kind == 2], [runs_at, bits_at], 0) * (whole_row == mask.grid.q_blocks - 1)
        col = col_at[mask.by_query.col_idx.numpy()[entry]]
        key = (row * 3 + kind) * len(cols) + col
        order = np.argsort(key, kind="stable")
        order = order[col[order] >= 0]
        row, col, kind, tile = (axis[order].astype(np.int32) for axis in (row, col, kind, tile))
        full = FullBlocks.of((len(rows), len(cols)), row[kind == 0], col[kind == 0])
        partial = PartialBlocks(*(axis[kind > 0] for axis in (row, col, kind, tile)))
        keeps_all &= full.blocks == len(rows) * len(cols)
        single.append(
            BlockMask(
                q_len=len(rows) * size,
                kv_len=len(cols) * size,
                block_size=size,
                keeps_all=bool(keeps_all),
                mask_index=mask.mask_index,
                by_query=table_of(full, partial),
                by_key=table_of(full.transposed(), partial.transposed()),
                tile_runs=tile_runs,
                tile_bits=tile_bits,
            )
        )
    return with_coarse(replace(_stacked(single), keeps_all=bool(keeps_all)))


def _cut_tiles(mask: BlockMask, tiles: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(tiles, and how far their second half is from the first): where the last block row is cut off, a copy of each tile whose rows
    past the last query, which may hold anything, keep nothing."""
    cut = mask.q_len % mask.block_size
    if not cut:
        return tiles, 0
    copies = tiles.clone()
    copies[:, cut:] = 0
    return torch.cat([tiles, copies]), len(tiles)


def in_tall_rows(mask: BlockMask) -> TallRows | None:
    """See ``BlockMask.tall``."""
    return _derived(mask, "_tall", tall_rows)


def in_document_blocks(mask: BlockMask) -> DocumentBlocks | None:
    """See ``BlockMask.by_document``."""
    return _derived(mask, "_by_document", document_blocks)


def _derived(mask: BlockMask, name: str, make: Callable[[BlockMask], DERIVED]) -> DERIVED | None:
    """make(mask), kept with the mask under this name; None where nothing may be kept."""
    if name not in mask.__dict__:
        if not mask.from_host or is_recorded(mask.device):
            return None
        # Launches may have been remembered with the first tables, so those stay, should two threads make some.
        mask.__dict__.setdefault(name, made_apart(make, mask))
    return cast(DERIVED, mask.__dict__[name])


def with_coarse(mask: BlockMask) -> BlockMask:
    """The mask, plus its coarse form if kernels are faster on that."""
    if mask.block_size not in coarsen.SMALL_BLOCKS:
        return mask
    step = coarsen.KERNEL_BLOCK // mask.block_size
    if not coarsen.pays(mask.grid, (band for number in range(mask.masks) for band in mask.bands(number, step))):
        return mask
    return replace(mask, coarse=in_blocks_of(mask, coarsen.KERNEL_BLOCK))


block_mask.build = sys.modules[__name__]
