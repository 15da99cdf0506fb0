"""Calls of more than 65,535 batch-heads, which is CUDA's limit for all axes of a grid but the first."""

import pytest
import torch
from oracle import DEVICE, check, heavy_rows_split
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


def inputs(heads=1, requires_grad=False):
    return [torch.ones(BATCH, heads, TOKENS, 16, dtype=torch.float16).requires_grad_(requires_grad) for _ in range(3)]


def attention(launch_once, mask, monkeypatch):
    monkeypatch.setattr(configs, "ONE_LAUNCH_TOKENS", 1 << 40 if launch_once else 0)
    q, k, v = inputs(requires_grad=True)
    sf.attention(q, k, v, mask, backend="triton").sum().backward()


def decoding(_):
    q, k, v = inputs()
    sf.attention_decode(q[:, :, :1], k, v, backend="triton")


def selection(every, always=None):
    def run(_):
        picks = torch.zeros(BATCH, 1, -(-TOKENS // every), 2, dtype=torch.int32)
        q, k, v = inputs(requires_grad=True)
        chosen = sf.BlockSelection.from_picks(picks, BLOCK, every=every, q_len=TOKENS, always=always)
        sf.attention(q, k, v, chosen, backend="triton").sum().backward()

    return run


def choice(kind):
    def run(_):
        q, k, _ = inputs()
        compression = pick_blocks.Compressed(BLOCK, BLOCK, None) if kind == "softmax" else None
        keys = k if kind == "max" else k[:, :, :2].float() if kind == "mean" else k[:, :, :2]
        pick_blocks.pick_blocks(q, keys, kind, BlockChoice(1, 2, 1, BLOCK, TOKENS, TOKENS), compression=compression)

    return run


CALLS = {
    "dense": lambda patch: attention(False, None, patch),
    "masked": lambda patch: attention(False, "causal", patch),
    "backward in one launch": lambda patch: attention(True, "causal", patch),
    "decoding": decoding,
    "selection of queries": selection(1),
    "selection of groups of queries": selection(BLOCK),
    "selection beside what is always kept": selection(1, "sinks(4)"),
    **{f"choice by {kind}": choice(kind) for kind in ("mean", "max", "softmax")},
}


@pytest.mark.parametrize("name", CALLS)
def test_no_launch_has_more_programs_on_the_second_axis_than_cuda_allows(launched, monkeypatch, name):
    CALLS[name](monkeypatch)
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


@pytest.mark.parametrize("batch", [2, 7])
@pytest.mark.parametrize("mask", [None, "causal", "local(20)"])
@pytest.mark.parametrize("one_launch_tokens", [0, 1 << 20])
def test_more_heads_than_the_second_axis_has_are_right(few, monkeypatch, one_launch_tokens, mask, batch):
    monkeypatch.setattr(configs, "ONE_LAUNCH_TOKENS", one_launch_tokens)
    check("triton", mask, 40, 45, batch=batch, heads=6, kv_heads=3, dtype=torch.float16, head_dim=16, block_size=mask and 32)


@pytest.mark.parametrize("every", [1, 16])
def test_a_selection_with_more_heads_than_the_second_axis_has_is_right(few, every):
    check_selected("triton", 8, 4, 8, 60, 80, every, 64, 2, always="sinks(4)")


def test_hopper_launches_have_one_axis(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    if DEVICE != "cpu":
        pytest.skip("the launches themselves are tested on a GPU")
    import gluon_on_cpu as emulated

    found, launch = {}, emulated._launch

    def seen(recording, kernel, prepared, *rest):
        found[kernel.fn.__name__] = prepared[0]
        launch(recording, kernel, prepared, *rest)

    monkeypatch.setattr(emulated, "_launch", seen)
    sizes = {"batch": 2, "heads": 2, "head_dim": 64, "dtype": torch.float16}
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 300, 300, 128)
    with emulated.gluon_on_cpu(seed=0):
        check("hopper", mask, 300, 300, **sizes)
        check("hopper", mask, 300, 300, deterministic=True, **sizes)
    rows = {"bound_kernel", "prepare_kernel", "finish_kernel", "combine_kernel", "combine_columns_kernel"}
    assert rows <= found.keys() and {grid[1] for grid in found.values()} == {1}


# batch, heads, key heads, tokens: windows of images, frames, rows of tables.
SHAPES = [(70_000, 1, 1, 64), (4_096, 32, 8, 128)]
SAMPLE = [0, 1, 2_047, 2_048, -2, -1]  # of the batch; heads 65,535 and 65,536 of the second shape are in 2,047 and 2,048

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def many(shape):
    """q, k and v."""
    batch, heads, kv_heads, tokens = shape
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    return [
        torch.randn(batch, n, tokens, 64, dtype=torch.bfloat16, device=DEVICE, generator=generator).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def close_to_sdpa(out, q, k, v, kept=None, gradients=True):
    """Compares out and the gradients, for an incoming gradient of q's values, with SDPA's in float32, for the sample."""
    sample = [t.detach()[SAMPLE].float().requires_grad_() for t in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*sample, attn_mask=kept, enable_gqa=True)
    torch.testing.assert_close(out[SAMPLE].float(), theirs, atol=2e-2, rtol=2e-2)
    if gradients:
        got = torch.autograd.grad(out, (q, k, v), q.detach())
        wanted = torch.autograd.grad(theirs, sample, sample[0].detach())
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one[SAMPLE].float(), other, atol=5e-2, rtol=5e-2)


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).tril()


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
    close_to_sdpa(out, q, k, v, mask and causal(shape[3]))


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_documents_are_right(shape):
    q, k, v = many(shape)
    batch, tokens = shape[0], shape[3]
    bounds = torch.arange(0, (batch + 1) * tokens, tokens, device=DEVICE, dtype=torch.int32)
    packed = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out = sf.attention_varlen(*packed, bounds, mask="causal", max_seqlen_q=tokens)
    close_to_sdpa(out.unflatten(0, (batch, tokens)).transpose(1, 2), q, k, v, causal(tokens))


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_over_many_heads_is_right(shape):
    with torch.no_grad():
        q, k, v = many(shape)
        last = q[:, :, -1:]
        close_to_sdpa(sf.attention_decode(last, k, v), last, k, v, gradients=False)
        # Every block is picked.
        chosen = sf.BlockSelection.from_picks(
            torch.arange(shape[3] // 16, device=DEVICE, dtype=torch.int32).expand(shape[0], shape[2], 1, -1), 16, kv_len=shape[3]
        )
        close_to_sdpa(sf.attention_decode(last, k, v, chosen), last, k, v, gradients=False)


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("every, block_size", [(1, 16), (16, 16), (1, 64)])
def test_selections_of_many_heads_are_right(every, block_size, shape):
    q, k, v = many(shape)
    chosen = sf.topk_blocks(q, k, 1, every=every, block_size=block_size)
    few = sf.topk_blocks(q[SAMPLE], k[SAMPLE], 1, every=every, block_size=block_size)
    assert torch.equal(chosen.picks[SAMPLE], few.picks)
    chosen = sf.topk_blocks(q, k, shape[3] // block_size, every=every, block_size=block_size)  # all blocks
    close_to_sdpa(sf.attention(q, k, v, chosen), q, k, v, causal(shape[3]))


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_chosen_for_many_heads_are_right(shape):
    q, k, v = many(shape)
    with torch.no_grad():
        mask = sf.topk_blocks(q, k, 1, block_size=64)
    kept = sf.topk_blocks(q[SAMPLE], k[SAMPLE], 1, block_size=64).to_dense()
    close_to_sdpa(sf.attention(q, k, v, mask), q, k, v, kept)
