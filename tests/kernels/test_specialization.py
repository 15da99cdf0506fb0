"""No kernel is specialized on the value of an integer that another launch may change: see ``tests/specialization.py``."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from oracle import DEVICE, check
from outcomes import outcomes_of

import sparse_flash as sf

LENGTHS = (1, 16, 33)
HEADS = ((1, 1), (16, 1), (3, 3))
SHAPES = [(HEADS[(i + j) % 3], LENGTHS[i], LENGTHS[j]) for i, j in product(range(3), range(3))]  # each pair of numbers once

parametrize = pytest.mark.parametrize
needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter compiles nothing that another launch could take")


@pytest.fixture(scope="module")
def kernels():
    return {row["kernel"]: row for row in outcomes_of("specialization.py")}


def test_code_that_is_launched_again_was_made_for_no_value_of_an_integer(kernels):
    assert {name: row["wrong"] for name, row in kernels.items() if row["wrong"]} == {}


def test_every_kernel_is_launched_again_more_often_than_it_is_compiled(kernels):
    assert len(kernels) == 40
    assert all(row["again"] > 10 * row["compiled"] > 0 for row in kernels.values()), kernels


def test_the_portable_kernels_are_read_where_lengths_and_strides_are_1():
    read, *refused = outcomes_of("front_end.py")
    assert refused == []
    assert {"attention_forward_kernel", "grad_kv_kernel", "grad_qkv_kernel", "picked_grads_kernel"} <= set(read["read"])


@needs_gpu
@parametrize("spec", [None, "causal & local(20)"])
def test_attention_is_right_whatever_shapes_were_launched_before(spec):
    for (heads, kv_heads), q_len, kv_len in SHAPES:
        check("triton", spec, q_len, kv_len, heads=heads, kv_heads=kv_heads, block_size=16)


@needs_gpu
@parametrize("spec", [None, "causal & local(20)"])
def test_decoding_is_right_whatever_shapes_were_launched_before(spec):
    generator = torch.Generator().manual_seed(0)
    for (heads, kv_heads), q_len, batch in SHAPES:
        q = torch.randn(batch, heads, q_len, 32, generator=generator).to(DEVICE)
        k, v = torch.randn(2, batch, kv_heads, 39 + batch, 32, generator=generator).to(DEVICE)
        lens = torch.full((batch,), 35, dtype=torch.int32, device=DEVICE)
        ours, theirs = (sf.attention_decode(q, k, v, spec, kv_lens=lens, backend=name) for name in ("triton", "torch"))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
