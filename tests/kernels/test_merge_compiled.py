"""The kernels that merge results as compiled for a Hopper GPU, without one."""

import pytest
from outcomes import outcomes_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def kinds():
    return outcomes_of("sm90_merge.py")


def test_they_compile_without_spilling_and_sixteen_warps_or_more_of_wide_loads_share_a_multiprocessor(kinds):
    assert {k["kernel"] for k in kinds} == {"merge_kernel", "move_kernel"} and all(k["stack"] == 0 for k in kinds), kinds
    wide = [k for k in kinds if k["dim"] in (64, 128, 256) and k["dtype"] != "float64"]
    # 65,536 registers of a multiprocessor, for programs of 128 threads.
    # A copy reads one tensor, all others two.
    assert len(wide) == 12 and all(k["wide"] == (4 if k["copies"] else 8) for k in wide), wide
    assert all(65536 // (128 * k["reg"]) >= 4 for k in wide), wide


def test_all_warps_have_read_the_lse_of_a_tile_before_one_writes_it(kinds):
    merges = [k for k in kinds if k["kernel"] == "merge_kernel"]
    assert merges and all(k["waits"] for k in merges), merges
