"""Training, evaluation, and the way from commands to a picture."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from examples.train_lm.parallel import World
from experiments.recall.arms import build_arms
from experiments.recall.cli import app
from experiments.recall.settings import PRESETS
from experiments.recall.train import run

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


def test_keys_that_are_asked_again_have_a_separate_table(tmp_path):
    again = ["--askings", "4", "--apart", "24", "--steps", "2", "--questions", "50", "--out", tmp_path]
    assert "hops from question to question" in " ".join(invoke("train", "window", *SIZES, *again).split())
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["by_stops"]
    assert [row["stops"] for row in rows] == [1, 2] and rows[1]["questions"] > 10  # one layer: 2 is out of reach
    assert sum(row["questions"] for row in rows) <= 64  # of two sequences, 8 pairs each, 4 times


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
    files[1].write_text(json.dumps(json.loads(files[1].read_text()) | {"device": "another"}))  # equal steps are equal anywhere
    said = invoke("plot", *files, "--target", tmp_path / "recall.png")
    (row,) = [line for line in said.splitlines() if line.startswith("│ chosen") and " 3 │" in line]
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["2", "3", "", ""]
