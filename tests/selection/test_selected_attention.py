"""A BlockSelection keeps the pairs of its definition, and attention over them is right on every back end that takes it."""

import pickle

import numpy as np
import pytest
import torch
from accepted import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE, poisoned_memory, tensor
from picked import drawn_picks, kept_by_picks, tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparse_flash as sf
from sparse_flash.backends import QueryRows
from sparse_flash.selection import torch as selection_torch

parametrize = pytest.mark.parametrize
BACKENDS = ("torch", "reference")


def drawn(batch, heads, q_len, kv_len, n, *, every=1, block_size=16, seed=0, empty=0.2):
    """Picks of random blocks that their groups may see, some of them -1 and some twice."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.arange(-(-q_len // every)) * every
    last = (first + every - 1).clamp(max=q_len - 1) + kv_len - q_len
    blocks = (last.div(block_size, rounding_mode="floor") + 1).clamp(min=0)[:, None]
    picks = (torch.rand(batch, heads, len(first), n, generator=generator) * blocks).long()
    nothing = (torch.rand(picks.shape, generator=generator) < empty) | (blocks == 0)
    return picks.masked_fill(nothing, -1).to(DEVICE)


def definition(picks, q_len, kv_len, *, every=1, block_size=16, own=True, always=None):
    """(batch, heads, q_len, kv_len) bool, pair by pair from the picks as they were given."""
    kept = np.zeros((*picks.shape[:2], q_len, kv_len), bool)
    allowed = None if always is None else sf.compile_mask(always, q_len, kv_len).to_dense().numpy()
    for b, h, t in np.ndindex(*picks.shape[:2], q_len):
        position = t + kv_len - q_len
        picked = set(picks[b, h, t // every].tolist()) | ({position // block_size} if own else set())
        for j in range(max(0, position + 1)):
            kept[b, h, t, j] = j // block_size in picked or (allowed is not None and allowed[t, j])
    return kept


@settings(max_examples=40)
@given(
    lengths=st.tuples(st.integers(1, 90), st.integers(1, 90)) | st.integers(1, 90).map(lambda n: (n, n)),
    every=st.sampled_from([1, 2, 3, 16, 40, 128]),
    block_size=st.sampled_from([16, 32, 512]),
    own=st.booleans(),
    always=st.none() | st.sampled_from(["sinks(3) | local(20)", "full", "strided(7)"]),
    seed=st.integers(0, 99),
)
def test_what_is_kept_is_what_the_definition_keeps(lengths, every, block_size, own, always, seed):
    q_len, kv_len = lengths
    options = {"every": every, "block_size": block_size}
    picks = drawn(2, 1, q_len, kv_len, 3, seed=seed, **options)
    if not own:
        kept = definition(picks, q_len, kv_len, own=False, always=always, **options)
    else:
        # The own blocks of a group's other queries are picked for all of it; a query sees of them what is before it.
        grouped = picks
        for t in range(q_len):
            position = t + kv_len - q_len
            column = torch.full((2, 1, grouped.shape[2], 1), -1, device=picks.device)
            column[:, :, t // every] = position // block_size if position >= 0 else -1
            grouped = torch.cat([grouped, column], 3)
        kept = definition(grouped, q_len, kv_len, own=False, always=always, **options)
    selection = sf.BlockSelection.from_picks(picks, q_len=q_len, kv_len=kv_len, own=own, always=always, **options)
    np.testing.assert_array_equal(selection.to_dense().cpu().numpy(), kept)
    assert selection.density == pytest.approx(kept.mean())
    query = seed % q_len
    np.testing.assert_array_equal(selection.kept_keys(query, 1).numpy(), kept[1, 0, query])
    unit = max(block_size, 128)
    cells = np.add.reduceat(np.add.reduceat(kept[1, 0].astype(int), range(0, q_len, unit), 0), range(0, kv_len, unit), 1)
    np.testing.assert_array_equal(selection.kept_pairs(0, 1, unit), cells)
    ordered = selection.picks.where(selection.picks >= 0, 1 << 20)
    assert (ordered.diff(dim=3) > 0)[ordered[..., 1:] < 1 << 20].all() and (ordered.diff(dim=3) >= 0).all()
    restored = pickle.loads(pickle.dumps(selection))
    assert torch.equal(restored.select(batch=1).to_dense(), selection.to_dense()[1:])


class LargestResult(TorchDispatchMode):
    """The most numbers in one tensor that an operation returned."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.most = max([self.most, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
        return result


@parametrize("every", [1, 4])
def test_keys_that_are_always_kept_take_little_memory(every):
    q, k, v = (torch.randn(1, heads, 512, 64) for heads in (6, 2, 2))
    selection = sf.topk_blocks(q, k, 4, every=every, block_size=16, always="sinks(4) | local(64)")
    with LargestResult() as results:
        out, lse = selection_torch.forward(q, k, v, selection, 0.1)
        selection_torch.backward(QueryRows(q, out, lse, out, lse), k, v, selection, 0.1)
    assert results.most <= selection_torch._CHUNK_CPU // 4  # of a chunk of all queries


def selection_of(every=1, block=16, n=3, pickers=4, q_len=60, kv_len=90):
    picks = drawn_picks((1, pickers, -(-q_len // every), n), every, block, q_len, kv_len)
    return sf.BlockSelection(picks, q_len, kv_len, block, every)


@parametrize("backend", [*BACKENDS, pytest.param("triton", marks=needs_triton)])
@parametrize("every, block, pickers", [(1, 64, 4), (7, 32, 4), (3, 16, 2)])
def test_the_masses_of_picked_blocks_are_right_and_differentiable(every, block, pickers, backend):
    q, k, *_ = tensors(1, 4, 2, 60, 90, 16)
    selection = selection_of(every, block, 2, pickers)
    kept = kept_by_picks(selection.picks, every, block, 60, 90).repeat_interleave(4 // pickers, 1).to(DEVICE)
    some = kept.any(-1)

    def by_definition(q, k):
        scores = (0.3 * q @ k.repeat_interleave(2, 1).mT)[:, :, :, None].masked_fill(~kept & some[..., None], float("-inf"))
        return scores.logsumexp(-1).masked_fill(~some, float("-inf"))

    def computed(q, k):
        return sf.attention(q, k, k, selection, scale=0.3, return_block_lse=True, backend=backend)[1]

    of_some = torch.randn(some.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) * some
    results = []
    for masses, dtype in ((by_definition, torch.float64), (computed, torch.float32)):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k)]
        with poisoned_memory():
            found = masses(*leaves)
            grads = torch.autograd.grad((found.masked_fill(~some, 0.0) * of_some).sum(), leaves)
        results.append([found.detach(), *grads])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def test_sinks_join_the_softmax():
    selection = selection_of(pickers=2)
    q, k, sinks = tensor((1, 8, 60, 16)), tensor((1, 2, 90, 16)), torch.randn(8, device=DEVICE)
    plain, lse = sf.attention(q, k, k, selection, return_lse=True)
    out, with_sinks = sf.attention(q, k, k, selection, sinks=sinks, return_lse=True)
    torch.testing.assert_close(with_sinks, torch.logaddexp(lse, sinks[:, None].expand_as(lse)))
    torch.testing.assert_close(out, plain * (lse - with_sinks).exp()[..., None])


SELECTIONS_OF_NOTHING = {
    "from_picks": lambda q, k: sf.BlockSelection.from_picks(torch.zeros(0, 2, 64, 2, dtype=torch.int32), 16),
    "by mean keys": lambda q, k: sf.topk_blocks(q, k, 3, every=1, block_size=16, share_group=True, always="sinks(2)"),
    "by compressed keys": lambda q, k: sf.topk_blocks(q, k[:, :, :4], 3, every=2, block_size=16, score="softmax"),
    "by scores": lambda q, k: sf.topk_blocks(scores=torch.zeros(0, 4, 64, 4), keep=3, block_size=16),
}


@parametrize("compiles", [False, True])
@parametrize("made", SELECTIONS_OF_NOTHING.values(), ids=SELECTIONS_OF_NOTHING)
def test_a_batch_of_no_sequence_has_results_and_gradients_of_none(made, compiles):
    torch._dynamo.reset()
    leaves = [torch.zeros(0, heads, 64, 16, requires_grad=True) for heads in (4, 2, 2)]

    def attend(q, k, v):
        return sf.attention(q, k, v, made(q, k), return_lse=True, return_block_lse=True)

    chosen = made(*leaves[:2])
    assert chosen.batch == 0 and chosen.density == 0 and chosen.to_dense().shape == (0, chosen.heads, 64, 64)
    out, lse, masses = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiles else attend)(*leaves)
    assert (out.shape, lse.shape, masses.shape[:3]) == ((0, 4, 64, 16), (0, 4, 64), (0, 4, 64))
    assert masses.shape[3] == chosen.picks.shape[3]
    grads = torch.autograd.grad(out.sum() + lse.sum() + masses.sum(), leaves, allow_unused=True)
    assert [g.shape for g in grads] == [t.shape for t in leaves]


PICKS = torch.zeros(1, 2, 64, 2, dtype=torch.int32)


def changed(*place_and_value):
    picks = PICKS.clone()
    picks[place_and_value[:-1]] = place_and_value[-1]
    return picks


def test_numbers_of_numpy_count_as_ints():
    q, k = (torch.zeros(1, heads, 64, 8) for heads in (4, 2))
    keep, every, block_size = np.array([3, 4, 16])
    layer = sf.SparseAttention(32, 4, kv_heads=2, select={"keep": keep, "every": every, "block_size": block_size})
    for sel in (
        sf.topk_blocks(q, k, keep, every=every, block_size=block_size),
        sf.BlockSelection.from_picks(PICKS[:, :, ::4], block_size, every=every, q_len=np.int64(64)),
        layer.select(q, k),
    ):
        assert type(sel.every) is type(sel.block_size) is int and sel.block_size == 16
    assert sf.topk_blocks(q, k, keep, block_size=block_size).equal(sf.topk_blocks(q, k, 3, block_size=16))


def test_values_are_checked_on_the_device_where_asked_and_dropped_where_not():
    bad = changed(0, 1, 40, 1, 9)
    assert torch.equal(sf.BlockSelection.from_picks(bad, 16, check=False).picks[0, 1, 40].unique(), torch.tensor([-1, 0, 2]).int())
    with pytest.raises(RuntimeError, match="beyond the keys or after its query"):
        torch.compile(lambda picks: sf.BlockSelection.from_picks(picks, 16, check=True).picks, backend="aot_eager")(bad)
