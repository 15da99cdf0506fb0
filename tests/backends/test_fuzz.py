"""The fuzzer itself: its draws are as described, and no failure is lost."""

import os
import signal
import time
from types import SimpleNamespace

import fuzz
import pytest

# The drawing module imports torch, so it is imported only where needed: the process below starts faster without it.


def misbehave(backend, pipe, of, options):
    """Replaces ``fuzz.work``: seed 3 hangs, 5 ends the process, 6 is wrong, 9 breaks the device."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send(("ready", None))
    while seeds := pipe.recv():
        for seed in seeds:
            pipe.send(("start", f"seed {seed}: described"))
            if seed == 3:
                time.sleep(600)
            if seed == 5:
                os._exit(7)
            pipe.send(("done", {6: "out is off", 9: "an illegal address"}.get(seed), seed == 9))
            if seed == 9:
                return


@pytest.mark.parametrize("workers", [1, 3])
def test_hangs_ended_processes_and_wrong_results_are_counted_once_and_the_rest_still_runs(monkeypatch, workers):
    monkeypatch.setattr(fuzz, "work", misbehave)
    said = []
    fuzzer = fuzz.Fuzzer("torch", range(2, 20), 2.0, workers, said.append, options={"kernels": 4})
    while fuzzer.step():
        pass
    fuzzer.end()
    assert fuzzer.counts == {"calls": 18, "mismatches": 1, "hangs": 1, "errors": 2}
    reports = sorted((report.split("\n  ") for report in said), key=lambda report: report[1])
    assert [first for first, *_ in reports] == [
        "hang: no result in 2 s",
        "error: its process ended with status 7",
        "mismatch: out is off",
        "error: an illegal address",
    ]
    assert reports[0][1:] == ["seed 3: described", "again: python tests/fuzz.py --backend torch --kernels 4 --only 3"]


@pytest.mark.parametrize("group", range(20))
def test_a_drawn_mask_keeps_what_its_definition_says(group):
    import fuzz_calls

    drawn = fuzz_calls._mask(group, "reference")
    if drawn.mask is None:
        assert drawn.text == "none" and drawn.kept.all()
    else:
        dense = drawn.mask.to_dense()
        assert (dense == drawn.kept.to(dense.device)).all()


def test_a_seed_draws_the_same_call_whatever_was_drawn_before():
    import fuzz_calls

    seeds = [3, 100, 4, 101]
    assert [str(fuzz_calls.draw(seed, "torch")) for seed in seeds] == [str(fuzz_calls.draw(s, "torch")) for s in seeds[::-1]][::-1]


def test_calls_may_share_few_kernels_and_still_differ_in_their_masks():
    import fuzz_calls

    calls = [fuzz_calls.draw(seed, "torch", kernels=3) for seed in range(0, 240, 6)]
    blocks = [None if call.drawn.mask is None else call.drawn.mask.block_size for call in calls]
    kinds = {(call.dtype, call.head_dim, call.v_head_dim, call.terms, size) for call, size in zip(calls, blocks, strict=True)}
    assert len(kinds) == 3 and len({call.drawn.text for call in calls}) > 15


def test_a_drawn_selection_is_right_and_a_wrong_one_is_named(monkeypatch):
    import fuzz_selections

    from sparse_flash.selection import torch as selection_torch

    calls = [fuzz_selections.draw(seed, "torch") for seed in (3, 100, 3)]
    assert calls[0] == calls[2] != calls[1] and str(calls[0]).startswith("seed 3: torch, dtype torch.")
    call = next(
        call for call in map(fuzz_selections.draw, range(99), ["torch"] * 99) if call.dropped == 0 and call.sizes["kv_len"] > 9
    )
    assert fuzz_selections.failure(call) is None
    right = selection_torch.backward
    monkeypatch.setattr(selection_torch, "backward", lambda *args: tuple(2 * grad for grad in right(*args)))
    assert "is off by" in fuzz_selections.failure(call)


def test_right_results_pass_and_wrong_ones_are_named(monkeypatch):
    import fuzz_calls

    from sparse_flash import backends

    call = next(call for call in (fuzz_calls.draw(seed, "torch") for seed in range(999)) if call.drawn.kept.any())
    assert fuzz_calls.failure(call) is None
    right = backends.get_backend("torch")
    wrong = SimpleNamespace(
        supports=right.supports,
        forward=right.forward,
        backward=lambda *args: tuple(grad if grad is None else 2 * grad for grad in right.backward(*args)),
    )
    monkeypatch.setitem(backends._MODULES, "torch", wrong)
    found = fuzz_calls.failure(call)
    assert "dv is off by" in found and "out" not in found
