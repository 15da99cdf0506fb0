"""Masks from lists of blocks and from compressed rows keep the blocks that are listed, made without looking at the values."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import sparse_flash as sf
from sparse_flash.masks import from_maps

KEPT = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def listed(kept, dtype=torch.int32, extra=0, seed=0):
    """(kv_indices, kv_counts) of a block map, in any order. The entries past the counts are no blocks."""
    random = np.random.default_rng(seed)
    indices = random.choice([-7, 10**6], (*kept.shape[:-1], kept.shape[-1] + extra))
    for row in np.ndindex(*kept.shape[:-1]):
        cols = random.permutation(np.flatnonzero(kept[row].numpy()))
        indices[row][: len(cols)] = cols
    return torch.from_numpy(indices).to(dtype), kept.sum(-1).to(dtype)


def compressed(kept, dtype=torch.int32, extra=0):
    """(crow_indices, col_indices) of a block map whose heads keep equally many blocks."""
    rows = kept.sum(-1).cumsum(-1)
    cols = kept.nonzero()[:, -1].view(*kept.shape[:-2], -1)
    crow, col = torch.nn.functional.pad(rows, (1, 0)), torch.nn.functional.pad(cols, (0, extra), value=-7)
    return crow.to(dtype), col.to(dtype)


def some_map(batch, heads, rows, cols, density, seed):
    """Equally many blocks in each head."""
    random = np.random.default_rng(seed)
    one = np.arange(rows * cols) < density * rows * cols
    return torch.from_numpy(random.permuted(np.tile(one, (batch, heads, 1)), axis=-1).reshape(batch, heads, rows, cols))


maps = st.builds(
    some_map, st.integers(1, 2), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.floats(0, 1), st.integers(0, 999)
)
MAKE = {
    "lists": lambda kept, *options: (sf.BlockMask.from_lists, listed(kept, *options)),
    "rows": lambda kept, *options: (sf.BlockMask.from_bsr, compressed(kept, *options)),
}


@settings(max_examples=60)
@given(
    make=st.sampled_from(sorted(MAKE)),
    kept=maps,
    block_size=st.sampled_from([16, 64]),
    cut=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    extra=st.integers(0, 3),
    within=st.sampled_from([None, "causal"]),
    heads=st.booleans(),
)
def test_every_listed_block_is_kept_and_no_other(make, kept, block_size, cut, dtype, extra, within, heads):
    q_len, kv_len = kept.shape[2] * block_size - cut[0], kept.shape[3] * block_size - cut[1]
    kept = kept if heads else kept[0, 0]
    from_these, tensors = MAKE[make](kept, dtype, extra)
    mask = from_these(*tensors, block_size, q_len, kv_len, within)
    dense = kept.repeat_interleave(block_size, -2).repeat_interleave(block_size, -1)[..., :q_len, :kv_len]
    if within is not None:
        dense = dense & sf.compile_mask(within, q_len, kv_len).to_dense()
    assert torch.equal(mask.to_dense().view(dense.shape), dense)
    assert mask.equal(sf.BlockMask.from_blocks(kept, block_size, q_len, kv_len, within))


def test_lengths_default_to_whole_blocks_and_as_many_keys_as_queries():
    square = KEPT[:, :3]
    for make in MAKE.values():
        from_these, tensors = make(square)
        assert from_these(*tensors, 32).sizes == (96, 96, 32) and from_these(*tensors, 32, 70).sizes == (70, 70, 32)
        assert from_these(*tensors, 32, kv_len=200).sizes == (96, 200, 32)


def test_the_indices_of_a_sparse_bsr_tensor_are_its_mask():
    dense = KEPT.repeat_interleave(16, 0).repeat_interleave(16, 1)
    sparse = dense.float().to_sparse_bsr(16)
    mask = sf.BlockMask.from_bsr(sparse.crow_indices(), sparse.col_indices(), 16, *sparse.shape)
    assert torch.equal(mask.to_dense(), dense)


@pytest.mark.parametrize("within", [None, "causal"])
@pytest.mark.parametrize("make", MAKE)
def test_values_are_not_read(make, within):
    from_these, tensors = MAKE[make](KEPT.expand(2, 3, 3, 4))
    with FakeTensorMode() as mode:  # raises where a shape or the host depends on a value
        mask = from_these(*map(mode.from_tensor, tensors), 16, 48, 64, within)
        q, k = torch.randn(2, 3, 48, 16), torch.randn(2, 3, 64, 16)
        assert sf.attention(q, k, k, mask).shape == q.shape


@pytest.mark.parametrize("make", MAKE)
def test_one_compiled_graph_serves_all_values(make):
    torch._dynamo.reset()
    q, k = torch.randn(1, 2, 48, 16), torch.randn(1, 2, 64, 16)
    from_these = MAKE[make](KEPT)[0]
    compiled = torch.compile(
        lambda *tensors: sf.attention(q, k, k, from_these(*tensors, 16, 48, 64)), backend="aot_eager", fullgraph=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kept in (KEPT, KEPT.flip(0), KEPT.flip(1)):
            tensors = MAKE[make](kept)[1]
            torch.testing.assert_close(compiled(*tensors), sf.attention(q, k, k, from_these(*tensors, 16, 48, 64)))


def test_where_values_are_not_read_blocks_beyond_the_keys_are_left_out(monkeypatch):
    monkeypatch.setattr(from_maps, "_can_read_values", lambda device: False)  # as of tensors on a GPU
    lists = torch.tensor([[0, 4, -1], [2**31 - 1, 1, 2]], dtype=torch.int32)
    mask = sf.BlockMask.from_lists(lists, torch.tensor([7, 2], dtype=torch.int32), 16, kv_len=64)
    assert mask.kept_blocks().tolist() == [[True, False, False, False], [False, True, False, False]]
    rows = torch.tensor([3, 1, 9]), torch.tensor([0, 4, -1, 2])
    mask = sf.BlockMask.from_bsr(*rows, 16, kv_len=64)
    assert mask.to_dense().shape == (32, 64)  # nonsense, but within bounds
