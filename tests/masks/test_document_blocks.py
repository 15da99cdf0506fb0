"""Both tables in blocks that start where documents start, derived from a mask's own blocks or made of packed documents."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE, tiles

import sparse_flash as sf
from sparse_flash.benchmarks.workload.masks import ragged_documents
from sparse_flash.core.backends import get_backend
from sparse_flash.masks import document_blocks
from sparse_flash.masks.block_mask import compile_up_to
from sparse_flash.masks.document_blocks import BLOCK
from sparse_flash.masks.table import KernelTables
from sparse_flash.masks.tiles import unpack_runs
from sparse_flash.packed import in_place
from sparse_flash.packed.documents import PackedDocuments, most_blocks
from sparse_flash.packed.long_document import long_document

FORMS = (
    "causal",
    "local(40)",
    "window(left=70)",
    "documents((0, 33, 40, 200, 385))",
    "prefix(50)",
    "sinks(20)",
    "~causal",
    "strided(2, 16)",
    "from_blocks('111/110/111', 100)",
    "from_blocks('011/111/111', 100)",
)


@pytest.fixture
def at_any_cost(monkeypatch):
    monkeypatch.setattr(document_blocks, "_LEAST_GAIN", 0)
    for limit in ("_LEAST_TOKENS", "_LEAST_MEAN", "_LEAST_RUN"):
        monkeypatch.setattr(in_place, limit, 0)


def pairs_of(blocks: KernelTables, name: str, tokens: int) -> np.ndarray:
    """(tokens, tokens) bool, by the work items of one of the tables; every block that is listed keeps something, none is listed
    twice, and unmasked blocks keep all keys that exist."""
    table, starts, column = getattr(blocks, name), blocks.starts.cpu().numpy(), np.arange(BLOCK)
    col_idx, tile_idx, tile_runs = (t.cpu().numpy() for t in (table.col_idx, table.tile_idx, blocks.tiles[0]))
    assert starts[0] == 0 and starts[-1] == tokens and set(np.diff(starts)) <= set(range(BLOCK + 1))
    kept, rows = np.zeros((tokens, tokens), bool), []
    for start, begin, runs, bits, end, used, to_place, document_end in table.work[0].tolist():
        (row, rest), stop = divmod(start + to_place, BLOCK), min(start + BLOCK, document_end)
        # Blocks without tokens come last, and no other is left out.
        assert used == (np.diff(starts) > 0).sum() and (len(rows) < used) == (start < stop)
        assert (rest, bits) == (0, end) and starts[row : row + 2].tolist() == [start, stop]
        assert document_end in starts and (col_idx[begin:end] < document_end).all()
        rows.append(row)
        for entry in range(begin, end):
            tile, other = np.ones((BLOCK, BLOCK), bool), int(col_idx[entry])
            if entry >= runs:
                first, last = unpack_runs(tile_runs[tile_idx[entry]])
                tile = (column >= first[:, None]) & (column < last[:, None])
            query, key = (start, other) if name == "by_query" else (other, start)
            height, width = (int(starts[starts > token][0]) - token for token in (query, key))
            part = kept[query : query + height, key : key + width]
            assert tile.any() and not part.any() and not tile[:height, width:].any()
            part[:] = tile[:height, :width]
    assert sorted(rows) == list(range(len(starts) - 1))
    return kept


ALONE = {  # the tokens of masks that have such tables
    "causal & documents((0, 33, 40, 200, 385, 900))": 900,
    "shifted(documents((0, 129, 257, 258, 600)), 0)": 900,  # tokens of no document
    "causal & local(50) & documents((0, 300, 301, 700))": 700,
    "causal & documents((0, 128, 256, 385))": 385,  # whole blocks, and one more token
}
several = st.lists(st.sampled_from(FORMS), min_size=1, max_size=3).map("&".join)


@settings(max_examples=80)
@given(case=st.sampled_from(list(ALONE.items())) | st.tuples(several, st.integers(1, 900)))
def test_blocks_by_document_keep_the_pairs_of_the_mask(case):
    pattern, tokens = case
    mask = compile_up_to(pattern, tokens, tokens, BLOCK, "cpu")
    with tiles(by_document=True):
        blocks = mask.by_document
    assert blocks is not None or pattern not in ALONE
    for table in ("by_query", "by_key") if blocks else ():
        assert np.array_equal(pairs_of(blocks, table, tokens), mask.to_dense().numpy())


def test_only_the_diagonal_of_a_causal_document_is_masked():
    table = sf.compile_mask(ragged_documents(65536).spec, 65536).by_document.by_query
    assert (table.row_ptr[0, 1:] - table.row_split[0, :, 0] == 1).all()


@pytest.mark.parametrize(
    "spec, pays",
    [
        (f"causal & documents({(*range(0, 15000, 1024), 15000)})", False),  # whole blocks
        (f"causal & documents({tuple(range(0, 16000, 1000))})", True),
        (f"documents({tuple(range(0, 16000, 1000))})", True),
        (f"causal & documents({(*range(0, 15000, 130), 15000)})", False),  # two blocks for 130 tokens
        ("causal", False),
        ("local(1)", False),  # a document for each token
        ("butterfly", False),
        (f"(causal | sinks(100)) & documents({tuple(range(0, 16000, 1000))})", True),
        (f"strided(10, block=1) & documents({tuple(range(0, 16000, 1000))})", False),  # several runs for a query
    ],
)
def test_blocks_lie_by_document_where_that_takes_fewer_steps(spec, pays):
    assert (sf.compile_mask(spec, 15000).by_document is not None) == pays


def test_only_square_masks_of_one_head_and_blocks_of_128_lie_by_document(at_any_cost):
    spec = "causal & documents((0, 300, 1000))"
    mask = sf.compile_mask(spec, 1000)
    assert mask.by_document is mask.by_document is not None
    assert sf.compile_mask(spec, 900, 1000).by_document is None
    assert sf.compile_mask(spec, 1000, block_size=256).by_document is None
    assert sf.BlockMask.per_head([spec, "local(200)"], 1000).by_document is None
    assert sf.BlockMask.from_tensors(*mask.sizes, mask.tensors()).by_document is None


PACKED = {  # pattern, cu_seqlens, tokens, the longest document
    "causal": ("causal", (0, 33, 40, 200, 385, 900), 900, 900),
    "both ways, tokens of no document": ("full", (0, 129, 257, 258, 600), 840, 840),
    "empty documents": ("causal & local(50)", (0, 0, 300, 300, 700), 701, 701),
    "documents beyond the longest": ("causal", (0, 500, 1000, 1300), 1301, 250),
    "all empty": ("causal", (0, 0, 0), 300, 300),
    "a late start": ("full", (5, 200, 300), 400, 400),
}


@pytest.fixture
def by_kernels(at_any_cost, monkeypatch):
    if reason := get_backend("triton").why_unavailable():
        pytest.skip(reason)
    monkeypatch.setattr(in_place, "can_use_kernels", lambda device: True)


def packed_mask(name: str, cu_seqlens=None) -> sf.BlockMask:
    pattern, bounds, tokens, longest = PACKED[name]
    starts = torch.tensor(bounds, device=DEVICE) if cu_seqlens is None else cu_seqlens
    return in_place.pack_documents(pattern, PackedDocuments(starts, tokens, longest), None)


@pytest.mark.parametrize("table", ["by_query", "by_key"])
@pytest.mark.parametrize("name", PACKED)
def test_kernels_lay_packed_documents_out_by_document(by_kernels, name, table):
    mask = packed_mask(name)
    assert np.array_equal(pairs_of(mask.by_document, table, mask.q_len), mask.to_dense().cpu().numpy())


@pytest.mark.parametrize("table", ["by_query", "by_key"])
@pytest.mark.parametrize("pattern", ["causal", "causal & local(300)"])
def test_blocks_of_a_packed_document_are_visited_together_the_longest_document_first(by_kernels, pattern, table):
    ends = 0, 100, 500, 1500, 1900, 2600
    side = PackedDocuments(torch.tensor(ends, device=DEVICE), ends[-1] + 300, 1000)
    work = getattr(in_place.pack_documents(pattern, side, None).by_document, table).work[0].cpu().numpy()
    work = work[work[:, 0] < work[:, 7]]  # of blocks with tokens
    # The tokens after the last document lie in its blocks.
    document = np.searchsorted(ends[:-1], work[:, 0], side="right") - 1
    changes = np.flatnonzero(np.diff(document)) + 1
    assert document[np.append(0, changes)].tolist() == [2, 4, 1, 3, 0] and len(changes) == 4
    assert all((np.diff(of_document[:, 4] - of_document[:, 1]) <= 0).all() for of_document in np.split(work, changes))


@given(
    pattern=st.sampled_from(["causal", "full", "causal & local(100)", "local(300)", "prefix(70)"]),
    lengths=st.lists(st.integers(0, 900), min_size=2, max_size=12).filter(any),
    beyond=st.integers(0, 300),
    slack=st.integers(0, 200),
)
@settings(max_examples=30)
def test_the_capacity_suffices_for_documents_of_any_lengths(pattern, lengths, beyond, slack):
    longest = max(lengths) + slack
    runs = long_document(pattern, longest, longest, True, torch.device("cpu")).runs
    blocks = most_blocks(sum(lengths) + beyond, len(lengths))
    (entries, tiles), (first, stop) = runs.find_capacity(blocks, blocks, longest), runs.constants[0].numpy()
    rows = touched = full = 0
    for length, more in zip(lengths, [0] * (len(lengths) - 1) + [beyond], strict=True):
        rows += -(-(length + more) // BLOCK)
        for low in range(0, length, BLOCK):
            here = slice(low, min(low + BLOCK, length))
            begin, end = first[here], np.minimum(stop[here], length)
            some = begin < end
            if some.any():
                touched += -(-end.max() // BLOCK) - begin[some].min() // BLOCK
                full += some.all() and max(0, end.min() // BLOCK + -begin.max() // BLOCK)
    assert rows <= blocks and touched <= entries and touched - full <= tiles


def test_lengths_that_change_after_a_call_change_nothing_of_its_tables(by_kernels):
    bounds = torch.tensor(PACKED["causal"][1], device=DEVICE)
    mask, wanted = packed_mask("causal", bounds), packed_mask("causal").to_dense()
    bounds.fill_(0)
    assert np.array_equal(pairs_of(mask.by_document, "by_query", mask.q_len), wanted.cpu().numpy())
    assert torch.equal(mask.to_dense(), wanted)
