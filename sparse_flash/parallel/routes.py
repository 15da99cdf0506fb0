"""Records one rank's side of a plan's exchanges: the tables of its calls, and the blocks that it sends and gets.

An operator gets a handle instead of these records: the number of a ``Peers`` in a 0-d tensor on the CPU. So torch.compile guards on
no number of a plan, and one graph serves all plans of one shape. The handle owns its ``Peers``: a backward pass saves the handle,
and may run after the plan is freed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist

from ..masks.block_mask import BlockMask
from ..masks.build import take_blocks
from .assignment import Assignment
from .costs import SequenceSizes, slowest
from .peer_memory import PeerMemory, peer_memory
from .traffic import Traffic

_known: WeakValueDictionary[int, Peers] = WeakValueDictionary()
_numbers = count()


@dataclass(frozen=True, eq=False)
class Peers:
    """Holds the ranks that an operator exchanges tensors with. The operator finds it by a handle."""

    group: dist.ProcessGroup

    def handle(self) -> torch.Tensor:
        """Returns a new handle. No reference leads back to the handle, so both are freed at once, without a garbage collector."""
        number = next(_numbers)
        handle = torch.tensor(number, device="cpu")
        handle._owned_by_handle = self  # type: ignore[attr-defined]  # lives as long as the tensor
        _known[number] = self
        return handle

    @classmethod
    def from_handle(cls, handle: torch.Tensor) -> Self:
        found = _known[int(handle)]
        assert isinstance(found, cls)
        return found


@dataclass(frozen=True, eq=False)
class LocalMask:
    """Holds the mask of some block rows and columns of a sequence, and their positions in it. q_positions, kv_positions: as in
    ``Variant``; 0 for blocks that keep nothing."""

    mask: BlockMask
    q_positions: torch.Tensor
    kv_positions: torch.Tensor

    @classmethod
    def of(cls, mask: BlockMask, rows: np.ndarray, cols: np.ndarray) -> LocalMask:
        """rows, cols: as for ``part_of``."""
        size = mask.block_size
        positions = [np.maximum(blocks, 0)[:, None] * size + np.arange(0, size, 16) for blocks in (rows, cols)]
        return cls(take_blocks(mask, rows, cols), *(torch.from_numpy(of.ravel().astype(np.int32)) for of in positions))

    def to(self, device: torch.device) -> LocalMask:
        return LocalMask(self.mask.to(device), self.q_positions.to(device), self.kv_positions.to(device))


@dataclass(frozen=True, eq=False)
class OneCall:
    """Describes a pass in one call, after the exchange (forward) or before it (backward). mask: its rows are the rank's blocks, its
    columns the rank's blocks and then the blocks that it gets."""

    mask: LocalMask

    def to(self, device: torch.device) -> OneCall:
        return OneCall(self.mask.to(device))


@dataclass(frozen=True, eq=False)
class TwoCalls:
    """Describes a pass in two calls, one of which overlaps the exchange.

    near: the mask of the rank's block rows and its own block columns. far: the mask of these rows and the blocks that the rank
    gets; None if it gets none.
    """

    near: LocalMask
    far: LocalMask | None

    def to(self, device: torch.device) -> TwoCalls:
        return TwoCalls(self.near.to(device), None if self.far is None else self.far.to(device))


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Lists rows that visit most columns, so that their queries travel to all ranks.

    rows: (blocks,) int64, the rank's shared block rows, as indices of its blocks. traffic: each rank sends its shared rows to all
    ranks, itself included. mask: its rows are the shared rows of all ranks, rank after rank, its columns the rank's own blocks.
    """

    rows: torch.Tensor
    traffic: Traffic
    mask: LocalMask
    block_size: int

    @classmethod
    def of(cls, mask: BlockMask, assignment: Assignment, rank: int, shared: np.ndarray) -> SharedRows:
        """shared: (blocks,) bool, of the whole sequence."""
        of_rank = [np.flatnonzero((blocks >= 0) & shared[blocks]) for blocks in assignment.blocks]
        every = np.concatenate([blocks[rows] for blocks, rows in zip(assignment.blocks, of_rank, strict=True)])
        own = LocalMask.of(mask, every, assignment.blocks[rank])
        counts = np.array([len(rows) for rows in of_rank])
        traffic = Traffic(np.repeat(counts[:, None], assignment.ranks, 1), rank)
        return cls(torch.from_numpy(of_rank[rank]), traffic, own, mask.block_size)

    def to(self, device: torch.device) -> SharedRows:
        return replace(self, rows=self.rows.to(device), mask=self.mask.to(device))


class Overlap(NamedTuple):
    """Says for each pass whether it makes two calls, one of which overlaps the exchange."""

    forward: bool
    backward: bool


@dataclass(frozen=True, eq=False)
class BlockExchange:
    """Describes which blocks of keys and values a rank gets and sends, and its calls; on one device. Blocks are indices of the
    rank's blocks.

    send: (sent blocks,) int64, the blocks that go out, first the blocks for rank 0. A block that goes to several ranks is listed
    several times. send_once: the blocks of a message that all ranks read. traffic: how many blocks go from each rank to each.
    answered: (blocks,) int64, each block that goes out, once. answers: (first, positions), int64. The gradient of ``answered[i]``
    is the sum of the gradients of the sent blocks positions[first[i]] to positions[first[i + 1] - 1], in the order of ranks. None
    if no block goes to two ranks: ``answered`` is then ``send``, and each block gets one gradient.
    shared: rows that the tables of both passes leave out because their queries travel; None if there are none.
    """

    block_size: int
    forward: OneCall | TwoCalls
    backward: OneCall | TwoCalls
    send: torch.Tensor
    send_once: torch.Tensor
    traffic: Traffic
    answered: torch.Tensor
    answers: tuple[torch.Tensor, torch.Tensor] | None
    shared: SharedRows | None

    @property
    def received(self) -> int:
        return self.traffic.received

    @property
    def overlap(self) -> Overlap:
        return Overlap(isinstance(self.forward, TwoCalls), isinstance(self.backward, TwoCalls))

    @classmethod
    def of(
        cls, mask: BlockMask, assignment: Assignment, rank: int, overlap: bool | None, sizes: SequenceSizes, link_rate: float
    ) -> BlockExchange:
        """Returns a rank's exchange on the CPU, where the mask is. overlap: None takes one call or two, for each pass, by the
        estimate for the slowest rank, so all ranks make equally many calls."""
        outgoing = [assignment.outgoing(source) for source in range(assignment.ranks)]
        sent, wanted = outgoing[rank]
        traffic = Traffic.of([of_rank for _, of_rank in outgoing], rank)
        own, fetched = assignment.blocks[rank], np.concatenate([blocks[of_rank[rank]] for blocks, of_rank in outgoing])
        shared = assignment.visits.shared
        rows = own if shared is None else np.where(shared[own], -1, own)
        if overlap is None:
            times = assignment.call_times(sizes, link_rate)
            chosen = Overlap(*(slowest(of_pass).overlaps for of_pass in zip(*times, strict=True)))
        else:
            chosen = Overlap(overlap, overlap)
        # A table is built once, and only if a pass uses it.
        calls: dict[bool, OneCall | TwoCalls] = {}
        if False in chosen:
            calls[False] = OneCall(LocalMask.of(mask, rows, np.concatenate([own, fetched])))
        if True in chosen:
            far = LocalMask.of(mask, rows, fetched) if len(fetched) else None
            calls[True] = TwoCalls(LocalMask.of(mask, rows, own), far)
        place = np.full(mask.grid.kv_blocks, -1)
        place[own[own >= 0]] = np.flatnonzero(own >= 0)
        send = place[np.concatenate([sent[of_rank] for of_rank in wanted])]
        answered, counts = np.unique(send, return_counts=True)
        several = len(answered) < len(send)
        answers = np.append(0, counts.cumsum()), np.argsort(send, kind="stable")
        return cls(
            block_size=mask.block_size,
            forward=calls[chosen.forward],
            backward=calls[chosen.backward],
            send=torch.from_numpy(send),
            send_once=torch.from_numpy(send if traffic.once is None else place[sent]),
            traffic=traffic,
            answered=torch.from_numpy(answered if several else send),
            answers=(torch.from_numpy(answers[0]), torch.from_numpy(answers[1])) if several else None,
            shared=None if shared is None else SharedRows.of(mask, assignment, rank, shared),
        )


@dataclass(frozen=True, eq=False)
class Route(BlockExchange, Peers):
    """Holds a rank's exchange of blocks on its device, and its peers. memory: of the messages that all peers read; None if the
    group moves messages itself."""

    memory: PeerMemory | None

    @classmethod
    def on(cls, exchange: BlockExchange, group: dist.ProcessGroup, device: torch.device) -> Self:
        forward = exchange.forward.to(device)
        backward = forward if exchange.backward is exchange.forward else exchange.backward.to(device)
        moved = {name: getattr(exchange, name).to(device) for name in ("send", "send_once", "answered")}
        answers = exchange.answers and tuple(t.to(device) for t in exchange.answers)
        shared = exchange.shared and exchange.shared.to(device)
        moved |= {"forward": forward, "backward": backward, "shared": shared, "answers": answers}
        return cls(group=group, memory=peer_memory(group, device), **{**vars(exchange), **moved})
