"""Compares what ranks were given, on the host, before they exchange tensors whose sizes depend on it."""

from __future__ import annotations

from collections import defaultdict

import torch.distributed as dist


def check_agreement(given: dict[str, str] | Exception, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank of the group where ranks were given different values, or where one of them failed.

    given: what is compared, by name, the same names on every rank; or this rank's error, which it raises itself. A collective call.
    """
    mine = f"{type(given).__name__}: {given}" if isinstance(given, Exception) else given
    every: list[dict[str, str] | str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    if isinstance(given, Exception):
        raise given
    failed = {rank: theirs for rank, theirs in enumerate(every) if isinstance(theirs, str)}
    if failed:
        listed = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
        raise ValueError(f"other ranks could not make their plan, so this one has no peers: {listed}")
    differing = []
    for name in given:
        ranks_of = defaultdict(list)
        for rank, theirs in enumerate(every):
            assert isinstance(theirs, dict)  # as none failed
            ranks_of[theirs[name]].append(rank)
        if len(ranks_of) > 1:
            listed = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            differing.append(f"{name} is {listed}")
    if differing:
        raise ValueError(f"all ranks of a mesh must make the same plan; {'; '.join(differing)}; pass the same on every rank")


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
