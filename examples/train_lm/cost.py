"""Measures what a training step costs: its time, memory and utilization on random tokens, by mask and length."""

import gc
import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import sparse_flash as sf

from . import data, memory
from .parallel import World
from .settings import Parallel, Settings, check_settings
from .train import Run


@dataclass(frozen=True)
class Cost:
    """Holds the costs of one step. seconds: of forward, backward and optimizer, the median of several steps. first: seconds of
    the first step, which compiles. gib: the peak of a GPU's allocated memory, None on a CPU; estimated: what was estimated before
    the run. mfu: see ``memory.step_flop``. ranks, parallel, context: as in ``Run`` and ``Settings``."""

    mask: str
    length: int
    seconds: float
    first: float
    tokens_per_second: float
    mfu: float | None
    gib: float | None
    estimated: float
    micro_tokens: int
    recompute: str
    offload: int
    compiled: bool
    ranks: int
    parallel: Parallel
    context: int


def measure(settings: Settings, world: World, steps: int = 5, parallel: Parallel = "ddp", warm: int = 2) -> Cost:
    """Measures a step on random tokens. warm: steps between the first step and the timed steps. Every rank of the world makes the
    call. Raises ValueError for settings that cannot work, torch.OutOfMemoryError if memory is short after all."""
    settings = check_settings(settings, world.size)
    estimated = sum(memory.estimate_memory(settings, world, parallel).values())
    with tempfile.TemporaryDirectory() as folder:
        run = _run(settings, world, Path(folder), parallel)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        first, *rows = [run.step() for _ in range(1 + warm + steps)]
        seconds = statistics.median(settings.step_tokens / row["tokens_per_second"] for row in rows[warm:])
        mfu = None if run.peak_flops is None else run.flop[run.length] / seconds / (run.peak_flops * world.size)
        gib = rows[-1]["memory_gib"]
        del run
    free()
    about = settings.micro_tokens, settings.recompute, settings.offload, settings.compiled, world.size, parallel, settings.context
    speed = settings.step_tokens / seconds
    return Cost(", ".join(settings.masks), settings.length, seconds, first["seconds"], speed, mfu, gib, estimated, *about)


def _run(settings: Settings, world: World, folder: Path, parallel: Parallel) -> Run:
    """Makes a run on random tokens for twenty steps, the same on every rank."""
    tokens = np.random.default_rng(0).integers(0, settings.shape.vocabulary, 20 * max(settings.chunk, settings.step_tokens) + 1)
    np.save(folder / "tokens.npy", tokens.astype(data.dtype_of(settings.shape.vocabulary)))
    data.import_tokens(folder / "data", folder / "tokens.npy", settings.shape.vocabulary)
    return Run(settings, folder, folder / "data", world, parallel)


def free() -> None:
    """Frees what a run held, before the next run."""
    gc.collect()
    torch._dynamo.reset()
    sf.clear_caches()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def change_length(settings: Settings, length: int, most_micro_tokens: int, replicas: int = 1) -> Settings:
    """Returns the settings for sequences of another length, with equally many tokens a step. A pass takes at most
    ``most_micro_tokens``. replicas: their number. Raises ValueError if replicas cannot have equally many whole sequences of a
    step."""
    sequences, rest = divmod(settings.step_tokens, length * replicas)
    if rest or not sequences:
        those = f"whole sequences of {length:,}" + f" for each of {replicas} replicas" * (replicas > 1)
        instead = max(1, sequences) * length * replicas
        raise ValueError(f"--step-tokens must be {those}; got {settings.step_tokens:,}; pass --step-tokens {instead}")
    most = max(1, min(sequences, most_micro_tokens // length))
    together = next(count for count in range(most, 0, -1) if sequences % count == 0)
    return replace(settings, length=length, micro_tokens=together * length, chunk=-(-settings.chunk // length) * length)


def save(costs: list[Cost], path: Path, world: World, settings: Settings) -> None:
    """Writes the costs as JSON, with the GPU, versions and the model."""
    on_gpu = world.device.type == "cuda"
    about = {
        "device": torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "sparse_flash": sf.__version__,
        "shape": vars(settings.shape),
        "step_tokens": settings.step_tokens,
    }
    path.write_text(json.dumps({**about, "costs": [vars(cost) for cost in costs]}, indent=1))
