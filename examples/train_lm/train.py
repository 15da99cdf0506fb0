"""The training loop."""

import math
import os
import signal
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import checkpoint, memory
from .checkpoint import Progress
from .data import Batch, Stream, Tokens
from .model import IGNORED, Decoder
from .parallel import ContextPlanner, World, distribute_model, mixed_precision, sync_gradients, unwrap_ddp
from .report import Log, plot
from .settings import Parallel, Settings

TIMED_STEPS, UNTIMED_STEPS = 50, 5  # of a time budget; the first steps compile
_LEAST_RATE = 0.1


class NotFinite(RuntimeError):
    """The loss or a gradient is infinite or NaN; says where."""


class Run:
    """Trains a model. folder: of its checkpoints and logs. data: a prepared folder. start: a checkpoint of the same model, whose
    parameters the run starts with; masks and lengths may differ."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        data: Path,
        world: World,
        parallel: Parallel = "ddp",
        fresh: bool = False,
        start: Path | None = None,
    ):
        self.settings, self.folder, self.world = settings, folder, world
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        vocabulary = settings.shape.vocabulary
        self.stream = Stream(Tokens(data, "train", vocabulary), settings.chunk, settings.seed)
        self.held_out = Tokens(data, "held_out", vocabulary)
        torch.manual_seed(settings.seed)
        with world.device:
            model = Decoder(settings)
        if settings.compiled:
            model.compile(settings.packed and not world.context)
        self.model = distribute_model(model, world, parallel)
        self.optimizer = optimizer(self.model, settings)
        self.planner = ContextPlanner(settings, world.context) if world.context else None
        self.progress = Progress(steps=settings.steps)
        last = None if fresh else checkpoint.latest(folder)
        if start and not last:
            checkpoint.load_model(start, self.model, world)
        if last:
            self.progress = checkpoint.resume(last, settings, self.model, self.optimizer, world)
        self.resumed, self.started = last, None if last else start
        self.timed: list[float] = []
        self.peak_flops = memory.find_peak_flops(world.device)
        self.flop = {length: memory.step_flop(settings, length) for length in (settings.length, settings.last_length)}
        self.stopped = False

    def train(self, save_every: int = 500, evaluate_every: int = 250, windows: int = 16) -> bool:
        """Trains to the last step; returns False if Ctrl-C or SIGTERM came before it. Saves at the end in either case. Raises
        ValueError before the first step if the held-out text is too short to evaluate on."""
        for step in (self.progress.step + 1, self.settings.steps or self.settings.extend_at):
            self.held_out.check_holds(self.settings.length_at(step))
        log = Log(self.folder, ", ".join(self.settings.masks), self.progress) if self.world.is_first else None
        handlers = {kind: signal.signal(kind, self._stop) for kind in (signal.SIGINT, signal.SIGTERM)}
        progress = self.progress
        try:
            # All ranks leave at the same step.
            while not (progress.steps and progress.step >= progress.steps) and not self._any_rank(self.stopped):
                row = self.step()
                last = progress.step == progress.steps
                if log:
                    log.step(row, progress.steps)
                if progress.step % evaluate_every == 0 or last:
                    loss = self.evaluate(windows)
                    if log:
                        log.evaluation({name: row[name] for name in ("step", "tokens", "seconds")} | {"loss": loss})
                if progress.step % save_every == 0:
                    self.save()
            self.save()
        finally:
            for kind, handler in handlers.items():
                signal.signal(kind, handler)
            if log:
                log.close()
                plot({", ".join(self.settings.masks): self.folder}, self.folder / "loss.png")
        return progress.step == progress.steps

    def _stop(self, *_) -> None:
        self.stopped = True

    def _any_rank(self, here: bool) -> bool:
        """Whether this holds on any rank."""
        if self.world.mesh is None:
            return here
        return self.world.sum(torch.tensor(float(here), device=self.world.device)).item() > 0

    def step(self) -> dict:
        """Takes one optimizer step; returns its row of the log."""
        settings, world, progress = self.settings, self.world, self.progress
        begin, length = time.perf_counter(), self.length
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        passes = settings.count_passes(world.replicas)
        loss = torch.zeros((), device=world.device)
        for number in range(passes):
            batch = self._batch(number)
            with sync_gradients(self.model, number == passes - 1):
                # Ranks' gradients are averaged, so that a sum over a step's tokens is multiplied with the number of ranks.
                part = self._compute_loss(batch) * (world.size / settings.step_tokens)
                part.backward()
            loss += part.detach()
        loss = world.sum(loss / world.size)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        loss, norm = torch.stack([loss, norm.to(loss)]).tolist()  # waits for the GPU: the clock below is honest
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(self._explain_not_finite(loss, norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - begin
        progress.step += 1
        progress.position += settings.step_tokens
        progress.seconds += seconds
        self._update_budget(seconds)
        on_gpu = world.device.type == "cuda"
        return {
            "step": progress.step,
            "tokens": progress.position,
            "seconds": round(progress.seconds, 4),
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens_per_second": settings.step_tokens / seconds,
            "mfu": self.flop[length] / seconds / (self.peak_flops * world.size) if self.peak_flops else None,
            "memory_gib": torch.cuda.max_memory_allocated(world.device) / memory.GIB if on_gpu else None,
        }

    def _batch(self, number: int) -> Batch:
        """Returns this rank's batch of pass ``number`` of the step, which it computes alone or with the ranks of its context."""
        settings = self.settings
        before = (number * self.world.replicas + self.world.replica) * settings.micro_tokens
        return self.stream.batch(self.progress.position + before, settings.micro_tokens // self.length, self.length)

    @property
    def length(self) -> int:
        """Returns the length of the sequences of the next step."""
        return self.settings.length_at(self.progress.step)

    def _compute_loss(self, batch: Batch) -> torch.Tensor:
        """Returns the sum of a batch's losses; of this rank's tokens if ranks share the sequences."""
        tokens, labels, documents = batch.to_device(self.world.device, self.settings.packed)
        plans = self.planner.plans_of(batch) if self.planner else None
        if plans:
            tokens, labels = plans[0].shard(tokens, 1), plans[0].shard(labels, 1, fill=IGNORED)
        with mixed_precision(self.model, self.world):
            return self.model(tokens, labels, documents, plans)

    def learning_rate(self) -> float:
        settings, step, steps = self.settings, self.progress.step, self.progress.steps
        warm = min(1.0, (step + 1) / max(1, settings.warmup))
        if not steps:  # a time budget that is still being measured
            return settings.learning_rate * warm
        done = min(1.0, max(0, step - settings.warmup) / max(1, steps - settings.warmup))
        return settings.learning_rate * warm * (_LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))

    def _update_budget(self, seconds: float) -> None:
        """Makes steps of a time budget once enough of them were timed, the same number on all ranks."""
        progress = self.progress
        if progress.steps or not self.settings.minutes:
            return
        self.timed.append(seconds)
        if len(self.timed) == UNTIMED_STEPS + TIMED_STEPS:
            step = statistics.median(self.timed[UNTIMED_STEPS:])
            more = (60 * self.settings.minutes - progress.seconds) / step
            progress.steps = progress.step + max(1, int(self.world.agreed(more)))

    @torch.no_grad()
    def evaluate(self, windows: int) -> float:
        """Returns the mean held-out loss in nats a token, over ``windows`` sequences spread evenly. Replicas divide them."""
        world, length = self.world, self.length
        self.held_out.check_holds(length)
        spread = torch.linspace(0, len(self.held_out) - length - 1, windows).long().tolist()
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        replicas = world.replicas
        for number in range(world.replica, -(-windows // replicas) * replicas, replicas):  # each as many passes
            part = self._compute_loss(Batch.from_starts(self.held_out, [spread[min(number, windows - 1)]], length))
            total += part.double() if number < windows else 0
        return world.sum(total).item() / (windows * length)

    def save(self) -> Path:
        return checkpoint.save(self.folder, self.settings, self.progress, self.model, self.optimizer, self.world)

    def _explain_not_finite(self, loss: float, norm: float) -> str:
        """Says which module first gave a number that is not finite, and which text was read."""
        model, progress, last = self.model, self.progress, checkpoint.latest(self.folder)
        found = [f"parameter {name}" for name, p in model.named_parameters() if not _is_finite(p)]
        if not self._any_rank(bool(found)):  # the same on all ranks, as all of them run the model, or none
            found = self._first_module()
        found = found or [f"the gradient of {name}" for name, p in model.named_parameters() if not _is_finite(p.grad)]
        stop = progress.position + self.settings.step_tokens
        return (
            f"loss {loss}, gradient norm {norm} at step {progress.step + 1}, tokens {progress.position:,} to {stop:,} of the text: "
            f"the first that is not finite is {found[0] if found else 'on another rank'} (rank {self.world.rank}). No parameter "
            f"was changed by this step; {f'{last.name} is the last checkpoint' if last else 'there is no checkpoint'}; try a "
            "lower --learning-rate"
        )

    @torch.no_grad()
    def _first_module(self) -> list[str]:
        """Runs the step's batches again, uncompiled; returns the first module whose result is not finite, in a list, or none."""
        found: list[str] = []

        def look(name):
            def hook(module, args, out):
                if not found and isinstance(out, torch.Tensor) and not _is_finite(out):
                    found.append(f"the output of {name}")

            return hook

        hooks = [m.register_forward_hook(look(name)) for name, m in unwrap_ddp(self.model).named_modules() if name]
        with torch.compiler.set_stance("force_eager"):
            for number in range(self.settings.count_passes(self.world.replicas)):
                self._compute_loss(self._batch(number))
        for hook in hooks:
            hook.remove()
        return found


def _is_finite(tensor: torch.Tensor | None) -> bool:
    if tensor is None:
        return True
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(local.isfinite().all())


def optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms and gains do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
