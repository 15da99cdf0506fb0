"""The rate of the links between ranks, measured."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .meshes import device_of, group_of

_WARM, _RUNS = 2, 5


def measured_link_rate(mesh: DeviceMesh, size: int = 1 << 28) -> float | tuple[float, float]:
    """Bytes per second that a rank receives where all ranks of a mesh exchange with each other: for ``link_rate=`` of plans.

    mesh: as for ``context_parallel``. size: bytes that each rank gets from all ranks together, itself included.

    Returns the rate, that of the slowest rank; for a mesh of two dimensions two: between nodes, where the ranks of each node
    exchange with their counterparts in all others at once, and within them. Each is the median of five exchanges. Some 100 ms and
    twice ``size`` of memory on fast links. Rates differ a little from run to run, and the choice of a strategy may follow: for bits
    that repeat, pass the same number. A collective call; all ranks get the same. Raises ValueError for one rank.
    """
    group = group_of(mesh)
    ranks, device = dist.get_world_size(group), device_of(mesh)
    if ranks == 1:
        raise ValueError("a link joins two ranks or more; got a mesh of one; leave link_rate= out")
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    mine = [_rate(size, one, device) for one in groups]
    every: list[list[float]] = [mine] * ranks
    dist.all_gather_object(every, mine, group=group)
    slowest = [min(of_dimension) for of_dimension in zip(*every, strict=True)]
    return slowest[0] if len(slowest) == 1 else (slowest[0], slowest[1])


def _rate(size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Of this rank; infinite where it is alone."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return float("inf")
    each = max(1, size // ranks)
    mine = torch.zeros(ranks * each, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(mine)
    taken = []
    for _ in range(_WARM + _RUNS):
        # Ranks that come late would count as slow links.
        dist.all_reduce(mine[:1], group=group)
        _wait(device)
        begin = time.perf_counter()
        dist.all_to_all_single(theirs, mine, group=group)
        _wait(device)
        taken.append(time.perf_counter() - begin)
    return (ranks - 1) * each / median(taken[_WARM:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
