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
from sparse_flash.masks import build
from sparse_flash.masks import table as tables


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


def assert_stored(mask, number, kept):
    """Both tables of a stored mask decode to these pairs. Columns ascend within each kind of blocks."""
    size, (q_len, kv_len) = mask.block_size, kept.shape
    for table, shape, by_key in ((mask.by_query, mask.grid.shape, False), (mask.by_key, mask.grid.shape[::-1], True)):
        dense = np.zeros(np.multiply(mask.grid.shape, size), bool)
        for (r, c), block in decoded(mask, number, table, *shape).items():
            r, c = (c, r) if by_key else (r, c)
            dense[r * size : (r + 1) * size, c * size : (c + 1) * size] = block
        np.testing.assert_array_equal(dense[:q_len, :kv_len], kept)
        # Blocks cut short by the lengths have tiles for that: nothing outside is kept.
        assert not dense[q_len:].any() and not dense[:, kv_len:].any()
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in table)
        ptr, split = table.row_ptr[number], table.row_split[number]
        for segment in torch.stack([ptr[:-1], split[:, 0], split[:, 1], ptr[1:]], 1).unfold(1, 2, 1).reshape(-1, 2).tolist():
            assert (table.col_idx[slice(*segment)].diff() > 0).all()


def heaviest_first(weights: torch.Tensor) -> bool:
    """Whether weights descend; those within a quarter of the heaviest count as equal if three quarters of them are."""
    near = weights >= 0.75 * weights.amax() if len(weights) else weights
    if 4 * near.sum() >= 3 * len(weights):
        weights = torch.where(near, weights.amax(), weights)
    return bool((weights.diff() <= 0).all())


@settings(max_examples=60)
@given(pattern=strategies.expressions, lengths=strategies.lengths, block_size=strategies.block_sizes)
def test_both_tables_decode_by_the_docstring_to_the_same_pairs_and_visit_the_heaviest_rows_first(pattern, lengths, block_size):
    mask = sf.compile_mask(pattern, *lengths, block_size)
    assert_stored(mask, 0, strategies.dense(pattern, *lengths))
    for table in (mask.by_query, mask.by_key):
        weight, order = table.row_ptr[0].diff(), table.row_order[0].long()
        assert sorted(order.tolist()) == list(range(len(weight))) and (table.has_document_order() or heaviest_first(weight[order]))


@settings(max_examples=30)
@given(pattern=strategies.expressions, lengths=strategies.lengths, block_size=strategies.block_sizes)
def test_transposes_copies_and_files_hold_the_whole_mask(pattern, lengths, block_size):
    mask = sf.compile_mask(pattern, *lengths, block_size)
    other, saved = mask.transpose(), io.BytesIO()
    torch.testing.assert_close(other.to_dense(), mask.to_dense().T)
    torch.save({"mask": mask}, saved)
    saved.seek(0)
    copies = pickle.loads(pickle.dumps(mask)), torch.load(saved)["mask"]  # the latter as plain weights
    for again in (*copies, other.transpose(), sf.BlockMask.from_tensors(*mask.sizes, mask.tensors(), mask.keeps_all)):
        assert again.equal(mask) and again.keeps_all == mask.keeps_all == other.keeps_all
    assert mask.nbytes == sum(t.untyped_storage().nbytes() for t in mask.tensors())
    assert repr(mask).startswith(f"BlockMask(q_len={lengths[0]}, kv_len={lengths[1]}, block_size={block_size}, masks=1")


@settings(max_examples=60)
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
    for number, kept in enumerate(expected.reshape(-1, *lengths).numpy()):
        assert_stored(mask, number, kept)
        for table in (mask.by_query, mask.by_key):
            assert (table.row_ptr[number].diff()[table.row_order[number].long()].diff() <= 0).all()
    kept_blocks = blocks & (limit.block_states() > 0)
    assert torch.equal(mask.kept_blocks().view(blocks.shape), kept_blocks)
    shares = expected.double().mean().item(), kept_blocks.double().mean().item()
    assert (mask.density, mask.block_density) == pytest.approx(shares)


def test_block_map_within_another_made_at_run_time_keeps_the_blocks_of_both():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(5, 6, generator=generator) < 0.5 for _ in range(2))
    outer = sf.BlockMask.from_blocks(first, 32, 150, 180, within="causal")
    inner = sf.BlockMask.from_blocks(second, 32, 150, 180, within=outer)
    assert torch.equal(inner.to_dense(), outer.to_dense() & sf.BlockMask.from_blocks(second, 32, 150, 180).to_dense())
    assert torch.equal(inner.kept_blocks(), outer.kept_blocks() & second)


@settings(max_examples=30)
@given(heads=st.lists(strategies.expressions, min_size=1, max_size=5), lengths=strategies.lengths, size=strategies.block_sizes)
def test_each_head_has_its_own_mask_in_both_tables(heads, lengths, size):
    mask = sf.BlockMask.per_head(heads, *lengths, block_size=size)
    expected = np.stack([strategies.dense(p, *lengths) for p in heads])
    assert mask.mask_index.shape == (1, len(heads)) and mask.mask_index.dtype == torch.int32
    np.testing.assert_array_equal(mask.to_dense().numpy().reshape(expected.shape), expected)
    assert mask.density == pytest.approx(expected.mean()) and mask.keeps_all == expected.all()
    for head, number in enumerate(mask.mask_index[0].tolist()):
        assert_stored(mask, number, expected[head])
    assert mask.masks == len({e.tobytes() for e in expected})  # one meaning, one mask


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


@pytest.mark.parametrize("made", ["mask", "selection"])
def test_integers_of_all_kinds_name_a_head_or_a_token(made):
    picks = torch.zeros(1, 2, 40, 1, dtype=torch.int32)
    masks = sf.BlockMask.per_head(["causal", "full"], 40) if made == "mask" else sf.BlockSelection.from_picks(picks, 16)
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


def test_rows_are_visited_by_weight_alone_without_documents_of_many_blocks():
    for spec in ("causal", "full", "causal & local(1024)", "butterfly", "causal & random(0.1)", "causal & block_diagonal(512)"):
        assert not sf.compile_mask(spec, 16384).document_order


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
    mask = sf.BlockMask.per_head(masks)
    assert sf.BlockMask.per_head(masks, 20000, 20000).equal(mask)
    table = mask.by_query
    rows = table.row_order.shape[1]
    missing = table.work[0][rows:]
    assert len(missing) > 0 and (missing[:, 0] == rows).all() and not missing[:, 1:].any()
    assert not (table.work[1][:, 0] == rows).any()


@settings(max_examples=40)
@given(
    heads=st.lists(strategies.expressions, min_size=1, max_size=3),
    lengths=strategies.lengths,
    sizes=st.sampled_from([(16, 32), (16, 128), (32, 128), (64, 256)]),
    blocks_at_a_time=st.sampled_from([1, 7, 1 << 20]),
)
def test_a_mask_read_a_few_blocks_at_a_time_is_itself_also_in_larger_blocks(heads, lengths, sizes, blocks_at_a_time):
    mask, larger = (sf.BlockMask.per_head(heads, *lengths, size) for size in sizes)
    pairs, states = mask.kept_pairs(), mask.block_states()
    with mock.patch.object(tables, "_BAND", blocks_at_a_time):
        again = replace(mask, coarse=None)  # which has read nothing yet
        assert again.in_blocks_of(sizes[1]).equal(larger) and again.kept_pairs().tolist() == pairs.tolist()
        assert torch.equal(again.block_states(), states) and (build.with_coarse(again).coarse is None) == (mask.coarse is None)


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
@pytest.mark.parametrize("tokens", [257, 300, 384])
def test_one_length_of_a_square_block_map_is_both(given, tokens):
    mask = sf.BlockMask.from_blocks(torch.ones(3, 3, dtype=torch.bool), 128, **{given: tokens}, within="causal")
    assert mask.equal(sf.compile_mask("causal", tokens))
    assert sf.BlockMask.from_blocks(torch.ones(3, 2, dtype=torch.bool), 128, q_len=300).kv_len == 256
