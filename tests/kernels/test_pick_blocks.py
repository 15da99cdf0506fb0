"""The kernel that chooses blocks as compiled for a Hopper GPU, without one."""

import pytest
from outcomes import outcomes_of

pytest.importorskip("triton")


@pytest.mark.compiles
def test_it_compiles_without_spilling_and_two_programs_share_a_multiprocessor():
    kinds = outcomes_of("sm90_choice.py")
    assert len(kinds) == 11 and all(k["stack"] == 0 and k["shared"] <= 72 << 10 for k in kinds), kinds
    assert [k["wgmma"] > 0 for k in kinds] == [k["kind"] != "given" for k in kinds]
