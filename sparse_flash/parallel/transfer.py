"""Blocks on their way between ranks: how they lie in a message, and exchanges that are under way."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..backends import triton as portable
from ..compat.pytorch import idle
from . import peer_memory
from .peer_memory import PeerMemory
from .routes import Route
from .traffic import Traffic

_START = 20_000  # cycles, some 11 us, in which an exchange's kernel starts


class Work(Protocol):
    def wait(self) -> object:
        """The current stream waits for it."""


class Arriving(NamedTuple):
    """What an exchange fills, and what it reads. They live until it is done."""

    theirs: torch.Tensor
    mine: torch.Tensor | None = None
    work: Work | None = None

    def begun(self) -> None:
        """From here on kernels that take all multiprocessors run beside the exchange. Its kernel starts on another stream, some us
        after what it waits for, and would wait for theirs to end if they were first: 2.9 ms of 8.1 (two H100, a butterfly's forward
        pass, 8 heads of 524,288 tokens)."""
        if self.work is not None and self.theirs.is_cuda:
            idle(_START)

    def arrived(self) -> torch.Tensor:
        """From here on the current stream may read it."""
        if self.work is not None:
            self.work.wait()
        return self.theirs


def message(like: torch.Tensor, traffic: Traffic, *piece: int, route: Route) -> torch.Tensor:
    """(sent pieces, *piece), contiguous and of the dtype of ``like``, for what ``started`` sends next. A collective call."""
    memory = memory_for(traffic, piece, like, route)
    if memory is None:
        return like.new_empty(traffic.sent, *piece)
    pieces = traffic.shared.pieces
    return memory.message(max(pieces) * _bytes(piece, like), pieces[traffic.rank], *piece, dtype=like.dtype)


def started(theirs: torch.Tensor, mine: torch.Tensor, traffic: Traffic, route: Route) -> Arriving:
    """Sends ``mine``, a ``message``, and fills ``theirs``; both contiguous, piece after piece."""
    if not traffic.longest:
        return Arriving(theirs)
    memory, group = memory_for(traffic, theirs.shape[1:], theirs, route), route.group
    if memory is not None:
        return Arriving(theirs, mine, memory.exchange(theirs, traffic))
    return Arriving(theirs, mine, dist.all_to_all_single(theirs, mine, traffic.receives, traffic.sends, group=group, async_op=True))


def memory_for(traffic: Traffic, piece: tuple[int, ...], like: torch.Tensor, route: Route) -> PeerMemory | None:
    """Where messages of such pieces lie, as ``traffic.shared`` says; None: anywhere, as the group moves them. All ranks have one or
    none."""
    return route.memory if traffic.longest * _bytes(piece, like) >= peer_memory.LEAST else None


def _bytes(piece: tuple[int, ...], like: torch.Tensor) -> int:
    return torch.Size(piece).numel() * like.element_size()


def empty_blocks(k: torch.Tensor, v: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """(count, block, batch, kv_heads, head_dim + v_head_dim): a block is one piece, with its keys and its values."""
    return k.new_empty(count, *block_shape(k, v, block_size))


def block_shape(k: torch.Tensor, v: torch.Tensor, block_size: int) -> tuple[int, ...]:
    """Of a piece of ``empty_blocks``."""
    return block_size, *k.shape[:2], k.shape[3] + v.shape[3]


def halves(packed: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return packed[..., :head_dim], packed[..., head_dim:]


def by_block(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """(blocks, block, batch, heads, size), a view of x, (batch, heads, tokens, size)."""
    return x.unflatten(2, (-1, block_size)).permute(2, 3, 0, 1, 4)


def by_head(blocks: torch.Tensor) -> torch.Tensor:
    """The reverse of ``by_block``, also a view."""
    return blocks.flatten(0, 1).permute(1, 2, 0, 3)


def pack(k: torch.Tensor, v: torch.Tensor, packed: torch.Tensor, blocks: torch.Tensor | None = None) -> None:
    """Fills blocks with keys and values. blocks: (packed blocks,) int64, which; None: all."""
    block_size = packed.shape[1]
    for tensor, half in zip((k, v), halves(packed, k.shape[3]), strict=True):
        if portable.by_kernels(k.device):
            from ..kernels.portable.join import take_rows

            with portable.current_device(k.device):
                take_rows(tensor, by_head(half), blocks, block_size)
        else:
            mine = by_block(tensor, block_size)
            half.copy_(mine if blocks is None else mine.index_select(0, blocks))


def unpacked(packed: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, (batch, kv_heads, tokens, head_dim), as views."""
    return halves(by_head(packed), head_dim)


def with_room(k: torch.Tensor, v: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """k and v as blocks, and room for ``count`` more behind them."""
    own = k.shape[2] // block_size
    every = empty_blocks(k, v, own + count, block_size)
    pack(k, v, every[:own])
    return every


def gathered(
    k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor, every: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of the rank and of the fetched blocks behind them. every: what ``with_room`` made for these, or None."""
    if not len(fetched):
        return k, v
    if every is None:
        every = with_room(k, v, len(fetched), fetched.shape[1])
    every[len(every) - len(fetched) :] = fetched
    return unpacked(every, k.shape[3])


def of_blocks(x: torch.Tensor, rows: torch.Tensor | None, block_size: int) -> torch.Tensor:
    """Some blocks of x, (batch, heads, tokens, ...); None: all."""
    return x if rows is None else x.unflatten(2, (-1, block_size)).index_select(2, rows).flatten(2, 3)
