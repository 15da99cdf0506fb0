"""Estimates what a forward pass costs each rank under each strategy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..masks.block_mask import BlockMask
from .assignment import Assignment, blocks_per_chunk
from .costs import ELEMENT_BYTES, HEAD_DIM, LSE_BYTES, CallTimes, SequenceSizes, copy_seconds, forward_seconds, slowest


@dataclass(frozen=True, eq=False)
class StrategyCosts:
    """Holds what one forward pass of one sequence costs each rank, with head_dim 128 in 16 bits.

    work: (ranks,) float64, visited blocks, summed over heads. waited: float, the visited blocks of the heaviest rank, for which all
    ranks wait; of a ring, the sum of these over its steps.
    received: (ranks,) float64, bytes that each rank gets from others. held: the most bytes of keys and values on a rank at a time.
    seconds: the estimated time of the slowest rank. Only fetched blocks overlap work, if that is estimated to be faster.
    """

    work: np.ndarray
    waited: float
    received: np.ndarray
    held: float
    seconds: float


@dataclass(frozen=True)
class Estimates:
    """Estimates the costs of each strategy on ``ranks`` ranks."""

    sizes: SequenceSizes
    ranks: int
    link_rate: float

    @property
    def own_blocks(self) -> int:
        """Returns how many blocks a rank holds, padding included."""
        blocks = -(-self.sizes.q_len // self.sizes.block_size)
        chunk_blocks = blocks_per_chunk(blocks, self.sizes.block_size, self.ranks)
        chunks = -(-blocks // chunk_blocks)
        return min(blocks, -(-chunks // self.ranks) * chunk_blocks)

    @property
    def own_bytes(self) -> int:
        """Returns the bytes of the keys and values of a rank's tokens, padding included."""
        return self.own_blocks * self.sizes.block_bytes

    @property
    def visits_per_fetch(self) -> float:
        """Returns how many blocks a rank visits, the mean over heads, in the time in which it gets one."""
        return self.sizes.block_bytes / self.link_rate / forward_seconds(0, self.sizes.heads, 0, self.sizes, self.link_rate)

    def block_costs(self, option: Assignment) -> StrategyCosts:
        """Returns the costs of fetching blocks. If the option's visits leave shared rows out, their queries are included here."""
        sizes = self.sizes
        work = (option.visited + option.visited_by_shared_rows) * sizes.heads
        travelling = (
            np.zeros(self.ranks) if option.visits.shared is None else self._query_bytes(option.sum_by_rank(option.visits.shared))
        )
        # The slowest rank need be neither the rank with the most work nor the rank that gets most, so each rank is estimated.
        forward = (times for times, _ in option.call_times(sizes, self.link_rate))
        waits = travelling / self.link_rate
        seconds = min(slowest(CallTimes(*(call + wait for call in times)) for times, wait in zip(forward, waits, strict=True)))
        fetched = option.received * float(sizes.block_bytes)
        return StrategyCosts(work, work.max(), fetched + travelling, self.own_bytes + fetched.max(), seconds)

    def _query_bytes(self, shared_rows: np.ndarray) -> np.ndarray:
        """Returns (ranks,) bytes that each rank gets: the queries of others, and partial results of its own rows from all others.
        shared_rows: (ranks,), how many shared block rows each rank has."""
        token_bytes = self.sizes.heads * HEAD_DIM * ELEMENT_BYTES
        results = (self.ranks - 1) * shared_rows * (token_bytes + self.sizes.heads * LSE_BYTES)
        return self.sizes.block_size * ((shared_rows.sum() - shared_rows) * token_bytes + results)

    def head_costs(self, mask: BlockMask) -> StrategyCosts:
        received = self._head_exchange_bytes * (self.ranks - 1) / self.ranks
        work = _work_by_head(mask, self.sizes.heads).reshape(self.ranks, -1).sum(1)
        return self._even_costs(work, work.max(), received, self.own_bytes, copy_seconds(self._head_exchange_bytes))

    @property
    def _head_exchange_bytes(self) -> float:
        """Returns the bytes of a rank's q, k, v and out, all of which it copies to send them. Its own heads' share does not
        travel."""
        return self.own_bytes * (1 + self.sizes.heads / self.sizes.kv_heads)

    def ring_costs(self, option: Assignment) -> StrategyCosts:
        rank, step = np.indices((self.ranks, self.ranks))
        by_step = option.visited_by_owner[rank, (rank - step) % self.ranks] * self.sizes.heads
        received, held = (self.ranks - 1) * self.own_bytes, min(2, self.ranks) * self.own_bytes
        return self._even_costs(by_step.sum(1), by_step.max(0).sum(), received, held, calls=self.ranks)

    def all_gather_costs(self, option: Assignment) -> StrategyCosts:
        work = option.visited * self.sizes.heads
        return self._even_costs(work, work.max(), (self.ranks - 1) * self.own_bytes, self.ranks * self.own_bytes)

    def _even_costs(
        self, work: np.ndarray, waited: float, received: float, held: float, copying: float = 0.0, calls: int = 1
    ) -> StrategyCosts:
        """Returns the costs if all ranks get equally many bytes. copying: seconds to add. calls: of all rows."""
        rows = calls * self.own_blocks * self.sizes.heads
        seconds = forward_seconds(rows, waited, received, self.sizes, self.link_rate) + copying
        return StrategyCosts(work, waited, np.full(self.ranks, float(received)), held, seconds)


def _work_by_head(mask: BlockMask, heads: int) -> np.ndarray:
    """Returns (heads,) float64: the visited blocks of each head, the mean over the batch."""
    visited = np.diff(mask.mask_bounds(), prepend=0).astype(np.float64)
    return np.broadcast_to(visited[mask.mask_index.numpy()].mean(0), heads)
