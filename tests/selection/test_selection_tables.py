"""The rounds of attention over picked blocks cover all queries within the memory that they may take."""

import pytest
from accepted import needs_triton

pytest.importorskip("triton")

from sparse_flash.kernels.selection import division
from sparse_flash.kernels.selection.division import SelectionSizes

parametrize = pytest.mark.parametrize
pytestmark = needs_triton


@parametrize("bytes_of_entry, bytes_of_head, rounds", [(0, 0, 1), (0, 1 << 20, 4), (10, 1 << 20, 8), (10, 500, 4)])
def test_a_round_takes_a_batch_head_at_least_and_partial_results_are_in_bounds(bytes_of_entry, bytes_of_head, rounds, monkeypatch):
    sizes = SelectionSizes(2, 8, 2, 70, 100, every=1, slots=3, pickers=1, block=32)
    monkeypatch.setattr(division, "WORKSPACE", 3000)
    found = division.plan_rounds(sizes, bytes_of_entry, bytes_of_head)
    assert len(found.all) == rounds and {each.stride for each in found.all} == {found.choices}
    assert found.heads * found.choices * sizes.slots * bytes_of_entry <= 3000
    covered = sorted((each.head + n, each.choice) for each in found.all for n in range(each.heads))
    assert covered == [(head, choice) for head in range(4) for choice in range(0, 70, found.choices)]
