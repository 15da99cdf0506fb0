"""Goes up from short paths to long ones and from small images to large ones. Each run starts with the parameters of the one before.

Whether the first run leaves 50 % is luck (docs/evidence.md), so several seeds try it. A run that knows nothing after
``CHECK_AFTER`` of its time ends, and the next seed begins. The runs' folders say how far a climb is, so the same call goes on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from examples.train_lm.parallel import World
from examples.train_lm.report import read

from . import checkpoint, data
from .pathfinder import Pathfinder
from .report import console
from .settings import Settings
from .train import End, Run

LEARNED = 0.55  # with the fewest held-out images, a higher accuracy is not luck
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


def stages_to(size: int, minutes: float) -> list[tuple[Stage, float]]:
    """The stages up to images of ``size``, and the minutes of training steps of each, of ``minutes`` in all."""
    if size not in {stage.size for stage in STAGES}:
        raise ValueError(f"the size must be one of {sorted({stage.size for stage in STAGES})}; got {size}")
    if not minutes > 0:
        raise ValueError(f"minutes must be positive; got {minutes}")
    stages = [stage for stage in STAGES if stage.size <= size]
    whole = sum(stage.share for stage in stages)
    return [(stage, minutes * stage.share / whole) for stage in stages]


def prepare_images(stage: Stage, folder: Path, workers: int) -> Path:
    """The folder of a stage's images, in ``folder``. Makes those that are not there."""
    target = folder / f"{Pathfinder.name}-{stage.name}"
    data.prepare(target, stage.task, stage.train, stage.held_out, workers=workers)
    return target


def climb(
    stages: list[tuple[Stage, Settings]],
    images_of: Callable[[Stage], Path],
    folder: Path,
    world: World,
    seeds: int,
    evaluations: int,
) -> list[Path] | None:
    """Returns the folders of the runs, a run for each stage; None if Ctrl-C or SIGTERM came before the end. The first stage's run
    belongs to the first seed that learns the stage. images_of: the folder of a stage's images.

    Raises ValueError if no seed learns the first stage. A later run starts from the last one that learned its own stage.
    """
    (first, settings), *others = stages
    for seed in range(seeds):
        run = Run(replace(settings, seed=seed), folder / f"{first.name}-seed-{seed}", images_of(first), world)
        was_given_up = run.resumed and _knows_nothing(run.done, _last_accuracy(run.folder))
        if not was_given_up and _train(run, evaluations, _knows_nothing) is End.STOPPED:
            return None
        if (accuracy := _last_accuracy(run.folder)) > LEARNED:
            break
        console.print(f"seed {seed} knows nothing: {accuracy:.1%}")
    else:
        raise ValueError(f"nothing was learned of {first.dashes} dashes with {seeds} seed(s); pass more --seeds or --minutes")
    ended, start = [run.folder], run.folder
    for stage, settings in others:
        run = Run(settings, folder / stage.name, images_of(stage), world, start=checkpoint.find_checkpoint(start))
        if _train(run, evaluations) is End.STOPPED:
            return None
        ended.append(run.folder)
        if _last_accuracy(run.folder) > LEARNED:
            start = run.folder
    return ended


def _train(run: Run, evaluations: int, is_hopeless: Callable[[float, float], bool] | None = None) -> End:
    console.print(f"{run.folder.name}: {run.settings.minutes:.2g} minutes")
    return run.train(evaluations, is_hopeless)


def _knows_nothing(done: float, accuracy: float) -> bool:
    return done >= CHECK_AFTER and accuracy <= LEARNED


def _last_accuracy(folder: Path) -> float:
    """The accuracy of a run's last evaluation; 1 if there is none yet."""
    rows = read(folder / "evaluations.csv")
    return float(rows[-1]["accuracy"]) if rows else 1.0
