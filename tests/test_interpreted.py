"""Triton's interpreter as the tests run it: see ``interpreted``."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a GPU nothing is interpreted", allow_module_level=True)

import triton
from triton import language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _double_kernel(pointer, COUNT: tl.constexpr, FAILS: tl.constexpr):
    tl.static_assert(FAILS == 0)
    place = pointer + tl.arange(0, COUNT)
    tl.store(place, _twice(tl.load(place)))


def _language() -> list:
    return [tl.load, tl.arange, tl.core.load, tl.tensor.__add__, tl.static_assert, tl.range]


def test_a_launch_leaves_the_language_as_it_was_even_if_it_fails():
    before, numbers = _language(), torch.arange(4.0)
    for fails in (0, 1, 0):
        if fails:
            with pytest.raises(InterpreterError):
                _double_kernel[(1,)](numbers, 4, fails)
        else:
            _double_kernel[(1,)](numbers, 4, fails)
        assert all(a is b for a, b in zip(_language(), before, strict=True))
    assert numbers.tolist() == [0.0, 4.0, 8.0, 12.0]
