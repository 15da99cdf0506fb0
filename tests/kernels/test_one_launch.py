"""The portable backward pass in one launch: dQ, dK and dV against float64, with and without what a call may add to scores."""

import pytest
import torch
from oracle import DEVICE, check

import sparse_flash as sf
from sparse_flash import backends

if reason := backends.get_backend("triton").why_unavailable():
    pytest.skip(reason, allow_module_level=True)

from sparse_flash.kernels.portable import configs

pytestmark = pytest.mark.usefixtures("poison")
parametrize = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def one_launch(monkeypatch):
    """Every backward pass takes one launch."""
    monkeypatch.setattr(configs, "ONE_LAUNCH_TOKENS", 1 << 20)


@parametrize("spec", [None, "causal", "local(20)", "butterfly(block=16)", "causal & strided(7, block=1)"])
@parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_gradients_are_right_for_every_kind_of_block_and_for_grouped_heads(spec, heads, kv_heads):
    check("triton", spec, 50, 60, block_size=None if spec is None else 32, heads=heads, kv_heads=kv_heads, head_dim=16)


def test_gradients_are_right_where_v_has_a_head_dim_of_its_own_and_each_head_a_mask():
    mask = sf.BlockMask.per_head(["causal", "local(20)", "causal", "full"], q_len=50, block_size=32)
    check("triton", mask, 50, heads=4, kv_heads=2, head_dim=16, v_head_dim=32, lse_gradient=False)


def gradients(q, k, v, dout, spec, backend, **options):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = sf.attention(*leaves, None if spec is None else sf.compile_mask(spec, 70, 90, 32, DEVICE), backend=backend, **options)
    return torch.autograd.grad(out, leaves, dout.to(out.dtype))


@parametrize("spec", [None, "causal & local(30)"])
@parametrize("name", ["lengths", "score changes"])
def test_gradients_are_right_for_lengths_and_score_changes(spec, name):
    generator = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, 2, 2, 70, 16, generator=generator).to(DEVICE)
    k, v = torch.randn(2, 2, 1, 90, 16, generator=generator).to(DEVICE)
    numbers = {"kv_lens": [45, 90], "q_lens": [70, 33]} if name == "lengths" else {"alibi_slopes": [[0.1, 0.2], [0.3, 0.4]]}
    options = {key: torch.tensor(value, device=DEVICE) for key, value in numbers.items()}
    options |= {"softcap": 3.0} if name == "score changes" else {}
    if name == "lengths":  # nothing is read past the lengths
        k[0, :, 45:] = v[0, :, 45:] = float("nan")
        q[1, :, 33:] = dout[1, :, 33:] = float("nan")
    ours = gradients(q, k, v, dout, spec, "triton", **options)
    clean = [t.nan_to_num().double() for t in (q, k, v, dout)]
    for mine, theirs in zip(ours, gradients(*clean, spec, "reference", **options), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)
