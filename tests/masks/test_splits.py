"""Splits of heavy rows in tables made on a device: by tensor operations, by the kernel, and how their results are combined."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accepted import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import assert_work_is_whole
from oracle import DEVICE, heavy_rows_split

import sparse_flash as sf
from sparse_flash.masks.table import build_split_work, most_splits, split_limits
from sparse_flash.packed import in_place, moved
from sparse_flash.packed.documents import PackedDocuments


def rows_of(counts):
    """(row_ptr, row_split, row_order) of tables with this many entries in each row; a third of them of each kind."""
    counts = np.asarray(counts)
    end = counts.cumsum().reshape(counts.shape)
    ptr = np.concatenate([np.concatenate([[0], end[:-1, -1]])[:, None], end], 1)
    split = np.stack([ptr[:, :-1] + counts // 3, ptr[:, :-1] + counts * 2 // 3], -1)
    order = np.argsort(-counts, axis=1, kind="stable")
    return tuple(torch.from_numpy(t.astype(np.int32)).to(DEVICE) for t in (ptr, split, order))


counts = st.tuples(st.integers(1, 3), st.integers(1, 90), st.sampled_from([1, 64, 100, 5000]), st.integers(0, 9999)).map(
    lambda n: (np.random.default_rng(n[3]).random(n[:2]) ** 8 * (n[2] + 1)).astype(np.int64)
)


@settings(max_examples=40)
@given(counts=counts)
def test_items_cover_every_entry_once_and_rows_list_their_splits(counts):
    ptr, split, order = rows_of(counts)
    work, lines = (t.tolist() for t in build_split_work(ptr, split, order, longest=10_000))
    rows = counts.shape[1]
    in_use = [sum(item[0] < rows for item in items) for items in work]
    assert work[0][0][6] == max(in_use) and all(len(items) == rows + 64 for items in work)
    for mask, items in enumerate(work):
        assert_work_is_whole(SimpleNamespace(row_ptr=ptr, row_split=split, work=torch.tensor(work, device=DEVICE)), mask)
        used = items[: in_use[mask]]
        listed = [(row, first, n) for row, first, n, _ in lines[mask] if n]
        assert len(listed) <= 32 and sum(n for *_, n in listed) <= 64 and len(lines[mask]) == 64
        expected = [row for row, first, n in listed for _ in range(n)]
        assert [item[0] for item in used if item[5]] == expected
        assert [item[5] for item in used[: len(expected)]] == list(range(1, len(expected) + 1))
        assert [first for _, first, _ in listed] == [sum(n for *_, n in listed[:i]) for i in range(len(listed))]
        whole = [item[4] - item[1] for item in used[len(expected) :]]
        assert whole == sorted(whole, reverse=True)


def test_a_global_row_of_a_million_tokens_is_balanced():
    counts = np.full((1, 8192), 10)
    counts[0, 5000] = 8192
    work, lines = build_split_work(*rows_of(counts), longest=8192)
    length = work[0, :, 4] - work[0, :, 1]
    # None of 132 multiprocessors has more to do than its share, even if there is one head.
    assert lines[0, 0].tolist() == [5000, 0, 23, 0] and length.max() * 132 < counts.sum()
    assert work[0, 0, 6] == 8192 + 22


@pytest.mark.parametrize("side", ["by_query", "by_key"])
def test_a_block_map_splits_the_rows_that_the_compiled_mask_splits(side):
    compiled = sf.compile_mask("local(128) | global_tokens(128)", 20000, 18000)
    made = sf.BlockMask.from_blocks(compiled.kept_blocks(), 128, 20000, 18000, within=compiled)
    ours, theirs = getattr(made, side), getattr(compiled, side)
    split = [table.splits[0][table.splits[0, :, 2] > 0] for table in (ours, theirs)]
    assert len(split[0]) > 0 and torch.equal(split[0][:, 0], split[1][:, 0])
    heaviest = [(table.work[0, :, 4] - table.work[0, :, 1]).max().item() for table in (ours, theirs)]
    assert heaviest[0] <= max(48, heaviest[1])


@pytest.mark.parametrize("way", ["in place", "moved"])
@needs_triton
def test_packed_documents_are_split_by_query_and_by_key(way):
    documents = PackedDocuments(torch.tensor([0, 40, 700, 760], device=DEVICE), 760, 700)
    with pytest.MonkeyPatch.context() as patch, heavy_rows_split():
        patch.setattr(in_place, "can_use_kernels", lambda device: True)
        make = in_place.pack_documents if way == "in place" else lambda *call: moved.move_documents(*call).mask
        mask = make("causal", documents, None)
        for table in (mask.by_query, mask.by_key):
            assert (table.splits[0, :, 2] > 1).any()
            expected = build_split_work(*table[:3], longest=mask.grid.q_blocks)
            assert torch.equal(table.work, expected[0]) and torch.equal(table.splits, expected[1])


def test_tables_of_one_map_begin_where_launches_need_them():
    for shape in ((64, 64), (64, 128), (128, 64)):
        mask = sf.BlockMask.from_blocks(torch.ones(shape, dtype=torch.bool, device=DEVICE), 16)
        assert {t.data_ptr() % 16 for table in (mask.by_query, mask.by_key) for t in table} == {0}


def test_splits_are_per_head_and_short_maps_have_none():
    blocks = torch.zeros(1, 3, 70, 80, dtype=torch.bool)
    blocks[0, 0, 5] = blocks[0, 1, :, 7] = True
    mask = sf.BlockMask.from_blocks(blocks, 16)
    listed = [[line[:3] for line in table.splits[:, 0].tolist()] for table in (mask.by_query, mask.by_key)]
    assert listed == [[[5, 0, 2], [0, 0, 0], [0, 0, 0]], [[0, 0, 0], [7, 0, 2], [0, 0, 0]]]
    assert mask.by_query.work[0, 0, 6] == 71 and mask.by_key.work[0, 0, 6] == 81
    short = sf.BlockMask.from_blocks(blocks[:, :, :63, :63], 16)
    assert not short.by_query.is_split and not short.by_key.is_split


@settings(max_examples=15)
@given(counts=counts, by_key=counts)
@needs_triton
def test_the_kernel_makes_what_tensor_operations_make(counts, by_key):
    from sparse_flash.kernels.tables import splits

    def launch(kernel, grid, arguments, *rest):
        for written in (*arguments[2], *arguments[3]):
            written.fill_(-7)
        launched(kernel, grid, arguments, *rest)

    launched, by_key = splits.launch, np.resize(by_key, (len(counts), by_key.shape[1]))
    tables, longest = (rows_of(counts), rows_of(by_key)), (10_000, 60 if by_key.max() < 60 else 10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "launch", launch)
        made = splits.split_rows(*tables, *map(most_splits, longest), *split_limits())
    for table, most, (work, lines) in zip(tables, longest, made, strict=True):
        expected = build_split_work(*table, most)
        assert torch.equal(work, expected[0]) and torch.equal(lines, expected[1])
