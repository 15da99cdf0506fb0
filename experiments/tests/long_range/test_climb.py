"""Going up from easy images to large ones, on a few tiny images with a model whose accuracy is set."""

import csv

import pytest
from test_long_range import invoke

from experiments.long_range import checkpoint, climb, train
from experiments.long_range.climb import STAGES, stages_to
from experiments.long_range.train import Score

MODEL = ["--dim", 16, "--layers", 1, "--heads", 1, "--head-dim", 16, "--mlp-dim", 16, "--no-compile", "--device", "cpu"]
SMALL = ["--to", 32, "--minutes", 0.05, "--train", 8, "--held-out", 4, "--batch", 4, "--workers", 1, "--evaluations", 3, *MODEL]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The folder of images, which are made once."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def accuracies(monkeypatch):
    """Sets the accuracies that evaluations find, in the order in which runs begin; 0.9 for unlisted ones."""
    listed, seen = {}, []

    def evaluated(model, *_):
        if model not in seen:
            seen.append(model)
        return Score(listed.get(seen.index(model), 0.9), 0.01, 0.5)

    monkeypatch.setattr(train, "evaluate_split", evaluated)
    monkeypatch.setattr(climb, "CHECK_AFTER", 0.3)
    return listed


def rows(folder) -> list[dict]:
    return list(csv.DictReader((folder / "evaluations.csv").open()))


def test_a_seed_that_knows_nothing_is_given_up_and_the_next_one_goes_up(tmp_path, images, accuracies):
    accuracies[0] = 0.5
    said = invoke("climb", *SMALL, "--data", images, "--out", tmp_path / "runs")
    assert "seed 0 knows nothing: 50.0%" in said and "plot" in said
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()) == [
        "32-14",
        "32-4-seed-0",
        "32-4-seed-1",
        "32-9",
    ]
    assert len(rows(tmp_path / "runs" / "32-4-seed-0")) == 1 and len(rows(tmp_path / "runs" / "32-4-seed-1")) == 3
    attended = {
        run: checkpoint.read(tmp_path / "runs" / run / "checkpoint.pt")[0].attention for run in ("32-4-seed-1", "32-9", "32-14")
    }
    assert attended["32-4-seed-1"] == "dense" and "butterfly" in attended["32-9"] and attended["32-9"] == attended["32-14"]
    # The same command has nothing left to do.
    before = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/*.csv")}
    invoke("climb", *SMALL, "--data", images, "--out", tmp_path / "runs")
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/*.csv")}


def test_nothing_goes_on_from_a_run_that_lost_what_it_knew(tmp_path, images, accuracies, monkeypatch):
    accuracies[1] = 0.5
    begun, start_from = [], train.Classifier.start_from
    monkeypatch.setattr(train.Classifier, "start_from", lambda self, state, of: begun.append(of) or start_from(self, state, of))
    invoke("climb", *SMALL, "--data", images, "--out", tmp_path / "runs")
    assert len(begun) == 2 and all("32-4-seed-0" in of for of in begun)


def test_a_climb_that_learns_nothing_says_so(tmp_path, images, accuracies):
    accuracies.update({0: 0.5, 1: 0.5})
    said = invoke("climb", *SMALL, "--seeds", 2, "--data", images, "--out", tmp_path / "runs", code=2)
    assert "nothing was learned of 4 dashes with 2 seed(s); pass more --seeds or --minutes" in said


def test_images_of_another_request_are_refused_and_not_taken(tmp_path, images, accuracies):
    given = ["--data", images, "--out", tmp_path / "runs"]
    invoke("climb", *SMALL, *given)
    said = invoke("climb", *SMALL, "--train", 9, "--data", images, "--out", tmp_path / "other", code=2)
    assert "'train': 8" in said and "'train': 9" in said and "pass another --data" in said


def test_minutes_are_shared_by_the_stages_up_to_a_size():
    assert (
        sum(minutes for _, minutes in stages_to(256, 30)) == pytest.approx(30) == 2 * sum(share for _, share in stages_to(64, 15))
    )
    assert [stage.name for stage, _ in stages_to(64, 1)] == ["32-4", "32-9", "32-14", "64-9", "64-14"]
    assert sum(stage.share for stage in STAGES) == pytest.approx(1)
    for size, minutes, said in (
        (48, 1, r"the size must be one of \[32, 64, 128, 256\]; got 48"),
        (32, 0, "minutes must be positive; got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            stages_to(size, minutes)
