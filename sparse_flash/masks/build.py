"""Makes the tables of masks from blocks and tiles, from dense tensors, and from the tables of other masks. Knows no patterns."""

from collections.abc import Sequence

import numpy as np
import torch

from .coarsen import merge_blocks
from .grid import BlockGrid, concat_ranges
from .mask_tables import MaskTables
from .select_blocks import by_head
from .table import Entries, FullBlocks, build_table, finish_table, pad_to_two, sort_entries
from .tiles import FULL_TILE, TilePool, dense_batches


def from_entries(grid: BlockGrid, entries: Entries, pool: TilePool, full: FullBlocks | None = None) -> MaskTables:
    """One mask, the same for every batch and head, from kept blocks and their tiles. full: full blocks not in entries."""
    check_blocks(len(entries.rows) + (0 if full is None else full.blocks))
    full, partial, stacks = sort_entries(entries, grid.shape, pool, full)
    by_query, by_key = build_table(full, partial), build_table(full.transposed(), partial.transposed())
    return MaskTables(
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
        document_order=by_query.has_document_order() and by_key.has_document_order(),
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


def from_dense(kept: torch.Tensor, block_size: int) -> MaskTables:
    """The tables of ``BlockMask.from_dense``, on the CPU."""
    dense = by_head("kept", kept, "q_len, kv_len").cpu().numpy()
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
        masks.append(from_entries(grid, Entries(rows, cols, tiles).without_empty(), pool))
    return from_heads(masks, batch, heads)


def from_heads(masks: Sequence[MaskTables], batch: int, heads: int) -> MaskTables:
    """One mask of batch x heads masks of one head each, on the CPU, the heads of the first batch entry first."""
    for number, mask in enumerate(masks):
        if mask.mask_index.numel() != 1:
            raise ValueError(f"masks to join must be of one head each; mask {number} has {tuple(mask.mask_index.shape)}")
        if mask.sizes != masks[0].sizes:
            raise ValueError(
                "masks to join must have one (q_len, kv_len, block_size); "
                f"mask 0 has {masks[0].sizes}, mask {number} has {mask.sizes}"
            )
    digests = [mask.digest for mask in masks]
    stored = dict(zip(digests, masks, strict=True))
    numbers = {digest: number for number, digest in enumerate(stored)}
    index = torch.tensor([numbers[digest] for digest in digests], dtype=torch.int32, device="cpu").view(batch, heads)
    return _stack_masks([*stored.values()], index)


def _stack_masks(masks: Sequence[MaskTables], mask_index: torch.Tensor) -> MaskTables:
    """Several stored masks in one table, with their tiles pooled."""
    if len(masks) == 1:
        return masks[0].having(mask_index=mask_index)
    pools, numbers = [], []  # for each kind: the distinct tiles, and the number among them of each tile of each mask
    for kind in range(2):
        stacked = torch.cat([m.tiles[kind] for m in masks])
        pool, inverse = torch.unique(stacked.flatten(1), dim=0, return_inverse=True)
        pools.append(torch.from_numpy(pad_to_two(pool.view(-1, *stacked.shape[1:]).numpy())))
        numbers.append([part.numpy() for part in inverse.split([len(m.tiles[kind]) for m in masks])])
    tables = []
    for name in ("by_query", "by_key"):
        parts, base = [], 0
        for which, mask in enumerate(masks):
            table = getattr(mask, name)
            _, cols, kinds, tiles = table.entries()
            for kind in range(2):
                tiles[kinds == kind + 1] = numbers[kind][which][tiles[kinds == kind + 1]]
            parts.append((table.row_ptr + base, table.row_split + base, cols.astype(np.int32), tiles.astype(np.int32)))
            base += len(cols)
        ptr, split, *entries = zip(*parts, strict=True)
        padded = (torch.from_numpy(pad_to_two(np.concatenate(arrays))) for arrays in entries)
        tables.append(finish_table(torch.cat(ptr), torch.cat(split), *padded))
    return masks[0].having(
        mask_index=mask_index,
        keeps_all=all(m.keeps_all for m in masks),
        by_query=tables[0],
        by_key=tables[1],
        tile_runs=pools[0],
        tile_bits=pools[1],
        document_order=all(m.document_order for m in masks),
    )


def select(mask: MaskTables, number: int) -> MaskTables:
    """One stored mask, on the CPU."""
    (full, partial), pool = mask.kept(number), TilePool(mask.block_size)
    numbers = _pool_tiles(mask.tiles, partial.kinds, partial.tiles, pool)
    return from_entries(mask.grid, Entries(partial.rows, partial.cols, numbers), pool, full)


def _pool_tiles(stored: Sequence[torch.Tensor], kinds: np.ndarray, tiles: np.ndarray, pool: TilePool) -> np.ndarray:
    """The numbers that the tiles of blocks get in the pool, FULL_TILE for full blocks. stored: run tiles and bit tiles."""
    numbers = np.full(len(kinds), FULL_TILE, np.int64)
    for kind, add in ((1, pool.add_runs), (2, pool.add_bits)):
        chosen = np.flatnonzero(kinds == kind)
        used, inverse = np.unique(tiles[chosen], return_inverse=True)
        if len(used):
            numbers[chosen] = add(stored[kind - 1].cpu().numpy()[used])[inverse]
    return numbers


def transpose(mask: MaskTables) -> MaskTables:
    """The tables of ``BlockMask.transpose``, on the CPU."""
    pool, turned_tiles = TilePool(mask.block_size), {}  # each stored tile is turned once, whatever the number of its blocks
    for kind, stored in enumerate(mask.tiles, start=1):
        tiles = np.arange(len(stored))
        batches = (tiles[part] for part in dense_batches(len(tiles), mask.block_size))
        dense = (mask.tile_pairs(np.full_like(some, kind), some) for some in batches)
        turned_tiles[kind] = np.concatenate([pool.add_dense(kept.transpose(0, 2, 1)) for kept in dense])
    grid, single = BlockGrid(mask.kv_len, mask.q_len, mask.block_size), []
    for number in range(mask.masks):
        full, partial = mask.kept(number)
        numbers = np.empty(len(partial.rows), np.int64)
        for kind, tiles in turned_tiles.items():
            numbers[partial.kinds == kind] = tiles[partial.tiles[partial.kinds == kind]]
        single.append(from_entries(grid, Entries(partial.cols, partial.rows, numbers), pool, full.transposed()))
    return _stack_masks(single, mask.mask_index.cpu()).having(keeps_all=mask.keeps_all)


def in_blocks_of(mask: MaskTables, block_size: int) -> MaskTables:
    """The same mask in larger blocks, on the CPU. block_size: a multiple of its own."""
    grid = BlockGrid(mask.q_len, mask.kv_len, block_size)
    pool, single = TilePool(block_size), []
    for number in range(mask.masks):
        single.append(from_entries(grid, merge_blocks(mask, number, pool), pool))
    return _stack_masks(single, mask.mask_index.cpu()).having(keeps_all=mask.keeps_all)


def take_blocks(mask: MaskTables, rows: np.ndarray, cols: np.ndarray) -> MaskTables:
    """The tables of some block rows and columns, in the given order, all of them as whole blocks; on the CPU, as ``mask``. rows,
    cols: (n,) int64 block numbers, none twice; -1: a block that keeps nothing. Tokens past the lengths of ``mask`` keep nothing."""
    size, col_at, table = mask.block_size, np.full(mask.grid.kv_blocks, -1), mask.by_query
    present = np.flatnonzero(cols >= 0)
    col_at[cols[present]] = present
    present = np.flatnonzero(rows >= 0)
    # Past the last query tiles may hold anything. Copies for the last block row keep nothing there.
    of_last = [tiles.clone() for tiles in mask.tiles]
    for tiles in of_last:
        tiles[:, mask.q_len - (mask.grid.q_blocks - 1) * size :] = 0
    grid, pool, single = BlockGrid(len(rows) * size, len(cols) * size, size), TilePool(size), []
    for number in range(mask.masks):
        ptr, split = (t[number].numpy().astype(np.int64) for t in (table.row_ptr, table.row_split))
        counts = np.diff(ptr)[rows[present]]
        entry = concat_ranges(ptr[rows[present]], counts)
        row, whole_row, col = np.repeat(present, counts), np.repeat(rows[present], counts), col_at[table.col_idx.numpy()[entry]]
        entry, row, whole_row, col = (axis[col >= 0] for axis in (entry, row, whole_row, col))
        kind = (entry >= split[whole_row, 0]).astype(np.int64) + (entry >= split[whole_row, 1])
        tile = table.tile_idx.numpy()[entry]
        last = whole_row == mask.grid.q_blocks - 1
        numbers = np.where(last, _pool_tiles(of_last, kind * last, tile, pool), _pool_tiles(mask.tiles, kind * ~last, tile, pool))
        single.append(from_entries(grid, Entries(row, col, numbers).without_empty(), pool))
    # Nothing is derived from a rank's mask.
    return _stack_masks(single, mask.mask_index).having(from_host=False, document_order=False)
