"""Compares the arguments of all ranks, on the host, before they exchange tensors whose sizes depend on these."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def check_agreement(given: dict[str, str] | Exception, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank if their values differ, or if one failed. given: values by name; or this rank's error."""
    every = gather_objects(f"{type(given).__name__}: {given}" if isinstance(given, Exception) else given, group)
    if isinstance(given, Exception):
        raise given
    if failed := [f"rank {rank}: {theirs}" for rank, theirs in enumerate(every) if isinstance(theirs, str)]:
        raise ValueError(f"all ranks of a mesh must make a plan; others could not: {'; '.join(failed)}")
    differing = []
    for name in given:
        by_rank = [theirs[name] for theirs in every]
        if len(values := dict.fromkeys(by_rank)) > 1:
            ranks_of = {value: [rank for rank, theirs in enumerate(by_rank) if theirs == value] for value in values}
            differing.append(f"{name} is " + ", ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_of.items()))
    if differing:
        raise ValueError(f"all ranks of a mesh must make the same plan; {'; '.join(differing)}; pass the same on every rank")


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the object of each rank, in the order of ranks. A collective call."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every
