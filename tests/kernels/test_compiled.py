"""The kernels as compiled for a Hopper GPU, without one."""

import pytest
import torch
from outcomes import outcomes_of, spills_beyond_the_record

from sparse_flash.kernels.portable import configs

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.compiles

SHARED_LIMIT = 232448  # bytes a program may take on sm_90


@pytest.fixture(scope="module")
def kernels():
    return outcomes_of("sm90.py")


def test_every_kernel_fits_the_shared_memory_of_hopper(kernels):
    assert {k["kernel"] for k in kernels} >= {"decode", *configs.KERNELS, "hopper_forward", "hopper_backward"}
    assert [k for k in kernels if k["shared"] > SHARED_LIMIT] == []


def test_kernels_spill_no_more_than_recorded_and_least_in_the_loop_over_full_blocks(kernels):
    """After a change that should spill more, `make record` writes the file anew."""
    assert spills_beyond_the_record(kernels) == {}


def test_products_run_on_tensor_cores_and_tiles_come_without_passing_through_registers(kernels):
    for k in kernels:
        if k["kernel"].startswith("decode"):  # tiles with few rows; rows of keys in pages, which the copy engine cannot address
            assert k["wgmma"] + k["mma"] > 0 and k["async"] > 0, k
        elif k["kernel"].endswith("_of_small_blocks"):  # fewer rows than a product of wgmma has
            assert k["mma"] > 0 and k["tma"] > 0, k
        else:
            assert (k["wgmma"] > 0 or k["kernel"].startswith("combine_columns")) and k["tma"] > 0, k  # which only adds


def test_an_e4m3_cache_is_converted_two_numbers_at_a_time_and_copied_16_bytes_at_a_time(kernels):
    of_e4m3 = [k for k in kernels if k["kernel"] == "decode_e4m3"]
    assert len(of_e4m3) == 16 and [k for k in of_e4m3 if k["stack"]] == []
    for k in of_e4m3:
        # Each number of a step's keys and values once in a loop, by some warp, and in two loops at most.
        least = 2 * k["keys"] * k["dim"] // (32 * k["warps"]) // 2
        assert k["converted"] >= least and k["converted"] % least == 0 and k["async"] > 0, k


def test_parameters_of_compiled_kernels_are_those_that_repeated_launches_pack(kernels):
    assert all(k["repeatable"] for k in kernels), kernels


def test_a_thread_draws_once_for_the_four_pairs_of_dropout_that_it_holds(kernels):
    for name in configs.KERNELS:
        config = configs.HOPPER.config(name, torch.bfloat16, 64)
        plain, dropped = (
            next(k for k in kernels if (k["kernel"], k["dim"], k["sparse"]) == (kernel, 64, False))
            for kernel in (name, f"{name}_of_dropout")
        )
        draws = config.tile_m * config.tile_n // (32 * dropped["warps"]) // 4
        # Seven products per draw in both loops of a dense kernel, plus one draw per program.
        assert 2 * 6 * draws <= dropped["products"] - plain["products"] <= 2 * 7 * draws + 40, dropped
        assert dropped["shared"] == plain["shared"], dropped


def test_a_thread_of_the_hopper_kernels_draws_once_for_the_four_pairs_of_dropout_that_it_holds(kernels):
    # Draws per thread in a step; places where weights are computed, in the forward pass for each of two warp groups.
    for name, draws, places in (("hopper_forward", 64 * 128 // 128 // 4, 2 * 2), ("hopper_backward", 128 * 64 // 256 // 4, 1)):
        for dim in (64, 128):
            plain = next(k for k in kernels if (k["kernel"], k["dim"], k["sparse"]) == (name, dim, False))
            dropped = [k for k in kernels if (k["kernel"], k["dim"]) == (f"{name}_of_dropout", dim)]
            assert dropped
            for k in dropped:
                assert places * 5 * draws <= k["products"] - plain["products"] <= places * (7 * draws + 20), k


def test_the_assembler_runs_no_hopper_product_alone(kernels):
    # With Triton 3.8 it does so at head_dim 128 in blocks of 64, whose two programs leave each 128 registers (docs/versions.md).
    of_64 = {"hopper_backward_of_64", "hopper_backward_of_lengths_of_64"}
    known = {(kernel, 128) for kernel in of_64} if triton.__version__.startswith("3.8.") else set()
    assert all(k["log"] > 0 for k in kernels), "an assembler's log was not read"
    assert {(k["kernel"], k["dim"]) for k in kernels if k["serialized"] and k["kernel"].startswith("hopper")} == known


def test_every_product_of_attention_in_eight_bits_is_of_e4m3(kernels):
    found = [k for k in kernels if "eight_bits" in k["kernel"]]
    assert {(k["kernel"], k["dim"]) for k in found} >= {("hopper_forward_of_eight_bits", dim) for dim in (64, 128)}
    for k in kernels:
        assert k["e4m3"] == (k["wgmma"] if k in found else 0), k


def test_two_programs_of_four_warps_share_a_multiprocessor(kernels):
    # 228 KiB per multiprocessor, of which each program reserves 1 KiB; 65,536 registers, four warps per program.
    of_four = [k for k in kernels if k["kernel"] in ("forward", "decode", "decode_e4m3") and k["warps"] == 4]
    assert {k["kernel"] for k in of_four} == {"forward", "decode", "decode_e4m3"}
    of_four += [k for k in kernels if k["kernel"].endswith(("of_64", "of_short")) and k["kernel"].startswith("hopper")]
    assert [k for k in of_four if 2 * (k["shared"] + 1024) > 228 * 1024 or 2 * 128 * k["reg"] > 65536] == []


def test_two_programs_of_eight_warps_that_decode_in_steps_of_128_share_a_multiprocessor(kernels):
    of_128 = [k for k in kernels if k["kernel"] == "decode_e4m3" and k["keys"] == 128]
    assert len(of_128) == 1
    assert [k for k in of_128 if 2 * (k["shared"] + 1024) > 228 * 1024 or 2 * 256 * k["reg"] > 65536] == []


def test_hopper_names_a_score_function_that_gluon_cannot_compile():
    elementwise, unknown, *others = outcomes_of("own_scores.py")
    assert elementwise is None
    assert unknown == "it does not read score_params of torch.complex64"
    assert len(others) == 4 and all("cannot compile the score_mod __main__.in_torch#" in refusal for refusal in others), others
    assert all("its results are not a float32 tile" in refusal for refusal in others[2:]), others
