"""Examples in files, and training on them: it learns, stops where it must, and goes on where it was."""

import csv
import math
import re
import signal
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_classifier import ON_CPU, SHORT
from typer.testing import CliRunner

from examples.train_lm.report import console
from examples.train_lm.train import NotFinite
from experiments.long_range import checkpoint, train
from experiments.long_range import data as data_module
from experiments.long_range.cli import app
from experiments.long_range.data import Examples, fields_of, prepare, task_of
from experiments.long_range.listops import ListOps
from experiments.long_range.train import End, evaluate_split, turn_images


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_preparing_goes_on_where_it_was_stopped_and_gives_the_same_files(tmp_path, monkeypatch):
    prepare(tmp_path / "whole", SHORT, 250, 30, seed=3)
    made = []

    class Stopped(Exception):
        pass

    def make(self, count, rng, real=ListOps.make):
        if len(made) == 2:
            raise Stopped
        made.append(count)
        return real(self, count, rng)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(ListOps, "make", make)
        prepare(tmp_path / "parts", SHORT, 250, 30, seed=3)
    assert not (tmp_path / "parts" / "manifest.json").exists()
    with pytest.raises(ValueError, match=r"now asked for .*'seed': 4.*pass another --data"):
        prepare(tmp_path / "parts", SHORT, 250, 30, seed=4)
    again = []
    with monkeypatch.context() as patch:
        patch.setattr(data_module, "_make", lambda *given, real=data_module._make: again.append(given[-1]) or real(*given))
        manifest = prepare(tmp_path / "parts", SHORT, 250, 30, seed=3)
    assert again == [("train", 2), ("held_out", 0)]
    assert files(tmp_path / "whole") == files(tmp_path / "parts")
    assert sum(manifest["labels"]["train"]) == 250 and sum(manifest["labels"]["held_out"]) == 30


def test_several_processes_make_what_one_makes(tmp_path):
    for workers in (1, 2):
        prepare(tmp_path / str(workers), SHORT, 250, 30, workers=workers)
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_a_prepared_folder_is_taken_as_it_is_and_another_request_is_an_error(short):
    before = files(short)
    manifest = prepare(short, SHORT, 2000, 200)
    assert files(short) == before and task_of(manifest["task"]) == SHORT
    with pytest.raises(ValueError, match=r"holds .*'train': 2000.*now asked for .*'train': 2001"):
        prepare(short, SHORT, 2001, 200)
    with pytest.raises(ValueError, match="must be at least 1; got 0, 200 and 1"):
        prepare(short, SHORT, 0, 200)
    with pytest.raises(ValueError, match=r"holds no prepared examples; make them: python -m experiments.long_range prepare"):
        Examples(short / "missing", "train")


def test_splits_and_pieces_differ(short):
    train, held_out = Examples(short, "train").inputs, Examples(short, "held_out").inputs
    assert train.shape == (2000, 128) and held_out.shape == (200, 128)
    assert not np.array_equal(train[:100], train[100:200]) and not np.array_equal(train[:100], held_out[:100])


def test_an_epoch_reads_each_example_once_in_an_order_of_its_own(short):
    examples = Examples(short, "train")
    epochs = [np.concatenate([examples.rows(step, 32, 5) for step in range(62 * epoch, 62 * epoch + 62)]) for epoch in (0, 1, 0)]
    assert len(np.unique(epochs[0])) == len(epochs[0]) == 62 * 32
    assert np.array_equal(epochs[0], epochs[2]) and not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], np.concatenate([examples.rows(step, 32, 6) for step in range(62)]))


def test_images_turn_by_the_eight_symmetries_of_the_square():
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


def test_accumulated_passes_take_the_step_of_one_pass(run):
    once, twice = run("once", micro_batch=32), run("twice", micro_batch=8)
    losses = [(once.step()["loss"], twice.step()["loss"]) for _ in range(3)]
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in losses)


def test_a_time_budget_ends_a_run_and_its_learning_rate(run, monkeypatch):
    ticks = count()
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 4))  # a step takes a quarter of a second
    one = run(steps=0, minutes=0.025, warmup=1)
    assert one.train(evaluations=1) is End.DONE
    rows = list(csv.DictReader((one.folder / "steps.csv").open()))
    assert [float(row["seconds"]) for row in rows] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    wanted = [1e-2 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(wanted)


def test_a_checkpoint_of_another_run_and_files_that_are_none_are_errors(run):
    one = run()
    one.folder.mkdir()
    one.save()
    with pytest.raises(
        ValueError, match=r"learning_rate is 0.5 here and 0.01 there; give the same settings, another --out, or --fresh"
    ):
        run(learning_rate=0.5)
    assert run(learning_rate=0.5, fresh=True).resumed is None
    (one.folder / checkpoint.FILE).write_text("nothing")
    with pytest.raises(ValueError, match="is no checkpoint of this program"):
        run()


def test_exported_parameters_are_a_third_of_a_checkpoint_start_a_run_and_resume_none(run, tmp_path):
    one = run("one")
    one.train(evaluations=1)
    checkpoint_file = checkpoint.find_checkpoint(one.folder)
    exported = checkpoint.export(checkpoint_file, tmp_path / "parameters.pt")
    assert exported.stat().st_size < 0.45 * checkpoint_file.stat().st_size
    started = run("two", start=exported)
    assert all(map(torch.equal, one.model.parameters(), started.model.parameters())) and started.progress.step == 0
    checkpoint_file.write_bytes(exported.read_bytes())
    with pytest.raises(ValueError, match=r"checkpoint.pt holds parameters alone.*pass it as --start, with another --out"):
        run("one")


def test_examples_of_another_task_or_too_few_are_errors(run):
    with pytest.raises(ValueError, match=r"holds .*listops.*the run is of .*'depth': 3"):
        run(task=fields_of(replace(SHORT, depth=3)))
    with pytest.raises(ValueError, match="has 2,000 examples, fewer than a batch of 4000; pass a smaller --batch"):
        run(batch=4000, micro_batch=4000)


def test_a_loss_that_is_not_finite_stops_the_run(run):
    one = run()
    with torch.no_grad():
        one.model.head.bias[0] = math.nan
    with pytest.raises(NotFinite, match="loss nan, gradient norm nan at step 1; try a lower --learning-rate"):
        one.step()


def invoke(*arguments: object, code: int = 0) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "width", 200)
        result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.smoke
def test_commands_prepare_train_compare_and_go_up_in_size(tmp_path):
    """The whole way of a user, on a few small images."""
    model = ["--dim", 16, "--layers", 1, "--heads", 1, "--head-dim", 16, "--mlp-dim", 16, "--no-compile", "--device", "cpu"]
    for size in (32, 64):
        said = invoke(
            "prepare", "--size", size, "--dashes", 3, "--train", 8, "--held-out", 4, "--workers", 1, "--data", tmp_path / f"d{size}"
        )
        assert "8 of train, 4 of held_out; always saying 0 is right for 50.0%" in said
    common = ["--batch", 4, "--evaluations", 1, *model]
    for name, attention in (("dense", "dense"), ("sparse", "butterfly")):
        given = ["--data", tmp_path / "d32", "--attention", attention, "--steps", 2, "--out", tmp_path / name]
        said = invoke("train", *given, *common)
        assert "of 1,024 x 1,024 pairs" in said and "of the held-out right" in said
    large = ["--data", tmp_path / "d64", "--steps", 1, "--batch", 2, "--start", tmp_path / "sparse", "--out", tmp_path / "large"]
    invoke("train", *large, "--attention", "local(64)", "--evaluations", 1, *model)
    invoke("export", tmp_path / "dense", tmp_path / "out" / "dense.pt")
    said = invoke("results", *(tmp_path / name for name in ("dense", "sparse", "large")))
    assert re.search(r"dense .*pathfinder 32 3 .*100.0%.* 8 .*±.*sparse .*54.7%.*large .*pathfinder 64 3 .*local\(64\)", said)
    invoke("plot", tmp_path / "dense", tmp_path / "sparse", "--target", tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 5000


BAD = {
    "task": (["train", "--task", "pathfindr", "--steps", "1"], "task must be one of pathfinder, listops; got 'pathfindr'"),
    "no examples": (["train", "--data", "/nowhere", "--steps", "1"], "/nowhere holds no prepared examples; make them"),
    "size": (["prepare", "--size", "33"], "size must be one of 32, 64, 128, 256; got 33"),
    "no run": (["results", "/nowhere"], "/nowhere is no checkpoint of this program"),
    "nothing to draw": (["plot", "/nowhere"], "/nowhere holds no evaluations"),
}


@pytest.mark.parametrize("asked, said", [(["--task", "listops"], "{'name': 'listops'}"), (["--size", "64"], "{'size': 64}")])
def test_examples_of_another_task_than_was_asked_for_are_refused(asked, said, tmp_path):
    made = ["--size", 32, "--dashes", 3, "--train", 4, "--held-out", 2, "--workers", 1, "--data", tmp_path / "made"]
    invoke("prepare", *made)
    refused = invoke("train", *asked, "--data", tmp_path / "made", "--steps", 1, "--out", tmp_path / "run", code=2)
    assert "holds examples of {'name': 'pathfinder', 'size': 32, 'dashes': 3}; asked for " + said in " ".join(refused.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", BAD)
def test_input_that_cannot_work_is_one_sentence(case):
    given, message = BAD[case]
    assert message in invoke(*given, code=2)
