"""Going up from easy images to large ones, on a few tiny images with a model whose accuracy is set."""

import pytest
from test_long_range import invoke

from experiments.long_range import checkpoint, train
from experiments.long_range.climb import STAGES, stages_to
from experiments.long_range.train import Score

MODEL = ["--dim", 16, "--layers", 1, "--heads", 1, "--head-dim", 16, "--mlp-dim", 16, "--no-compile", "--device", "cpu"]
SMALL = ["--to", 32, "--minutes", 0.05, "--train", 8, "--held-out", 4, "--batch", 4, "--workers", 1, "--evaluations", 3, *MODEL]


def test_a_climb_begins_dense_and_goes_on_sparse(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate_split", lambda *_: Score(0.9, 0.01, 0.5))
    assert "plot" in invoke("climb", *SMALL, "--data", tmp_path / "images", "--out", tmp_path / "runs")
    runs = {path.parent.name: checkpoint.read(path)[0].attention for path in (tmp_path / "runs").glob("*/checkpoint.pt")}
    assert runs.keys() == {"32-4-seed-0", "32-9", "32-14"}
    assert runs["32-4-seed-0"] == "dense" and "butterfly" in runs["32-9"] and runs["32-9"] == runs["32-14"]


def test_minutes_are_shared_by_the_stages_up_to_a_size():
    assert sum(minutes for _, minutes in stages_to(256, 30)) == pytest.approx(30)
    assert [stage.name for stage, _ in stages_to(64, 1)] == ["32-4", "32-9", "32-14", "64-9", "64-14"]
    assert sum(stage.share for stage in STAGES) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"the size must be one of \[32, 64, 128, 256\]; got 48"):
        stages_to(48, 1)
