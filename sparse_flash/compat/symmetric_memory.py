"""PyTorch's symmetric memory: memory of the GPUs of one host that all of them read, where public names do not reach."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .pytorch import import_private


def nvlinks() -> list[list[int]]:
    """How many NVLinks join each two of this process's GPUs, by their numbers; through a switch, as many as both have to it.
    Raises RuntimeError where they cannot be counted."""
    detect = import_private("_C._distributed_c10d:_detect_dma_connectivity")
    return detect(import_private("_C._autograd:DeviceType").CUDA, "nvlink").matrix


def allocate_shared(size: int, device: torch.device, group: str) -> tuple[torch.Tensor, Any]:
    """((size,) uint8, uninitialized; a handle whose ``get_buffer(rank, shape, dtype, first element)`` is the same of another rank,
    and whose ``barrier(channel, milliseconds)`` makes the current stream wait for all ranks). group: its name.

    A collective call: ``size`` is the same on all ranks. Freed with the tensor and the handle, which waits for the device;
    PyTorch's caching allocator knows nothing of it. Raises RuntimeError where GPUs cannot share memory.
    """
    empty = import_private("distributed._symmetric_memory:_SymmetricMemory").empty_strided_p2p
    try:
        memory = empty((size,), (1,), torch.uint8, device)
    except RuntimeError:
        torch.cuda.empty_cache()  # what PyTorch's allocator has, and nobody uses
        memory = empty((size,), (1,), torch.uint8, device)
    return memory, import_private("distributed._symmetric_memory:rendezvous")(memory, group)


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long an operation of a group may take."""
    return group._get_backend(device).options._timeout
