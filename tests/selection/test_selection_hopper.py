"""The Hopper kernels of key blocks chosen by query, against dense attention in float64: on a Hopper GPU the compiled ones,
elsewhere run on the CPU in drawn orders of events (``gluon_on_cpu``)."""

import contextlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from accepted import DEVICE
from oracle import gradients
from picked import check_selected, drawn_picks, sorted_picks, tensors

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.kernels.selection import lists
from sparse_flash.selection import by_hopper_kernels, by_kernels, operators

parametrize = pytest.mark.parametrize
# The kernels around them are portable: without a GPU, Triton's interpreter runs those.
NEEDED = "hopper" if DEVICE == "cuda" else "triton"
pytestmark = [
    pytest.mark.skipif(
        backends.backend(NEEDED).available() is not None, reason="needs triton, and a Hopper GPU or its interpreter"
    ),
    pytest.mark.usefixtures("poison"),
]
check = partial(check_selected, "hopper", dtype=torch.float16)


def running(seed: int = 0):
    return contextlib.nullcontext() if DEVICE == "cuda" else emulated.gluon_on_cpu(seed)


CASES = {
    # heads, key heads, pickers, q_len, kv_len, every, block, n, head_dim
    "a group of 1": (2, 2, 2, 90, 290, 1, 64, 3, 64),
    "a group of 3, odd lengths": (3, 1, 1, 75, 301, 1, 128, 2, 128),
    "a group of 4": (4, 1, 1, 70, 200, 1, 64, 2, 128),
    "a group of 4, blocks of 128": (8, 2, 2, 130, 390, 1, 128, 3, 64),
    "a group of 4, blocks of 256": (8, 2, 2, 130, 700, 1, 256, 2, 64),
    "a group of 3, blocks of 512, a choice for 3 queries": (3, 1, 1, 75, 1301, 3, 512, 2, 128),
    "a group of 16, more queries than keys": (16, 1, 1, 130, 110, 1, 64, 2, 64),
    "heads that pick for themselves": (4, 2, 4, 60, 260, 1, 64, 2, 64),
    "a choice for 4 queries, padded columns": (4, 1, 1, 70, 300, 4, 128, 2, 96),
    "a choice for 7 queries": (2, 1, 1, 90, 210, 7, 64, 2, 40),
    "a choice for 16 queries": (16, 1, 1, 70, 200, 16, 64, 2, 64),
}


@parametrize("name", CASES)
def test_results_and_gradients_are_those_of_dense_attention(name):
    *case, dim = CASES[name]
    with running(len(name)):
        check(*case, dim=dim)


@pytest.mark.skipif(DEVICE == "cpu", reason="NumPy has no bfloat16")
@parametrize("name", ["a group of 4", "a group of 4, blocks of 128"])
def test_results_and_gradients_of_bfloat16_are_those_of_dense_attention(name):
    *case, dim = CASES[name]
    check(*case, dim=dim, dtype=torch.bfloat16)


@parametrize("block", [64, 128, 256])
def test_what_is_always_kept_counts_once_beside_picks(block):
    with running(block):
        check(4, 1, 1, 70, 70, 1, block, 2, always="sinks(4) | local(20)", always_block=64, dim=64)


def test_a_call_in_rounds_gives_the_same(monkeypatch):
    made, rounds_of = [], lists.rounds_of
    monkeypatch.setattr(lists, "rounds_of", lambda *sizes: made.append(rounds_of(*sizes)) or made[-1])
    monkeypatch.setattr(by_kernels, "WORKSPACE", 240_000)
    with running(3):
        check(8, 2, 2, 120, 260, 2, 64, 2, dim=64)
    assert all(len(rounds.all) > 1 for rounds in made)
    assert [rounds.choices == 60 for rounds in made] == [True, False]  # rounds of heads; several rounds of a head


@parametrize("block", [64, 128, 256])
def test_a_block_that_all_queries_pick_is_divided_and_right(block):
    first = torch.zeros(1, 1, 1100, 1, dtype=torch.int32, device=DEVICE)
    with running(1):
        check(1, 1, 1, 1100, 1300, 1, block, 1, picks=first, dim=64)


def attend(picks, block=64, **options):
    q, k, v, dout = tensors(1, 4, 1, 40, 140, 64, dtype=torch.float16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads of a token side by side
    selection = sf.BlockSelection(picks, 40, 140, block)
    with running(**options):
        return gradients(lambda *t: operators.attention(*t, selection, 0.3, "hopper"), (q, k, v), dout, None)


def test_picks_that_keep_nothing_change_nothing():
    picks = drawn_picks((1, 1, 40, 2), 1, 64, 40, 140)
    more = sorted_picks(torch.cat([picks, torch.full_like(picks[..., :1], 90)], 3))
    assert all(torch.equal(a, b) for a, b in zip(attend(picks), attend(more), strict=True))


def test_queries_that_pick_nothing_get_zeros_and_give_none():
    picks = drawn_picks((1, 1, 40, 2), 1, 128, 40, 140)
    picks[:, :, 10:20] = -1
    out, lse, dq, *_ = attend(picks, 128)
    for part in (out, dq):
        assert (part[:, :, 10:20] == 0).all() and not part.isnan().any()
    assert lse[:, :, 10:20].isneginf().all()


@parametrize("block", [64, 128, 256])
def test_results_and_gradients_repeat_bit_for_bit_in_any_order_of_events(block):
    picks = drawn_picks((1, 1, 40, 2), 1, block, 40, 140)
    one, other = attend(picks, block), attend(picks, block, **({} if DEVICE == "cuda" else {"seed": 9}))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.skipif(DEVICE == "cuda", reason="the compiled kernels run on this GPU")
def test_rows_used_before_they_were_copied_show(monkeypatch):
    monkeypatch.setattr(emulated.mbarrier, "wait", lambda *_, **__: emulated.here().pause())
    try:
        assert attend(drawn_picks((1, 1, 40, 2), 1, 64, 40, 140))[0].isnan().any()
    except AssertionError as error:  # arrivals that nobody waited for
        assert "more arrivals" in str(error)


def refused(block: int = 64, **changed) -> str | None:
    q, k, v, _ = tensors(1, 4, 1, 256, 256, 64, dtype=torch.float16)
    selection = sf.BlockSelection(torch.zeros(1, 1, 256, 2, dtype=torch.int32), 256, 256, block)
    with running():
        return by_hopper_kernels.supports(replace(backends.Call.of(q, k, v, block), **changed), selection)


def test_calls_that_do_not_fit_are_refused_by_name():
    assert [refused(block) for block in (64, 128, 256, 512)] == [None] * 4
    assert refused(32) == "it runs picks of blocks of 64, 128, 256, 512 keys; got 32"
    assert refused(head_dim=256, v_head_dim=256) == "it runs head_dim 33 to 128; got 256"
    assert refused(v_head_dim=32) == "it runs v of the head_dim of q and k; got head_dim 32 of v and 64 of q and k"
    assert refused(features=("dropout_p",)) == "it takes no dropout_p beside a selection"


def test_the_hopper_kernels_come_before_the_portable_ones_where_they_run():
    assert list(operators.BACKENDS)[:2] == ["hopper", "triton"]
    assert backends.AUTOMATIC.index("hopper") < backends.AUTOMATIC.index("triton")
