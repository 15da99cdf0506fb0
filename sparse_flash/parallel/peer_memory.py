"""Moves messages between GPUs of one host by their copy engines.

NCCL moves bytes by kernels on multiprocessors, which slows attention that runs at the same time. Here each rank writes its message
to memory that all ranks can read, and copies its pieces from the messages of others.
"""

import os
import socket
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..compat import symmetric_memory
from .sharding import gather_objects
from .traffic import Traffic

SWITCH = "SPARSE_FLASH_COPY_ENGINES"  # an environment variable; 0: NCCL moves everything
# The process group moves shorter messages. Copies take more of the host's time than an operation of NCCL, but slow attention less,
# so they pay for long messages (docs/performance/several-gpus.md, "Copied by copy engines").
LEAST_BYTES = 1 << 28  # bytes
_FIRST_BYTES = 1 << 21  # bytes, of the first allocation, which shows whether memory can be shared
_SPARE_SHARE = 8  # Memory gets an eighth more than the longest message, so that a slightly longer one fits too.

_memories: WeakKeyDictionary[dist.ProcessGroup, "PeerMemory | None"] = WeakKeyDictionary()


class PeerMemory:
    """Holds a rank's memory for one message at a time, which all ranks of its group read. It grows to the longest message of all.
    ``allocate`` and ``exchange`` are collective calls. Raises RuntimeError if GPUs cannot share memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._name, self._device, self._module = group.group_name, device, torch.get_device_module(device)
        self._milliseconds = int(symmetric_memory.group_timeout(group, device).total_seconds() * 1000)
        # High priority, so that its barriers start before kernels of other streams that wait for a multiprocessor.
        self._stream = self._module.Stream(priority=-1)
        self._memory: torch.Tensor | None
        self._memory, self._peers = self._make_shared(_FIRST_BYTES)
        self._meet()

    @property
    def size(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def _make_shared(self, size: int) -> tuple[torch.Tensor, Any]:
        return symmetric_memory.allocate_shared(size, self._device, self._name)

    def allocate(self, longest: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns uninitialized memory, (*shape), for this rank's next message. longest: bytes of the longest of all ranks."""
        if self._memory is not None:
            # Once all ranks are here, none still reads the last message.
            self._meet()
            self._module.current_stream().wait_stream(self._stream)
        if self._memory is None or longest > self.size:
            # Freed first, as both may not fit.
            self._memory = self._peers = None
            self._memory, self._peers = self._make_shared(longest + longest // _SPARE_SHARE)
        return self._memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def exchange(self, received: torch.Tensor, traffic: Traffic) -> Any:
        """Starts copies that fill ``received``, contiguous, piece after piece. Returns the event that ends them."""
        self._meet()
        piece_elements = received[:1].numel()
        with self._module.stream(self._stream):
            for source in (*traffic.order, traffic.rank):
                position = sum(traffic.receives[:source])
                for first, stop in traffic.runs(source):
                    shape = stop - first, *received.shape[1:]
                    sent = self._peers.get_buffer(source, shape, received.dtype, first * piece_elements)
                    received[position : position + len(sent)].copy_(sent)
                    position += len(sent)
            done = self._module.Event()
            done.record()
        return done

    def _meet(self) -> None:
        """Makes the stream of copies wait until all ranks have finished the work that is now queued on their current streams."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            self._peers.barrier(0, self._milliseconds)


def peer_memory(group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    """Returns the memory that a group's ranks share; None on CPUs, between hosts, and if NVLink does not join all GPUs. The first
    call for a group is collective. Warns if sharing should work and fails."""
    if group not in _memories:
        _memories[group] = _make_memory(group, device)
    return _memories[group]


def _make_memory(group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    if device.type != "cuda" or torch.version.cuda is None or dist.get_world_size(group) == 1:
        return None
    try:
        links = symmetric_memory.nvlinks()[device.index]
    except (RuntimeError, IndexError):
        links = []
    here = socket.gethostname(), device.index, os.environ.get(SWITCH, "1") not in ("", "0"), links
    hosts, gpus, switches, all_links = zip(*gather_objects(here, group), strict=True)

    def joins_all(gpu: int, links: list[int]) -> bool:
        return all(other == gpu or (other < len(links) and links[other]) for other in gpus)

    if len(set(hosts)) > 1 or len(set(gpus)) < len(gpus) or not all(switches) or not all(map(joins_all, gpus, all_links)):
        return None
    memory = None
    try:
        memory = PeerMemory(group, device)
    except Exception as error:
        warnings.warn(
            f"GPU {device.index} cannot share memory with other GPUs of its host, so NCCL moves what ranks exchange, which slows "
            f"attention that runs at the same time; set {SWITCH}=0 to use NCCL without this warning: {error}",
            stacklevel=2,
        )
    return memory if all(gather_objects(memory is not None, group)) else None
