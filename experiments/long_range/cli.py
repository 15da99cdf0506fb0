"""Trains classifiers on the long-range tasks ListOps and Pathfinder.

\b
python -m experiments.long_range climb --to 256 --minutes 60        # all of it, from easy images to large ones

\b
python -m experiments.long_range prepare --task pathfinder --size 32
python -m experiments.long_range train --task pathfinder --size 32 --attention butterfly --minutes 10 --out runs/path-32
python -m experiments.long_range train --task pathfinder --size 64 --start runs/path-32 --minutes 10 --out runs/path-64
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from examples.train_lm import parallel
from examples.train_lm.cli import user_errors

from ..files import check_one_of
from . import checkpoint, data, report
from .climb import Stage, prepare_images, stages_to
from .climb import climb as climb_stages
from .data import TASKS, Examples
from .listops import ListOps
from .pathfinder import Pathfinder
from .report import console
from .settings import ATTENTIONS, PRESETS, Settings, check_settings, default_batch, default_micro_batch, density, tokens_of
from .train import End, Run

TASK, SIZE, DASHES = Pathfinder.name, 32, 14
WORKERS = os.cpu_count() or 1
_HELD_OUT_TOKENS = 1 << 26  # so that evaluating takes less time than training

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

TaskName = Annotated[str, typer.Option("--task", help=f"{' or '.join(TASKS)}.")]
Size = Annotated[int, typer.Option(help="Pixels on a side of Pathfinder's images: 32, 64, 128 or 256.")]
Dashes = Annotated[int, typer.Option(help="Of Pathfinder: of the long paths; 6 are easy, 9 are less so.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of examples. [runs/long_range/data/TASK-SIZE-DASHES]")]
Attention = Annotated[str, typer.Option(help=f"{', '.join(ATTENTIONS)}, or spec text.")]
Workers = Annotated[int, typer.Option(help="Processes. [one for each CPU core]")]
Preset = Annotated[str, typer.Option(help=f"The model: {', '.join(PRESETS)}.")]
Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile, by block.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.")]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs.")]


def _folder(name: str, size: int, dashes: int) -> Path:
    check_one_of(TASKS, task=name)
    return Path("runs/long_range/data") / (f"{name}-{size}-{dashes}" if name == Pathfinder.name else name)


@app.command()
def prepare(
    task: TaskName = TASK,
    size: Size = SIZE,
    dashes: Dashes = DASHES,
    train: Annotated[int, typer.Option(help="Training examples.")] = 200_000,
    held_out: Annotated[int | None, typer.Option(help="Held-out examples. [10,000, or as many as have 67,108,864 tokens]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the examples.")] = 0,
    workers: Workers = WORKERS,
    folder: Data = None,
) -> None:
    """Make examples, unless they are there."""
    with user_errors():
        folder = folder or _folder(task, size, dashes)
        wanted = Pathfinder(size, dashes) if task == Pathfinder.name else ListOps()
        held_out = min(10_000, _HELD_OUT_TOKENS // tokens_of(wanted)) if held_out is None else held_out
        manifest = data.prepare(folder, wanted, train, held_out, seed, workers)
        counts = ", ".join(f"{manifest[split]:,} of {split}" for split in data.SPLITS)
        console.print(f"{folder}: {counts}; {_describe_commonest(manifest)}", soft_wrap=True, markup=False)


def _describe_commonest(manifest: dict) -> str:
    labels = manifest["labels"]["held_out"]
    return f"always saying {labels.index(max(labels))} is right for {max(labels) / sum(labels):.1%} of the held-out"


@app.command()
def train(
    task: Annotated[str | None, typer.Option("--task", help=f"{' or '.join(TASKS)}. [what --data holds, or {TASK}]")] = None,
    size: Annotated[int | None, typer.Option(help=f"Of Pathfinder's images. [what --data holds, or {SIZE}]")] = None,
    dashes: Annotated[int | None, typer.Option(help=f"Of Pathfinder's long paths. [what --data holds, or {DASHES}]")] = None,
    attention: Attention = "butterfly",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 0,
    minutes: Annotated[float, typer.Option(help="Instead of steps: of training steps.")] = 0.0,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples of a step. [by the number of tokens]")] = None,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = 1e-3,
    preset: Preset = "full",
    compiled: Compiled = True,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of examples.")] = 0,
    evaluations: Annotated[int, typer.Option(min=1, help="On the held-out examples, evenly spread; each also saves.")] = 20,
    start: Annotated[
        Path | None, typer.Option(help="A run, checkpoint or exported file whose parameters are the first, also of a smaller size.")
    ] = None,
    folder: Data = None,
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoint, logs, plot.")] = Path("runs/long_range/run"),
    device: Device = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; without it, go on from OUT's checkpoint.")] = False,
) -> None:
    """Train a classifier on one device."""
    with user_errors(), parallel.join_world(device) as world:
        _check_alone(world)
        check_one_of(PRESETS, preset=preset)
        given = {name: value for name, value in (("name", task), ("size", size), ("dashes", dashes)) if value is not None}
        folder = folder or _folder(**{"name": TASK, "size": SIZE, "dashes": DASHES} | given)
        examples = Examples(folder, "train")
        held = examples.manifest["task"]
        if other := {name: value for name, value in given.items() if held.get(name) != value}:
            raise ValueError(f"{folder} holds examples of {held}; asked for {other}; pass its own, or another --data")
        batch = batch or default_batch(examples.task)
        settings = Settings(
            task=examples.manifest["task"],
            shape=PRESETS[preset],
            attention=attention,
            batch=batch,
            micro_batch=default_micro_batch(examples.task, batch),
            steps=steps,
            minutes=minutes,
            learning_rate=learning_rate,
            compiled=compiled,
            seed=seed,
        )
        run = Run(check_settings(settings), out, folder, world, fresh, start and checkpoint.find_checkpoint(start))
        _introduce(run)
        if run.train(evaluations) is not End.DONE:
            console.print(
                f"stopped early; the same command goes on from {checkpoint.find_checkpoint(out)}", soft_wrap=True, markup=False
            )
            raise typer.Exit(130)
        console.print(
            f"{checkpoint.find_checkpoint(out)}; plot {report.plot([out], out / 'accuracy.png')}", soft_wrap=True, markup=False
        )


@app.command()
def climb(
    to: Annotated[int, typer.Option(help="Pixels on a side of the last images: 32, 64, 128 or 256.")] = 256,
    minutes: Annotated[float, typer.Option(help="Of training steps in all, without seeds that are given up.")] = 30.0,
    seeds: Annotated[int, typer.Option(min=1, help="Tried for the first run, one after the other, until one learns.")] = 6,
    attention: Attention = "butterfly",
    first: Annotated[str, typer.Option(help="Attention of the first run, which sparse ones may not learn.")] = "dense",
    train: Annotated[int | None, typer.Option(min=1, help="Training images of each run. [by size, 10,000 to 80,000]")] = None,
    held_out: Annotated[int | None, typer.Option(min=1, help="Held-out images of each run. [by size, 1,000 to 4,000]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples of a step. [by the number of tokens]")] = None,
    preset: Preset = "full",
    compiled: Compiled = True,
    evaluations: Annotated[int, typer.Option(min=3, help="Of each run, evenly spread; each also saves.")] = 5,
    workers: Workers = WORKERS,
    folder: Annotated[Path, typer.Option("--data", help="Folder of the folders of images.")] = Path("runs/long_range/data"),
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/long_range/climb"),
    device: Device = "auto",
) -> None:
    """Train on Pathfinder's images, from easy ones to large ones. The same command goes on where it was stopped."""
    with user_errors(), parallel.join_world(device) as world:
        _check_alone(world)
        check_one_of(PRESETS, preset=preset)
        counts = {name: value for name, value in (("train", train), ("held_out", held_out)) if value is not None}
        stages: list[tuple[Stage, Settings]] = []
        for stage, share in stages_to(to, minutes):
            images = batch or default_batch(stage.task)
            settings = Settings(
                task=data.fields_of(stage.task),
                shape=PRESETS[preset],
                attention=attention if stages else first,
                batch=images,
                micro_batch=default_micro_batch(stage.task, images),
                minutes=share,
                warmup=stage.warmup,
                learning_rate=stage.learning_rate,
                compiled=compiled,
            )
            stages.append((replace(stage, **counts), check_settings(settings)))
        runs = climb_stages(stages, lambda stage: prepare_images(stage, folder, workers), out, world, seeds, evaluations)
        if runs is None:
            console.print("stopped early; the same command goes on", soft_wrap=True, markup=False)
            raise typer.Exit(130)
        console.print(report.results(runs))
        console.print(f"plot {report.plot(runs, out / 'accuracy.png')}", soft_wrap=True, markup=False)


def _check_alone(world: parallel.World) -> None:
    if world.size > 1:
        raise ValueError(f"this trains on one device; got {world.size} ranks; start it without torchrun")


def _introduce(run: Run) -> None:
    settings, tokens = run.settings, tokens_of(run.examples.task)
    parameters = sum(p.numel() for p in run.model.parameters())
    kept = density(settings.attention, tokens)
    attention = f"{settings.attention}: {kept:.1%} of {tokens:,} x {tokens:,} pairs"
    console.print(f"{parameters / 1e6:.2f}M parameters; {attention}", soft_wrap=True, markup=False)
    counts = f"{len(run.examples):,} examples, {len(run.held_out):,} held out"
    console.print(f"{counts}; {_describe_commonest(run.examples.manifest)}", soft_wrap=True)
    if run.resumed:
        console.print(f"going on from {run.resumed} (--fresh starts over)", soft_wrap=True, markup=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint.")],
    target: Annotated[Path, typer.Argument(help="A new file.")],
) -> None:
    """Write a run's parameters without the optimizer's state, for --start: a third of the checkpoint's bytes."""
    with user_errors():
        checkpoint.export(checkpoint.find_checkpoint(run), target)
        console.print(f"{target}: {target.stat().st_size / 1e6:.1f} MB", soft_wrap=True, markup=False)


@app.command()
def plot(
    runs: Runs,
    target: Annotated[Path, typer.Option(help="The picture.")] = Path("accuracy.png"),
) -> None:
    """Accuracy of several runs against time and examples, in one picture."""
    with user_errors():
        print(report.plot(runs, target))


@app.command()
def results(runs: Runs) -> None:
    """Accuracy of several runs in a table, at their ends and at equal time."""
    with user_errors():
        console.print(report.results(runs))
