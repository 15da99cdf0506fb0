"""The fuzzer itself: its draws are as described, and no failure is lost."""

import os
import signal
import time

import fuzz
import pytest

# The drawing module imports torch, so it is imported only where needed: the process below starts faster without it.


def misbehave(backend, pipe, of, options):
    """Replaces ``fuzz.work``: seed 3 hangs, 5 ends the process, 6 is wrong, 9 breaks the device."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send(("ready", None))
    while (seed := pipe.recv()) is not None:
        pipe.send(("start", f"seed {seed}: described"))
        if seed == 3:
            time.sleep(600)
        if seed == 5:
            os._exit(7)
        pipe.send(("done", {6: "out is off", 9: "an illegal address"}.get(seed), seed == 9))


@pytest.mark.parametrize("workers", [1, 3])
def test_hangs_ended_processes_and_wrong_results_are_counted_once_and_the_rest_still_runs(monkeypatch, workers):
    monkeypatch.setattr(fuzz, "work", misbehave)
    said = []
    fuzzer = fuzz.Fuzzer("torch", range(2, 20), 2.0, said.append, options={"kernels": 4})
    fuzzer.run(workers)
    assert fuzzer.counts == {"call": 18, "mismatch": 1, "hang": 1, "error": 2}
    reports = sorted((report.split("\n  ") for report in said), key=lambda report: report[1])
    assert [first for first, *_ in reports] == [
        "hang: no result in 2 s",
        "error: its process ended with status 7",
        "mismatch: out is off",
        "error: an illegal address",
    ]
    assert reports[0][1:] == ["seed 3: described", "again: python tests/fuzz.py --backend torch --kernels 4 --only 3"]


def test_right_results_pass_and_wrong_ones_are_named(monkeypatch):
    import fuzz_calls
    import fuzz_selections

    from sparse_flash.core import backends
    from sparse_flash.selection import torch as selection_torch

    call = next(one for one in (fuzz_calls.draw(seed, "torch") for seed in range(999)) if one.drawn.kept.any())
    drawn = (fuzz_selections.draw(seed, "torch") for seed in range(99))
    selection = next(one for one in drawn if one.dropped == 0 and one.sizes["kv_len"] > 9)
    assert fuzz_calls.failure(call) is fuzz_selections.failure(selection) is None
    for module in (backends.get_backend("torch"), selection_torch):
        right = module.backward
        twice = lambda *args, right=right: tuple(grad if grad is None else 2 * grad for grad in right(*args))  # noqa: E731
        monkeypatch.setattr(module, "backward", twice)
    found = fuzz_calls.failure(call)
    assert "dv is off by" in found and "out" not in found and "is off by" in fuzz_selections.failure(selection)
