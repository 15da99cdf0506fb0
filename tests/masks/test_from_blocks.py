"""Masks of blocks that are known at run time are made without looking at the values."""

import pytest
import torch

import sparse_flash as sf
from sparse_flash.masks import select_blocks

KEPT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def test_lengths_default_to_whole_blocks_and_as_many_keys_as_queries():
    square, maker = KEPT[:, :3], sf.BlockMask.from_blocks
    assert maker(square, 32).sizes == (96, 96, 32) and maker(square, 32, 70).sizes == (70, 70, 32)
    assert maker(square, 32, kv_len=70).sizes == (70, 70, 32) and maker(KEPT, 32, q_len=70).sizes == (70, 128, 32)


@pytest.mark.parametrize("within", [None, "causal"])
def test_one_compiled_graph_serves_all_values(within):
    torch._dynamo.reset()
    q, k = torch.randn(1, 2, 48, 16), torch.randn(1, 2, 64, 16)

    def attend(kept):
        return sf.attention(q, k, k, sf.BlockMask.from_blocks(kept, 16, 48, 64, within))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kept in (KEPT, KEPT.flip(0), KEPT.flip(1)):
            torch.testing.assert_close(compiled(kept), attend(kept))


def test_where_values_are_not_read_blocks_beyond_the_keys_are_left_out(monkeypatch):
    monkeypatch.setattr(select_blocks, "is_plain_eager", lambda *tensors: False)  # as of tensors on a GPU
    lists, counts = torch.tensor([[[[0, 4, -1], [2**31 - 1, 1, 2]]]], dtype=torch.int32), torch.tensor([[[7, 2]]])
    kept = select_blocks.map_from_lists(lists, counts, (2, 4))
    assert kept[0, 0].tolist() == [[True, False, False, False], [False, True, False, False]]
