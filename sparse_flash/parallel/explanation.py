"""Estimates what a forward pass costs each rank under each strategy, and chooses owners and strategies by these estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..masks.block_mask import BlockMask
from ..tools.figures import size_text
from .assignment import Assignment, Owners, Visits, blocks_per_chunk, candidates, improve_owners
from .costs import ELEMENT_BYTES, HEAD_DIM, LSE_BYTES, CallTimes, SequenceSizes, copy_seconds, forward_seconds, slowest

Strategy = Literal["blocks", "queries", "heads"]
STRATEGIES: tuple[Strategy, ...] = "blocks", "queries", "heads"

# Chunks are exchanged if the time falls below this share of the best regular assignment's: smaller gains are within the
# estimate's error.
_WORTHWHILE_SHARE = 0.98


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


@dataclass(frozen=True, eq=False)
class ContextExplanation:
    """Holds the costs of each strategy that a plan can use, and of two that it does not offer. Prints as a table.

    The strategies are "blocks"; "queries" if a few rows visit most columns; "heads" if the plan knows its heads and the number of
    ranks divides them. The other two are "ring", in which all keys and values pass every rank (arXiv:2310.01889), and "all-gather",
    in which every rank gets all of them, then attends.

    sizes: of the sequence. ranks: their number. costs: by name. choice: the strategy of this library that is estimated to be
    fastest. assignments: which rank owns which blocks, by strategy of this library.
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


@dataclass(frozen=True, eq=False)
class Choice:
    """Holds the fastest owners and strategies, by estimate. owners: of the tokens. strategies: one for each mask."""

    owners: Owners
    strategies: tuple[Strategy, ...]


def possible_strategies(sizes: SequenceSizes, ranks: int, knows_heads: bool) -> tuple[Strategy, ...]:
    """Returns the strategies that a plan can use. knows_heads: whether ``sizes`` has the heads of the calls; if not, heads are not
    exchanged."""
    return STRATEGIES if knows_heads and sizes.kv_heads % ranks == 0 else STRATEGIES[:2]


def choose_strategies(
    visits: Sequence[Visits],
    layers: Sequence[int],
    sizes: SequenceSizes,
    ranks: int,
    link_rate: float,
    allowed: Sequence[Strategy],
) -> Choice:
    """Chooses owners of the tokens and a strategy for each mask, to minimize the time of all layers. Ranks meet in the exchange of
    each layer, so a layer takes the time of its slowest rank.

    visits: of the masks. layers: how many layers have each mask. allowed: the strategies to choose from.
    """
    estimates = _Estimates(sizes, ranks, link_rate)
    of_heads = [estimates.of_heads(one.mask).seconds for one in visits] if "heads" in allowed else []
    # For each strategy that fetches blocks, the visits of each mask that decide which; None if the strategy does not suit a mask.
    fetching: dict[Strategy, list[Visits | None]] = {}
    if "blocks" in allowed:
        fetching["blocks"] = list(visits)
    if "queries" in allowed:
        fetching["queries"] = [one.without_shared_rows(sizes) for one in visits]

    def of(owners: Owners) -> tuple[float, Choice]:
        total, strategies = 0.0, []
        for number, count in enumerate(layers):
            times: dict[Strategy, float] = {
                name: estimates.of_blocks(owners.under(one)).seconds
                for name, by_mask in fetching.items()
                if (one := by_mask[number]) is not None
            }
            if "heads" in allowed:
                times["heads"] = of_heads[number]
            best = min(times, key=times.__getitem__)
            total += count * times[best]
            strategies.append(best)
        return total, Choice(owners, tuple(strategies))

    options = candidates(visits, layers, ranks)
    lighter = fetching.get("queries", [])
    if any(lighter):
        options += candidates([light or one for light, one in zip(lighter, visits, strict=True)], layers, ranks)
    found, choice = min((of(owners) for owners in options), key=lambda pair: pair[0])
    fetched = [(one, layers[n]) for n, name in enumerate(choice.strategies) if name in fetching and (one := fetching[name][n])]
    if fetched:
        of_fetched, counts = [one for one, _ in fetched], [count for _, count in fetched]
        uneven, other = of(improve_owners(choice.owners, of_fetched, counts, estimates.visits_per_fetch))
        choice = other if uneven < _WORTHWHILE_SHARE * found else choice
    return choice


def explain_strategies(
    mask: BlockMask,
    sizes: SequenceSizes,
    ranks: int,
    link_rate: float,
    knows_heads: bool,
    owners: Owners | None = None,
) -> ContextExplanation:
    """Returns the costs of a mask, which is on the CPU. owners: of the tokens, if a plan has settled them; None to choose them."""
    visits = Visits.of(mask, blocks_per_chunk(mask.grid.q_blocks, sizes.block_size, ranks))
    estimates = _Estimates(sizes, ranks, link_rate)
    options = [option.under(visits) for option in candidates([visits], [1], ranks)]

    def fastest(of: Callable[[Assignment], StrategyCosts]) -> StrategyCosts:
        return min((of(option) for option in options), key=lambda costs: costs.seconds)

    best = (owners or choose_strategies([visits], [1], sizes, ranks, link_rate, ["blocks"]).owners).under(visits)
    assignments: dict[Strategy, Assignment] = {"blocks": best}
    table = {"blocks": estimates.of_blocks(best)}
    if light := visits.without_shared_rows(sizes):
        of_light = owners or choose_strategies([visits], [1], sizes, ranks, link_rate, ["queries"]).owners
        assignments["queries"] = of_light.under(light)
        table["queries"] = estimates.of_blocks(assignments["queries"])
    if "heads" in possible_strategies(sizes, ranks, knows_heads):
        table["heads"], assignments["heads"] = estimates.of_heads(mask), best if owners else options[0]
    choice: Strategy = min(assignments, key=lambda name: table[name].seconds)
    table["ring"], table["all-gather"] = fastest(estimates.of_a_ring), fastest(estimates.of_an_all_gather)
    return ContextExplanation(sizes, ranks, table, choice, assignments)


@dataclass(frozen=True)
class _Estimates:
    """Estimates the costs of each strategy on ``ranks`` ranks."""

    sizes: SequenceSizes
    ranks: int
    link_rate: float

    @property
    def own_blocks(self) -> int:
        """Returns how many blocks a rank holds, padding included."""
        blocks = -(-self.sizes.q_len // self.sizes.block_size)
        per = blocks_per_chunk(blocks, self.sizes.block_size, self.ranks)
        chunks = -(-blocks // per)
        return min(blocks, -(-chunks // self.ranks) * per)

    @property
    def own(self) -> int:
        """Returns the bytes of the keys and values of a rank's tokens, padding included."""
        return self.own_blocks * self.sizes.block_bytes

    @property
    def visits_per_fetch(self) -> float:
        """Returns how many blocks a rank visits, the mean over heads, in the time in which it gets one."""
        return self.sizes.block_bytes / self.link_rate / forward_seconds(0, self.sizes.heads, 0, self.sizes, self.link_rate)

    def of_blocks(self, option: Assignment) -> StrategyCosts:
        """Returns the costs of fetching blocks. If the option's visits leave shared rows out, their queries are included here."""
        sizes = self.sizes
        work = (option.load + option.shared_load) * sizes.heads
        travelling = (
            np.zeros(self.ranks) if option.visits.shared is None else self._query_bytes(option.sum_by_rank(option.visits.shared))
        )
        # The slowest rank need be neither the rank with the most work nor the rank that gets most, so each rank is estimated.
        forward = (of_rank for of_rank, _ in option.call_times(sizes, self.link_rate))
        waits = travelling / self.link_rate
        took = min(slowest(CallTimes(*(call + wait for call in calls)) for calls, wait in zip(forward, waits, strict=True)))
        fetched = option.received * float(sizes.block_bytes)
        return StrategyCosts(work, work.max(), fetched + travelling, self.own + fetched.max(), took)

    def _query_bytes(self, mine: np.ndarray) -> np.ndarray:
        """Returns (ranks,) bytes that each rank gets: the queries of others, and partial results of its own rows from all others.
        mine: (ranks,), how many shared block rows each rank has."""
        token = self.sizes.heads * HEAD_DIM * ELEMENT_BYTES
        parts = (self.ranks - 1) * mine * (token + self.sizes.heads * LSE_BYTES)
        return self.sizes.block_size * ((mine.sum() - mine) * token + parts)

    def of_heads(self, mask: BlockMask) -> StrategyCosts:
        received = self._head_exchange_bytes * (self.ranks - 1) / self.ranks
        work = _work_by_head(mask, self.sizes.heads).reshape(self.ranks, -1).sum(1)
        return self._even_costs(work, work.max(), received, self.own, copy_seconds(self._head_exchange_bytes))

    @property
    def _head_exchange_bytes(self) -> float:
        """Returns the bytes of a rank's q, k, v and out, all of which it copies to send them. Its own heads' share does not
        travel."""
        return self.own * (1 + self.sizes.heads / self.sizes.kv_heads)

    def of_a_ring(self, option: Assignment) -> StrategyCosts:
        rank, step = np.indices((self.ranks, self.ranks))
        by_step = option.work[rank, (rank - step) % self.ranks] * self.sizes.heads
        received, held = (self.ranks - 1) * self.own, min(2, self.ranks) * self.own
        return self._even_costs(by_step.sum(1), by_step.max(0).sum(), received, held, calls=self.ranks)

    def of_an_all_gather(self, option: Assignment) -> StrategyCosts:
        work = option.load * self.sizes.heads
        return self._even_costs(work, work.max(), (self.ranks - 1) * self.own, self.ranks * self.own)

    def _even_costs(
        self, work: np.ndarray, waited: float, received: float, held: float, more: float = 0.0, calls: int = 1
    ) -> StrategyCosts:
        """Returns the costs if all ranks get equally many bytes. more: seconds to add. calls: of all rows."""
        every, rows = np.full(self.ranks, float(received)), calls * self.own_blocks * self.sizes.heads
        took = forward_seconds(rows, waited, received, self.sizes, self.link_rate) + more
        return StrategyCosts(work, waited, every, held, took)


def _work_by_head(mask: BlockMask, heads: int) -> np.ndarray:
    """Returns (heads,) float64: the visited blocks of each head, the mean over the batch."""
    visited = np.diff(mask.mask_bounds(), prepend=0).astype(np.float64)
    return np.broadcast_to(visited[mask.mask_index.numpy()].mean(0), heads)
