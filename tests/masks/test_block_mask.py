"""BlockMask: the table decodes as its docstring says, both ways; block maps at run time; masks of several heads."""

import io
import pickle
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import MAKERS, assert_keeps
from oracle import heavy_rows_split

import sparse_flash as sf
from sparse_flash.masks import build
from sparse_flash.masks import table as tables
from sparse_flash.masks.grid import BLOCK_SIZES

every_maker = pytest.mark.parametrize("maker", MAKERS)
drawn = given(data=st.data(), lengths=strategies.lengths, size=strategies.block_sizes)


def in_blocks_of(mask, size):
    return sf.BlockMask.of_tables(build.in_blocks_of(mask, size))


@every_maker
def test_every_maker_keeps_the_given_pairs_at_every_batch_of_blocks(maker):
    @settings(max_examples=200 if maker == "pattern" else 25)
    @drawn
    def property_holds(data, lengths, size):
        splits = heavy_rows_split() if data.draw(st.booleans()) else nullcontext()
        with splits, mock.patch.object(tables, "_BAND", data.draw(st.sampled_from([1, 7, 1 << 20]))):
            mask, kept = MAKERS[maker](data.draw, lengths, size)
            assert_keeps(mask, kept)
            larger = data.draw(st.sampled_from(BLOCK_SIZES))
            if larger > size:
                wide = in_blocks_of(mask, larger)
                assert torch.equal(wide.to_dense(), mask.to_dense())
                assert not mask.from_host or wide.equal(sf.BlockMask.from_dense(kept, larger))

    property_holds()


@every_maker
@settings(max_examples=8)
@drawn
def test_transposes_copies_and_files_hold_the_whole_mask(maker, data, lengths, size):
    mask, kept = MAKERS[maker](data.draw, lengths, size)
    other, saved = mask.transpose(), io.BytesIO()
    assert torch.equal(other.to_dense().view(kept.mT.shape), kept.mT)
    torch.save({"mask": mask}, saved)
    saved.seek(0)
    copies = pickle.loads(pickle.dumps(mask)), torch.load(saved)["mask"]  # the latter as plain weights
    for again in (*copies, sf.BlockMask.from_tensors(*mask.sizes, mask.tensors(), mask.keeps_all)):
        assert again.equal(mask) and again.keeps_all == mask.keeps_all == other.keeps_all
    assert other.transpose().equal(mask) or not mask.from_host
    moved = mask.to("meta")
    assert mask.to("cpu") is mask and {t.device.type for t in moved.tensors()} == {"meta"}
    assert [t.shape for t in moved.tensors()] == [t.shape for t in mask.tensors()]
    assert moved.nbytes == mask.nbytes
    assert not mask.from_host or mask.nbytes == sum(t.untyped_storage().nbytes() for t in copies[0].tensors())
    assert repr(mask).startswith(f"BlockMask(q_len={lengths[0]}, kv_len={lengths[1]}, block_size={size}, masks={mask.masks}")


@every_maker
@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "default device"])
@settings(max_examples=2)
@drawn
def test_masks_made_in_another_mode_are_ordinary_ones(maker, mode, data, lengths, size):
    sf.clear_caches()
    with mode():
        mask, kept = MAKERS[maker](data.draw, lengths, size)
    assert not any(t.is_inference() or t.is_meta for t in mask.tensors())
    assert_keeps(mask, kept.clone())


def test_calls_do_not_depend_on_the_default_device():
    q, bounds = torch.randn(1, 2, 40, 16), torch.tensor([0, 15, 40], dtype=torch.int32)
    with torch.device("meta"):
        assert {t.device.type for t in sf.topk_blocks(q, q, 1, block_size=16).tensors()} == {"cpu"}
        assert sf.compile_mask("causal & local(5)", 40, device="meta").device.type == "meta"
        packed = q[0].transpose(0, 1)
        outs = [
            sf.attention(q, q, q, "local(6)", dropout_p=0.1, kv_lens=bounds[1:2]),
            sf.attention_decode(q[:, :, :1], q, q, "local(6)"),
            *(sf.attention_varlen(packed, packed, packed, bounds, mask=mask) for mask in ("causal", "causal & strided(3)")),
        ]
    assert all(out.device.type == "cpu" and out.isfinite().all() for out in outs)


@pytest.mark.parametrize("made", ["mask", "selection"])
def test_integers_of_all_kinds_name_a_head_or_a_token(made):
    picks = torch.zeros(1, 2, 40, 1, dtype=torch.int32)
    masks = sf.BlockMask.per_head(["causal", "full"], 40) if made == "mask" else sf.BlockSelection.from_picks(picks, 16)
    for number in (1, np.int64(1), torch.tensor(1)):
        assert torch.equal(masks.select(number).kept_keys(number), masks.kept_keys(1, head=1))


def test_equality_is_of_lengths_blocks_and_contents_and_not_of_what_tables_hold_past_their_last_entries():
    mask, spare = sf.compile_mask("causal", 256, block_size=64), torch.tensor([7, 8], dtype=torch.int32)
    others = [("causal", 255, 64), ("causal", 256, 32), ("causal & local(255)", 256, 64), ("causal & local(100)", 256, 64)]
    assert not any(mask.equal(sf.compile_mask(text, n, block_size=size)) for text, n, size in others)
    by_query, by_key = (
        table._replace(col_idx=torch.cat([table.col_idx, spare]), tile_idx=torch.cat([table.tile_idx, spare]))
        for table in (mask.by_query, mask.by_key)
    )
    other = replace(mask, by_query=by_query, by_key=by_key)
    assert mask.equal(other) and other.equal(mask) and mask.digest == other.digest


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


def test_rows_without_long_documents_are_ordered_by_weight():
    for spec in ("causal", "full", "causal & local(1024)", "butterfly", "causal & random(0.1)", "causal & block_diagonal(256)"):
        assert not sf.compile_mask(spec, 16384).document_order


@pytest.mark.parametrize("spec", ["causal & (local(1024) | power_of_two)", "causal & strided(64)"])
@pytest.mark.parametrize("side", ["by_query", "by_key"])
def test_rows_about_as_heavy_as_the_heaviest_are_visited_by_position_if_most_are(spec, side):
    table = getattr(sf.compile_mask(spec, 65536), side)
    count, rows = table.row_ptr[0].diff(), table.work[0, :, 0].long()
    near = count >= 0.75 * count.max()
    assert torch.equal(rows[: near.sum()], near.nonzero()[:, 0]) and near.sum() < len(near)
    assert (count[rows[near.sum() :]].diff() <= 0).all()


def test_small_blocks_are_visited_as_large_ones_where_those_hold_little_more():
    wide, narrow = (sf.compile_mask(spec, 4096, block_size=64) for spec in ("causal", "butterfly(block=64)"))
    assert wide.coarse.equal(sf.compile_mask("causal", 4096)) and wide.to("meta").coarse.device.type == "meta"
    assert narrow.coarse is None and sf.compile_mask("causal", 4096).coarse is None
    assert sf.BlockMask.per_head([narrow, narrow]).coarse is None and sf.BlockMask.per_head([wide, wide]).coarse is not None
    assert pickle.loads(pickle.dumps(wide)).coarse.equal(wide.coarse)


def test_larger_blocks_tell_runs_of_keys_from_bits():
    kept, key = torch.zeros(12 * 128, 12 * 128, dtype=torch.bool), torch.arange(64)
    for number in range(12):
        kept[number * 128 :, number * 128 :][:64, :64] = key <= number if number < 6 else key % (number - 4) == 0
    assert torch.equal(in_blocks_of(sf.BlockMask.from_dense(kept, 64), 128).to_dense(), kept)
