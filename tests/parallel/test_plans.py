"""Plans as numbers on the host, for more ranks than there are processes."""

import numpy as np
import pytest
from on_ranks import CASES, whole_of

import sparse_flash as sf
from sparse_flash.parallel.assignment import Visits, blocks_per_chunk, candidates
from sparse_flash.parallel.estimates import LINK_RATE, SequenceSizes, head_seconds
from sparse_flash.parallel.planning import Choice, PlanOptions, choose_strategies, plan_sequence


@pytest.mark.parametrize("ranks", [1, 7, 16])
@pytest.mark.parametrize("name", CASES)
def test_ranks_divide_the_tokens_and_get_the_blocks_that_they_visit_and_lack(name, ranks):
    mask = whole_of(name).to("cpu")
    states = mask.block_states()
    visited = (states[None] if states.dim() == 2 else states[0]).amax(0).bool().numpy()
    visits = Visits.from_mask(mask, blocks_per_chunk(mask.grid.q_blocks, mask.block_size, ranks))
    for owners in candidates([visits], [1], ranks):
        assignment = owners.with_visits(visits)
        positions = assignment.positions(mask.q_len, mask.block_size)
        assert np.array_equal(np.sort(positions[positions >= 0]), np.arange(mask.q_len))
        assert all((np.diff(own[own >= 0]) > 0).all() for own in positions)
        assert positions.shape[1] == mask.q_len if ranks == 1 else positions.shape[1] % mask.block_size == 0
        outgoing = [assignment.outgoing(rank) for rank in range(ranks)]
        for rank, own in enumerate(assignment.blocks):
            own = own[own >= 0]
            wanted = np.setdiff1d(np.flatnonzero(visited[own].any(0)), own)
            got = [blocks[wanted_by[rank]] for blocks, wanted_by in outgoing]
            assert np.array_equal(np.sort(np.concatenate(got)), wanted) and assignment.received[rank] == len(wanted)
            assert all(np.isin(blocks, assignment.blocks[source]).all() for source, blocks in enumerate(got))


def planned(mask: str | sf.BlockMask, tokens: int, ranks: int, heads: int | None = 8, kv_heads: int | None = 8) -> Choice:
    """Returns the plan of one mask."""
    if isinstance(mask, str):
        mask = sf.compile_mask(mask, tokens, progress=False)
    return plan_sequence([mask], [1], 0, ranks, PlanOptions(heads, kv_heads))[0]


def random_documents(tokens: int, within: str = "causal") -> sf.BlockMask:
    ends = np.cumsum(np.random.default_rng(0).lognormal(np.log(4096), 1.3, tokens >> 8).astype(int).clip(16))
    return sf.compile_mask(sf.parse(within) & sf.documents([0, *ends[ends < tokens].tolist(), tokens]), tokens)


def test_windows_are_contiguous_and_get_one_window_and_causal_is_balanced_by_zigzag():
    window, causal = planned("causal & local(4096)", 1 << 18, 8), planned("causal", 1 << 17, 8, None, None)
    assert window.strategies == ("blocks",) and window.owners.name == "contiguous" and causal.owners.name == "zigzag"
    visits = Visits.from_mask(sf.compile_mask("causal & local(4096)", 1 << 18), 8)
    assert window.owners.with_visits(visits).received.max() == 4096 // 128


def test_chunks_levelled_by_work_balance_documents_of_random_lengths():
    visits = Visits.from_mask(random_documents(1 << 17), 8)
    work = {one.name: one.with_visits(visits).visited for one in candidates([visits], [1], 8)}
    balance = {name: of_ranks.max() / of_ranks.mean() for name, of_ranks in work.items()}
    assert balance["levelled"] < 1.1 < 1.3 < min(balance["contiguous"], balance["zigzag"])


@pytest.mark.parametrize(
    "mask, ranks, heads, kv_heads, strategy",
    [
        ("butterfly", 8, 8, 8, "heads"),
        ("butterfly", 8, 32, 4, "blocks"),  # too few key heads
        ("butterfly", 8, None, None, "blocks"),
        ("bigbird", 8, 8, 8, "heads"),
        ("local(1024) | global_tokens(128)", 8, 32, 8, "heads"),
    ],
)
def test_a_plan_takes_the_faster_strategy_of_those_that_heads_allow(mask, ranks, heads, kv_heads, strategy):
    assert planned(mask, 1 << 18, ranks, heads, kv_heads).strategies == (strategy,)


@pytest.mark.parametrize(
    "mask, log2_tokens, heads, link_rate, overlap",
    [
        # What was faster on two GPUs, or as fast: docs/performance/several-gpus.md.
        ("butterfly", 19, 32, LINK_RATE, (False, True)),  # results are merged, gradients have one sum
        ("butterfly", 19, 8, LINK_RATE, (True, True)),  # with 8 heads less is merged
        ("documents", 19, 32, LINK_RATE, (False, False)),  # two calls take longer than the exchange
        ("causal", 17, 8, LINK_RATE, (True, False)),  # two backward calls do
        ("documents", 19, 32, 1e10, (True, True)),  # not over slow links
        ("block_diagonal(4096)", 17, 8, LINK_RATE, (False, False)),  # nothing travels
    ],
)
def test_the_exchange_overlaps_with_local_columns_where_estimated_faster(mask, log2_tokens, heads, link_rate, overlap):
    tokens = 1 << log2_tokens
    whole = random_documents(tokens) if mask == "documents" else sf.compile_mask(mask, tokens)
    options = PlanOptions(heads, 8, strategy="blocks", link_rate=link_rate)
    assert plan_sequence([whole], [1], 0, 2, options)[1][0].overlap == overlap


def test_all_ranks_make_as_many_calls_though_the_first_receives_nothing():
    mask, options = sf.compile_mask("causal & local(4096)", 1 << 16), PlanOptions(8, 8, strategy="blocks")
    overlaps = [plan_sequence([mask], [1], rank, 4, options)[1][0].overlap for rank in range(4)]
    assert overlaps == [(True, True)] * 4


def test_exchanging_heads_waits_for_the_rank_with_the_heaviest_ones():
    sizes = SequenceSizes(8192, 128, 8, 8)
    by_head = [sf.BlockMask.per_head([first, *["local(64)"] * 7], 8192, 8192) for first in ("full", "local(64)")]
    full = sf.compile_mask("full", 8192)
    mixed, light, heavy = (head_seconds(mask, 8, sizes, 8) for mask in (*by_head, full))
    assert mixed == pytest.approx(heavy) and light < heavy


def test_one_assignment_serves_masks_of_several_layers_and_follows_those_that_most_layers_have():
    tokens, ranks = 1 << 17, 8
    visits = [Visits.from_mask(sf.compile_mask(text, tokens), 8) for text in ("causal & local(4096)", "causal")]

    def made(layers: list[int]):
        return choose_strategies(visits, layers, SequenceSizes(tokens, 128, 8, 8, LINK_RATE / 10), ranks, ["blocks"])

    assert made([1, 1]).owners.name == "zigzag"  # the dense layer would wait 1.9 times as long
    assert made([1000, 1]).owners.name == "contiguous"  # the others would get twice as much


def test_each_mask_of_one_assignment_gets_the_strategy_that_suits_it():
    tokens, ranks = 1 << 18, 8
    visits = [Visits.from_mask(sf.compile_mask(text, tokens), 8) for text in ("causal & local(4096)", "butterfly")]
    both = choose_strategies(visits, [1, 1], SequenceSizes(tokens, 128, 8, 8), ranks, ["blocks", "heads"])
    assert both.strategies == ("blocks", "heads") and both.owners.name == "contiguous"
