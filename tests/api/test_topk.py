"""topk_blocks keeps the blocks that its definition names, uses no later key, and its masks are right on every back end."""

import math
from fractions import Fraction

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE

import sparse_flash as sf

parametrize = pytest.mark.parametrize


def inputs(q_len, kv_len, *, batch=1, heads=2, kv_heads=2, head_dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, q_len, head_dim), (batch, kv_heads, kv_len, head_dim)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def pairs(pattern, q_len, kv_len):
    return np.ones((q_len, kv_len), bool) if pattern is None else strategies.dense(pattern, q_len, kv_len)


def definition(q, k, keep, size, within, always=None, share_group=False):
    """The kept pairs, (batch, heads, q_len, kv_len), by loops over rows of blocks."""
    q, k = q.double().cpu().numpy(), k.double().cpu().numpy()
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = q.shape, k.shape
    group, offset = heads // kv_heads, kv_len - q_len
    allowed = pairs(within, q_len, kv_len)
    wanted = np.zeros_like(allowed) if always is None else pairs(always, q_len, kv_len)
    kept = np.zeros((batch, heads, q_len, kv_len), bool)
    for b, h in np.ndindex(batch, heads):
        asking = range(h // group * group, h // group * group + group) if share_group else [h]
        for top in range(0, q_len, size):
            rows = slice(top, min(top + size, q_len))
            cols = [slice(left, min(left + size, kv_len)) for left in range(0, kv_len, size)]
            cols = [col for col in cols if allowed[rows, col].any()]
            first, last = rows.start + offset, rows.stop - 1 + offset
            own = range(first // size, last // size + 1)
            forced = [col for col in cols if wanted[rows, col].any() or col.start // size in own]
            means = {c.start: k[b, h // group, c].mean(0) for c in cols}
            scores = {start: sum(q[b, n, rows].mean(0) @ mean for n in asking) for start, mean in means.items()}
            others = sorted((c for c in cols if c not in forced), key=lambda c: -scores[c.start])
            count = keep if isinstance(keep, int) else math.ceil(Fraction(str(keep)) * len(cols))
            for col in [*forced, *others[: max(0, count - len(forced))]]:
                kept[b, h, rows, col] = allowed[rows, col]
    return kept


def dense(mask, batch, heads):
    return mask.to_dense().cpu().expand(batch, heads, -1, -1).numpy()


keeps = st.integers(1, 12) | st.sampled_from([0.01, 0.07, 0.25, 0.5, 0.9, 1.0])


@settings(max_examples=40)
@given(
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)) | st.integers(1, 200).map(lambda n: (n, n)),
    within=st.none() | st.just(sf.causal()) | strategies.expressions,
    always=st.none() | strategies.expressions,
    keep=keeps,
    size=st.sampled_from([16, 32]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    share_group=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_kept_is_what_the_definition_keeps(lengths, within, always, keep, size, heads, share_group, seed):
    q, k = inputs(*lengths, batch=2, heads=heads[0], kv_heads=heads[1], seed=seed)
    mask = sf.topk_blocks(q, k, keep, block_size=size, within=within, always=always, share_group=share_group)
    assert tuple(mask.mask_index.shape) == (2, heads[0]) and mask.masks == 2 * heads[share_group]
    expected = definition(q, k, keep, size, within, always, share_group)
    np.testing.assert_array_equal(dense(mask, 2, heads[0]), expected)
    np.testing.assert_array_equal(dense(mask.transpose(), 2, heads[0]), expected.swapaxes(2, 3))


@parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@parametrize("layout", ["heads first", "tokens first"])
def test_every_dtype_and_memory_order_is_averaged_without_loss(dtype, layout):
    q, k = inputs(300, 330, heads=4, dtype=dtype)
    q, k = (t.transpose(1, 2).contiguous().transpose(1, 2) if layout == "tokens first" else t for t in (q, k))
    mask = sf.topk_blocks(q, k, 4, block_size=32)
    np.testing.assert_array_equal(dense(mask, 1, 4), definition(q, k, 4, 32, sf.causal()))


@parametrize("every", [None, 1])
def test_autocast_chooses_by_the_cast_tensors_and_rounds_no_product(every):
    q, k = inputs(512, 512, head_dim=64)
    rounded = (x.to(torch.bfloat16) for x in (q, k))
    wanted = sf.topk_blocks(*rounded, 5, every=every, block_size=16)
    with torch.autocast(DEVICE, torch.bfloat16):
        for pair in ((q, k), (q, k.bfloat16()), (q.bfloat16(), k.bfloat16())):
            chosen = sf.topk_blocks(*pair, 5, every=every, block_size=16)
            assert torch.equal(chosen.to_dense(), wanted.to_dense())


@parametrize("q_len, kv_len", [(256, 256), (250, 250), (100, 250), (250, 100)])
@parametrize("keep", [1, 3, 0.3])
def test_no_later_key_changes_what_is_kept_and_an_earlier_one_does(q_len, kv_len, keep):
    q, k = inputs(q_len, kv_len)
    before = sf.topk_blocks(q, k, keep, block_size=32).to_dense()
    changed = 0
    for top in range(0, q_len, 32):
        position = max(0, top + kv_len - q_len)
        later, earlier = k.clone(), k.clone()
        later[:, :, position:] = 100 * later[:, :, position:].flip(2)
        earlier[:, :, :position] = 100 * earlier[:, :, :position].flip(2)
        rows = slice(top, top + 32)
        after = sf.topk_blocks(q, later, keep, block_size=32).to_dense()
        assert torch.equal(after[:, :, rows], before[:, :, rows])
        changed += (sf.topk_blocks(q, earlier, keep, block_size=32).to_dense() != before)[:, :, rows].any().item()
    # A row that keeps one block keeps its own; with few keys, a share of 0.3 is that one, or two of two.
    assert bool(changed) == (keep == 3 or (keep == 0.3 and q_len <= kv_len))


@parametrize("keep, counts", [(1, [1] * 6), (3, [1, 2, 3, 3, 3, 3]), (9, [1, 2, 3, 4, 5, 6]), (0.5, [1, 1, 2, 2, 3, 3])])
def test_a_row_keeps_as_many_blocks_as_it_was_told_its_own_among_them_where_all_scores_are_equal(keep, counts):
    q, k = inputs(6 * 32 - 5, 6 * 32 - 5)
    mask = sf.topk_blocks(torch.zeros_like(q), k, keep, block_size=32)
    blocks = mask.kept_blocks()
    assert (blocks.sum(3).cpu() == torch.tensor(counts)).all()
    assert blocks.diagonal(dim1=2, dim2=3).all()
    kept = mask.to_dense()
    assert kept.diagonal(dim1=2, dim2=3).all() and not kept.triu(1).any()
