"""Output of runs: a progress bar, CSV files, plots and tables."""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from examples.train_lm.checkpoint import Progress as RunProgress
from examples.train_lm.report import RowFiles, console, read

from ..files import right_aligned
from . import checkpoint
from .data import task_of
from .settings import density, tokens_of

matplotlib.use("agg")

FIELDS = {
    "steps": ("step", "examples", "seconds", "loss", "accuracy", "learning_rate", "gradient_norm", "examples_per_second"),
    "evaluations": ("step", "examples", "seconds", "accuracy", "error", "loss"),
}
_SAME_TIME = 1.02  # a run that ends so much later than another ends at the same time


class Log:
    """The log of one run: steps.csv and evaluations.csv in its folder, and a progress bar."""

    def __init__(self, folder: Path, name: str, done: RunProgress):
        self.files = RowFiles(folder, done, **FIELDS)
        columns = TextColumn(name, markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, TextColumn("{task.fields[said]}"), console=console, disable=not sys.stdout.isatty())
        self.task = self.bar.add_task(name, total=1.0, said="")
        self.bar.start()

    def step(self, row: dict, done: float) -> None:
        self.files.add("steps", row)
        said = f"loss {row['loss']:.3f} accuracy {row['accuracy']:.1%} {row['examples_per_second']:,.0f} examples/s"
        self.bar.update(self.task, completed=done, said=said)

    def evaluation(self, row: dict) -> None:
        self.files.add("evaluations", row)
        minutes = f"{row['seconds'] / 60:.1f} minutes, {row['examples']:,} examples"
        console.print(f"step {row['step']:,} ({minutes}): {row['accuracy']:.1%} ± {row['error']:.1%} of the held-out right")

    def close(self) -> None:
        self.bar.stop()


def read_evaluations(run: Path) -> list[dict[str, float]]:
    """The rows of a run's evaluations.csv. Raises ValueError where there are none."""
    rows = [{name: float(value) for name, value in row.items()} for row in read(run / "evaluations.csv")]
    if not rows:
        raise ValueError(f"{run} holds no evaluations; pass folders that train --out wrote")
    return rows


def plot(runs: list[Path], target: Path) -> Path:
    """Held-out accuracy of runs against the minutes of training steps and against the examples seen."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for run in runs:
        rows = read_evaluations(run)
        accuracy, error = (np.array([row[name] for row in rows]) for name in ("accuracy", "error"))
        for axis, (field, unit) in zip(axes, (("seconds", 60), ("examples", 1)), strict=True):
            x = [row[field] / unit for row in rows]
            (line,) = axis.plot(x, accuracy, "o-", markersize=3, label=run.name)
            axis.fill_between(x, accuracy - error, accuracy + error, color=line.get_color(), alpha=0.2)
    for axis, label in zip(axes, ("minutes of training steps", "training examples"), strict=True):
        axis.set_xlabel(label)
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
        axis.grid(alpha=0.3)
    axes[1].xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes[0].set_ylabel("held-out accuracy (shaded: its standard error)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


def results(runs: list[Path]) -> Table:
    """A row for each run: its accuracy at the end, and when the shortest run of the same task ended."""
    numbers = "pairs kept", "examples", "minutes", "accuracy", "at the same time"
    table = right_aligned("held-out accuracy", "run,task,attention", numbers)
    found = []
    for run in runs:
        settings, _, _ = checkpoint.read(checkpoint.find_checkpoint(run))
        found.append((run.name, settings, read_evaluations(run)))
    for name, settings, rows in found:
        task, last = task_of(settings.task), rows[-1]
        end = min(other[-1]["seconds"] for _, one, other in found if one.task == settings.task)
        within = [row for row in rows if row["seconds"] <= _SAME_TIME * end]
        table.add_row(
            name,
            " ".join(str(value) for value in settings.task.values()),
            settings.attention,
            f"{density(settings.attention, tokens_of(task)):.1%}",
            f"{last['examples']:,.0f}",
            f"{last['seconds'] / 60:.1f}",
            _percent(last),
            f"{_percent(within[-1])} at {end / 60:.1f}" if within else "none yet",
        )
    return table


def _percent(row: dict[str, float]) -> str:
    return f"{row['accuracy']:.1%} ± {row['error']:.1%}"
