"""The kernels that score blocks for choosers as compiled for a Hopper GPU, without one."""

import pytest
from outcomes import outcomes_of

pytest.importorskip("triton")
pytestmark = pytest.mark.compiles


@pytest.fixture(scope="module")
def kernels():
    return outcomes_of("sm90_choosers.py")


def test_scores_are_products_of_tensor_cores_that_fit_shared_memory(kernels):
    scoring = [k for k in kernels if k["kernel"].endswith("log_sums")]
    assert {k["kernel"] for k in scoring} == {"log_sums", "hopper_log_sums"}
    assert all(k["wgmma"] > 0 and k["shared"] <= 232448 for k in scoring), scoring


def test_products_of_the_hopper_kernel_run_while_others_are_under_way(kernels):
    of_hopper = [k for k in kernels if k["kernel"] == "hopper_log_sums"]
    assert of_hopper and all(k["serialized"] == [] for k in of_hopper), of_hopper


def test_they_spill_next_to_nothing(kernels):
    assert kernels and all(k["stack"] <= 64 for k in kernels), kernels
