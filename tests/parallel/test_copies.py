"""Messages copied through memory that all ranks read, against messages that a process group moves."""

from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import copies_on_ranks
import numpy as np
import on_ranks
import pytest
import torch
from on_ranks import CASES

from sparse_flash.compat import symmetric_memory
from sparse_flash.parallel.peer_memory import PeerMemory
from sparse_flash.parallel.planning import PlanOptions, plan_sequence
from sparse_flash.parallel.traffic import Traffic


@pytest.mark.parametrize("name", CASES)
def test_a_rank_writes_each_block_once_and_others_get_few_runs(name):
    mask, ranks = on_ranks.whole_of(name), 4
    options = PlanOptions(block_size=mask.block_size, strategy="blocks")
    for rank in range(ranks):
        exchange = plan_sequence([mask], [0], rank, ranks, options).local_masks[0]
        messages = exchange.traffic.layout
        assert len(exchange.message_blocks) == messages.pieces[rank] <= len(exchange.sent_blocks)
        assert np.array_equal(np.unique(exchange.sent_blocks), np.sort(exchange.message_blocks))
        assert max(map(len, messages.runs)) <= 2 ** (ranks - 2)  # of eight sets, four have a rank, two and two beside each other


@pytest.mark.parametrize(
    "pieces",
    [
        [[0, 5, 5, 0], [5, 0, 0, 5], [5, 0, 0, 5], [0, 5, 5, 0]],  # a butterfly's
        [[0, 8, 8, 0], [0, 0, 8, 8], [0, 0, 0, 8], [0, 0, 0, 0]],  # of powers of two, causal
        (np.ones((8, 8), int) - np.eye(8, dtype=int)).tolist(),
        [[7] * 5] * 5,
    ],
)
def test_no_two_ranks_get_pieces_from_one_at_a_time_where_that_can_be(pieces):
    ranks = len(pieces)
    orders = [Traffic(np.array(pieces), rank).order for rank in range(ranks)]
    for rank, order in enumerate(orders):
        assert sorted(order) == [source for source in range(ranks) if source != rank and pieces[source][rank]]
    # All pieces are as long, so turns are. A rank whose next source is with another waits.
    busy = set()
    for order in orders:
        turn = -1
        for source in order:
            turn = next(later for later in range(turn + 1, 99) if (source, later) not in busy)
            busy.add((source, turn))
    most = max(*map(len, orders), *(sum(source in order for order in orders) for source in range(ranks)))
    assert 1 + max(turn for _, turn in busy) == most


class Room(PeerMemory):
    """The memory of one rank, on a CPU with so many bytes."""

    room = 20 << 20

    def _make_shared(self, size):
        if size > self.room:
            raise RuntimeError("out of memory")
        return torch.empty(size, dtype=torch.uint8), SimpleNamespace(barrier=lambda *_: None)


def test_a_message_that_finds_no_room_is_an_error_and_the_next_finds_some():
    with patch.object(symmetric_memory, "group_timeout", return_value=timedelta(minutes=1)):
        memory = Room(SimpleNamespace(group_name="0"), torch.device("cpu"))
    assert memory.allocate(3 << 20, 5, 7, dtype=torch.bfloat16).shape == (5, 7) and memory.size == 4 << 20
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.allocate(21 << 20, 5, dtype=torch.float32)
    assert memory.size == 0
    assert memory.allocate(9 << 20, 5, dtype=torch.float32).dtype == torch.float32 and 9 << 20 <= memory.size < 11 << 20


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pieces_of_any_size_arrive_as_a_process_group_moves_them(pools, ranks):
    pools(ranks).run(copies_on_ranks.exchanged, rounds=30, seed=ranks)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "ranks, run, arguments, options",
    [
        (2, on_ranks.compared, ("causal", "blocks"), {"overlap": True}),
        (3, on_ranks.compared, ("grouped 6:3", "blocks"), {"overlap": False}),
        (4, on_ranks.compared, ("butterfly", "blocks"), {"overlap": False}),
        (3, on_ranks.compared, ("ranks that get nothing", "blocks"), {"overlap": True}),
        (3, on_ranks.compared, ("bigbird", "queries"), {"overlap": True}),
        (2, on_ranks.compared, ("global tokens", "queries"), {"overlap": False}),
        (2, on_ranks.compiled, (2,), {}),
    ],
)
def test_copies_give_what_one_process_gives(pools, ranks, run, arguments, options):
    for differences in pools(ranks).run(copies_on_ranks.copied, run, *arguments, **options):
        assert max(differences) < 1e-5


@pytest.mark.ranks
@pytest.mark.parametrize(
    "of_second, shares",
    [
        ({}, True),
        ({"switch": "0"}, False),
        ({"host": "two"}, False),
        ({"gpu": 0}, False),
        ({"links": [[18, 18, 18], [18, 18, 0], [18, 0, 18]]}, False),
        ({"error": "no room for handles"}, False),
    ],
)
def test_all_ranks_share_memory_or_none_does_and_a_failed_trial_is_said_where_it_failed(pools, of_second, shares):
    found = pools(3).run(copies_on_ranks.agreed, **of_second)
    assert [shared for shared, _ in found] == [shares] * 3
    warned = [len(messages) for _, messages in found]
    assert warned == [0, "error" in of_second, 0]
    if "error" in of_second:
        assert "no room for handles" in found[1][1][0] and "SPARSE_FLASH_COPY_ENGINES=0" in found[1][1][0]
