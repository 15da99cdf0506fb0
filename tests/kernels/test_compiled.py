"""The kernels as compiled for a Hopper GPU, without one."""

import json

import pytest
import torch
from outcomes import SPILLS, outcomes_of, spills_of

from sparse_flash.kernels.portable import configs

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.compiles

SHARED_LIMIT = 232448  # bytes a program may take on sm_90
# Kernels with products of key blocks chosen by query.
OF_SELECTIONS = {"picked_parts", "visit_blocks", "picked_grads", "always_grads", "hopper_picked_parts", "hopper_picked_grads"}
# Those without products, which add or convert what others read or wrote.
WITHOUT_PRODUCTS = (
    "sum_shares",
    *(f"hopper_{name}" for name in ("prepare", "finish", "combine", "bound", "quantize", "scale", "summarize")),
)


@pytest.fixture(scope="module")
def every():
    return outcomes_of("sm90.py")


@pytest.fixture(scope="module")
def of_group(every):
    return lambda *names: [k for k in every if k["group"] in names]


@pytest.fixture(scope="module")
def kernels(of_group):
    """Of attention and of decoding, with products."""
    return [k for k in of_group("attention", "decoding") if not k["kernel"].startswith(WITHOUT_PRODUCTS)]


def run_together(kernel: dict, programs: int) -> bool:
    """Whether so many programs share a multiprocessor: 228 KiB, of which each program reserves 1 KiB, and 65,536 registers."""
    return programs * (kernel["shared"] + 1024) <= 228 * 1024 and programs * 32 * kernel["warps"] * kernel["reg"] <= 65536


def test_every_kernel_fits_the_shared_memory_of_hopper(every):
    names = {k["kernel"] for k in every}
    assert names >= {"decode", *configs.KERNELS, "hopper_forward", "hopper_backward", "log_sums", "hopper_log_sums"}
    assert names >= {"visited_blocks", "selection_keys", "sum_key_grads", "preprocess_backward", "selection_decode"} | OF_SELECTIONS
    assert [k for k in every if k["shared"] > SHARED_LIMIT] == []


def test_kernels_spill_no_more_than_recorded_and_least_in_the_loop_over_full_blocks(every):
    """After a change that should spill more, `make record` writes the file anew."""
    record = json.loads(SPILLS.read_text())
    if triton.__version__ != record["triton"]:
        pytest.skip(f"spills are recorded of Triton {record['triton']}, not of {triton.__version__}")
    known, found = record["spills"], spills_of(every)
    assert {name: most for name, most in found.items() if any(map(int.__gt__, most, known.get(name, (0, 0))))} == {}


def test_kernels_that_move_merge_or_pick_do_not_spill(of_group):
    assert [k for k in of_group("packed", "merges", "choices") if k["stack"]] == []
    assert [k for k in of_group("choosers") if k["stack"] > 64] == []


def test_products_of_selections_and_choosers_run_on_tensor_cores_and_gathered_rows_are_copied_asynchronously(of_group):
    of_choosers, of_selections = of_group("choosers"), of_group("selections")
    assert all(k["wgmma"] > 0 for k in of_choosers if k["kernel"].endswith("log_sums")), of_choosers
    of_products = [k for k in of_selections if k["kernel"] in OF_SELECTIONS]
    assert all(k["wgmma"] > 0 and k["mma"] == 0 and k["tma"] > 0 for k in of_products), of_products
    gathering = [k for k in of_products if k["kernel"] in ("picked_parts", "picked_grads") and k["stages"] > 1]
    # Of blocks of several steps, the portable forward kernel copies keys ahead.
    gathering = [k for k in gathering if k["kernel"] != "picked_parts" or int(k["case"][3]) == k["keys"]]
    gathering += [k for k in of_products if k["kernel"].startswith("hopper")]
    assert gathering and all(k["async"] > 0 for k in gathering), gathering
    assert all(run_together(k, 2) for k in of_products if k["kernel"] in ("picked_parts", "visit_blocks")), of_products
    decoding = [k for k in of_selections if k["kernel"] == "selection_decode"]
    assert all(k["async"] > 0 and k["mma"] > 0 and run_together(k, 3) for k in decoding), decoding


def test_two_programs_of_the_kernel_that_picks_blocks_share_a_multiprocessor(of_group):
    picking = [k for k in of_group("choices") if k["kernel"] == "pick_blocks"]
    assert picking and all(k["shared"] <= 72 << 10 for k in picking), picking
    assert [k["wgmma"] > 0 for k in picking] == [k["case"][0] != "given" for k in picking]


def test_kernels_that_merge_load_16_bytes_at_a_time_and_read_a_tiles_lse_before_it_is_written(of_group):
    kinds = of_group("merges")
    assert {k["kernel"] for k in kinds} == {"merge", "move"}
    wide = [k for k in kinds if k["dim"] in (64, 128, 256) and k["case"][0] != "torch.float64"]
    # A copy reads one tensor, all others two. Sixteen warps or more share a multiprocessor.
    assert len(wide) == 12 and all(k["wide"] == (4 if k["copies"] else 8) for k in wide), wide
    assert all(65536 // (128 * k["reg"]) >= 4 for k in wide), wide
    assert all(k["waits"] for k in kinds if k["kernel"] == "merge"), kinds


def test_a_thread_draws_once_for_four_pairs_also_where_tokens_stand_elsewhere(kernels):
    for name in ("forward", "grad_kv"):
        (k,) = (k for k in kernels if k["kernel"] == f"{name}_of_positions")
        config = configs.HOPPER.config(name, torch.bfloat16, 128)
        draws = config.tile_m * config.tile_n // (32 * k["warps"]) // 4
        # Seven products per draw in each of three loops, plus one draw per program; twice as many if pairs drew by two.
        assert 3 * 5 * draws <= k["products"] <= 3 * 7 * draws + 40, k


def test_products_run_on_tensor_cores_and_tiles_come_without_passing_through_registers(kernels):
    for k in kernels:
        if k["kernel"].startswith("decode"):  # tiles with few rows; rows of keys in pages, which the copy engine cannot address
            assert k["wgmma"] + k["mma"] > 0 and k["async"] > 0, k
        elif k["kernel"].endswith("_of_small_blocks"):  # fewer rows than a product of wgmma has
            assert k["mma"] > 0 and k["tma"] > 0, k
        else:
            assert k["wgmma"] > 0 and k["tma"] > 0, k


def test_an_e4m3_cache_is_converted_two_numbers_at_a_time_and_copied_16_bytes_at_a_time(kernels):
    of_e4m3 = [k for k in kernels if k["kernel"] == "decode_of_e4m3"]
    assert len(of_e4m3) == 8 and [k for k in of_e4m3 if k["in_full_blocks"]] == []
    for k in of_e4m3:
        # Each number of a step's keys and values once in a loop, by some warp, and in two loops at most.
        least = 2 * k["keys"] * k["dim"] // (32 * k["warps"]) // 2
        assert k["converted"] >= least and k["converted"] % least == 0 and k["async"] > 0, k


def test_parameters_of_compiled_kernels_are_those_that_repeated_launches_pack(every):
    assert [k for k in every if not k["repeatable"]] == []


def test_a_thread_draws_once_for_the_four_pairs_of_dropout_that_it_holds(kernels):
    def one(name: str, dim: int) -> dict:
        return next(k for k in kernels if (k["kernel"], k["dim"], k["sparse"]) == (name, dim, False))

    for name in configs.KERNELS:
        config, plain, dropped = configs.HOPPER.config(name, torch.bfloat16, 64), one(name, 64), one(f"{name}_of_dropout", 64)
        draws = config.tile_m * config.tile_n // (32 * dropped["warps"]) // 4
        # Seven products per draw in both loops of a dense kernel, plus one draw per program.
        assert 2 * 6 * draws <= dropped["products"] - plain["products"] <= 2 * 7 * draws + 40, dropped
        assert dropped["shared"] == plain["shared"], dropped
    # Draws per thread in a step; places where weights are computed, in the forward pass for each of two warp groups.
    for name, draws, places in (("hopper_forward", 64 * 128 // 128 // 4, 2 * 2), ("hopper_backward", 128 * 64 // 256 // 4, 1)):
        for dim in (64, 128):
            plain, dropped = one(name, dim), one(f"{name}_of_dropout", dim)
            assert places * 5 * draws <= dropped["products"] - plain["products"] <= places * (7 * draws + 20), dropped


def test_the_assembler_runs_no_hopper_product_alone(every):
    # With Triton 3.8 it does so at head_dim 128 in blocks of 64, whose two programs leave each 128 registers (docs/versions.md).
    of_64 = {"hopper_backward_of_64", "hopper_backward_of_lengths_of_64"}
    known = {(kernel, 128) for kernel in of_64} if triton.__version__.startswith("3.8.") else set()
    found = [k for k in every if k["kernel"].startswith("hopper")]
    assert found and all(k["log"] > 0 for k in found), "an assembler's log was not read"
    assert {(k["kernel"], k["dim"]) for k in found if k["serialized"]} == known


def test_every_product_of_attention_in_eight_bits_is_of_e4m3(kernels):
    found = [k for k in kernels if "eight_bits" in k["kernel"]]
    assert {(k["kernel"], k["dim"]) for k in found} >= {("hopper_forward_of_eight_bits", dim) for dim in (64, 128)}
    for k in kernels:
        assert k["e4m3"] == (k["wgmma"] if k in found else 0), k


def test_two_programs_share_a_multiprocessor(kernels):
    named = ("forward", "decode", "decode_of_e4m3")
    of_four = [k for k in kernels if k["kernel"] in named and k["warps"] == 4]
    assert {k["kernel"] for k in of_four} == set(named)
    of_hopper = [k for k in kernels if k["kernel"].startswith("hopper") and k["dim"] <= 128]
    of_four += [k for k in of_hopper if k["kernel"] in ("hopper_forward_of_64", "hopper_backward_of_64", "hopper_forward_of_short")]
    of_128 = [k for k in kernels if k["kernel"] == "decode_of_e4m3" and k["keys"] == 128]
    assert len(of_128) == 1
    assert [k for k in (*of_four, *of_128) if not run_together(k, 2)] == []


def test_hopper_names_a_score_function_that_gluon_cannot_compile():
    elementwise, unknown, *others = outcomes_of("own_scores.py")
    assert elementwise is None
    assert unknown == "it does not read score_params of torch.complex64"
    assert len(others) == 4 and all("cannot compile the score_mod __main__.in_torch#" in refusal for refusal in others), others
    assert all("its results are not a float32 tile" in refusal for refusal in others[2:]), others
