"""The benchmark on a machine that others use: what its tables and headlines say of times that moved."""

import pytest
import torch

from sparse_flash.benchmarks.measure.drift import BaselineTimer
from sparse_flash.benchmarks.measure.noise import MARK, doubts
from sparse_flash.benchmarks.report import page
from sparse_flash.benchmarks.report.tables import Gain, gains, tables
from sparse_flash.benchmarks.results import Results
from sparse_flash.benchmarks.workload import cases, masks

SHAPE = cases.Shape(1, 2, 1024, 64)
FULL, CAUSAL = (cases.Case(SHAPE, mask, "sdpa-flash") for mask in (masks.FULL, masks.CAUSAL))
WINDOW = cases.Case(SHAPE, cases.Mask.of("causal & local(128)"), "sparse_flash")
# Of dense causal attention, before and after the window, on a machine that had become half as fast as it was before.
SLOWER = {"forward_ms": [30.0, 30.0], "backward_ms": [60.0, 60.0]}


def stored(around: dict = SLOWER, **facts) -> dict:
    """The file of a run. around: the times of dense causal attention around the window. facts: of the window's result."""

    def result(ms: float, density: float, **more) -> dict:
        return {"forward_ms": ms, "backward_ms": 2 * ms, "correct": True, "density": density, "block_density": density} | more

    ours = result(10.0, 0.2, causal=True, around={CAUSAL.key: around}, **facts)
    results = {FULL: result(30.0, 1.0), CAUSAL: result(15.0, 0.5), WINDOW: ours}
    return {
        "settings": {"device": "cpu", "quick": True, "dtype": "float32"},
        "environment": {"device": "a CPU", "date": "2026-11-30"},
        "suites": {"speedup": [case.key for case in results]},
        "cases": {case.key: {"case": case.as_data(), "result": found} for case, found in results.items()},
    }


def gain_of(data: dict) -> Gain:
    (gain,) = gains(data)
    return gain


@pytest.mark.parametrize(
    "facts, doubtful",
    [
        ({"forward_ms_spread": [9.5, 10.5]}, False),
        ({"forward_ms_spread": [9.0, 11.5]}, True),
        ({"around": {"dense": {"forward_ms": [30.0, 31.0], "backward_ms": [60.0, 75.0]}}}, True),
    ],
    ids=str,
)
def test_a_result_is_doubted_for_its_spread_and_for_what_its_baselines_did(facts, doubtful):
    assert bool(doubts({"forward_ms": 10.0, "backward_ms": 20.0} | facts)) == doubtful


def test_a_baseline_is_timed_before_and_after_a_row_and_the_time_after_is_that_before_the_next(monkeypatch):
    times = iter([30.0, 31.0, 32.0])
    monkeypatch.setattr(BaselineTimer, "_time", lambda *_: {"forward_ms": next(times)})
    timer = BaselineTimer(torch.device("cpu"), None, None)
    around = [timer.measure([CAUSAL], lambda: {"forward_ms": 10.0})["around"][CAUSAL.key]["forward_ms"] for _ in range(2)]
    assert around == [[30.0, 31.0], [31.0, 32.0]]


def test_a_causal_mask_is_compared_with_causal_attention_as_it_was_measured_around_the_row():
    data = stored()
    gain = gain_of(data)
    assert (gain.forward, gain.total, gain.over, gain.doubtful) == (3.0, 3.0, "causal, sdpa-flash", False)
    assert gain.kept == gain.visited == 0.2 / 0.5  # of the pairs and blocks of the dense call
    assert dict(page.headlines(data))["3.0x"].startswith("as fast as dense causal attention (sdpa-flash)")
    data["cases"][WINDOW.key]["result"]["causal"] = False
    assert gain_of(data).over == "full, sdpa-flash" and gain_of(data).forward == 3.0


def test_a_row_whose_baseline_moved_is_marked_where_its_figure_stands_and_makes_no_headline(tmp_path):
    data = stored({"forward_ms": [15.0, 30.0], "backward_ms": [30.0, 60.0]})
    speedup, doubtful = tables(data)
    row = dict(zip(speedup.columns, speedup.rows[-1], strict=True))
    assert row["x both"] == f"2.25 {MARK}" and row["forward ms"] == f"10.0 {MARK}" and any(MARK in note for note in speedup.notes)
    assert doubtful.rows == [[WINDOW.key, f"its baseline ({CAUSAL.key}) changed by 100% while it was measured"]]
    figure, said = page.headlines(data)[0]
    assert figure == "1.5x to 3.0x" and "bench --retry" in said
    assert f'<td class="doubtful">10.0 {MARK}</td>' in page.write(Results(tmp_path, data)).read_text()
