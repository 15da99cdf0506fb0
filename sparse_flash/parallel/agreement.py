"""Compares the arguments of all ranks, on the host, before they exchange tensors whose sizes depend on these."""

from __future__ import annotations

import json
from collections import defaultdict

import torch
import torch.distributed as dist

_MOST_BYTES = 1024  # that a rank sends in ``Agreement``


def check_agreement(given: dict[str, str] | Exception, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank of the group if their values differ, or if one rank failed.

    given: the values by name, the same names on every rank; or this rank's error, which it raises itself. A collective call.
    """
    every: list[dict[str, str] | str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(every, _sendable(given), group=group)
    _check_values(given, every)


class Agreement:
    """Splits ``check_agreement`` in two: the constructor sends this rank's values, ``check`` waits for the values of all ranks.

    given: as for ``check_agreement``, in at most 1,024 bytes; a longer error is cut. group: of gloo, on the host.
    """

    def __init__(self, given: dict[str, str] | Exception, group: dist.ProcessGroup):
        self._given = given
        sent = _sendable(given)
        # json writes a character in up to twelve ASCII characters.
        text = json.dumps(sent[: _MOST_BYTES // 12 - 2] if isinstance(sent, str) else sent).encode()
        mine = torch.frombuffer(bytearray(text.ljust(_MOST_BYTES)), dtype=torch.uint8)
        self._every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._every, mine, group=group, async_op=True)

    def check(self) -> None:
        """Waits for all ranks and raises as ``check_agreement``."""
        self._work.wait()
        _check_values(self._given, [json.loads(theirs.numpy().tobytes()) for theirs in self._every])


def _sendable(given: dict[str, str] | Exception) -> dict[str, str] | str:
    return f"{type(given).__name__}: {given}" if isinstance(given, Exception) else given


def _check_values(given: dict[str, str] | Exception, every: list[dict[str, str] | str]) -> None:
    """Raises as ``check_agreement``. every: the values or the error of each rank, in the order of ranks."""
    if isinstance(given, Exception):
        raise given
    failed = {rank: theirs for rank, theirs in enumerate(every) if isinstance(theirs, str)}
    if failed:
        listed = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
        raise ValueError(f"all ranks of a mesh must make a plan; others could not: {listed}")
    differing = []
    for name in given:
        ranks_of = defaultdict(list)
        for rank, theirs in enumerate(every):
            assert isinstance(theirs, dict)  # as none failed
            ranks_of[theirs[name]].append(rank)
        if len(ranks_of) > 1:
            where = (f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items())
            differing.append(f"{name} is {', '.join(where)}")
    if differing:
        raise ValueError(f"all ranks of a mesh must make the same plan; {'; '.join(differing)}; pass the same on every rank")
