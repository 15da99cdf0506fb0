"""Packs blocks into messages between ranks, starts exchanges, and waits for them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..backends import triton as triton_backend
from ..compat.pytorch import sleep_cycles
from ..kernels.common.streams import current_device
from . import peer_memory
from .peer_memory import PeerMemory
from .routes import Route
from .traffic import Traffic

_START_CYCLES = 20_000  # cycles, about 11 us, in which an exchange's kernel starts


class Work(Protocol):
    def wait(self) -> object:
        """Makes the current stream wait for the exchange."""


class PendingExchange(NamedTuple):
    """Holds the tensor that an exchange fills, and the message that it reads, until it is done."""

    theirs: torch.Tensor
    mine: torch.Tensor | None = None
    work: Work | None = None

    def wait_for_start(self) -> None:
        """Idles the current stream until the exchange's kernel has started. That kernel starts on another stream, a few us after
        its inputs are ready. If kernels that take all multiprocessors came first, the exchange would start only when they end."""
        if self.work is not None and self.theirs.is_cuda:
            sleep_cycles(_START_CYCLES)

    def arrived(self) -> torch.Tensor:
        """Makes the current stream wait for the exchange. Returns the filled tensor."""
        if self.work is not None:
            self.work.wait()
        return self.theirs


def allocate_message(like: torch.Tensor, traffic: Traffic, *piece: int, route: Route) -> torch.Tensor:
    """Returns memory for the message that ``start_exchange`` sends next: (sent pieces, *piece), contiguous, with the dtype of
    ``like``. A collective call."""
    memory = memory_for(traffic, piece, like, route)
    if memory is None:
        return like.new_empty(traffic.sent, *piece)
    pieces = traffic.shared.pieces
    return memory.message(max(pieces) * _bytes(piece, like), pieces[traffic.rank], *piece, dtype=like.dtype)


def start_exchange(theirs: torch.Tensor, mine: torch.Tensor, traffic: Traffic, route: Route) -> PendingExchange:
    """Starts an exchange that sends ``mine``, an ``allocate_message``, and fills ``theirs``. Both are contiguous, piece after
    piece."""
    if not traffic.longest:
        return PendingExchange(theirs)
    memory, group = memory_for(traffic, theirs.shape[1:], theirs, route), route.group
    if memory is not None:
        return PendingExchange(theirs, mine, memory.exchange(theirs, traffic))
    return PendingExchange(
        theirs, mine, dist.all_to_all_single(theirs, mine, traffic.receives, traffic.sends, group=group, async_op=True)
    )


def memory_for(traffic: Traffic, piece: tuple[int, ...], like: torch.Tensor, route: Route) -> PeerMemory | None:
    """Returns the memory in which all ranks read messages of such pieces, laid out by ``traffic.shared``; None if the group moves
    them. The answer is the same on all ranks."""
    return route.memory if traffic.longest * _bytes(piece, like) >= peer_memory.LEAST_BYTES else None


def _bytes(piece: tuple[int, ...], like: torch.Tensor) -> int:
    return torch.Size(piece).numel() * like.element_size()


def empty_blocks(k: torch.Tensor, v: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """Returns (count, block, batch, kv_heads, head_dim + v_head_dim), uninitialized. A piece is a block's keys and values."""
    return k.new_empty(count, *block_shape(k, v, block_size))


def block_shape(k: torch.Tensor, v: torch.Tensor, block_size: int) -> tuple[int, ...]:
    """Returns the shape of a piece of ``empty_blocks``."""
    return block_size, *k.shape[:2], k.shape[3] + v.shape[3]


def split_packed(packed: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return packed[..., :head_dim], packed[..., head_dim:]


def as_blocks(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """Returns x, (batch, heads, tokens, size), viewed as (blocks, block, batch, heads, size)."""
    return x.unflatten(2, (-1, block_size)).permute(2, 3, 0, 1, 4)


def as_tokens(blocks: torch.Tensor) -> torch.Tensor:
    """Reverses ``as_blocks``, also as a view."""
    return blocks.flatten(0, 1).permute(1, 2, 0, 3)


def pack(k: torch.Tensor, v: torch.Tensor, packed: torch.Tensor, blocks: torch.Tensor | None = None) -> None:
    """Copies blocks of k and v to ``packed``. blocks: (packed blocks,) int64, the blocks to copy; None for all."""
    block_size = packed.shape[1]
    for tensor, half in zip((k, v), split_packed(packed, k.shape[3]), strict=True):
        if triton_backend.can_use_kernels(k.device):
            from ..kernels.portable.merge import copy_rows

            with current_device(k.device):
                copy_rows(tensor, as_tokens(half), blocks, block_size)
        else:
            mine = as_blocks(tensor, block_size)
            half.copy_(mine if blocks is None else mine.index_select(0, blocks))


def unpacked(packed: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views (k, v) of packed blocks, each (batch, kv_heads, tokens, its head_dim)."""
    return split_packed(as_tokens(packed), head_dim)


def pack_with_space(k: torch.Tensor, v: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """Returns k and v packed into blocks, followed by ``count`` uninitialized blocks."""
    own = k.shape[2] // block_size
    every = empty_blocks(k, v, own + count, block_size)
    pack(k, v, every[:own])
    return every


def append_fetched(
    k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor, every: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (k, v) of the rank's tokens, then of the fetched blocks. every: what ``pack_with_space`` returned for these, or
    None."""
    if not len(fetched):
        return k, v
    if every is None:
        every = pack_with_space(k, v, len(fetched), fetched.shape[1])
    every[len(every) - len(fetched) :] = fetched
    return unpacked(every, k.shape[3])
