"""topk_blocks keeps the blocks that its definition names, for blocks of queries."""

from functools import partial

import chosen
import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE, LAYOUTS, Sizes, normal

import sparse_flash as sf

parametrize = pytest.mark.parametrize


def inputs(q_len, kv_len, **given):
    few = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 8}
    return normal(Sizes(q_len=q_len, kv_len=kv_len, **few | given))[:2]


def definition(q, k, keep, size, within, always, share_group):
    """The kept pairs, (batch, heads, q_len, kv_len), by the products of means."""
    means = [np.stack([t[:, :, some].mean(2) for some in chosen.groups_of(t.shape[2], size)], 2) for t in (q, k)]
    scores = means[0] @ means[1].repeat(q.shape[1] // k.shape[1], 1).swapaxes(2, 3)
    if share_group:
        scores = scores.reshape(len(q), k.shape[1], -1, *scores.shape[2:]).sum(2)
    return chosen.kept_pairs([("keep", keep, scores)], within, always, size, (*q.shape[:3], k.shape[2]))


@settings(max_examples=50)
@given(
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)) | st.integers(1, 200).map(lambda n: (n, n)),
    within=st.none() | st.just(sf.causal()) | strategies.expressions,
    always=st.none() | strategies.expressions,
    keep=st.integers(1, 12) | st.sampled_from([0.01, 0.07, 0.25, 0.5, 0.9, 1.0]),
    size=st.sampled_from([16, 32]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    share_group=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
)
def test_kept_blocks_are_those_of_the_definition(
    lengths, within, always, keep, size, heads, share_group, dtype, layout, seed
):  # fmt: skip
    q, k = inputs(*lengths, batch=2, heads=heads[0], kv_heads=heads[1], dtype=dtype, layout=layout, seed=seed)
    mask = sf.topk_blocks(q, k, keep, block_size=size, within=within, always=always, share_group=share_group)
    assert tuple(mask.mask_index.shape) == (2, heads[0]) and mask.masks == 2 * heads[share_group]
    expected = definition(*(t.double().cpu().numpy() for t in (q, k)), keep, size, within, always, share_group)
    for found, wanted in ((mask, expected), (mask.transpose(), expected.swapaxes(2, 3))):
        np.testing.assert_array_equal(found.to_dense().cpu().expand(2, heads[0], -1, -1), wanted)


CHOICES = {
    "blocks": partial(sf.topk_blocks, keep=5, block_size=16),
    "queries": partial(sf.topk_blocks, keep=5, every=1, block_size=16),
    "sampled": partial(sf.choose_blocks, "causal & (sampled(4, keep=3, block=64) | sinks(4))"),
    "pooled": partial(sf.choose_blocks, "pooled(mass=0.5, block=64)"),
    "antidiagonal": partial(sf.choose_blocks, "causal & antidiagonal(8, budget=0.4, block=64)"),
}


@parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_autocast_chooses_by_the_cast_tensors_and_rounds_no_product(choice):
    q, k = inputs(512, 512, head_dim=64)
    wanted = choice(q=q.bfloat16(), k=k.bfloat16())
    with torch.autocast(DEVICE, torch.bfloat16):
        for pair in ((q, k), (q, k.bfloat16()), (q.bfloat16(), k.bfloat16())):
            assert torch.equal(choice(q=pair[0], k=pair[1]).to_dense(), wanted.to_dense())


@parametrize("keep, counts", [(1, [1] * 6), (3, [1, 2, 3, 3, 3, 3]), (9, [1, 2, 3, 4, 5, 6]), (0.5, [1, 1, 2, 2, 3, 3])])
def test_with_equal_scores_a_row_keeps_its_diagonal_block_and_keep_blocks(keep, counts):
    q, k = inputs(6 * 32 - 5, 6 * 32 - 5)
    blocks = sf.topk_blocks(torch.zeros_like(q), k, keep, block_size=32).kept_blocks()
    assert (blocks.sum(3).cpu() == torch.tensor(counts)).all() and blocks.diagonal(dim1=2, dim2=3).all()
