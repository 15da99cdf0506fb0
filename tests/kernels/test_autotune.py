"""Tiles measured by Triton's autotuner, whose clock is replaced: a launch of fewer keys at a time counts as faster."""

import pytest
import torch
from oracle import DEVICE, check

import sparse_flash as sf

pytest.importorskip("triton")

from triton.runtime import Autotuner
from triton.runtime.errors import OutOfResources

from sparse_flash.kernels.launch import autotune, launch

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the clock is a fake")
KERNELS = {"attention_forward_kernel", "grad_q_kernel", "grad_kv_kernel"}


@pytest.fixture
def measured(monkeypatch):
    """Returns (kernel, config) of each launch that was measured, and of each that was not."""
    during, others, as_it_is = [], [], launch.launch
    measuring = False

    def launched(kernel, grid, arguments, constants, options, *more):
        config = constants["TILE_M"], constants["TILE_N"], options["num_warps"], options["num_stages"]
        (during if measuring else others).append((kernel.fn.__name__, config))
        if config[1] == 32 and config[3] == 4:
            raise OutOfResources(131072, 101376, "shared memory")
        return as_it_is(kernel, grid, arguments, constants, options, *more)

    def time(tuner, call, quantiles):
        nonlocal measuring
        measuring = True
        try:
            call()
        finally:
            measuring = False
        return [float(during[-1][1][1])] * 3

    monkeypatch.setattr(launch, "launch", launched)
    monkeypatch.setattr(Autotuner, "do_bench", time)
    monkeypatch.setattr(autotune, "_fastest", {})
    return during, others


@pytest.mark.parametrize("spec", [None, "causal & local(20)"])
def test_the_fastest_neighbour_of_each_config_is_launched_and_right(measured, monkeypatch, spec):
    def both_passes(q_len, kv_len):
        others.clear()
        check("triton", spec, q_len, kv_len, dtype=torch.float16, head_dim=16, block_size=spec and 32)
        return dict(others)

    during, others = measured
    before = both_passes(40, 50)
    assert before.keys() == KERNELS and not during
    monkeypatch.setenv("SPARSE_FLASH_AUTOTUNE", "1")
    fastest = both_passes(40, 50)
    for kernel, (tile_m, tile_n, *rest) in before.items():
        assert fastest[kernel] == (tile_m, tile_n // 2, *rest)
        tried = [config for name, config in during if name == kernel]
        assert tried[0] == before[kernel] and 4 < len(set(tried)) == len(tried) <= 9
    count = len(during)
    assert both_passes(45, 33) == fastest and len(during) == count  # of about these sizes: measured already


def test_the_gradient_of_a_learned_bias_is_not_added_to_by_measuring(measured, monkeypatch):
    monkeypatch.setenv("SPARSE_FLASH_AUTOTUNE", "1")
    q, k, v = torch.randn(3, 1, 1, 20, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    grads = []
    for backend in ("triton", "reference"):
        bias = torch.linspace(-1, 1, 9)[None].requires_grad_()
        sf.attention(q, k, v, "causal", rel_bias=bias, backend=backend).square().sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
    assert {name for name, _ in measured[0]} == {"attention_forward_kernel", "grad_kv_kernel"}
