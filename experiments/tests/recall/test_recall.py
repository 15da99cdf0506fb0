"""Training, evaluation, and the way from commands to a picture."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from matplotlib import image
from typer.testing import CliRunner

from examples.train_lm.parallel import World
from experiments.recall import train as train_module
from experiments.recall.arms import build_arms
from experiments.recall.cli import app
from experiments.recall.model import build_decoder
from experiments.recall.settings import PRESETS, Trial, check_trial
from experiments.recall.train import fit, run

WORLD = World(torch.device("cpu"))
TINY = PRESETS["tiny"]
# One layer, a window of an eighth of the sequence: it learns in seconds.
SMALL = replace(
    TINY,
    task=replace(TINY.task, length=64, pairs=8, keys=12, values=8, fillers=8, nearest=4),
    shape=replace(TINY.shape, dim=32, layers=1, heads=1, kv_heads=1, mlp_dim=32, vocabulary=28),
    window=8,
    shortest=16,
    step_tokens=512,
    learning_rate=1e-2,
)


def by_first(result: dict) -> dict[int, dict]:
    return {row["first"]: row for row in result["by_distance"]}


def test_what_is_within_reach_is_learned_and_what_is_not_is_guessed():
    dense, window = (run(replace(SMALL, arm=arm, steps=150), WORLD, 2000) for arm in ("dense", "window"))
    assert all(row["right"] > 0.9 and row["within_reach"] == 1 for row in dense["by_distance"])
    assert by_first(window)[4]["right"] > 0.9 and by_first(window)[4]["within_reach"] == 1
    for first in (16, 32):
        row = by_first(window)[first]
        assert row["within_reach"] == 0 and row["right"] < 2 * window["chance"]
    assert [row["hops"] for row in window["by_hops"]] == [1, 2]  # one layer: 2 is out of reach
    assert window["by_hops"][0]["right"] > 0.9 and window["by_hops"][1]["within_reach"] == 0
    assert window["reach"]["density"] < dense["reach"]["density"] == pytest.approx(1)
    assert dense["final_loss"] < 0.5 < window["final_loss"]
    assert dense["without_layer"] == [pytest.approx(dense["chance"], abs=0.07)]  # its one layer finds all


def test_keys_that_are_asked_again_have_a_table_of_their_own(tmp_path):
    again = ["--askings", "4", "--apart", "24", "--steps", "2", "--questions", "50", "--out", tmp_path]
    assert "hops from question to question" in " ".join(invoke("train", "window", *SIZES, *again).split())
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["by_stops"]
    assert [row["stops"] for row in rows] == [1, 2] and rows[1]["questions"] > 10  # one layer: 2 is out of reach
    assert sum(row["questions"] for row in rows) <= 64  # of two sequences, 8 pairs each, 4 times


def test_a_budget_of_seconds_counts_training_steps_alone(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(train_module.time, "perf_counter", lambda: next(clock))  # each step takes one second of it
    curve = fit(build_decoder(SMALL, WORLD.device), replace(SMALL, seconds=25.0), WORLD)
    assert [row["step"] for row in curve] == [10, 20, 25] and curve[-1]["seconds"] == 25
    assert [row["length"] for row in curve] == [16, 64, 64]


def test_the_curriculum_ends_with_the_task_itself_for_half_of_what_the_first_stage_leaves():
    for preset in PRESETS.values():
        lengths = [task.length for task in preset.stages]
        assert preset.stages[-1] == preset.task and all(b == 4 * a for a, b in pairwise(lengths)) and preset.shortest <= lengths[0]
        for first in (0.0, 0.2, 0.5):
            seen = [preset.stage(first + (1 - first) * number / 1000, first).length for number in range(1000)]
            assert sorted(set(seen)) == lengths[1:] and seen == sorted(seen) and seen.count(preset.task.length) == 500
        assert preset.stage(0.4, None).length == lengths[0]
    only = replace(SMALL, shortest=64)
    assert only.stage(0.0, None) == only.stage(0.9, 0.1) == SMALL.task


def test_equal_trials_give_equal_results_and_another_seed_gives_others():
    trials = [replace(SMALL, steps=4, seed=seed) for seed in (3, 3, 4)]
    first, again, other = (fit(build_decoder(one, WORLD.device), one, WORLD)[0]["loss"] for one in trials)
    assert first == again != other


def test_a_loss_that_is_not_finite_is_said(monkeypatch):
    monkeypatch.setattr(train_module, "loss_of", lambda model, *_: model.head.weight.sum() * float("nan"))
    with pytest.raises(train_module.NotFinite, match="loss nan at step 1 of dense; try a lower --learning-rate"):
        fit(build_decoder(SMALL, WORLD.device), replace(SMALL, steps=2), WORLD)


SIZES = ["--preset", "tiny", "--length", "128", "--pairs", "8", "--layers", "1", "--step-tokens", "256", "--device", "cpu"]


def invoke(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.smoke
def test_commands_list_arms_train_and_draw(tmp_path):
    said = invoke("arms", "--preset", "tiny", "--layers", "2")
    assert all(name in said for name in build_arms(32, 16, 512))
    for arm in ("dense", "chosen"):
        seeds = ["--seed", "1", "--seed", "2", "--questions", "20", "--out", tmp_path]
        assert "right answers in %" in invoke("train", arm, *SIZES, "--steps", "3", *seeds, "--learning-rate", "1e-2")
    files = sorted(tmp_path.glob("*.json"))
    assert [file.name for file in files] == [f"{arm}-3-steps-seed{seed}.json" for arm in ("chosen", "dense") for seed in (1, 2)]
    result = json.loads(files[0].read_text())
    assert result["trial"]["task"]["length"] == 128 and result["steps"] == 3 and result["trial"]["learning_rate"] == 0.01
    assert all({"questions", "right", "error", "within_reach"} <= row.keys() for row in result["by_distance"])
    said = invoke("plot", *files, "--target", tmp_path / "recall.png")
    assert (tmp_path / "recall.png").stat().st_size > 10_000 and "out of reach" not in said
    recorded_before = {
        "arm": "window",
        "task": {name: size for name, size in vars(TINY.task).items() if name not in ("askings", "apart")},
    }
    recorded_before["task"] |= {"length": 128, "pairs": 8}
    in_time = result | {"trial": result["trial"] | recorded_before | {"steps": 0, "seconds": 2.0}}
    (tmp_path / "in-time.json").write_text(json.dumps(in_time))
    said = invoke("plot", *files, tmp_path / "in-time.json", "--target", tmp_path / "both.png")
    assert "after 3 steps" in said and "after 2 s of training" in said
    one, both = (image.imread(tmp_path / name).shape for name in ("recall.png", "both.png"))
    assert both[0] == one[0] and both[1] > 1.5 * one[1]  # a panel for each budget
    elsewhere = in_time | {"device": "another", "trial": in_time["trial"] | {"arm": "dense"}}
    other = result | {"trial": result["trial"] | {"window": 64}}
    for made, given, message in (
        (elsewhere, [tmp_path / "in-time.json"], "has device another"),
        (other, files[2:], "has window 64"),
        (result, files[:1], "is a second run of chosen with seed 1; pass one for each seed"),
    ):
        (tmp_path / "made.json").write_text(json.dumps(made))
        names = [str(name) for name in (*given, tmp_path / "made.json")]
        refused = CliRunner().invoke(app, ["plot", *names, "--target", str(tmp_path / "other.png")])
        assert refused.exit_code == 2 and message in refused.output
    files[1].write_text(json.dumps(json.loads(files[1].read_text()) | {"device": "another"}))  # equal steps are equal anywhere
    said = invoke("plot", *files, "--target", tmp_path / "recall.png")
    (row,) = [line for line in said.splitlines() if line.startswith("│ chosen") and " 3 │" in line]
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["2", "3", "", ""]


BAD = {
    "arm": (
        ["nothing", "--steps", "1"],
        "arm must be one of dense, window, powers, butterfly, fixed, chosen, chosen-max, mixed, mixed-second, mixed-last; "
        "got 'nothing'",
    ),
    "preset": (["dense", "--steps", "1", "--preset", "1M"], "preset must be one of tiny, 64K; got '1M'"),
    "no budget": (["dense"], "pass either --steps or --seconds, positive; got 0 and 0.0"),
    "two budgets": (["dense", "--steps", "1", "--seconds", "1"], "pass either --steps or --seconds"),
    "negative": (["dense", "--seconds", "-1"], "pass either --steps or --seconds, positive"),
    "length": (
        ["dense", "--steps", "1", "--length", "516"],
        "length must be a multiple of 32 for 3 stages of the curriculum; got 516; pass --length 544",
    ),
    "step tokens": (["dense", "--steps", "1", "--step-tokens", "1000"], "pass --step-tokens 512"),
    "pairs": (["dense", "--steps", "1", "--pairs", "1000"], "keys must be at least pairs"),
    "window": (["window", "--steps", "1", "--window", "0"], "window"),
    "block": (["chosen", "--steps", "1", "--block", "24"], "block"),
    "questions": (["dense", "--steps", "1", "--questions", "0"], "'--questions'"),
    "layers": (["arms", "--layers", "0"], "'--layers'"),
    "a seed twice": (["dense", "--steps", "1", "--seed", "0", "--seed", "0"], "--seed must name each value once; got 0, 0"),
    "no result": (["plot", __file__], "is no result of train"),
}


@pytest.mark.parametrize("case", BAD)
def test_input_that_cannot_work_is_one_sentence_before_training_starts(case, tmp_path):
    given, message = BAD[case]
    own = [] if given[0] in ("plot", "arms") else ["train", "--preset", "tiny", "--device", "cpu", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*own, *given])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split()) and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_shortest_sequences_must_hold_the_nearest_distance():
    with pytest.raises(ValueError, match="shortest must hold distances beyond nearest=8; got 8; take at least 16"):
        check_trial(Trial(**vars(replace(TINY, shortest=8, steps=1))))
