"""Patterns and tables made in compiled code equal those made outside of it."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf

Q = torch.randn(1, 2, 70, 16)
STARTS = torch.tensor([0, 30, 70])
needs_213 = pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch before 2.13 traces no Pattern objects")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()  # compilations of one function are limited


# Patterns with a number that changes, and calls.
PATTERNS = {
    "&": lambda n: sf.causal() & sf.local(n),
    "& |": lambda n: sf.causal() & (sf.random(0.3, block=n) | sf.sinks(3)),
    "parameters of all kinds": lambda n: sf.window(n) | sf.dilated(3, 2, block=1) | sf.documents((0, n, 70)),
    "by head": lambda n: sf.per_head(["causal", sf.local(n) & sf.causal()]),
    "text with numbers": lambda n: sf.local(n) & "local(30)" | "sinks(2)",
    "texts by head": lambda n: sf.per_head(["causal & local(20)", "random(0.3, block=1)"]),
    "text by head": lambda n: "per_head([causal & local(20), random(0.3, block=1)])",
    "by sequence": lambda n: sf.per_batch([sf.local(n) & sf.causal()]),
    "shifted": lambda n: sf.global_tokens(6) | sf.shifted(sf.neighborhood((8, 8), 3), 6) & sf.local(n),
    "uncovered": lambda n: sf.dilated(n, 2, block=1) | sf.shifted(sf.local(n), 3),
}
CALLS = {
    "attention": lambda q, mask: sf.attention(q, q, q, mask),
    "decode": lambda q, mask: sf.attention_decode(q[:, :, -3:], q, q, mask),
    "varlen": lambda q, mask: sf.attention_varlen(*[q[0].transpose(0, 1)] * 3, STARTS, mask=mask),
    "within": lambda q, mask: sf.attention(q, q, q, sf.topk_blocks(q, q, keep=1, block_size=32, within=mask)),
    "always": lambda q, mask: sf.attention(q, q, q, sf.topk_blocks(q, q, keep=1, block_size=32, every=1, always=mask)),
}


CHANGED = ("&", "parameters of all kinds", "by head", "uncovered")  # which takes a second graph


@needs_213
@pytest.mark.parametrize(
    "call, pattern",
    [*(("attention", pattern) for pattern in PATTERNS), *((call, "&") for call in ("decode", "varlen", "within", "always"))],
)
def test_a_pattern_made_in_compiled_code_is_taken_and_may_have_numbers_that_change(call, pattern):
    def attend(q, n):
        return CALLS[call](q, PATTERNS[pattern](n))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for n in (20, 30, 40) if call == "attention" and pattern in CHANGED else (20,):  # from the second call on, a symbol
        torch.testing.assert_close(compiled(Q, n), attend(Q, n))


@needs_213
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_pattern_made_in_compiled_code_may_have_numbers_of_the_lengths(dynamic):
    def attend(q):
        return sf.attention(q, q, q, sf.causal() & sf.local(q.shape[2] // 4))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for q in (Q, Q[:, :, :40], Q[:, :, :56]):
        torch.testing.assert_close(compiled(q), attend(q))


def on_layer(q, mask):
    return LAYER(q.transpose(1, 2).flatten(2), mask=mask)


LAYER = sf.SparseAttention(32, 2)
TABLES = [sf.compile_mask(mask, 70) for mask in ("causal", "local(9)", "causal & local(8)")]
BY_SEQUENCE = [sf.per_batch(masks) for masks in (["causal", "local(9)", "causal"], ["causal", "local(9)", "local(8)"])]


CHOOSERS = ["causal & pooled(keep=1)", "causal & pooled(keep=2)"]


def in_two_types(q, dtype):
    return [sf.attention(*[q.to(dtype)] * 3, mask) for mask in ("causal", "full")]


@pytest.mark.parametrize(
    "call, masks, graphs",
    [
        (CALLS["attention"], ["causal", "causal", "causal & local(9)", "local(8)"], 3),
        (CALLS["decode"], ["causal", "causal & local(9)"], 2),
        (CALLS["varlen"], ["causal", "causal & local(9)"], 2),
        (CALLS["attention"], CHOOSERS, 2),
        (on_layer, ["causal", "local(9)"], 2),
        (on_layer, TABLES, 1),
        (CALLS["attention"], [sf.compile_mask(mask, 70) for mask in BY_SEQUENCE], 1),  # of two and of three stored masks
        (in_two_types, [torch.float, torch.double], 2),
    ],
)
def test_another_pattern_is_another_graph_and_another_table_is_not(call, masks, graphs):
    counter, q = CompileCounterWithBackend("aot_eager"), Q.expand(3, -1, -1, -1)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for mask in masks:
        compiled(q, mask)
    assert counter.frame_count == graphs
