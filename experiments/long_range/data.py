"""Examples are made ahead of time, on several CPU cores, into files that are mapped into memory.

A prepared folder holds

    manifest.json    the task, how many examples, the seed, and how many examples each label has
    train.inputs.npy, held_out.inputs.npy    uint8, (examples, height, width) or (examples, tokens)
    train.labels.npy, held_out.labels.npy    uint8, (examples,)

It is complete once manifest.json is there, which is written last. Until then SPLIT.done.npy says which pieces are, and the same
call goes on with the others. A piece depends on the seed, the split and its number alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..files import whole_file
from .listops import ListOps
from .pathfinder import Pathfinder

Task = Pathfinder | ListOps
TASKS: dict[str, type[Task]] = {task.name: task for task in (Pathfinder, ListOps)}
SPLITS = ("train", "held_out")


def fields_of(task: Task) -> dict:
    """A task as a manifest has it: its name and its fields."""
    return {"name": task.name, **asdict(task)}


def task_of(fields: dict) -> Task:
    """The reverse of ``fields_of``."""
    fields = dict(fields)
    return TASKS[fields.pop("name")](**fields)


def prepare(folder: Path, task: Task, train: int, held_out: int, seed: int = 0, workers: int = 1) -> dict:
    """Makes the examples, unless the folder has these already. Returns the manifest.

    workers: processes. Raises ValueError where there is nothing to make, or the folder holds other examples.
    """
    if min(train, held_out, workers) < 1:
        raise ValueError(f"train, held_out and workers must be at least 1; got {train}, {held_out} and {workers}")
    request = {"task": fields_of(task), "train": train, "held_out": held_out, "seed": seed}
    finished, begun = folder / "manifest.json", folder / "request.json"
    for there in filter(Path.exists, (finished, begun)):
        manifest = json.loads(there.read_text())
        given = {name: manifest.get(name) for name in request}
        if given != request:
            raise ValueError(f"{folder} holds {given}; now asked for {request}; pass another --data, or remove the folder")
        if there == finished:
            return manifest
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(begun, request)
    done = {}
    for split in SPLITS:
        count = request[split]
        _array(folder / f"{split}.inputs.npy", np.uint8, (count, *task.shape))
        _array(folder / f"{split}.labels.npy", np.uint8, (count,))
        done[split] = _array(folder / f"{split}.done.npy", np.bool_, (-(-count // task.together),))
    jobs = [(split, int(number)) for split in SPLITS for number in np.flatnonzero(~done[split])]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as progress, _workers(workers) as in_any_order:
        bar = progress.add_task(f"pieces of {task.together:,}", total=sum(map(len, done.values())))
        progress.advance(bar, sum(int(one.sum()) for one in done.values()))
        for split, number in in_any_order(partial(_make, folder, task, seed), jobs):
            done[split][number] = True
            progress.advance(bar)
    labels = {split: np.bincount(np.load(folder / f"{split}.labels.npy"), minlength=task.classes).tolist() for split in SPLITS}
    _write_json(finished, manifest := {**request, "labels": labels})
    for left in (begun, *(folder / f"{split}.done.npy" for split in SPLITS)):
        left.unlink()
    return manifest


def _make(folder: Path, task: Task, seed: int, job: tuple[str, int]) -> tuple[str, int]:
    """Makes one piece of a split."""
    split, number = job
    inputs, labels = (open_memmap(folder / f"{split}.{kind}.npy", mode="r+") for kind in ("inputs", "labels"))
    piece = slice(number * task.together, (number + 1) * task.together)
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    inputs[piece], labels[piece] = task.make(len(labels[piece]), rng)
    inputs.flush()
    labels.flush()
    return job


@contextmanager
def _workers(count: int) -> Iterator:
    """A map over processes, whose results come in any order; for one, in this process."""
    if count == 1:
        yield map
        return
    # Each process computes small products: BLAS's own threads would only wait for each other. It reads this when it is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with get_context("spawn").Pool(count) as pool:
        yield pool.imap_unordered


def _array(path: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """A file of zeros, mapped; the one that is there, if there is one."""
    if not path.exists():
        with whole_file(path) as partial_path:
            open_memmap(partial_path, mode="w+", dtype=dtype, shape=shape).flush()
    return open_memmap(path, mode="r+")


def _write_json(path: Path, found: dict) -> None:
    with whole_file(path) as partial_path:
        partial_path.write_text(json.dumps(found, indent=1))


class Examples:
    """One split of a prepared folder. inputs, labels: mapped arrays. manifest: the folder's."""

    def __init__(self, folder: Path, split: str):
        path = folder / "manifest.json"
        if not path.exists():
            raise ValueError(
                f"{folder} holds no prepared examples; make them: python -m experiments.long_range prepare --data {folder}"
            )
        self.manifest = json.loads(path.read_text())
        self.task = task_of(self.manifest["task"])
        self.inputs, self.labels = (np.load(folder / f"{split}.{kind}.npy", mmap_mode="r") for kind in ("inputs", "labels"))
        self._shuffled: tuple[tuple[int, int], np.ndarray] = (-1, -1), np.empty(0, int)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels, copied, in the order of ``rows``."""
        rows = np.asarray(rows)
        return self.inputs[rows], self.labels[rows]

    def rows(self, step: int, batch: int, seed: int) -> np.ndarray:
        """Which examples a step reads, (batch,): a function of the step, the batch and the seed. Each epoch has another order, and
        leaves out what is less than a batch at its end."""
        epoch, number = divmod(step, len(self) // batch)
        if self._shuffled[0] != (seed, epoch):
            self._shuffled = (seed, epoch), np.random.default_rng([seed, epoch]).permutation(len(self))
        return self._shuffled[1][number * batch : (number + 1) * batch]
