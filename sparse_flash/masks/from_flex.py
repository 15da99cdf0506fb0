"""Makes the tables of FlexAttention's block masks and mask functions: kept blocks, and tiles from their token rule.

Source: torch.nn.attention.flex_attention.BlockMask, whose docstring defines the format.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import noop_mask

from .build import from_entries, from_heads
from .from_maps import map_from_lists
from .grid import BLOCK_SIZES, BlockGrid
from .mask_tables import MaskTables
from .progress import progress_bar
from .table import Entries
from .tiles import EMPTY_TILE, FULL_TILE, TilePool, dense_batches

# (b, h, q_idx, kv_idx), 0-d integer tensors -> bool
MaskFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def from_flex(mask: FlexMask) -> MaskTables:
    """The tables of ``BlockMask.from_flex``, for a mask with a token rule, on the CPU."""
    if not isinstance(mask, FlexMask):
        got = f"{type(mask).__module__}.{type(mask).__qualname__}"
        raise TypeError(f"from_flex needs a torch.nn.attention.flex_attention.BlockMask; got {got}")
    q_block, kv_block = mask.BLOCK_SIZE
    if q_block != kv_block:
        raise ValueError(f"from_flex needs square blocks; got BLOCK_SIZE={(q_block, kv_block)}; pass one number as BLOCK_SIZE")
    grid = BlockGrid(*mask.seq_lengths, q_block)
    pool = TilePool(grid.block_size)
    batch, heads = mask.kv_num_blocks.shape[:2]
    masks = [from_entries(grid, _entries_of_head(mask, grid, b, h, pool), pool) for b in range(batch) for h in range(heads)]
    return from_heads(masks, batch, heads)


def from_mask_mod(
    mask_mod: MaskFunction, batch: int | None, heads: int | None, grid: BlockGrid, device: torch.device, progress: bool | None
) -> MaskTables:
    """The tables of ``BlockMask.from_mask_mod``, on the CPU."""
    for name, count in (("batch", batch), ("heads", heads)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} must be a positive integer, or None for one mask of all; got {count!r}")
    (batch, heads), block_size, pool = (batch or 1, heads or 1), grid.block_size, TilePool(grid.block_size)
    by_batch, by_head = (_depends_on(argument, mask_mod, device) for argument in range(2))
    distinct = list(product(range(batch if by_batch else 1), range(heads if by_head else 1)))
    blocks, tiles_of = grid.q_blocks * grid.kv_blocks, _Rule(mask_mod, grid, device, pool)
    masks: dict[tuple[int, int], MaskTables] = {}
    stored: dict[bytes, MaskTables] = {}
    text, pairs = f"looking at {_name(mask_mod)}: {blocks * len(distinct):,} blocks", blocks * block_size**2 * len(distinct)
    with progress_bar(text, pairs, progress) as advance:
        for b, h in distinct:
            parts = []
            for part in dense_batches(blocks, block_size):
                rows, cols = np.divmod(np.arange(part.start, part.stop), grid.kv_blocks)
                parts.append(Entries(rows, cols, tiles_of(b, h, rows, cols)).without_empty())
                advance(len(rows) * block_size**2)
            mask = from_entries(grid, Entries.join(parts), pool)
            masks[b, h] = stored.setdefault(mask.digest, mask)
    each = [masks[b * by_batch, h * by_head] for b, h in product(range(batch), range(heads))]
    return from_heads(each, batch, heads)


def keeps_listed_blocks(mask: FlexMask) -> bool:
    """Whether this is a FlexAttention mask without a token rule. It keeps every pair of the blocks that it lists."""
    return isinstance(mask, FlexMask) and (mask.mask_mod is None or mask.mask_mod is noop_mask)


def map_from_flex(mask: FlexMask) -> tuple[torch.Tensor, BlockGrid]:
    """The block map of a mask without a token rule, and its grid. Raises ValueError for sides that are not multiples of 16."""
    lengths, sides = mask.seq_lengths, mask.BLOCK_SIZE
    fitting = [size for size in BLOCK_SIZES if sides[0] % size == sides[1] % size == 0]
    if not fitting:
        raise ValueError(f"from_flex needs BLOCK_SIZE to be multiples of {BLOCK_SIZES[0]} tokens; got {sides}; use 64 or 128")
    # Blocks of the table's sizes stay. Others become blocks of 128 at most, over which kernels are fastest.
    size = fitting[-1] if sides[0] == sides[1] == fitting[-1] else min(fitting[-1], 128)
    shape = -(-lengths[0] // sides[0]), -(-lengths[1] // sides[1])
    blocks = map_from_lists(mask.kv_indices, mask.kv_num_blocks, shape, ("kv_indices", "kv_num_blocks"))
    if mask.full_kv_indices is not None and mask.full_kv_num_blocks is not None:
        names = "full_kv_indices", "full_kv_num_blocks"
        blocks = blocks | map_from_lists(mask.full_kv_indices, mask.full_kv_num_blocks, shape, names)
    grid = BlockGrid(*lengths, size)
    for axis in range(2):
        if sides[axis] != size:
            blocks = blocks.repeat_interleave(sides[axis] // size, axis + 2).narrow(axis + 2, 0, grid.shape[axis])
    return blocks, grid


def _entries_of_head(mask: FlexMask, grid: BlockGrid, b: int, h: int, pool: TilePool) -> Entries:
    """The kept blocks of a batch entry's head: none of which the token rule keeps nothing, full ones where it keeps all."""
    size, parts = grid.block_size, []
    for mask_mod, counts, indices in (
        (mask.mask_mod, mask.kv_num_blocks, mask.kv_indices),
        (noop_mask, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        if counts is None or indices is None:
            continue
        listed = torch.arange(indices.shape[3], device=indices.device) < counts[b, h, :, None]
        rows = listed.nonzero()[:, 0].cpu().numpy().astype(np.int64)
        cols = indices[b, h][listed].cpu().numpy().astype(np.int64)
        cut = (grid.heights(rows) < size) | (grid.widths(cols) < size)
        tiles = np.full(len(rows), FULL_TILE, np.int64)
        looked_at = np.flatnonzero(cut) if mask_mod is noop_mask else np.arange(len(rows))
        tiles_of = _Rule(mask_mod, grid, indices.device, pool)
        for part in dense_batches(len(looked_at), size):
            chosen = looked_at[part]
            tiles[chosen] = tiles_of(b, h, rows[chosen], cols[chosen])
        parts.append(Entries(rows, cols, tiles))
    return Entries.join(parts).without_empty()


class _Rule:
    """Tiles from a FlexAttention mask function, (b, h, q_idx, kv_idx) of integer tensors -> bool."""

    def __init__(self, mask_mod: MaskFunction, grid: BlockGrid, device: torch.device, pool: TilePool):
        self.mask_mod, self.grid, self.device, self.pool = mask_mod, grid, device, pool
        self.within = torch.arange(grid.block_size, device=device)
        by_token = torch.vmap(self.checked, (None, None, None, 0))
        self.by_tile = torch.vmap(torch.vmap(by_token, (None, None, 0, None)), (None, None, 0, 0))

    def checked(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        try:
            kept = self.mask_mod(b, h, q, kv)
        except RuntimeError as error:
            raise ValueError(
                f"a mask function must work on index tensors; {_name(self.mask_mod)} raised: {str(error).splitlines()[0]} (write "
                "& | ~ and torch.where instead of and, or, not and if)"
            ) from error
        if not isinstance(kept, torch.Tensor) or kept.dtype != torch.bool:
            got = kept.dtype if isinstance(kept, torch.Tensor) else type(kept).__name__
            raise TypeError(f"a mask function must return a bool tensor; {_name(self.mask_mod)} returned {got}; compare indices")
        return kept

    def __call__(self, b: int, h: int, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """Tile numbers of these blocks, or EMPTY_TILE or FULL_TILE."""
        grid, size = self.grid, self.grid.block_size
        q, kv = (torch.from_numpy(blocks).to(self.device)[:, None] * size + self.within for blocks in (rows, cols))
        kept = (q < grid.q_len)[:, :, None] & (kv < grid.kv_len)[:, None, :]
        batch, head = (torch.tensor(number, device=self.device) for number in (b, h))
        # Rules look up numbers by position, and there are none past the end.
        kept &= self.by_tile(batch, head, q.clamp(max=grid.q_len - 1), kv.clamp(max=grid.kv_len - 1))
        flat = kept.flatten(1)
        whole, some = flat.all(1), flat.any(1)
        tiles = torch.where(whole, FULL_TILE, EMPTY_TILE).cpu().numpy()
        mixed = some & ~whole
        if mixed.any():
            tiles[mixed.cpu().numpy()] = self.pool.add_dense(kept[mixed].cpu().numpy())
        return tiles


def _depends_on(argument: int, mask_mod: MaskFunction, device: torch.device) -> bool:
    """Whether a mask function computes its result from this one of its arguments."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    indices = (zero if other == argument else zero[0] for other in range(4))
    in_dims = tuple(0 if other == argument else None for other in range(4))
    try:
        torch.vmap(mask_mod, in_dims, out_dims=None)(*indices)  # which raises for a result that depends on it
    except Exception:  # raised again where the function is evaluated, if it is the function's own
        return True
    return False


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
