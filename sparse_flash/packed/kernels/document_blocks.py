"""The tables of packed documents in blocks that start where documents start: see ``masks/document_blocks.py``.

    1. lay_out              where each document starts and ends, see ``spans.py``                            one program
    2. find_own_spans       where each block starts; the run of each query, and what a query block touches   one program per block
    3. build_span_tables      both tables, see ``spans.py``                                                    two launches

Tokens behind a document that belong to no document lie in its last blocks, and in blocks of their own. The order of blocks is
document by document, the longest first: see ``masks.table.groups_of``.
"""

import torch
import triton
import triton.language as tl

from ...kernels.launch.launch import launch
from .spans import Group, build_span_tables, empty_spans, store_group, store_span

_DOCUMENTS_TOGETHER = 512


@triton.jit(do_not_specialize=["documents", "rows", "tokens", "lines"])
def find_own_spans_kernel(
    layout, runs, spans, bounds, starts, documents, rows, tokens, lines, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """``find_spans_kernel`` for these blocks, with bounds on the axis of whole blocks. starts: (rows + 2,) int32; past the last
    block the number of tokens, and in the end how many blocks there are."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    document, first_token, first_row, end, above = row * 0 - 1, row * 0, row * 0, row * 0, row * 0
    own_blocks = row * 0
    for begin in range(0, documents, CHUNK):
        other = begin + lane
        start, stop, blocks = _load_extents(layout, other, documents, tokens, BLOCK)
        first = above + tl.cumsum(blocks, 0) - blocks
        mine = (first <= row) & (row < first + blocks)
        document = tl.maximum(document, tl.max(tl.where(mine, other, -1), 0))
        first_token += tl.sum(tl.where(mine, start, 0), 0)
        first_row += tl.sum(tl.where(mine, first, 0), 0)
        own_blocks += tl.sum(tl.where(mine, blocks, 0), 0)
        end += tl.sum(tl.where(mine, stop, 0), 0)
        above += tl.sum(blocks, 0)
    inside = document >= 0
    begin = tl.where(inside, first_token + (row - first_row) * BLOCK, tokens)
    end = tl.where(inside, end, tokens)
    tl.store(starts + row, begin)
    tl.store(starts + rows, tokens, mask=row == rows - 1)
    tl.store(starts + rows + 1, above, mask=row == rows - 1)

    before = row * 0
    for others in range(0, documents, CHUNK):
        other = others + lane
        _, _, blocks = _load_extents(layout, other, documents, tokens, BLOCK)
        longer = (blocks > own_blocks) | ((blocks == own_blocks) & (other < document))
        before += tl.sum(tl.where(longer, blocks, 0), 0)
    # Blocks of no document come last.
    first_row = tl.where(inside, first_row, above)
    store_group(spans, row, rows, Group(first_row, tl.where(inside, first_row + own_blocks, rows), before))

    token = begin + tl.arange(0, BLOCK)
    exists = token < end
    line = layout + tl.maximum(document, 0)
    start, length = tl.load(line), tl.load(line + documents)
    position = token - start
    some = exists & (position >= 0) & (position < length)
    first = tl.load(runs + position, mask=some, other=0)
    stop = tl.minimum(tl.load(runs + lines + position, mask=some, other=0), length)
    store_span(spans, bounds, row, rows, first, stop, first_row * BLOCK + start - first_token, exists, BLOCK)


@triton.jit
def _load_extents(layout, document, documents, tokens, BLOCK: tl.constexpr):
    """(the first token of each document, where its last block ends, how many blocks it has). Tokens before the first document, if
    there are any, lie in its blocks, and so do those behind a document."""
    starts = layout + document
    start = tl.load(starts, mask=(document > 0) & (document < documents), other=0)
    start = tl.where(document < documents, start, tokens)
    stop = tl.load(starts + 1, mask=document + 1 < documents, other=0)
    stop = tl.where(document + 1 < documents, stop, tokens)
    return start, stop, (stop - start + BLOCK - 1) // BLOCK


def fill_document_blocks(layout, runs, rows: int, tokens: int, entries: int, tiles: int, block: int):
    """(row_ptr, row_split, row_order, col_idx, tile_idx, work) of by_query and of by_key, tile_runs, starts.

    layout: from ``lay_out``, of queries and keys. runs: (2, lines) int32, see ``find_spans_kernel``.
    rows: how many blocks there may be. tokens: of all documents. entries, tiles: capacities.
    """
    spans, bounds = empty_spans(rows, block, layout.device)
    starts = torch.empty(rows + 2, dtype=torch.int32, device=layout.device)
    documents = layout.shape[1]
    arguments = [layout, runs, spans, bounds, starts, documents, rows, tokens, runs.shape[1]]
    constants = {"BLOCK": block, "CHUNK": min(_DOCUMENTS_TOGETHER, triton.next_power_of_2(documents))}
    launch(find_own_spans_kernel, (rows, 1), arguments, constants, {"num_warps": 4})
    return *build_span_tables(spans, bounds, rows, entries, tiles, block, starts), starts[:-1]
