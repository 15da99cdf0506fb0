"""Examples are made ahead of time, on several CPU cores, into files that are mapped into memory.

A prepared folder holds

    manifest.json    the task, how many examples, the seed, and how many examples each label has
    train.inputs.npy, held_out.inputs.npy    uint8, (examples, height, width) or (examples, tokens)
    train.labels.npy, held_out.labels.npy    uint8, (examples,)

It is complete once manifest.json is there, which is written last. A piece depends on the seed, the split and its number alone.
"""

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
    finished = folder / "manifest.json"
    if finished.exists():
        manifest = json.loads(finished.read_text())
        given = {name: manifest.get(name) for name in request}
        if given != request:
            raise ValueError(f"{folder} holds {given}; now asked for {request}; pass another --data, or remove the folder")
        return manifest
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        for kind, shape in (("inputs", task.shape), ("labels", ())):
            open_memmap(folder / f"{split}.{kind}.npy", mode="w+", dtype=np.uint8, shape=(request[split], *shape))
    jobs = [(split, number) for split in SPLITS for number in range(-(-request[split] // task.together))]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as progress, _workers(workers) as in_any_order:
        bar = progress.add_task(f"pieces of {task.together:,}", total=len(jobs))
        for _ in in_any_order(partial(_make, folder, task, seed), jobs):
            progress.advance(bar)
    labels = {split: np.bincount(np.load(folder / f"{split}.labels.npy"), minlength=task.classes).tolist() for split in SPLITS}
    manifest = {**request, "labels": labels}
    with whole_file(finished) as partial_path:
        partial_path.write_text(json.dumps(manifest, indent=1))
    return manifest


def _make(folder: Path, task: Task, seed: int, job: tuple[str, int]) -> None:
    """Makes one piece of a split."""
    split, number = job
    inputs, labels = (open_memmap(folder / f"{split}.{kind}.npy", mode="r+") for kind in ("inputs", "labels"))
    piece = slice(number * task.together, (number + 1) * task.together)
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    inputs[piece], labels[piece] = task.make(len(labels[piece]), rng)
    inputs.flush()
    labels.flush()


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
