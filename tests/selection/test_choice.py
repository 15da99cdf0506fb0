"""Queries choose the blocks that the definition says, by earlier tokens only; and a choice once made is kept."""

from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from accepted import needs_triton
from calls import replayed
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DEVICE, tensor
from torch.utils.checkpoint import checkpoint

import sparse_flash as sf
from sparse_flash.selection import choice

parametrize = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def whole_numbers(*shape, seed=0, largest=3):
    """Small integers, whose products and sums are exact, so that equal scores are equal everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).float().to(DEVICE)


def definition(score_blocks, q, kv_heads, kv_len, keep, size, share_group):
    """(batch, heads that pick, q_len) lists of blocks, from the definition's words; None where rounding may decide.

    score_blocks: (batch entry, query head, key head, query, its position, blocks before its own) -> a score of each.
    """
    batch, heads, q_len, _ = q.shape
    group, picking = heads // kv_heads, kv_heads if share_group else heads
    picks = np.empty((batch, picking, q_len), object)
    for b, h, t in np.ndindex(*picks.shape):
        position = t + kv_len - q_len
        own = {position // size} if position >= 0 else set()
        before = max(position, 0) // size
        asking = range(h * group, (h + 1) * group) if share_group else [h]
        scores = sum(np.array(score_blocks(b, a, a // group, t, position, before)) for a in asking)
        best = sorted(range(before), key=lambda c: (-scores[c], c))
        last, next_ = (scores[best[c]] if 0 <= c < before else None for c in (keep - 2, keep - 1))
        clear = None in (last, next_) or last == next_ or abs(last - next_) > 1e-4 * abs(last)
        picks[b, h, t] = sorted(own | set(best[: keep - 1])) if clear else None
    return picks


def picked_by_keys(q, k, keep, size, share_group, score):
    def scores(b, h, kv_head, t, position, before):
        products = (k[b, kv_head, : before * size].double() @ q[b, h, t].double()).view(before, size)
        return (products.mean(1) if score == "mean" else products.amax(1)).tolist()

    return definition(scores, q, k.shape[1], k.shape[2], keep, size, share_group)


def lists(picks):
    found = np.empty(picks.shape[:3], object)
    for place in np.ndindex(*found.shape):
        found[place] = [block for block in picks[place].tolist() if block >= 0]
    return found


held = st.sampled_from([1000, choice._CHUNK_CPU])  # scores at a time, of some groups or all of them
LENGTHS = st.tuples(st.integers(1, 120), st.integers(1, 120)) | st.integers(1, 120).map(lambda n: (n, n))


@settings(max_examples=25)
@given(
    lengths=LENGTHS,
    keep=st.integers(1, 9),
    size=st.sampled_from([16, 32]),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 1)]),
    share_group=st.booleans(),
    score=st.sampled_from(choice.SCORES),
    held=held,
    seed=st.integers(0, 99),
)
def test_picked_blocks_are_those_of_the_definition(lengths, keep, size, heads, share_group, score, held, seed):
    (q_len, kv_len), (q_heads, kv_heads) = lengths, heads
    q, k = whole_numbers(2, q_heads, q_len, 4, seed=seed), whole_numbers(2, kv_heads, kv_len, 4, seed=seed + 1)
    with mock.patch.object(choice, "_CHUNK_CPU", held):
        selection = sf.topk_blocks(q, k, keep, every=1, block_size=size, share_group=share_group, score=score)
    assert selection.heads == (kv_heads if share_group else q_heads)
    assert (lists(selection.picks) == picked_by_keys(q, k, keep, size, share_group, score)).all()


def picked_by_compressed(q, keys, keep, size, share_group, kv_len, length, stride):
    """Attention to compressed keys gives a block their weights, by a key's strides in it."""

    def scores(b, h, kv_head, t, position, before):
        read = [i for i in range(keys.shape[2]) if i * stride + length - 1 <= position]
        weights = torch.softmax(keys[b, kv_head, read].double() @ q[b, h, t].double() * q.shape[3] ** -0.5, 0)
        found = np.zeros(max(position, 0) // stride + 1 + length)
        for i, weight in zip(read, weights.tolist(), strict=True):
            found[i : i + length // stride] += weight
        return found[: before * size // stride].reshape(before, size // stride).sum(1)

    return definition(scores, q, keys.shape[1], kv_len, keep, size, share_group)


def compressed_count(kv_len, length, stride):
    return max(0, (kv_len - length) // stride + 1)


def lse_of(q, keys, kv_len, length, stride):
    """Of attention to compressed keys that have no token after a query."""
    scores = q.double() @ keys.double().repeat_interleave(q.shape[1] // keys.shape[1], 1).mT * q.shape[3] ** -0.5
    last = torch.arange(keys.shape[2], device=DEVICE) * stride + length - 1
    position = torch.arange(q.shape[2], device=DEVICE)[:, None] + kv_len - q.shape[2]
    return scores.masked_fill(last > position, -torch.inf).logsumexp(-1)


COMPRESSIONS = [(16, 16, 16), (32, 16, 64), (8, 4, 16), (32, 32, 64), (48, 16, 32), (64, 16, 32)]


@settings(max_examples=25)
@given(
    lengths=LENGTHS,
    keep=st.integers(1, 5),
    sizes=st.sampled_from(COMPRESSIONS),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    share_group=st.booleans(),
    held=held,
    seed=st.integers(0, 99),
)
def test_compressed_keys_choose_by_the_weights_of_attention_to_them(lengths, keep, sizes, heads, share_group, held, seed):
    (q_len, kv_len), (length, stride, block) = lengths, sizes
    generator = torch.Generator().manual_seed(seed)
    q = tensor((2, heads[0], q_len, 4), generator=generator)
    keys = tensor((2, heads[1], compressed_count(kv_len, length, stride), 4), generator=generator)
    options = {"block_size": block, "share_group": share_group, "compression": (length, stride), "kv_len": kv_len}
    options |= {"every": 1, "lse": lse_of(q, keys, kv_len, length, stride)}
    with mock.patch.object(choice, "_CHUNK_CPU", held):
        selection = sf.topk_blocks(q, keys, keep, score="softmax", **options)
    wanted = picked_by_compressed(q, keys, keep, block, share_group, kv_len, length, stride)
    found = lists(selection.picks)
    assert all(wanted[place] in (None, found[place]) for place in np.ndindex(*wanted.shape))
    undecided = sum(picks is None for picks in wanted.flat)
    assert undecided <= 0.1 * wanted.size + 1 or kv_len < 4 * length  # blocks of the same few keys tie


def test_equal_weights_of_blocks_go_to_the_first_ones():
    q, keys = torch.zeros(1, 4, 100, 8, device=DEVICE), whole_numbers(1, 2, 5, 8)
    options = {"compression": (32, 16), "share_group": True, "lse": lse_of(q, keys, 100, 32, 16)}
    selection = sf.topk_blocks(q, keys, 3, every=1, block_size=16, score="softmax", **options)
    # The first stride is of one compressed key, the others of two.
    assert lists(selection.picks)[0, 1, [20, 40, 90]].tolist() == [[0, 1], [0, 1, 2], [1, 2, 5]]


def test_a_head_whose_weights_are_a_million_times_larger_decides():
    generator = torch.Generator().manual_seed(0)
    q, keys = tensor((2, 4, 90, 8), generator=generator), tensor((2, 2, 5, 8), generator=generator)
    lse, options = lse_of(q, keys, 90, 16, 16), {"every": 1, "block_size": 16, "score": "softmax", "share_group": True}
    lse[:, ::2] -= 14
    alone = sf.topk_blocks(q[:, ::2], keys, 3, lse=lse[:, ::2], **options).picks
    assert torch.equal(sf.topk_blocks(q, keys, 3, lse=lse, **options).picks, alone)


def test_more_blocks_than_there_are_keep_all_in_no_more_memory():
    q, k = whole_numbers(1, 1, 100, 4), whole_numbers(1, 1, 100, 4)
    selection = sf.topk_blocks(q, k, 1 << 40, every=1, block_size=16)
    assert selection.picks.shape == (1, 1, 100, 7)
    assert torch.equal(selection.to_dense(), torch.ones(1, 1, 100, 100, dtype=torch.bool, device=DEVICE).tril())


def test_given_scores_choose_and_those_that_are_none_never_do():
    scores = torch.tensor([[5.0, 1.0, 1.0, 9.0], [float("-inf"), float("nan"), float("inf"), 9.0]], device=DEVICE)
    scores = scores[:, None].expand(2, 64, 4)[None]
    selection = sf.topk_blocks(scores=scores, keep=3, block_size=16)
    assert lists(selection.picks)[0, 0, [0, 20, 40, 63]].tolist() == [[0], [0, 1], [0, 1, 2], [0, 1, 3]]
    assert lists(selection.picks)[0, 1, [20, 40, 63]].tolist() == [[1], [2], [2, 3]]


def test_what_is_always_kept_comes_on_top_to_the_token():
    q, k = whole_numbers(1, 2, 100, 4), whole_numbers(1, 2, 100, 4, seed=1)
    plain, more = (sf.topk_blocks(q, k, 2, every=1, block_size=16, always=a) for a in (None, "sinks(3) | local(20)"))
    assert torch.equal(plain.picks, more.picks)
    always = sf.compile_mask("causal & (sinks(3) | local(20))", 100, block_size=16, device=DEVICE).to_dense()
    assert torch.equal(more.to_dense(), plain.to_dense() | always)


def assert_kernel_agrees(choose, *small: str) -> None:
    """The kernel picks what PyTorch's operations pick. small: kinds of scores, taken in tiles of 16 groups and blocks."""
    from sparse_flash.kernels.common.config import Config
    from sparse_flash.selection.kernels import pick_blocks

    with mock.patch.object(choice, "kernel_chooses", lambda *_: False):
        wanted = choose()
    configs = pick_blocks._CONFIGS | dict.fromkeys(small, Config(16, 16, 1, 1))
    with mock.patch.object(choice, "kernel_chooses", lambda *_: True), mock.patch.object(pick_blocks, "_CONFIGS", configs):
        assert torch.equal(choose(), wanted)


# q_len, kv_len, keep, heads, tokens of documents, of which each begins at a block of its own
OF_KEYS = [
    (50, 50, 3, (2, 2), None),
    (60, 100, 1, (2, 1), None),
    (100, 70, 6, (3, 1), None),
    (5, 130, 6, (4, 2), None),
    (60, 96, 3, (4, 2), (15, 20, 25)),
]


@needs_triton
@parametrize("kind", ["mean", "max", "given"])
@parametrize("q_len, kv_len, keep, heads, documents", OF_KEYS)
def test_the_kernel_picks_what_pytorch_picks(kind, q_len, kv_len, keep, heads, documents, poison):
    batch, bounds = 1 if documents else 2, None
    if documents:  # the first block of each query's document, and its own
        first = torch.arange(len(documents)).mul(2).repeat_interleave(torch.tensor(documents))
        own = first + torch.cat([torch.arange(tokens) for tokens in documents]) // 16
        bounds = torch.stack([first, own], 1).int().to(DEVICE)

    def choose(kind, source, keys, heads):
        return choice.choose(choice.BlockChoice(kind, heads, keep, 16, kv_len), source, keys, bounds=bounds)

    if kind == "given":
        scores = whole_numbers(batch, 2, q_len, -(-kv_len // 16))
        scores[0, 0, :, 0], scores[0, 1, :, 0] = float("-inf"), float("nan")
        assert_kernel_agrees(lambda: choose(kind, scores, None, 2), kind)
        return
    q, k = whole_numbers(batch, heads[0], q_len, 8), whole_numbers(batch, heads[1], kv_len, 8, seed=1)
    for share_group, dtype in product((False, True), (torch.float32, torch.float16)):
        of_type = q.to(dtype), k.to(dtype)
        assert_kernel_agrees(lambda x=of_type, picking=heads[share_group]: choose(kind, *x, picking), kind, "wide")


@needs_triton
@parametrize("dtype, size", [(torch.float32, 128), (torch.float16, 128), (torch.float16, 256)])
def test_the_kernel_picks_what_pytorch_picks_of_large_blocks(dtype, size, poison):
    q, k = whole_numbers(1, 4, 140, 24).to(dtype), whole_numbers(1, 1, 19 * size + 5, 24, seed=1).to(dtype)
    assert_kernel_agrees(lambda: choice.choose(choice.BlockChoice("max", 4, 7, size, k.shape[2]), q, k))


OF_COMPRESSED = [(35, 130, 3, (4, 2)), (60, 100, 1, (2, 1)), (45, 40, 4, (3, 1))]  # q_len, kv_len, keep, heads


@needs_triton
@parametrize(
    "case, sizes", [*((0, sizes) for sizes in COMPRESSIONS), (1, (48, 16, 32)), (1, (8, 4, 16)), (2, (8, 4, 16)), (2, (32, 16, 64))]
)
def test_the_kernel_picks_what_pytorch_picks_by_compressed_keys(case, sizes, poison):
    (length, stride, block), (q_len, kv_len, keep, heads) = sizes, OF_COMPRESSED[case]
    generator = torch.Generator().manual_seed(length + q_len)
    q = tensor((2, heads[0], q_len, 24), generator=generator)
    keys = tensor((2, heads[1], compressed_count(kv_len, length, stride), 24), generator=generator)
    lse = lse_of(q, keys, kv_len, length, stride).float()
    for picking, small in zip(heads, ((), ("softmax",)), strict=True):
        asked = choice.BlockChoice("softmax", picking, keep, block, kv_len, length, stride)
        assert_kernel_agrees(lambda asked=asked: choice.choose(asked, q, keys, lse=lse), *small)


def by_keys(q, k):
    return sf.topk_blocks(q, k, 3, every=1, block_size=16, always="sinks(3)", share_group=True)


def by_compressed(q, k):
    options = {"block_size": 16, "share_group": True, "score": "softmax", "lse": q[..., 0]}
    return sf.topk_blocks(q, k.unflatten(2, (-1, 16)).mean(3), 3, every=1, **options)


def by_picks(q, k):
    scores = q.unflatten(1, (2, 2)).sum(2) @ k[:, :, ::16].mT
    return sf.BlockSelection.from_picks(scores.topk(3).indices, 16)


@parametrize("compiled", [False, True])
@parametrize("choose", [by_keys, by_compressed, by_picks])
def test_picks_are_kept_under_activation_checkpointing_and_never_chosen_again(choose, compiled):
    generator = torch.Generator().manual_seed(0)
    of_choice = [tensor((1, heads, 80, 16), generator=generator) for heads in (4, 2)]
    inputs = [tensor((1, heads, 80, 16), generator=generator).requires_grad_() for heads in (4, 2, 2)]

    def attend(q, k, v):
        return sf.attention(q.cos(), k, v, choose(*of_choice))

    def checkpointed(*inputs):
        return checkpoint(attend, *inputs, use_reentrant=False, context_fn=sf.keep_picks)

    def loss(attend):
        with torch.autocast(DEVICE, torch.bfloat16):
            return attend(*inputs).float().square().sum()

    wanted = torch.autograd.grad(loss(attend), inputs)
    result = (torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss)(checkpointed)
    for t in of_choice:
        t.copy_(t.flip(2))  # by which others would be picked
    torch.testing.assert_close(torch.autograd.grad(result, inputs), wanted)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@parametrize("score", [*choice.SCORES, "softmax"])
def test_the_choice_needs_no_host_synchronization_and_replays_in_a_graph(score):
    def picked():
        keys = k.unflatten(2, (-1, 64)).mean(3) if score == "softmax" else k
        options = {"lse": q[..., 0]} if score == "softmax" else {}
        return sf.topk_blocks(q, keys, 5, every=1, block_size=64, always="sinks(4)", share_group=True, score=score, **options).picks

    q, k = tensor((1, 4, 2048, 64), dtype=torch.bfloat16), tensor((1, 2, 2048, 64), dtype=torch.bfloat16)
    before, captured = picked(), replayed(picked, lambda: q.copy_(q.flip(2)))
    assert torch.equal(captured, picked()) and not torch.equal(captured, before)
