"""Compares masks in equal training time.

\b
python -m experiments.equal_time prepare --packages corpus
python -m experiments.equal_time run power-of-two --seconds 300 --seed 1 --out runs/equal_time/power-of-two-1.json
python -m experiments.equal_time run-missing --out runs/equal_time     # of the reported runs
python -m experiments.equal_time report runs/equal_time/*.json
"""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from examples.train_lm import checkpoint, data, parallel
from examples.train_lm.cli import Data, Device, user_errors
from examples.train_lm.report import console
from examples.train_lm.settings import PRESETS
from examples.train_lm.settings import preset as preset_of

from ..files import check_one_of, right_aligned, whole_file
from . import evaluate, results, windows
from .arms import ARMS, LEARNING_RATES, SEEDS, TUNED_FILE, TunedSettings, complete_settings
from .run import run as run_arm

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)
FOLDER = Path("runs/equal_time/data")
CORPUS = Path(__file__).with_name("corpus.txt")

Name = Annotated[str, typer.Argument(help=f"One of {', '.join(ARMS)}.")]
Preset = Annotated[str, typer.Option(help=f"The model: {', '.join(PRESETS)}.")]
Seconds = Annotated[float, typer.Option(help="Of training steps.")]
Files = Annotated[list[Path], typer.Argument(help="Files that run --out wrote.")]


@app.command()
def prepare(
    packages: Annotated[
        Path, typer.Option(help=f"pip install --target PACKAGES --no-deps --no-compile --only-binary :all: -r {CORPUS.name}")
    ],
    preset: Preset = "30M",
    count: Annotated[int, typer.Option("--windows", help="Held-out sequences.")] = 168,
    held_out: Annotated[float, typer.Option(help="Share of the text that is held out.")] = 0.15,
    folder: Data = FOLDER,
) -> None:
    """Turn the source text of packages into tokens, and choose the held-out windows."""
    with user_errors():
        vocabulary = preset_of(preset).vocabulary
        manifest = data.prepare(folder, vocabulary, installed=packages, held_out_share=held_out)
        found = windows.prepare(folder, vocabulary, count)
        console.print(
            f"{manifest['tokens']['train']:,} training tokens, {manifest['tokens']['held_out']:,} held out; {len(found)} windows "
            f"in {len(set(found.packages))} packages, {found.far.mean():.1%} of their tokens repeat an identifier last seen more "
            f"than {data.FAR:,} tokens before"
        )


@app.command()
def run(
    name: Name,
    preset: Preset = "30M",
    seconds: Seconds = 300.0,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.")] = 1,
    learning_rate: Annotated[float | None, typer.Option(help="Its peak. [what tuning chose]")] = None,
    log_length: Annotated[bool | None, typer.Option("--log-length/--no-log-length", help="[what tuning chose]")] = None,
    folder: Data = FOLDER,
    out: Annotated[Path, typer.Option(help="A JSON file for the result.")] = Path("runs/equal_time/result.json"),
    keep: Annotated[Path | None, typer.Option(help="A folder for the last checkpoint.")] = None,
    start: Annotated[Path | None, typer.Option(help="A checkpoint, or a folder of --keep, whose parameters are the first.")] = None,
    device: Device = "auto",
) -> None:
    """Train one arm for --seconds, and evaluate it."""
    with user_errors(), parallel.join_world(device) as world:
        check_one_of(ARMS, arm=name)
        how = complete_settings(preset, name, learning_rate, log_length)
        first = start and checkpoint.resolve_checkpoint(start)
        found = run_arm(name, ARMS[name], preset_of(preset), how, seconds, seed, folder, world, start=first, keep=keep)
        _write(out, {"preset": preset, **found})


@app.command()
def run_missing(
    preset: Annotated[str, typer.Option(help=f"The model: {', '.join(SEEDS)}.")] = "30M",
    seconds: Seconds = 300.0,
    folder: Data = FOLDER,
    out: Annotated[Path, typer.Option(help="A folder for results, ARM-SEED.json; finished runs are not repeated.")] = Path(
        "runs/equal_time"
    ),
    device: Device = "auto",
) -> None:
    """Run what is missing of a preset's reported runs, one after the other.

    Several such commands share one folder: each run is claimed by a file, ARM-SEED.running. Give each a GPU of its own.
    """
    with user_errors():
        check_one_of(SEEDS, preset=preset)  # those that have reported runs
        runs = sorted((seed, name) for name, seeds in SEEDS[preset].items() for seed in seeds)
        out.mkdir(parents=True, exist_ok=True)
        for seed, name in runs:
            result, claim = out / f"{name}-{seed}.json", out / f"{name}-{seed}.running"
            if result.exists():
                continue
            try:
                claim.touch(exist_ok=False)
            except FileExistsError:
                console.print(f"{name}, seed {seed}: runs already; if it does not, remove {claim}", soft_wrap=True, markup=False)
                continue
            command = [sys.executable, "-m", "experiments.equal_time", "run", name, "--preset", preset, "--seed", str(seed)]
            command += ["--seconds", str(seconds), "--data", str(folder), "--out", str(result), "--device", device]
            try:
                if result.exists():  # another command has finished it since
                    continue
                # A process of its own, so that no run finds memory or code of another.
                ended = subprocess.run(command).returncode
            finally:
                claim.unlink()
            if ended:
                raise ValueError(f"{name}, seed {seed} ended with status {ended}; what it said is above")


@app.command()
def tune(
    name: Name,
    preset: Preset = "30M",
    seconds: Seconds = 90.0,
    seed: Annotated[int, typer.Option(help="One that is not reported.")] = 1000,
    folder: Data = FOLDER,
    target: Annotated[Path, typer.Option(help="The file that run reads.")] = TUNED_FILE,
    device: Device = "auto",
) -> None:
    """Train an arm with each learning rate; a dense one with log-length scaling too, at the best of them. Writes down the best, and
    all that was tried; presets and other arms stay as they are."""
    with user_errors(), parallel.join_world(device) as world:
        check_one_of(ARMS, arm=name)
        arm, shape, tried = ARMS[name], preset_of(preset), {}

        def trial(how: TunedSettings) -> None:
            found = run_arm(name, arm, shape, how, seconds, seed, folder, world, tuning=True)
            loss = min(map(evaluate.mean_loss, found["evaluations"].values()))
            tried[how] = {"loss": round(loss, 4), "seed": seed, "seconds": seconds, "tokens": found["tokens"]}

        def best() -> TunedSettings:
            return min(tried, key=lambda how: tried[how]["loss"])

        for rate in LEARNING_RATES:
            trial(TunedSettings(rate, False))
        if arm.is_dense:
            trial(TunedSettings(best().learning_rate, True))
        table = json.loads(target.read_text()) if target.exists() else {"chosen": {}, "tried": {}}
        table["chosen"].setdefault(preset, {})[name] = asdict(best())
        table["tried"].setdefault(preset, {})[name] = [asdict(how) | about for how, about in tried.items()]
        console.print(f"{name}: best {best()}: {tried[best()]['loss']}", markup=False)
        _write(target, table)


@app.command()
def report(
    files: Files,
    base: Annotated[str, typer.Option(help="The arm that the others are compared with.")] = "dense",
    picture: Annotated[Path, typer.Option(help="The picture.")] = Path("equal_time.png"),
) -> None:
    """A table and a picture of several results."""
    with user_errors():
        found = results.load(files)
        rows = results.compare_arms(found, base)
        of_training = "seeds", "loss", "tokens/s", "epochs", "tokens to loss", "time to loss", "last quarter"
        training, gained = right_aligned("training", "arm", of_training), ("all", "at 0-1K", "beyond that", "far identifiers")
        gains = right_aligned(f"lower than {base} by nats a token, ± a standard error over packages", "arm", gained)
        for row in rows:
            spread = "" if row["seeds"] == 1 else f" ± {row['spread']:.4f}"
            training.add_row(
                row["arm"],
                str(row["seeds"]),
                f"{row['loss']:.4f}{spread}",
                f"{row['tokens_per_second'] / 1000:,.0f}K ({row['throughput_ratio']:.2f}x)",
                f"{row['epochs']:.2f}",
                _ratio(row["tokens_to_loss_ratio"]),
                _ratio(row["time_to_loss_ratio"]),
                f"{row['last_quarter']:.1%}",
            )
            gains.add_row(row["arm"], *(str(row[name]) for name in ("gain", "gain_first", "gain_beyond", "gain_far")))
        console.print(training, gains)
        console.print(f"picture {results.plot(found, picture)}", soft_wrap=True, markup=False)


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if math.isfinite(ratio) else "never"


def _write(path: Path, result: dict) -> None:
    with whole_file(path) as partial:
        partial.write_text(json.dumps(result))
    console.print(str(path), soft_wrap=True, markup=False)
