"""Makes the tables of block maps computed at run time, and block maps of lists of blocks, on their device."""

from importlib.util import find_spec
from typing import TypeAlias

import torch

from ..compat.names import operator_name
from ..compat.pytorch import in_differentiating_transform, is_plain_eager, is_recorded
from ..kernels.common.streams import current_gpu
from .grid import BlockGrid
from .mask_tables import MaskTables
from .memory import cached_until_cleared
from .table import SPLIT_FIELDS, WORK_FIELDS, Table, build_split_work, most_splits, split_limits, work_of_whole_rows

_HAS_TRITON = find_spec("triton") is not None
RowArrays: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def select_by_maps(maps: torch.Tensor, within: MaskTables) -> list[torch.Tensor]:
    """The tensors of a mask of the blocks of ``within``, one mask, that each map keeps, with room for all. maps: (batch, heads,
    q_blocks, kv_blocks) bool, or (batch, heads, q_blocks, ceil(kv_blocks / 32)) int32 of bits."""
    if not torch.compiler.is_compiling() and in_differentiating_transform():
        raise NotImplementedError(
            "masks of blocks are not made under vmap or torch.func's transforms; make the mask before, or put what vmap would map "
            "over into the batch"
        )
    batch, heads = maps.shape[:2]
    grid = within.grid
    most = batch * heads * len(within.by_query.col_idx)
    if max(most, batch * heads * (max(grid.shape) + 1)) >= 2**31:
        raise ValueError(
            f"{batch} x {heads} maps of {grid.q_blocks} x {grid.kv_blocks} blocks may keep {most:,} blocks, more than a table can "
            "number; use a larger block_size, or fewer heads at a time"
        )
    if torch.compiler.is_compiling():
        tables = select_tables(maps.flatten(0, 1), [*within.by_query, *within.by_key], grid.kv_blocks)
    else:
        tables = _select_both(maps.flatten(0, 1), within.by_query, within.by_key, grid.shape, within)
    index = _number_masks if is_recorded(maps.device) else _lasting_numbers
    return [index(batch, heads, maps.device), *tables, *within.tiles]


def _number_masks(batch: int, heads: int, device: torch.device) -> torch.Tensor:
    """(batch, heads) int32, a mask for each head."""
    return arange_int32(batch * heads, device).view(batch, heads)


_lasting_numbers = cached_until_cleared(maxsize=64)(_number_masks)


@torch.library.custom_op(operator_name("select_tables"), mutates_args=())
def select_tables(maps: torch.Tensor, within: list[torch.Tensor], kv_blocks: int) -> list[torch.Tensor]:
    """The tensors of both tables of the entries that each map keeps, for compiled graphs, which then compute what eager calls do.
    maps: (masks, q_blocks, kv_blocks) bool, or int32 of bits. within: the tensors of one mask's two tables."""
    by_query, by_key = Table(*within[: len(within) // 2]), Table(*within[len(within) // 2 :])
    tensors = _select_both(maps, by_query, by_key, (maps.shape[1], kv_blocks))
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    # The results of an operator must not share memory.
    return [tensor.clone() if memory.count(at) > 1 else tensor for tensor, at in zip(tensors, memory, strict=True)]


@select_tables.register_fake
def _(maps: torch.Tensor, within: list[torch.Tensor], kv_blocks: int) -> list[torch.Tensor]:
    by_query, masks, q_blocks = Table(*within[: len(within) // 2]), maps.shape[0], maps.shape[1]
    shapes: list[tuple[int, ...]] = []
    room = max(2, masks * len(by_query.col_idx))
    for rows, longest in ((q_blocks, kv_blocks), (kv_blocks, q_blocks)):
        splits = most_splits(longest)
        shapes += [(masks, rows + 1), (masks, rows, 2), (masks, rows), (room,), (room,)]
        shapes += [(masks, rows + splits, WORK_FIELDS), (masks, max(2, splits), SPLIT_FIELDS)]
    return [maps.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _select_both(
    maps: torch.Tensor, by_query: Table, by_key: Table, shape: tuple[int, int], within: MaskTables | None = None
) -> list[torch.Tensor]:
    """The tensors of both tables. within: keeps the launches of kernels."""
    if can_launch_kernel(maps):
        from ..kernels.tables.select import select_tables

        room, of_splits = max(2, maps.shape[0] * len(by_query.col_idx)), (most_splits(shape[1]), most_splits(shape[0]))
        tables = select_tables(maps.contiguous(), by_query, by_key, shape, room, (*of_splits, *split_limits()), within)
    else:
        tables = select_in_torch(maps, by_query, by_key, shape)
    return [tensor for table in tables for tensor in table]


def dense_tensors(grid: BlockGrid, device: torch.device) -> list[torch.Tensor]:
    """The tensors of the mask that keeps every pair, made on the device: a graph's replays would repeat a copy from the host."""
    size, cut_row, cut_col = grid.block_size, grid.q_len % grid.block_size, grid.kv_len % grid.block_size
    # The tile that says where a cut block ends: 0 in the last column, 1 in the last row, 2 in the corner.
    tile = torch.zeros(grid.shape, dtype=torch.int32, device=device)
    if cut_row:
        tile[-1] = 1
        tile[-1, -1:] += cut_col > 0
    heights = [size, cut_row or size, cut_row or size]
    widths = [cut_col or size, size, cut_col or size]
    token = arange_int32(size, device)
    runs = [(token < h).to(torch.int32) * (w << 16) for h, w in zip(heights, widths, strict=True)]
    by_query, by_key = build_dense_table(tile, cut_row > 0, cut_col > 0), build_dense_table(tile.T, cut_col > 0, cut_row > 0)
    mask_index, tile_bits = (tile.new_zeros(shape) for shape in ((1, 1), (2, size, -(-size // 32))))
    return [mask_index, *by_query, *by_key, torch.stack(runs), tile_bits]


def map_from_lists(indices: torch.Tensor, counts: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The block map of lists of blocks of keys, (batch | 1, heads | 1, *shape) bool. indices: (batch | 1, heads | 1, q_blocks, n)
    integers; past its count a row may hold anything. counts: without n. On a GPU, blocks beyond the keys are left out."""
    if indices.shape[2] != shape[0]:
        raise ValueError(f"kv_indices must have a row for each of {shape[0]} blocks of queries; got shape {tuple(indices.shape)}")
    entry, row = (torch.arange(n, device=indices.device) for n in (indices.shape[3], shape[0]))
    listed, exists = entry < counts[..., None], (indices >= 0) & (indices < shape[1])
    if indices.device.type == "cpu" and is_plain_eager(indices) and bool((listed & ~exists).any()):
        raise ValueError(f"kv_indices must be blocks of keys, 0 to {shape[1] - 1}; got {indices[listed & ~exists][0]}")
    # Other entries go to one element past the map.
    index = torch.where(listed & exists, row[:, None] * shape[1] + indices, shape[0] * shape[1])
    kept = torch.zeros((*index.shape[:2], shape[0] * shape[1] + 1), dtype=torch.bool, device=indices.device)
    return kept.scatter_(2, index.flatten(2), True)[..., :-1].unflatten(2, shape)


def by_head(name: str, kept: object, sides: str) -> torch.Tensor:
    """A bool tensor as (batch | 1, heads | 1, ...). sides: the names of its last two dimensions. Raises TypeError or ValueError."""
    if not isinstance(kept, torch.Tensor):
        raise TypeError(f"{name} must be a bool tensor; got {type(kept).__name__}; use torch.tensor(...)")
    if kept.dtype != torch.bool or kept.dim() not in (2, 4) or 0 in kept.shape:
        raise ValueError(
            f"{name} must be a bool tensor of shape ({sides}) or (batch | 1, heads | 1, {sides}), none of it 0; got "
            f"{kept.dtype} of shape {tuple(kept.shape)}; compare or use .bool()"
        )
    return kept if kept.dim() == 4 else kept[None, None]


def select_in_torch(maps: torch.Tensor, by_query: Table, by_key: Table, shape: tuple[int, int]) -> list[Table]:
    """The tables by_query and by_key of the entries of one mask's tables that each map keeps, in operations of fixed shapes. maps:
    (masks, q_blocks, kv_blocks) bool, or (masks, q_blocks, ceil(kv_blocks / 32)) int32 of bits. shape: of the grid."""
    if maps.dtype != torch.bool:
        maps = ((maps[..., None] >> arange_int32(32, maps.device)) & 1).flatten(-2)[..., : shape[1]].bool()
    rows, entries = _select_entries(maps, by_query)
    columns, entries_by_key = _select_entries(maps.mT, by_key)
    work, work_by_key = build_work(rows, columns, shape[1], shape[0])
    return [Table(*rows, *entries, *work), Table(*columns, *entries_by_key, *work_by_key)]


def _select_entries(maps: torch.Tensor, table: Table) -> tuple[RowArrays, tuple[torch.Tensor, torch.Tensor]]:
    """((row_ptr, row_split, row_order), (col_idx, tile_idx)) of the entries that each map, (masks, rows, cols) bool, keeps."""
    masks, rows, listed = len(maps), maps.shape[1], len(table.col_idx)
    ptr, split = table.row_ptr[0].long(), table.row_split[0].long()
    row = torch.searchsorted(ptr[1:], torch.arange(listed, device=maps.device), right=True)
    exists = row < rows  # col_idx may hold anything past the last row's entries
    kept = maps[:, torch.where(exists, row, 0), torch.where(exists, table.col_idx, 0)] & exists
    kept_before = torch.nn.functional.pad(kept.flatten().cumsum(0), (1, 0))
    # The kept entries come first, in order. The others are written to one more place, which is cut off.
    target = torch.where(kept.flatten(), kept_before[:-1], masks * listed)
    cols, tiles = (numbers.new_zeros(masks * listed + 2) for numbers in (table.col_idx, table.tile_idx))
    cols[target], tiles[target] = table.col_idx.repeat(masks), table.tile_idx.repeat(masks)
    first_entry = torch.arange(masks, device=maps.device)[:, None] * listed
    new_ptr, new_split = (kept_before[first_entry + bounds].int() for bounds in (ptr, split.flatten()))
    order = torch.argsort(new_ptr.diff(dim=-1), dim=-1, descending=True, stable=True).int()
    size = max(2, masks * listed)
    return (new_ptr, new_split.view(masks, rows, 2), order), (cols[:size], tiles[:size])


def build_work(by_query: RowArrays, by_key: RowArrays, longest: int, k_longest: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(work, splits) of the two tables of a mask made on their device, without synchronization. longest, k_longest: the most blocks
    that a row of each may have."""
    if not can_launch_kernel(by_query[0]):
        return [build_split_work(*by_query, longest), build_split_work(*by_key, k_longest)]
    from ..kernels.tables.splits import split_rows

    return split_rows(by_query, by_key, most_splits(longest), most_splits(k_longest), *split_limits())


def can_launch_kernel(tensor: torch.Tensor) -> bool:
    """Whether a kernel may be launched on this tensor: on the current GPU, with nothing that has to see operations."""
    device = tensor.device
    if device.type != "cuda" or not is_plain_eager(tensor):
        return False
    return device.index == current_gpu() and _HAS_TRITON  # type: ignore[misc]  # None only in builds without GPUs


def build_dense_table(tile: torch.Tensor, cut_row: bool, cut_col: bool) -> Table:
    """All blocks row by row. Cut blocks come last in their row, or fill the last row, so they follow the full ones."""
    rows, cols = tile.shape
    ptr = arange_int32(rows + 1, tile.device) * cols
    runs = ptr[1:] - int(cut_col)
    if cut_row:
        runs[-1] = ptr[-2]
    order = arange_int32(rows, tile.device)
    col_idx = arange_int32(cols, tile.device).repeat(rows)
    work = work_of_whole_rows(order, torch.stack([ptr[:-1], runs, ptr[1:], ptr[1:]], -1))
    split = torch.stack([runs, ptr[1:]], -1)
    splits = ptr.new_zeros((1, 2, SPLIT_FIELDS))
    return Table(ptr[None], split[None], order[None], col_idx, tile.reshape(-1), work[None], splits)


def arange_int32(stop: int, device: torch.device) -> torch.Tensor:
    return torch.arange(stop, dtype=torch.int32, device=device)
