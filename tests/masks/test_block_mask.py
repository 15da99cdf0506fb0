"""BlockMask: the table decodes as its docstring says, both ways; block maps at run time; masks of several heads."""

import io
import pickle
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import heavy_rows_split

import sparse_flash as sf
from sparse_flash.masks import build, coarsen
from sparse_flash.masks import table as tables
from sparse_flash.masks.costs import Counts


def decoded(mask, number, table, rows, cols):
    """One stored mask, by the five lines of BlockMask's docstring: of each listed block, (row_queries, block_size) bool."""
    size, (tile_runs, tile_bits), found = mask.block_size, mask.tiles, {}
    for r in range(rows):
        begin, end = table.row_ptr[number, r].item(), table.row_ptr[number, r + 1].item()
        runs, bits = table.row_split[number, r].tolist()
        assert begin <= runs <= bits <= end
        for e in range(begin, end):
            tile = None if e < runs else (tile_runs if e < bits else tile_bits)[table.tile_idx[e]]
            block = np.ones((mask.row_queries, size), bool)
            if tile is not None and e < bits:
                first, stop = (tile.numpy() & 0xFFFF)[:, None], (tile.numpy() >> 16)[:, None]
                block = (np.arange(size) >= first) & (np.arange(size) < stop)
            elif tile is not None:
                words = tile.numpy().view(np.uint32)
                block = np.array([[row[c // 32] >> np.uint32(c % 32) & 1 for c in range(size)] for row in words], bool)
            key = (r, table.col_idx[e].item())
            assert key not in found and key[1] < cols and block.any() and (tile is None or not block.all())
            found[key] = block
    return found


def assembled(found, mask, q_len, kv_len, by_key=False):
    size = mask.block_size
    dense = np.zeros((-(-q_len // size) * size, -(-kv_len // size) * size), bool)
    for (r, c), block in found.items():
        r, c = (c, r) if by_key else (r, c)
        dense[r * size : (r + 1) * size, c * size : (c + 1) * size] = block
    # Blocks cut short by the lengths have tiles for that: nothing outside is kept.
    assert not dense[q_len:].any() and not dense[:, kv_len:].any()
    return dense[:q_len, :kv_len]


@settings(max_examples=80)
@given(pattern=strategies.expressions, lengths=strategies.lengths, block_size=strategies.block_sizes)
def test_both_tables_decode_by_the_docstring_to_the_same_pairs(pattern, lengths, block_size):
    mask = sf.compile_mask(pattern, *lengths, block_size)
    q_blocks, kv_blocks = mask.grid.shape
    rows = decoded(mask, 0, mask.by_query, q_blocks, kv_blocks)
    cols = decoded(mask, 0, mask.by_key, kv_blocks, q_blocks)
    assert {(r, c) for r, c in rows} == {(r, c) for c, r in cols}
    expected = strategies.dense(pattern, *lengths)
    np.testing.assert_array_equal(assembled(rows, mask, *lengths), expected)
    np.testing.assert_array_equal(assembled(cols, mask, *lengths, by_key=True), expected)


def heaviest_first(weights: torch.Tensor) -> bool:
    """Whether weights descend; those within a quarter of the heaviest count as equal if three quarters of them are."""
    near = weights >= 0.75 * weights.amax() if len(weights) else weights
    if 4 * near.sum() >= 3 * len(weights):
        weights = torch.where(near, weights.amax(), weights)
    return bool((weights.diff() <= 0).all())


@settings(max_examples=80)
@given(pattern=strategies.expressions, lengths=strategies.lengths, block_size=strategies.block_sizes)
def test_rows_are_visited_heaviest_first_and_columns_ascend_within_each_kind(pattern, lengths, block_size):
    mask = sf.compile_mask(pattern, *lengths, block_size)
    for table in (mask.by_query, mask.by_key):
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in table)
        weight = table.row_ptr[0].diff()
        order = table.row_order[0].long()
        assert sorted(order.tolist()) == list(range(len(weight))) and (table.has_document_order() or heaviest_first(weight[order]))
        bounds = torch.cat([table.row_ptr[0, :-1, None], table.row_split[0], table.row_ptr[0, 1:, None]], 1)
        for begin, end in torch.stack([bounds[:, :-1], bounds[:, 1:]], -1).view(-1, 2).tolist():
            assert (table.col_idx[begin:end].diff() > 0).all()


@settings(max_examples=80)
@given(pattern=strategies.expressions, lengths=strategies.lengths, block_size=strategies.block_sizes)
def test_transpose_exchanges_queries_and_keys_and_twice_is_the_same_table(pattern, lengths, block_size):
    mask = sf.compile_mask(pattern, *lengths, block_size)
    other = mask.transpose()
    torch.testing.assert_close(other.to_dense(), mask.to_dense().T)
    assert (other.q_len, other.kv_len, other.keeps_all) == (mask.kv_len, mask.q_len, mask.keeps_all)
    assert other.transpose().equal(mask)


@settings(max_examples=80)
@given(pattern=strategies.expressions, lengths=strategies.lengths, block_size=strategies.block_sizes)
def test_densities_states_and_bytes_are_those_of_the_dense_mask_and_the_tensors(pattern, lengths, block_size):
    mask = sf.compile_mask(pattern, *lengths, block_size)
    kept = strategies.dense(pattern, *lengths)
    assert mask.density == pytest.approx(kept.mean()) and mask.kept_pairs().tolist() == [kept.sum()]
    assert mask.block_density == pytest.approx((mask.block_states() > 0).double().mean().item())
    assert mask.nbytes == sum(t.untyped_storage().nbytes() for t in mask.tensors())
    assert repr(mask).startswith(f"BlockMask(q_len={lengths[0]}, kv_len={lengths[1]}, block_size={block_size}, masks=1")


@settings(max_examples=150)
@given(
    pattern=st.none() | strategies.expressions,
    lengths=strategies.lengths,
    size=strategies.block_sizes,
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    density=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    compiled=st.booleans(),
)
def test_block_map_of_run_time_keeps_what_its_blocks_the_lengths_and_a_pattern_keep(
    pattern, lengths, size, heads, density, compiled
):
    limit = sf.compile_mask("full" if pattern is None else pattern, *lengths, size)
    blocks = torch.from_numpy(np.random.default_rng(0).random((*heads, *limit.grid.shape)) < density)
    mask = sf.BlockMask.from_blocks(blocks, size, *lengths, within=pattern if pattern is None or not compiled else limit)
    expected = blocks.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, : lengths[0], : lengths[1]]
    expected = expected if pattern is None else expected & torch.from_numpy(strategies.dense(pattern, *lengths).copy())
    assert torch.equal(mask.to_dense().view(expected.shape), expected)
    assert torch.equal(mask.transpose().to_dense().view(expected.mT.shape), expected.mT)
    assert mask.density == pytest.approx(expected.double().mean().item())
    expected = expected.reshape(-1, *lengths)
    states = (blocks.int() * limit.block_states()).view(-1, *limit.grid.shape)
    for number in range(len(expected)):
        for by_key, table in ((False, mask.by_query), (True, mask.by_key)):
            shape = mask.grid.shape[::-1] if by_key else mask.grid.shape
            found = decoded(mask, number, table, *shape)
            assert len(found) == states[number].count_nonzero()  # no visited block keeps nothing
            np.testing.assert_array_equal(assembled(found, mask, *lengths, by_key), expected[number].numpy())
            ptr, split = table.row_ptr[number], table.row_split[number]
            for segment in torch.stack([ptr[:-1], split[:, 0], split[:, 1], ptr[1:]], 1).unfold(1, 2, 1).reshape(-1, 2).tolist():
                assert (table.col_idx[slice(*segment)].diff() > 0).all()
            weight = ptr.diff()
            assert (weight[table.row_order[number].long()].diff() <= 0).all()
    assert torch.equal(mask.kept_blocks().view(states.shape), states > 0)
    assert mask.block_density == pytest.approx((states > 0).double().mean().item())
    assert all(t.dtype == torch.int32 and t.is_contiguous() for table in (mask.by_query, mask.by_key) for t in table)


def test_block_map_within_another_made_at_run_time_keeps_the_blocks_of_both():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(5, 6, generator=generator) < 0.5 for _ in range(2))
    outer = sf.BlockMask.from_blocks(first, 32, 150, 180, within="causal")
    inner = sf.BlockMask.from_blocks(second, 32, 150, 180, within=outer)
    assert torch.equal(inner.to_dense(), outer.to_dense() & sf.BlockMask.from_blocks(second, 32, 150, 180).to_dense())
    assert torch.equal(inner.kept_blocks(), outer.kept_blocks() & second)


@settings(max_examples=40)
@given(heads=st.lists(strategies.expressions, min_size=1, max_size=5), lengths=strategies.lengths, size=strategies.block_sizes)
def test_each_head_has_its_own_mask_in_both_tables(heads, lengths, size):
    mask = sf.BlockMask.per_head(heads, *lengths, block_size=size)
    expected = np.stack([strategies.dense(p, *lengths) for p in heads])
    assert mask.mask_index.shape == (1, len(heads)) and mask.mask_index.dtype == torch.int32
    np.testing.assert_array_equal(mask.to_dense().numpy().reshape(expected.shape), expected)
    np.testing.assert_array_equal(mask.transpose().to_dense().numpy().reshape(len(heads), *lengths[::-1]), expected.swapaxes(1, 2))
    assert mask.density == pytest.approx(expected.mean()) and mask.keeps_all == expected.all()
    for head, number in enumerate(mask.mask_index[0].tolist()):
        found = decoded(mask, number, mask.by_key, *mask.grid.shape[::-1])
        np.testing.assert_array_equal(assembled(found, mask, *lengths, by_key=True), expected[head])
    assert mask.masks == len({e.tobytes() for e in expected})  # one meaning, one mask


def test_lengths_given_with_a_mask_may_be_its_own():
    one = sf.compile_mask("causal", 256, 300)
    assert sf.BlockMask.per_head(["full", one], 256, 300).equal(sf.BlockMask.per_head(["full", one]))


@settings(max_examples=40)
@given(pattern=strategies.expressions, lengths=strategies.lengths)
def test_tensors_and_files_carry_the_whole_mask(pattern, lengths):
    mask = sf.compile_mask(pattern, *lengths, 64)
    pickled, saved = pickle.loads(pickle.dumps(mask)), io.BytesIO()
    torch.save({"mask": mask}, saved)
    saved.seek(0)
    loaded = torch.load(saved)["mask"]  # as plain weights
    for again in (pickled, loaded, sf.BlockMask.from_tensors(*lengths, 64, mask.tensors(), mask.keeps_all)):
        assert again.equal(mask) and again.keeps_all == mask.keeps_all


def test_masks_do_not_depend_on_the_default_device():
    q = torch.randn(1, 2, 40, 16)
    documents = torch.tensor([0, 15, 40], dtype=torch.int32)
    dense = torch.ones(40, 40, dtype=torch.bool)
    with torch.device("meta"):
        made = [
            sf.compile_mask("causal & local(5)", 40),
            sf.BlockMask.per_head(["causal", "strided(3)"], 40),
            sf.BlockMask.from_dense(dense),
            sf.BlockMask.from_blocks(dense, 16),
            sf.topk_blocks(q, q, 1, block_size=16),
        ]
        assert {t.device.type for mask in made for t in mask.tensors()} == {"cpu"}
        moved = sf.compile_mask("causal & local(5)", 40, device="meta")
        assert {t.device.type for t in moved.tensors()} == {"meta"}
        outs = [
            sf.attention(q, q, q, "local(6)", dropout_p=0.1, kv_lens=documents[1:2]),
            sf.attention_decode(q[:, :, :1], q, q, "local(6)"),
        ]
        packed = q[0].transpose(0, 1)
        outs += [sf.attention_varlen(packed, packed, packed, documents, mask=mask) for mask in ("causal", "causal & strided(3)")]
    assert all(out.device.type == "cpu" and out.isfinite().all() for out in outs)


PER_HEAD = sf.BlockMask.per_head(["causal", "full"], 40)
PICKED = sf.BlockSelection.from_picks(torch.zeros(1, 2, 40, 1, dtype=torch.int32), 16)


@pytest.mark.parametrize("masks", [PER_HEAD, PICKED], ids=["mask", "selection"])
@pytest.mark.parametrize(
    "error, number", [(IndexError, 9999), (IndexError, -1), *((TypeError, other) for other in (None, 0.5, "0"))]
)
def test_a_token_or_head_that_is_not_there_is_one_clear_error(masks, number, error):
    for name, last, call in [
        ("head", 1, masks.select),
        ("query", 39, masks.kept_keys),
        ("head", 1, lambda head: masks.kept_keys(0, head=head)),
    ]:
        with pytest.raises(error, match=f"{name} must be .*0 to {last}; got {number}|{name} must be .*; got '0'"):
            call(number)
    for number in (1, np.int64(1), torch.tensor(1)):
        assert torch.equal(masks.select(number).kept_keys(number), masks.kept_keys(1, head=1))


def test_mask_moves_to_a_device_whole_and_stays_itself_where_it_is():
    mask = sf.compile_mask("causal & local(100)", 1000)
    assert mask.to("cpu") is mask
    moved = mask.to("meta")
    assert moved.device.type == "meta" and {t.device.type for t in moved.tensors()} == {"meta"}
    assert [t.shape for t in moved.tensors()] == [t.shape for t in mask.tensors()] and moved.nbytes == mask.nbytes
    assert sf.compile_mask("causal", 64, device="meta").device.type == "meta"


def test_equality_is_of_lengths_blocks_and_contents():
    mask = sf.compile_mask("causal", 256, block_size=64)
    assert mask.equal(sf.compile_mask("causal", 256, block_size=64))
    others = [("causal", 255, 64), ("causal", 256, 32), ("causal & local(255)", 256, 64), ("causal & local(100)", 256, 64)]
    assert not any(mask.equal(sf.compile_mask(text, n, block_size=size)) for text, n, size in others)


def test_what_tables_hold_past_their_last_entries_does_not_count():
    mask = sf.compile_mask("causal", 256, block_size=64)
    spare = torch.tensor([7, 8], dtype=torch.int32)
    by_query, by_key = (
        table._replace(col_idx=torch.cat([table.col_idx, spare]), tile_idx=torch.cat([table.tile_idx, spare]))
        for table in (mask.by_query, mask.by_key)
    )
    other = replace(mask, by_query=by_query, by_key=by_key)
    assert mask.equal(other) and other.equal(mask) and mask.digest == other.digest


@pytest.mark.parametrize(
    "spec", ["causal", "local(200) | global_tokens(150)", "bigbird(block=128)", "documents((0, 100, 9000, 20000))"]
)
@pytest.mark.parametrize("side", ["by_query", "by_key"])
def test_work_items_cover_every_entry_of_every_row_once_and_the_heaviest_comes_first(spec, side):
    table = getattr(sf.compile_mask(spec, 20000, 20000), side)
    weights = table.work[0, :, 4] - table.work[0, :, 1]
    assert spec.startswith("documents") or heaviest_first(weights)
    for row in range(table.row_order.shape[1]):
        items = table.work[0][table.work[0, :, 0] == row]
        items = items[items[:, 1].argsort()]
        begin, end = table.row_ptr[0, row], table.row_ptr[0, row + 1]
        assert torch.equal(items[:, 1], torch.cat([begin[None], items[:-1, 4]])) and items[-1, 4] == end
        bounds = items[:, 1:5]
        assert (bounds.diff(dim=1) >= 0).all()
        full, runs = (table.row_split[0, row, k] for k in (0, 1))
        assert (bounds[:, 1] - bounds[:, 0]).sum() == full - begin and (bounds[:, 2] - bounds[:, 1]).sum() == runs - full


@pytest.mark.parametrize("spec", ["causal", "full"])
@pytest.mark.parametrize("side", ["by_query", "by_key"])
def test_rows_of_a_document_are_visited_together_the_longest_document_first_each_from_its_heaviest_row(spec, side):
    ends = 0, 4000, 30_000, 31_000, 50_000, 65_536
    mask = sf.compile_mask(f"{spec} & documents({ends})", ends[-1])
    table = getattr(mask, side)
    rows = table.work[0, :, 0].numpy()
    weights = (table.work[0, :, 4] - table.work[0, :, 1]).numpy()
    # A block that two documents share goes with the one at whose end all rows meet: of causal ones the last query's, by key.
    token = rows * 128 + (127 if (spec, side) == ("causal", "by_key") else 0)
    document = np.searchsorted(ends, token, side="right")
    changes = np.flatnonzero(np.diff(document)) + 1
    assert mask.document_order and mask.to("meta").document_order and len(changes) == 4 and np.array_equal(rows, table.row_order[0])
    pieces = np.split(weights, changes)
    assert all((np.diff(piece) <= 0).all() for piece in pieces)
    assert [piece[0] for piece in pieces] == sorted((piece[0] for piece in pieces), reverse=True)


@pytest.mark.parametrize(
    "spec",
    ["causal", "full", "causal & local(1024)", "butterfly", "bigbird", "causal & random(0.1)", "causal & block_diagonal(512)"],
)
def test_rows_are_visited_by_weight_alone_without_documents_of_many_blocks(spec):
    mask = sf.compile_mask(spec, 16384)
    assert not mask.document_order
    for table in (mask.by_query, mask.by_key):
        assert heaviest_first(table.work[0, :, 4] - table.work[0, :, 1])


@pytest.mark.parametrize("spec", ["causal & (local(1024) | power_of_two)", "causal & strided(64)"])
@pytest.mark.parametrize("side", ["by_query", "by_key"])
def test_rows_about_as_heavy_as_the_heaviest_are_visited_by_position_if_most_are(spec, side):
    table = getattr(sf.compile_mask(spec, 65536), side)
    count, rows = table.row_ptr[0].diff(), table.work[0, :, 0].long()
    near = count >= 0.75 * count.max()
    assert torch.equal(rows[: near.sum()], near.nonzero()[:, 0]) and near.sum() < len(near)
    assert (count[rows[near.sum() :]].diff() <= 0).all()


def test_masks_of_several_heads_have_as_many_items_the_missing_ones_past_the_last_row():
    masks = [sf.compile_mask(spec, 20000) for spec in ("causal", "local(128) | global_tokens(128)")]
    table = sf.BlockMask.per_head(masks).by_query
    rows = table.row_order.shape[1]
    missing = table.work[0][rows:]
    assert len(missing) > 0 and (missing[:, 0] == rows).all() and not missing[:, 1:].any()
    assert not (table.work[1][:, 0] == rows).any()


@settings(max_examples=60)
@given(
    heads=st.lists(strategies.expressions, min_size=1, max_size=3),
    lengths=strategies.lengths,
    sizes=st.sampled_from([(16, 32), (16, 128), (32, 128), (64, 256)]),
)
def test_a_mask_in_larger_blocks_is_the_mask_compiled_in_them(heads, lengths, sizes):
    mask, expected = (sf.BlockMask.per_head(heads, *lengths, size) for size in sizes)
    for blocks_at_a_time in (1 << 20, 7):
        with mock.patch.object(tables, "_BAND", blocks_at_a_time):
            assert mask.in_blocks_of(sizes[1]).equal(expected)


@settings(max_examples=60)
@given(heads=st.lists(strategies.expressions, min_size=1, max_size=3), lengths=strategies.lengths, size=st.sampled_from([16, 64]))
def test_kernels_visit_larger_blocks_where_that_is_predicted_to_take_less_time(heads, lengths, size):
    """Judged over the blocks one by one."""
    masks = sf.BlockMask.per_head(heads, *lengths, size)
    rows, cols, *_ = masks.entries()
    factor = coarsen.KERNEL_BLOCK // size
    visited = len(set(zip(masks.entry_masks.tolist(), (rows // factor).tolist(), (cols // factor).tolist(), strict=True)))
    wide = masks.masks * -(-masks.q_len // coarsen.KERNEL_BLOCK)
    here, there = (size, masks.masks * masks.grid.q_blocks, len(rows)), (coarsen.KERNEL_BLOCK, wide, visited)
    pays = visited > 0 and Counts(*there).both_passes_us * (1.5 if size < 64 else 1) < Counts(*here).both_passes_us
    for blocks_at_a_time in (1 << 20, 7):
        with mock.patch.object(tables, "_BAND", blocks_at_a_time):
            assert (build.with_coarse(masks).coarse is not None) == pays


@settings(max_examples=80)
@given(
    heads=st.lists(strategies.expressions, min_size=1, max_size=3),
    lengths=strategies.lengths,
    size=strategies.block_sizes,
    step=st.sampled_from([1, 2, 8]),
    blocks_at_a_time=st.sampled_from([1, 5, 1 << 20]),
)
def test_blocks_read_in_bands_are_those_of_the_table_with_full_ones_in_runs(heads, lengths, size, step, blocks_at_a_time):
    masks = sf.BlockMask.per_head(heads, *lengths, size)
    entries = np.stack(masks.entries())
    with mock.patch.object(tables, "_BAND", blocks_at_a_time):
        for number in range(masks.masks):
            rows, cols, kinds, tiles = entries[:, masks.entry_masks == number]
            bands = list(masks.bands(number, step))
            full, partial = masks.kept(number)
            expected = tables.FullBlocks.of(masks.grid.shape, rows[kinds == 0], cols[kinds == 0])
            for got, wanted in zip(full, expected, strict=True):
                np.testing.assert_array_equal(got, wanted)
            for got, wanted in zip(partial, (rows, cols, kinds, tiles), strict=True):
                np.testing.assert_array_equal(got, wanted[kinds > 0])
            first_rows = [min([*f.rows, *p.rows], default=None) for f, p in bands]
            last_rows = [max([*f.rows, *p.rows], default=None) for f, p in bands]
            between = [pair for pair in zip(last_rows, first_rows[1:]) if None not in pair]
            assert all(last // step < first // step for last, first in between)


@given(st.integers(1, 12), st.integers(1, 40), st.floats(0, 1), st.integers(1, 9), st.integers(1, 6))
def test_runs_of_full_blocks_are_counted_by_square(rows, cols, share, seed, group):
    kept = np.random.default_rng(seed).random((rows, cols)) < share
    squares = np.pad(kept, ((0, -rows % group), (0, -cols % group))).reshape(-(-rows // group), group, -(-cols // group), group)
    counts = tables.FullBlocks.of(kept.shape, *np.nonzero(kept)).count_by_square(group)
    np.testing.assert_array_equal(counts, squares.sum((1, 3)))


def test_small_blocks_are_visited_as_large_ones_where_those_hold_little_more():
    wide, narrow = (sf.compile_mask(spec, 4096, block_size=64) for spec in ("causal", "butterfly(block=64)"))
    assert wide.coarse.equal(sf.compile_mask("causal", 4096)) and wide.to("meta").coarse.device.type == "meta"
    assert narrow.coarse is None and sf.compile_mask("causal", 4096).coarse is None
    assert sf.BlockMask.per_head([narrow, narrow]).coarse is None and sf.BlockMask.per_head([wide, wide]).coarse is not None
    assert pickle.loads(pickle.dumps(wide)).coarse.equal(wide.coarse)


def test_the_larger_blocks_of_a_mask_by_batch_and_head_are_by_batch_and_head():
    kept = torch.ones(2, 3, 700, 700).tril().bool()
    kept[1, 2] = kept[1, 2].triu(-50)
    mask = sf.BlockMask.from_dense(kept, block_size=32)
    assert mask.coarse.mask_index.shape == (2, 3) and torch.equal(mask.coarse.to_dense(), kept)


def test_larger_blocks_tell_runs_of_keys_from_bits():
    kept, key = torch.zeros(12 * 128, 12 * 128, dtype=torch.bool), torch.arange(64)
    for number in range(12):
        kept[number * 128 :, number * 128 :][:64, :64] = key <= number if number < 6 else key % (number - 4) == 0
    assert torch.equal(sf.BlockMask.from_dense(kept, 64).in_blocks_of(128).to_dense(), kept)


def test_columns_in_parts_are_listed_whole_too():
    with heavy_rows_split():
        mask = sf.BlockMask.per_head(["causal & (local(200) | sinks(4))", "causal & dilated(9, 3, block=1)"], q_len=900, kv_len=800)
    table = mask.by_key
    assert table.work.shape[1] > table.row_order.shape[1]
    for number, (order, items) in enumerate(zip(table.row_order.tolist(), mask.whole_columns.tolist(), strict=True)):
        for row, item in zip(order, items, strict=True):
            begin, end = table.row_ptr[number, row : row + 2].tolist()
            assert item == [row, begin, *table.row_split[number, row].tolist(), end, 0, 0, 0]


@pytest.mark.parametrize("given", ["q_len", "kv_len"])
def test_one_length_of_a_square_block_map_is_both(given):
    blocks = torch.ones(3, 3, dtype=torch.bool)
    for tokens in (300, 384, 257):
        mask = sf.BlockMask.from_blocks(blocks, 128, **{given: tokens}, within="causal")
        assert mask.equal(sf.BlockMask.from_blocks(blocks, 128, tokens, tokens, within="causal"))
    wide = sf.BlockMask.from_blocks(torch.ones(3, 2, dtype=torch.bool), 128, q_len=300)
    assert (wide.q_len, wide.kv_len) == (300, 256)
