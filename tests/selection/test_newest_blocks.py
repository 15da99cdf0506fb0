"""The kernels by which the newest queries of a cache choose blocks do what the PyTorch operations do."""

import pytest
import torch
from accepted import needs_triton
from oracle import DEVICE, tensor

from sparse_flash.kernels.selection import newest_blocks as kernels
from sparse_flash.selection import newest

pytestmark = [needs_triton, pytest.mark.usefixtures("poison")]
parametrize = pytest.mark.parametrize


def chosen_by_operations(q, means, *call):
    """In float64 the operations choose, on a GPU too."""
    return newest.choose_newest(q.double(), means.double(), *call)


@parametrize(
    # One program for a query, and several; more are kept than a program has blocks; head_dim no power of two.
    "pickers, heads, q_len, length, head_dim, block, keep, dtype",
    [
        (2, 8, 1, 1000, 64, 16, 4, torch.float16),
        (1, 2, 2, 1500, 32, 16, 16, torch.float32),
        (2, 2, 1, 2500, 40, 16, 70, torch.float32),
        (4, 4, 2, 300, 128, 64, 1, torch.float16),
    ],
)
def test_newest_queries_choose_what_operations_choose(pickers, heads, q_len, length, head_dim, block, keep, dtype):
    generator = torch.Generator().manual_seed(keep)
    q = tensor((4, heads, q_len, head_dim), dtype=dtype, generator=generator)
    means = tensor((4, min(pickers, 2), length // block + 1, head_dim), dtype=torch.float32, generator=generator)[:, :, :-1]
    lens = torch.tensor([length, 0, block + 1, length - 2 * block + 3], dtype=torch.int32, device=DEVICE)
    found = kernels.pick_decode_blocks(q, means, lens, length, keep, block, pickers)
    assert torch.equal(found, chosen_by_operations(q, means, lens, length, keep, block, pickers < heads))
    assert (found[0] >= 0).all() and (found[1] < 0).all()
    # Without lengths; and counters are zeros again.
    found = kernels.pick_decode_blocks(q[:1], means[:1], None, length, keep, block, pickers)
    assert torch.equal(found, chosen_by_operations(q[:1], means[:1], None, length, keep, block, pickers < heads))


def test_of_equal_scores_the_first_block_is_chosen_and_no_number_never():
    q = torch.ones(1, 1, 1, 16, device=DEVICE)
    means = torch.zeros(1, 1, 200, 16, device=DEVICE)
    means[0, 0, [3, 150]] = torch.tensor([float("nan"), -float("inf")], device=DEVICE)[:, None]
    means[0, 0, [0, 100]] = -0.0
    means[0, 0, [70, 71, 130]] = 1.0
    found = kernels.pick_decode_blocks(q, means, None, 200 * 16, 8, 16, 1)
    assert found.flatten().tolist() == [0, 1, 2, 4, 70, 71, 130, 199]
    means[:] = float("nan")
    assert kernels.pick_decode_blocks(q, means, None, 200 * 16, 8, 16, 1).flatten().tolist() == [199, *[-1] * 7]


@parametrize("page", [None, 8, 32])
@parametrize(
    "block, head_dim, dtype, tokens", [(16, 32, torch.float32, 1), (16, 24, torch.float16, 40), (128, 64, torch.float32, 3)]
)
def test_means_of_blocks_that_became_whole_are_what_operations_compute(page, block, head_dim, dtype, tokens):
    k = tensor((4, 2, 256, head_dim), dtype=dtype, generator=torch.Generator().manual_seed(block))
    lens = torch.tensor([256, 0, block + 1, 128], dtype=torch.int32, device=DEVICE)
    table = None
    if page:
        k = torch.cat([torch.full((1, 2, page, head_dim), float("nan"), dtype=dtype, device=DEVICE), *k.split(page, 2)])
        table = (torch.arange(256 // page, device=DEVICE) * 4 + torch.arange(4, device=DEVICE)[:, None] + 1).to(torch.int32)
    for kv_lens in (lens, None):
        found, wanted = (
            torch.full((4, 2, 256 // block + 1, head_dim), 7.0, dtype=d, device=DEVICE) for d in (torch.float32, torch.float64)
        )
        touched = (tokens + block - 2) // block + 1
        kernels.update_means(found, k, 256 // block, touched, block, kv_lens, table)
        newest.update_means(wanted, k, tokens, block, kv_lens, table)
        torch.testing.assert_close(found[:, :, :-1].double(), wanted[:, :, :-1], rtol=1e-6, atol=1e-6)
        assert (found == 7.0).any() or touched >= 256 // block  # blocks that no token entered


def test_operators_of_the_newest_queries_pass_opcheck():
    q, k = (tensor((2, heads, tokens, 32), dtype=torch.float16) for heads, tokens in ((4, 1), (2, 64)))
    means = torch.zeros(2, 2, 5, 32, device=DEVICE)
    torch.library.opcheck(newest._choose_operator, (q, means[:, :, :-1], None, 64, 3, 16, 2))
    torch.library.opcheck(newest._update_operator, (means, k, 4, 1, 16, None, None))
