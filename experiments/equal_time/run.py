"""Times one arm, trains it for a number of seconds, and evaluates it. The result is a dictionary that JSON holds."""

import gc
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from examples.train_lm.parallel import World
from examples.train_lm.report import console
from examples.train_lm.settings import Settings, Shape, check_settings
from examples.train_lm.train import Run

from . import evaluate, windows
from .arms import Arm, TunedSettings

WARM_STEPS, TIMED_STEPS = 8, 20
CURVE_POINTS, CURVE_WINDOWS = 16, 16
_LOGGED = 200  # training losses in a result, each a mean


def settings_of(arm: Arm, shape: Shape, how: TunedSettings, seed: int, step_tokens: int) -> Settings:
    """Settings of a run whose number of steps is not known yet."""
    return Settings(
        shape,
        masks=arm.masks,
        length=arm.length,
        step_tokens=step_tokens,
        micro_tokens=step_tokens,
        chunk=step_tokens,
        steps=1000,
        learning_rate=how.learning_rate,
        log_length=how.log_length,
        seed=seed,
    )


def plan_steps(settings: Settings, arm: Arm, seconds: float, seconds_of: dict[int, float]) -> Settings:
    """The settings with as many steps as fit in ``seconds``. seconds_of: a step's, by length. Raises ValueError where none fits."""
    first = int(arm.extend_after * seconds / seconds_of[arm.length])
    rest = int((1 - arm.extend_after) * seconds / seconds_of[arm.last_length])
    steps = first + rest
    if not steps:
        raise ValueError(f"a step takes {min(seconds_of.values()):.2g} s; pass more --seconds; got {seconds:g}")
    longer = {"extend_to": arm.last_length, "extend_at": first} if rest else {}
    return replace(settings, steps=steps, warmup=max(1, steps // 20), **longer)


def step_seconds(settings: Settings, arm: Arm, data: Path, world: World) -> tuple[dict[int, float], float]:
    """(seconds of a step by length, medians; seconds until they were known, most of them compiling)."""
    begin, found = time.perf_counter(), {}
    for length in sorted({arm.length, arm.last_length}):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(replace(settings, length=length), Path(folder), data, world)
            rows = [run.step() for _ in range(WARM_STEPS + TIMED_STEPS)]
            found[length] = statistics.median(settings.step_tokens / row["tokens_per_second"] for row in rows[WARM_STEPS:])
            del run
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return found, time.perf_counter() - begin


def run(
    name: str,
    arm: Arm,
    shape: Shape,
    how: TunedSettings,
    seconds: float,
    seed: int,
    data: Path,
    world: World,
    step_tokens: int = 65_536,
    compiled: bool = True,
    start: Path | None = None,
    keep: Path | None = None,
    tuning: bool = False,
) -> dict:
    """seconds: of training steps; compiling, evaluating and saving are not counted. start: a checkpoint whose parameters are the
    first: the arm is called "... continued", and its curve begins before the first step. keep: a folder for the last checkpoint.
    tuning: evaluate on the windows for tuning, in one way, and draw no curve."""
    settings = check_settings(replace(settings_of(arm, shape, how, seed, step_tokens), compiled=compiled))
    held_out = windows.load(data, "tuning" if tuning else "reported")
    seconds_of, compiling = step_seconds(settings, arm, data, world)
    settings = check_settings(plan_steps(settings, arm, seconds, seconds_of))
    with tempfile.TemporaryDirectory() as folder:
        training = Run(settings, keep or Path(folder), data, world, fresh=True, start=start)
        epochs = settings.steps * settings.step_tokens / training.stream.epoch_tokens
        scaled = ", log-length scaling" * how.log_length
        console.print(
            f"{name}, seed {seed}, learning rate {how.learning_rate:g}{scaled}: {settings.steps:,} steps, {epochs:.2f} epochs",
            markup=False,
        )
        rows, curve, evaluating = _train(training, held_out, 0 if tuning else CURVE_POINTS)
        begin = time.perf_counter()
        found = {}
        ways = list(evaluate.reading_modes(training.model, arm.last_length, held_out.far.shape[1]).items())
        for way, (context, changes) in ways[:1] if tuning else ways:
            with evaluate.changed_rotary(training.model, **changes) as model:
                found[way] = evaluate.evaluate(model, training.held_out, held_out, context, world.device)
            console.print(f"{name}: {way}: {evaluate.mean_loss(found[way]):.4f} nats a token", markup=False)
        if keep:
            training.save()
    on_gpu = world.device.type == "cuda"
    return {
        "arm": f"{name} continued" if start else name,
        "seed": seed,
        "settings": asdict(settings),
        "start": start and str(start),
        "device": torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "step_seconds": seconds_of,
        "budget": seconds,
        "seconds": rows[-1]["seconds"],
        "tokens": rows[-1]["tokens"],
        "epochs": epochs,
        "memory_gib": rows[-1]["memory_gib"],
        "beside": {"timing and compiling": compiling, "curve": evaluating, "evaluation": time.perf_counter() - begin},
        "training": _means(rows),
        "curve": curve,
        "evaluations": found,
    }


def _train(training: Run, held_out: windows.Windows, count: int) -> tuple[list[dict], list[dict], float]:
    """(rows of steps, ``count`` points of the held-out curve, seconds that its evaluations took)."""
    few, progress = held_out.take(CURVE_WINDOWS), training.progress
    points = {round(progress.steps * (i + 1) / count) for i in range(count)}
    device, strides = training.world.device, evaluate.CURVE_STRIDES

    def point(context: int) -> dict:
        found = evaluate.evaluate(training.model, training.held_out, few, context, device, strides)
        return {"step": progress.step, "tokens": progress.position, "seconds": progress.seconds, "nats": evaluate.mean_loss(found)}

    rows, evaluating = [], 0.0
    curve = [point(training.length)] if count and training.started else []
    columns = TextColumn("training"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=progress.steps, said="")
        while progress.step < progress.steps:
            context = training.length  # of the step that is taken now
            rows.append(training.step())
            bar.update(task, advance=1, said=f"loss {rows[-1]['loss']:.3f}")
            if progress.step in points:
                begin = time.perf_counter()
                curve.append(point(context))
                evaluating += time.perf_counter() - begin
    return rows, curve, evaluating


def _means(rows: list[dict]) -> list[dict]:
    """The training loss, as at most _LOGGED means."""
    pieces = np.array_split(np.arange(len(rows)), min(_LOGGED, len(rows)))
    return [
        {
            "tokens": rows[piece[-1]]["tokens"],
            "seconds": rows[piece[-1]]["seconds"],
            "nats": float(np.mean([rows[i]["loss"] for i in piece])),
            "gradient_norm": float(np.max([rows[i]["gradient_norm"] for i in piece])),
        }
        for piece in pieces
    ]
