"""The portable kernels of key blocks chosen by query, against dense attention in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from accepted import DEVICE
from oracle import gradients
from picked import check_selected, drawn_picks, kept_by_picks, sorted_picks, tensors

pytest.importorskip("triton")

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.kernels.selection import lists
from sparse_flash.selection import by_kernels, operators

parametrize = pytest.mark.parametrize
pytestmark = [
    pytest.mark.skipif(backends.backend("triton").available() is not None, reason="needs triton, and a GPU or its interpreter"),
    pytest.mark.usefixtures("poison"),
]


check = partial(check_selected, "triton")


CASES = {
    # heads, key heads, pickers, q_len, kv_len, every, block, n
    "a group of 4": (4, 1, 1, 40, 130, 1, 64, 2),
    "a group of 3, an odd number of keys": (3, 1, 1, 26, 131, 1, 64, 2),
    "a group of 16, more queries than keys": (16, 1, 1, 26, 20, 1, 64, 2),
    "heads that pick for themselves": (4, 2, 4, 30, 100, 1, 64, 2),
    "a choice for 4 queries of small blocks": (4, 1, 1, 36, 36, 4, 16, 3),
    "a choice for 16 queries": (4, 1, 1, 50, 90, 16, 64, 2),
    "a choice for 50 queries, of long blocks": (2, 1, 1, 120, 300, 50, 256, 2),
    "long blocks, a choice for each query": (2, 1, 1, 12, 550, 1, 512, 2),
}


@parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_are_those_of_dense_attention(case):
    check(*case)


@parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_and_gradients_are_as_accurate_as_those_of_pytorch(dtype):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter computes bfloat16 products wrongly")
    check(4, 1, 1, 100, 100, 1, 64, 2, dtype=dtype, dim=24, v_dim=40)


@parametrize("case", ["a group of 4", "a choice for 16 queries"])
def test_what_is_always_kept_counts_once_beside_picks(case):
    check(*CASES[case], always="sinks(4) | local(20)", always_block=32)


@parametrize("workspace, of_heads", [(60_000, True), (12_000, False)], ids=["rounds of heads", "several rounds of a head"])
def test_a_call_in_rounds_gives_the_same(monkeypatch, workspace, of_heads):
    made, rounds_of = [], lists.rounds_of
    monkeypatch.setattr(lists, "rounds_of", lambda *sizes: made.append(rounds_of(*sizes)) or made[-1])
    monkeypatch.setattr(by_kernels, "WORKSPACE", workspace)
    check(8, 2, 2, 60, 80, 2, 64, 2, always="sinks(4)")
    assert len(made) == 2 and all(len(rounds.all) > 1 and (rounds.choices == 30) == of_heads for rounds in made)


def test_a_block_that_all_queries_pick_is_divided_and_right():
    first = torch.zeros(1, 1, 200, 1, dtype=torch.int32, device=DEVICE)
    check(1, 1, 1, 200, 300, 1, 64, 1, picks=first)


def test_picks_that_keep_nothing_change_nothing():
    picks = drawn_picks((1, 1, 40, 2), 1, 64, 40, 140)
    more = sorted_picks(torch.cat([picks, torch.full_like(picks[..., :1], 2), torch.full_like(picks[..., :1], 90)], 3))
    wanted, got = (_attend(p) for p in (picks, more))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def _attend(picks):
    q, k, v, dout = tensors(1, 8, 1, 40, 140, 16)
    selection = sf.BlockSelection(picks, 40, 140, 64)
    return gradients(lambda *t: operators.attention(*t, selection, 0.3, "triton"), (q, k, v), dout, None)


def test_gradients_repeat_bit_for_bit():
    picks = drawn_picks((1, 1, 40, 2), 1, 64, 40, 140)
    assert all(torch.equal(a, b) for a, b in zip(_attend(picks), _attend(picks), strict=True))


@parametrize("every, block", [(1, 64), (7, 32)])
def test_masses_of_picked_blocks_and_their_gradients_are_right(every, block):
    q, k, *_ = tensors(1, 4, 2, 60, 90, 16)
    picks = drawn_picks((1, 4, -(-60 // every), 2), every, block, 60, 90)
    kept = kept_by_picks(picks, every, block, 60, 90).to(DEVICE)
    some = kept.any(-1)

    def by_definition(q, k):
        scores = (0.3 * q @ k.repeat_interleave(2, 1).mT)[:, :, :, None].masked_fill(~kept & some[..., None], float("-inf"))
        return scores.logsumexp(-1).masked_fill(~some, float("-inf"))

    of_some = torch.randn(some.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) * some
    results = []
    selection = sf.BlockSelection(picks, 60, 90, block, every)
    kernels = partial(operators.block_lse, selection=selection, scale=0.3, backend="triton")
    for masses, dtype in ((by_definition, torch.float64), (kernels, torch.float32)):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k)]
        found = masses(*leaves)
        grads = torch.autograd.grad((found.masked_fill(~some, 0.0) * of_some).sum(), leaves)
        results.append([found.detach(), *grads])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


@parametrize(
    "heads, every, n, reason",
    [
        (96, 1, 4, "it runs up to 64 query heads that share a choice; got 96"),
        (1, 1, 256, "it runs up to 8,192 picks of the queries of a tile; got 16,384"),
    ],
)
def test_calls_that_do_not_fit_are_refused_by_name(heads, every, n, reason):
    q, k, v, _ = tensors(1, heads, 1, 64, 64, 16)
    picks = torch.zeros(1, 1, 64 // every, n, dtype=torch.int32)
    selection = sf.BlockSelection(picks, 64, 64, 64, every)
    assert by_kernels.supports(backends.Call.of(q, k, v, 64), selection) == reason


def test_what_a_call_does_besides_its_selection_is_refused_by_name():
    q, k, v, _ = tensors(1, 2, 1, 64, 64, 16)
    call = replace(backends.Call.of(q, k, v, 64), features=("dropout_p", "softcap"))
    selection = sf.BlockSelection(torch.zeros(1, 1, 64, 2, dtype=torch.int32), 64, 64, 64)
    assert by_kernels.supports(call, selection) == "it takes no dropout_p, softcap beside a selection"
