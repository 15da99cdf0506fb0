"""The methods of BlockMask that make masks, attached to the class at the end of this page.

``block_mask`` knows neither patterns nor the compiler, which makes BlockMasks. So these methods are defined here, above both; those
that need no patterns come from ``build`` and ``from_flex``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch

from ..compat.dynamo import outside_graphs, outside_inference
from ..compat.pytorch import is_recorded
from .block_mask import BlockMask, Device, MaskLike
from .build import from_dense, from_heads, in_blocks_of, select, transpose
from .cache import as_block_mask, from_flex_cached, resolve_single_mask, run_in_thread
from .document_blocks import document_blocks
from .from_flex import FlexMask, from_flex, from_mask_mod
from .from_maps import check_integers, dense_mask, from_block_maps, map_from_lists, map_from_rows
from .grid import BlockGrid
from .pattern import Pattern
from .table import KernelTables
from .tall import tall_rows


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
    return from_block_maps(blocks, grid, resolve_within(within, grid, blocks.device))


def resolve_within(within: MaskLike | None, grid: BlockGrid, device: torch.device) -> BlockMask:
    """The BlockMask of one mask; of all pairs for None."""
    return dense_mask(grid, device) if within is None else resolve_single_mask("within", within, grid, device)


@outside_inference
def from_lists(
    kv_indices: torch.Tensor,
    kv_counts: torch.Tensor,
    block_size: int,
    q_len: int | None = None,
    kv_len: int | None = None,
    within: MaskLike | None = None,
) -> BlockMask:
    """A mask from lists of the blocks of keys that each block of queries keeps, on the device of the lists.

    kv_indices: (batch | 1, heads | 1, q_blocks, n) or (q_blocks, n) int32 or int64. Row r keeps the blocks of keys
    kv_indices[..., r, : kv_counts[..., r]], in any order; entries past the count may hold anything.
    kv_counts: (batch | 1, heads | 1, q_blocks) or (q_blocks,) int32 or int64, 0 to n. The queries of a count of 0 return 0.
    block_size: tokens on a side of a block. q_len: tokens; whole blocks by default. kv_len: tokens; q_len by default.
    within: which pairs of those blocks to keep, as for ``from_blocks``.

    Like ``from_blocks``, it needs no host synchronization and is safe under CUDA graphs. Raises ValueError for CPU tensors with a
    block beyond the keys or a count beyond n. Values on a GPU are not checked: blocks beyond the keys are left out.
    """
    check_integers(("kv_indices", "kv_counts"), kv_indices, kv_counts)
    grid = _grid_of_rows(kv_indices.shape[-2] if kv_indices.dim() > 1 else 1, block_size, q_len, kv_len)
    return from_blocks(map_from_lists(kv_indices, kv_counts, grid.shape), block_size, grid.q_len, grid.kv_len, within)


@outside_inference
def from_bsr(
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    block_size: int,
    q_len: int | None = None,
    kv_len: int | None = None,
    within: MaskLike | None = None,
) -> BlockMask:
    """A mask from compressed rows of kept blocks (BSR), on the device of these tensors.

    For a torch.sparse_bsr tensor t, pass ``t.crow_indices()`` and ``t.col_indices()``; every stored block is kept, whatever its
    values. FlashInfer calls the two indptr and indices.
    crow_indices: (q_blocks + 1,) or (batch | 1, heads | 1, q_blocks + 1) int32 or int64. Row r keeps the blocks of keys
    col_indices[..., crow_indices[..., r] : crow_indices[..., r + 1]], in any order.
    col_indices: (nnz,) or (batch | 1, heads | 1, nnz) int32 or int64; entries past the last row's may hold anything.
    block_size, q_len, kv_len, within: as for ``from_lists``. So are the errors, and it needs no host synchronization either.
    """
    check_integers(("crow_indices", "col_indices"), crow_indices, col_indices)
    grid = _grid_of_rows(crow_indices.shape[-1] - 1 if crow_indices.dim() else 1, block_size, q_len, kv_len)
    return from_blocks(map_from_rows(crow_indices, col_indices, grid.shape), block_size, grid.q_len, grid.kv_len, within)


def _grid_of_rows(rows: int, block_size: int, q_len: int | None, kv_len: int | None) -> BlockGrid:
    """The grid for lists of this many blocks of queries. Raises ValueError if q_len has another number of blocks."""
    q_len = rows * block_size if q_len is None else q_len
    grid = BlockGrid(q_len, q_len if kv_len is None else kv_len, block_size)
    if grid.q_blocks != rows:
        raise ValueError(f"q_len must have {rows} blocks of {block_size} queries, as many as there are rows; got {q_len}")
    return grid


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
    compiled, device = _compile_each("per_head", masks, q_len, kv_len, block_size, device)
    return from_heads(compiled, 1, len(compiled)).to(device)


@outside_graphs
def per_batch(
    masks: Iterable[MaskLike],
    q_len: int | None = None,
    kv_len: int | None = None,
    block_size: int = 128,
    device: Device | None = None,
) -> BlockMask:
    """One mask per sequence of a batch, for all heads; otherwise as ``per_head``."""
    compiled, device = _compile_each("per_batch", masks, q_len, kv_len, block_size, device)
    return from_heads(compiled, len(compiled), 1).to(device)


def _compile_each(
    name: str, masks: Iterable[MaskLike], q_len: int | None, kv_len: int | None, block_size: int, device: Device | None
) -> tuple[list[BlockMask], Device]:
    """Each of the masks on the CPU, and where they go."""
    if isinstance(masks, (str, BlockMask)) or not isinstance(masks, Iterable):
        raise TypeError(f"{name} needs a list of patterns or masks; got {type(masks).__name__}")
    masks = [from_flex_cached(mask) if isinstance(mask, FlexMask) else mask for mask in masks]
    if not masks:
        raise ValueError(f"{name} needs at least one pattern or mask; got an empty list")
    first = next((m for m in masks if isinstance(m, BlockMask)), None)
    if first is not None:
        for length, given, own in (("q_len", q_len, first.q_len), ("kv_len", kv_len, first.kv_len)):
            if given is not None and given != own:
                raise ValueError(f"{name} got {length}={given} and a mask of {own}; leave {length} out, or compile the mask for it")
        q_len, kv_len, block_size = first.q_len, first.kv_len, first.block_size
        device = device or first.device
    keys = [item if isinstance(item, (Pattern, str)) else id(item) for item in masks]
    distinct = dict(zip(keys, masks, strict=True))
    compiled = {key: as_block_mask(item, q_len, kv_len, block_size).to("cpu") for key, item in distinct.items()}
    return [compiled[key] for key in keys], device or "cpu"


def tall(self: BlockMask) -> KernelTables | None:
    """``by_query`` in rows of 192 queries, for forward kernels that are faster over these; made at the first use, which reads
    the table. None where they are not, for masks that differ between heads, and for masks made at run time."""
    return _derive_once(self, "_tall", tall_rows)


def by_document(self: BlockMask) -> KernelTables | None:
    """Both tables in blocks that start where documents do, made at the first use, which reads the table.

    None where kernels are as fast over the mask's own tables, for masks that differ between heads, and for masks made at run time,
    except by ``attention_varlen``."""
    return _derive_once(self, "_by_document", document_blocks)


def _derive_once(mask: BlockMask, name: str, make: Callable[[BlockMask], KernelTables | None]) -> KernelTables | None:
    """make(mask), kept with the mask under this name; None where nothing may be kept."""
    if name not in mask.__dict__:
        if not mask.from_host or is_recorded(mask.device):
            return None
        # Launches may have been remembered with the first tables, so those stay, should two threads make some.
        mask.__dict__.setdefault(name, run_in_thread(make, mask))
    return cast("KernelTables | None", mask.__dict__[name])


for _make in (from_blocks, from_bsr, from_dense, from_flex, from_lists, from_mask_mod, per_batch, per_head):
    setattr(BlockMask, _make.__name__, staticmethod(_make))
for _method in (select, transpose, in_blocks_of):
    setattr(BlockMask, _method.__name__, _method)
for _derive in (tall, by_document):
    setattr(BlockMask, _derive.__name__, property(_derive))
