"""Reads what a plan needs from a mesh: its ranks, the ranks of a node, its device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..compat.pytorch import flattened


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh; got {type(mesh).__name__}; use init_device_mesh(device_type, (ranks,))")
    named = mesh.mesh_dim_names or ()
    if mesh.ndim > 2 or (mesh.ndim == 2 and not named):
        names = ", ".join(map(repr, named)) or "no names"
        raise ValueError(
            f"mesh must have one dimension, or two with names; got {mesh.ndim} ({names}); name one or two: mesh['cp'], "
            "mesh['node', 'cp']"
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    numbers = mesh.mesh.flatten().tolist()
    if numbers != sorted(numbers):
        raise ValueError(f"the ranks of mesh must ascend; got {mesh.mesh.tolist()}; make it with init_device_mesh")
    return flattened(mesh).get_group()


def ranks_of_node_of(mesh: DeviceMesh) -> int:
    """Returns the number of a node's ranks: 1 in a mesh of one dimension."""
    return mesh.size(1) if mesh.ndim == 2 else 1


def device_of(mesh: DeviceMesh) -> torch.device:
    return torch.empty(0, device=mesh.device_type).device
