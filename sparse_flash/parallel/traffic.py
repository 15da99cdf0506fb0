"""Counts the pieces that ranks send each other in an exchange. All numbers are on the host, and the same on all ranks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

_MOST_RUNS = 64  # runs that a rank copies in an exchange; the host takes about 8 us for each


@dataclass(frozen=True, eq=False)
class Traffic:
    """Describes one exchange. In a message that all ranks read, each piece is once, even if several ranks get it. In a message that
    the process group moves, the pieces for rank 0 come first. A rank receives the pieces of rank 0 first. wanted: for each rank's
    message that all ranks read, (ranks, pieces) bool, the ranks that get each piece."""

    wanted: list[np.ndarray]
    rank: int

    @cached_property
    def pieces(self) -> np.ndarray:
        """Returns (ranks, ranks) int64: pieces[i, j] go from rank i to rank j."""
        return np.stack([of_rank.sum(1) for of_rank in self.wanted])

    @cached_property
    def sends(self) -> list[int]:
        """Returns how many pieces go to each rank."""
        return self.pieces[self.rank].tolist()

    @cached_property
    def receives(self) -> list[int]:
        """Returns how many pieces come from each rank."""
        return self.pieces[:, self.rank].tolist()

    @cached_property
    def received(self) -> int:
        return sum(self.receives)

    @cached_property
    def longest(self) -> int:
        """Returns the most pieces that a rank sends, counted for each rank that gets them; 0 if no rank sends anything."""
        return int(self.pieces.sum(1).max())

    @cached_property
    def has_few_runs(self) -> bool:
        """Whether no rank would copy more than _MOST_RUNS runs. Otherwise the process group moves messages, in less time."""
        begins = [np.diff(of_rank, prepend=False, axis=1) & of_rank for of_rank in self.wanted]
        return bool(sum(of_rank.sum(1) for of_rank in begins).max() <= _MOST_RUNS)

    def runs(self, source: int) -> list[list[int]]:
        """Returns [first piece, the piece after the last] of each run in a rank's message that this rank gets."""
        return np.flatnonzero(np.diff(self.wanted[source][self.rank], prepend=False, append=False)).reshape(-1, 2).tolist()

    @cached_property
    def order(self) -> list[int]:
        """Returns the other ranks that this rank gets pieces from, in rounds. In a round no two ranks read from the same rank:
        docs/performance/several-gpus.md, "Copied by copy engines"."""
        from scipy.optimize import linear_sum_assignment

        left, order = np.where(np.eye(len(self.wanted), dtype=bool), 0, self.pieces), []
        while left.any():
            # Ranks with most pieces left to send or to get are in every round, so there are no more rounds than these ranks need.
            # A round has pieces of similar length: a rank with a short piece would begin its next one while others still read.
            todo = left.sum(1)[:, None] + left.sum(0)
            sources, targets = linear_sum_assignment(np.where(left > 0, todo + 2 * left, 0), maximize=True)
            source = int(sources[targets == self.rank][0])
            order += [source] * bool(left[source, self.rank])
            left[sources, targets] = 0
        return order

    @cached_property
    def reverse(self) -> Self:
        """Returns the exchange in which every piece goes back to its sender, in the order of arrival."""
        to_one_rank = np.eye(len(self.wanted), dtype=bool)
        return type(self)([np.repeat(to_one_rank, counts, axis=1) for counts in self.pieces.T], self.rank)
