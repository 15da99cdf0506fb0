"""The methods of BlockMask that make masks, attached to the class at the end of this page.

``block_mask`` knows neither patterns nor the compiler, which makes BlockMasks. So these methods are defined here, above both; those
that need no patterns come from ``build`` and ``from_flex``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import torch

from ..compat.dynamo import outside_graphs, outside_inference
from ..compat.pytorch import in_differentiating_transform
from .block_mask import BlockMask, Device, MaskLike
from .build import from_dense, in_blocks_of, of_heads, select, transpose
from .cache import as_block_mask, from_flex_once, is_recorded, made_apart, one_mask
from .document_blocks import DocumentBlocks, document_blocks
from .from_flex import FlexMask, from_flex, from_mask_mod
from .grid import BlockGrid
from .memory import remembered
from .pattern import Pattern
from .select_blocks import Listing, by_kernel, chosen, chosen_by_kernel, counted, listing_of, table_of_all
from .tall import TallRows, tall_rows

DERIVED = TypeVar("DERIVED")

_MOST_KEPT_BLOCKS = 1 << 20  # of a mask that keeps every block; some 60 bytes each


@outside_inference
def from_blocks(
    blocks: torch.Tensor, block_size: int, q_len: int | None = None, kv_len: int | None = None, within: MaskLike | None = None
) -> BlockMask:
    """A mask from a block map computed at run time, on the map's device.

    blocks: (batch | 1, heads | 1, q_blocks, kv_blocks) or (q_blocks, kv_blocks) bool, True where a block is kept.
    block_size: tokens on a side of a block. q_len, kv_len: tokens; one of them is both if there are as many blocks of queries
    as of keys, and they default to whole blocks.
    within: which pairs of those blocks to keep, all by default: a Pattern or its spec text, or a BlockMask of one mask, with
    the same lengths and block size, on the map's device. With causal, for instance, diagonal blocks get their tile, and blocks
    above the diagonal are dropped.

    Launches only tensor operations of fixed shapes: no host synchronization, safe under CUDA graphs. A pattern is compiled on
    the host at its first use with these lengths, and cached: use it once before capturing a graph. The table has room for every
    block that ``within`` keeps, as the host does not know the number kept.
    """
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
    return of_maps(blocks, grid, limit_of(within, grid, blocks.device))


def limit_of(within: MaskLike | None, grid: BlockGrid, device: torch.device) -> BlockMask:
    """The BlockMask of one mask, of all pairs for None."""
    if within is not None:
        return one_mask("within", within, grid, device)
    keep_it = grid.q_blocks * grid.kv_blocks <= _MOST_KEPT_BLOCKS and not is_recorded(device)
    return (_kept_of_all_blocks if keep_it else _of_all_blocks)(grid, device)


def of_maps(maps: torch.Tensor, grid: BlockGrid, within: BlockMask, room: int | None = None) -> BlockMask:
    """The blocks of ``within``, one mask, that each map keeps.

    maps: (batch, heads, q_blocks, kv_blocks) bool, or on GPUs also int32 of bits, 32 blocks each. room: the most blocks that all of
    them keep; None: all that ``within`` keeps."""
    batch, heads = maps.shape[:2]
    listed = len(within.by_query.col_idx)
    room = batch * heads * listed if room is None else min(room, batch * heads * listed)
    if max(room, batch * heads * max(grid.shape)) >= 2**31 or (maps.dtype == torch.bool and not by_kernel(maps) and room >= 2**30):
        raise ValueError(
            f"{batch} x {heads} maps of {grid.q_blocks} x {grid.kv_blocks} blocks may keep {room:,} blocks, more than tables can "
            "number; use a larger block_size, or a rule that keeps fewer"
        )
    if by_kernel(maps):
        tables = chosen_by_kernel(maps.flatten(0, 1).contiguous(), within.by_query, within.by_key, grid.shape, room)
    else:
        tables = chosen(maps.reshape(batch * heads, -1), _listing(within))
    return BlockMask(
        q_len=grid.q_len,
        kv_len=grid.kv_len,
        block_size=grid.block_size,
        keeps_all=False,
        mask_index=torch.arange(batch * heads, dtype=torch.int32, device=maps.device).view(batch, heads),
        by_query=tables[0],
        by_key=tables[1],
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
def per_head(
    masks: Iterable[MaskLike],
    q_len: int | None = None,
    kv_len: int | None = None,
    block_size: int = 128,
    device: Device | None = None,
) -> BlockMask:
    """One mask per query head; equal ones are stored once.

    masks: a list of patterns, spec texts and BlockMasks of one mask each. Patterns are compiled for the given lengths and block
    size, or for the lengths and block size of the first BlockMask in the list. Raises ValueError where lengths differ.
    """
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
    return of_heads(compiled, 1, len(compiled)).to(device or "cpu")


def tall(self: BlockMask) -> TallRows | None:
    """``by_query`` in rows of 192 queries, for forward kernels that are faster over these; made at the first use, which reads
    the table. None where they are not, for masks that differ between heads, and for masks made at run time."""
    return _derived(self, "_tall", tall_rows)


def by_document(self: BlockMask) -> DocumentBlocks | None:
    """Both tables in blocks that start where documents do, made at the first use, which reads the table.

    None where kernels are as fast over the mask's own tables, for masks that differ between heads, and for masks made at run time,
    except by ``attention_varlen``."""
    return _derived(self, "_by_document", document_blocks)


def _derived(mask: BlockMask, name: str, make: Callable[[BlockMask], DERIVED]) -> DERIVED | None:
    """make(mask), kept with the mask under this name; None where nothing may be kept."""
    if name not in mask.__dict__:
        if not mask.from_host or is_recorded(mask.device):
            return None
        # Launches may have been remembered with the first tables, so those stay, should two threads make some.
        mask.__dict__.setdefault(name, made_apart(make, mask))
    return cast(DERIVED, mask.__dict__[name])


BlockMask.from_blocks = staticmethod(from_blocks)
BlockMask.from_dense = staticmethod(from_dense)
BlockMask.from_flex = staticmethod(from_flex)
BlockMask.from_mask_mod = staticmethod(from_mask_mod)
BlockMask.per_head = staticmethod(per_head)
BlockMask.select = select
BlockMask.transpose = transpose
BlockMask.in_blocks_of = in_blocks_of
BlockMask.tall = property(tall)
BlockMask.by_document = property(by_document)
