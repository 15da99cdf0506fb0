"""The benchmark on a machine that others use: what it reports, with fake clocks and peers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from rich.console import Console

from sparse_flash.benchmarks.baselines.base import Peer
from sparse_flash.benchmarks.measure import noise, throughput
from sparse_flash.benchmarks.measure.noise import MARK, Timing, doubts
from sparse_flash.benchmarks.report import page
from sparse_flash.benchmarks.report.tables import gains, tables
from sparse_flash.benchmarks.results import Results
from sparse_flash.benchmarks.run import Options, default_folder, run
from sparse_flash.benchmarks.workload import cases, masks, suites

CPU = torch.device("cpu")
SHAPE = cases.Shape(1, 2, 1024, 64)


def test_a_time_is_the_median_with_its_quartiles(monkeypatch):
    now, lengths = SimpleNamespace(s=0.0), iter([1.0, 9.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(noise.time, "perf_counter", lambda: now.s)

    def fn():
        now.s += next(lengths) * 1e-3

    timing = throughput.time_ms(fn, CPU, seconds=0.016)
    assert timing == Timing(pytest.approx(3.0), pytest.approx(2.0), pytest.approx(4.0))
    assert timing.as_result("forward_ms") == {"forward_ms": pytest.approx(3.0), "forward_ms_spread": pytest.approx([2.0, 4.0])}


@pytest.mark.parametrize(
    "facts, doubtful",
    [
        ({"forward_ms_spread": [9.5, 10.5]}, False),
        ({"forward_ms_spread": [9.0, 11.5]}, True),
        ({"around": {"dense": {"forward_ms": [30.0, 33.0]}}}, False),
        ({"around": {"dense": {"forward_ms": [30.0, 31.0], "backward_ms": [60.0, 90.0]}}}, True),
        ({"around": {"dense": {"forward_ms": [45.0, 30.0]}}}, True),
    ],
    ids=str,
)
def test_a_result_is_doubted_for_its_spread_and_for_what_its_baselines_did(facts, doubtful):
    assert bool(doubts({"forward_ms": 10.0, "backward_ms": 20.0} | facts)) == doubtful


class Machine:
    """Peers without tensors, on a machine whose speed a test changes. speed: 1 is as fast as ``MS`` says."""

    MS: ClassVar = {
        "full | sdpa-flash": 30.0,
        "full | sparse_flash": 32.0,
        "causal | sdpa-flash": 15.0,
        "causal & local(128) | sparse_flash": 5.0,
    }

    def __init__(self, monkeypatch):
        self.speed, self.timed, self.spread = 1.0, [], 0.02
        self.before_timing = lambda key: None
        monkeypatch.setattr(throughput, "run", self.measured)
        monkeypatch.setattr(throughput.Prepared, "of", self.peer)

    def ms(self, key: str) -> float:
        self.before_timing(key)
        self.timed.append(key)
        return next(ms for end, ms in self.MS.items() if key.endswith(end)) / self.speed

    def measured(self, case, device, limit, seconds):
        if isinstance(case, cases.CompileCase):
            return {"refused": "not now"}
        ms, half = self.ms(case.key), self.spread / 2
        forward, backward = (Timing(t, t * (1 - half), t * (1 + half)) for t in (ms, 2 * ms))
        density = 1.0 if "full" in case.key else 0.5 if "| causal | " in case.key else 0.2
        facts = {"correct": True, "causal": "causal" in case.key, "dtype": "float32", "errors": {}, "extra_bytes": 1}
        facts |= {"density": density, "block_density": density}
        return facts | forward.as_result("forward_ms") | backward.as_result("backward_ms")

    def peer(self, case, device):
        return SimpleNamespace(peer=Peer(), prepare=lambda: None, time=lambda seconds: self.times(case.key))

    def times(self, key):
        ms = self.ms(key)
        return [(name, Timing(time, time, time)) for name, time in (("forward_ms", ms), ("backward_ms", 2 * ms))]


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(page, "write", lambda results: None)  # pictures take most of the time
    return Machine(monkeypatch)


write = page.write


def measured(folder, **options) -> tuple[Results, str]:
    """The speedup suite of dense attention and one mask: (results, what was printed)."""
    only = ("full | ", "| causal | sdpa", "local(128) | ")
    defaults = {"suites": ("speedup",), "only": only, "out": folder, "quick": True, "device": "cpu"}
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    return run(Options(**defaults | options), console), console.export_text()


FULL, OURS, CAUSAL, MINE = (f"{SHAPE} | {end}" for end in Machine.MS)


def test_a_causal_mask_is_compared_with_causal_attention_and_any_other_with_attention_of_all_pairs(machine, tmp_path):
    machine.MS = machine.MS | {"random(0.25) | sparse_flash": 10.0}
    results, _ = measured(tmp_path, only=("full | ", "causal | sdpa", "local(128) | ", "random"))
    found = {gain.row.label: gain for gain in gains(results.data)}
    mine, other = found["causal & local(128)"], found["random(0.25)"]
    assert (mine.forward, mine.total, mine.over) == (3.0, 3.0, "causal, sdpa-flash")
    assert (other.forward, other.total, other.over) == (3.0, 3.0, "full, sdpa-flash")
    assert mine.kept == mine.visited == 0.2 / 0.5 and other.kept == 0.2  # of the pairs and blocks of the dense call
    assert results.get(MINE)["around"].keys() == {CAUSAL}
    line = next(row for row in tables(results.data)[0].rows if row[0] == "causal & local(128)")
    said = dict(zip(tables(results.data)[0].columns, line, strict=True))
    assert (said["x both"], said["x at best"], said["over"]) == ("3.00", "2.50", "causal, sdpa-flash")
    del results.data["cases"][MINE]["result"]["causal"]  # measured before this was recorded
    assert all(gain.forward is None for gain in gains(results.data) if gain.row.key == MINE)


def test_a_ratio_is_to_what_was_measured_around_the_row(machine, tmp_path):
    """From our first row on, the machine is half as fast; the ratio does not change."""

    def slower(key):
        if len(machine.timed) == 1:
            machine.speed = 0.5

    machine.before_timing = slower
    results, _ = measured(tmp_path)
    assert results.get(FULL)["forward_ms"] == 30.0 and results.get(MINE)["forward_ms"] == 10.0
    gain = next(gain for gain in gains(results.data) if gain.row.key == MINE)
    assert gain.forward == gain.total == pytest.approx(3.0) and not gain.doubtful
    assert dict(page.headlines(results.data))["3.0x"].startswith("as fast as dense causal attention (sdpa-flash)")


def test_a_row_whose_baseline_moved_is_marked_where_its_figure_stands_and_makes_no_headline(machine, tmp_path):
    def slower(key):
        if len(machine.timed) == 7:  # timed after the last row
            machine.speed = 0.5

    machine.before_timing = slower
    results, printed = measured(tmp_path)
    assert f"{MARK} its baseline ({CAUSAL}) changed by 100% while it was measured" in printed
    (speedup,) = (table for table in tables(results.data) if table.title.startswith("Speed-up"))
    lines = {(row[0], row[1]): dict(zip(speedup.columns, row, strict=True)) for row in speedup.rows}
    mine, dense = lines["causal & local(128)", "sparse_flash"], lines["full", "sparse_flash"]
    assert mine["x both"].endswith(f" {MARK}") and mine["forward ms"] == f"5.00 {MARK}"
    assert dense["x both"] == "0.94" and dense["forward ms"] == "32.0" and dense["spread"] == "2%"
    assert any(MARK in note for note in speedup.notes)
    (listed,) = (table for table in tables(results.data) if table.title == "Not to be relied on")
    assert [row[0] for row in listed.rows] == [MINE]
    assert dict(page.headlines(results.data)).get("0.9x") and not any("local" in text for _, text in page.headlines(results.data))
    written = write(results).read_text()
    assert f'<td class="doubtful">5.00 {MARK}</td>' in written


def test_times_that_spread_make_a_headline_of_their_range_and_how_to_repeat(machine, tmp_path):
    machine.spread = 0.5
    data = measured(tmp_path)[0].data
    (figure, said), *others = page.headlines(data)
    low, high = (float(end.removesuffix("x")) for end in figure.split(" to "))
    best = max(gain.total for gain in gains(data))
    assert low < best < high and "bench --retry" in said and not any(key.endswith("x") for key, _ in others)


def test_a_baseline_that_fails_now_leaves_the_row_with_what_it_had_alone(machine, tmp_path):
    def broken(key):
        if key == CAUSAL and machine.timed.count(CAUSAL):
            raise RuntimeError("gone")

    machine.before_timing = broken
    results, _ = measured(tmp_path)
    assert "around" not in results.get(MINE)
    assert next(gain for gain in gains(results.data) if gain.row.key == MINE).forward == pytest.approx(3.0)


@pytest.mark.parametrize(
    "suite, expected",
    [("peers", {"fa4", "flex-fa4"}), ("small", {"sdpa-cudnn", "sdpa-flash"}), ("speedup", {"sdpa-cudnn", "sdpa-efficient"})],
)
def test_baselines_are_the_fastest_right_ones_of_each_table(suite, expected, tmp_path):
    chosen = suites.choose([suite], "cuda")
    results, _ = Results.open(tmp_path, {}, {}, True)
    times = {"sdpa-flash": 4, "sdpa-cudnn": 3, "flex": 5, "flex-fa4": 6, "fa4": 2, "sdpa-efficient": 9, "fa3": 3.5}
    mine = next(case for case in chosen[suite] if case.mask == masks.CAUSAL and case.peer == "sparse_flash")
    for case in chosen[suite]:
        forward, backward = ("forward_us", "both_us") if case.kind == "call" else ("forward_ms", "backward_ms")
        time = times.get(case.peer, 1.0)
        result = {forward: time, backward: 1 / time, "correct": case.peer != "fa4" or suite != "small"}
        results.data["cases"][case.key] = {"result": result}
    assert {rival.peer for rival in suites.find_baselines(mine, chosen, results)} == expected


def test_a_second_run_says_what_it_reused_and_how_to_start_afresh(machine, tmp_path):
    first, first_printed = measured(tmp_path)
    assert "reused" not in first_printed
    machine.timed.clear()
    second, printed = measured(tmp_path)
    assert machine.timed == [] and second.data["cases"] == first.data["cases"]
    assert "forward 5 ms, backward 10 ms" in first_printed and "TFLOP" not in first_printed  # of a CPU
    assert "reused: 4 cases, measured 20" in printed and "--fresh sets them aside and measures anew" in printed
    assert "--retry" not in printed
    machine.spread = 0.5
    _, printed = measured(tmp_path, resume=False)
    assert "starting anew (as asked); earlier results are in results-" in printed and len(machine.timed) == 8
    _, printed = measured(tmp_path)
    assert "--retry measures the 4 without numbers, or with doubtful ones, again" in printed
    machine.timed.clear()
    measured(tmp_path, retry=True)
    assert {FULL, OURS, MINE} <= set(machine.timed)


def test_masks_of_the_users_own_have_a_report_of_their_own(machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {
        default_folder("cpu", False, specs) for specs in ((), ("causal",), ("causal & local(9)",), ("causal", "full"), ("a" * 99,))
    }
    assert len(folders) == 5 and default_folder("cpu", True) == Path("runs/bench-cpu-quick")
    suite, _ = measured(None)
    own, _ = measured(None, specs=("causal & local(128)",))
    assert suite.folder != own.folder and (suite.folder / "results.json").exists() and (own.folder / "results.json").exists()
    before = (suite.folder / "results.json").read_text()
    mixed, printed = measured(suite.folder, specs=("causal & local(128)",))
    assert "starting anew (specs changed)" in printed and mixed.data["settings"]["specs"] == ["causal & local(128)"]
    aside = next(suite.folder.glob("results-*.json"))
    assert json.loads(aside.read_text())["cases"] == json.loads(before)["cases"]
