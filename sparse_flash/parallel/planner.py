"""Plans for packed documents that change with each step, in a thread next to the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Unpack, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..masks.block_mask import compile_mask
from ..masks.grid import BlockGrid
from ..masks.parsing import parse
from ..masks.pattern import Pattern
from ..patterns import documents, shifted
from .agreement import Agreement, check_agreement
from .plan import ContextPlan, ContextPlans, plans_of
from .planning import PlanKeywords, PlannedSequence, PlanOptions, plan_sequence, short_digest
from .sharding import group_of

_SHORT_DOCUMENT = 1024  # tokens

# (compares the ranks' values, makes the plans). The second is None after an error, which the first raises.
_Made = tuple[Agreement, Callable[[], ContextPlans] | None]


class ContextParallel(AbstractContextManager["ContextParallel"]):
    """Plans each list of packed documents in a thread, while the last step still runs.

        planner = sf.ContextParallel(mesh["cp"], "causal", q_len=131_072, heads=32, kv_heads=8)
        coming = planner.submit(cu_seqlens)      # as soon as a batch is packed
        plan = coming.result()                   # when its step begins

    mesh: as for ``context_parallel``. mask: a Pattern or its spec text, or a list with one for each layer. The plan's mask is
    ``mask & documents(cu_seqlens)``, so ``mask`` counts positions from the start of the sequence. For masks of distances this makes
    no difference. q_len: tokens of the whole sequence, the same in every step, so that shapes stay the same.
    timeout: how long ranks wait for each other's documents; PyTorch's default for gloo if None.
    options: heads, kv_heads, block_size, strategy, link_rate and overlap, as for ``context_parallel``.

    A collective call: it makes a gloo group of the mesh's ranks, on which they compare their arguments. Raises ValueError on every
    rank if arguments differ, or if one rank raises for an argument. ``close``, or leaving a ``with`` block, ends the thread.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        mask: Pattern | str | list[Pattern | str] | tuple[Pattern | str, ...],
        q_len: int,
        *,
        timeout: timedelta | None = None,
        **options: Unpack[PlanKeywords],
    ):
        group = group_of(mesh)
        self._mesh, self._q_len, self._single, self._closed = mesh, q_len, not isinstance(mask, (list, tuple)), False
        self._rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        # The thread uses this group, so it is not the group of the model's exchanges.
        self._group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        self._options = PlanOptions(**options)
        try:
            self._options.check(len(ranks))
            by_layer = [_pattern(one) for one in (mask if isinstance(mask, (list, tuple)) else [mask])]
            if not by_layer:
                raise ValueError("mask must name at least one mask, or be one; got an empty list")
            BlockGrid(q_len, q_len, self._options.block_size)  # raises for invalid lengths
            self._patterns = list(dict.fromkeys(by_layer))
            self._layers = [self._patterns.index(one) for one in by_layer]
            # Raises what every plan would. Short documents make this quick.
            self._plan_documents((*range(0, q_len, _SHORT_DOCUMENT), q_len))
        except (TypeError, ValueError) as error:
            check_agreement(error, self._group)
            raise
        check_agreement({"mask": ", ".join(map(str, by_layer)), "q_len": str(q_len), **self._options.facts()}, self._group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sparse_flash_plans")

    def submit(self, cu_seqlens: Iterable[int]) -> PendingPlan:
        """Starts to plan packed documents, and returns at once.

        cu_seqlens: (documents + 1,) integers, a list, tuple, array or tensor on the CPU: the first token of each document, then the
        end of the last. The first is 0, the last at most q_len. Tokens after the end keep nothing.

        Every rank of the mesh submits the same documents, in the same order. ``result`` raises errors in the documents, on every
        rank. Raises RuntimeError after ``close``.
        """
        if self._closed:
            raise RuntimeError("this planner is closed; submit documents before close, or make another ContextParallel")
        given: tuple[int, ...] | Exception
        try:
            given = _read_bounds(cu_seqlens, self._q_len)
        except (TypeError, ValueError) as error:
            given = error
        return PendingPlan(self._thread.submit(self._plan_and_send, given), self._single)

    def _plan_and_send(self, given: tuple[int, ...] | Exception) -> _Made:
        """Runs in the thread. Ranks compare the plans while the last step runs, so the thread sends its values at once. It does not
        wait for the values of others: a rank that fails would leave its thread waiting. given: documents, or their error."""
        try:
            if isinstance(given, Exception):
                raise given
            numbers = self._plan_documents(given)
        except Exception as error:
            return Agreement(error, self._group), None
        digest = short_digest(np.array(given).tobytes())
        facts = {"cu_seqlens": f"of {len(given) - 1} documents to token {given[-1]} ({digest})", **numbers.decisions}
        return Agreement(facts, self._group), partial(plans_of, numbers, self._options, self._mesh, given)

    def _plan_documents(self, cu_seqlens: tuple[int, ...]) -> PlannedSequence:
        apart = shifted(documents(cu_seqlens), 0)
        size = self._options.block_size
        masks = [compile_mask(one & apart, self._q_len, block_size=size) for one in self._patterns]
        return plan_sequence(masks, self._layers, self._rank, dist.get_world_size(self._group), self._options)

    def close(self) -> None:
        """Ends the thread after it has planned all submitted documents."""
        self._closed = True
        self._thread.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()


class PendingPlan:
    """Holds a plan that ``ContextParallel.submit`` has started."""

    def __init__(self, made: Future[_Made], single: bool):
        self._made, self._single = made, single

    def done(self) -> bool:
        """Whether this rank has made its part of the plan. Other ranks may still be planning."""
        return self._made.done()

    def result(self) -> ContextPlan | ContextPlans:
        """Waits until all ranks have made the plan, then returns it. Returns the plans of all layers if the planner got a list of
        masks. Raises ValueError on every rank if documents differ, or are wrong on one rank."""
        agreement, make_plans = self._made.result()
        agreement.check()
        assert make_plans is not None  # as the agreement raises this rank's error
        plans = make_plans()
        return plans[0] if self._single else plans


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
