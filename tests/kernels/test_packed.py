"""The kernels of packed documents as compiled for a Hopper GPU, without one."""

import pytest
from outcomes import outcomes_of

pytest.importorskip("triton")


def test_they_compile_without_spilling_and_move_rows_in_wide_pieces():
    packed = outcomes_of("sm90_packed.py")
    assert len(packed) == 18 and all(k["stack"] == 0 for k in packed), packed
    assert [k["wide"] > 0 for k in packed if k["kernel"] == "take_rows_kernel"] == [True, False]
