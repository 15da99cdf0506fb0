"""A rank's part in the exchanges of a plan: the tables that it attends by, and the blocks that it sends and gets.

A plan's numbers do not cross an operator's boundary. A handle does, the number of ``Peers`` in a 0-d tensor on the CPU, so
torch.compile guards on no number of a plan, and one graph serves every plan of one shape. The handle owns what it stands for: a
backward pass saves it, and may come when the plan is gone.
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
from ..masks.build import part_of
from ..masks.grid import ranges
from .assignment import Assignment
from .costs import SequenceSizes, gathers_rows, slowest
from .peer_memory import PeerMemory, peer_memory
from .traffic import Traffic

_known: WeakValueDictionary[int, Peers] = WeakValueDictionary()
_numbers = count()


@dataclass(frozen=True, eq=False)
class Peers:
    """What an operator looks up by its handle: the ranks that it exchanges tensors with."""

    group: dist.ProcessGroup

    def handle(self) -> torch.Tensor:
        """A new one. This does not own it in turn, so both are freed at once, without a garbage collector."""
        number = next(_numbers)
        handle = torch.tensor(number, device="cpu")
        handle._owned_by_handle = self  # type: ignore[attr-defined]  # lives as long as the tensor, whoever holds that
        _known[number] = self
        return handle

    @classmethod
    def behind(cls, handle: torch.Tensor) -> Self:
        found = _known[int(handle)]
        assert isinstance(found, cls)
        return found


@dataclass(frozen=True, eq=False)
class PartMask:
    """The mask of some block rows and columns of a sequence, and where they stand in it. q_places, kv_places: as of ``Variant``; 0
    for blocks that keep nothing."""

    mask: BlockMask
    q_places: torch.Tensor
    kv_places: torch.Tensor

    @classmethod
    def of(cls, mask: BlockMask, rows: np.ndarray, cols: np.ndarray) -> PartMask:
        """rows, cols: as for ``part_of``."""
        size = mask.block_size
        places = [np.maximum(blocks, 0)[:, None] * size + np.arange(0, size, 16) for blocks in (rows, cols)]
        return cls(part_of(mask, rows, cols), *(torch.from_numpy(of.ravel().astype(np.int32)) for of in places))

    def to(self, device: torch.device) -> PartMask:
        return PartMask(self.mask.to(device), self.q_places.to(device), self.kv_places.to(device))


@dataclass(frozen=True, eq=False)
class OneCall:
    """A pass in one call, after the exchange or before it. mask: rows: the rank's blocks; columns: these, then those that it
    gets."""

    mask: PartMask

    def to(self, device: torch.device) -> OneCall:
        return OneCall(self.mask.to(device))


@dataclass(frozen=True, eq=False)
class TwoCalls:
    """A pass in two calls, so that one of them overlaps the exchange.

    near: rows and columns: the rank's blocks. far: rows: those that visit blocks of others, in some head, where they are few, else
    all of the rank's; columns: the blocks that the rank gets; None where no row visits any. rows: (rows of far,) int64 among the
    rank's blocks; None: all of them.
    """

    near: PartMask
    far: PartMask | None
    rows: torch.Tensor | None

    def to(self, device: torch.device) -> TwoCalls:
        far = None if self.far is None else self.far.to(device)
        return TwoCalls(self.near.to(device), far, None if self.rows is None else self.rows.to(device))


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Rows whose queries travel to all ranks, as they visit most columns.

    rows: (blocks,) int64, the rank's own of them, among its blocks. traffic: of their blocks, which each rank sends to all, itself
    included. mask: rows: those of all ranks, rank after rank; columns: the rank's own blocks.
    """

    rows: torch.Tensor
    traffic: Traffic
    mask: PartMask
    block_size: int

    @classmethod
    def of(cls, mask: BlockMask, assignment: Assignment, rank: int, shared: np.ndarray) -> SharedRows:
        """shared: (blocks,) bool."""
        of_rank = [np.flatnonzero((blocks >= 0) & shared[blocks]) for blocks in assignment.blocks]
        every = np.concatenate([blocks[rows] for blocks, rows in zip(assignment.blocks, of_rank, strict=True)])
        own = PartMask.of(mask, every, assignment.blocks[rank])
        counts = np.array([len(rows) for rows in of_rank])
        traffic = Traffic(np.repeat(counts[:, None], assignment.ranks, 1), rank)
        return cls(torch.from_numpy(of_rank[rank]), traffic, own, mask.block_size)

    def to(self, device: torch.device) -> SharedRows:
        return replace(self, rows=self.rows.to(device), mask=self.mask.to(device))


class Overlap(NamedTuple):
    """For each pass, whether it is of two calls, one of which overlaps the exchange."""

    forward: bool
    backward: bool


@dataclass(frozen=True, eq=False)
class BlockExchange:
    """Which blocks of keys and values a rank gets and sends, and how it attends; on one device.

    send: (sent blocks,) int64, which of the rank's blocks go out, those for rank 0 first. send_once: the blocks of a message that
    all ranks read. traffic: how many go from each rank to each.
    answered: (blocks,) int64, those of its blocks that go out at all. answers: (first, places), int64: the gradients of
    ``answered[i]`` are those of the sent blocks places[first[i]] to places[first[i + 1] - 1], in the order of ranks. None if no
    block goes to two ranks: then they are those of block ``send[i]``.
    shared: rows that the tables of both passes leave out, as their queries travel; None if there are none.
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
        """On the CPU, as the mask. overlap: None takes, for each pass, what is estimated to be faster with as many calls on every
        rank."""
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
        # A table is built once, and only if a pass walks it.
        calls: dict[bool, OneCall | TwoCalls] = {}
        if False in chosen:
            calls[False] = OneCall(PartMask.of(mask, rows, np.concatenate([own, fetched])))
        if True in chosen:
            calls[True] = _two_calls(mask, rows, own, fetched)
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
    """A rank's exchange of blocks, on its device, and the ranks that it is with. memory: where all of them read messages; or
    None."""

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


def _two_calls(mask: BlockMask, rows: np.ndarray, own: np.ndarray, fetched: np.ndarray) -> TwoCalls:
    """rows: ``own``, with -1 for those that other calls attend."""
    near, visiting = PartMask.of(mask, rows, own), _visits(mask, rows, fetched)
    some = visiting.any()
    if not some or not gathers_rows(visiting.sum(), len(own)):
        return TwoCalls(near, PartMask.of(mask, rows, fetched) if some else None, None)
    gathered = np.flatnonzero(visiting)
    return TwoCalls(near, PartMask.of(mask, rows[gathered], fetched), torch.from_numpy(gathered))


def _visits(mask: BlockMask, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """(rows,) bool: whether a block row visits one of the block columns, in some head. -1 visits none."""
    wanted = np.zeros(mask.grid.kv_blocks, bool)
    wanted[cols] = True
    visits, present = np.zeros(len(rows), bool), np.flatnonzero(rows >= 0)
    for ptr in mask.by_query.row_ptr.numpy():
        counts = np.diff(ptr)[rows[present]]
        found = wanted[mask.by_query.col_idx.numpy()[ranges(ptr[rows[present]], counts)]]
        visits[np.repeat(present, counts)[found]] = True
    return visits
