"""The drop-in for PyTorch's call gives the same results, or says why not."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sparse_flash as sf
from sparse_flash.integrations.sdpa import scaled_dot_product_attention


def tensors(q_len: int = 150, kv_len: int = 150, heads: int = 4, kv_heads: int = 4, v_head_dim: int = 16):
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads, q_len, 16), (kv_heads, kv_len, 16), (kv_heads, kv_len, v_head_dim)]
    return [torch.randn(2, *size, generator=generator, requires_grad=True) for size in sizes]


def masked(*shape: int) -> torch.Tensor:
    kept = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.4
    kept[..., 0] = True  # PyTorch returns NaN for a query that keeps nothing
    return kept


CALLS = {
    "dense": (tensors(), {}),
    "causal": (tensors(), {"is_causal": True}),
    "scale": (tensors(), {"scale": 0.3}),
    "v of another head_dim": (tensors(v_head_dim=24), {"is_causal": True}),
    "unequal lengths": (tensors(70, 200), {}),
    "grouped heads": (tensors(kv_heads=2), {"enable_gqa": True, "is_causal": True}),
    "mask": (tensors(130, 200), {"attn_mask": masked(130, 200)}),
    "mask of each head": (tensors(), {"attn_mask": masked(1, 4, 150, 150)}),
    "mask of each batch entry": (tensors(), {"attn_mask": masked(2, 1, 150, 150)}),
    "mask of keys alone": (tensors(), {"attn_mask": masked(2, 1, 1, 150)}),
    "mask without a batch": (tensors(130, 200), {"attn_mask": masked(4, 130, 200)}),
    "mask of heads and keys": (tensors(), {"attn_mask": masked(4, 1, 150)}),
    "causal from the last key": (tensors(70, 200), {"attn_mask": causal_lower_right(70, 200)}),
    "causal from the first key": (tensors(), {"attn_mask": causal_upper_left(150, 150)}),
    "mask of queries alone": (tensors(70, 200), {"attn_mask": torch.ones(70, 1, dtype=torch.bool)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_pytorchs(name):
    inputs, options = CALLS[name]
    results = []
    for call in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = call(*inputs, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 8, 8), (2, 0, 8), (2, 8, 0)])
def test_a_mask_of_no_pairs_gives_results_of_none(batch, q_len, kv_len):
    q, k = torch.randn(batch, 4, q_len, 16), torch.randn(batch, 4, kv_len, 16)
    kept = torch.ones(batch, 1, q_len, kv_len, dtype=torch.bool)
    out = scaled_dot_product_attention(q, k, k, kept)
    assert out.shape == q.shape and not out.any()


def test_masks_of_this_library_are_taken_as_well():
    inputs = tensors()
    for mask in ("causal & local(20)", sf.causal() & sf.local(20), sf.compile_mask("causal & local(20)", 150)):
        assert torch.equal(scaled_dot_product_attention(*inputs, mask), sf.attention(*inputs, "causal & local(20)"))
