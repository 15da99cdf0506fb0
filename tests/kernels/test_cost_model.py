"""The model of time: its queue beside brute force, and what must hold of any prediction."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.benchmarks.fit import Sample, fit
from sparse_flash.kernels.cost import chips
from sparse_flash.kernels.cost.chips import Chip, KernelFamily
from sparse_flash.kernels.cost.hopper import describe_backward, describe_forward, share_reloaded
from sparse_flash.kernels.cost.model import AttentionSizes, predict_pass, simulate_queue

CHIP = Chip("test", 132, 7.2e6, 2.7e6)
PASSES = pytest.mark.parametrize("launched", [describe_forward, describe_backward])


def sizes(tokens: int, heads=16, batch=1, head_dim=128, kv_heads=None) -> AttentionSizes:
    return AttentionSizes(batch, heads, kv_heads or heads, tokens, tokens, head_dim, head_dim)


def microseconds(launched, spec, of: AttentionSizes, block_size=128) -> float:
    mask = sf.compile_mask(spec, of.q_len, block_size=block_size).kernel_table(True) if spec else None
    return predict_pass(launched(of, mask, CHIP), CHIP).us


def finished(times: list[float], programs: int) -> tuple[float, list[list[int]]]:
    """When the last program ends, and which tiles each one takes, event by event."""
    free, taken = [0.0] * programs, [[] for _ in range(programs)]
    for tile, time in enumerate(times):
        program = free.index(min(free))
        free[program] += time
        taken[program].append(tile)
    return max(free), taken


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 8))
def test_the_queue_ends_when_programs_that_take_its_tiles_one_by_one_end(times, programs):
    amounts = np.stack([np.ones(len(times)), times], 1)
    last = simulate_queue(np.array(times, float), programs, amounts)
    end, taken = finished(times, programs)
    assert last.time == end and last.busy == sum(times) / programs
    assert last.amounts[1] == end  # of one program that ends last
    assert last.amounts[0] in {len(tiles) for tiles in taken if sum(times[tile] for tile in tiles) == end}


def test_a_heavy_row_before_many_light_ones_ends_last():
    times = np.array([5000.0] + [1.0] * 9999)
    assert simulate_queue(times, 5, np.ones((len(times), 1))).time == 5000


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 30), st.integers(1, 6))
def test_blocks_that_fit_the_cache_are_not_loaded_again_and_others_at_most_at_each_visit(seed, rows):
    rng = np.random.default_rng(seed)
    count = rng.integers(0, 9, 20)
    ends = np.cumsum(count)
    bounds, cols = np.stack([ends - count, ends], 1), rng.integers(0, 30, int(ends[-1]) + 1)
    assert share_reloaded(bounds, cols, rows, 30) == 0
    shares = [share_reloaded(bounds, cols, rows, capacity) for capacity in (1, 8)]
    assert all(0 <= share <= 1 for share in shares)


def test_rows_in_step_load_each_block_once_and_scattered_rows_load_each_visit():
    steps, rows, capacity = 64, 16, 16
    bounds = np.stack([np.arange(rows) * steps, np.arange(1, rows + 1) * steps], 1)
    together = np.tile(np.arange(steps), rows)
    apart = (np.arange(steps) * rows + np.arange(rows)[:, None]).ravel()
    assert share_reloaded(bounds, together, rows, capacity) == 1 / rows
    assert share_reloaded(bounds, apart, rows, capacity) == 1


@PASSES
def test_a_call_with_more_tokens_or_with_more_pairs_takes_more_time(launched):
    by_tokens = [microseconds(launched, "causal", sizes(tokens)) for tokens in (2048, 4096, 8192, 16384, 32768)]
    by_window = [microseconds(launched, f"causal & local({w})", sizes(16384)) for w in (128, 512, 1024, 4096, 16384)]
    assert by_tokens == sorted(by_tokens) and by_window == sorted(by_window)


@PASSES
@pytest.mark.parametrize("spec", [None, "causal", "causal & local(1024)", "random(0.1, block=128)"])
def test_the_time_of_large_calls_is_linear_in_the_batch(launched, spec):
    once, twice, eight = (microseconds(launched, spec, sizes(8192, batch=batch)) for batch in (4, 8, 32))
    assert twice / once == pytest.approx(2, rel=0.06) and eight / twice == pytest.approx(4, rel=0.06)


@PASSES
def test_space_for_items_that_are_not_in_use_takes_no_time(launched):
    kept = torch.rand(1, 1, 128, 128, generator=torch.Generator().manual_seed(0)) < 0.1
    kept[..., :2, :] = kept[..., :2] = True
    made = sf.BlockMask.from_blocks(kept, 128)
    assert made.by_query.is_split and int((made.by_query.work[0, :, 0] == 128).sum()) > 32
    queue = launched(sizes(16384), made, CHIP).amounts()
    assert (queue[:, 1:3].sum(1) > 0).all() and queue[:, 1].sum() == 16 * int(kept.sum()) * (
        1 if launched is describe_forward else 2
    )


@PASSES
def test_a_mask_that_keeps_everything_takes_about_as_long_as_dense_attention(launched):
    mask = sf.BlockMask.from_blocks(torch.ones(1, 1, 64, 64, dtype=torch.bool), 128)
    dense, sparse = (predict_pass(launched(sizes(8192), table, CHIP), CHIP).us for table in (None, mask))
    assert sparse == pytest.approx(dense, rel=0.02)


@PASSES
def test_heads_with_masks_of_their_own_take_the_sum_of_their_times(launched):
    specs = ["causal & local(512)", "causal"]
    alike = [microseconds(launched, spec, sizes(16384, heads=64)) for spec in specs]
    mask = sf.BlockMask.per_head([specs[head % 2] for head in range(64)], q_len=16384, block_size=128)
    mixed = predict_pass(launched(sizes(16384, heads=64), mask, CHIP), CHIP).us
    assert mixed == pytest.approx(sum(alike) / 2, rel=0.1)


@PASSES
def test_the_parts_are_the_whole_and_the_largest_one_bounds_it(launched):
    mask = sf.compile_mask("bigbird", 16384)
    found = predict_pass(launched(sizes(16384), mask, CHIP), CHIP)
    assert sum(found.parts.values()) == pytest.approx(found.us) and found.parts[found.bound] == max(found.parts.values())
    short = predict_pass(launched(sizes(256, heads=1), None, CHIP), CHIP)
    assert short.bound == "the host" and short.host_us > short.us


@pytest.mark.parametrize("head_dim, kv_heads", [(64, 16), (128, 4), (96, 16), (256, 16)])
def test_a_fit_finds_the_constants_that_times_were_made_from(head_dim, kv_heads):
    specs = [None, "causal", "causal & local(1024)", "local(300)", "butterfly(block=128)", "random(0.1, block=128)"]
    launches = []
    for spec in specs:
        mask = spec and sf.compile_mask(spec, 16384)
        launches += [
            launched(sizes(16384, head_dim=head_dim, kv_heads=kv_heads), mask, CHIP)
            for launched in (describe_forward, describe_backward)
        ]
    families = {launch.family for launch in launches}
    truth = replace(CHIP, measured={f: chips.Times(*(1.3 * t for t in CHIP.times(f))) for f in families})
    samples = [Sample(launch, predict_pass(launch, truth).us) for launch in launches]
    assert max(abs(sample.error(CHIP)) for sample in samples) > 0.15
    assert max(abs(sample.error(fit(CHIP, samples))) for sample in samples) < 0.02


def test_chips_are_kept_in_a_file_and_those_of_a_machine_come_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_FLASH_CACHE", str(tmp_path))
    family = KernelFamily(True, 192, 128, 64, 128, 1)
    mine = replace(CHIP, name="NVIDIA H200", measured={family: chips.Times(1.0, 2.0, 3.0, 0.5)})
    shipped = chips.known_chips()
    assert shipped["NVIDIA H200"].measured != mine.measured
    chips.write_chips(chips.calibrated_file(), [mine])
    chips.write_chips(chips.calibrated_file(), [CHIP])
    assert chips.known_chips() == shipped | {"NVIDIA H200": mine, "test": CHIP}
    assert len(json.loads(chips.calibrated_file().read_text())) == 2


def test_a_family_that_was_not_measured_is_scaled_like_the_most_alike_one():
    known, other = KernelFamily(False, 128, 128, 128, 128, 1), KernelFamily(False, 96, 96, 128, 128, 1)
    chip = replace(CHIP, measured={known: chips.Times(*(2 * time for time in CHIP.times(known)))})
    assert chip.times(other) == pytest.approx([2 * time for time in CHIP.times(other)])
    assert known in chip.measured and other not in chip.measured
