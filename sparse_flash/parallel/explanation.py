"""Explains what a forward pass costs each rank under each strategy, and prints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..masks.block_mask import BlockMask
from ..tools.figures import size_text
from .assignment import Assignment, Owners, Visits, blocks_per_chunk, candidates
from .choice import Strategy, choose_strategies, possible_strategies
from .costs import SequenceSizes
from .estimates import Estimates, StrategyCosts


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


def explain_strategies(
    mask: BlockMask,
    sizes: SequenceSizes,
    ranks: int,
    link_rate: float,
    knows_heads: bool,
    owners: Owners | None = None,
) -> ContextExplanation:
    """Returns the costs of a mask, which is on the CPU. owners: of the tokens, if a plan has settled them; None to choose them."""
    visits = Visits.from_mask(mask, blocks_per_chunk(mask.grid.q_blocks, sizes.block_size, ranks))
    estimates = Estimates(sizes, ranks, link_rate)
    regular = [option.with_visits(visits) for option in candidates([visits], [1], ranks)]

    def choose_owners(strategy: Strategy) -> Owners:
        return owners or choose_strategies([visits], [1], sizes, ranks, link_rate, [strategy]).owners

    def fastest(estimate: Callable[[Assignment], StrategyCosts]) -> StrategyCosts:
        return min(map(estimate, regular), key=lambda costs: costs.seconds)

    assignments: dict[Strategy, Assignment] = {"blocks": choose_owners("blocks").with_visits(visits)}
    if light := visits.without_shared_rows(sizes):
        assignments["queries"] = choose_owners("queries").with_visits(light)
    costs: dict[str, StrategyCosts] = {name: estimates.block_costs(assignment) for name, assignment in assignments.items()}
    if "heads" in possible_strategies(sizes, ranks, knows_heads):
        assignments["heads"] = assignments["blocks"] if owners else regular[0]
        costs["heads"] = estimates.head_costs(mask)
    choice: Strategy = min(assignments, key=lambda name: costs[name].seconds)
    costs["ring"], costs["all-gather"] = fastest(estimates.ring_costs), fastest(estimates.all_gather_costs)
    return ContextExplanation(sizes, ranks, costs, choice, assignments)
