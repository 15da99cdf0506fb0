"""BlockMask.from_flex: the pairs of a FlexAttention mask, and what flex_attention makes of them."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import sparse_flash as sf

DOCUMENT = torch.tensor([0] * 100 + [1] * 33 + [2] * 260 + [3] * 7)


def causal(b, h, q, kv):
    return q >= kv


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 70)


def documents(b, h, q, kv):
    return (DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv)


def scattered(b, h, q, kv):
    return (q * 7 + kv * 3) % 11 < 4


def by_head(b, h, q, kv):
    return (q >= kv) & (q - kv < 30 * (h + 1) + 100 * b)


def nothing(b, h, q, kv):
    return q < 0


def everything(b, h, q, kv):
    return q >= 0


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("lengths", [(400, 400), (384, 256), (130, 400)], ids=str)
@pytest.mark.parametrize("rule", [causal, window, documents, scattered, nothing, everything])
def test_every_pair_is_kept_that_the_rule_keeps_and_no_other(rule, lengths, size):
    flex = create_block_mask(rule, None, None, *lengths, device="cpu", BLOCK_SIZE=size)
    mask = sf.BlockMask.from_flex(flex)
    kept = create_mask(rule, None, None, *lengths, device="cpu")
    assert torch.equal(mask.to_dense().expand(kept.shape), kept)
    assert (mask.q_len, mask.kv_len, mask.block_size) == (*lengths, size)


def test_each_batch_entry_and_head_keeps_its_own_rule():
    flex = create_block_mask(by_head, 2, 3, 300, 300, device="cpu")
    mask = sf.BlockMask.from_flex(flex)
    assert mask.mask_index.shape == (2, 3)
    assert torch.equal(mask.to_dense(), create_mask(by_head, 2, 3, 300, 300, device="cpu"))


@pytest.mark.parametrize("rule, heads", [(window, None), (by_head, 3), (scattered, None)])
def test_attention_is_that_of_flex_attention(rule, heads):
    q, k, v = (torch.randn(2, 3, 300, 16) for _ in range(3))
    flex = create_block_mask(rule, 2 if heads else None, heads, 300, 300, device="cpu")
    expected = flex_attention(q, k, v, block_mask=flex)
    torch.testing.assert_close(sf.attention(q, k, v, sf.BlockMask.from_flex(flex)), expected, atol=1e-5, rtol=1e-4)


def test_a_mask_of_whole_blocks_alone_needs_no_rule():
    count, index = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    none = torch.zeros_like(count)
    flex = FlexMask.from_kv_blocks(none, index, count, index, BLOCK_SIZE=128, seq_lengths=(250, 256))
    expected = sf.BlockMask.from_blocks(torch.tensor([[True, False], [True, True]]), 128, 250, 256)
    assert torch.equal(sf.BlockMask.from_flex(flex).to_dense(), expected.to_dense())


def test_the_table_is_that_of_the_same_pattern():
    flex = create_block_mask(window, None, None, 400, 400, device="cpu")
    assert sf.BlockMask.from_flex(flex).equal(sf.compile_mask("causal & local(70)", 400))


def test_what_cannot_be_read_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"got sparse_flash.patterns.causal.Causal"):
        sf.BlockMask.from_flex(sf.causal())
    flex = create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=(128, 64))
    with pytest.raises(ValueError, match=r"square blocks; got BLOCK_SIZE=\(128, 64\)"):
        sf.BlockMask.from_flex(flex)
    with pytest.raises(ValueError, match="512"):
        sf.BlockMask.from_flex(create_block_mask(causal, None, None, 1024, 1024, device="cpu", BLOCK_SIZE=512))
