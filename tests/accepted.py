"""Finds inputs that a back end accepts, by asking its ``supports``: for tests in which any will do, and for properties."""

from itertools import product

import pytest
import torch
from hypothesis import strategies as st
from strategies import HEAD_DIMS, V_HEAD_DIMS

from sparse_flash.core import backends, triton
from sparse_flash.core.description import Call
from sparse_flash.masks.grid import BLOCK_SIZES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
USUAL = {"dtype": torch.float32, "head_dim": 32, "block_size": 64}
# Replacements for a usual value that the back end refuses, in this order.
OTHERS = {"dtype": (torch.float16, torch.bfloat16), "head_dim": (64, 128), "block_size": (128, 256)}
# Drawn in this order, each from what is accepted together with those before it.
DRAWN = {
    "dtype": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "block_size": BLOCK_SIZES,
    "head_dim": HEAD_DIMS,
    "v_head_dim": V_HEAD_DIMS,
}

needs_triton = pytest.mark.skipif(triton.why_unavailable() is not None, reason="needs triton, and a GPU or its interpreter")


def refusal(backend: str, **fields) -> str | None:
    """Why the back end cannot run a small dense call with these fields of ``Call`` changed; or None."""
    plain = {**USUAL, "batch": 1, "heads": 2, "kv_heads": 2, "q_len": 128, "kv_len": 128, "block_size": None}
    return backends.get_backend(backend).supports(Call(torch.device(DEVICE), **{**plain, **fields}))


def fitted(backend: str, usual: dict | None = None, **given) -> dict:
    """``usual`` with the fewest changes, from ``OTHERS``, that make the back end accept it together with ``given``; unchanged if
    nothing helps. None: all of ``USUAL`` that is not given."""
    usual = {name: value for name, value in USUAL.items() if name not in given} if usual is None else usual
    choices = ([(name, value) for value in (first, *OTHERS[name])] for name, first in usual.items())
    combinations = sorted(product(*choices), key=lambda pairs: sum(usual[name] != value for name, value in pairs))
    return next((dict(pairs) for pairs in combinations if refusal(backend, **given, **dict(pairs)) is None), dict(usual))


@st.composite
def shapes(draw, backend: str) -> dict:
    """dtype, block_size, head_dim and v_head_dim (None: head_dim) that the back end accepts together."""
    drawn = fitted(backend)
    for name, values in DRAWN.items():
        drawn[name] = draw(st.sampled_from([value for value in values if refusal(backend, **{**drawn, name: value}) is None]))
    return drawn
