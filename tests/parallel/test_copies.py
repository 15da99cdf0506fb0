"""Messages copied through memory that all ranks read, against those that a process group moves."""

import copies_on_ranks
import numpy as np
import on_ranks
import pytest

from sparse_flash.parallel.traffic import Traffic

PIECES = np.array([[0, 2, 1], [3, 0, 0], [4, 5, 0]])


@pytest.mark.parametrize("rank", range(3))
def test_pieces_lie_in_messages_in_the_order_of_ranks(rank):
    traffic = Traffic(PIECES, rank)
    assert traffic.sends == PIECES[rank].tolist() and traffic.receives == PIECES[:, rank].tolist()
    assert (traffic.sent, traffic.received, traffic.longest) == (PIECES[rank].sum(), PIECES[:, rank].sum(), 9)
    assert traffic.begins == [PIECES[source, :rank].sum() for source in range(3)]


@pytest.mark.parametrize("rank", range(3))
def test_what_is_returned_goes_where_it_came_from(rank):
    traffic, back = Traffic(PIECES, rank), Traffic(PIECES, rank).returned
    assert back.sends == traffic.receives and back.receives == traffic.sends and back.longest == PIECES.sum(0).max()


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


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pieces_of_any_size_arrive_as_a_process_group_moves_them_and_memory_only_grows(pools, ranks):
    for equal, held in pools(ranks).run(copies_on_ranks.exchanged, rounds=30, seed=ranks):
        assert equal and held == sorted(held) and held[-1] > held[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "ranks, name, strategy, options",
    [
        (2, "causal", "blocks", {"overlap": True}),
        (3, "grouped 6:3", "blocks", {"overlap": False}),
        (3, "causal", "blocks", {"overlap": True, "keep_fetched": False}),
        (4, "butterfly", "blocks", {"overlap": False, "keep_fetched": False}),
        (3, "ranks that get nothing", "blocks", {"overlap": True}),
        (3, "bigbird", "queries", {"overlap": True}),
        (2, "global tokens", "queries", {"overlap": False, "keep_fetched": False}),
        (4, "per head", "heads", {}),
        (4, "per head, grouped", "nodes", {"in_nodes": True, "overlap": True}),
    ],
)
def test_plans_give_what_one_process_gives(pools, ranks, name, strategy, options):
    for (error, same), copied in pools(ranks).run(copies_on_ranks.run, on_ranks.compared, name, strategy, **options):
        assert error < 1e-5 and same and copied >= 4  # two passes, twice


@pytest.mark.ranks
def test_a_compiled_graph_copies_too(pools):
    for (error, _), copied in pools(2).run(copies_on_ranks.run, on_ranks.compiled, 2):
        assert error < 1e-5 and copied >= 4


@pytest.mark.ranks
def test_the_link_is_measured_by_copies(pools):
    for _, copied in pools(4).run(copies_on_ranks.run, on_ranks.rates):
        assert copied >= 7


@pytest.mark.ranks
def test_one_rank_that_is_switched_off_switches_off_all(pools):
    assert all(pools(2).run(copies_on_ranks.switched_off))
