"""Calls of more than 65,535 batch-heads, which is CUDA's limit for all axes of a grid but the first."""

import pytest
import torch
from oracle import DEVICE, check
from picked import check_selected

import sparse_flash as sf
from sparse_flash import backends

if reason := backends.get_backend("triton").why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from sparse_flash.kernels.common import config as grids
from sparse_flash.kernels.launch import order
from sparse_flash.kernels.portable import configs
from sparse_flash.kernels.selection import pick_blocks
from sparse_flash.selection.choice import BlockChoice

BATCH, TOKENS, BLOCK = 70_001, 32, 16  # a prime number of batches


@pytest.fixture
def launched(monkeypatch):
    """The grids of interpreted launches, in which no program runs."""
    if DEVICE != "cpu":
        pytest.skip("the launches themselves are tested on a GPU")
    from triton.runtime.interpreter import InterpretedFunction

    found = {}
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *_, grid, **__: found.update({self.fn.__name__: grid}))
    return found


def attention(mask=None, one_launch_tokens=0):
    def run(patch, q, k, v):
        patch.setattr(configs, "ONE_LAUNCH_TOKENS", one_launch_tokens)
        sf.attention(q, k, v, mask, backend="triton").sum().backward()

    return run


def decoding(_, q, k, v):
    sf.attention_decode(q[:, :, :1].detach(), k.detach(), v.detach(), backend="triton")


def selection(every, always=None):
    def run(_, q, k, v):
        picks = torch.zeros(BATCH, 1, -(-TOKENS // every), 2, dtype=torch.int32)
        chosen = sf.BlockSelection.from_picks(picks, BLOCK, every=every, q_len=TOKENS, always=always)
        sf.attention(q, k, v, chosen, backend="triton").sum().backward()

    return run


def choice(kind):
    def run(_, q, k, v):
        compression = pick_blocks.Compressed(BLOCK, BLOCK, None) if kind == "softmax" else None
        keys = k if kind == "max" else k[:, :, :2].float() if kind == "mean" else k[:, :, :2]
        pick_blocks.pick_blocks(q, keys, kind, BlockChoice(1, 2, 1, BLOCK, TOKENS, TOKENS), compression=compression)

    return run


CALLS = {
    "dense": attention(),
    "masked": attention("causal"),
    "backward in one launch": attention("causal", 1 << 40),
    "decoding": decoding,
    "selection of queries": selection(1),
    "selection of groups of queries": selection(BLOCK),
    "selection beside what is always kept": selection(1, "sinks(4)"),
    **{f"choice by {kind}": choice(kind) for kind in ("mean", "max", "softmax")},
}


@pytest.mark.parametrize("name", CALLS)
def test_no_launch_has_more_programs_on_the_second_axis_than_cuda_allows(launched, monkeypatch, name):
    CALLS[name](monkeypatch, *(torch.ones(BATCH, 1, TOKENS, 16, dtype=torch.float16).requires_grad_() for _ in range(3)))
    assert launched
    assert {kernel: grid for kernel, grid in launched.items() if max(grid[1:]) > grids.SECOND_AXIS} == {}


@pytest.fixture
def few(monkeypatch):
    """Lowers the limit of the second axis to six programs."""
    monkeypatch.setattr(order, "SECOND_AXIS", 6)
    monkeypatch.setattr(grids, "SECOND_AXIS", 6)
    order._least_divisor.cache_clear()
    yield
    order._least_divisor.cache_clear()


@pytest.mark.parametrize("one_launch_tokens, mask, batch", [(0, None, 2), (0, "causal", 7), (1 << 20, "local(20)", 7)])
def test_more_heads_than_the_second_axis_has_are_right(few, monkeypatch, one_launch_tokens, mask, batch):
    monkeypatch.setattr(configs, "ONE_LAUNCH_TOKENS", one_launch_tokens)
    check("triton", mask, 20, 25, batch=batch, heads=6, kv_heads=3, dtype=torch.float16, head_dim=16, block_size=mask and 16)


@pytest.mark.parametrize("every", [1, 16])
def test_a_selection_with_more_heads_than_the_second_axis_has_is_right(few, every):
    check_selected("triton", 8, 4, 8, 18, 20, every, 16, 2, always="sinks(4)")


# batch, heads, key heads, tokens: windows of images, frames, rows of tables.
SHAPES = [(70_000, 1, 1, 64), (4_096, 32, 8, 128)]
SAMPLE = [0, 1, 2_047, 2_048, -2, -1]  # of the batch; heads 65,535 and 65,536 of the second shape are in 2,047 and 2,048

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def many(shape):
    """q, k and v."""
    batch, heads, kv_heads, tokens = shape
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    shapes = [(batch, n, tokens, 64) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, dtype=torch.bfloat16, device=DEVICE, generator=generator).requires_grad_() for size in shapes]


def close_to_sdpa(out, q, k, v, causal):
    """Compares out and the gradients, for an incoming gradient of q's values, with SDPA's in float32, for the sample."""
    sample = [t.detach()[SAMPLE].float().requires_grad_() for t in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*sample, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out[SAMPLE].float(), theirs, atol=2e-2, rtol=2e-2)
    got = torch.autograd.grad(out, (q, k, v), q.detach())
    wanted = torch.autograd.grad(theirs, sample, sample[0].detach())
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one[SAMPLE].float(), other, atol=5e-2, rtol=5e-2)


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_attention_over_many_heads_is_right(backend, mask, deterministic, shape):
    if reason := backends.get_backend(backend).why_unavailable():
        pytest.skip(reason)
    q, k, v = many(shape)
    out = sf.attention(q, k, v, mask, deterministic=deterministic, backend=backend)
    close_to_sdpa(out, q, k, v, mask == "causal")


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("every, block_size", [(1, 16), (16, 16), (1, 64)])
def test_selections_of_many_heads_are_right(every, block_size, shape):
    q, k, v = many(shape)
    of_all, of_few = (sf.topk_blocks(*both, 1, every=every, block_size=block_size) for both in ((q, k), (q[SAMPLE], k[SAMPLE])))
    assert torch.equal(of_all.picks[SAMPLE], of_few.picks)
    every_block = sf.topk_blocks(q, k, shape[3] // block_size, every=every, block_size=block_size)
    close_to_sdpa(sf.attention(q, k, v, every_block), q, k, v, True)
