"""Examples in files, and training on them: it learns, stops where it must, and goes on where it was."""

import csv
import math
import re
import signal

import numpy as np
import pytest
import torch
from tiny_classifier import ON_CPU
from typer.testing import CliRunner

from examples.train_lm.report import console
from experiments.long_range import checkpoint, train
from experiments.long_range.cli import app
from experiments.long_range.train import End, Score, evaluate_split, turn_images


def test_images_are_transformed_by_the_eight_symmetries_of_the_square():
    image = torch.arange(9).view(1, 3, 3)
    found = {tuple(one.flatten().tolist()) for one in turn_images(image.expand(8, 3, 3), torch.arange(8))}
    wanted = {tuple(np.rot90(flip, turns).flatten()) for flip in (image[0].numpy(), image[0].numpy().T) for turns in range(4)}
    assert found == wanted and len(found) == 8


def state(run) -> list[torch.Tensor]:
    return [
        *(p.detach().clone() for p in run.model.parameters()),
        *(m.clone() for s in run.optimizer.state.values() for m in s.values()),
    ]


def test_a_run_learns_and_leaves_its_numbers(run):
    one = run(steps=30, micro_batch=32)
    commonest = max(one.examples.manifest["labels"]["held_out"]) / 200
    assert evaluate_split(one.model, one.held_out, 32, ON_CPU).loss == pytest.approx(math.log(10), abs=0.2)
    assert one.train(evaluations=3) is End.DONE
    score = evaluate_split(one.model, one.held_out, 64, ON_CPU)
    assert score.accuracy > commonest + 0.2 and score.error == pytest.approx((score.accuracy * (1 - score.accuracy) / 200) ** 0.5)
    rows = list(csv.DictReader((one.folder / "evaluations.csv").open()))
    assert [int(row["step"]) for row in rows] == [10, 20, 30] and float(rows[-1]["accuracy"]) == pytest.approx(score.accuracy)
    rows = list(csv.DictReader((one.folder / "steps.csv").open()))
    assert [int(row["examples"]) for row in rows] == [32 * step for step in range(1, 31)]
    assert float(rows[-1]["learning_rate"]) < 1e-4 and float(rows[4]["learning_rate"]) > 9e-3


def test_a_resumed_run_ends_bit_for_bit_where_the_uninterrupted_one_ends(run, monkeypatch):
    whole = run("whole")
    assert whole.train(evaluations=2) is End.DONE
    first = run("parts")
    step = first.step

    def interrupted():
        if first.progress.step == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(first, "step", interrupted)
    assert first.train(evaluations=2) is End.STOPPED
    second = run("parts")
    assert second.progress.step == 4 and second.resumed
    assert second.train(evaluations=2) is End.DONE
    assert all(map(torch.equal, state(whole), state(second)))
    steps = [list(csv.DictReader((one.folder / "steps.csv").open())) for one in (whole, second)]
    assert [row["loss"] for row in steps[0]] == [row["loss"] for row in steps[1]] and len(steps[1]) == 6


def invoke(*arguments: object, code: int = 0) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "width", 200)
        result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


TINY = ["--preset", "tiny", "--no-compile", "--device", "cpu"]


@pytest.mark.smoke
def test_commands_prepare_train_compare_and_go_up_in_size(tmp_path):
    """The whole way of a user, on a few small images."""
    for size in (32, 64):
        said = invoke(
            "prepare", "--size", size, "--dashes", 3, "--train", 8, "--held-out", 4, "--workers", 1, "--data", tmp_path / f"d{size}"
        )
        assert "8 of train, 4 of held_out; always saying 0 is right for 50.0%" in said
    common = ["--batch", 4, "--evaluations", 1, *TINY]
    for name, attention in (("dense", "dense"), ("sparse", "butterfly")):
        given = ["--data", tmp_path / "d32", "--attention", attention, "--steps", 2, "--out", tmp_path / name]
        said = invoke("train", *given, *common)
        assert "of 1,024 x 1,024 pairs" in said and "of the held-out right" in said
    large = ["--data", tmp_path / "d64", "--steps", 1, "--batch", 2, "--start", tmp_path / "sparse", "--out", tmp_path / "large"]
    invoke("train", *large, "--attention", "local(64)", "--evaluations", 1, *TINY)
    invoke("export", tmp_path / "dense", tmp_path / "out" / "dense.pt")
    said = invoke("results", *(tmp_path / name for name in ("dense", "sparse", "large")))
    assert re.search(r"dense .*pathfinder 32 3 .*100.0%.* 8 .*±.*sparse .*54.7%.*large .*pathfinder 64 3 .*local\(64\)", said)
    invoke("plot", tmp_path / "dense", tmp_path / "sparse", "--target", tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 5000


def test_a_climb_begins_dense_and_goes_on_sparse(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate_split", lambda *_: Score(0.9, 0.01, 0.5))
    counts = ["--train", 8, "--held-out", 4, "--batch", 4, "--evaluations", 3, "--minutes", 0.05, "--workers", 1]
    invoke("climb", "--to", 32, *counts, *TINY, "--data", tmp_path / "images", "--out", tmp_path / "runs")
    runs = {path.parent.name: checkpoint.read(path)[0].attention for path in (tmp_path / "runs").glob("*/checkpoint.pt")}
    assert runs.keys() == {"32-4-seed-0", "32-9", "32-14"}
    assert runs["32-4-seed-0"] == "dense" and "butterfly" in runs["32-9"] and runs["32-9"] == runs["32-14"]
