"""Merging a rank's results over its own keys and over the keys of others: kernels, and the PyTorch operations they replace."""

from itertools import accumulate, chain

import pytest
import torch
from oracle import DEVICE, tensor

from sparse_flash.parallel import calls, transfer

parametrize = pytest.mark.parametrize
BLOCK, BLOCKS, LISTED = 16, 5, [4, 0, 1]
NOTHING = float("-inf")


@pytest.fixture(params=["kernels", "operations"])
def merger(request, monkeypatch):
    """Has either of them merge."""
    kernels = request.param == "kernels"
    if kernels and (reason := calls.triton_backend.why_unavailable()):
        pytest.skip(reason)
    monkeypatch.setattr(calls.triton_backend, "can_use_kernels", lambda device: kernels)


def results(blocks: int, dtype: torch.dtype, layout: str, head_dim: int, nothing: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of random numbers. nothing: which queries keep nothing."""
    out = tensor((2, 3, blocks * BLOCK, head_dim), layout, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    # In the memory order of tokens, then heads: results need not be contiguous.
    lse = (8 * torch.randn(2, blocks * BLOCK, 3, dtype=wide)).to(DEVICE).transpose(1, 2)
    out[:, :, nothing], lse[:, :, nothing] = 0, NOTHING
    return out, lse


def exact(out, lse, part) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the merged results in float64."""
    out, lse, part_out, part_lse = (t.double() for t in (out, lse, *part))
    both = torch.stack([lse, part_lse])
    weights = (both - both.amax(0).clamp(min=-1e300)).exp()
    weights = weights / weights.sum(0).clamp(min=1e-300)
    return weights[0, ..., None] * out + weights[1, ..., None] * part_out, both.logsumexp(0)


CASES = [("heads first", torch.float16, 32), ("tokens first", torch.float32, 20), ("sliced", torch.float16, 7)]
CASES += [("head_dim first", torch.float32, 33), ("tokens first", torch.float64, 16), ("heads first", torch.bfloat16, 24)]


@parametrize("layout, dtype, head_dim", CASES, ids=str)
def test_two_partial_results_merge_to_what_softmax_over_both_gives(merger, layout, dtype, head_dim):
    torch.manual_seed(0)
    # 10 to 19: nothing in the part. 25 to 29: nothing in either. 30 to 34: nothing before.
    out, lse = results(BLOCKS, dtype, layout, head_dim, slice(25, 35))
    part = results(BLOCKS, dtype, "tokens first", head_dim, slice(10, 20))
    part[0][:, :, 25:30], part[1][:, :, 25:30] = 0, NOTHING
    wanted, wanted_lse = exact(out, lse, part)
    strides, before = out.stride(), out.clone()
    calls.merge(out, lse, part)
    assert out.stride() == strides and out.dtype == dtype and torch.equal(out[:, :, 10:20], before[:, :, 10:20])
    rounding = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=rounding, atol=rounding)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=min(rounding, 2e-6), atol=min(rounding, 2e-6))


def test_rows_of_many_programs_merge_by_one_weight_each(merger):
    """Many, as warps that change the lse which others still read differ in a few rows of thousands."""
    tokens = 1 << 16 if DEVICE == "cuda" else 64
    out, part = torch.zeros(2, 1, 8, tokens, 128, dtype=torch.bfloat16, device=DEVICE)
    part += 1
    lse, part_lse = (8 * torch.randn(1, 8, tokens, device=DEVICE) for _ in range(2))
    wanted = torch.sigmoid(part_lse - lse)
    calls.merge(out, lse, (part, part_lse))
    # Triton's interpreter cuts float32 off to bfloat16.
    torch.testing.assert_close(out.float(), wanted[..., None].expand_as(out), rtol=2**-7, atol=1e-6)


def test_a_nan_in_either_part_stays_visible(merger):
    (out, lse), part = (results(BLOCKS, torch.float32, "heads first", 16, slice(0)) for _ in range(2))
    lse[0, 0, 7], part[1][0, 0, 9] = float("nan"), float("nan")
    calls.merge(out, lse, part)
    assert out.isnan().all(-1).sum() == lse.isnan().sum() == 2


# Blocks 1 and 4 of the second go nowhere.
@parametrize("sources", [[[0], [1], [2]], [[3], [], [5, 0, 2]]], ids=["one each", "several"])
@parametrize("layout, dtype, head_dim", CASES, ids=str)
def test_gradients_are_added_to_the_listed_blocks_in_their_order_and_rounded_once(merger, layout, dtype, head_dim, sources):
    torch.manual_seed(2)
    whole, part = (tensor((2, 3, n * BLOCK, head_dim), layout, dtype=dtype) for n in (BLOCKS, 6))
    wanted = whole.to(torch.promote_types(dtype, torch.float32))
    for row, blocks in zip(LISTED, sources, strict=True):
        for block in blocks:
            wanted[:, :, row * BLOCK : (row + 1) * BLOCK] += part[:, :, block * BLOCK : (block + 1) * BLOCK]
    first = [0, *accumulate(map(len, sources))]
    addends = tuple(torch.tensor(x, device=DEVICE) for x in (first, list(chain(*sources))))
    calls.add_blocks(whole, part, torch.tensor(LISTED, device=DEVICE), BLOCK, addends)
    # Triton's interpreter cuts float32 off to bfloat16.
    torch.testing.assert_close(whole, wanted.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)


@parametrize("blocks", [None, [4, 0, 1, 0]], ids=["all blocks", "listed blocks"])
def test_keys_and_values_of_different_widths_are_packed_block_by_block(merger, blocks):
    k, v = (tensor((2, 3, BLOCKS * BLOCK, dim), "tokens first", dtype=torch.float16) for dim in (40, 24))
    chosen = torch.tensor(range(BLOCKS) if blocks is None else blocks, device=DEVICE)
    packed = transfer.empty_blocks(k, v, len(chosen), BLOCK)
    transfer.pack(k, v, packed, None if blocks is None else chosen)
    tokens = (chosen[:, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten()
    for x, of_packed in zip((k, v), transfer.unpack(packed, 40), strict=True):
        assert torch.equal(of_packed, x[:, :, tokens])
