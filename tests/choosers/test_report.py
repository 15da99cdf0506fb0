"""A report says what a choice loses: its density, recall and error are what dense attention in float64 says."""

import chosen
import numpy as np
import pytest
import strategies
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from oracle import DEVICE, dense_attention

import sparse_flash as sf
from sparse_flash.masks.chooser import choices_of

LENGTHS = st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.integers(1, 600).map(lambda n: (n, n))
SPEC = "causal & (sampled(4, keep=1, block=64) | sinks(4))"


def inputs(q_len=300, kv_len=300, *, batch=2, heads=4, kv_heads=2, v_dim=8, dtype=torch.float32, seed=0):
    q, k = chosen.tensors(q_len, kv_len, batch=batch, heads=heads, kv_heads=kv_heads, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    return q, k, torch.randn(batch, kv_heads, kv_len, v_dim, generator=generator).to(DEVICE, dtype)


def definition(spec, mask, q, k, v, scale=None):
    """(density, recall, error), (batch, heads) float64 each, from the whole matrix."""
    (q_len, kv_len), size, limit = (q.shape[2], k.shape[2]), mask.block_size, choices_of(spec)[0].within
    within = np.ones((q_len, kv_len), bool) if limit is None else strategies.dense(limit, q_len, kv_len)
    kept = mask.to_dense().expand(*q.shape[:2], -1, -1)
    rows, columns = chosen.groups_of(q_len, size), chosen.groups_of(kv_len, size)
    visited = sum(kept[:, :, r, c].flatten(2).any(2).double() for r in rows for c in columns)
    density = visited / max(1, sum(within[r, c].any() for r in rows for c in columns))
    count = min(q_len, 251)
    picks = [int((n + 0.5) * q_len / count) for n in range(count)]
    q, k, v = (x.double() for x in (q[:, :, picks], k, v))
    dense, dense_lse = dense_attention(q, k, v, torch.from_numpy(within[picks]).to(q.device), scale)
    out, lse = dense_attention(q, k, v, kept[:, :, picks], scale)
    recall = torch.where(dense_lse.isneginf(), 1.0, (lse - dense_lse).exp()).mean(2)
    return density, recall, (out - dense).norm(dim=(2, 3)) / dense.norm(dim=(2, 3)).clamp(min=1e-300)


@settings(max_examples=30)
@given(
    chooser=chosen.drawn(chosen.SCORING),
    within=st.none() | st.just(sf.causal()) | strategies.expressions,
    always=st.none() | strategies.expressions,
    lengths=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    scale=st.sampled_from([None, 0.2, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@example(sf.parse("pooled(keep=1, block=64)"), sf.causal(), None, (300, 100), (4, 2), None, torch.float32, 0)  # rows without keys
def test_a_report_is_what_dense_attention_says(chooser, within, always, lengths, heads, scale, dtype, seed):
    assume(chosen.fit(within, always))
    spec = chosen.joined(within, [chooser], always)
    q, k, v = inputs(*lengths, heads=heads[0], kv_heads=heads[1], v_dim=12, dtype=dtype, seed=seed)
    mask, report = sf.choose_blocks(spec, q, k, v=v, scale=scale, report=True)
    assert mask.equal(sf.choose_blocks(spec, q, k, scale=scale))
    near = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    for found, wanted in zip((report.density, report.recall, report.error), definition(spec, mask, q, k, v, scale), strict=True):
        assert found.dtype == torch.promote_types(dtype, torch.float32) and found.device == q.device
        torch.testing.assert_close(found.double(), wanted, **near)


def test_mass_far_below_the_largest_weight_is_not_lost():
    q, k, v = inputs(64, 256, batch=1, heads=1, kv_heads=1)
    q, k = torch.ones_like(q), torch.zeros_like(k)
    k[:, :, :64] = 40  # logits of 113: the kept keys have e ** -113 of the mass
    mask, report = sf.choose_blocks("scored(keep=1, block=64)", q, k, scores=q.new_zeros(1, 1, 1, 4), v=v, report=True)
    kept = mask.to_dense()
    assert kept[:, 192:].all() and not kept[:, :192].any()
    dense, own = v[:, :, :64].mean(2), v[:, :, 192:].mean(2)
    torch.testing.assert_close(report.error, (own - dense).norm(dim=2) / dense.norm(dim=2))
    assert report.recall < 1e-30


def test_the_text_names_the_mean_and_the_worst_head():
    numbers = torch.tensor([[0.25, 0.5, 0.1, 0.2], [0.3, 0.25, 0.2, 0.2]])
    assert "recall   0.7500  0.5000 (batch 0, head 1)" in str(sf.ChoiceReport(numbers, 1 - numbers, numbers / 10))
    assert "error" not in str(sf.ChoiceReport(numbers, numbers, None))


def test_a_report_is_of_the_tensors_as_attention_casts_them_and_has_an_error_if_there_are_values():
    q, k, v = inputs()
    with torch.autocast(DEVICE, torch.bfloat16):
        report, without = (sf.choose_blocks(SPEC, q, k, v=values, report=True)[1] for values in (v, None))
    wanted = sf.choose_blocks(SPEC, q.bfloat16(), k.bfloat16(), v=v.bfloat16(), report=True)[1]
    assert torch.equal(report.recall, wanted.recall) and torch.equal(report.error, wanted.error)
    assert without.error is None and torch.equal(without.recall, report.recall)


def test_compiled_code_leaves_a_report_to_python():
    q, k, v = inputs()

    def call(q, k, v):
        return sf.choose_blocks(SPEC, q * 1, k, v=v, report=True)[1].recall

    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, backend="eager")(q, k, v), call(q, k, v))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="report_of works on the host and cannot be part of a graph"):
        torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
