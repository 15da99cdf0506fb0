"""The kernels of picked blocks, against dense attention in float64. On a Hopper GPU the compiled ones run; elsewhere the portable
ones in Triton's interpreter, and Hopper's on the CPU in drawn orders of events (``gluon_on_cpu``)."""

import contextlib
from dataclasses import replace

import pytest
import torch
from accepted import DEVICE, needs_triton
from oracle import gradients
from picked import check_selected, drawn_picks, sorted_picks, tensors

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated

import sparse_flash as sf
from sparse_flash.core import backends
from sparse_flash.core.description import Call
from sparse_flash.selection import operators
from sparse_flash.selection.kernels import division

parametrize = pytest.mark.parametrize
pytestmark = [needs_triton, pytest.mark.usefixtures("poison")]
PORTABLE, HOPPER = "triton", "hopper"
KINDS = [PORTABLE, HOPPER]
ALWAYS = "sinks(4) | local(20)"


@contextlib.contextmanager
def running(kind: str, seed: int = 0):
    if kind == HOPPER and DEVICE == "cuda" and backends.get_backend(HOPPER).why_unavailable() is not None:
        pytest.skip("needs a Hopper GPU")
    with contextlib.nullcontext() if kind == PORTABLE or DEVICE == "cuda" else emulated.gluon_on_cpu(seed):
        yield


def check(kind: str, *case, seed: int = 0, **options) -> None:
    sizes = {PORTABLE: {}, HOPPER: {"dtype": torch.float16, "dim": 64}}[kind]
    with running(kind, seed):
        check_selected(kind, *case, **sizes | options)


CASES = {
    # heads, key heads, pickers, q_len, kv_len, block, n
    PORTABLE: {
        "a group of 4": (4, 1, 1, 40, 130, 64, 2),
        "a group of 3, an odd number of keys": (3, 1, 1, 26, 131, 64, 2),
        "a group of 16, more queries than keys": (16, 1, 1, 26, 20, 64, 2),
        "heads that pick for themselves": (4, 2, 4, 30, 100, 64, 2),
        "long blocks": (2, 1, 1, 12, 550, 512, 2),
        "small blocks": (4, 1, 1, 36, 36, 16, 3),
        "a group of 40": (40, 1, 1, 9, 90, 64, 2),
        "in 16 bits": (4, 1, 1, 100, 100, 64, 2, {"dtype": torch.float16, "dim": 24, "v_dim": 40}),
        "beside what is always kept": (4, 1, 1, 40, 130, 64, 2, {"always": ALWAYS}),
    },
    HOPPER: {
        "a group of 1": (1, 1, 1, 70, 230, 64, 3),
        "a group of 3, odd lengths": (3, 1, 1, 75, 301, 128, 2, {"dim": 128}),
        "a group of 4": (4, 1, 1, 70, 200, 64, 2, {"dim": 128}),
        "a group of 4, blocks of 128": (4, 1, 1, 70, 390, 128, 3),
        "a group of 4, blocks of 256": (8, 2, 2, 40, 560, 256, 2),
        "a group of 3, blocks of 512": (3, 1, 1, 75, 1301, 512, 2, {"dim": 128}),
        "a group of 16, more queries than keys": (16, 1, 1, 130, 110, 64, 2),
        "heads that pick for themselves": (4, 2, 4, 60, 260, 64, 2),
        "padded columns": (4, 1, 1, 70, 300, 128, 2, {"dim": 96}),
        **{
            f"beside what is always kept, blocks of {block}": (4, 1, 1, 40, 70, block, 2, {"always": ALWAYS, "always_block": 64})
            for block in (64, 128, 256)
        },
    },
}


@parametrize("kind, name", [(kind, name) for kind, cases in CASES.items() for name in cases])
def test_results_and_gradients_are_those_of_dense_attention(kind, name):
    case = CASES[kind][name]
    sizes, options = case[:7], dict(*case[7:])
    check(kind, *sizes, seed=len(name), **options)
    if DEVICE == "cuda" and (kind == HOPPER or name == "in 16 bits"):  # NumPy has no bfloat16, and Triton's interpreter errs in it
        check(kind, *sizes, **options | {"dtype": torch.bfloat16})


@parametrize(
    "kind, always, workspace",
    # So that a round has some heads, or a head has several rounds.
    [(PORTABLE, "sinks(4)", 60_000), (PORTABLE, "sinks(4)", 1), (HOPPER, None, 240_000)],
)
def test_a_call_in_rounds_gives_the_same(monkeypatch, kind, always, workspace):
    monkeypatch.setattr(division, "WORKSPACE", workspace)
    monkeypatch.setattr(division, "_TIMES_SUMS", 0)
    check(kind, 8, 2, 2, *((60, 80) if kind == PORTABLE else (120, 260)), 64, 2, always=always)


@parametrize("kind, block", [(PORTABLE, 64), *((HOPPER, block) for block in (64, 128, 256))])
def test_a_block_that_all_queries_pick_is_divided_and_right(kind, block, monkeypatch):
    queries = 1100 if DEVICE == "cuda" else 140
    if DEVICE == "cpu":  # where long lists take long
        monkeypatch.setattr(division, "_FORWARD_ROWS", 128)
    first = torch.zeros(1, 1, queries, 1, dtype=torch.int32, device=DEVICE)
    check(kind, 1, 1, 1, queries, queries + 100, block, 1, picks=first)


def attend(kind, picks, block=64, **options):
    q, k, v, dout = tensors(1, 4, 1, 40, 140, 64, dtype=torch.float16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads of a token side by side
    selection = sf.BlockSelection(picks, 40, 140, block)
    with running(kind, **options):
        return gradients(lambda *t: operators.attend_to_picks(*t, selection, 0.3, kind), (q, k, v), dout, None)


@parametrize("kind", KINDS)
def test_picks_that_keep_nothing_change_nothing(kind):
    picks = drawn_picks((1, 1, 40, 2), 64, 140)
    more = sorted_picks(torch.cat([picks, torch.full_like(picks[..., :1], 2), torch.full_like(picks[..., :1], 90)], 3))
    assert all(map(torch.equal, attend(kind, picks), attend(kind, more)))


@parametrize("kind", KINDS)
def test_queries_that_pick_nothing_get_zeros_and_give_none(kind):
    picks = drawn_picks((1, 1, 40, 2), 128, 140)
    picks[:, :, 10:20] = -1
    check(kind, 4, 1, 1, 40, 140, 128, 2, picks=picks)


@parametrize("block", [64, 128, 256])
def test_results_and_gradients_repeat_bit_for_bit_in_any_order_of_events(block):
    picks = drawn_picks((1, 1, 40, 2), block, 140)
    one, other = attend(HOPPER, picks, block), attend(HOPPER, picks, block, seed=9)
    assert all(map(torch.equal, one, other))


def refused(kind: str, heads: int = 4, block: int = 64, n: int = 2, **changed) -> str | None:
    q, k, v, _ = tensors(1, heads, 1, 256, 256, 64, dtype=torch.float16)
    selection = sf.BlockSelection(torch.zeros(1, 1, 256, n, dtype=torch.int32), 256, 256, block)
    with running(kind):
        module = operators.BACKENDS[kind]
        return module.supports(replace(Call.from_tensors(q, k, v, block), **changed), selection)


def test_calls_that_do_not_fit_are_refused_by_name():
    assert refused(PORTABLE, heads=96) == "it runs up to 64 query heads that share picks; got 96"
    assert refused(PORTABLE, heads=1, n=256) == "it runs up to 8,192 picks of the queries of a tile; got 16,384"
    features = ("dropout_p", "softcap")
    assert refused(PORTABLE, features=features) == "it takes no dropout_p, softcap with a selection"
    assert refused(HOPPER, features=("dropout_p",)) == "it takes no dropout_p with a selection"
    assert [refused(HOPPER, block=block) for block in (64, 128, 256, 512)] == [None] * 4
    assert refused(HOPPER, block=32) == "it runs picks of blocks of 64, 128, 256, 512 keys; got 32"
    assert refused(HOPPER, head_dim=256, v_head_dim=256) == "it runs head_dim 33 to 128; got 256"
    assert refused(HOPPER, v_head_dim=32) == "it runs v of the head_dim of q and k; got head_dim 32 of v and 64 of q and k"
