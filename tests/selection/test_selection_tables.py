"""The rounds of attention over picked blocks cover all queries within the memory that they may take."""

import pytest
from accepted import needs_triton

pytest.importorskip("triton")

from sparse_flash.kernels.selection import division
from sparse_flash.kernels.selection.division import SelectionSizes

parametrize = pytest.mark.parametrize
pytestmark = needs_triton

SIZES = {
    # batch, heads, kv_heads, q_len, kv_len, every, n, pickers, block
    "a choice for each query": SelectionSizes(2, 8, 2, 70, 100, 1, 3, 1, 32),
    "a choice for 3 queries, heads that pick for themselves": SelectionSizes(1, 4, 2, 100, 90, 3, 3, 2, 16),
    "a choice for 64 queries": SelectionSizes(1, 2, 1, 200, 200, 64, 2, 1, 64),
}


@parametrize("bytes_of_entry, bytes_of_head, rounds", [(0, 0, 1), (0, 1 << 20, 4), (10, 1 << 20, 8), (10, 500, 4)])
def test_a_round_takes_a_batch_head_at_least_and_partial_results_are_in_bounds(bytes_of_entry, bytes_of_head, rounds, monkeypatch):
    sizes = SIZES["a choice for each query"]
    monkeypatch.setattr(division, "WORKSPACE", 3000)
    found = division.plan_rounds(sizes, bytes_of_entry, bytes_of_head)
    assert len(found.all) == rounds and {each.stride for each in found.all} == {found.choices}
    assert found.heads * found.choices * sizes.slots * bytes_of_entry <= 3000
    covered = sorted((each.head + n, each.choice) for each in found.all for n in range(each.heads))
    assert covered == [(head, choice) for head in range(4) for choice in range(0, 70, found.choices)]
