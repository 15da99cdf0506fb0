"""The work of decoding, choices and selections: beside the launchers' own division, and what must hold of any prediction."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.kernels.cost import calls, chips
from sparse_flash.kernels.cost.chips import Chip
from sparse_flash.kernels.cost.model import AttentionSizes, predict_work
from sparse_flash.kernels.selection import division, lists
from sparse_flash.kernels.selection.division import Round, SelectionSizes
from sparse_flash.masks.grid import BlockGrid
from sparse_flash.masks.parsing import parse
from sparse_flash.tools.cost import describe_chooser

CHIP = Chip("test", 132, 7.2e6, 3e6)


@st.composite
def selections(draw):
    """(sizes of a call, its picks as arrays)."""
    block, every = draw(st.sampled_from((64, 128))), draw(st.sampled_from((1, 2, 16, 64)))
    kv_heads, pickers, members = draw(st.sampled_from(((1, 1, 4), (2, 1, 16), (1, 2, 2), (2, 1, 64))))
    tokens = draw(st.integers(2, 12)) * 64
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shape = 1, kv_heads * pickers, -(-tokens // every), draw(st.integers(1, 3))
    last = torch.arange(shape[2])[:, None] * every // block + 1
    picks = (torch.rand(shape, generator=generator) * last).int()
    made = sf.BlockSelection.from_picks(picks, block, every=every, q_len=tokens)
    heads, slots = kv_heads * pickers * members, made.picks.shape[3]
    return SelectionSizes(1, heads, kv_heads, tokens, tokens, every, slots, pickers, block), made.picks.numpy()


@settings(deadline=None, max_examples=60)
@given(selections())
def test_tiles_visit_blocks_that_most_choices_picked_or_the_limit_cuts_and_lists_have_the_other_picks(drawn):
    sizes, picks = drawn
    together, _, tiles = sizes.tiled
    visits = listed = 0
    for of_head in picks.reshape(-1, sizes.choices, sizes.slots):
        for first in range(0, sizes.choices, together):
            some = of_head[first : first + together]
            for block in np.unique(some[some >= 0]):
                count = int((some == block).sum())
                is_cut = (block + 1) * sizes.block - 1 > first * sizes.every
                is_visited = is_cut or count >= division.least_choices(sizes)
                visits, listed = visits + is_visited * tiles, listed + (not is_visited) * count
    assert calls._count_visits(picks, sizes) == (visits, listed)


@settings(deadline=None, max_examples=60)
@given(selections(), st.integers(1, 40), st.integers(1, 9), st.sampled_from((1, 2)))
def test_the_longest_program_takes_its_share_of_the_pieces_that_the_launcher_makes(drawn, means, programs, parts):
    sizes, picks = drawn
    unit, heads = sizes.tiled.choices, sizes.batch_heads
    most = means * unit
    counted = picks.reshape(heads, sizes.pickers, sizes.choices, sizes.slots)
    counts = torch.stack([torch.bincount(torch.from_numpy(one[one >= 0]), minlength=sizes.key_blocks) for one in counted])
    ends = counts.flatten().cumsum(0).int()[None]
    begins, pieces = ends - counts.flatten().int(), int((counts // most).sum()) + counts.numel()
    items = lists.divide_lists(begins, begins, ends, pieces, most, unit).items[0]
    length = (items[:, 3] - items[:, 1]).repeat_interleave(parts).numpy()
    shares = np.zeros(programs, int)
    for number, entries in enumerate(length):
        turn, place = divmod(number, programs)
        shares[place if turn % 2 == 0 else programs - 1 - place] += entries
    of = Round(0, 0, heads, 0, sizes.choices, sizes.choices)
    assert calls._longest_program(counted, sizes, of, most, parts, programs) == shares.max()


def decode_us(chip=CHIP, batch=8, heads=32, kv_heads=8, keys=65536, queries=1, **options) -> float:
    sizes = AttentionSizes(batch, heads, kv_heads, queries, 1 << 18, 128, 128)
    return predict_work(calls.describe_decode(sizes, keys, chip, options.pop("block", None), **options), chip).us


@settings(deadline=None)
@given(st.integers(0, 7), st.integers(10, 17), st.sampled_from((None, 64, 128)), st.booleans(), st.sampled_from((0, 16, 128)))
def test_a_step_over_more_keys_or_sequences_takes_no_less_and_a_large_one_what_its_reads_take(batch, keys, block, e4m3, page):
    call = {"block": block, "e4m3": e4m3, "page": page}
    us = decode_us(batch=1 << batch, keys=1 << keys, **call)
    assert us <= decode_us(batch=1 << batch, keys=2 << keys, **call) + 3  # splits, and so merges, may become fewer
    assert us <= decode_us(batch=2 << batch, keys=1 << keys, **call) + 3
    assert us >= 0.7 * (1 << batch + keys) * 8 * 2 * 128 * (2 - e4m3) / CHIP.bytes_per_us


def test_query_heads_that_share_keys_cost_no_reads_and_queries_with_choices_of_their_own_do():
    assert decode_us(heads=64) < 1.05 * decode_us(heads=8)
    assert decode_us(keys=4 * 8192, queries=4, block=64, picked=True) > 3 * decode_us(keys=8192, block=64, picked=True)


@pytest.mark.parametrize(
    "chooser", ["sampled(8, keep=0.1)", "antidiagonal(16, keep=0.1)", "pooled(keep=0.1)", "sub_blocks(16, keep=0.1)"]
)
def test_a_choice_takes_four_times_as_long_over_twice_the_tokens_at_most(chooser):
    us = []
    for tokens in (32768, 65536, 131072):
        sizes = AttentionSizes(1, 32, 8, tokens, tokens, 128, 128)
        work = describe_chooser(parse(chooser), BlockGrid(tokens, tokens, 128), True, sizes, CHIP)
        us.append(predict_work(work, CHIP).us)
    assert us[0] < us[1] < us[2] and us[2] / us[1] < 4.01


def test_choosers_without_rows_and_columns_are_not_predicted():
    sizes = AttentionSizes(1, 8, 8, 4096, 4096, 128, 128)
    assert describe_chooser(parse("last_queries(64, keep=0.1)"), BlockGrid(4096, 4096, 128), True, sizes, CHIP) is None


def test_factors_are_kept_in_a_file_and_missing_ones_are_those_of_a_shipped_chip(tmp_path):
    mine = replace(CHIP, factors={"choice": {"launches": 3.0}})
    chips.write_chips(tmp_path / "chips.json", [mine])
    assert list(chips.read_chips(tmp_path / "chips.json")) == [mine]
    work = calls.describe_decode(AttentionSizes(1, 8, 8, 1, 4096, 64, 64), 4096, mine, None)
    found = predict_work(work, mine)
    assert mine.factors_of("choice") == {"launches": 3.0} and not found.measured
    assert predict_work(work, chips.shipped_chips()["NVIDIA H200"]).measured
    assert sum(found.parts.values()) == pytest.approx(found.us) and 0 not in found.parts.values()
