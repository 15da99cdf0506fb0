"""Reads what a plan needs from a mesh, its ranks and its device, and measures the rate of its links."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_WARM, _RUNS = 2, 5


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh; got {type(mesh).__name__}; use init_device_mesh(device_type, (ranks,))")
    if mesh.ndim != 1:
        names = ", ".join(map(repr, mesh.mesh_dim_names or ())) or "no names"
        raise ValueError(
            f"mesh must have one dimension, all of whose ranks share the sequence; got {mesh.ndim} ({names}); name one: mesh['cp']"
        )
    return mesh.get_group()


def device_of(mesh: DeviceMesh) -> torch.device:
    return torch.empty(0, device=mesh.device_type).device


def measured_link_rate(mesh: DeviceMesh, size: int = 1 << 28) -> float:
    """Measures the bytes per second that a rank receives if all ranks of a mesh exchange with each other: ``link_rate=`` of plans.

    mesh: as for ``context_parallel``. size: bytes that each rank gets from all ranks together, itself included.

    Returns the rate of the slowest rank, the median of five exchanges, the same on all ranks. On fast links this takes about 100
    ms, and memory of twice ``size``. Rates differ a little from run to run, and may change the chosen strategy: for bits that
    repeat, pass plans the same number. A collective call. Raises ValueError for a mesh of one rank.
    """
    group = group_of(mesh)
    ranks, device = dist.get_world_size(group), device_of(mesh)
    if ranks == 1:
        raise ValueError("mesh must have at least two ranks to measure a link; got one; leave link_rate= out")
    rates = [0.0] * ranks
    dist.all_gather_object(rates, _rate(size, group, device), group=group)
    return min(rates)


def _rate(size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns this rank's rate."""
    ranks = dist.get_world_size(group)
    each = max(1, size // ranks)
    mine = torch.zeros(ranks * each, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(mine)
    taken = []
    for _ in range(_WARM + _RUNS):
        # Ranks meet first, as a late rank would count as a slow link.
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
