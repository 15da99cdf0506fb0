"""Checkpoints by torch.distributed.checkpoint: saved whole or not at all, resumed on any number of GPUs.

A checkpoint is a folder ``step-0000100``: DCP's files, and run.json with the settings and how far the run has come. It is written
under another name and renamed once every byte is on the disk, so whatever ends the program leaves the last one whole.
"""

import json
import os
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict

from .parallel import World
from .settings import Settings, differences

_PARTIAL = ".partial"


@dataclass
class Progress:
    """Records how far a run has come. steps: in total; 0 until a time budget has become steps. position: in the training text, in
    tokens. seconds: spent in training steps."""

    step: int = 0
    steps: int = 0
    position: int = 0
    seconds: float = 0.0


def latest(folder: Path) -> Path | None:
    """Returns the last whole checkpoint of a run, or None."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.suffix != _PARTIAL and (path / "run.json").exists()]
    return max(found, default=None)


def resolve_checkpoint(path: Path) -> Path:
    """Returns the last checkpoint of a run's folder; a checkpoint itself."""
    return path if (path / "run.json").exists() else latest(path) or path


def save(folder: Path, settings: Settings, progress: Progress, model: nn.Module, optimizer, world: World, keep: int = 2) -> Path:
    """Saves a checkpoint, and removes all but the last ``keep``. If that fails, raises OSError and leaves earlier ones."""
    target = folder / f"step-{progress.step:07d}"
    if target.exists():
        return target
    partial = target.with_name(target.name + _PARTIAL)
    if world.is_first:
        for left in folder.glob(f"step-*{_PARTIAL}"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    world.wait()
    state = {**_tensors(model, optimizer), f"random/{world.rank}": _random_state(world.device)}
    try:
        with _quiet():
            dcp.save(state, storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=world.mesh is None)
        if world.is_first:
            run = {"settings": json.loads(settings.to_json()), "progress": asdict(progress)}
            _write(partial / "run.json", json.dumps(run, indent=1))
            _sync(partial)
            os.replace(partial, target)
            _sync(folder)
    except (Exception, CheckpointException) as error:  # DCP's is no Exception
        raise OSError(f"checkpoint {target.name} could not be written to {folder}: {_cause(error)}; {_last_of(folder)}") from error
    world.wait()
    if world.is_first:
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    return target


def read(path: Path) -> tuple[Settings, Progress]:
    """Returns what was run, and how far. Raises ValueError if the path is no checkpoint."""
    try:
        run = json.loads((path / "run.json").read_text())
        settings, progress = Settings.from_json(json.dumps(run["settings"])), Progress(**run["progress"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no checkpoint of this program: {type(error).__name__}: {error}") from error
    return settings, progress


def resume(path: Path, settings: Settings, model: nn.Module, optimizer, world: World) -> Progress:
    """Fills model, optimizer and random states. Raises ValueError if the checkpoint is of another run."""
    saved, progress = read(path)
    if found := differences(settings, saved):
        raise ValueError(f"{path} is of another run: {'; '.join(found)}; give the same settings, another --out, or --fresh")
    state = _tensors(model, optimizer)
    reader = FileSystemReader(path)
    mine = f"random/{world.rank}"
    there = mine in reader.read_metadata().state_dict_metadata
    if there:  # a rank that the saving run did not have starts with its own
        state[mine] = _random_state(world.device)
    with _quiet():
        dcp.load(state, storage_reader=reader, no_dist=world.mesh is None)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if there:
        _set_random_state(state[mine], world.device)
    return progress


def load_model(path: Path, model: nn.Module, world: World | None = None) -> None:
    """Fills the parameters alone; world: None for a process alone. Raises ValueError if the checkpoint is of another model."""
    read(path)
    state = {"model": get_model_state_dict(model)}
    reader = FileSystemReader(path)
    there = {
        n.removeprefix("model."): tuple(m.size) for n, m in reader.read_metadata().state_dict_metadata.items() if n[:6] == "model."
    }
    if other := [name for name, value in state["model"].items() if there.get(name) != tuple(value.shape)]:
        name = other[0]
        raise ValueError(
            f"{path} is of another model: {name} is {tuple(state['model'][name].shape)} here and {there.get(name)} there; "
            "pass the --preset and --vocabulary that it was trained with"
        )
    with _quiet():
        dcp.load(state, storage_reader=reader, no_dist=world is None or world.mesh is None)
    set_model_state_dict(model, state["model"])


@contextmanager
def _quiet():
    """Silences DCP's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _tensors(model, optimizer) -> dict:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    on_gpu = {"gpu": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}


def _set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "gpu" in state:
        torch.cuda.set_rng_state(state["gpu"], device)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """Returns the operating system's words, which DCP wraps in errors of its own."""
    failures = getattr(error, "failures", {})
    for failure in failures.values():
        error = failure[0] if isinstance(failure, tuple) else failure
    while not isinstance(error, OSError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _last_of(folder: Path) -> str:
    last = latest(folder)
    return f"the last one, {last.name}, is whole" if last else "there is none before it"
