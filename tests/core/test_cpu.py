"""The torch back end on a CPU: what it leaves to PyTorch's own kernel, and what it relies on there."""

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import DEVICE, Watching, check, record

import sparse_flash as sf
from sparse_flash.core import aten_cpu, backends, hopper
from sparse_flash.core import torch as torch_backend
from sparse_flash.core import triton as triton_backend
from sparse_flash.core.description import Call
from sparse_flash.core.variant import build_variant

parametrize = pytest.mark.parametrize
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="its tensors are on a GPU")


def leaves(q_len: int = 200, kv_len: int | None = None, *, kv_heads: int = 4, head_dim: int = 32, dtype=torch.float32):
    kv_len = q_len if kv_len is None else kv_len
    generator = torch.Generator().manual_seed(0)
    sizes = (4, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(2, *size, head_dim, generator=generator).to(dtype).requires_grad_() for size in sizes]


@parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@parametrize(
    "mask, causal, kv_len",
    [(None, False, 200), (None, False, 90), ("full", False, 90), ("causal", True, 200), ("causal & local(200)", True, 200)],
)
def test_dense_and_causal_attention_are_pytorchs_bit_for_bit(dtype, mask, causal, kv_len):
    inputs = leaves(200, kv_len, kv_heads=2, dtype=dtype)
    dout = torch.randn(2, 4, 200, 32).to(dtype)
    results = []
    for out in (
        sf.attention(*inputs, mask, scale=0.3, backend="torch"),
        F.scaled_dot_product_attention(*inputs, scale=0.3, is_causal=causal, enable_gqa=True),
    ):
        results.append((out, *torch.autograd.grad(out, inputs, dout)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@parametrize("length, block_size", [(1, 16), (16, 16), (100, 16), (128, 64), (200, 64), (300, 128), (300, 256)])
@parametrize(
    "spec", ["causal", "causal & local({0})", "causal & local({1})", "causal | sinks(2)", "full", "local({0})", "strided(2)"]
)
def test_a_mask_says_causal_exactly_where_its_pairs_are(spec, length, block_size):
    mask = sf.compile_mask(spec.format(length, max(1, length - 1)), length, block_size=block_size)
    assert mask.keeps_causal == bool(np.array_equal(mask.to_dense().numpy(), np.tri(length, dtype=bool)))


def test_keeps_causal_holds_only_for_square_masks_with_all_heads_causal():
    assert not sf.compile_mask("causal", 100, 200).keeps_causal and not sf.compile_mask("causal", 200, 100).keeps_causal
    assert sf.BlockMask.per_head(["causal", "causal & local(200)"], q_len=200, kv_len=200).keeps_causal
    assert not sf.BlockMask.per_head(["causal", "local(200)"], q_len=200, kv_len=200).keeps_causal
    blocks = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    assert sf.BlockMask.from_blocks(blocks, 64, within="causal").keeps_causal
    blocks[0, 1, 3, 1] = False
    assert not sf.BlockMask.from_blocks(blocks, 64, within="causal").keeps_causal


@parametrize("mask", [None, "causal", "causal & local(50)", "causal & (local(30) | strided(9))"])
def test_gradients_repeat_bit_for_bit_with_several_threads(mask):
    inputs, before = leaves(600, kv_heads=2), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        runs = [torch.autograd.grad(sf.attention(*inputs, mask, backend="torch").square().sum(), inputs) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


SPARSE = {
    "window": ("causal & local(40)", 200, None, 16, {"layout": "tokens first"}),
    "cut window": ("causal & local(130)", 450, None, 64, {"kv_heads": 2, "dtype": torch.float16}),
    "more keys": ("causal", 150, 270, 32, {"kv_heads": 1, "layout": "sliced"}),
    "fewer keys": ("causal & local(60)", 270, 150, 32, {"kv_heads": 2}),
    "one row of many": ("causal & (local(20) | global_tokens(3))", 300, None, 16, {"batch": 2, "dtype": torch.bfloat16}),
    "bits": ("causal & strided(7, block=1)", 200, None, 32, {"dtype": torch.float64, "head_dim": 33}),
    "empty rows": ("local(3) & ~prefix(90)", 200, None, 64, {"heads": 6, "kv_heads": 2, "layout": "head_dim first"}),
}


@on_cpu
@parametrize("name", SPARSE)
def test_blocks_of_a_table_are_right_where_each_call_takes_few(monkeypatch, name):
    pattern, q_len, kv_len, size, options = SPARSE[name]
    for limit, value in (("_WIDEST", 3 * size), ("_GATHERED", 1), ("_ALIKE", 2)):
        monkeypatch.setattr(aten_cpu, limit, value)
    check("torch", pattern, q_len, kv_len, **{"heads": 4, "block_size": size, "lse_gradient": False} | options)


@on_cpu
def test_tables_kept_with_a_mask_serve_every_dtype_and_group_and_end_with_it():
    mask = sf.compile_mask("causal & local(40)", 200, block_size=32)
    for dtype in (torch.float32, torch.float64, torch.float16):
        for kv_heads in (4, 2, 1):
            check("torch", mask, 200, heads=4, kv_heads=kv_heads, dtype=dtype, lse_gradient=False)
    kept = len(torch_backend._known_tables)
    del mask
    gc.collect()
    assert len(torch_backend._known_tables) == kept - 1


# Other systems. No such machine was available: these tests prove what is chosen, and which operations it uses.


@parametrize("interpreted", [False, True])
@parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_auto_takes_the_torch_back_end_on_mps(monkeypatch, dtype, interpreted):
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    # Which remember their answer.
    for module, name in ((triton_backend, "is_interpreted"), (triton_backend, "why_unavailable"), (hopper, "why_unavailable")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__.__wrapped__)
    for block_size in (None, 128):
        call = Call(torch.device("mps"), dtype, 1, 4, 2, 256, 256, 64, block_size)
        assert backends.choose_backend("auto", call) == "torch"
        with pytest.raises(ValueError, match="float64, which devices of type mps do not have"):
            backends.choose_backend("reference", call)
    with torch.autocast("mps", enabled=False):  # as the back end does
        pass


@parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_devices_operations_make_no_float64_which_mps_does_not_have(monkeypatch, dtype):
    monkeypatch.setattr(torch_backend, "_can_use_aten", lambda *_: False)  # PyTorch's kernel is only for CPUs
    q, k, v = (t.detach() for t in leaves(70, kv_heads=2, dtype=dtype))
    slopes, bias = torch.ones(4), torch.zeros(4, 9, requires_grad=True)
    options = {"dropout_p": 0.3, "softcap": 5.0, "alibi_slopes": slopes, "rel_bias": bias, "kv_lens": torch.tensor([70, 9])}
    seen: set[torch.dtype] = set()
    with torch.no_grad(), Watching(lambda function, args, results: seen.update(t.dtype for t in results)):
        for mask in (None, "causal", "causal & strided(7, block=1)"):
            mask = mask and sf.compile_mask(mask, 70, block_size=32)
            for variant in (None, build_variant(q, k, **options)):
                call = record(q, k, v, mask, 0.2, variant)
                out, lse = torch_backend.forward(call)
                for dlse in (None, lse):
                    torch_backend.backward(call, out, dlse, out, lse)
            torch_backend.decode(q[:, :, -3:], k, v, mask, torch.tensor([70, 9]), None, True, 0.2, None, None, None)
    assert torch.float32 in seen and torch.float64 not in seen
