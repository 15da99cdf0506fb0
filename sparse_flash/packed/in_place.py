"""Packed documents in place: the BlockMask of the packed axis, for patterns whose queries each keep one run of keys.

The runs of one long document are compiled once, then clipped to the keys of each document and shifted there. A block of queries, of
one or several documents, keeps a block of keys fully if all of its runs cover it, and otherwise gets a run tile. Runs must ascend,
which bounds the tiles for any lengths. On a GPU nothing synchronizes with the host.
"""

from functools import cached_property

import torch
from torch.nn.functional import pad

from ..compat.constants import constant_in_graphs
from ..compat.names import operator_name
from ..compat.pytorch import is_plain_eager
from ..core.triton import can_use_kernels as can_use_kernels
from ..kernels.common.streams import current_device
from ..masks.block_mask import BlockMask
from ..masks.cache import fake_tensors_if_needed
from ..masks.document_blocks import document_tables
from ..masks.fine import FINE
from ..masks.select_blocks import build_work
from ..masks.table import SPLIT_FIELDS, WORK_FIELDS, KernelTables, Table, most_splits
from .documents import BLOCK, PackedDocuments, most_blocks, read_sizes
from .long_document import LongRuns, long_document
from .moved import MovedDocuments, move_documents, sort_entries

# Blocks that start where documents start pay for calls of so many tokens, with so many in a document on average, of drawn lengths,
# under patterns of which a query keeps runs of up to so many keys. In the forward pass, blocks of 64 pay where a query keeps few
# keys, on average (docs/performance.md).
_LEAST_TOKENS, _LEAST_MEAN, _LEAST_RUN, _MOST_KEYS = 16384, 384, 1024, 384


def pack_documents(pattern, queries: PackedDocuments, keys: PackedDocuments | None) -> BlockMask | MovedDocuments:
    """The mask of the packed axes under which each document attends only to itself, by the pattern; moved documents unless each
    query keeps one run of keys, ascending. keys: None for the documents of the queries."""
    q_side, k_side = read_sizes(queries, keys)
    (starts, tokens, longest), device = q_side, q_side.cu_seqlens.device
    is_plain = is_plain_eager(starts, k_side.cu_seqlens)
    documents = starts.shape[0] - 1
    if keys is None and is_plain and can_use_kernels(device) and documents > 1:
        long_runs = long_document(pattern, longest, longest, True, device).runs
        if long_runs is not None:
            return _MaskOfDocuments(long_runs, starts, tokens, longest)
    sizes = tokens, longest, *k_side[1:], keys is None
    plan, constants = _make_plan(pattern, *sizes, device)
    if not plan:
        return move_documents(pattern, queries, keys)
    runs, mask_index, tile_bits = fake_tensors_if_needed(constants)
    if can_use_kernels(device):
        tables = (_assemble if is_plain else _assemble_operator)(runs, starts, k_side.cu_seqlens, *sizes, *plan)
    else:
        tables = _assemble_by_operations(runs, q_side, k_side, *plan)
    return BlockMask.from_tensors(tokens, k_side.tokens, BLOCK, [mask_index, *tables, tile_bits])


@constant_in_graphs
def _make_plan(pattern, q_tokens, q_longest, k_tokens, k_longest, shares_documents, device) -> tuple[list[int], list[torch.Tensor]]:
    """(the last arguments of ``_assemble``, the constants of the runs); both empty for a pattern that does not keep single runs."""
    document = long_document(pattern, q_longest, k_longest, shares_documents, device)
    if document.runs is None:
        return [], []
    capacity = document.runs.find_capacity(-(-q_tokens // BLOCK), -(-k_tokens // BLOCK), k_longest)
    return [document.before, *capacity], document.runs.constants


def _assemble(
    runs: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    q_tokens: int,
    q_longest: int,
    k_tokens: int,
    k_longest: int,
    shares_documents: bool,
    before: int,
    entries: int,
    tiles: int,
) -> list[torch.Tensor]:
    """The tensors of by_query and by_key, and tile_runs. before: of the long document. entries, tiles: capacities."""
    from .kernels.spans import lay_out

    with current_device(runs.device):
        queries = lay_out(q_starts, q_tokens, q_longest)
        keys = queries if shares_documents else lay_out(k_starts, k_tokens, k_longest)
    most = _most_blocks_of_rows(q_tokens, q_longest, k_tokens, shares_documents)
    blocks = -(-q_tokens // BLOCK), -(-k_tokens // BLOCK)
    return _fill_tables(queries, keys, runs, *blocks, before * BLOCK, entries, tiles, most)


_assemble_operator = torch.library.custom_op(operator_name("assemble_runs"), _assemble, mutates_args=())


@_assemble_operator.register_fake
def _(runs, q_starts, k_starts, q_tokens, q_longest, k_tokens, k_longest, shares_documents, before, entries, tiles):
    # No size is an argument's: a length that is known only as an argument's is no number in a backward graph.
    blocks, shapes = (-(-q_tokens // BLOCK), -(-k_tokens // BLOCK)), []
    for rows, most in zip(blocks, _most_blocks_of_rows(q_tokens, q_longest, k_tokens, shares_documents), strict=True):
        splits = most_splits(most)
        shapes += [(1, rows + 1), (1, rows, 2), (1, rows), (entries,), (entries,)]
        shapes += [(1, rows + splits, WORK_FIELDS), (1, max(2, splits), SPLIT_FIELDS)]
    return [runs.new_empty(shape) for shape in (*shapes, (tiles, BLOCK))]


def _most_blocks_of_rows(q_tokens, q_longest, k_tokens, shares_documents, block: int = BLOCK) -> tuple[int, int]:
    """The most blocks in a row and in a column. In self-attention, a row's first and last document may reach beyond its tokens."""
    k_rows, rows = -(-k_tokens // block), -(-q_tokens // block)
    if not shares_documents:
        return k_rows, rows
    most = min(rows, 2 * -(-q_longest // block) + 2)
    return most, most


def _fill_tables(
    queries, keys, runs, rows: int, k_rows: int, before: int, entries: int, tiles: int, most: tuple[int, int], block: int = BLOCK
) -> list[torch.Tensor]:
    """The same as ``_assemble``. most: blocks in a row and in a column. Other arguments as for ``fill_spans``."""
    from .kernels.spans import fill_spans

    with current_device(runs.device):
        by_query, by_key, tile_runs, _ = fill_spans(queries, keys, runs, rows, k_rows, before, entries, tiles, block)
        work = build_work(by_query[:3], by_key[:3], *most)
    return [*by_query[:5], *work[0], *by_key[:5], *work[1], tile_runs]


def _assemble_by_operations(
    runs: torch.Tensor, queries: PackedDocuments, keys: PackedDocuments, before: int, entries: int, tiles: int
) -> list[torch.Tensor]:
    """The same as ``_assemble`` in PyTorch operations, where there are no kernels."""
    rows, k_rows = -(-queries.tokens // BLOCK), -(-keys.tokens // BLOCK)
    at, (k_start, k_len) = queries.locate(), keys.extents()
    first, stop = runs.long()[:, before * BLOCK + at.within + (k_len - queries.extents()[1])[at.document]]
    stop = torch.minimum(stop, k_len[at.document])
    kept = torch.where(at.exists & (first < stop), torch.stack([first, stop]) + k_start[at.document], 0)
    first, stop = torch.unflatten(pad(kept, (0, rows * BLOCK - queries.tokens)), 1, (rows, BLOCK)).unbind(0)
    low = torch.where(first < stop, first, keys.tokens).amin(1) // BLOCK
    count = ((stop.amax(1) + BLOCK - 1) // BLOCK - low).clamp(min=0)
    end = count.cumsum(0)
    entry = torch.arange(entries, device=runs.device)
    row = torch.searchsorted(end, entry, right=True)
    exists = row < rows
    row = torch.where(exists, row, 0)
    col = torch.where(exists, low[row] + entry - (end - count)[row], 0)
    begin, last = ((bound[row] - col[:, None] * BLOCK).clamp(0, BLOCK) for bound in (first, stop))
    is_full, some = ((begin == 0) & (last == BLOCK)).all(1), begin < last
    exists &= some.any(1)
    has_tile = exists & ~is_full
    number = torch.where(has_tile, has_tile.cumsum(0) - 1, tiles)
    packed_runs = torch.where(some, begin | (last << 16), 0).int()
    tile_runs = packed_runs.new_zeros(tiles + 1, BLOCK).index_copy_(0, number, packed_runs)[:tiles]
    tile, kind = torch.where(has_tile, number, 0), has_tile.long()
    of_rows, by_query = sort_entries(torch.where(exists, 3 * row + kind, 3 * rows), col, tile, rows)
    of_columns, by_key = sort_entries(torch.where(exists, 3 * col + kind, 3 * k_rows), row, tile, k_rows)
    most = _most_blocks_of_rows(queries.tokens, queries.longest, keys.tokens, queries is keys)
    work, work_by_key = build_work(of_rows, of_columns, *most)
    return [*of_rows, *by_query, *work, *of_columns, *by_key, *work_by_key, tile_runs]


class _MaskOfDocuments(BlockMask):
    """Its blocks may also start where documents start, or have 64 tokens. Kernels make a table when a call first reads it."""

    _runs: LongRuns
    _layout: torch.Tensor
    _longest: int

    def __init__(self, runs: LongRuns, cu_seqlens: torch.Tensor, tokens: int, longest: int):
        from .kernels.spans import lay_out

        _, mask_index, tile_bits = runs.constants
        vars(self).update(q_len=tokens, kv_len=tokens, block_size=BLOCK, keeps_all=False, mask_index=mask_index)
        with current_device(cu_seqlens.device):
            layout = lay_out(cu_seqlens, tokens, longest)
        vars(self).update(tile_bits=tile_bits, _runs=runs, _longest=longest, _layout=layout)

    @property
    def by_query(self) -> Table:
        return self._grid_mask.by_query

    @property
    def by_key(self) -> Table:
        return self._grid_mask.by_key

    @property
    def tile_runs(self) -> torch.Tensor:
        return self._grid_mask.tile_runs

    @cached_property
    def _grid_mask(self) -> BlockMask:
        return self._make_blocks_of(BLOCK)

    @property
    def _mean(self) -> int:
        """The tokens of a document, on average."""
        return self.q_len // self._layout.shape[1]

    @cached_property
    def fine(self) -> KernelTables | None:
        if self._runs.mean_keys(self._mean) > _MOST_KEYS:
            return None
        made = self._make_blocks_of(FINE)
        return KernelTables(FINE, FINE, made.mask_index, made.by_query, made.by_key, made.tiles, None, False)

    def _make_blocks_of(self, size: int) -> BlockMask:
        """The mask on the fixed grid, in blocks of this size. It has no bit tiles."""
        blocks = -(-self.q_len // size)
        entries, tiles = ((BLOCK // size) ** 2 * count for count in self._find_capacity(-(-self.q_len // BLOCK)))
        most = _most_blocks_of_rows(self.q_len, self._longest, self.q_len, True, size)
        tables = _fill_tables(self._layout, self._layout, self._runs.constants[0], blocks, blocks, 0, entries, tiles, most, size)
        return BlockMask.from_tensors(self.q_len, self.kv_len, size, [self.mask_index, *tables, self.tile_bits])

    @cached_property
    def by_document(self) -> KernelTables | None:
        from .kernels.spans import fill_spans

        if self.q_len < _LEAST_TOKENS or self._mean < _LEAST_MEAN or self._runs.longest < _LEAST_RUN:
            return None
        runs, mask_index, tile_bits = self._runs.constants
        blocks, layout = most_blocks(self.q_len, self._layout.shape[1]), self._layout
        capacity = self._find_capacity(blocks)
        with current_device(self.device):
            *tables, tile_runs, starts = fill_spans(layout, layout, runs, blocks, blocks, 0, *capacity, BLOCK, self.q_len)
        no_splits = tile_bits[:1, :2, :SPLIT_FIELDS]
        by_query, by_key = (Table(*[*table, no_splits]) for table in tables)
        made = document_tables(mask_index, by_query, by_key, (tile_runs, tile_bits), starts[:-1])
        return made._replace(column_blocks=self._runs.mean_keys(self._mean) / BLOCK + 1)

    def _find_capacity(self, blocks: int) -> tuple[int, int]:
        return self._runs.find_capacity(blocks, blocks, self._longest)
