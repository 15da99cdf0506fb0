"""Shows a run: a progress bar, CSV files, TensorBoard, plots."""

import csv
import json
import sys
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from .checkpoint import Progress as RunProgress

matplotlib.use("agg")
# A log has no width of its own; rich would take 80, which is less than some tables need.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)

STEP_FIELDS = ("step", "tokens", "seconds", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "memory_gib")
EVALUATION_FIELDS = ("step", "tokens", "seconds", "loss")


class RowFiles:
    """CSV files of a run's rows. After a resume, what came later than the checkpoint is written anew."""

    def __init__(self, folder: Path, done: RunProgress, **fields: tuple[str, ...]):
        """fields: of each file, by its name."""
        self.files, self.fields = {name: folder / f"{name}.csv" for name in fields}, fields
        for name, path in self.files.items():
            rows = [row for row in read(path) if int(row["step"]) <= done.step]
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, fields[name])
                writer.writeheader()
                writer.writerows(rows)

    def add(self, name: str, row: dict) -> None:
        with self.files[name].open("a", newline="") as file:
            csv.DictWriter(file, self.fields[name]).writerow(row)


class Log:
    """Logs one run, in the first process: steps.csv, evaluations.csv and TensorBoard's files in its folder, and a bar."""

    def __init__(self, folder: Path, name: str, done: RunProgress):
        self.files = RowFiles(folder, done, steps=STEP_FIELDS, evaluations=EVALUATION_FIELDS)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=done.step + 1)
        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}"))
        self.bar = Progress(*columns, console=console, disable=not sys.stdout.isatty())
        self.task = self.bar.add_task(name, total=done.steps or None, completed=done.step, said="")
        self.bar.start()

    def step(self, row: dict, steps: int) -> None:
        self._write("steps", row)
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        used = f" MFU {row['mfu']:.0%}" if row["mfu"] else ""
        memory = f" {row['memory_gib']:.1f} GiB" if row["memory_gib"] else ""
        said = f"loss {row['loss']:.3f} {speed}{used}{memory}"
        self.bar.update(self.task, completed=row["step"], total=steps or None, said=said)
        if self.bar.disable and (row["step"] % 50 == 0 or row["step"] == steps):
            console.print(f"step {row['step']}{f' of {steps}' if steps else ''}: {said}")

    def evaluation(self, row: dict) -> None:
        self._write("evaluations", row)
        console.print(f"step {row['step']}: held-out loss {row['loss']:.4f} nats a token")

    def _write(self, kind: str, row: dict) -> None:
        self.files.add(kind, row)
        for name, value in row.items():
            if name not in ("step", "tokens") and value not in (None, ""):
                self.board.add_scalar(f"{kind}/{name}", value, row["step"])

    def close(self) -> None:
        self.bar.stop()
        self.board.close()


def read(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plot(runs: dict[str, Path], target: Path) -> Path:
    """Plots loss against tokens and against the seconds of training steps, of runs by name: training as lines, held out as dots."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for number, (name, folder) in enumerate(runs.items()):
        steps, evaluations = read(folder / "steps.csv"), read(folder / "evaluations.csv")
        for axis, field in zip(axes, ("tokens", "seconds"), strict=True):
            if len(steps) > 5:
                losses = _smoothed([float(row["loss"]) for row in steps])
                axis.plot([float(row[field]) for row in steps], losses, color=f"C{number}", alpha=0.5, linewidth=1)
            points = [(float(row[field]), float(row["loss"])) for row in evaluations]
            axis.plot(*zip(*points, strict=True) if points else ([], []), "o-", color=f"C{number}", markersize=4, label=name)
    for axis, label in zip(axes, ("training tokens", "seconds of training steps"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss, nats a token (dots: held-out text)")
    axes[0].legend()
    figure.savefig(target, dpi=150)
    plt.close(figure)
    return target


def plot_costs(source: Path, target: Path) -> Path:
    """Draws seconds of a step against length, from a file that ``cost --out`` wrote: a panel for each model, a line for each mask.
    Beside ``target`` it writes a dark version. Raises ValueError for other files."""
    from sparse_flash.benchmarks.report.plots import draw_training

    try:
        found = json.loads(source.read_text())
        found["costs"] = [cost for cost in found["costs"] if cost["compiled"]] or found["costs"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{source} is no file that cost --out wrote: {type(error).__name__}: {error}") from error
    draw_training(found, target)
    return target


def _smoothed(values: list[float], share: float = 0.1) -> list[float]:
    mean, out = values[0], []
    for value in values:
        mean += share * (value - mean)
        out.append(mean)
    return out
