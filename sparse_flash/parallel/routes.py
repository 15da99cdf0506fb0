"""Records one rank's side of a plan's exchanges: the tables of its calls, and the blocks that it sends and gets.

An operator gets a handle, a number in a 0-d tensor on the CPU, so that one compiled graph serves all plans of one shape. The
handle owns its record: a backward pass saves the handle, and may run after the plan is freed.
"""

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

_known: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def make_handle(record: "Route | dist.ProcessGroup") -> torch.Tensor:
    """Returns a new handle. No reference leads back to it, so both are freed at once."""
    number = next(_numbers)
    handle = torch.tensor(number, device="cpu")
    handle._owned_by_handle = record  # type: ignore[attr-defined]  # lives as long as the tensor
    _known[number] = record
    return handle


def record_of(handle: torch.Tensor) -> Any:
    """Returns the record of ``make_handle``."""
    return _known[int(handle)]


def take_mask(mask: BlockMask, rows: np.ndarray, cols: np.ndarray) -> BlockMask:
    """Returns the mask of some block rows and columns of a sequence. rows, cols: as for ``take_blocks``."""
    return BlockMask.of_tables(take_blocks(mask, rows, cols))


@dataclass(frozen=True, eq=False)
class TwoCalls:
    """Describes a pass in two calls, one of which overlaps the exchange. near: the mask of the rank's block rows and its own block
    columns. far: of these rows and the blocks that it gets, if any."""

    near: BlockMask
    far: BlockMask | None

    def to(self, device: torch.device) -> "TwoCalls":
        return TwoCalls(self.near.to(device), self.far and self.far.to(device))


@dataclass(frozen=True, eq=False)
class Route:
    """Describes which blocks of keys and values a rank gets and sends, and its calls; on one device. Blocks are indices of the
    rank's blocks.

    forward, backward: the calls of a pass. A mask: one call, after the exchange (forward) or before it (backward). Its rows are the
    rank's blocks, its columns the rank's blocks and then the blocks that it gets.
    sent_blocks: (sent blocks,) int64, first the blocks for rank 0. A block that goes to several ranks is listed several times.
    message_blocks: the blocks of a message that all ranks read. traffic: which blocks go from each rank to each.
    gradient_targets: (blocks,) int64, each block that goes out, once. gradient_sources: (first, positions), int64. The gradient of
    ``gradient_targets[i]`` is the sum of the gradients of the sent blocks positions[first[i]] to positions[first[i + 1] - 1], in
    the order of ranks.
    group: the ranks; None on the CPU, before ``to``. memory: of messages; None if the group moves them itself.
    """

    block_size: int
    forward: BlockMask | TwoCalls
    backward: BlockMask | TwoCalls
    sent_blocks: torch.Tensor
    message_blocks: torch.Tensor
    traffic: Traffic
    gradient_targets: torch.Tensor
    gradient_sources: tuple[torch.Tensor, torch.Tensor]
    group: dist.ProcessGroup | None = None
    memory: PeerMemory | None = None

    @property
    def overlap(self) -> tuple[bool, bool]:
        """Returns (forward, backward): whether a pass makes two calls, one of which overlaps the exchange."""
        return isinstance(self.forward, TwoCalls), isinstance(self.backward, TwoCalls)

    def to(self, device: torch.device, group: dist.ProcessGroup, memory: PeerMemory | None) -> Self:
        names = "forward", "backward", "sent_blocks", "message_blocks", "gradient_targets"
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        moved["gradient_sources"] = tuple(one.to(device) for one in self.gradient_sources)
        return replace(self, **moved, group=group, memory=memory)

    @classmethod
    def from_assignment(cls, assignment: Assignment, rank: int, overlap: bool | None, sizes: SequenceSizes) -> Self:
        """Returns a rank's exchange, on the CPU. overlap: None decides for each pass by the estimate for the slowest rank."""
        mask = assignment.visits.mask
        outgoing = [assignment.outgoing(source) for source in range(assignment.ranks)]
        sent, wanted = outgoing[rank]
        own, fetched = assignment.blocks[rank], np.concatenate([blocks[of_rank[rank]] for blocks, of_rank in outgoing])
        overlaps = [times.overlaps if overlap is None else overlap for times in block_times(assignment, sizes)]
        # A table is built once, and only if a pass uses it.
        calls: dict[bool, BlockMask | TwoCalls] = {}
        if False in overlaps:
            calls[False] = take_mask(mask, own, np.concatenate([own, fetched]))
        if True in overlaps:
            calls[True] = TwoCalls(take_mask(mask, own, own), take_mask(mask, own, fetched) if len(fetched) else None)
        index = np.full(mask.grid.kv_blocks, -1)  # of each block of the sequence among the rank's blocks
        index[own[own >= 0]] = np.flatnonzero(own >= 0)
        sent_blocks = index[np.concatenate([sent[of_rank] for of_rank in wanted])]
        targets, counts = np.unique(sent_blocks, return_counts=True)
        first, positions = np.append(0, counts.cumsum()), np.argsort(sent_blocks, kind="stable")
        return cls(
            block_size=mask.block_size,
            forward=calls[overlaps[0]],
            backward=calls[overlaps[1]],
            sent_blocks=torch.from_numpy(sent_blocks),
            message_blocks=torch.from_numpy(index[sent]),
            traffic=Traffic([of_rank for _, of_rank in outgoing], rank),
            gradient_targets=torch.from_numpy(targets),
            gradient_sources=(torch.from_numpy(first), torch.from_numpy(positions)),
        )
