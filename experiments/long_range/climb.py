"""Goes up from short paths to long ones and from small images to large ones, each run with the parameters of the one before.

Whether the first run leaves 50 % is luck (docs/evidence.md), so it is tried with several seeds: a run that knows nothing after
``CHECK_AFTER`` of its time ends, and the next seed begins. All that tells how far a climb is lies in its runs' folders, so the
same call goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from examples.train_lm.parallel import World
from examples.train_lm.report import read

from . import checkpoint, data
from .pathfinder import Pathfinder
from .report import console
from .settings import Settings
from .train import Run, Score

LEARNED = 0.55  # right more often than this is not luck, with the fewest held-out images
CHECK_AFTER = 0.4  # of a run's time


@dataclass(frozen=True)
class Stage:
    """A run of the climb. share: of the minutes. train, held_out: images. learning_rate: its peak; runs that go on lose what they
    know at 0.001. warmup: steps."""

    size: int
    dashes: int
    share: float
    train: int
    held_out: int
    learning_rate: float = 5e-4
    warmup: int = 100

    @property
    def name(self) -> str:
        return f"{self.size}-{self.dashes}"

    @property
    def task(self) -> Pathfinder:
        return Pathfinder(self.size, self.dashes)


STAGES = (
    Stage(32, 4, 0.13, 40_000, 2_000, 1e-3, warmup=500),
    Stage(32, 9, 0.1, 40_000, 2_000),
    Stage(32, 14, 0.15, 60_000, 4_000),
    Stage(64, 9, 0.1, 50_000, 2_000),
    Stage(64, 14, 0.19, 80_000, 4_000),
    Stage(128, 14, 0.18, 40_000, 2_000),
    Stage(256, 14, 0.15, 10_000, 1_000),
)


class Lost(ValueError):
    """No seed of the first run has learned anything."""


def stages_to(size: int, minutes: float) -> list[tuple[Stage, float]]:
    """The stages up to images of ``size``, and the minutes of training steps of each, of ``minutes`` in all."""
    if size not in {stage.size for stage in STAGES}:
        raise ValueError(f"the size must be one of {sorted({stage.size for stage in STAGES})}; got {size}")
    if not minutes > 0:
        raise ValueError(f"minutes must be positive; got {minutes}")
    stages = [stage for stage in STAGES if stage.size <= size]
    whole = sum(stage.share for stage in stages)
    return [(stage, minutes * stage.share / whole) for stage in stages]


@contextmanager
def preparing_images(stages: list[Stage], folder: Path, workers: int) -> Iterator[Callable[[Stage], Path]]:
    """Makes the images of all stages in the order in which they are needed, in processes of its own, while others train. Yields
    stage -> its folder, once it is complete."""
    folders = {stage: folder / f"{Pathfinder.name}-{stage.name}" for stage in stages}
    jobs = [(place, stage.task, stage.train, stage.held_out) for stage, place in folders.items()]
    context, made = get_context("spawn"), []
    receiver, sender = context.Pipe(duplex=False)
    maker = context.Process(target=_make, args=(jobs, workers, sender))
    maker.start()
    sender.close()  # so that the end of the process is seen

    def complete(stage: Stage) -> Path:
        while stage not in made:
            with console.status(f"waiting for images of {stage.size} x {stage.size} pixels"):
                try:
                    refusal = receiver.recv()
                except EOFError:
                    refusal = f"the process that makes images of {stage.size} x {stage.size} pixels ended; the same command goes on"
            if refusal:
                raise ValueError(refusal)
            made.append(stages[len(made)])
        return folders[stage]

    try:
        yield complete
    finally:
        maker.terminate()
        maker.join()


def _make(jobs: list[tuple], workers: int, sender: Connection) -> None:
    """Sends None for each folder that is complete, or why it cannot be."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # the bars of training have the terminal
        try:
            for folder, task, train, held_out in jobs:
                data.prepare(folder, task, train, held_out, workers=workers)
                sender.send(None)
        except ValueError as error:
            sender.send(str(error))


def climb(
    stages: list[tuple[Stage, float]],
    settings: Callable[[Stage, float, int], Settings],
    images: Callable[[Stage], Path],
    folder: Path,
    world: World,
    seeds: int,
    evaluations: int,
) -> list[Path] | None:
    """The folders of the runs, of the first stage that of the seed that learned it; None where Ctrl-C or SIGTERM came before the
    end. settings: of a stage, its minutes and a seed.

    Raises ``Lost`` where no seed learned the first stage. Nothing goes on from a later run that has not learned its own.
    """
    (first, minutes), *others = stages
    for seed in range(seeds):
        run = Run(settings(first, minutes, seed), folder / f"{first.name}-seed-{seed}", images(first), world)
        if not _train_to_end(run, evaluations, lambda done, score: done >= CHECK_AFTER and score.accuracy <= LEARNED):
            return None
        if (accuracy := _accuracy(run.folder)) > LEARNED:
            break
        console.print(f"seed {seed} knows nothing: {accuracy:.1%}")
    else:
        raise Lost(f"nothing was learned of {first.dashes} dashes with {seeds} seed(s); pass more --seeds or --minutes")
    ended, start = [run.folder], run.folder
    for stage, minutes in others:
        run = Run(settings(stage, minutes, 0), folder / stage.name, images(stage), world, start=checkpoint.find_checkpoint(start))
        if not _train_to_end(run, evaluations):
            return None
        ended.append(run.folder)
        if _accuracy(run.folder) > LEARNED:
            start = run.folder
    return ended


def _train_to_end(run: Run, evaluations: int, hopeless: Callable[[float, Score], bool] | None = None) -> bool:
    """Trains a run to its end, or until it is hopeless; False where it was stopped before."""
    rows = read(run.folder / "evaluations.csv")
    if run.resumed and hopeless and rows and hopeless(run.done, Score(*(float(rows[-1][name]) for name in Score._fields))):
        return True
    console.print(f"{run.folder.name}: {run.settings.minutes:.2g} minutes")
    return run.train(evaluations, hopeless) or run.hopeless


def _accuracy(folder: Path) -> float:
    return float(read(folder / "evaluations.csv")[-1]["accuracy"])
