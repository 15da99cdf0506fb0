"""Input that cannot work is one sentence of each program, before anything is trained or measured."""

from importlib import import_module

import pytest
from typer.testing import CliRunner

TRAIN = ["train", "dense", "--preset", "tiny", "--device", "cpu"]  # of recall
ROWS = [
    ("recall", ["train", "nothing", "--steps", "1"], "arm must be one of dense, window, powers, butterfly,"),
    ("recall", [*TRAIN, "--steps", "1", "--length", "516"], "length must be a multiple of 32 for 3 stages"),
    ("recall", [*TRAIN, "--steps", "1", "--seed", "0", "--seed", "0"], "--seed must name each value once; got 0, 0"),
    ("recall", ["plot", __file__], "is no result of train"),
    ("equal_time", ["run", "dense", "--preset", "1B"], "no learning rate was chosen for dense"),
    ("equal_time", ["report", __file__], "is no result of run"),
    ("equal_time", ["run-missing", "--preset", "tiny"], "preset must be one of 30M, 150M; got 'tiny'"),
    ("long_range", ["train", "--task", "pathfindr", "--steps", "1"], "task must be one of pathfinder, listops; got 'pathfindr'"),
    ("long_range", ["train", "--data", "/nowhere", "--steps", "1"], "/nowhere holds no prepared examples; make them"),
    ("long_range", ["prepare", "--size", "33"], "size must be one of 32, 64, 128, 256; got 33"),
    ("long_range", ["results", "/nowhere"], "/nowhere is no checkpoint of this program"),
    ("choosers", ["measure", "nowhere"], "the model must be a folder; got nowhere"),
    ("choosers", ["draw", __file__], "is no result of measure"),
    ("selection_layers", ["--keep", "0"], "keep must be at least 1, a query's own block; got 0"),
    ("video", ["train", "nothing"], "mask must be one of dense, window, sampled, random, vsa; got 'nothing'"),
    ("video", ["train", "window", "--share", "0.3"], "share must be one of 0.125, 0.25, 0.42; got 0.3"),
    ("video", ["measure", "--models", "nowhere"], "models must be a folder with dense-0.pt; got nowhere"),
    ("video", ["measure", "--part", "3/2"], "part must be such as 2/4, the second of four; got '3/2'"),
    ("video", ["measure", "--rows", "nothing"], "--rows must be names that the command rows prints"),
]  # fmt: skip


@pytest.mark.parametrize("program, given, message", ROWS)
def test_input_that_cannot_work_is_one_sentence(program, given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(import_module(f"experiments.{program}.cli").app, given)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split()) and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())
