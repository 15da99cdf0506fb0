"""Tables of key blocks chosen by query: every pick is visited by a tile or listed once."""

import pytest
import torch
from accepted import DEVICE, needs_triton
from picked import drawn_picks

pytest.importorskip("triton")

from sparse_flash.kernels.selection import division, lists
from sparse_flash.kernels.selection.division import SelectionSizes

parametrize = pytest.mark.parametrize
pytestmark = needs_triton

SIZES = {
    # batch, heads, kv_heads, q_len, kv_len, every, n, pickers, block
    "a choice for each query": SelectionSizes(2, 8, 2, 70, 100, 1, 3, 1, 32),
    "a choice for 3 queries, heads that pick for themselves": SelectionSizes(1, 4, 2, 100, 90, 3, 3, 2, 16),
    "a choice for 64 queries": SelectionSizes(1, 2, 1, 200, 200, 64, 2, 1, 64),
}


def kept(picks, sizes) -> set[tuple[int, int, int]]:
    """(picker of the batch, choice, block) of picks that keep some pair."""
    last = (torch.arange(sizes.choices) * sizes.every + sizes.every).clamp(max=sizes.q_len) - 1 + sizes.kv_len - sizes.q_len
    picks = picks.cpu().flatten(0, 1)
    some = (picks >= 0) & (picks * sizes.block <= last[:, None]) & (last >= 0)[:, None]
    return {(picker, choice, int(picks[picker, choice, slot])) for picker, choice, slot in some.nonzero().tolist()}


def visited_picks(visited, picks, sizes, least) -> set[tuple[int, int, int]]:
    """Returns what the tiles' tables say; asserts that they follow their definition."""
    found = set()
    together, block = sizes.tiled.choices, sizes.block
    counts, blocks, bits = (t.cpu().flatten(0, 1) for t in visited[:3])
    of_choice = {}
    for picker, choice, pick in kept(picks, sizes):
        of_choice.setdefault((picker, choice // together, pick), []).append(choice)
    for picker in range(counts.shape[0]):
        for cluster in range(counts.shape[1]):
            whole, count = counts[picker, cluster].tolist()
            first = cluster * together * sizes.every + sizes.kv_len - sizes.q_len
            listed = blocks[picker, cluster, :count].tolist()
            assert listed[:whole] == sorted(listed[:whole]) and listed[whole:] == sorted(listed[whole:])
            for number, pick in enumerate(listed):
                choices = [cluster * together + c for c in range(together) if bits[picker, cluster, number].item() >> c & 1]
                assert choices == sorted(of_choice[picker, cluster, pick])
                assert (number >= whole) == ((pick + 1) * block - 1 > first)
                assert number >= whole or len(choices) >= least
                found |= {(picker, choice, pick) for choice in choices}
    return found


def listed(lists, sizes, rounds) -> list[tuple[int, int, int]]:
    """Returns what the lists say, in their order."""
    found = []
    entries, items = lists.entries.cpu(), lists.items.cpu()
    for each in rounds.all:
        numbers = [item[4].item() for item in items[each.number]]
        assert sorted(numbers) == list(range(len(numbers)))
        for column, begin, whole, end, _ in items[each.number].tolist():
            batch_head, block = each.head + column // sizes.key_blocks, column % sizes.key_blocks
            for place in range(begin, end):
                choice = entries[place].item() // sizes.slots
                picker, choice = (
                    batch_head * sizes.pickers + choice // each.stride % sizes.pickers,
                    each.choice + choice % each.stride,
                )
                first = choice * sizes.every + sizes.kv_len - sizes.q_len
                assert (place >= whole) == ((block + 1) * sizes.block - 1 <= first)
                found.append((picker, choice, block))
    return found


@parametrize("sizes", SIZES.values(), ids=SIZES)
@parametrize("workspace", [1 << 20, 1500], ids=["one round", "rounds"])
def test_every_pick_is_visited_or_listed_once(sizes, workspace):
    pickers = sizes.kv_heads * sizes.pickers
    picks = drawn_picks((sizes.batch, pickers, sizes.choices, sizes.slots), sizes.every, sizes.block, sizes.q_len, sizes.kv_len)
    rounds = division.plan_rounds(sizes, 10, 0, workspace)
    assert (len(rounds.all) == 1) == (workspace > 1500 or sizes.every == 64)
    least = max(2, sizes.tiled.choices // 2)
    visited = lists.visited_blocks(picks, sizes, least)
    some = lists.column_lists(picks, visited, sizes, rounds, 8)
    by_tiles, by_columns = visited_picks(visited, picks, sizes, least), listed(some, sizes, rounds)
    assert len(by_columns) == len(set(by_columns)) == int(some.counts.sum())
    assert by_tiles.isdisjoint(by_columns) and by_tiles | set(by_columns) == kept(picks, sizes)
    all_listed = lists.column_lists(picks, None, sizes, rounds, 8)
    assert sorted(listed(all_listed, sizes, rounds)) == sorted(kept(picks, sizes))


@parametrize("bytes_of_entry, bytes_of_head, rounds", [(0, 0, 1), (0, 1 << 20, 4), (10, 1 << 20, 8), (10, 500, 4)])
def test_a_round_takes_a_batch_head_at_least_and_partial_results_are_in_bounds(bytes_of_entry, bytes_of_head, rounds):
    sizes = SIZES["a choice for each query"]
    found = division.plan_rounds(sizes, bytes_of_entry, bytes_of_head, 3000)
    assert len(found.all) == rounds and {each.stride for each in found.all} == {found.choices}
    assert found.heads * found.choices * sizes.slots * bytes_of_entry <= 3000
    covered = sorted((each.head + n, each.choice) for each in found.all for n in range(each.heads))
    assert covered == [(head, choice) for head in range(4) for choice in range(0, 70, found.choices)]


def test_lists_are_cut_into_even_pieces_and_heavy_ones_divided():
    ends = torch.tensor([[0, 100, 103, 103]], dtype=torch.int32, device=DEVICE)
    begin, end = ends[:, :-1], ends[:, 1:]
    pieces = lists.divide_lists(begin, begin + 10, end, 3 + 103 // 32, 32, 4)
    items = [item for item in pieces.items[0].tolist() if item[1] < item[3]]
    assert items == [[0, 0, 10, 28, 0], [0, 28, 28, 56, 1], [0, 56, 56, 84, 2], [0, 84, 84, 100, 3], [1, 100, 103, 103, 4]]
    assert pieces.starts[0].tolist() == [0, 4, 5, 5]
