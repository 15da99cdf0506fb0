"""The training loop, on one device."""

import math
import signal
import time
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.train_lm.checkpoint import Progress
from examples.train_lm.parallel import World, mixed_precision
from examples.train_lm.train import NotFinite, optimizer

from . import checkpoint
from .data import Examples
from .model import Classifier
from .report import Log
from .settings import Settings


class Score(NamedTuple):
    """Over the held-out examples. error: the accuracy's standard error. loss: in nats."""

    accuracy: float
    error: float
    loss: float


class End(Enum):
    """How training ended: at the end of the budget, by Ctrl-C or SIGTERM, or because the run was hopeless."""

    DONE = auto()
    STOPPED = auto()
    HOPELESS = auto()


class Run:
    """A model in training. folder: of its checkpoint and logs. data: a prepared folder of the settings' task. start: a checkpoint,
    also of a smaller size, whose parameters are the first ones."""

    def __init__(self, settings: Settings, folder: Path, data: Path, world: World, fresh: bool = False, start: Path | None = None):
        self.settings, self.folder, self.world = settings, folder, world
        self.examples, self.held_out = Examples(data, "train"), Examples(data, "held_out")
        if self.examples.manifest["task"] != settings.task:
            raise ValueError(f"{data} holds {self.examples.manifest['task']}; the run is of {settings.task}; pass its --data")
        if len(self.examples) < settings.batch:
            raise ValueError(
                f"{data} has {len(self.examples):,} examples, fewer than a batch of {settings.batch}; pass a smaller --batch"
            )
        torch.manual_seed(settings.seed)
        self.model = Classifier(settings).to(world.device)
        if settings.compiled:
            self.model.compile()
        self.optimizer = optimizer(self.model, settings)
        self.progress = Progress(steps=settings.steps)
        last = checkpoint.find_checkpoint(folder)
        self.resumed = None if fresh or not last.exists() else last
        if self.resumed:
            self.progress = checkpoint.resume(last, settings, self.model, self.optimizer)
        elif start:
            _, _, state = checkpoint.read(start)
            self.model.start_from(state["model"], str(start))
        self.stopped = False

    @property
    def done(self) -> float:
        """The share of the run's steps or minutes that has passed."""
        settings, progress = self.settings, self.progress
        return min(1.0, progress.step / settings.steps if settings.steps else progress.seconds / (60 * settings.minutes))

    def train(self, evaluations: int = 20, is_hopeless: Callable[[float, float], bool] | None = None) -> End:
        """Trains, and returns how that ended. evaluations: how often to evaluate and save, evenly spread. is_hopeless: by the share
        of the run that is done and the held-out accuracy, whether to end."""
        if evaluations < 1:
            raise ValueError(f"evaluations must be at least 1; got {evaluations}")
        self.folder.mkdir(parents=True, exist_ok=True)
        handlers = {kind: signal.signal(kind, self._stop) for kind in (signal.SIGINT, signal.SIGTERM)}
        log, hopeless = Log(self.folder, self.settings.attention, self.progress), False
        try:
            if self.settings.compiled and self.done < 1:
                self._warm_up()
            while self.done < 1 and not self.stopped and not hopeless:
                before = self.done
                row = self.step()
                log.step(row, self.done)
                if int(self.done * evaluations) > int(before * evaluations):
                    score = evaluate_split(self.model, self.held_out, self.settings.micro_batch, self.world)
                    log.evaluation({name: row[name] for name in ("step", "examples", "seconds")} | score._asdict())
                    self.save()
                    hopeless = is_hopeless is not None and is_hopeless(self.done, score.accuracy)
            self.save()
        finally:
            for kind, handler in handlers.items():
                signal.signal(kind, handler)
            log.close()
        return End.DONE if self.done == 1 else End.HOPELESS if hopeless else End.STOPPED

    def _stop(self, *_) -> None:
        self.stopped = True

    def _warm_up(self) -> None:
        """One pass, which compiles and changes nothing: the clock of the run starts after it."""
        inputs, labels = load_batch(self.examples, np.arange(self.settings.micro_batch), self.world)
        self._loss(inputs, labels)[0].backward()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> dict:
        """One optimizer step; returns its row of the log."""
        settings, progress = self.settings, self.progress
        begin = time.perf_counter()
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = self.examples.rows(progress.step, settings.batch, settings.seed)
        turns = np.random.default_rng([settings.seed, 1, progress.step]).integers(0, 8, settings.batch)
        loss, right = torch.zeros(2, device=self.world.device)
        for first in range(0, settings.batch, settings.micro_batch):
            piece = slice(first, first + settings.micro_batch)
            inputs, labels = load_batch(self.examples, rows[piece], self.world)
            if inputs.dim() == 3:  # images; this changes no label
                inputs = turn_images(inputs, torch.from_numpy(turns[piece]).to(inputs.device))
            part, hits = self._loss(inputs, labels)
            (part / settings.batch).backward()
            loss, right = loss + part.detach(), right + hits
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        loss, right, norm = torch.stack([loss / settings.batch, right, norm]).tolist()  # waits for the GPU: the clock is honest
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(f"loss {loss}, gradient norm {norm} at step {progress.step + 1}; try a lower --learning-rate")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - begin
        progress.step += 1
        progress.position += settings.batch
        progress.seconds += seconds
        return {
            "step": progress.step,
            "examples": progress.position,
            "seconds": round(progress.seconds, 4),
            "loss": loss,
            "accuracy": right / settings.batch,
            "learning_rate": rate,
            "gradient_norm": norm,
            "examples_per_second": settings.batch / seconds,
        }

    def _loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses of a batch, and how many labels are right."""
        with mixed_precision(self.model, self.world):
            logits = self.model(inputs)
        return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(-1) == labels).sum()

    def learning_rate(self) -> float:
        warm = min(1.0, (self.progress.step + 1) / max(1, self.settings.warmup))
        return self.settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * self.done))

    def save(self) -> Path:
        return checkpoint.save(self.folder, self.settings, self.progress, self.model, self.optimizer)


def load_batch(examples: Examples, rows: np.ndarray, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, uint8, and labels, int64, on the device."""
    inputs, labels = (torch.from_numpy(array).to(world.device) for array in examples.batch(rows))
    return inputs, labels.long()


def turn_images(images: torch.Tensor, how: torch.Tensor) -> torch.Tensor:
    """Each image by one of the symmetries of the square. images: (batch, size, size). how: (batch,), 0 to 7."""
    changed = (lambda t: t.flip(1)), (lambda t: t.flip(2)), (lambda t: t.transpose(1, 2))
    for bit, change in enumerate(changed):
        images = torch.where((how >> bit & 1).bool()[:, None, None], change(images), images)
    return images


@torch.no_grad()
def evaluate_split(model: Classifier, examples: Examples, batch: int, world: World) -> Score:
    """The score on all examples of a split, ``batch`` at a time."""
    total, losses, hits = len(examples), [], []
    for first in range(0, total, batch):
        inputs, labels = load_batch(
            examples, np.arange(first, first + batch) % total, world
        )  # full batches: one shape, compiled once
        with mixed_precision(model, world):
            logits = model(inputs)
        counted = min(batch, total - first)
        losses.append(F.cross_entropy(logits, labels, reduction="none")[:counted])
        hits.append((logits.argmax(-1) == labels)[:counted])
    accuracy = torch.cat(hits).double().mean().item()
    return Score(accuracy, (accuracy * (1 - accuracy) / total) ** 0.5, torch.cat(losses).double().mean().item())
