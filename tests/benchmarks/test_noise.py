"""The benchmark on a machine that others use: what it reports, with fake clocks and peers."""

import json
from pathlib import Path
from types import SimpleNamespace

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


MS = {
    "full | sdpa-flash": 30.0,
    "full | sparse_flash": 32.0,
    "causal | sdpa-flash": 15.0,
    "causal & local(128) | sparse_flash": 5.0,
    "random(0.25) | sparse_flash": 10.0,
}
FULL, OURS, CAUSAL, MINE, OTHER = (f"{SHAPE} | {end}" for end in MS)


class Machine:
    """Peers without tensors, on a machine whose speed a test changes. speed: 1 is as fast as ``MS`` says."""

    def __init__(self, monkeypatch):
        self.speed, self.timed, self.spread = 1.0, [], 0.02
        self.before_timing = lambda key: None
        monkeypatch.setattr(throughput, "run", self.measured)
        monkeypatch.setattr(throughput.Prepared, "of", lambda case, device: self.peer(case.key))
        monkeypatch.setattr(page, "write", lambda results: None)  # pictures take most of the time

    def timings(self, key: str, spread: float = 0.0) -> list[tuple[str, Timing]]:
        self.before_timing(key)
        self.timed.append(key)
        ms, half = next(ms for end, ms in MS.items() if key.endswith(end)) / self.speed, spread / 2
        times = (("forward_ms", ms), ("backward_ms", 2 * ms))
        return [(name, Timing(time, time * (1 - half), time * (1 + half))) for name, time in times]

    def peer(self, key: str):
        return SimpleNamespace(peer=Peer(), prepare=lambda: None, time=lambda seconds: self.timings(key))

    def measured(self, case, device, limit, seconds):
        if isinstance(case, cases.CompileCase):
            return {"refused": "not now"}
        density = 1.0 if "full" in case.key else 0.5 if "| causal | " in case.key else 0.2
        facts = {"correct": True, "causal": "causal" in case.key, "dtype": "float32", "errors": {}, "extra_bytes": 1}
        for name, timing in self.timings(case.key, self.spread):
            facts |= timing.as_result(name)
        return facts | {"density": density, "block_density": density}

    def slows_down_after(self, timings: int) -> None:
        """To half its speed."""

        def slower(key):
            if len(self.timed) == timings:
                self.speed = 0.5

        self.before_timing = slower


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


write = page.write


def measured(folder, **options) -> tuple[Results, str]:
    """The speedup suite of dense attention and one mask: (results, what was printed)."""
    only = ("full | ", "| causal | sdpa", "local(128) | ")
    defaults = {"suites": ("speedup",), "only": only, "out": folder, "quick": True, "device": "cpu"}
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    return run(Options(**defaults | options), console), console.export_text()


def gains_of(results: Results) -> dict:
    return {gain.row.key: gain for gain in gains(results.data)}


def lines_of(table) -> dict[str, dict[str, str]]:
    """The rows of a table, by the mask and the peer."""
    return {f"{SHAPE} | {row[0]} | {row[1]}": dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_a_causal_mask_is_compared_with_causal_attention_and_any_other_with_attention_of_all_pairs(machine, tmp_path):
    results, _ = measured(tmp_path, only=("full | ", "causal | sdpa", "local(128) | ", "random"))
    mine, other = (gains_of(results)[key] for key in (MINE, OTHER))
    assert (mine.forward, mine.total, mine.over) == (3.0, 3.0, "causal, sdpa-flash")
    assert (other.forward, other.total, other.over) == (3.0, 3.0, "full, sdpa-flash")
    assert mine.kept == mine.visited == 0.2 / 0.5 and other.kept == 0.2  # of the pairs and blocks of the dense call
    assert results.get(MINE)["around"].keys() == {CAUSAL}
    said = lines_of(tables(results.data)[0])[MINE]
    assert (said["x both"], said["x at best"], said["over"]) == ("3.00", "2.50", "causal, sdpa-flash")
    del results.data["cases"][MINE]["result"]["causal"]  # measured before this was recorded
    assert gains_of(results)[MINE].forward is None


def test_a_ratio_is_to_what_was_measured_around_the_row(machine, tmp_path):
    machine.slows_down_after(1)  # from our first row on; the ratio does not change
    results, _ = measured(tmp_path)
    assert results.get(FULL)["forward_ms"] == 30.0 and results.get(MINE)["forward_ms"] == 10.0
    gain = gains_of(results)[MINE]
    assert gain.forward == gain.total == pytest.approx(3.0) and not gain.doubtful
    assert dict(page.headlines(results.data))["3.0x"].startswith("as fast as dense causal attention (sdpa-flash)")


def test_a_row_whose_baseline_moved_is_marked_where_its_figure_stands_and_makes_no_headline(machine, tmp_path):
    machine.slows_down_after(7)  # timed after the last row
    results, printed = measured(tmp_path)
    assert f"{MARK} its baseline ({CAUSAL}) changed by 100% while it was measured" in printed
    made = {table.title.partition(",")[0].partition(" (")[0]: table for table in tables(results.data)}
    (speedup,) = (table for title, table in made.items() if title.startswith("Speed-up"))
    mine, dense = (lines_of(speedup)[key] for key in (MINE, OURS))
    assert mine["x both"].endswith(f" {MARK}") and mine["forward ms"] == f"5.00 {MARK}"
    assert (dense["x both"], dense["forward ms"], dense["spread"]) == ("0.94", "32.0", "2%")
    assert any(MARK in note for note in speedup.notes) and [row[0] for row in made["Not to be relied on"].rows] == [MINE]
    headlines = dict(page.headlines(results.data))
    assert headlines.get("0.9x") and not any("local" in text for text in headlines.values())
    assert f'<td class="doubtful">5.00 {MARK}</td>' in write(results).read_text()


def test_a_baseline_that_fails_now_leaves_the_row_with_what_it_had_alone(machine, tmp_path):
    def broken(key):
        if key == CAUSAL and CAUSAL in machine.timed:
            raise RuntimeError("gone")

    machine.before_timing = broken
    results, _ = measured(tmp_path)
    assert "around" not in results.get(MINE) and gains_of(results)[MINE].forward == pytest.approx(3.0)


@pytest.mark.parametrize(
    "suite, expected",
    [("peers", {"fa4", "flex"}), ("small", {"sdpa-cudnn", "sdpa-flash"}), ("speedup", {"sdpa-cudnn", "sdpa-flash"})],
)
def test_baselines_are_the_fastest_right_ones_of_each_table(suite, expected, tmp_path):
    chosen = suites.choose([suite], "cuda")
    results, _ = Results.open(tmp_path, {}, {}, True)
    times = {"sdpa-flash": 4, "sdpa-cudnn": 3, "flex": 5, "flex-fa4": 6, "fa4": 2, "sdpa-efficient": 9, "fa3": 3.5}
    mine = next(case for case in chosen[suite] if case.mask == masks.CAUSAL and case.peer == "sparse_flash")
    for case in chosen[suite]:
        forward, backward = ("forward_us", "both_us") if case.kind == "call" else ("forward_ms", "backward_ms")
        time = times.get(case.peer, 1.0)
        result = {forward: time, backward: 1 + abs(time - 5), "correct": case.peer != "fa4" or suite != "small"}
        results.data["cases"][case.key] = {"result": result}
    assert {rival.peer for rival in suites.find_baselines(mine, chosen, results)} == expected


def test_a_second_run_says_what_it_reused_and_how_to_start_afresh(machine, tmp_path):
    first, printed = measured(tmp_path)
    assert "reused" not in printed
    assert "forward 5 ms, backward 10 ms" in printed and "TFLOP" not in printed  # of a CPU
    machine.timed.clear()
    second, printed = measured(tmp_path)
    assert machine.timed == [] and second.data["cases"] == first.data["cases"]
    assert "reused: 4 cases, measured 20" in printed and "--fresh sets them aside and measures anew" in printed
    assert "--retry" not in printed


def test_times_that_spread_make_a_headline_of_their_range_and_are_measured_again_on_request(machine, tmp_path):
    measured(tmp_path)
    machine.timed.clear()
    machine.spread = 0.5
    results, printed = measured(tmp_path, resume=False)
    assert "starting anew (as asked); earlier results are in results-" in printed and len(machine.timed) == 8
    (figure, said), *others = page.headlines(results.data)
    low, high = (float(end.removesuffix("x")) for end in figure.split(" to "))
    best = max(gain.total for gain in gains(results.data))
    assert low < best < high and "bench --retry" in said and not any(key.endswith("x") for key, _ in others)
    _, printed = measured(tmp_path)
    assert "--retry measures the 4 without numbers, or with doubtful ones, again" in printed
    machine.timed.clear()
    measured(tmp_path, retry=True)
    assert {FULL, OURS, MINE} <= set(machine.timed)


def test_masks_of_the_users_own_have_a_report_of_their_own(machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specs = (), ("causal",), ("causal & local(9)",), ("causal", "full"), ("a" * 99,)
    assert len({default_folder("cpu", False, one) for one in specs}) == 5
    assert default_folder("cpu", True) == Path("runs/bench-cpu-quick")
    suite, _ = measured(None)
    own, _ = measured(None, specs=("causal & local(128)",))
    assert suite.folder != own.folder and (suite.folder / "results.json").exists() and (own.folder / "results.json").exists()
    before = json.loads((suite.folder / "results.json").read_text())
    mixed, printed = measured(suite.folder, specs=("causal & local(128)",))
    assert "starting anew (specs changed)" in printed and mixed.data["settings"]["specs"] == ["causal & local(128)"]
    (aside,) = suite.folder.glob("results-*.json")
    assert json.loads(aside.read_text())["cases"] == before["cases"]
