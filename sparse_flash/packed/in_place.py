"""Packed documents in place: the BlockMask of the packed axis, for patterns whose queries each keep one run of keys.

The runs of the queries of one long document are compiled once. Clipped to the keys of its own document and shifted to their place,
such a run becomes that of a packed query. A block of queries may belong to several documents. It keeps a block of keys fully if all
of its runs cover it, and otherwise gets a run tile.

Runs must ascend: then a block of queries of one document has few partial blocks, which bounds the tiles for any lengths. On a GPU
nothing synchronizes with the host, and shapes depend only on the numbers of tokens.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from ..compat.constants import constant_in_graphs
from ..compat.pytorch import is_plain_eager
from ..kernels.common.streams import current_device
from ..masks.block_mask import BlockMask
from ..masks.build import from_entries
from ..masks.cache import keep_if_captured, run_in_thread
from ..masks.document_blocks import document_tables, single_runs
from ..masks.grid import BlockGrid, concat_ranges
from ..masks.memory import cached_until_cleared
from ..masks.select_blocks import build_work
from ..masks.table import SPLIT_FIELDS, Entries, KernelTables, Table
from ..masks.tiles import EMPTY_TILE, TilePool, dense_batches, pack_runs
from . import gather_rows
from .repack import (
    BLOCK,
    PackedDocuments,
    PackPlan,
    documents_on_host,
    lay_out_documents,
    long_blocks,
    long_document,
    most_blocks,
    read_sizes,
    table_operator,
)

# Blocks that start where documents start pay for calls of so many tokens, with so many in a document on average, of drawn lengths,
# under patterns of which a query keeps runs of up to so many keys (docs/performance.md).
_LEAST_TOKENS, _LEAST_MEAN, _LEAST_RUN = 16384, 512, 1024


def build_packed_mask(pattern, queries: PackedDocuments, keys: PackedDocuments | None) -> BlockMask | None:
    """The mask of the packed axes under which each document attends only to itself, by the pattern; None unless each query of the
    pattern keeps one run of keys, ascending from query to query.

    pattern: a Pattern or its spec text. keys: None if they share the documents of the queries.
    """
    starts, sizes = read_sizes(queries, keys)
    q_tokens, q_longest, k_tokens, _, shares_documents = sizes
    if shares_documents and is_plain_eager(*starts) and _can_align_blocks(starts[0], q_tokens):
        runs = _runs_of(pattern, q_longest, q_longest, True, starts[0].device)
        if runs is not None and runs.longest >= _LEAST_RUN:
            return _MaskOfDocuments(runs, starts[0], q_tokens, q_longest)
    plan, constants = _make_plan(pattern, *sizes, starts[0].device)
    return BlockMask.from_tensors(q_tokens, k_tokens, BLOCK, _assemble(starts, plan, constants)) if plan else None


def _can_align_blocks(starts: torch.Tensor, tokens: int) -> bool:
    documents = len(starts) - 1
    return documents > 1 and tokens >= max(_LEAST_TOKENS, documents * _LEAST_MEAN) and gather_rows.can_use_kernels(starts.device)


@constant_in_graphs
def _make_plan(pattern, q_tokens, q_longest, k_tokens, k_longest, shares_documents, device) -> tuple[list[int], list[torch.Tensor]]:
    """(the fields of a PackPlan, the constants of the runs); both empty for a pattern that does not keep single runs."""
    runs = _runs_of(pattern, q_longest, k_longest, shares_documents, device)
    if runs is None:
        return [], []
    q_blocks, k_blocks = -(-q_tokens // BLOCK), -(-k_tokens // BLOCK)
    capacity = runs.find_capacity(q_blocks, k_blocks, -(-k_longest // BLOCK))
    plan = q_tokens, q_longest, k_tokens, k_longest, shares_documents, q_blocks, k_blocks, runs.before, *capacity, 2
    return [*map(int, plan)], runs.constants


class _LongRuns:
    """The runs of a long document, with ``before`` blocks of queries before the first key.

    constants: first and stop of each query, (2, queries) int32; mask_index and tile_bits of a mask without bit tiles.
    """

    def __init__(self, first: np.ndarray, stop: np.ndarray, before: int, device):
        self.before = before
        self._square = before == 0
        # The most keys spanned by BLOCK consecutive queries that start in a given block; they lie in it and the next.
        some = stop > first
        low, high = np.where(some, first, 1 << 30).reshape(-1, BLOCK).min(1), np.where(some, stop, 0).reshape(-1, BLOCK).max(1)
        reach = np.maximum(0, np.maximum(high, np.append(high[1:], 0)) - np.minimum(low, np.append(low[1:], 1 << 30)))
        self._blocks = -(-reach // BLOCK) + 1
        zeros = (torch.zeros(shape, dtype=torch.int32, device="cpu") for shape in ((1, 1), (2, BLOCK, BLOCK // 32)))
        self.longest = int((stop - first).max(initial=0))
        runs = torch.from_numpy(np.stack([first, stop]).astype(np.int32))
        self.constants = [t.to(device) for t in (runs, *zeros)]

    def find_capacity(self, q_blocks: int, k_blocks: int, longest: int) -> tuple[int, int]:
        """Upper bounds on the entries and on the tiles of all documents of up to ``longest`` key blocks together.

        A block of queries of one document touches as many blocks as its runs span, plus one. Any other block of queries, with
        several documents or past the last, touches at most the blocks from its first document's first key to its last document's
        last key. A document meets at most two of these, so they touch 2 * (k_blocks + q_blocks) blocks in total.

        All of the latter may be partial. So may the blocks of the two query blocks where a document's queries begin and cease to
        keep something: 2 * (k_blocks + 2 * q_blocks) in total. In any other block of queries, runs start or stop in the partial
        blocks. Both ascend, so a document has no more of either than it has blocks of keys and of queries:
        2 * (k_blocks + 2 * q_blocks) in total, as no more documents than query blocks have a query block to themselves.
        """
        each = np.minimum(self._blocks, longest + 1)
        if self._square:
            # The mean over a document's first query blocks, for the worst of its lengths.
            each = np.cumsum(each) / np.arange(1, len(each) + 1)
            each = each[: max(1, longest)]
        entries = int(np.ceil(q_blocks * each.max())) + 2 * (k_blocks + q_blocks)
        return max(2, entries), max(2, min(entries, 6 * k_blocks + 10 * q_blocks))


def _runs_of(pattern, q_longest: int, k_longest: int, shares_documents: bool, device) -> _LongRuns | None:
    """Returns the runs of documents up to these lengths; None for a pattern that does not keep single runs."""
    runs = _long_runs(pattern, *long_blocks(q_longest, k_longest, shares_documents), device)
    if runs is not None:
        keep_if_captured(runs, device)
    return runs


@cached_until_cleared(maxsize=64)
def _long_runs(pattern, k_blocks, before, device) -> _LongRuns | None:
    def make() -> _LongRuns | None:
        runs = single_runs(long_document(pattern, k_blocks, before, device).mask)
        return runs and _LongRuns(*runs, before, device)

    return run_in_thread(make)


class _MaskOfDocuments(BlockMask):
    """Its blocks may also start where documents start. A call reads either these or the mask's own: kernels make each table when it
    is first read, for the documents that there were when the mask was made."""

    _runs: _LongRuns
    _plan: PackPlan
    _layout: torch.Tensor

    def __init__(self, runs: _LongRuns, cu_seqlens: torch.Tensor, tokens: int, longest: int):
        blocks = -(-tokens // BLOCK)
        plan = PackPlan(tokens, longest, tokens, longest, True, blocks, blocks, before=0, entries=0, run_tiles=0, bit_tiles=2)
        _, mask_index, tile_bits = runs.constants
        vars(self).update(q_len=tokens, kv_len=tokens, block_size=BLOCK, keeps_all=False, mask_index=mask_index)
        vars(self).update(tile_bits=tile_bits, _runs=runs, _plan=plan, _layout=lay_out_documents(cu_seqlens, cu_seqlens, plan))

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
        entries, tiles = self._find_capacity(self._plan.q_blocks)
        plan = self._plan._replace(entries=entries, run_tiles=tiles)
        return BlockMask.from_tensors(*self.sizes, _fill_tables(self._runs.constants, self._layout, plan))

    @cached_property
    def by_document(self) -> KernelTables:
        from .kernels.document_blocks import fill_document_blocks

        runs, mask_index, tile_bits = self._runs.constants
        blocks, tokens = most_blocks(self.q_len, self._layout.shape[1] - 1), self.q_len
        with current_device(self.device):
            tables = fill_document_blocks(self._layout, runs, blocks, tokens, *self._find_capacity(blocks), BLOCK)
        rows, columns, tile_runs, starts = tables
        no_splits = tile_bits[:1, :2, :SPLIT_FIELDS]
        by_query, by_key = (Table(*lines) for lines in ([*rows, no_splits], [*columns, no_splits]))
        return document_tables(mask_index, by_query, by_key, (tile_runs, tile_bits), starts)

    def _find_capacity(self, blocks: int) -> tuple[int, int]:
        return self._runs.find_capacity(blocks, blocks, -(-self._plan.k_longest // BLOCK))


def _assemble_on_device(constants, q_starts, k_starts, plan: PackPlan) -> list[torch.Tensor]:
    """constants, plan: from ``_make_plan``. Returns the tensors of a BlockMask."""
    return _fill_tables(constants, lay_out_documents(q_starts, k_starts, plan), plan)


def _fill_tables(constants, layout: torch.Tensor, plan: PackPlan) -> list[torch.Tensor]:
    """The same. layout: from ``lay_out_documents``."""
    from .kernels.spans import fill_spans

    runs, mask_index, tile_bits = constants
    rows, k_rows, before = plan.q_blocks, plan.k_blocks, plan.before * BLOCK
    with current_device(layout.device):
        by_query, by_key, tile_runs = fill_spans(layout, runs, rows, k_rows, before, plan.entries, plan.run_tiles, BLOCK)
        work = build_work(by_query[:3], by_key[:3], k_rows, rows)
    return [mask_index, *by_query, *work[0], *by_key, *work[1], tile_runs, tile_bits]


def _assemble_on_host(constants, q_starts, k_starts, plan: PackPlan) -> list[torch.Tensor]:
    """The same as ``_assemble_on_device``, whose reference it is, using NumPy."""
    grid = BlockGrid(plan.q_tokens, plan.k_tokens, BLOCK)
    first, stop = _packed_runs(constants[0].cpu().numpy().astype(np.int64), q_starts, k_starts, plan)
    padded = np.zeros((2, grid.q_blocks * BLOCK), np.int64)
    padded[:, : plan.q_tokens] = first, stop
    first, stop = padded.reshape(2, grid.q_blocks, BLOCK)
    some = stop > first
    low, high = np.where(some, first, plan.k_tokens).min(1) // BLOCK, -(-stop.max(1) // BLOCK)
    count = np.maximum(0, high - low)
    rows = np.repeat(np.arange(grid.q_blocks), count)
    cols = concat_ranges(low, count)
    pool, tiles = TilePool(BLOCK), np.zeros(len(rows), np.int64)
    for batch in dense_batches(len(rows), BLOCK):
        key = cols[batch, None] * BLOCK
        here, there = (np.clip(bound[rows[batch]] - key, 0, BLOCK) for bound in (first, stop))
        tiles[batch] = pool.add_runs(pack_runs(here, there))
    kept = tiles != EMPTY_TILE
    made = from_entries(grid, Entries(rows[kept], cols[kept], tiles[kept]), pool)
    return [tensor.to(q_starts.device) for tensor in made.tensors()]


def _packed_runs(runs: np.ndarray, q_starts, k_starts, plan: PackPlan) -> tuple[np.ndarray, np.ndarray]:
    """(first, stop) of each packed query on the packed key axis, (q_tokens,) int64; both 0 if it keeps nothing."""
    (q_start, q_len), (k_start, k_len) = documents_on_host(q_starts, k_starts, plan)
    document = np.repeat(np.arange(len(q_len)), q_len)
    local = concat_ranges(np.zeros_like(q_len), q_len)
    first, stop = runs[:, plan.before * BLOCK + local + (k_len - q_len)[document]]
    stop = np.minimum(stop, k_len[document])
    packed = np.zeros((2, plan.q_tokens), np.int64)
    packed[:, q_start[document] + local] = np.where(first < stop, k_start[document] + np.stack([first, stop]), 0)
    return packed[0], packed[1]


_assemble = table_operator("assemble_runs", _assemble_on_device, _assemble_on_host, axes=False)
