"""The kernels as compiled for a Hopper GPU, without one."""

import json

import pytest
from outcomes import SPILLS, outcomes_of, spills_of

from sparse_flash.kernels.portable import configs

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.compiles

SHARED_LIMIT = 232448  # bytes a program may take on sm_90
# Kernels with products of key blocks chosen by query.
OF_SELECTIONS = {"picked_parts", "visit_blocks", "picked_grads", "always_grads", "hopper_picked_parts", "hopper_picked_grads"}
# Those without products, which add or convert what others read or wrote.
WITHOUT_PRODUCTS = tuple(f"hopper_{name}" for name in ("prepare", "finish", "combine", "bound", "quantize", "scale", "summarize"))


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


def test_parameters_of_compiled_kernels_are_those_that_repeated_launches_pack(every):
    assert [k for k in every if not k["repeatable"]] == []


def test_kernels_that_merge_read_a_tiles_lse_before_it_is_written(of_group):
    of_merges = [k for k in of_group("merges") if k["kernel"] == "merge"]
    assert of_merges and all(k["waits"] for k in of_merges), of_merges


def test_products_run_on_tensor_cores_and_tiles_come_without_passing_through_registers(kernels):
    for k in kernels:
        if k["kernel"].startswith("decode"):  # tiles with few rows; rows of keys in pages, which the copy engine cannot address
            assert k["wgmma"] + k["mma"] > 0 and k["async"] > 0, k
        elif k["kernel"].endswith("_of_small_blocks"):  # fewer rows than a product of wgmma has
            assert k["mma"] > 0 and k["tma"] > 0, k
        else:
            assert k["wgmma"] > 0 and k["tma"] > 0, k


def test_products_of_selections_and_choosers_run_on_tensor_cores(of_group):
    of_products = [k for k in of_group("selections") if k["kernel"] in OF_SELECTIONS]
    assert all(k["wgmma"] > 0 and k["mma"] == 0 and k["tma"] > 0 for k in of_products), of_products
    assert all(k["async"] > 0 for k in of_products if k["kernel"].startswith("hopper")), of_products
    decoding = [k for k in of_group("selections") if k["kernel"] == "selection_decode"]
    assert all(k["async"] > 0 and k["mma"] > 0 for k in decoding), decoding
    others = [k for k in of_group("choosers", "choices") if k["kernel"].endswith(("log_sums", "pick_blocks"))]
    assert all(k["wgmma"] > 0 for k in others if k["case"][0] != "given"), others


def test_every_product_of_attention_in_eight_bits_is_of_e4m3(kernels):
    found = [k for k in kernels if "eight_bits" in k["kernel"]]
    assert {(k["kernel"], k["dim"]) for k in found} >= {("hopper_forward_of_eight_bits", dim) for dim in (64, 128)}
    for k in kernels:
        assert k["e4m3"] == (k["wgmma"] if k in found else 0), k


def test_the_assembler_serializes_no_hopper_product(every):
    # With Triton 3.8 it does so at head_dim 128 in blocks of 64, whose two programs leave each 128 registers (docs/versions.md).
    of_64 = {"hopper_backward_of_64", "hopper_backward_of_lengths_of_64"}
    known = {(kernel, 128) for kernel in of_64} if triton.__version__.startswith("3.8.") else set()
    found = [k for k in every if k["kernel"].startswith("hopper")]
    assert found and all(k["log"] > 0 for k in found), "an assembler's log was not read"
    assert {(k["kernel"], k["dim"]) for k in found if k["serialized"]} == known


def test_several_programs_share_a_multiprocessor(every):
    def run_together(kernel: dict, programs: int) -> bool:
        """A multiprocessor has 228 KiB, of which each program reserves 1 KiB, and 65,536 registers."""
        return programs * (kernel["shared"] + 1024) <= 228 * 1024 and programs * 32 * kernel["warps"] * kernel["reg"] <= 65536

    of_two = ("picked_parts", "visit_blocks", "pick_blocks")
    of_two += ("hopper_forward_of_64", "hopper_backward_of_64", "hopper_forward_of_short")
    two = [k for k in every if k["kernel"] in of_two and k["dim"] <= 128]
    two += [k for k in every if k["kernel"] in ("forward", "decode", "decode_of_e4m3") and k["warps"] == 4]
    assert {k["kernel"] for k in two} >= {*of_two, "forward", "decode", "decode_of_e4m3"}
    assert [k for k in two if not run_together(k, 2)] == []
    assert [k for k in every if k["kernel"] == "selection_decode" and not run_together(k, 3)] == []


def test_hopper_names_a_score_function_that_gluon_cannot_compile():
    elementwise, unknown, *others = outcomes_of("own_scores.py")
    assert elementwise is None
    assert unknown == "it does not read score_params of torch.complex64"
    assert len(others) == 4 and all("cannot compile the score_mod __main__.in_torch#" in refusal for refusal in others), others
    assert all("its results are not a float32 tile" in refusal for refusal in others[2:]), others
