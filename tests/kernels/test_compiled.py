"""The kernels as compiled for a Hopper GPU, without one."""

import json

import pytest
from outcomes import outcomes_of

from sparse_flash.kernels.hopper.configs import FOOTPRINT
from sparse_flash.kernels.portable import configs

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.compiles

SHARED_LIMIT = 232448  # bytes a program may take on sm_90
# Bytes of stack (spilled registers) of the kernels that were measured to be fastest despite them.
STACK_LIMIT = {("grad_q", 64): 128, ("grad_kv", 64): 64, ("grad_kv", 128): 192}
# Both in one launch, for short calls; not measured yet.
STACK_LIMIT |= {("grad_qkv", 64): 8, ("grad_qkv", 128): 256}
STACK_LIMIT |= {("grad_kv_of_dropout", 64): 128, ("grad_q_of_192_and_128", 256): 56}


@pytest.fixture(scope="module")
def kernels():
    return outcomes_of("sm90.py")


def test_every_kernel_compiles_for_hopper_and_fits_its_shared_memory(kernels):
    assert len(kernels) == 116 + 3 * 4 + 2 * 2 + 3 * 4 + 3 + 4 + 1
    assert all(k["shared"] <= SHARED_LIMIT for k in kernels), kernels


def test_registers_stack_and_shared_memory_are_those_recorded(kernels):
    """A change that should not affect a kernel changes none of these. After one that should, `make record` rewrites them."""
    from sm90 import RECORD, RECORDED  # not at the top: it needs triton

    record = json.loads(RECORD.read_text())
    if triton.__version__ not in record:
        pytest.skip(f"recorded of Triton {', '.join(record)}, not of {triton.__version__}")
    now = [[k[name] for name in RECORDED] for k in kernels]
    assert now == record[triton.__version__][: len(now)]


def test_products_run_on_tensor_cores_and_tiles_come_without_passing_through_registers(kernels):
    for k in kernels:
        if k["kernel"] == "decode":  # tiles with few rows; rows of keys in pages, which the copy engine cannot address
            assert k["wgmma"] + k["mma"] > 0 and k["async"] > 0, k
        else:
            assert (k["wgmma"] > 0 or k["kernel"].startswith("combine_columns")) and k["tma"] > 0, k  # which only adds


def test_parameters_of_compiled_kernels_are_those_that_repeated_launches_pack(kernels):
    assert all(k["repeatable"] for k in kernels), kernels


def test_registers_are_spilled_no_more_than_recorded(kernels):
    held = [k for k in kernels if not k["kernel"].startswith("hopper") and not k["kernel"].endswith("of_terms")]
    assert {k["kernel"] for k in held} >= {"decode", *configs.KERNELS}
    assert [k for k in held if k["stack"] > STACK_LIMIT.get((k["kernel"], k["dim"]), 0)] == []


def test_a_thread_draws_once_for_the_four_pairs_of_dropout_that_it_holds(kernels):
    for name, table in (("forward", configs._FORWARD), ("grad_q", configs._GRAD_Q), ("grad_kv", configs._GRAD_KV)):
        plain, dropped = (
            next(k for k in kernels if (k["kernel"], k["dim"], k["sparse"]) == (kernel, 64, False))
            for kernel in (name, f"{name}_of_dropout")
        )
        draws = table[64].tile_m * table[64].tile_n // (32 * dropped["warps"]) // 4
        # Seven products per draw in both walks of a dense kernel, plus one draw per program.
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


def test_hopper_kernels_stay_within_their_recorded_footprint(kernels):
    checked = [k for k in kernels if k["kernel"].startswith("hopper")]
    # Head dimensions; dense and sparse, ragged keys, split columns, blocks of 64, dropout, short calls, blocks by document; 192
    # queries of both; 96 columns; four variants in three shapes, both passes. Wide head dimensions (256, 192, this with 128 for v),
    # forward: dense, sparse, blocks of 64 and dropout, two of them with two variants; backward: four kinds, blocks of 64 of two of
    # them, dropout, four variants.
    # Heads that share keys in one tile.
    assert len(checked) == 2 * (2 * 5 + 2 + 4 + 4 + 2 + 4) + 2 + 5 + 4 * 3 * 2 + (3 * 4 + 2 * 2) + (3 * 4 + 3 + 4) + 1
    for k in checked:
        footprint = FOOTPRINT[k["kernel"].removeprefix("hopper_"), k["dim"]]
        assert k["stack"] <= footprint.stack and k["shared"] <= footprint.shared, k


def test_the_assembler_runs_no_hopper_product_alone(kernels):
    # With Triton 3.8 it does so at head_dim 128 in blocks of 64, whose two programs leave each 128 registers (docs/versions.md).
    of_64 = {"hopper_backward_of_64", "hopper_backward_of_lengths_of_64"}
    known = {(kernel, 128) for kernel in of_64} if triton.__version__.startswith("3.8.") else set()
    assert all(k["log"] > 0 for k in kernels), "an assembler's log was not read"
    assert {(k["kernel"], k["dim"]) for k in kernels if k["serialized"] and k["kernel"].startswith("hopper")} == known


def test_two_programs_of_four_warps_share_a_multiprocessor(kernels):
    # 228 KiB per multiprocessor, of which each program reserves 1 KiB; 65,536 registers, four warps per program.
    of_four = [k for k in kernels if k["kernel"] in ("forward", "decode") and k["warps"] == 4]
    assert {k["kernel"] for k in of_four} == {"forward", "decode"}
    of_four += [k for k in kernels if k["kernel"].endswith(("of_64", "of_short")) and k["kernel"].startswith("hopper")]
    assert [k for k in of_four if 2 * (k["shared"] + 1024) > 228 * 1024 or 2 * 128 * k["reg"] > 65536] == []


def test_hopper_names_a_score_function_that_gluon_cannot_compile():
    elementwise, unknown, *others = outcomes_of("own_scores.py")
    assert elementwise is None
    assert unknown == "it does not read score_params of torch.complex64"
    assert len(others) == 4 and all("cannot compile the score_mod __main__.in_torch#" in refusal for refusal in others), others
    assert all("its results are not a float32 tile" in refusal for refusal in others[2:]), others
