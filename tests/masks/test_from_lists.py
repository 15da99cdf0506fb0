"""Masks of blocks that are known at run time, as maps, lists or compressed rows, are made without looking at the values."""

import pytest
import torch
from makers import OF_MAPS

import sparse_flash as sf
from sparse_flash.masks import from_maps

KEPT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
every_form = pytest.mark.parametrize("form", OF_MAPS)


@every_form
def test_lengths_default_to_whole_blocks_and_as_many_keys_as_queries(form):
    maker, tensors_of = OF_MAPS[form]
    square = tensors_of(KEPT[:, :3])
    assert maker(*square, 32).sizes == (96, 96, 32) and maker(*square, 32, 70).sizes == (70, 70, 32)
    if form == "blocks":  # which knows how many blocks of keys there are
        assert maker(*square, 32, kv_len=70).sizes == (70, 70, 32) and maker(KEPT, 32, q_len=70).sizes == (70, 128, 32)
    else:
        assert maker(*square, 32, kv_len=200).sizes == (96, 200, 32)


def test_the_indices_of_a_sparse_bsr_tensor_are_its_mask():
    dense = KEPT.repeat_interleave(16, 0).repeat_interleave(16, 1)
    sparse = dense.float().to_sparse_bsr(16)
    mask = sf.BlockMask.from_bsr(sparse.crow_indices(), sparse.col_indices(), 16, *sparse.shape)
    assert torch.equal(mask.to_dense(), dense)


@every_form
@pytest.mark.parametrize("within", [None, "causal"])
def test_one_compiled_graph_serves_all_values(form, within):
    torch._dynamo.reset()
    q, k = torch.randn(1, 2, 48, 16), torch.randn(1, 2, 64, 16)
    maker, tensors_of = OF_MAPS[form]

    def attend(*tensors):
        return sf.attention(q, k, k, maker(*tensors, 16, 48, 64, within))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kept in (KEPT, KEPT.flip(0), KEPT.flip(1)):
            tensors = tensors_of(kept)
            torch.testing.assert_close(compiled(*tensors), attend(*tensors))


def test_where_values_are_not_read_blocks_beyond_the_keys_are_left_out(monkeypatch):
    monkeypatch.setattr(from_maps, "_can_read_values", lambda device: False)  # as of tensors on a GPU
    lists = torch.tensor([[0, 4, -1], [2**31 - 1, 1, 2]], dtype=torch.int32)
    mask = sf.BlockMask.from_lists(lists, torch.tensor([7, 2], dtype=torch.int32), 16, kv_len=64)
    assert mask.kept_blocks().tolist() == [[True, False, False, False], [False, True, False, False]]
    rows = torch.tensor([3, 1, 9]), torch.tensor([0, 4, -1, 2])
    mask = sf.BlockMask.from_bsr(*rows, 16, kv_len=64)
    assert mask.to_dense().shape == (32, 64)  # nonsense, but within bounds
