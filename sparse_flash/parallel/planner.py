"""Plans for packed documents that change with each step, in a process beside the training."""

from __future__ import annotations

import copyreg
import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..masks.block_mask import BlockMask
from ..masks.compiler import compile_mask
from ..masks.grid import BlockGrid
from ..masks.parsing import parse
from ..masks.pattern import Pattern
from ..patterns import documents, shifted
from .agreement import Agreement, check_agreement
from .choice import Strategy
from .costs import LINK_RATE
from .meshes import group_of
from .plan import ContextPlan, ContextPlans, plans_of
from .planning import PlannedSequence, PlanOptions, plan_sequence, short_digest

_SHORT_DOCUMENT = 1024  # tokens
# How plans are pickled: tensors as arrays, as PyTorch's own way takes ten times as long; masks by their constructor.
_REDUCERS = copyreg.dispatch_table | {
    torch.Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),)),
    BlockMask: lambda mask: (BlockMask, tuple(mask.__getstate__().values())),
}


@dataclass(frozen=True)
class _Task:
    """Holds all that a plan depends on, except the documents. patterns: different patterns. layers: the number of each layer's
    pattern."""

    patterns: tuple[Pattern, ...]
    layers: tuple[int, ...]
    q_len: int
    rank: int
    ranks: int
    options: PlanOptions

    def mask(self, number: int, cu_seqlens: tuple[int, ...]) -> BlockMask:
        pattern = self.patterns[number] & shifted(documents(cu_seqlens), 0, allow_uncovered=True)
        return compile_mask(pattern, self.q_len, block_size=self.options.block_size, progress=False)

    def plan_documents(self, cu_seqlens: tuple[int, ...]) -> PlannedSequence:
        masks = [self.mask(number, cu_seqlens) for number in range(len(self.patterns))]
        layers = [self.layers.count(number) for number in range(len(masks))]
        return plan_sequence(masks, layers, self.rank, self.ranks, self.options)


class ContextParallel:
    """Plans each list of packed documents in its own process, while the last step still runs.

        planner = sf.ContextParallel(mesh["cp"], "causal", q_len=131_072, heads=32, kv_heads=8)
        coming = planner.submit(cu_seqlens)      # as soon as a batch is packed
        plan = coming.result()                   # when its step begins

    mesh: as for ``context_parallel``. mask: a Pattern or its spec text, or a list with one for each layer. The plan's mask is
    ``mask & documents(cu_seqlens)``, so ``mask`` counts positions from the start of the sequence. For masks of distances this makes
    no difference. q_len: tokens of the whole sequence, the same in every step, so that shapes stay the same.
    heads, kv_heads, block_size, strategy, link_rate, overlap, keep_fetched: as for ``context_parallel``.
    timeout: how long ranks wait for each other's documents; PyTorch's default for gloo if None.

    A collective call: it makes a gloo group of the mesh's ranks, on which they compare their arguments. Raises ValueError on every
    rank if arguments differ, or if one rank raises for an argument. ``multiprocessing`` spawns the process, so a program's main
    module needs ``if __name__ == "__main__":``, and your own patterns must be importable. ``close``, or leaving a ``with`` block,
    ends the process.
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
        link_rate: float = LINK_RATE,
        overlap: bool | None = None,
        keep_fetched: bool = True,
        timeout: timedelta | None = None,
    ):
        group = group_of(mesh)
        self._mesh, self._single, self._closed = mesh, not isinstance(mask, (list, tuple)), False
        # Another thread uses this group, so it is not the group of the model's exchanges.
        ranks = dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        options = PlanOptions(heads, kv_heads, block_size, strategy, link_rate, overlap, keep_fetched)
        try:
            options.check(len(ranks))
            by_layer = [_pattern(one) for one in (mask if isinstance(mask, (list, tuple)) else [mask])]
            if not by_layer:
                raise ValueError("mask must name at least one mask, or be one; got an empty list")
            BlockGrid(q_len, q_len, block_size)  # raises for invalid lengths
            patterns = tuple(dict.fromkeys(by_layer))
            layers = tuple(patterns.index(one) for one in by_layer)
            self._task = _Task(patterns, layers, q_len, dist.get_rank(group), len(ranks), options)
            # Raises what every plan would. Short documents make this quick.
            self._task.plan_documents((*range(0, q_len, _SHORT_DOCUMENT), q_len))
        except (TypeError, ValueError) as error:
            check_agreement(error, self._group)
            raise
        option_texts = {name: str(value) for name, value in vars(options).items()}
        check_agreement({"mask": ", ".join(map(str, by_layer)), "q_len": str(q_len), **option_texts}, self._group)
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_process)
        self._process.submit(os.getpid)  # starts it now, as its imports take seconds

    def submit(self, cu_seqlens: Iterable[int]) -> PendingPlan:
        """Starts to plan packed documents, and returns at once.

        cu_seqlens: (documents + 1,) integers, a list, tuple, array or tensor on the CPU: the first token of each document, then the
        end of the last. The first is 0, the last at most q_len. Tokens after the end keep nothing.

        Every rank of the mesh submits the same documents, in the same order. ``result`` raises errors in the documents, on every
        rank. Raises RuntimeError after ``close``.
        """
        if self._closed:
            raise RuntimeError("this planner is closed; submit documents before close, or make another ContextParallel")
        try:
            bounds = _read_bounds(cu_seqlens, self._task.q_len)
        except (TypeError, ValueError) as error:
            return PendingPlan(self, (), self._process.submit(_refuse, error))
        return PendingPlan(self, bounds, self._process.submit(_plan_and_pickle, self._task, bounds))

    def close(self) -> None:
        """Ends the process after it has planned all submitted documents."""
        self._closed = True
        self._process.shutdown()

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PendingPlan:
    """Holds a plan that ``ContextParallel.submit`` has started."""

    def __init__(self, planner: ContextParallel, cu_seqlens: tuple[int, ...], made: Future[tuple[dict[str, str], bytes]]):
        self._planner, self._cu_seqlens, self._made = planner, cu_seqlens, made
        self._agreement = Future[Agreement]()
        # A thread calls this as soon as the plan is made, in the order of ``submit``, so ranks compare while the last step runs.
        made.add_done_callback(self._send_values)

    def _send_values(self, made: Future[tuple[dict[str, str], bytes]]) -> None:
        error = made.exception()
        try:
            given = made.result()[0] if error is None else error if isinstance(error, Exception) else RuntimeError(str(error))
            self._agreement.set_result(Agreement(given, self._planner._group))
        except Exception as failure:
            self._agreement.set_exception(failure)

    def done(self) -> bool:
        """Whether this rank has made its part of the plan. Other ranks may still be planning."""
        return self._made.done()

    def result(self) -> ContextPlan | ContextPlans:
        """Waits until all ranks have made the plan, then returns it. Returns the plans of all layers if the planner got a list of
        masks. Raises ValueError on every rank if documents differ, or are wrong on one rank."""
        self._agreement.result().check()
        task, bounds = self._planner._task, self._cu_seqlens
        numbers = pickle.loads(self._made.result()[1])
        plans = plans_of(
            numbers, list(task.layers), task.options, lambda number: task.mask(number, bounds), self._planner._mesh, bounds
        )
        return plans[0] if self._planner._single else plans


def _pattern(mask: Pattern | str) -> Pattern:
    if not isinstance(mask, (Pattern, str)):
        raise TypeError(
            f"mask must be a Pattern or its spec text, to combine with documents; got {type(mask).__name__}; use context_parallel "
            "for a BlockMask"
        )
    return parse(mask) if isinstance(mask, str) else mask


def _read_bounds(cu_seqlens: Iterable[int], q_len: int) -> tuple[int, ...]:
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens must be on the CPU, where it is read; got {cu_seqlens.device}; pass it before copying it to the GPU"
        )
    bounds: tuple[int, ...] = documents(cast(tuple[int, ...], cu_seqlens)).cu_seqlens
    if bounds[-1] > q_len:
        raise ValueError(f"cu_seqlens must end by the planner's q_len={q_len}; got {bounds[-1]}; drop or cut documents")
    return bounds


def _prepare_process() -> None:
    """Prepares the new process: it computes with one thread, and ends when the program ends."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _refuse(error: Exception) -> tuple[dict[str, str], bytes]:
    raise error


def _plan_and_pickle(task: _Task, cu_seqlens: tuple[int, ...]) -> tuple[dict[str, str], bytes]:
    """Returns (short descriptions that must be the same on all ranks, the plan's numbers, pickled)."""
    numbers = task.plan_documents(cu_seqlens)
    digest = short_digest(np.array(cu_seqlens).tobytes())
    documents_text = f"of {len(cu_seqlens) - 1} documents to token {cu_seqlens[-1]} ({digest})"
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(numbers)
    return {"cu_seqlens": documents_text, **numbers.decisions}, file.getvalue()
