"""Messages between GPUs of one host, copied by their copy engines.

NCCL moves bytes by kernels that run on multiprocessors, and slows the attention beside it. Here each rank writes its message where
all of them can read it, and each fetches its pieces: copies that no multiprocessor takes part in, on a stream of their own.
"""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..compat import symmetric_memory
from .traffic import Traffic

SWITCH = "SPARSE_FLASH_COPY_ENGINES"  # an environment variable; 0: NCCL moves everything
# A shorter message is left to the process group. An exchange by copies takes 0.1 ms more of the host's time than an operation of
# NCCL, which slows the attention beside it by some 0.5 ms a GiB more. Of four H100 that received 192 to 256 MiB for 131,072 tokens,
# neither way was the faster one in all cases.
LEAST = 1 << 28  # bytes
_TRIED = 1 << 21  # bytes
_SHARE = 8  # Memory grows to a multiple of the largest power of two in it, divided by this.

_known: WeakKeyDictionary[dist.ProcessGroup, PeerMemory | None] = WeakKeyDictionary()


class Copies(NamedTuple):
    """An exchange under way."""

    done: Any

    def wait(self) -> None:
        """The current stream waits for it; the host does not."""
        self.done.wait()


class PeerMemory:
    """Memory of a rank for one message at a time, which all ranks of its group read.

    A message is asked for, written by the current stream, and exchanged. All ranks do so in the same order, as with any collective
    call. The memory grows to the longest message of all ranks, and stays. Raises RuntimeError where GPUs cannot share memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._name, self._device, self._module = group.group_name, device, torch.get_device_module(device)
        self._milliseconds = int(symmetric_memory.patience_of(group, device).total_seconds() * 1000)
        # Urgent, so that its barriers come before kernels of other streams that wait for a multiprocessor.
        self._stream = self._module.Stream(priority=-1)
        self._memory: torch.Tensor | None
        self._memory, self._peers = self._allocated(_TRIED)
        self._meet()

    @property
    def size(self) -> int:
        """Bytes held."""
        return 0 if self._memory is None else self._memory.numel()

    def _allocated(self, size: int) -> tuple[torch.Tensor, Any]:
        return symmetric_memory.shared_bytes(size, self._device, self._name)

    def message(self, longest: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """(*shape), uninitialized, for what this rank sends next. longest: bytes of the longest message of all ranks, the same on
        all."""
        if self._memory is not None:
            # What was sent last is read no more once all ranks are here.
            self._meet()
            self._module.current_stream().wait_stream(self._stream)
        if self._memory is None or longest > self.size:
            # Freed first, as there may be no room for both.
            self._memory = self._peers = None
            unit = max(_TRIED, 1 << longest.bit_length() - 1 >> _SHARE.bit_length() - 1)
            self._memory, self._peers = self._allocated(-(-longest // unit) * unit)
        elements = torch.Size(shape).numel()
        return self._memory[: elements * dtype.itemsize].view(dtype).view(shape)

    def exchange(self, theirs: torch.Tensor, traffic: Traffic) -> Copies:
        """Fills ``theirs``, contiguous, piece after piece, from the messages that all ranks wrote last."""
        self._meet()
        shape, piece = theirs.shape[1:], theirs[:1].numel()

        def copy(source: int) -> None:
            place = sum(traffic.receives[:source])
            for first, count in traffic.shared.runs[source]:
                sent = self._peers.get_buffer(source, (count, *shape), theirs.dtype, first * piece)
                theirs[place : place + count].copy_(sent)
                place += count

        with self._module.stream(self._stream):
            for source in (*traffic.order, traffic.rank):
                copy(source)
            done = self._module.Event()
            done.record()
        return Copies(done)

    def _meet(self) -> None:
        """What follows on the stream of copies waits for all that all ranks have queued on their current streams."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            self._peers.barrier(0, self._milliseconds)


def peer_memory(group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    """That of a group's ranks; None where the group moves messages itself: on CPUs, between hosts, and where NVLink does not join
    all GPUs. A collective call when a group is asked for first. Warns where memory should be shared and cannot be."""
    if group not in _known:
        _known[group] = _made(group, device)
    return _known[group]


def held_bytes(group: dist.ProcessGroup) -> int:
    """Of the memory of a group's ranks, beside what PyTorch's allocator counts."""
    memory = _known.get(group)
    return 0 if memory is None else memory.size


def _made(group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    if device.type != "cuda" or torch.version.cuda is None or dist.get_world_size(group) == 1:
        return None
    on = os.environ.get(SWITCH, "1") not in ("", "0")
    places = _gathered((_host(), device.index, on), group)
    hosts, gpus, switches = zip(*places, strict=True)
    if not all(switches) or len(set(hosts)) > 1 or len(set(gpus)) < len(gpus):
        return None
    memory, failure = None, ""
    try:
        links = symmetric_memory.nvlinks()
        joined = all(0 <= gpu < len(links) and (gpu == device.index or links[device.index][gpu]) for gpu in gpus)
    except Exception as error:
        joined, failure = False, str(error)
    if all(_gathered(joined, group)):
        try:
            memory = PeerMemory(group, device)
        except Exception as error:
            failure = str(error)
    if failure:
        warnings.warn(
            f"GPU {device.index} cannot share memory with the others of its host, so NCCL moves what ranks exchange, which slows "
            f"the attention beside it; set {SWITCH}=0 to leave it to NCCL without this warning: {failure}",
            stacklevel=2,
        )
    return memory if all(_gathered(memory is not None, group)) else None


def _host() -> str:
    """Where processes can hand each other memory: one kernel, and one name, which containers have for themselves."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        kernel = ""
    return f"{socket.gethostname()} {kernel}"


def _gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every
