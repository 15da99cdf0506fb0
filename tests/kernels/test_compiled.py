"""The kernels as compiled for a Hopper GPU, without one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from outcomes import outcomes_of, spills_beyond_the_record

from sparse_flash.kernels.portable import configs

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.compiles

SHARED_LIMIT = 232448  # bytes a program may take on sm_90
# Kernels with products of key blocks chosen by query.
OF_SELECTIONS = {"picked_parts", "visit_blocks", "picked_grads", "always_grads", "hopper_picked_parts", "hopper_picked_grads"}


# The programs whose outcomes tests read, the longest first.
PROGRAMS = {"kernels": ("sm90.py",), "own scores": ("own_scores.py",)}
PROGRAMS |= {group: ("sm90_launches.py", group) for group in ("selections", "choosers", "choices", "merges")}


@pytest.fixture(scope="module")
def outcomes():
    """A function from the name of a program to its outcomes. Two programs run at a time."""
    threads = ThreadPoolExecutor(2)
    running = {name: threads.submit(outcomes_of, *program) for name, program in PROGRAMS.items()}
    yield lambda name: running[name].result()
    threads.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def kernels(outcomes):
    return outcomes("kernels")


@pytest.fixture(scope="module")
def of_selections(outcomes):
    return outcomes("selections")


@pytest.fixture(scope="module")
def of_choosers(outcomes):
    return outcomes("choosers")


def run_together(kernel: dict, programs: int, warps: int = 4) -> bool:
    """Whether so many programs share a multiprocessor: 228 KiB, of which each program reserves 1 KiB, and 65,536 registers."""
    return programs * (kernel["shared"] + 1024) <= 228 * 1024 and programs * 32 * warps * kernel["reg"] <= 65536


def test_every_kernel_fits_the_shared_memory_of_hopper(kernels, of_selections, of_choosers):
    assert {k["kernel"] for k in kernels} >= {"decode", *configs.KERNELS, "hopper_forward", "hopper_backward"}
    assert {k["kernel"] for k in of_choosers} >= {"log_sums", "hopper_log_sums"}
    others = {"visited_blocks", "selection_keys", "sum_key_grads", "preprocess_backward", "selection_decode"}
    assert {k["kernel"] for k in of_selections} >= others | OF_SELECTIONS
    assert [k for k in (*kernels, *of_selections, *of_choosers) if k["shared"] > SHARED_LIMIT] == []


def test_kernels_spill_no_more_than_recorded_and_least_in_the_loop_over_full_blocks(kernels, of_selections, of_choosers):
    """After a change that should spill more, `make record` writes the file anew."""
    assert all(k["stack"] <= 64 for k in of_choosers), of_choosers
    assert spills_beyond_the_record([*kernels, *of_selections]) == {}


def test_products_of_selections_and_choosers_run_on_tensor_cores_and_gathered_rows_are_copied_asynchronously(
    of_selections, of_choosers
):
    assert all(k["wgmma"] > 0 for k in of_choosers if k["kernel"].endswith("log_sums")), of_choosers
    of_products = [k for k in of_selections if k["kernel"] in OF_SELECTIONS]
    assert all(k["wgmma"] > 0 and k["mma"] == 0 and k["tma"] > 0 for k in of_products), of_products
    gathering = [k for k in of_products if k["kernel"] in ("picked_parts", "picked_grads") and k["num_stages"] > 1]
    # Of blocks of several steps, the portable forward kernel copies keys ahead.
    gathering = [k for k in gathering if k["kernel"] != "picked_parts" or int(k["case"][3]) == k["tile_n"]]
    gathering += [k for k in of_products if k["kernel"].startswith("hopper")]
    assert gathering and all(k["async"] > 0 for k in gathering), gathering
    assert all(run_together(k, 2) for k in of_products if k["kernel"] in ("picked_parts", "visit_blocks")), of_products
    decoding = [k for k in of_selections if k["kernel"] == "selection_decode"]
    assert all(k["async"] > 0 and k["mma"] > 0 and run_together(k, 3) for k in decoding), decoding


def test_the_kernel_that_picks_blocks_does_not_spill_and_two_programs_share_a_multiprocessor(outcomes):
    kinds = outcomes("choices")
    assert len(kinds) == 11 and all(k["stack"] == 0 and k["shared"] <= 72 << 10 for k in kinds), kinds
    assert [k["wgmma"] > 0 for k in kinds] == [k["case"][0] != "given" for k in kinds]


def test_kernels_that_merge_do_not_spill_load_16_bytes_at_a_time_and_read_a_tiles_lse_before_it_is_written(outcomes):
    kinds = outcomes("merges")
    assert {k["kernel"] for k in kinds} == {"merge", "move"} and all(k["stack"] == 0 for k in kinds), kinds
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


def test_the_assembler_runs_no_hopper_product_alone(kernels, of_selections, of_choosers):
    # With Triton 3.8 it does so at head_dim 128 in blocks of 64, whose two programs leave each 128 registers (docs/versions.md).
    of_64 = {"hopper_backward_of_64", "hopper_backward_of_lengths_of_64"}
    known = {(kernel, 128) for kernel in of_64} if triton.__version__.startswith("3.8.") else set()
    assert all(k["log"] > 0 for k in kernels), "an assembler's log was not read"
    found = [k for k in (*kernels, *of_selections, *of_choosers) if k["kernel"].startswith("hopper")]
    assert {(k["kernel"], k["dim"]) for k in found if k["serialized"]} == known


def test_every_product_of_attention_in_eight_bits_is_of_e4m3(kernels):
    found = [k for k in kernels if "eight_bits" in k["kernel"]]
    assert {(k["kernel"], k["dim"]) for k in found} >= {("hopper_forward_of_eight_bits", dim) for dim in (64, 128)}
    for k in kernels:
        assert k["e4m3"] == (k["wgmma"] if k in found else 0), k


def test_two_programs_share_a_multiprocessor(kernels):
    of_four = [k for k in kernels if k["kernel"] in ("forward", "decode", "decode_e4m3") and k["warps"] == 4]
    assert {k["kernel"] for k in of_four} == {"forward", "decode", "decode_e4m3"}
    of_four += [k for k in kernels if k["kernel"].endswith(("of_64", "of_short")) and k["kernel"].startswith("hopper")]
    assert [k for k in of_four if not run_together(k, 2)] == []
    of_128 = [k for k in kernels if k["kernel"] == "decode_e4m3" and k["keys"] == 128]
    assert len(of_128) == 1
    assert [k for k in of_128 if not run_together(k, 2, warps=8)] == []


def test_hopper_names_a_score_function_that_gluon_cannot_compile(outcomes):
    elementwise, unknown, *others = outcomes("own scores")
    assert elementwise is None
    assert unknown == "it does not read score_params of torch.complex64"
    assert len(others) == 4 and all("cannot compile the score_mod __main__.in_torch#" in refusal for refusal in others), others
    assert all("its results are not a float32 tile" in refusal for refusal in others[2:]), others
