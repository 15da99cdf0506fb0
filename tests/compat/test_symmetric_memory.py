"""PyTorch's symmetric memory as far as a CPU shows it: its names exist and take these arguments."""

from datetime import timedelta

import torch
import torch.distributed as dist

from sparse_flash.compat import symmetric_memory
from sparse_flash.compat.pytorch import import_private


def test_a_handle_has_what_copies_need():
    memory = import_private("distributed._symmetric_memory:_SymmetricMemory")
    for name in ("empty_strided_p2p", "get_buffer", "barrier"):
        assert callable(getattr(memory, name))
    # pybind11 writes the arguments of its functions into their documentation.
    assert "storage_offset" in memory.get_buffer.__doc__ and "timeout_ms" in memory.barrier.__doc__
    assert callable(import_private("distributed._symmetric_memory:rendezvous"))


def test_a_group_says_how_long_it_waits():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert symmetric_memory.group_timeout(dist.group.WORLD, torch.device("cpu")) == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()
