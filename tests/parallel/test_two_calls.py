"""The backward pass in two calls: on a rank's own keys and on fetched ones, by Hopper's kernels with one sum of dQ, or by separate
calls. Without a Hopper GPU its kernels are simulated."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle import DEVICE, record

import sparse_flash as sf
from sparse_flash.core import hopper, reference
from sparse_flash.parallel import calls, transfer
from sparse_flash.parallel.routes import TwoCalls, take_mask

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated

parametrize = pytest.mark.parametrize
BLOCK, OWN, OTHERS = 128, np.array([0, 3]), np.array([1, 2])


@pytest.fixture(autouse=True)
def on_hopper(poison):
    if DEVICE == "cuda" and (reason := hopper.why_unavailable()):
        pytest.skip(reason)
    with emulated.gluon_on_cpu() if DEVICE == "cpu" else nullcontext():
        yield


class Rank:
    """What one of two ranks has of a sequence of four blocks, two of which are its own. wanted: dq, dk and dv of its queries over
    own keys and then the others', in float64."""

    def __init__(self, spec, head_dim, v_head_dim, heads, kv_heads, lse_gradient=True):
        generator = torch.Generator().manual_seed(0)
        sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (heads, v_head_dim)
        lengths = 2 * BLOCK, 4 * BLOCK, 4 * BLOCK, 2 * BLOCK
        tensors = [torch.randn((1, n, length, dim), generator=generator) for (n, dim), length in zip(sizes, lengths, strict=True)]
        self.q, k, v, dout = (t.half().to(DEVICE) for t in tensors)
        mask, self.scale = sf.compile_mask(spec, 4 * BLOCK, block_size=BLOCK), head_dim**-0.5
        both = take_mask(mask, OWN, np.concatenate([OWN, OTHERS])).to(DEVICE)
        exact = [t.double() for t in (self.q, k, v)]
        call = record(*exact, both, self.scale)
        out, lse = reference.forward(call)
        dlse = torch.randn(lse.shape, generator=generator).double().to(DEVICE) if lse_gradient else None
        self.wanted = reference.backward(call, dout.double(), dlse, out, lse)
        self.rows = calls.QueryRows(self.q, dout, dlse if dlse is None else dlse.float(), out.half(), lse.float())
        self.k, self.v = k[:, :, : 2 * BLOCK].clone(), v[:, :, : 2 * BLOCK].clone()
        self.fetched = transfer.empty_blocks(k, v, 2, BLOCK)
        transfer.pack(k[:, :, 2 * BLOCK :], v[:, :, 2 * BLOCK :], self.fetched)
        near, far = (take_mask(mask, OWN, columns) for columns in (OWN, OTHERS))
        self.calls = TwoCalls(near, far).to(torch.device(DEVICE))

    def backward(self, deterministic=False):
        """(whether the calls have one sum of dQ, what is off by too much)"""
        run = calls.PartialAttention(None, self.scale, deterministic, "hopper")
        gradients, own, head_dim = torch.full_like(self.fetched, float("nan")), (self.k, self.v), self.q.shape[3]
        joined = run.join_calls(self.rows, own, transfer.unpack(self.fetched, head_dim), self.calls)
        message = SimpleNamespace(pieces=gradients, send=lambda: transfer.PendingExchange(gradients.clone()))
        (dq, *of_own), sent = run.backward_in_two_calls(self.rows, own, self.fetched, self.calls, message)
        found = dq, *(torch.cat(pair, 2) for pair in zip(of_own, transfer.unpack(sent.received, head_dim), strict=True))
        off = {}
        for name, one, exact in zip(("dq", "dk", "dv"), found, self.wanted, strict=True):
            error = (one.double() - exact).abs().max()
            if not error <= 4e-3 * max(1.0, exact.abs().max()):
                off[name] = float(error)
        return joined is not None, off


SPECS = [
    ("butterfly(block=128)", 128, 128, 2, 1),
    ("causal & (local(150) | strided(7, block=1))", 64, 64, 2, 2),
    ("causal", 40, 40, 3, 1),
    ("full", 192, 128, 2, 1),
    ("local(200)", 256, 256, 1, 1),
]


@parametrize("spec, lse_gradient", [*((spec, True) for spec in SPECS), (SPECS[0], False)], ids=str)
def test_two_calls_that_share_all_rows_have_one_sum_of_dq(spec, lse_gradient):
    assert Rank(*spec, lse_gradient).backward() == (True, {})


@parametrize("deterministic", [True, False])
def test_calls_are_separate_where_sums_must_repeat_or_tma_cannot_address_a_tensor(deterministic):
    rank = Rank("causal & local(200)", 64, 64, 2, 1)
    if not deterministic:
        rank.rows = rank.rows._replace(dout=rank.rows.dout.transpose(2, 3).contiguous().transpose(2, 3))
    assert rank.backward(deterministic) == (False, {})
