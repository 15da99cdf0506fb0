"""Scores are what the docstrings of choosers say, by operations and by kernels, at once and range by range."""

import math

import chosen
import numpy as np
import pytest
import torch
from accepted import needs_triton
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import DEVICE

import sparse_flash as sf
from sparse_flash.choosers import choose, features
from sparse_flash.masks.grid import BlockGrid

parametrize = pytest.mark.parametrize
LENGTHS = st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.integers(1, 300).map(lambda n: (n, n))
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])
STARTS = st.none() | st.lists(st.integers(0, 300), min_size=2, max_size=2)


def content_of(chooser, q, k, causal=True, scale=None, starts=None, ends=None, q_ends=None):
    """starts, ends, q_ends: lists, which tokens exist; the others become 0."""
    grid = BlockGrid(q.shape[2], k.shape[2], chooser.block_size)
    starts, ends, q_ends = (None if one is None else torch.tensor(one, device=DEVICE) for one in (starts, ends, q_ends))
    q, k = choose.clear_nonexistent(q, None, q_ends), choose.clear_nonexistent(k, starts, ends)
    return features.Content(q, k, grid, causal, q.shape[3] ** -0.5 if scale is None else scale, None, starts, ends, q_ends)


def scores(chooser, content, by_kernel=False):
    """(scores, how many ranges they came in)"""
    with torch.no_grad():
        ranges = list(choose._iter_scores(chooser, content, by_kernel))
    assert [*(low for low, _ in ranges), content.grid.q_blocks] == np.cumsum([0, *(part.shape[2] for _, part in ranges)]).tolist()
    return torch.cat([part for *_, part in ranges], 2), len(ranges)


@settings(max_examples=80)
@given(
    chooser=chosen.drawn(chosen.COMPARING),
    lengths=LENGTHS,
    heads=HEADS,
    causal=st.booleans(),
    scale=st.none() | st.floats(0.05, 2),
    starts=STARTS,
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    held=st.sampled_from([1, 5_000, 1 << 28]),
    seed=st.integers(0, 99),
)
# The last block has fewer queries than are sampled.
@example(sf.parse("sampled(3, keep=1, block=64)"), (67, 67), (2, 1), True, None, None, torch.float32, 1 << 28, 0)
def test_scores_are_those_of_the_docstring_however_many_logits_are_held(
    chooser, lengths, heads, causal, scale, starts, dtype, held, seed
):
    q, k = chosen.tensors(*lengths, batch=2, heads=heads[0], kv_heads=heads[1], dtype=dtype, seed=seed)
    starts = starts and [min(start, lengths[1] - 1) for start in starts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_HELD", held)
        patch.setattr(choose, "_MOST_BYTES", held)
        found, _ = scores(chooser, content_of(chooser, q, k, causal, scale, starts))
    wanted = chosen.scores_of(chooser, q, k, causal=causal, scale=scale, starts=starts)
    near = {torch.float64: 1e-6, torch.float32: 2e-5}.get(dtype, 60 * torch.finfo(dtype).eps)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    np.testing.assert_allclose(found.cpu(), wanted, rtol=5 * near, atol=near)


@needs_triton
@settings(max_examples=20)
@given(
    chooser=chosen.drawn(chosen.COMPARING),
    lengths=LENGTHS,
    heads=HEADS,
    causal=st.booleans(),
    starts=STARTS,
    ends=STARTS,
    q_ends=STARTS,
    dtype=st.sampled_from([torch.float16, torch.float32]),
    head_dim=st.sampled_from([8, 40, 64, 96, 128]),
    held=st.sampled_from([1, 30_000, 1 << 28]),
    turned=st.sampled_from([(1, 1), (1, 2), (2, 3)]),  # in memory
    seed=st.integers(0, 99),
)
def test_kernels_score_as_operations_do(chooser, lengths, heads, causal, starts, ends, q_ends, dtype, head_dim, held, turned, seed):
    q, k = chosen.tensors(*lengths, batch=2, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype, seed=seed)
    q, k = (x.transpose(*turned).contiguous().transpose(*turned) for x in (q, k))
    starts = starts and [min(start, lengths[1] - 1) for start in starts]
    content = content_of(chooser, q, k, causal, starts=starts, ends=ends, q_ends=q_ends)
    wanted, _ = scores(chooser, content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_MOST_BYTES", held)
        found, ranges = scores(chooser, content, True)
    assert ranges == content.grid.q_blocks or held > 1
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted.float(), rtol=3e-3, atol=1e-5)


@needs_triton
@parametrize("queries", [24, 40, 64])
def test_kernels_score_many_blocks_for_any_number_of_queries(queries):
    chooser = sf.parse(f"sampled({queries}, keep=1, block=64)")
    q, k = chosen.tensors(64, 64 * 530, heads=1)
    content = content_of(chooser, q, k)
    torch.testing.assert_close(scores(chooser, content, True)[0], scores(chooser, content)[0], rtol=3e-3, atol=1e-6)


@needs_triton
@parametrize("rise", [10.0, 100.0, 1000.0])
def test_kernels_find_the_block_whose_logits_are_far_above_the_first_ones(rise):
    chooser = sf.parse("sampled(4, keep=1, block=64)")
    q, k = torch.ones(1, 1, 64, 16, device=DEVICE), torch.zeros(1, 1, 64 * 8, 16, device=DEVICE)
    k[:, :, 64 * 5 + 7] = rise / 16
    found, _ = scores(chooser, content_of(chooser, q, k, scale=1.0), True)
    weight = (1 + 63 * math.exp(-rise)) / (1 + 511 * math.exp(-rise))
    assert found.argmax(3).eq(5).all()
    torch.testing.assert_close(found[..., 5], torch.full_like(found[..., 5], weight), rtol=3e-3, atol=0)
