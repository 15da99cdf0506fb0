"""Packs blocks into messages between ranks, starts exchanges, and waits for them."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import Tensor

from ..compat.pytorch import sleep_cycles
from ..core import triton as triton_backend
from ..kernels.common.streams import current_device
from . import peer_memory
from .peer_memory import PeerMemory
from .routes import Route
from .traffic import Traffic

_START_CYCLES = 20_000  # cycles, about 11 us, in which an exchange's kernel starts


class PendingExchange(NamedTuple):
    """Holds the tensor that an exchange fills and, until it is done, the message that it reads. work: None once it is done."""

    received: Tensor
    message: Tensor | None = None
    work: Any = None

    def wait_for_start(self) -> None:
        """Idles the current stream until the exchange's kernel has started, before kernels that take all multiprocessors do."""
        if self.work is not None and self.received.is_cuda:
            sleep_cycles(_START_CYCLES)

    def wait(self) -> Tensor:
        """Makes the current stream wait for the exchange. Returns the filled tensor."""
        if self.work is not None:
            self.work.wait()
        return self.received


class Message(NamedTuple):
    """Holds the pieces that this rank sends next, (sent pieces, *piece), contiguous. memory: holds the pieces where all ranks read
    them, each once; None if the process group moves them. All ranks have it, or none has."""

    pieces: Tensor
    traffic: Traffic
    group: dist.ProcessGroup | None
    memory: PeerMemory | None

    @classmethod
    def allocate(cls, like: Tensor, traffic: Traffic, route: Route) -> Self:
        """Returns a message of uninitialized pieces in shape and dtype of the pieces of ``like``, (pieces, *piece). Collective."""
        piece = like.shape[1:]
        piece_bytes = piece.numel() * like.element_size()
        memory = route.memory
        if memory is None or traffic.longest * piece_bytes < peer_memory.LEAST_BYTES or not traffic.has_few_runs:
            return cls(like.new_empty(sum(traffic.sends), *piece), traffic, route.group, None)
        counts = [of_rank.shape[1] for of_rank in traffic.wanted]
        pieces = memory.allocate(max(counts) * piece_bytes, counts[traffic.rank], *piece, dtype=like.dtype)
        return cls(pieces, traffic, route.group, memory)

    def send(self, received: Tensor | None = None) -> PendingExchange:
        """Starts the exchange that fills ``received``, contiguous, piece after piece. None: a new tensor."""
        traffic = self.traffic
        if received is None:
            received = self.pieces.new_empty(traffic.received, *self.pieces.shape[1:])
        if not traffic.longest:
            return PendingExchange(received)
        if self.memory is not None:
            work = self.memory.exchange(received, traffic)
        else:
            counts = traffic.receives, traffic.sends
            work = dist.all_to_all_single(received, self.pieces, *counts, group=self.group, async_op=True)
        return PendingExchange(received, self.pieces, work)


def empty_blocks(k: Tensor, v: Tensor, count: int, block_size: int) -> Tensor:
    """Returns (count, block, batch, kv_heads, head_dim + v_head_dim), uninitialized. A piece is a block's keys and values."""
    return k.new_empty(count, block_size, *k.shape[:2], k.shape[3] + v.shape[3])


def split_packed(packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    return packed[..., :head_dim], packed[..., head_dim:]


def as_tokens(blocks: Tensor) -> Tensor:
    """Returns (blocks, block, batch, heads, size) viewed as (batch, heads, tokens, size)."""
    return blocks.flatten(0, 1).permute(1, 2, 0, 3)


def pack(k: Tensor, v: Tensor, packed: Tensor, blocks: Tensor | None = None) -> None:
    """Copies blocks of k and v to ``packed``. blocks: (packed blocks,) int64, the blocks to copy; None for all."""
    block_size = packed.shape[1]
    for tensor, half in zip((k, v), split_packed(packed, k.shape[3]), strict=True):
        if triton_backend.can_use_kernels(k.device):
            from ..kernels.portable.merge import copy_rows

            with current_device(k.device):
                copy_rows(tensor, as_tokens(half), blocks, block_size)
        else:
            mine = tensor.unflatten(2, (-1, block_size)).permute(2, 3, 0, 1, 4)
            half.copy_(mine if blocks is None else mine.index_select(0, blocks))


def unpack(packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns views (k, v) of packed blocks, each (batch, kv_heads, tokens, its head_dim)."""
    return split_packed(as_tokens(packed), head_dim)


def append_fetched(k: Tensor, v: Tensor, count: int, block_size: int, wait: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (k, v) of the rank's tokens, then of ``count`` fetched blocks. wait: returns these; k and v are copied before."""
    if not count:
        wait()
        return k, v
    own = k.shape[2] // block_size
    blocks = empty_blocks(k, v, own + count, block_size)
    pack(k, v, blocks[:own])
    blocks[own:] = wait()
    return unpack(blocks, k.shape[3])
