"""What a forward pass costs each rank by strategy, beside what others do; and the choice that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..masks.block_mask import BlockMask
from ..tools.figures import size_text
from .assignment import Assignment, candidates, chunk_blocks, exchanged
from .costs import SequenceSizes, call_times, seconds

Strategy = Literal["blocks", "heads"]
STRATEGIES: tuple[Strategy, ...] = "blocks", "heads"

# A regular assignment is kept unless exchanging chunks saves more than this: the estimate is no better.
_WORTH_IT = 0.98


@dataclass(frozen=True, eq=False)
class StrategyCosts:
    """What one forward pass of one sequence costs each rank, with head_dim 128 in 16 bits.

    work: (ranks,) float64, visited blocks, summed over heads. waited: float, the visited blocks that all ranks wait for: those of
    the heaviest rank, or of the heaviest in each step of a ring.
    received: (ranks,) float64, bytes that each rank gets from others. held: the most bytes of keys and values on a rank at a time.
    seconds: an estimate of the slowest rank's time. Only fetched blocks hide behind work, where that is estimated to pay.
    """

    work: np.ndarray
    waited: float
    received: np.ndarray
    held: float
    seconds: float


@dataclass(frozen=True, eq=False)
class ContextExplanation:
    """Costs by strategy: "blocks", "heads" where the plan knows its heads and ranks divide them, "ring" (all keys and values pass
    every rank, arXiv:2310.01889) and "all-gather" (every rank gets them all, then attends). Prints as a table.

    sizes: of the sequence. ranks: how many. costs: by name. choice: the strategy of this library that is estimated to be faster.
    assignments: who owns what, by strategy of this library.
    """

    sizes: SequenceSizes
    ranks: int
    costs: dict[str, StrategyCosts]
    choice: Strategy
    assignments: dict[Strategy, Assignment]

    def __str__(self) -> str:
        lines = [
            f"{self.sizes.q_len} tokens over {self.ranks} ranks, {self.sizes.heads} query and {self.sizes.kv_heads} key heads; "
            f"strategy {self.choice!r} is chosen, tokens are assigned {self.assignments[self.choice].name}",
            f"{'strategy':12} {'most / mean work':>16} {'most received':>14} {'held':>10} {'estimate':>10}",
        ]
        for name, cost in self.costs.items():
            balance = cost.waited / cost.work.mean() if cost.work.any() else 1.0
            lines.append(
                f"{name:12} {balance:>16.2f} {size_text(cost.received.max()):>14} {size_text(cost.held):>10} "
                f"{cost.seconds * 1e3:>7.2f} ms"
            )
        return "\n".join(lines)


def explained(mask: BlockMask, sizes: SequenceSizes, ranks: int, link_rate: float, knows_heads: bool) -> ContextExplanation:
    """The costs of a mask, on the CPU. knows_heads: whether ``sizes`` has the heads of the calls; else heads are not exchanged."""
    options = candidates(mask, ranks, chunk_blocks(mask.grid.q_blocks, sizes.block_size, ranks))
    block = sizes.block_bytes
    own = options[0].blocks.shape[1] * block
    others = np.full(ranks, (ranks - 1) * own, np.float64)

    def costs(work: np.ndarray, waited: float, received: np.ndarray, held: float) -> StrategyCosts:
        return StrategyCosts(work, waited, received, held, seconds(waited, received.max(), sizes, link_rate))

    def of_blocks(option: Assignment) -> StrategyCosts:
        work, received = option.work.sum(1) * sizes.heads, option.received * float(block)
        near, present = option.work.diagonal() * sizes.heads, (option.blocks >= 0).sum(1)
        # The slowest rank is not always that with the most work, nor that which gets most.
        took = max(
            min(call_times(*of_rank, sizes, link_rate)[0])
            for of_rank in zip(near, work - near, present, option.received, strict=True)
        )
        return StrategyCosts(work, work.max(), received, own + received.max(), took)

    def of_a_ring(option: Assignment) -> StrategyCosts:
        rank, step = np.indices((ranks, ranks))
        by_step = option.work[rank, (rank - step) % ranks] * sizes.heads
        return costs(by_step.sum(1), by_step.max(0).sum(), others, min(2, ranks) * own)

    def of_an_all_gather(option: Assignment) -> StrategyCosts:
        work = option.work.sum(1) * sizes.heads
        return costs(work, work.max(), others, ranks * own)

    def fastest(of) -> tuple[Assignment, StrategyCosts]:
        return min(((option, of(option)) for option in options), key=lambda pair: pair[1].seconds)

    assignment, found = fastest(of_blocks)
    fetching = seconds(0, block, sizes, link_rate) / seconds(sizes.heads, 0, sizes, link_rate)
    uneven = exchanged(assignment, fetching)
    if of_blocks(uneven).seconds < _WORTH_IT * found.seconds:
        assignment, found = uneven, of_blocks(uneven)
    table = {"blocks": found}
    assignments: dict[Strategy, Assignment] = {"blocks": assignment}
    if knows_heads and sizes.kv_heads % ranks == 0:
        received = own * (2 + 2 * sizes.heads / sizes.kv_heads) / 2 * (ranks - 1) / ranks  # q, k, v forth, out back
        work = _work_by_head(mask, sizes.heads).reshape(ranks, -1).sum(1)
        table["heads"] = costs(work, work.max(), np.full(ranks, received), own)
        assignments["heads"] = options[0]
    choice: Strategy = min(assignments, key=lambda name: table[name].seconds)
    table["ring"], table["all-gather"] = fastest(of_a_ring)[1], fastest(of_an_all_gather)[1]
    return ContextExplanation(sizes, ranks, table, choice, assignments)


def _work_by_head(mask: BlockMask, heads: int) -> np.ndarray:
    """(heads,) float64: the visited blocks of each, the mean over the batch."""
    visited = np.diff(mask.mask_bounds(), prepend=0).astype(np.float64)
    return np.broadcast_to(visited[mask.mask_index.numpy()].mean(0), heads)
