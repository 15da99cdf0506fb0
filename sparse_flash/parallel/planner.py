"""Plans for packed documents that change with each step, made by a process beside the training."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..masks.block_mask import BlockMask
from ..masks.compiler import compile_mask
from ..masks.grid import BlockGrid
from ..masks.pattern import Pattern, parse
from ..patterns import documents, shifted
from .agreement import Agreement, check_agreement
from .costs import LINK_RATE
from .explanation import Strategy
from .meshes import group_of, ranks_of_node_of
from .plan import ContextPlan, ContextPlans, plans_of
from .planning import PlannedSequence, PlanOptions, planned, short_digest

_SHORT = 1024  # tokens


@dataclass(frozen=True)
class _Task:
    """All that a plan depends on, besides the documents. patterns: different ones. layers: the number of each layer's."""

    patterns: tuple[Pattern, ...]
    layers: tuple[int, ...]
    q_len: int
    rank: int
    ranks: int
    ranks_of_node: int
    options: PlanOptions

    def mask(self, number: int, cu_seqlens: tuple[int, ...]) -> BlockMask:
        apart = self.patterns[number] & shifted(documents(cu_seqlens), 0, allow_uncovered=True)
        return compile_mask(apart, self.q_len, block_size=self.options.block_size, progress=False)

    def planned(self, cu_seqlens: tuple[int, ...]) -> PlannedSequence:
        masks = [self.mask(number, cu_seqlens) for number in range(len(self.patterns))]
        layers = [self.layers.count(number) for number in range(len(masks))]
        return planned(masks, layers, self.rank, self.ranks, self.options, self.ranks_of_node)


class ContextParallel:
    """Makes a plan for each list of packed documents, in a process of its own, while the last step still runs.

        planner = sf.ContextParallel(mesh["cp"], "causal", q_len=131_072, heads=32, kv_heads=8)
        coming = planner.submit(cu_seqlens)      # as soon as a batch is packed
        plan = coming.result()                   # when its step begins

    mesh: as for ``context_parallel``. mask: a Pattern or its spec text, or a list with one for each layer. It counts positions from
    the start of the sequence, as ``mask & documents(cu_seqlens)``: masks of distances are the same as in each document alone.
    q_len: tokens of the whole sequence in every step, the same for all, so that shapes are.
    heads, kv_heads, block_size, strategy, link_rate, overlap, keep_fetched: as for ``context_parallel``.
    timeout: how long ranks wait for each other's documents; PyTorch's default for gloo if None.

    A collective call: it makes a gloo group of the mesh's ranks, on which they compare what they were given. Raises ValueError on
    every rank where they differ, or where one of them raises for an unsuitable argument. The process is started as
    ``multiprocessing`` spawns any other, so a program's main module needs ``if __name__ == "__main__":``, and patterns of your own
    must be importable. ``close``, or leaving a ``with`` block, ends it.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        mask: Pattern | str | list[Pattern | str] | tuple[Pattern | str, ...],
        q_len: int,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        block_size: int = 128,
        strategy: Strategy | Literal["auto"] = "auto",
        link_rate: float | tuple[float, float] = LINK_RATE,
        overlap: bool | None = None,
        keep_fetched: bool = True,
        timeout: timedelta | None = None,
    ):
        group = group_of(mesh)
        self._mesh, self._single, self._closed = mesh, not isinstance(mask, (list, tuple)), False
        # Apart from the group of the model's exchanges, as another thread uses it.
        ranks = dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        options = PlanOptions(heads, kv_heads, block_size, strategy, link_rate, overlap, keep_fetched)
        try:
            options.check(len(ranks), ranks_of_node_of(mesh), mesh.ndim)
            by_layer = [_pattern(one) for one in (mask if isinstance(mask, (list, tuple)) else [mask])]
            if not by_layer:
                raise ValueError("mask must name at least one mask, or be one; got an empty list")
            BlockGrid(q_len, q_len, block_size)  # raises for lengths that cannot be
            patterns = tuple(dict.fromkeys(by_layer))
            layers = tuple(patterns.index(one) for one in by_layer)
            self._task = _Task(patterns, layers, q_len, dist.get_rank(group), len(ranks), ranks_of_node_of(mesh), options)
            # Raises what every plan would, and is soon done: documents are short.
            self._task.planned((*range(0, q_len, _SHORT), q_len))
        except (TypeError, ValueError) as error:
            check_agreement(error, self._group)
            raise
        words = {name: str(value) for name, value in vars(options).items()}
        check_agreement({"mask": ", ".join(map(str, by_layer)), "q_len": str(q_len), **words}, self._group)
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=context, initializer=_settle_in)
        self._process.submit(os.getpid)  # starts it now, as its imports take seconds

    def submit(self, cu_seqlens: Iterable[int]) -> PendingPlan:
        """Plans packed documents. Returns at once.

        cu_seqlens: (documents + 1,) integers on the CPU, tokens: the start of each document and the end of the last, from 0 to at
        most q_len; tokens past it keep nothing. A list, tuple, array or tensor.

        Every rank of the mesh submits the same documents, in the same order. What is wrong with them is an error of ``result``, on
        every rank. RuntimeError after ``close``.
        """
        if self._closed:
            raise RuntimeError("this planner is closed, and plans no more; submit before close, or make another ContextParallel")
        try:
            bounds = _bounds(cu_seqlens, self._task.q_len)
        except (TypeError, ValueError) as error:
            return PendingPlan(self, (), self._process.submit(_refuse, error))
        return PendingPlan(self, bounds, self._process.submit(_made, self._task, bounds))

    def close(self) -> None:
        """Ends the process once it has planned what was submitted."""
        self._closed = True
        self._process.shutdown()

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PendingPlan:
    """A plan that ``ContextParallel.submit`` has begun."""

    def __init__(self, planner: ContextParallel, cu_seqlens: tuple[int, ...], made: Future[tuple[dict[str, str], bytes]]):
        self._planner, self._cu_seqlens, self._made = planner, cu_seqlens, made
        self._sent = Future[Agreement]()
        # A thread calls this as soon as the plan is made, in the order of ``submit``: ranks compare while the last step still runs.
        made.add_done_callback(self._compare)

    def _compare(self, made: Future[tuple[dict[str, str], bytes]]) -> None:
        error = made.exception()
        try:
            given = made.result()[0] if error is None else error if isinstance(error, Exception) else RuntimeError(str(error))
            self._sent.set_result(Agreement(given, self._planner._group))
        except Exception as failure:
            self._sent.set_exception(failure)

    def done(self) -> bool:
        """Whether this rank's part is made."""
        return self._made.done()

    def result(self) -> ContextPlan | ContextPlans:
        """The plan, or the plans of all layers where the planner got a list of masks; waits for it, and for all ranks to have made
        theirs. Raises ValueError on every rank where their documents differ, or are wrong on one of them."""
        self._sent.result().check()
        task, bounds = self._planner._task, self._cu_seqlens
        numbers = pickle.loads(self._made.result()[1])
        plans = plans_of(
            numbers, list(task.layers), task.options, lambda number: task.mask(number, bounds), self._planner._mesh, bounds
        )
        return plans[0] if self._planner._single else plans


def _pattern(mask: Pattern | str) -> Pattern:
    if not isinstance(mask, (Pattern, str)):
        raise TypeError(f"a planner's mask must be a Pattern or its spec text, to join with documents; got {type(mask).__name__}")
    return parse(mask) if isinstance(mask, str) else mask


def _bounds(cu_seqlens: Iterable[int], q_len: int) -> tuple[int, ...]:
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens must be on the CPU, where planning reads it; got {cu_seqlens.device}; pass it before it is copied there"
        )
    bounds: tuple[int, ...] = documents(cast(tuple[int, ...], cu_seqlens)).cu_seqlens
    if bounds[-1] > q_len:
        raise ValueError(f"the documents end at token {bounds[-1]}, past the q_len={q_len} of the planner; drop or cut some")
    return bounds


def _settle_in() -> None:
    """In the new process: one thread, and no life after the program's."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _refuse(error: Exception) -> tuple[dict[str, str], bytes]:
    raise error


def _made(task: _Task, cu_seqlens: tuple[int, ...]) -> tuple[dict[str, str], bytes]:
    """(what must be the same on all ranks, in short words; the plan's numbers, pickled)"""
    numbers = task.planned(cu_seqlens)
    given = np.array(cu_seqlens).tobytes()
    same = {
        "cu_seqlens": f"of {len(cu_seqlens) - 1} documents to token {cu_seqlens[-1]} ({short_digest(given)})",
        "assignment": f"{numbers.owners.name} ({short_digest(numbers.owners.blocks.tobytes())})",
        "strategy": ", ".join(numbers.strategies),
    }
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(numbers)
    return same, file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays. (Between processes PyTorch shares each by a file of its own, which takes longer than copying.)"""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, BlockMask):
            arrays = [tensor.numpy() for tensor in obj.tensors()]
            return _mask_of, (*obj.sizes, arrays, obj.keeps_all, obj.coarse)
        return (torch.from_numpy, (obj.numpy(),)) if isinstance(obj, torch.Tensor) else NotImplemented


def _mask_of(
    q_len: int, kv_len: int, block_size: int, arrays: list[np.ndarray], keeps_all: bool, coarse: BlockMask | None
) -> BlockMask:
    tensors = [torch.from_numpy(array) for array in arrays]
    return replace(BlockMask.from_tensors(q_len, kv_len, block_size, tensors, keeps_all), coarse=coarse)
