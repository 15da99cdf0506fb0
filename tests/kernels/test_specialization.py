"""No kernel is specialized on the value of an integer that another launch may change: see ``tests/specialization.py``."""

import pytest

pytest.importorskip("triton")

from outcomes import outcomes_of


@pytest.fixture(scope="module")
def kernels():
    return {row["kernel"]: row for row in outcomes_of("specialization.py")}


def test_code_that_is_launched_again_was_made_for_no_value_of_an_integer(kernels):
    assert {name: row["wrong"] for name, row in kernels.items() if row["wrong"]} == {}


def test_every_kernel_is_launched_again_more_often_than_it_is_compiled(kernels):
    assert len(kernels) == 40
    assert all(row["again"] > 10 * row["compiled"] > 0 for row in kernels.values()), kernels


def test_the_portable_kernels_are_read_where_lengths_and_strides_are_1():
    read, *refused = outcomes_of("front_end.py")
    assert refused == []
    assert {"attention_forward_kernel", "grad_kv_kernel", "grad_qkv_kernel", "picked_grads_kernel"} <= set(read["read"])
