"""Calls of more than 65,535 batch-heads, which is CUDA's limit for all axes of a grid but the first."""

import pytest
import torch
from oracle import DEVICE, check, heavy_rows_split
from picked import check_selected

import sparse_flash as sf
from sparse_flash import backends

if reason := backends.backend("triton").available():
    pytest.skip(reason, allow_module_level=True)

from sparse_flash.kernels.common import grid as grids
from sparse_flash.kernels.launch import order
from sparse_flash.kernels.portable import choose_blocks, configs

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
        compression = choose_blocks.Compressed(BLOCK, BLOCK, None) if kind == "softmax" else None
        keys = k if kind == "max" else k[:, :, :2].float() if kind == "mean" else k[:, :, :2]
        choose_blocks.choose_blocks(q, keys, kind, 1, 1, 1, BLOCK, 1, TOKENS, TOKENS, compression=compression)

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
    """As if CUDA allowed six programs on the second axis."""
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

    found, launch = {}, emulated._Launches.launch

    def seen(self, kernel, prepared, *rest, **options):
        found[kernel.fn.__name__] = prepared[0]
        launch(self, kernel, prepared, *rest, **options)

    monkeypatch.setattr(emulated._Launches, "launch", seen)
    sizes = {"batch": 2, "heads": 2, "head_dim": 64, "dtype": torch.float16}
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 300, 300, 128)
    with emulated.gluon_on_cpu(seed=0):
        check("hopper", mask, 300, 300, **sizes)
        check("hopper", mask, 300, 300, deterministic=True, **sizes)
    rows = {"bound_kernel", "prepare_kernel", "finish_kernel", "combine_kernel", "combine_columns_kernel"}
    assert rows <= found.keys() and {grid[1] for grid in found.values()} == {1}
