"""Trains layers whose queries choose, and says how many questions each answers.

\b
python -m experiments.selection_layers                                 # all of them, some minutes on a CPU
python -m experiments.selection_layers dense nsa --preset 64K          # on a GPU
"""

from dataclasses import replace
from typing import Annotated

import typer

from examples.train_lm import parallel
from examples.train_lm.cli import Device, user_errors
from examples.train_lm.report import console
from experiments.files import check_one_of
from experiments.recall.report import tables

from .compare import NAMES, PRESETS, check_layer_trial, run

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@app.command(help=__doc__)
def main(
    layers: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(NAMES)}. [all]")] = None,
    preset: Annotated[str, typer.Option(help=f"Sizes of model and task: {', '.join(PRESETS)}.")] = "tiny",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each. [the preset's]")] = None,
    keep: Annotated[int | None, typer.Option(help="Blocks that a query attends to, its own among them. [the preset's]")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the sequences.")] = 0,
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions, at least.")] = 8192,
    device: Device = "auto",
) -> None:
    with user_errors(), parallel.join_world(device) as world:
        check_one_of(PRESETS, preset=preset)
        given = {name: value for name, value in (("steps", steps), ("keep", keep)) if value is not None}
        base = replace(PRESETS[preset], seed=seed, **given)
        trials = [check_layer_trial(replace(base, arm=name)) for name in layers or NAMES]
        found = {trial.arm: [run(trial, world, questions)] for trial in trials}
        by_distance, *_ = tables({f"{base.steps:,} steps": found})
        console.print(by_distance)
