"""Programs around predicted times: drawn rows, the calibration, and the fit to results files."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import sparse_flash as sf
from sparse_flash.benchmarks import calibrate, drawn, fit_cost
from sparse_flash.benchmarks.measure.noise import Timing
from sparse_flash.benchmarks.workload.drawn import draw_cases as cases
from sparse_flash.benchmarks.workload.problem import parse_and_compile
from sparse_flash.cli.app import app
from sparse_flash.kernels.cost import chips
from sparse_flash.kernels.cost.chips import Chip, Times
from sparse_flash.kernels.cost.model import predict_pass
from sparse_flash.tools.cost import chip_named, predict


def test_a_seed_draws_the_same_cases_and_another_draws_others():
    once, again, other = (list(cases(seed, 12)) for seed in (3, 3, 4))
    assert once == again != other
    assert list(cases(3, 5)) == once[:5]


def test_drawn_cases_differ_in_all_respects_and_each_can_be_predicted():
    found, chip = list(cases(7, 40)), chip_named("h200")
    assert any(isinstance(case.mask.spec, tuple) for case in found)
    assert any(case.shape.kv_heads != case.shape.heads for case in found)
    for sizes in zip(
        *((c.shape.batch, c.shape.heads, c.shape.tokens, c.shape.head_dim, c.mask.block_size) for c in found), strict=True
    ):
        assert len(set(sizes)) > 2
    for case in found:
        s = case.shape
        mask = parse_and_compile(case.mask, s.tokens, torch.device("cpu"))[1]
        if s.head_dim > 32 and (mask.coarse or mask).block_size >= 64:
            time = predict(mask, s.heads, s.head_dim, chip, batch=s.batch, kv_heads=s.kv_heads)
            assert 0 < time.forward_us < 1e6 and time.forward_us < time.backward_us < 1e7


@pytest.fixture
def small(monkeypatch):
    """Drawn cases of few tokens, for a CPU."""

    def few(seed, count):
        for case in cases(seed, count):
            shape = replace(case.shape, batch=1, heads=2, kv_heads=1, tokens=256, head_dim=16)
            yield replace(case, shape=shape, mask=replace(case.mask, spec="causal & local(70)"))

    monkeypatch.setattr(drawn, "draw_cases", few)
    monkeypatch.setattr(drawn, "CPU_SECONDS", 0.0)


def test_drawn_rows_are_measured_and_written_with_their_seed(small, tmp_path, capsys):
    assert drawn.main(["--seed", "5", "--count", "2", "--device", "cpu", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "drawn.json").read_text())
    assert data["seed"] == 5 and len(data["rows"]) == 2 and data["environment"]["torch"]
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 and row["backend"] == "torch" for row in data["rows"])
    assert "2 of 2" in capsys.readouterr().out


def test_close_choices_are_listed_with_what_auto_takes_first_and_predicted_times(tmp_path, capsys):
    assert drawn.main(["--choices", "--seed", "2", "--count", "6", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "drawn.json").read_text())["rows"]
    assert len(rows) == 6 and "6 of 6" in capsys.readouterr().out
    for row in rows:
        assert row["chosen"] == next(iter(row["options"])) and len(row["options"]) == 2
        first, second = (option["predicted_ms"] for option in row["options"].values())
        assert 1 / 1.5 < first / second < 1.5


@pytest.mark.parametrize(
    "spec, block_size, options",
    [
        ("causal & local(512)", 64, {"blocks of 128", "own"}),
        (f"causal & documents({tuple(range(0, 9000, 1000))})", 128, {"by document", "own"}),
        ("causal & random(0.97, block=128)", 128, {"own", "dense"}),
        ("causal & local(512)", 128, {"own"}),
    ],
)
def test_options_are_tables_of_the_same_pairs(spec, block_size, options):
    mask = sf.compile_mask(spec, 8000, block_size=block_size)
    found = drawn.list_options(mask)
    assert set(found) == options
    for name, one in found.items():
        assert name == "dense" or one.equal(mask)
        assert (one.coarse is not None) == (name == "blocks of 128")
        assert (one.by_document is not None) == (name == "by document")


def test_a_row_that_fails_says_why_and_the_others_still_run(small, tmp_path, monkeypatch):
    measured, failed = drawn.time_passes, []

    def fails_once(*call, **options):
        if not failed:
            failed.append(True)
            raise RuntimeError("no memory left")
        return measured(*call, **options)

    monkeypatch.setattr(drawn, "time_passes", fails_once)
    assert drawn.main(["--count", "2", "--device", "cpu", "--out", str(tmp_path)]) == 1
    first, second = json.loads((tmp_path / "drawn.json").read_text())["rows"]
    assert "no memory left" in first["failed"] and second["forward_ms"] > 0


def test_no_row_is_begun_after_the_limit(small, tmp_path, capsys):
    assert drawn.main(["--count", "3", "--device", "cpu", "--limit", "-1", "--out", str(tmp_path)]) == 0
    assert not json.loads((tmp_path / "drawn.json").read_text())["rows"] and "3 rows were not begun" in capsys.readouterr().out


# A GPU that differs from its guess: slower steps, quicker rows.
BEFORE = Chip("Test GPU", 132, 7.2e6, 3e6)
FACTORS = 0.8, 1.4, 1.3, 1.1


def simulated(case):
    """The microseconds of a call on a GPU that differs from BEFORE by FACTORS."""
    launches = [sample.launch for sample in calibrate.samples_of_case(case, BEFORE, (1.0, 1.0))]
    truth = {f: Times(*(a * b for a, b in zip(BEFORE.times(f), FACTORS, strict=True))) for f in (x.family for x in launches)}
    return [predict_pass(launch, replace(BEFORE, measured=truth)).us for launch in launches]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_FLASH_CACHE", str(tmp_path))
    return tmp_path / "calibrated.json"


def test_the_calibration_predicts_calls_that_it_did_not_measure(cache):
    found = list(calibrate.measure_samples(BEFORE, simulated, head_dims=calibrate.HEAD_DIMS[:2]))
    made = calibrate.calibrate_chip(BEFORE, found, BEFORE.bytes_per_us)
    assert chips.known_chips()["Test GPU"] == Chip.from_data(made.as_data()) and cache.exists()
    for case in cases(11, 40):
        if case.shape.head_dim in (64, 128) and isinstance(case.mask.spec, str) and case.mask.block_size >= 64:
            for sample in calibrate.samples_of_case(case, BEFORE, simulated(case)):
                assert sample.us < 100 or abs(sample.error(made)) < 0.15, case


def test_the_calibration_ends_at_its_limit():
    assert not list(calibrate.measure_samples(BEFORE, simulated, limit=-1))
    assert len({case.key for case in calibrate.cases()}) == len(list(calibrate.cases()))


def test_the_command_calibrates_this_gpu_and_predictions_use_it(cache, monkeypatch):
    monkeypatch.setattr("sparse_flash.backends.hopper.why_unavailable", lambda: None)
    monkeypatch.setattr("sparse_flash.tools.cost.chip_named", lambda device: BEFORE)
    monkeypatch.setattr(calibrate, "copy_rate", lambda: 2.5e6)
    samples = calibrate.measure_samples
    monkeypatch.setattr(calibrate, "measure_samples", lambda chip: samples(chip, simulated, head_dims=((64, None),)))
    done = CliRunner().invoke(app, ["tune", "--calibrate"])
    assert done.exit_code == 0, done.output
    assert "Test GPU: " in done.output and "median" in done.output and str(cache.parent)[:20] in done.output
    assert chips.known_chips()["Test GPU"].bytes_per_us == 2.5e6


def test_the_command_says_where_there_is_nothing_to_calibrate(monkeypatch):
    monkeypatch.setattr("sparse_flash.backends.hopper.why_unavailable", lambda: "it needs a GPU")
    done = CliRunner().invoke(app, ["tune", "--calibrate"])
    assert done.exit_code and "nothing to calibrate" in done.output


def test_times_and_rates_are_measured_on_the_gpu(monkeypatch):
    monkeypatch.setattr(calibrate, "time_ms", lambda fn, device, seconds: fn() is None or Timing(0.5, 0.5, 0.5))
    monkeypatch.setattr(calibrate, "_COPIED", 1 << 10)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kind: empty(*sizes, **kind | {"device": "cpu"}))
    assert calibrate.copy_rate() == pytest.approx(2 * 1024 / 500)


def test_the_fit_reads_drawn_rows_and_reports_errors(tmp_path, capsys, monkeypatch):
    row = {"shape": {"batch": 1, "heads": 16, "tokens": 8192, "head_dim": 128, "kv_heads": None, "v_head_dim": None}}
    row |= {"block_size": 128, "backend": "hopper"}
    rows = [
        row | {"spec": "causal", "forward_ms": 0.5, "backward_ms": 1.6},
        row | {"spec": ["causal", "local(256)"] * 8, "forward_ms": 0.3, "backward_ms": 1.0},
        row | {"spec": "causal & local(64)", "forward_ms": 0.09, "backward_ms": 0.3},
        row | {"spec": "causal", "backend": "triton", "forward_ms": 0.65, "backward_ms": 1.9},
        row | {"spec": "causal", "failed": "no memory"},
    ]
    path = tmp_path / "drawn.json"
    path.write_text(json.dumps({"environment": {"device": "NVIDIA H200"}, "rows": rows}))
    found = list(fit_cost.read_samples(path))
    assert [(gpu, sample.us) for gpu, sample in found] == [("NVIDIA H200", us) for us in (500, 1600, 300, 1000, 90, 300, 650, 1900)]
    assert [sample.launch.family.portable for _, sample in found] == [False] * 6 + [True] * 2
    assert fit_cost.main([str(path), "--plot", str(tmp_path / "plots")]) == 0
    assert {one.name for one in (tmp_path / "plots").iterdir()} == {"predicted.png", "predicted-dark.png"}
    said = capsys.readouterr().out
    assert "NVIDIA H200, forward: 3 passes" in said and "backward: 4 passes" in said and "of 1 shorter passes" in said
    monkeypatch.setattr(chips, "SHIPPED", tmp_path / "chips.json")
    assert fit_cost.main([str(path), "--write"]) == 0
    made = {chip.name: chip for chip in chips.read_chips(tmp_path / "chips.json")}
    assert max(abs(sample.error(made["NVIDIA H200"])) for _, sample in found if sample.us >= 100) < 0.1


def test_passes_that_wait_for_the_host_are_reported_apart(tmp_path, capsys):
    case = {"shape": {"batch": 1, "heads": 4, "tokens": 1024, "head_dim": 64}, "spec": "causal", "backend": "hopper"}
    row = case | {"forward_ms": 0.02, "backward_ms": 0.25}
    path = tmp_path / "drawn.json"
    path.write_text(json.dumps({"environment": {"device": "NVIDIA H200"}, "rows": [row]}))
    assert fit_cost.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "backward, waiting for the host: 1 passes" in said and "backward: " not in said


def test_a_case_is_in_one_part_when_held_out():
    name = fit_cost.FILES[0]
    parts: dict[str, set[int]] = {}
    for _, sample in fit_cost.read_samples(fit_cost.RESULTS / name):
        parts.setdefault(sample.name, set()).add(fit_cost.fold_of(sample.name))
    assert all(len(of_case) == 1 for of_case in parts.values()) and len(set().union(*parts.values())) == 5
