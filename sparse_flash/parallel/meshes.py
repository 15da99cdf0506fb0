"""Reads what a plan needs from a mesh: its ranks and its device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
