"""Messages copied through memory that all ranks read, against messages that a process group moves."""

import copies_on_ranks
import numpy as np
import on_ranks
import pytest
from copies_on_ranks import traffic_of
from on_ranks import CASES

from sparse_flash.parallel.planning import PlanOptions, plan_sequence


@pytest.mark.parametrize("name", CASES)
def test_a_rank_sends_each_block_once_in_few_runs(name):
    mask, ranks = on_ranks.whole_of(name), 4
    options = PlanOptions(block_size=mask.block_size, strategy="blocks")
    for rank in range(ranks):
        exchange = plan_sequence([mask], [1], rank, ranks, options)[1][0]
        traffic = exchange.traffic
        assert len(exchange.message_blocks) == traffic.wanted[rank].shape[1] <= len(exchange.sent_blocks)
        assert np.array_equal(np.unique(exchange.sent_blocks), np.sort(exchange.message_blocks))
        assert max(len(traffic.runs(source)) for source in range(ranks)) <= 2 ** (
            ranks - 2
        )  # of eight sets, four have a rank, two and two beside each other


BUTTERFLY = [[0, 5, 5, 0], [5, 0, 0, 5], [5, 0, 0, 5], [0, 5, 5, 0]]


@pytest.mark.parametrize("pieces", [BUTTERFLY, 1 - np.eye(8, dtype=int)], ids=["butterfly", "all to all"])
def test_no_two_ranks_get_pieces_from_one_at_a_time(pieces):
    orders = [traffic_of(np.array(pieces), rank).order for rank in range(len(pieces))]
    for rank, order in enumerate(orders):
        assert sorted(order) == [source for source in range(len(pieces)) if pieces[source][rank]]
    assert all(len(set(turn)) == len(orders) for turn in zip(*orders, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pieces_of_any_size_arrive_as_a_process_group_moves_them(pools, ranks):
    pools(ranks).run(copies_on_ranks.exchanged, rounds=30, seed=ranks)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "of_second, shares",
    [
        ({}, True),
        ({"switch": "0"}, False),
        ({"host": "two"}, False),
        ({"gpu": 0}, False),
        ({"links": [[18, 18, 18], [18, 18, 0], [18, 0, 18]]}, False),
        ({"error": "no memory for handles"}, False),
    ],
)
def test_all_ranks_share_memory_or_none_does_and_a_failed_trial_is_said_where_it_failed(pools, of_second, shares):
    found = pools(3).run(copies_on_ranks.agreed, **of_second)
    assert [shared for shared, _ in found] == [shares] * 3
    warned = [len(messages) for _, messages in found]
    assert warned == [0, "error" in of_second, 0]
    if "error" in of_second:
        assert "no memory for handles" in found[1][1][0] and "SPARSE_FLASH_COPY_ENGINES=0" in found[1][1][0]
