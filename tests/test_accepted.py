"""Tests give back ends inputs that they accept, on this machine and on a simulated H100."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simulated
import torch
from accepted import DRAWN, fitted, refusal, shapes
from hypothesis import given, settings
from oracle import BACKENDS, DEVICE

from sparse_flash import backends

TESTS = Path(__file__).parent
# Other tests that call named back ends.
FILES = ("api", "variant", "dispatch", "backends/test_gpu.py", "test_numbers.py")

# The share of its cases that a back end accepts in each test function on an H100: at least half, except where a back end cannot.
# The tests themselves check that a refused call raises the reason (oracle.require).
LEAST = 0.5
LESS = {
    # Hopper's kernels take head_dim 33 to 256, and no learned bias.
    "variant/test_variant::test_each_term_is_as_it_is_defined[hopper]": 0.1,
    "variant/test_variant::test_terms_are_right_under_any_kind_of_mask[hopper]": 0.0,
    "variant/test_variant::test_terms_are_right_where_v_has_a_head_dim_of_its_own[hopper]": 0.0,
    "variant/test_variant::test_what_lies_in_tokens_that_do_not_exist_does_not_matter[hopper]": 0.0,
    "variant/test_variant::test_a_padded_batch_is_each_of_its_sequences_alone[hopper]": 0.0,
    "api/test_attention::test_v_may_have_a_head_dim_of_its_own[hopper]": 0.3,
    "variant/test_variant::test_scores_that_overflow_past_the_last_token_do_not_reach_gradients[hopper]": 0.0,
    # They run three of the five block sizes, and 5 of 9 head dims in 2 of 3 dtypes.
    "backends/test_gpu::test_every_table_block_is_right[hopper]": 0.3,
    "backends/test_gpu::test_v_may_have_a_head_dim_of_its_own[hopper]": 0.3,
    "api/test_attention::test_every_block_size_is_right[hopper]": 0.4,
    "backends/test_gpu::test_every_pattern_head_dim_and_dtype_is_right[hopper]": 0.2,
}


@pytest.fixture(params=["here", "on an H100"])
def device(request, monkeypatch):
    if request.param != "here":
        simulated.an_h100(monkeypatch)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_drawn_for_a_back_end_are_accepted_and_vary(backend):
    reason = backends.backend(backend).available()
    if reason:
        pytest.skip(f"{backend}: {reason}")
    seen = {name: set() for name in DRAWN}

    @settings(max_examples=100)
    @given(shape=shapes(backend))
    def property_holds(shape):
        assert refusal(backend, **shape) is None
        for name, value in shape.items():
            seen[name].add(value)

    property_holds()
    assert all(len(values) >= 2 for values in seen.values()), seen


def test_what_a_back_end_accepts_is_changed_in_nothing_and_what_it_refuses_as_little_as_will_do(monkeypatch):
    usual = {"dtype": torch.float32, "head_dim": 16, "block_size": 32}
    assert fitted("torch", usual) == usual
    simulated.an_h100(monkeypatch)
    assert fitted("triton", usual) == usual
    assert fitted("hopper", usual) == {"dtype": torch.float16, "head_dim": 64, "block_size": 128}
    assert fitted("hopper", {"dtype": torch.bfloat16, "block_size": 256}, head_dim=96) == {
        "dtype": torch.bfloat16,
        "block_size": 256,
    }
    assert fitted("hopper", {"head_dim": 16}, dtype=torch.float64) == {"head_dim": 16}


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's own run counts what was computed, against a floor")
def test_on_an_h100_every_back_end_would_compute_at_least_half_of_the_cases_of_each_test(tmp_path):
    report = tmp_path / "report.json"
    environment = os.environ | {
        "SIMULATED_REPORT": str(report),
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    # Ignores marks that skip, such as those of tests that need a GPU, and errors of tests that use one.
    options = ["-p", "simulated", "-p", "no:skipping", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    command = [sys.executable, "-m", "pytest", *options, *(str(TESTS / name) for name in FILES)]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    outcomes = json.loads(report.read_text())
    found = {family: reasons.get("accepted", 0) / sum(reasons.values()) for family, reasons in outcomes.items()}
    few = {family: outcomes[family] for family, share in found.items() if share < LESS.get(family, LEAST)}
    assert few == {}
    assert LESS.keys() <= found.keys(), "of tests that are gone"
    assert {name for family in found for name in BACKENDS if family.endswith(f"[{name}]")} == set(BACKENDS)
    # About 30 functions when this was written.
    assert sum(family.endswith("[hopper]") and share > 0 for family, share in found.items()) >= 30
