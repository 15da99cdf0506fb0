"""Compares docs/numbers.md with what is computed."""

import re
from pathlib import Path

import numerics
import pytest
import torch
from oracle import require

import sparse_flash as sf
from sparse_flash.variant import variant

TEXT = (Path(__file__).parent.parent / "docs" / "numbers.md").read_text()
BACKENDS = ("torch", "triton", "reference")


def test_the_table_of_errors_is_what_the_script_finds():
    """On a CPU. Other versions of PyTorch and other processors compute other exponentials: lse, a largest difference, was seen to
    differ by a factor of 2.5."""
    if numerics.DEVICE != "cpu":
        pytest.skip("the table is of a CPU")
    told = [line for line in TEXT.splitlines() if line.startswith(("| `full`", "| `causal"))]
    found = numerics.table()[2:]
    assert len(told) == len(found) == 6
    for line, now in zip(told, found, strict=True):
        (*names, figures), (*names_now, figures_now) = (text.replace("\\|", "").split("|", 3)[1:] for text in (line, now))
        assert names == names_now
        for said, seen in zip(*(map(float, re.findall(r"[\d.]+e-\d+", text)) for text in (figures, figures_now)), strict=True):
            assert said / 3 <= seen <= said * 3, line


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_past_all_tokens_are_all_those_below_0_none_and_what_does_not_exist_may_be_nan(backend, monkeypatch):
    q, k, v = (torch.randn(4, 1, 32, 16, device=numerics.DEVICE) for _ in range(3))
    lens = torch.tensor([1 << 40, 33, 20, -5], device=q.device)
    require(backend, sf.backends.Call.from_tensors(q, k, v, None))
    whole = sf.attention(q[:2], k[:2], v[:2], backend=backend)
    k[2, :, 20:] = v[2, :, 20:] = k[3] = v[3] = torch.nan
    if q.device.type == "cpu":
        with pytest.raises(ValueError, match="kv_lens must be at least 0; got -5"):
            sf.attention(q, k, v, kv_lens=lens, backend=backend)
        monkeypatch.setattr(variant, "is_plain_eager", lambda *_: False)  # as where lengths are not read
    out = sf.attention(q, k, v, kv_lens=lens, backend=backend)
    torch.testing.assert_close(out[:2], whole)
    torch.testing.assert_close(out[2:3], sf.attention(q[2:3], k[2:3, :, :20], v[2:3, :, :20], backend=backend))
    assert (out[3] == 0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_nan_reaches_no_query_whose_blocks_do_not_hold_it(backend):
    q, k, v = (torch.randn(1, 1, 64, 16, device=numerics.DEVICE) for _ in range(3))
    k[:, :, :16] = v[:, :, :16] = torch.nan
    require(backend, sf.backends.Call.from_tensors(q, k, v, 16))
    out = sf.attention(q, k, v, sf.compile_mask("block_diagonal(32)", 64, block_size=16).to(q.device), backend=backend)
    assert torch.isfinite(out[:, :, 32:]).all() and out[:, :, :32].isnan().all()
