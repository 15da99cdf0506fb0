"""Records one rank's side of a plan's exchanges: the tables of its calls, and the blocks that it sends and gets.

An operator gets a handle instead of these records: the number of a ``Peers`` in a 0-d tensor on the CPU. So torch.compile guards on
no number of a plan, and one graph serves all plans of one shape. The handle owns its ``Peers``: a backward pass saves the handle,
and may run after the plan is freed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist

from ..masks.block_mask import BlockMask
from ..masks.build import take_blocks
from .assignment import Assignment
from .estimates import SequenceSizes, block_times
from .peer_memory import PeerMemory
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
class _Record:
    """Holds tensors, masks and other records, all on one device."""

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: _move(value, device) for name, value in vars(self).items()})


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_move(one, device) for one in value)
    return value.to(device) if isinstance(value, (torch.Tensor, BlockMask, _Record)) else value


@dataclass(frozen=True, eq=False)
class LocalMask(_Record):
    """Holds the mask of some block rows and columns of a sequence, and their positions in it. q_positions, kv_positions: as in
    ``Variant``; 0 for blocks that keep nothing."""

    mask: BlockMask
    q_positions: torch.Tensor
    kv_positions: torch.Tensor

    @classmethod
    def from_blocks(cls, mask: BlockMask, rows: np.ndarray, cols: np.ndarray) -> LocalMask:
        """rows, cols: as for ``take_blocks``."""
        size = mask.block_size
        positions = [np.maximum(blocks, 0)[:, None] * size + np.arange(0, size, 16) for blocks in (rows, cols)]
        return cls(
            BlockMask.of_tables(take_blocks(mask, rows, cols)),
            *(torch.from_numpy(first.ravel().astype(np.int32)) for first in positions),
        )


@dataclass(frozen=True, eq=False)
class TwoCalls(_Record):
    """Describes a pass in two calls, one of which overlaps the exchange.

    near: the mask of the rank's block rows and its own block columns. far: of these rows and the blocks that it gets, if any.
    """

    near: LocalMask
    far: LocalMask | None


@dataclass(frozen=True, eq=False)
class SharedRows(_Record):
    """Lists rows that visit most columns, so that their queries travel to all ranks.

    rows: (blocks,) int64, the rank's shared block rows, as indices of its blocks. traffic: each rank sends its shared rows to all
    ranks, itself included. mask: its rows are the shared rows of all ranks, rank after rank, its columns the rank's own blocks.
    """

    rows: torch.Tensor
    traffic: Traffic
    mask: LocalMask
    block_size: int

    @classmethod
    def from_assignment(cls, mask: BlockMask, assignment: Assignment, rank: int, shared: np.ndarray) -> SharedRows:
        """shared: (blocks,) bool, of the whole sequence."""
        of_rank = [np.flatnonzero((blocks >= 0) & shared[blocks]) for blocks in assignment.blocks]
        all_rows = np.concatenate([blocks[rows] for blocks, rows in zip(assignment.blocks, of_rank, strict=True)])
        own = LocalMask.from_blocks(mask, all_rows, assignment.blocks[rank])
        counts = np.array([len(rows) for rows in of_rank])
        traffic = Traffic(np.repeat(counts[:, None], assignment.ranks, 1), rank)
        return cls(torch.from_numpy(of_rank[rank]), traffic, own, mask.block_size)


@dataclass(frozen=True, eq=False)
class BlockExchange(_Record):
    """Describes which blocks of keys and values a rank gets and sends, and its calls; on one device. Blocks are indices of the
    rank's blocks.

    forward, backward: the calls of a pass. A mask: one call, after the exchange (forward) or before it (backward). Its rows are the
    rank's blocks, its columns the rank's blocks and then the blocks that it gets.
    sent_blocks: (sent blocks,) int64, first the blocks for rank 0. A block that goes to several ranks is listed several times.
    message_blocks: the blocks of a message that all ranks read. traffic: how many blocks go from each rank to each.
    gradient_targets: (blocks,) int64, each block that goes out, once. gradient_sources: (first, positions), int64. The gradient of
    ``gradient_targets[i]`` is the sum of the gradients of the sent blocks positions[first[i]] to positions[first[i + 1] - 1], in
    the order of ranks. None if no block goes to two ranks: the targets are then ``sent_blocks``, and each gets one gradient.
    shared: rows that the tables of both passes leave out because their queries travel; None if there are none.
    """

    block_size: int
    forward: LocalMask | TwoCalls
    backward: LocalMask | TwoCalls
    sent_blocks: torch.Tensor
    message_blocks: torch.Tensor
    traffic: Traffic
    gradient_targets: torch.Tensor
    gradient_sources: tuple[torch.Tensor, torch.Tensor] | None
    shared: SharedRows | None

    @property
    def overlap(self) -> tuple[bool, bool]:
        """Returns (forward, backward): whether a pass makes two calls, one of which overlaps the exchange."""
        return isinstance(self.forward, TwoCalls), isinstance(self.backward, TwoCalls)

    @classmethod
    def from_assignment(
        cls, mask: BlockMask, assignment: Assignment, rank: int, overlap: bool | None, sizes: SequenceSizes
    ) -> BlockExchange:
        """Returns a rank's exchange on the CPU, where the mask is. overlap: None takes one call or two, for each pass, by the
        estimate for the slowest rank, so all ranks make equally many calls."""
        outgoing = [assignment.outgoing(source) for source in range(assignment.ranks)]
        sent, wanted = outgoing[rank]
        traffic = Traffic.from_wanted([of_rank for _, of_rank in outgoing], rank)
        own, fetched = assignment.blocks[rank], np.concatenate([blocks[of_rank[rank]] for blocks, of_rank in outgoing])
        shared = assignment.visits.shared
        rows = own if shared is None else np.where(shared[own], -1, own)
        overlaps = [times.overlaps if overlap is None else overlap for times in block_times(assignment, sizes)]
        # A table is built once, and only if a pass uses it.
        calls: dict[bool, LocalMask | TwoCalls] = {}
        if False in overlaps:
            calls[False] = LocalMask.from_blocks(mask, rows, np.concatenate([own, fetched]))
        if True in overlaps:
            far = LocalMask.from_blocks(mask, rows, fetched) if len(fetched) else None
            calls[True] = TwoCalls(LocalMask.from_blocks(mask, rows, own), far)
        index = np.full(mask.grid.kv_blocks, -1)  # of each block of the sequence among the rank's blocks
        index[own[own >= 0]] = np.flatnonzero(own >= 0)
        sent_blocks = index[np.concatenate([sent[of_rank] for of_rank in wanted])]
        targets, counts = np.unique(sent_blocks, return_counts=True)
        sources = None
        if len(targets) == len(sent_blocks):
            targets = sent_blocks
        else:
            first, positions = np.append(0, counts.cumsum()), np.argsort(sent_blocks, kind="stable")
            sources = torch.from_numpy(first), torch.from_numpy(positions)
        return cls(
            block_size=mask.block_size,
            forward=calls[overlaps[0]],
            backward=calls[overlaps[1]],
            sent_blocks=torch.from_numpy(sent_blocks),
            message_blocks=torch.from_numpy(sent_blocks if traffic.unique is None else index[sent]),
            traffic=traffic,
            gradient_targets=torch.from_numpy(targets),
            gradient_sources=sources,
            shared=None if shared is None else SharedRows.from_assignment(mask, assignment, rank, shared),
        )


@dataclass(frozen=True, eq=False)
class Route(BlockExchange, Peers):
    """Holds a rank's exchange of blocks on its device, and its peers. memory: of messages; None if the group moves them itself."""

    memory: PeerMemory | None
