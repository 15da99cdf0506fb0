"""Scores far from 0, which back end runs, warnings, and memory."""

from dataclasses import replace

import pytest
import torch
from oracle import BACKENDS, DEVICE, Sizes, Watching, check, make_call, normal, record, sizes_for

import sparse_flash as sf
from sparse_flash.core import backends
from sparse_flash.core import torch as torch_backend
from sparse_flash.core.description import Call
from sparse_flash.core.results import QueryRows
from sparse_flash.selection import torch as selection_torch

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize
every_backend = parametrize("backend", BACKENDS)
LOCAL = sf.causal() & sf.local(50)


def inputs(q_len=100, *, batch=1, heads=2, kv_heads=2, **kwargs):
    return normal(Sizes(q_len=q_len, kv_len=q_len, batch=batch, heads=heads, kv_heads=kv_heads, **kwargs))


@parametrize("length", [2, 33, 130])
@parametrize("shift", [-200.0, -30.0])
@parametrize("pattern", [None, "causal & local(20)"])
@every_backend
def test_scores_far_below_zero_give_no_weight_to_keys_that_do_not_exist(backend, pattern, shift, length):
    # exp(0 - lse) of a tile's empty rows is infinite in float16 for shifts from 12, in float32 from 90.
    dtype = torch.float32 if backend == "reference" else torch.float16
    for options in ({}, {"deterministic": True}) if DEVICE == "cuda" else ({},):
        check(backend, pattern, length, dtype=dtype, head_dim=64, block_size=128, score_shift=shift, **options)


def test_hopper_names_a_head_dim_of_v_that_it_does_not_run(monkeypatch):
    hopper = backends.get_backend("hopper")
    monkeypatch.setattr(hopper, "why_unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    call = Call(torch.device("cuda"), torch.float16, 1, 2, 2, 64, 64, 128, None)
    assert hopper.supports(call) is None
    assert hopper.supports(replace(call, v_head_dim=64)) is None
    assert hopper.supports(replace(call, head_dim=192)) is None
    assert hopper.supports(replace(call, v_head_dim=32)) == "it runs head_dim 33 to 256 of v; got 32"
    assert hopper.supports(replace(call, head_dim=264)) == "it runs head_dim 33 to 256; got 264"


@every_backend
def test_a_mask_that_keeps_all_takes_the_dense_path(backend):
    q, k, v = normal(sizes_for(backend, q_len=150, kv_len=150))
    dense = sf.attention(q, k, v, backend=backend)
    for everything in (sf.full(), sf.causal() | ~sf.causal(), sf.compile_mask("full", 150, block_size=16, device=DEVICE)):
        assert torch.equal(sf.attention(q, k, v, everything, backend=backend), dense)


# The choice of a back end.


def test_auto_takes_torch_on_a_cpu_and_triton_on_a_gpu():
    q, k, v = (t.cpu() for t in inputs())
    assert backends.choose_backend("auto", make_call(q, k)) == "torch"
    assert torch.equal(sf.attention(q, k, v), sf.attention(q, k, v, backend="torch"))
    if DEVICE == "cuda":
        assert backends.choose_backend("auto", make_call(*inputs(dtype=torch.bfloat16)[:2])) == "triton"


def test_where_no_back_end_can_run_the_error_gives_every_reason(monkeypatch):
    monkeypatch.setattr(backends.get_backend("torch"), "supports", lambda call: "not today")
    q, k, v = inputs(dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"no back end can run this call \(hopper: .*; triton: .*; torch: not today\); .*'reference'"
    ):
        sf.attention(q, k, v)


HEADS_FIRST = {
    "many heads, few tokens": ((2, 128, 4), (2, 128, 4)),
    "a decoding step": ((2, 128, 1), (2, 128, 300)),
    "windows": ((400, 8, 2), (400, 8, 2)),
    "more keys than queries": ((1, 300, 4), (1, 300, 40)),
    "more tokens than models have heads": ((1, 200, 140), (1, 200, 140)),
}


@parametrize("kv_heads", [8, 2])
@parametrize("mask", [None, "causal", sf.local(5)], ids=str)
def test_swapped_token_and_head_axes_warn_at_the_callers_line(mask, kv_heads):
    q, k = (torch.randn(1, 300, heads, 16, device=DEVICE) for heads in (8, kv_heads))
    with pytest.warns(UserWarning, match="tokens come before heads") as seen:
        sf.attention(q, k, k, mask)
    (said,) = (one for one in seen if "tokens come before heads" in str(one.message))  # compilers warn too
    assert said.filename == __file__ and "q of shape (1, 300, 8, 16), 300 heads of 8 tokens; if tokens" in str(said.message)


@pytest.mark.filterwarnings("error")
@parametrize("shapes", HEADS_FIRST.values(), ids=HEADS_FIRST)
def test_calls_with_heads_before_tokens_are_not_warned_of(shapes):
    q, k = (torch.randn(*sizes, 16, device=DEVICE) for sizes in shapes)
    sf.attention(q, k, k, "causal")


def largest(see: list):
    """Within it, the list gets the number of elements of each tensor that an operation returns; not those inside operators."""
    return Watching(lambda function, args, results: see.extend(t.untyped_storage().nbytes() // t.element_size() for t in results))


@parametrize("lse_gradient", [False, True])
@parametrize("spec, tokens, least", [(LOCAL, 32768, 21), (sf.causal() & (sf.local(64) | sf.sinks(4)), 32768, 21), (None, 4096, 18)])
def test_the_torch_back_end_takes_memory_linear_in_tokens(spec, tokens, least, lse_gradient):
    q, k, v = (t.cpu() for t in inputs(tokens, heads=1, kv_heads=1))
    mask = None if spec is None else sf.compile_mask(spec, tokens, block_size=64)
    with largest(seen := []):
        call = record(q, k, v, mask, 0.25)
        out, lse = torch_backend.forward(call)
        torch_backend.backward(call, out, lse if lse_gradient else None, out, lse)
    assert tokens * 16 <= max(seen) <= max(tokens * 16, torch.get_num_threads() << least) < tokens**2


def test_always_kept_keys_take_little_memory():
    q, k, v = (torch.randn(1, heads, 512, 64) for heads in (6, 2, 2))
    selection = sf.topk_blocks(q, k, 4, every=1, block_size=16, always="sinks(4) | local(64)")
    with largest(seen := []):
        out, lse = selection_torch.forward(q, k, v, selection, 0.1)
        selection_torch.backward(QueryRows(q, out, lse, out, lse), k, v, selection, 0.1)
    assert max(seen) <= selection_torch._CHUNK_CPU // 4  # of a chunk of all queries
