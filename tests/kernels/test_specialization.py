"""What Triton makes of kernels: see ``tests/specialization.py`` and ``tests/sm90.py``. ``test_compiled`` has all of them."""

import pytest

pytest.importorskip("triton")

from outcomes import outcomes_of


@pytest.mark.compiles
def test_code_that_is_launched_again_was_made_for_no_value_of_an_integer():
    kernels = {row["kernel"]: row for row in outcomes_of("specialization.py")}
    del kernels["kernels.hopper.own_scores.own_scores_kernel"]  # which is compiled to see whether it compiles
    assert {name: row["wrong"] for name, row in kernels.items() if row["wrong"]} == {}
    assert [row for row in kernels.values() if not (row["again"] and row["compiled"])] == []


@pytest.mark.compiles
def test_the_portable_kernels_are_read_where_lengths_and_strides_are_1():
    rows = outcomes_of("specialization.py", "ones")
    assert {row["kernel"] for row in rows} >= {"forward", "grad_kv", "grad_qkv", "picked_grads"}
    assert [row for row in rows if row["refused"]] == []
