"""Packed documents in place: the BlockMask of the packed axis, for patterns whose queries each keep one run of keys.

The runs of the queries of one long document are compiled once. Clipped to the keys of its own document and shifted to their place,
such a run becomes that of a packed query. A block of queries may belong to several documents. It keeps a block of keys fully if all
of its runs cover it, and otherwise gets a run tile.

Runs must ascend: then a block of queries of one document has few partial blocks, which bounds the tiles for any lengths. On a GPU
nothing synchronizes with the host, and shapes depend only on the numbers of tokens.
"""

from __future__ import annotations

from operator import index
from typing import NamedTuple

import numpy as np
import torch

from ..backends import triton as portable
from ..compat.dynamo import constant_in_graphs
from ..compat.pytorch import is_plain_eager
from ..masks.block_mask import BlockMask
from ..masks.build import from_entries
from ..masks.cache import as_operations_take_them, keep_if_captured, made_apart
from ..masks.grid import BlockGrid, ranges
from ..masks.memory import remembered
from ..masks.select_blocks import work_of
from ..masks.table import Entries
from ..masks.tiles import EMPTY_TILE, TilePool, dense_batches, pack_runs, unpack_runs
from . import gather_rows
from .repack import (
    BLOCK,
    Side,
    allocated_in_full,
    documents_on_host,
    fake_size,
    fake_table,
    long_document,
    own_tensors,
    power_of_two,
)


class InPlacePlan(NamedTuple):
    """What the host knows of a call: tokens and longest document of queries and keys; queries of the long document before position
    0; capacity for entries and for tiles; whether keys share the documents of the queries."""

    q_tokens: int
    k_tokens: int
    q_longest: int
    k_longest: int
    before: int
    entries: int
    tiles: int
    same: int  # 0 or 1: operators take a plan as integers


def mask_in_place(pattern, queries: Side, keys: Side | None) -> BlockMask | None:
    """The mask of the packed axes under which each document attends only to itself, by the pattern; None unless each query of the
    pattern keeps one run of keys, ascending from query to query.

    pattern: a Pattern or its spec text. keys: None if they share the documents of the queries.
    """
    same = keys is None
    keys = queries if keys is None else keys
    starts = queries.cu_seqlens, keys.cu_seqlens
    # index() turns symbolic lengths into plain numbers: a compiled graph holds the runs of one long document.
    q_tokens, q_longest, k_tokens, k_longest = map(index, (*queries[1:], *keys[1:]))
    plan, constants = _planned(pattern, q_tokens, q_longest, k_tokens, k_longest, same, starts[0].device)
    if not plan:
        return None
    run = _assemble if is_plain_eager(*starts) else _assemble_operator
    return BlockMask.from_tensors(queries.tokens, keys.tokens, BLOCK, run(as_operations_take_them(constants), *starts, plan))


@constant_in_graphs
def _planned(pattern, q_tokens, q_longest, k_tokens, k_longest, same, device) -> tuple[list[int], list[torch.Tensor]]:
    """(the fields of an InPlacePlan, the arguments of _assemble); both empty for a pattern that does not keep single runs."""
    # Rounded to powers of two, to compile for few lengths.
    k_height, before = (power_of_two(-(-longest // BLOCK)) for longest in (k_longest, q_longest))
    runs = _long_runs(pattern, k_height, 0 if same else before, device)
    if runs is None:
        return [], []
    q_blocks, k_blocks = -(-q_tokens // BLOCK), -(-k_tokens // BLOCK)
    entries = runs.most_entries(q_blocks, k_blocks, -(-k_longest // BLOCK))
    tiles = min(entries, 6 * k_blocks + 10 * q_blocks)  # see most_entries
    sizes = (q_tokens, k_tokens, q_longest, k_longest, runs.before * BLOCK, max(2, entries), max(2, tiles), same)
    keep_if_captured(runs, device)
    return [*map(int, sizes)], runs.constants


class _LongRuns:
    """The runs of a document of ``k_blocks`` key blocks, with ``before`` blocks of queries before the first key.

    constants: first and stop of each query, (2, queries) int32; mask_index and tile_bits of a mask without bit tiles.
    """

    def __init__(self, first: np.ndarray, stop: np.ndarray, k_blocks: int, before: int, device):
        self.before = before
        self._square = before == 0
        # The most keys spanned by BLOCK consecutive queries that start in a given block; they lie in it and the next.
        some = stop > first
        low, high = np.where(some, first, 1 << 30).reshape(-1, BLOCK).min(1), np.where(some, stop, 0).reshape(-1, BLOCK).max(1)
        reach = np.maximum(0, np.maximum(high, np.append(high[1:], 0)) - np.minimum(low, np.append(low[1:], 1 << 30)))
        self._blocks = -(-reach // BLOCK) + 1
        zeros = (torch.zeros(shape, dtype=torch.int32, device="cpu") for shape in ((1, 1), (2, BLOCK, BLOCK // 32)))
        runs = torch.from_numpy(np.stack([first, stop]).astype(np.int32))
        self.constants = [t.to(device) for t in (runs, *zeros)]

    def most_entries(self, q_blocks: int, k_blocks: int, longest: int) -> int:
        """An upper bound on the entries of all documents of up to ``longest`` key blocks together.

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
        return int(np.ceil(q_blocks * each.max())) + 2 * (k_blocks + q_blocks)


@remembered(maxsize=64)
def _long_runs(pattern, k_blocks, before, device) -> _LongRuns | None:
    def make() -> _LongRuns | None:
        runs = single_runs(long_document(pattern, k_blocks, before, device).mask)
        return runs and _LongRuns(*runs, k_blocks, before, device)

    return made_apart(make)


def single_runs(mask: BlockMask) -> tuple[np.ndarray, np.ndarray] | None:
    """(first, stop) of the one run of keys that each query keeps, (q_len,) int64, both 0 if it keeps nothing. None if a query keeps
    several runs, runs do not ascend, or a query that keeps nothing lies between others.

    mask: a single mask of whole blocks.
    """
    rows, cols, kinds, tiles = mask.entries()
    if (kinds == 2).any():
        return None
    size, blocks = mask.block_size, mask.grid.q_blocks
    # First the full blocks, whose rows are all equal, then the run tiles.
    full = kinds == 0
    bounds = np.searchsorted(rows[full], np.arange(blocks + 1))
    count, col = np.diff(bounds), np.append(cols[full], 0)
    first = np.where(count > 0, col[bounds[:-1]] * size, mask.kv_len)[:, None].repeat(size, 1)
    stop = np.where(count > 0, (col[bounds[1:] - 1] + 1) * size, 0)[:, None].repeat(size, 1)
    kept = (count * size)[:, None].repeat(size, 1)
    rows, cols, runs = rows[~full], cols[~full] * size, mask.tile_runs.cpu().numpy()[tiles[~full]]
    for batch in dense_batches(len(rows), size):
        where, heads = np.unique(rows[batch], return_index=True)
        tile_first, tile_stop = unpack_runs(runs[batch])
        some, key = tile_stop > tile_first, cols[batch, None]
        low = np.minimum.reduceat(np.where(some, tile_first + key, mask.kv_len), heads)
        high = np.maximum.reduceat(np.where(some, tile_stop + key, 0), heads)
        first[where], stop[where] = np.minimum(first[where], low), np.maximum(stop[where], high)
        kept[where] += np.add.reduceat(tile_stop - tile_first, heads)
    first, stop, kept = first.ravel(), stop.ravel(), kept.ravel()
    (keeping,) = np.nonzero(kept)
    between = slice(keeping[0], keeping[-1] + 1) if len(keeping) else slice(0)
    ascend = (np.diff(first[between]) >= 0).all() and (np.diff(stop[between]) >= 0).all()
    if len(keeping) != len(first[between]) or not ascend or (stop - first != kept)[between].any():
        return None
    return np.where(kept > 0, first, 0), stop


def _assemble(constants: list[torch.Tensor], q_starts: torch.Tensor, k_starts: torch.Tensor, plan: list[int]):
    """constants, plan: from ``_planned``. Returns the tensors of a BlockMask."""
    run = _on_device if gather_rows.by_kernels(q_starts.device) else _on_host
    return run(constants, q_starts, k_starts, InPlacePlan(*plan))


@torch.library.custom_op("sparse_flash::assemble_runs", mutates_args=())
def _assemble_operator(
    constants: list[torch.Tensor], q_starts: torch.Tensor, k_starts: torch.Tensor, plan: list[int]
) -> list[torch.Tensor]:
    return own_tensors(_assemble(constants, q_starts, k_starts, plan), constants)


@_assemble_operator.register_fake
def _(constants, q_starts, k_starts, plan):
    plan, in_full = InPlacePlan(*plan), allocated_in_full(q_starts.device)
    shapes = [(1, 1)]
    rows, k_rows = (-(-tokens // BLOCK) for tokens in (plan.q_tokens, plan.k_tokens))
    shapes += fake_table(rows, plan.entries, k_rows, in_full) + fake_table(k_rows, plan.entries, rows, in_full)
    shapes += [(fake_size(plan.tiles, in_full), BLOCK), (2, BLOCK, BLOCK // 32)]
    return [constants[0].new_empty(shape) for shape in shapes]


def _on_device(constants, q_starts, k_starts, plan: InPlacePlan) -> list[torch.Tensor]:
    """``_assemble`` using kernels."""
    from ..kernels.packed.repack import lay_out
    from ..kernels.packed.spans import fill_spans

    runs, mask_index, tile_bits = constants
    rows, k_rows = -(-plan.q_tokens // BLOCK), -(-plan.k_tokens // BLOCK)
    with portable.current_device(q_starts.device):
        layout = lay_out(q_starts, k_starts, plan.q_tokens, plan.k_tokens, plan.q_longest, plan.k_longest, BLOCK, bool(plan.same))
        by_query, by_key, tile_runs = fill_spans(layout, runs, rows, k_rows, plan.before, plan.entries, plan.tiles, BLOCK)
        work = work_of(by_query[:3], by_key[:3], k_rows, rows)
    return [mask_index, *by_query, *work[0], *by_key, *work[1], tile_runs, tile_bits]


def _on_host(constants, q_starts, k_starts, plan: InPlacePlan) -> list[torch.Tensor]:
    """``_assemble`` using NumPy: the reference for the kernels."""
    grid = BlockGrid(plan.q_tokens, plan.k_tokens, BLOCK)
    first, stop = _packed_runs(constants[0].cpu().numpy().astype(np.int64), q_starts, k_starts, plan)
    padded = np.zeros((2, grid.q_blocks * BLOCK), np.int64)
    padded[:, : plan.q_tokens] = first, stop
    first, stop = padded.reshape(2, grid.q_blocks, BLOCK)
    some = stop > first
    low, high = np.where(some, first, plan.k_tokens).min(1) // BLOCK, -(-stop.max(1) // BLOCK)
    count = np.maximum(0, high - low)
    rows = np.repeat(np.arange(grid.q_blocks), count)
    cols = ranges(low, count)
    pool, tiles = TilePool(BLOCK), np.zeros(len(rows), np.int64)
    for batch in dense_batches(len(rows), BLOCK):
        key = cols[batch, None] * BLOCK
        here, there = (np.clip(bound[rows[batch]] - key, 0, BLOCK) for bound in (first, stop))
        tiles[batch] = pool.add_runs(pack_runs(here, there))
    kept = tiles != EMPTY_TILE
    mask = from_entries(grid, Entries(rows[kept], cols[kept], tiles[kept]), pool)
    return mask.to(q_starts.device).tensors()


def _packed_runs(runs: np.ndarray, q_starts, k_starts, plan: InPlacePlan) -> tuple[np.ndarray, np.ndarray]:
    """(first, stop) of each packed query on the packed key axis, (q_tokens,) int64; both 0 if it keeps nothing."""
    q_start, q_len = documents_on_host(q_starts, plan.q_tokens, plan.q_longest)
    k_start, k_len = (q_start, q_len) if plan.same else documents_on_host(k_starts, plan.k_tokens, plan.k_longest)
    document = np.repeat(np.arange(len(q_len)), q_len)
    local = ranges(np.zeros_like(q_len), q_len)
    first, stop = runs[:, plan.before + local + (k_len - q_len)[document]]
    stop = np.minimum(stop, k_len[document])
    packed = np.zeros((2, plan.q_tokens), np.int64)
    packed[:, q_start[document] + local] = np.where(first < stop, k_start[document] + np.stack([first, stop]), 0)
    return packed[0], packed[1]
