"""Tiles measured by Triton's autotuner, whose clock is replaced: a launch of fewer keys at a time counts as faster."""

import pytest
import torch
from calls import assert_right, attention_with_terms, sizes_for
from oracle import DEVICE

pytest.importorskip("triton")

from triton.runtime import Autotuner

from sparse_flash.kernels.launch import autotune, launch

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the clock is a fake")


@pytest.fixture
def measured(monkeypatch):
    """Returns (kernel, config) of each launch that was measured, and of each that was not."""
    during, others, as_it_is = [], [], launch.launch
    measuring = False

    def launched(kernel, grid, arguments, constants, options, *more):
        config = constants["SHAPE"].TILE_M, constants["SHAPE"].TILE_N, options["num_warps"], options["num_stages"]
        (during if measuring else others).append((kernel.fn.__name__, config))
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


@pytest.mark.parametrize("spec, terms", [(None, ()), ("causal & local(20)", ()), ("causal", ("bias",))])
def test_the_fastest_neighbour_of_each_config_is_launched_and_right(measured, monkeypatch, spec, terms):
    def both_passes(q_len, kv_len):
        others.clear()
        shape = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len, "dtype": torch.float16}
        assert_right(attention_with_terms(sizes_for("triton", spec=spec, terms=terms, **shape)), "triton")
        return dict(others)

    during, others = measured
    before = both_passes(40, 50)
    assert before.keys() == {"attention_forward_kernel", "grad_q_kernel", "grad_kv_kernel"} and not during
    monkeypatch.setenv("SPARSE_FLASH_AUTOTUNE", "1")
    fastest = both_passes(40, 50)
    for kernel, (tile_m, tile_n, *rest) in before.items():
        # Measuring would add to the gradient of a learned bias again and again.
        halved = tile_n if terms and kernel == "grad_q_kernel" else tile_n // 2
        assert fastest[kernel] == (tile_m, halved, *rest)
    count = len(during)
    assert both_passes(45, 33) == fastest and len(during) == count  # of about these sizes: measured already
