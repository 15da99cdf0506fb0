"""Kernels with dropout of a part of a sequence as compiled for a Hopper GPU, without one."""

import pytest
from outcomes import outcomes_of

pytest.importorskip("triton")
pytestmark = pytest.mark.compiles


def test_a_thread_draws_once_for_four_pairs_also_where_tokens_stand_elsewhere():
    found = outcomes_of("sm90_positions.py")
    assert [k["kernel"] for k in found] == ["forward", "grad_kv"]
    for k in found:
        # Seven products per draw in each of three loops, plus one draw per program; twice as many if pairs drew by two.
        assert 3 * 5 * k["draws"] <= k["products"] <= 3 * 7 * k["draws"] + 40, k
