"""Counts the pieces that ranks send each other in an exchange. All numbers are on the host, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

_MOST_RUNS = 64  # runs that a rank copies in an exchange; the host takes about 8 us for each


class SharedMessages(NamedTuple):
    """Describes messages that all ranks read. Each piece is in its rank's message once, even if several ranks get it.

    pieces: of each rank's message, their number. runs: for each rank, the (first piece, count) of each run that this rank gets.
    """

    pieces: list[int]
    runs: list[list[tuple[int, int]]]

    @classmethod
    def from_wanted(cls, wanted: list[np.ndarray], rank: int) -> SharedMessages | None:
        """wanted: for each rank's message, (ranks, pieces) bool, the ranks that get each piece. Returns None if a rank would copy
        more than _MOST_RUNS runs: writing pieces several times then takes less time."""
        begin = [np.diff(of_rank, prepend=False, axis=1) & of_rank for of_rank in wanted]
        if sum(of_rank.sum(1) for of_rank in begin).max() > _MOST_RUNS:
            return None
        runs = []
        for of_rank, first in zip(wanted, begin, strict=True):
            ends = np.flatnonzero(np.diff(of_rank[rank], append=False) & of_rank[rank]) + 1
            runs.append([(int(a), int(b - a)) for a, b in zip(np.flatnonzero(first[rank]), ends, strict=True)])
        return cls([of_rank.shape[1] for of_rank in wanted], runs)


@dataclass(frozen=True, eq=False)
class Traffic:
    """Describes one exchange. A rank's message has the pieces for rank 0 first; it receives the pieces of rank 0 first.

    pieces: (ranks, ranks) int64: pieces[i, j] go from rank i to rank j. rank: this rank. unique: the messages with each piece once,
    if all ranks read them; None if messages have a copy of a piece for each rank that gets it.
    """

    pieces: np.ndarray
    rank: int
    unique: SharedMessages | None = None

    @classmethod
    def from_wanted(cls, wanted: list[np.ndarray], rank: int) -> Traffic:
        """wanted: as for ``SharedMessages.from_wanted``."""
        return cls(np.stack([of_rank.sum(1) for of_rank in wanted]), rank, SharedMessages.from_wanted(wanted, rank))

    @cached_property
    def sends(self) -> list[int]:
        """Returns how many pieces go to each rank."""
        return self.pieces[self.rank].tolist()

    @cached_property
    def receives(self) -> list[int]:
        """Returns how many pieces come from each rank."""
        return self.pieces[:, self.rank].tolist()

    @cached_property
    def sent(self) -> int:
        return sum(self.sends)

    @cached_property
    def received(self) -> int:
        return sum(self.receives)

    @cached_property
    def layout(self) -> SharedMessages:
        """Returns the messages as all ranks read them."""
        if self.unique is not None:
            return self.unique
        begins, counts = self.pieces[:, : self.rank].sum(1), self.pieces[:, self.rank]
        runs = [[(int(begin), int(count))] if count else [] for begin, count in zip(begins, counts, strict=True)]
        return SharedMessages(self.pieces.sum(1).tolist(), runs)

    @cached_property
    def order(self) -> list[int]:
        """Returns the other ranks that this rank gets pieces from, in the order of copying."""
        return [source for source, target in _copy_rounds(self.pieces) if target == self.rank]

    @cached_property
    def longest(self) -> int:
        """Returns the number of pieces of the longest message of all ranks; 0 if no rank sends anything."""
        return int(self.pieces.sum(1).max())

    @cached_property
    def reverse(self) -> Traffic:
        """Returns the exchange in which every piece goes back to its sender, in the order of arrival."""
        return Traffic(self.pieces.T, self.rank)


def _copy_rounds(pieces: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the (source, target) of all copies between different ranks, round after round.

    In a round no two ranks read from the same rank, because two readers halve each other's rate
    (docs/performance/several-gpus.md, "Copied by copy engines").
    """
    left = np.where(np.eye(len(pieces), dtype=bool), 0, pieces)
    while left.any():
        # Ranks with most pieces left to send or to get are in every round, so there are no more rounds than these ranks need.
        # A round has pieces of similar length: a rank with a short piece would begin its next one while others still read.
        todo = left.sum(1)[:, None] + left.sum(0)
        sources, targets = linear_sum_assignment(np.where(left > 0, todo + 2 * left, 0), maximize=True)
        busy = left[sources, targets] > 0
        yield from zip(sources[busy].tolist(), targets[busy].tolist(), strict=True)
        left[sources, targets] = 0
