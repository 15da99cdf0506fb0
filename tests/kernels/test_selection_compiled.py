"""The kernels of key blocks chosen by query as compiled for a Hopper GPU, without one."""

import pytest
from outcomes import outcomes_of, spills_beyond_the_record

pytest.importorskip("triton")
pytestmark = pytest.mark.compiles

OF_HOPPER = {"hopper_picked_parts", "hopper_picked_grads"}
WITH_PRODUCTS = {"picked_parts", "visit_blocks", "picked_grads", "always_grads", *OF_HOPPER}


@pytest.fixture(scope="module")
def kernels():
    return outcomes_of("sm90_selection.py")


def test_they_fit_shared_memory(kernels):
    assert {k["kernel"] for k in kernels} >= {
        *WITH_PRODUCTS,
        "visited_blocks",
        "selection_keys",
        "sum_key_grads",
        "preprocess_backward",
        "selection_decode",
    }
    assert [k for k in kernels if k["shared"] > 232448] == []


def test_they_spill_no_more_than_recorded_and_least_in_the_loop_over_full_blocks(kernels):
    assert spills_beyond_the_record(kernels) == {}


def test_products_run_on_tensor_cores_and_gathered_rows_are_copied_asynchronously(kernels):
    of_products = [k for k in kernels if k["kernel"] in WITH_PRODUCTS]
    assert of_products and all(k["wgmma"] > 0 and k["mma"] == 0 and k["tma"] > 0 for k in of_products), of_products
    gathering = [k for k in of_products if k["kernel"] in ("picked_parts", "picked_grads") and k["num_stages"] > 1]
    # Of blocks of several steps, the portable forward kernel copies keys ahead.
    gathering = [k for k in gathering if k["kernel"] != "picked_parts" or k["case"][3] == k["tile_n"]]
    gathering += [k for k in of_products if k["kernel"] in OF_HOPPER]
    assert gathering and all(k["async"] > 0 for k in gathering), gathering


def test_two_programs_of_four_warps_share_a_multiprocessor(kernels):
    # 228 KiB per multiprocessor, of which each program reserves 1 KiB; 65,536 registers, four warps per program.
    forward = [k for k in kernels if k["kernel"] in ("picked_parts", "visit_blocks")]
    assert forward and all(2 * (k["shared"] + 1024) <= 228 * 1024 and 2 * 128 * k["reg"] <= 65536 for k in forward), forward


def test_decoding_reads_keys_asynchronously_and_three_programs_share_a_multiprocessor(kernels):
    decoding = [k for k in kernels if k["kernel"] == "selection_decode"]
    assert decoding and all(k["async"] > 0 and k["mma"] > 0 for k in decoding), decoding
    assert all(3 * (k["shared"] + 1024) <= 228 * 1024 and 3 * 128 * k["reg"] <= 65536 for k in decoding), decoding


def test_products_of_the_hopper_kernels_run_while_others_are_under_way(kernels):
    of_hopper = [k for k in kernels if k["kernel"] in OF_HOPPER]
    assert of_hopper and all(k["serialized"] == [] for k in of_hopper), of_hopper
