"""A trial: training within a budget of steps or seconds, then evaluation."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import mean

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import nn

import sparse_flash as sf
from examples.train_lm.cost import free
from examples.train_lm.model import IGNORED, Decoder
from examples.train_lm.parallel import World, mixed_precision
from examples.train_lm.report import console
from examples.train_lm.train import NotFinite, optimizer

from .arms import measure_reach
from .evaluate import ablate_layers, answer_questions
from .model import build_decoder
from .settings import Trial
from .task import Task

_WARMUP, _LEAST_RATE = 0.05, 0.1  # shares of the budget and of the peak
_TOGETHER = 10  # steps of a row of the curve


def run(trial: Trial, world: World, questions: int, model_of: Callable[..., Decoder] = build_decoder) -> dict:
    """The result as plain data: what was run, right answers by distance, hops and stops, and without each layer, throughput, the
    mask's reach, the curve. model_of: (trial, device) -> a new model."""
    model = model_of(trial, world.device)
    curve = fit(model, trial, world)
    found, last = answer_questions(model, trial, questions, world.device), curve[-1]
    without = ablate_layers(model, trial, max(1, questions // (4 * trial.shape.layers)), world.device)
    free()
    return {
        "trial": asdict(trial),
        "masks": asdict(trial.masks),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "sparse_flash": sf.__version__},
        "steps": last["step"],
        "seconds": last["seconds"],
        "tokens_per_second": last["step"] * trial.step_tokens / last["seconds"],
        "final_loss": final_loss(curve),
        "chance": 1 / trial.task.values,
        "by_distance": found.by_distance(),
        "by_hops": found.by_count("hops"),
        "by_stops": found.by_count("stops"),
        "without_layer": without,
        "reach": measure_reach(trial.masks, trial.shape.layers, trial.task.length, trial.block),
        "curve": curve,
    }


def final_loss(curve: list[dict]) -> float:
    """The mean of the curve's last tenth, in nats an answer."""
    return mean(row["loss"] for row in curve[-max(1, len(curve) // 10) :])


def fit(model: Decoder, trial: Trial, world: World) -> list[dict]:
    """Trains to the end of the budget. Returns the curve, a row for ten steps: the last one's number, the seconds of all steps so
    far, the sequences' length, and the mean loss in nats an answer. Raises NotFinite where a loss is not finite."""
    descent = optimizer(model, trial.to_lm_settings())
    for task in trial.stages:  # compiles what each needs before the clock starts
        loss_of(model, trial, task, 0, world).backward()
    descent.zero_grad(set_to_none=True)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)  # or the first step would wait for these passes
    rows, step, seconds, first = [], 0, 0.0, None
    columns = TextColumn(trial.arm), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}")
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(trial.arm, total=1.0, said="")
        while (done := trial.done(step, seconds)) < 1:
            if first is None and trial.first_stage_ends(done, [row["loss"] for row in rows[-_TOGETHER:]]):
                first = done
            task = trial.stage(done, first)
            begin = time.perf_counter()
            for group in descent.param_groups:
                group["lr"] = trial.learning_rate * schedule(done)
            loss = loss_of(model, trial, task, step, world)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            descent.step()
            descent.zero_grad(set_to_none=True)
            nats = loss.item()  # waits for the GPU: the clock is honest
            seconds += time.perf_counter() - begin
            step += 1
            if not math.isfinite(nats):
                raise NotFinite(f"loss {nats} at step {step} of {trial.arm}; try a lower --learning-rate")
            rows.append({"step": step, "seconds": seconds, "length": task.length, "loss": nats})
            said = f"step {step}, {task.length:,} tokens, loss {nats:.3f}"
            progress.update(bar, completed=min(1.0, trial.done(step, seconds)), said=said)
    groups = [rows[first : first + _TOGETHER] for first in range(0, len(rows), _TOGETHER)]
    return [group[-1] | {"loss": mean(row["loss"] for row in group)} for group in groups]


def loss_of(model: Decoder, trial: Trial, task: Task, number: int, world: World) -> torch.Tensor:
    """Mean loss of a training batch, in nats an answer."""
    batch = task.batch(trial.seed, number, trial.step_tokens // task.length, world.device)
    with mixed_precision(model, world):
        return model(batch.tokens, batch.labels) / (batch.labels != IGNORED).sum()


def schedule(done: float) -> float:
    """The learning rate's share of its peak: a line up, then a cosine down to a tenth."""
    if done < _WARMUP:
        return done / _WARMUP
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * (done - _WARMUP) / (1 - _WARMUP)))
