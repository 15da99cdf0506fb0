"""Inputs that tests fit to a back end are accepted by it, on this machine and on a simulated H100."""

import pytest
import torch
from accepted import DRAWN, an_h100, fitted, refusal, shapes
from hypothesis import given, settings
from oracle import BACKENDS

from sparse_flash import backends


@pytest.fixture(params=["here", "on an H100"])
def device(request, monkeypatch):
    if request.param != "here":
        an_h100(monkeypatch)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_drawn_for_a_back_end_are_accepted_and_vary(backend):
    reason = backends.get_backend(backend).why_unavailable()
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
    an_h100(monkeypatch)
    assert fitted("triton", usual) == usual
    assert fitted("hopper", usual) == {"dtype": torch.float16, "head_dim": 64, "block_size": 128}
    assert fitted("hopper", {"dtype": torch.bfloat16, "block_size": 256}, head_dim=96) == {
        "dtype": torch.bfloat16,
        "block_size": 256,
    }
    assert fitted("hopper", {"head_dim": 16}, dtype=torch.float64) == {"head_dim": 16}
