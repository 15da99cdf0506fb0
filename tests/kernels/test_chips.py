"""The portable kernels on chips other than Hopper: how they address tiles, their configs, and what they compile to."""

from itertools import product

import pytest
import torch
from oracle import LAYOUTS, check

pytest.importorskip("triton")

import chips
from triton.runtime.errors import OutOfResources

from sparse_flash.core import hopper
from sparse_flash.core import triton as triton_backend
from sparse_flash.core.description import Call
from sparse_flash.kernels.launch import launch
from sparse_flash.kernels.portable import configs, forward

parametrize = pytest.mark.parametrize


@pytest.fixture
def pointers(monkeypatch, poison):
    """Gives kernels pointers instead of descriptors, as on chips that cannot address tiles."""
    monkeypatch.setattr(launch, "can_address_tiles", lambda device: False)


ROWS = [(torch.float16, 40, 20, layout) for layout in LAYOUTS] + [(torch.float32, 20, 20, "heads first")]


@parametrize("dtype, head_dim, v_head_dim, layout", ROWS, ids=str)
def test_tiles_by_pointers_are_right(pointers, dtype, head_dim, v_head_dim, layout):
    options = {"dtype": dtype, "head_dim": head_dim, "v_head_dim": v_head_dim, "layout": layout}
    check("triton", "causal & local(20)", 33, 40, kv_heads=1, block_size=32, **options)


@parametrize("capability, kib, like", [((11, 0), 227, "9.0"), ((13, 0), 200, "8.0"), ((13, 0), 128, "8.6")])
def test_a_chip_that_is_not_compiled_for_gets_the_tiles_of_one_that_is(capability, kib, like, monkeypatch):
    chip = configs.Gpu(capability, kib * 1024)
    for kernel, dim in product(("forward", "grad_q", "grad_kv", "decode"), (16, 32, 64, 128, 256)):
        assert chip.config(kernel, torch.bfloat16, dim) == chips.CHIPS[like].config(kernel, torch.bfloat16, dim)
    monkeypatch.setattr(configs, "detect_gpu", lambda device: chip)
    monkeypatch.setattr(triton_backend, "why_unavailable", lambda: None)


REFUSED = {
    "Triton needs compute capability 8.0 or newer; this GPU has 7.5": ((7, 5), 64),
    "its tiles need 99 KiB of shared memory a program; this GPU has 48": ((13, 0), 48),
}


@parametrize("reason", REFUSED)
def test_a_chip_that_no_tiles_fit_is_refused_by_name(monkeypatch, reason):
    chip, kib = REFUSED[reason]
    monkeypatch.setattr(configs, "detect_gpu", lambda device: configs.Gpu(chip, kib * 1024))
    monkeypatch.setattr(triton_backend, "why_unavailable", lambda: None)
    monkeypatch.setattr(triton_backend, "is_interpreted", lambda: False)
    call = Call(torch.device("cuda", 0), torch.bfloat16, 1, 1, 1, 64, 64, 64, 64, None)
    assert triton_backend.supports(call) == reason


def test_amds_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(triton_backend, "is_interpreted", lambda: False)
    for module in (hopper, triton_backend):
        assert "needs an NVIDIA GPU" in module.why_unavailable.__wrapped__.__wrapped__()


def test_a_kernel_that_does_not_fit_takes_smaller_tiles_and_is_not_tried_again(monkeypatch):
    """Forward launches fail as Triton's do if a tile's keys times stages exceed a limit."""
    ran, as_it_is, limit = [], launch.launch, 32

    def launched(kernel, grid, arguments, constants, options, *more):
        if kernel is forward.attention_forward_kernel:
            shape = constants["SHAPE"].of  # whose numbers are plain
            needed = shape.TILE_N * options["num_stages"]
            ran.append((shape.TILE_M, shape.TILE_N, options["num_stages"], needed <= limit))
            if needed > limit:
                raise OutOfResources(needed, limit, "shared memory")
        return as_it_is(kernel, grid, arguments, constants, options, *more)

    monkeypatch.setattr(launch, "launch", launched)
    monkeypatch.setattr(launch, "fitting_configs", {})
    for _ in range(2):
        check("triton", None, 40, dtype=torch.float16, lse_gradient=False)
    first = ran.index((32, 32, 1, True))
    assert first and not any(fits for *_, fits in ran[:first]) and set(ran[first:]) == {(32, 32, 1, True)}


def test_what_fits_in_no_tiles_says_so_and_what_else_to_do():
    def never(config):
        raise OutOfResources(70000, 65536, "shared memory")

    with pytest.raises(ValueError, match=r"70000 bytes of shared memory .* this GPU has 65536; pass backend='torch'"):
        launch.run_within_memory(never, configs.Config(128, 64, 8, 3), lambda: ("never",))


@pytest.fixture(scope="module")
def table():
    return chips.read()


def test_the_table_of_chips_is_of_these_kernels_and_configs_and_has_each_kernel_for_each_chip(table):
    wanted, found = chips.wanted(), set(map(chips.key_of, table))
    assert found <= wanted.keys(), "run 'make chips'"
    assert found >= chips.wanted(chips.REPRESENTATIVES).keys(), "run 'make chips'"


def test_every_compiled_kernel_fits_its_chip(table):
    assert {row["chip"] for row in table} == set(chips.CHIPS)
    assert [row for row in table if int(row["shared"]) > chips.CHIPS[row["chip"]].shared] == []


def test_products_run_on_the_matrix_units_of_each_chip(table):
    units = {"9.0": "wgmma.mma_async", "10.0": "tcgen05.mma"}
    rows = [row for row in table if row["kernel"] in configs.KERNELS and row["dtype"] == "bf16" and row["table_block"] != "16"]
    assert [row for row in rows if row["products"] != units.get(row["chip"], "mma.sync")] == []
