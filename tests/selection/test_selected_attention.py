"""A BlockSelection keeps the pairs of its definition, and attention over them is right on every back end that takes it."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE, tensor
from picked import drawn_picks, kept_by_picks

import sparse_flash as sf

parametrize = pytest.mark.parametrize


def definition(picks, q_len, kv_len, block, own, always):
    """(batch, heads, q_len, kv_len) bool, from the picks as they were given."""
    kept = kept_by_picks(picks, block, kv_len).any(3)
    causal = np.arange(kv_len) <= (np.arange(q_len) + kv_len - q_len)[:, None]
    more = np.zeros_like(causal) if always is None else causal & sf.compile_mask(always, q_len, kv_len).to_dense().numpy()
    if own:
        more |= causal & (np.arange(kv_len) // block == ((np.arange(q_len) + kv_len - q_len) // block)[:, None])
    return kept.numpy() | more


@settings(max_examples=40)
@given(
    lengths=st.tuples(st.integers(1, 90), st.integers(1, 90)) | st.integers(1, 90).map(lambda n: (n, n)),
    block=st.sampled_from([16, 32, 512]),
    own=st.booleans(),
    always=st.none() | st.sampled_from(["sinks(3) | local(20)", "full", "strided(7)"]),
    seed=st.integers(0, 99),
)
def test_kept_blocks_are_those_of_the_definition(lengths, block, own, always, seed):
    q_len, kv_len = lengths
    picks = drawn_picks((2, 1, q_len, 3), block, kv_len, seed)
    picks = picks[..., [2, 0, 1, 0]]  # in any order, and twice
    picks[:, :, ::3, 1:] = -1
    picks[:, :, 1::7, 2] = 90  # after the query
    kept = definition(picks, q_len, kv_len, block, own, always)
    selection = sf.BlockSelection.from_picks(picks, block, kv_len=kv_len, own=own, always=always)
    np.testing.assert_array_equal(selection.to_dense().cpu().numpy(), kept)
    assert selection.density == pytest.approx(kept.mean())
    query = seed % q_len
    np.testing.assert_array_equal(selection.kept_keys(query, 1).numpy(), kept[1, 0, query])
    assert selection.kept_pairs(0, 1) == kept[1, 0].sum()
    ordered = selection.picks.where(selection.picks >= 0, 1 << 20)
    assert (ordered.diff(dim=3) > 0)[ordered[..., 1:] < 1 << 20].all() and (ordered.diff(dim=3) >= 0).all()
    restored = pickle.loads(pickle.dumps(selection))
    assert torch.equal(restored.select(batch=1).to_dense(), selection.to_dense()[1:])


def test_sinks_join_the_softmax():
    q, k, sinks = tensor((1, 8, 60, 16)), tensor((1, 2, 90, 16)), torch.randn(8, device=DEVICE)
    selection = sf.topk_blocks(q, k, 3, every=1, block_size=16, share_group=True)
    plain, lse = sf.attention(q, k, k, selection, return_lse=True)
    out, with_sinks = sf.attention(q, k, k, selection, sinks=sinks, return_lse=True)
    torch.testing.assert_close(with_sinks, torch.logaddexp(lse, sinks[:, None].expand_as(lse)))
    torch.testing.assert_close(out, plain * (lse - with_sinks).exp()[..., None])


def test_a_batch_of_no_sequence_chooses_nothing():
    q, k = (torch.zeros(0, heads, 64, 16, device=DEVICE) for heads in (4, 2))
    by_compressed = sf.topk_blocks(q, k[:, :, :4], 3, every=1, block_size=16, score="softmax", lse=q[..., 0])
    for chosen in (by_compressed, sf.topk_blocks(scores=q[..., :4], keep=3, block_size=16)):
        assert chosen.density == 0 and chosen.to_dense().shape == (0, chosen.heads, 64, 64)
        assert sf.attention(q, k, k, chosen, return_block_lse=True)[1].shape == (0, 4, 64, chosen.picks.shape[3])


PICKS = torch.zeros(1, 2, 64, 2, dtype=torch.int32)


def test_numbers_of_numpy_count_as_ints():
    q, k = (torch.zeros(1, heads, 64, 8) for heads in (4, 2))
    keep, every, block_size = np.array([3, 1, 16])
    layer = sf.SparseAttention(32, 4, kv_heads=2, select={"keep": keep, "block_size": block_size})
    picks = sf.BlockSelection.from_picks(PICKS, block_size)
    for chosen in (picks, sf.topk_blocks(q, k, keep, every=every, block_size=block_size), layer.select(q, k)):
        assert type(chosen.block_size) is int and chosen.block_size == 16
    assert sf.topk_blocks(q, k, keep, block_size=block_size).equal(sf.topk_blocks(q, k, 3, block_size=16))
