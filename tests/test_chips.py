"""The portable kernels on chips other than Hopper: how they address tiles, their configs, and what they compile to."""

import pytest
import torch
from oracle import LAYOUTS, check

pytest.importorskip("triton")

from sparse_flash.kernels import launch

parametrize = pytest.mark.parametrize


@pytest.fixture
def pointers(monkeypatch, poison):
    """Kernels get pointers in place of descriptors, as on chips that cannot address tiles; what they got."""
    made, rows_of = [], launch.rows_of
    monkeypatch.setattr(launch, "rows_of", lambda tensor, dim: made.append(rows_of(tensor, dim)) or made[-1])
    monkeypatch.setattr(launch, "addresses_tiles", lambda device: False)
    return made


@parametrize("layout", LAYOUTS)
def test_tiles_by_pointers_are_right_in_every_memory_order(pointers, layout):
    check("triton", "causal & local(20)", 40, 50, dtype=torch.float16, layout=layout, kv_heads=1, head_dim=40, block_size=32)
    assert len(pointers) == 16  # four of the forward pass, six of each backward one


@parametrize("dtype, head_dim", [(torch.float16, 16), (torch.bfloat16, 72), (torch.float32, 20), (torch.float32, 32)], ids=str)
def test_tiles_by_pointers_are_right_in_every_dtype(pointers, dtype, head_dim):
    check("triton", None, 33, 33, dtype=dtype, head_dim=head_dim)
    assert len(pointers) == 16


def test_tiles_by_pointers_are_right_where_v_has_a_head_dim_of_its_own(pointers):
    check("triton", "causal", 33, 40, dtype=torch.float16, head_dim=40, v_head_dim=20, block_size=32, heads=1)


def test_launches_by_pointers_are_known_again_by_all_that_triton_compiles_them_for():
    def variant(*shape, dim=64):
        return launch.rows_variant(launch.rows_of(torch.empty(shape, dtype=torch.float16), dim))

    assert variant(2, 4, 160, 64) == variant(3, 4, 320, 64)
    others = [(2, 4, 161, 64), (2, 4, 1, 64), (2, 4, 160, 40), (2, 4, 160, 8)]
    assert len({variant(2, 4, 160, 64), *(variant(*shape) for shape in others)}) == 5
