"""Checkpoints of one process: one file, written under another name and renamed when it is on the disk.

With the optimizer's state it is three times as large as the parameters alone, which are enough for ``--start``.
"""

import pickle
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from examples.train_lm.checkpoint import Progress
from examples.train_lm.settings import differences

from ..files import whole_file
from .settings import Settings

FILE = "checkpoint.pt"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint of a run's folder; a checkpoint itself."""
    return path / FILE if path.is_dir() else path


def save(folder: Path, settings: Settings, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Replaces the last one."""
    state = {
        "settings": asdict(settings),
        "progress": asdict(progress),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    return _write_state(state, folder / FILE)


def export(path: Path, target: Path) -> Path:
    """Writes a checkpoint without the optimizer's state."""
    _, _, state = read(path)
    return _write_state({name: part for name, part in state.items() if name != "optimizer"}, target)


def _write_state(state: dict, target: Path) -> Path:
    with whole_file(target) as partial:
        torch.save(state, partial)
    return target


def read(path: Path) -> tuple[Settings, Progress, dict]:
    """Returns a run's settings, its progress, and the states of "model" and, if it is not exported, "optimizer". Raises ValueError
    if this is no checkpoint."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return Settings.from_dict(state["settings"]), Progress(**state["progress"]), state
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no checkpoint of this program: {type(error).__name__}: {error}") from error


def resume(path: Path, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Fills model and optimizer. Raises ValueError where the checkpoint is of another run."""
    saved, progress, state = read(path)
    if found := differences(settings, saved):
        raise ValueError(f"{path} is of another run: {'; '.join(found)}; give the same settings, another --out, or --fresh")
    if "optimizer" not in state:
        raise ValueError(f"{path} holds parameters alone, with which no run can go on; pass it as --start, with another --out")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return progress
