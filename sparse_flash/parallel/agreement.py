"""Compares what ranks were given, on the host, before they exchange tensors whose sizes depend on it."""

from __future__ import annotations

import json
from collections import defaultdict

import torch
import torch.distributed as dist

_MOST_BYTES = 1024  # of what ``Agreement`` compares


def check_agreement(given: dict[str, str] | Exception, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank of the group where ranks were given different values, or where one of them failed.

    given: what is compared, by name, the same names on every rank; or this rank's error, which it raises itself. A collective call.
    """
    every: list[dict[str, str] | str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(every, _told(given), group=group)
    _compare(given, every)


class Agreement:
    """``check_agreement`` in two halves, between which nothing waits: the first sends what this rank was given.

    given: as there, in at most 1,024 bytes; a longer error is cut. group: of gloo, on the host.
    """

    def __init__(self, given: dict[str, str] | Exception, group: dist.ProcessGroup):
        self._given = given
        told = _told(given)
        # Characters outside of ASCII would take several bytes; json writes them in ASCII, six for one.
        text = json.dumps(told[: _MOST_BYTES // 6 - 2] if isinstance(told, str) else told).encode()
        mine = torch.frombuffer(bytearray(text.ljust(_MOST_BYTES)), dtype=torch.uint8)
        self._every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._every, mine, group=group, async_op=True)

    def check(self) -> None:
        """Waits for all ranks and raises as ``check_agreement``."""
        self._work.wait()
        _compare(self._given, [json.loads(theirs.numpy().tobytes()) for theirs in self._every])


def _told(given: dict[str, str] | Exception) -> dict[str, str] | str:
    return f"{type(given).__name__}: {given}" if isinstance(given, Exception) else given


def _compare(given: dict[str, str] | Exception, every: list[dict[str, str] | str]) -> None:
    """every: what each rank told, in their order."""
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
