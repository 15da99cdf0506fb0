"""Exchanges through memory that all ranks read. On CPUs files take the place of the GPUs' memory."""

import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
import torch.distributed as dist
from pool import DEVICE

from sparse_flash.parallel import peer_memory
from sparse_flash.parallel.peer_memory import PeerMemory
from sparse_flash.parallel.traffic import Traffic
from sparse_flash.parallel.transfer import Message


class Files:
    """Stands in for a handle of symmetric memory: bytes of each rank, which all of them read."""

    def __init__(self, size: int, group: dist.ProcessGroup, folder: Path):
        self._size, self._group, self._folder = size, group, folder

    def of_rank(self, rank: int) -> torch.Tensor:
        return torch.from_file(str(self._folder / str(rank)), shared=True, size=self._size, dtype=torch.uint8)

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, first: int) -> torch.Tensor:
        begin = first * dtype.itemsize
        return self.of_rank(rank)[begin : begin + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def barrier(self, channel: int, milliseconds: int) -> None:
        assert channel == 0 and milliseconds > 0
        dist.barrier(self._group)


class MemoryOfFiles(PeerMemory):
    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group = group
        super().__init__(group, device)

    def _make_shared(self, size: int) -> tuple[torch.Tensor, Any]:
        self._kept = tempfile.TemporaryDirectory()
        names = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(names, self._kept.name, group=self._group)
        files = Files(size, self._group, Path(names[0]))
        mine = files.of_rank(dist.get_rank(self._group))
        dist.barrier(self._group)
        return mine, files


@contextmanager
def sharing():
    """Within, groups have memory. Yields a list of the traffic of what was copied."""
    copied, groups = [], dict(peer_memory._memories)
    exchange = PeerMemory.exchange

    def seen(self: PeerMemory, received: torch.Tensor, traffic: Traffic):
        copied.append(traffic)
        return exchange(self, received, traffic)

    on_cpu = patch.object(peer_memory, "_make_memory", MemoryOfFiles)
    peer_memory._memories.clear()
    anything = patch.object(peer_memory, "LEAST_BYTES", 1)
    with patch.object(PeerMemory, "exchange", seen), anything, on_cpu if DEVICE == "cpu" else patch.dict(os.environ):
        yield copied
    peer_memory._memories.clear()
    peer_memory._memories.update(groups)


def copied(function: Callable[..., Any], *arguments: object, **options: object) -> Any:
    """What a function returns that makes two passes or more, all of whose exchanges are copies."""
    with sharing() as exchanges:
        found = function(*arguments, **options)
    assert len(exchanges) >= 4
    return found


def traffic_of(pieces: np.ndarray, rank: int) -> Traffic:
    """The traffic in which pieces[i, j] go from rank i to rank j, each to one rank."""
    return Traffic([np.repeat(np.eye(len(pieces), dtype=bool), counts, axis=1) for counts in pieces], rank)


def exchanged(rounds: int, seed: int) -> None:
    """Random numbers of pieces of random sizes arrive as a process group moves them, and the bytes held only grow."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator, device, held = np.random.default_rng(seed), torch.empty(0, device=DEVICE).device, []
    with sharing():
        memory = peer_memory.peer_memory(dist.group.WORLD, device)
        for number in range(rounds):
            pieces = generator.integers(0, 5, (ranks, ranks)) * generator.integers(0, 2, (ranks, ranks))
            shape = [int(size) for size in generator.integers(1, 120, 3)]
            traffic = traffic_of(pieces, rank)
            of_rank = torch.Generator().manual_seed(100 * seed + number * ranks + rank)
            sent = torch.randn(sum(traffic.sends), *shape, generator=of_rank, device="cpu")
            dtype, arrived = [torch.float32, torch.bfloat16][number % 2], []
            for route in (memory, None):
                received = torch.full((traffic.received, *shape), float("nan"), dtype=dtype, device=DEVICE)
                message = Message.allocate(received, traffic, SimpleNamespace(group=dist.group.WORLD, memory=route))
                message.pieces.copy_(sent)
                arrived.append(message.send(received).wait())
            assert torch.equal(*arrived)
            held.append(memory.size)
    assert held == sorted(held) and held[-1] > held[0]


def agreed(**of_second: Any) -> tuple[bool, list[str]]:
    """(whether this rank has memory, what it was warned of), where the second rank differs from the others: other: host, gpu,
    switch, links (their matrix), or error, of its trial. Without GPUs, which only a trial would touch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    joined = [[18] * ranks for _ in range(ranks)]
    here = {"host": "one", "gpu": rank, "switch": "1", "links": joined, "error": None} | (of_second if rank == 1 else {})
    tried = MagicMock(side_effect=here["error"] and RuntimeError(here["error"]))
    with (
        patch.object(torch.version, "cuda", "13.0"),
        patch.object(peer_memory.socket, "gethostname", return_value=here["host"]),
        patch.dict(os.environ, {peer_memory.SWITCH: here["switch"]}),
        patch.object(peer_memory.symmetric_memory, "nvlinks", return_value=here["links"]),
        patch.object(peer_memory, "PeerMemory", tried),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        found = peer_memory._make_memory(dist.group.WORLD, torch.device("cuda", here["gpu"]))
    return found is not None, [str(one.message) for one in warned]
