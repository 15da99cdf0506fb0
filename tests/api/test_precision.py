"""``precision="fp8"``: its definition, what it refuses, and Hopper's kernels against the definition, on a CPU."""

from contextlib import nullcontext

import pytest
import torch
from oracle import heavy_rows_split, poisoned_memory, rising

import sparse_flash as sf
from sparse_flash.core.eight_bits import attention_in_eight_bits, rotate


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(q_len, kv_len, heads, kv_heads, head_dim, v_head_dim=None, batch=1):
    q = normal(batch, heads, q_len, head_dim, seed=1)
    k = normal(batch, kv_heads, kv_len, head_dim, seed=2) + 1
    v = normal(batch, kv_heads, kv_len, v_head_dim or head_dim, seed=3) + 0.5
    return [t.half() for t in (q, k, v)]


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


# Relative errors against float64 of dense attention with 4,096 keys, rounded up.
STATISTICS = {
    "normal": (lambda q, k, v: (q, k, v), 0.06),
    "a mean": (lambda q, k, v: (q, k + 3 * normal(64), v + 1), 0.005),
    "outlier channels": (lambda *inputs: (x * (1 + 4 * (torch.arange(64) % 32 == 0)) for x in inputs), 0.1),
    "uniform values": (lambda q, k, v: (q, k, v.sigmoid() + 0.5), 0.003),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_the_definitions_error_is_what_is_stated_for_the_statistics_of_inputs(name):
    change, most = STATISTICS[name]
    q, k, v = change(*(normal(1, 2, tokens, 64, seed=seed) for seed, tokens in enumerate((64, 4096, 4096))))
    exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    out, lse = attention_in_eight_bits(q, k, v, None, 1 / 8)
    assert most / 4 < error(out, exact) < most
    assert (lse - (q.double() @ k.double().mT / 8).logsumexp(-1)).abs().max() < 10 * most


@pytest.mark.parametrize("head_dim, columns", [(64, 64), (72, 128), (128, 128)])
def test_a_rotation_keeps_products_and_spreads_one_column_and_equal_columns(head_dim, columns):
    x, y = normal(2, 50, head_dim)
    assert torch.allclose(rotate(x, columns) @ rotate(y, columns).T, x @ y.T, atol=1e-4)
    for row in (torch.eye(head_dim), torch.ones(1, columns)):
        assert (rotate(row, columns).abs().amax(-1) <= row.norm(dim=-1) * (1.001 * 2**0.5 / columns**0.5)).all()


def test_a_constant_added_to_all_keys_changes_only_lse():
    q, k, v = inputs(100, 300, 2, 1, 64)
    constant = 4 * normal(64)
    out, lse = attention_in_eight_bits(q, k, v, None, 1 / 8)
    shifted, shifted_lse = attention_in_eight_bits(q, k.float() + constant, v, None, 1 / 8)
    assert error(shifted, out) < 5e-3
    assert (shifted_lse - lse - (q.float() @ constant) / 8).abs().max() < 1e-2


def test_the_reference_runs_the_definition_under_masks_and_within_torch_compile():
    q, k, v = inputs(200, 200, 4, 2, 64)
    mask = sf.compile_mask("causal & local(70)", 200)
    wanted, wanted_lse = attention_in_eight_bits(q, k, v, mask.to_dense(), 1 / 8)
    out, lse = sf.attention(q, k, v, mask, precision="fp8", backend="reference", return_lse=True)
    assert torch.equal(out, wanted.half()) and torch.equal(lse, wanted_lse.float())
    compiled = torch.compile(lambda q, k, v: sf.attention(q, k, v, mask, precision="fp8", backend="reference"), backend="eager")
    assert torch.equal(compiled(q, k, v), out)


def test_sinks_join_the_softmax():
    q, k, v = inputs(40, 40, 2, 2, 64)
    sinks = torch.tensor([0.5, -1.0])
    out, lse = sf.attention(q, k, v, precision="fp8", backend="reference", return_lse=True)
    with_sinks, lse_with_sinks = sf.attention(q, k, v, precision="fp8", backend="reference", sinks=sinks, return_lse=True)
    assert (lse_with_sinks - torch.logaddexp(lse, sinks[:, None].expand_as(lse))).abs().max() < 1e-5
    assert error(with_sinks, out.double() * (lse - lse_with_sinks).exp()[..., None]) < 1e-3


emulated = pytest.importorskip("gluon_on_cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels run on this GPU")

CALLS = {  # mask, q_len, kv_len, heads, kv_heads, head_dim, and what differs from the defaults of ``inputs`` and blocks of 128
    "dense, ragged": (None, 200, 190, 2, 2, 64, {}),
    "causal": ("causal", 300, 300, 2, 1, 128, {"batch": 2}),
    "one document": ("causal & documents((0, 33, 40, 200, 385))", 385, 385, 1, 1, 96, {}),
    "bits": ("causal & (local(70) | strided(7, block=1))", 300, 300, 2, 2, 40, {}),
    "whole blocks": ("butterfly(block=128)", 512, 512, 2, 1, 64, {}),
    "blocks of 64": ("local(90)", 300, 300, 1, 1, 128, {"block": 64}),
    "blocks of 256": ("causal & local(200)", 400, 400, 1, 1, 64, {"block": 256}),
    "empty rows": ("prefix(70) & ~causal", 400, 300, 2, 2, 64, {}),
    "three warp groups, dense": (None, 700, 130, 2, 1, 64, {}),
    "three warp groups, causal": ("causal", 700, 700, 2, 2, 64, {}),
    "64 and 128": ("causal", 200, 260, 1, 1, 64, {"v_head_dim": 128}),
    "a mask for each head": ("per_head([causal, local(100)])", 512, 512, 2, 1, 64, {}),
    "split rows": ("causal | sinks(130)", 512, 512, 2, 1, 64, {"split": True}),
    # Scores that rise far from key to key.
    "rising, dense": (None, 500, 500, 1, 1, 64, {"rise": 100.0}),
    "rising, causal": ("causal", 500, 500, 1, 1, 128, {"rise": 100.0}),
}


@on_cpu
@pytest.mark.parametrize("name", CALLS)
def test_hopper_kernels_compute_the_definition(name):
    spec, q_len, kv_len, *sizes, changed = CALLS[name]
    options = {"block": 128, "split": False, "rise": 0.0} | changed
    block, split, rise = (options.pop(one) for one in ("block", "split", "rise"))
    q, k, v = inputs(q_len, kv_len, *sizes, **options)
    if rise:
        rising(q, k, None, rise)
    with heavy_rows_split() if split else nullcontext():
        mask = None if spec is None else sf.compile_mask(spec, q_len, kv_len, block)
    assert not split or mask.by_query.is_split
    with emulated.gluon_on_cpu(len(name)), poisoned_memory():
        out, lse = sf.attention(q, k, v, mask, precision="fp8", backend="hopper", return_lse=True)
    wanted, wanted_lse = attention_in_eight_bits(q, k, v, None if mask is None else mask.to_dense(), q.shape[3] ** -0.5)
    some = ~wanted_lse.isneginf()
    assert torch.equal(lse.isneginf(), ~some) and not out[~some].any()
    assert error(out, wanted) < 4e-3 and (lse - wanted_lse)[some].abs().max() < 2e-2


@on_cpu
@pytest.mark.parametrize("seed", (5, 21, 60))
def test_drawn_calls_are_right_in_drawn_orders_of_events(seed):
    import fuzz_eight_bits

    with emulated.gluon_on_cpu(seed), poisoned_memory():
        call = fuzz_eight_bits.draw(seed, "hopper")
        wrong = fuzz_eight_bits.failure(call)
    assert wrong is None, f"{call}: {wrong}"
