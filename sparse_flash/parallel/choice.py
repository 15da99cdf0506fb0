"""Makes the plan's decision: which rank owns which tokens, and the strategy of each mask, by estimated times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from .assignment import Owners, Visits, candidates, improve_owners
from .costs import SequenceSizes
from .estimates import StrategyCosts, block_costs, head_costs, visits_per_fetch

Strategy = Literal["blocks", "queries", "heads"]
STRATEGIES: tuple[Strategy, ...] = "blocks", "queries", "heads"

# Chunks are exchanged if the time falls below this share of the best regular assignment's: smaller gains are within the
# estimate's error.
_WORTHWHILE_SHARE = 0.98


@dataclass(frozen=True, eq=False)
class Choice:
    """Holds the fastest owners and strategies. owners: of the tokens, the same for all masks. seconds: estimated, of a forward pass
    of all layers. The others have an entry for each mask. visits: those that decide which blocks are fetched; None under strategy
    "heads". costs: of each strategy that was allowed and suits the mask."""

    owners: Owners
    strategies: tuple[Strategy, ...]
    visits: tuple[Visits | None, ...]
    costs: tuple[dict[Strategy, StrategyCosts], ...]
    seconds: float


class _MaskOptions(NamedTuple):
    """Holds what the choice knows of a mask. layers: how many have the mask.

    visits: for each allowed strategy that fetches blocks and suits the mask, the visits that decide which blocks. heads: the costs
    of strategy "heads", whoever owns the tokens; None if it is not allowed.
    """

    layers: int
    visits: dict[Strategy, Visits]
    heads: StrategyCosts | None


def choose_strategies(
    visits: Sequence[Visits], layers: Sequence[int], sizes: SequenceSizes, ranks: int, allowed: Sequence[Strategy]
) -> Choice:
    """Chooses owners of the tokens and a strategy for each mask, to minimize the time of all layers. Ranks meet in the exchange of
    each layer, so a layer takes the time of its slowest rank.

    visits: of the masks. layers: how many layers have each mask. allowed: the strategies to choose from. Raises ValueError if no
    allowed strategy suits a mask.
    """
    owners, masks = candidates(visits, layers, ranks), []
    for one, count in zip(visits, layers, strict=True):
        by_strategy: dict[Strategy, Visits] = {"blocks": one} if "blocks" in allowed else {}
        if "queries" in allowed and (light := one.without_shared_rows(sizes)):
            by_strategy["queries"] = light
        elif list(allowed) == ["queries"]:
            raise ValueError(
                "strategy 'queries' needs masks in which a few block rows visit more than half of all columns, as global tokens "
                "do; got a mask in which none do, or too many; pass strategy='blocks'"
            )
        own_blocks = owners[0].blocks.shape[1]
        of_heads = head_costs(one.mask, own_blocks, sizes, ranks) if "heads" in allowed else None
        masks.append(_MaskOptions(count, by_strategy, of_heads))
    if any("queries" in mask.visits for mask in masks):
        owners += candidates([mask.visits.get("queries", one) for mask, one in zip(masks, visits, strict=True)], layers, ranks)
    regular = min((_choose_for_owners(one, masks, sizes) for one in owners), key=attrgetter("seconds"))
    fetched = [one for one in regular.visits if one is not None]
    if not fetched:
        return regular
    counts = [count for one, count in zip(regular.visits, layers, strict=True) if one is not None]
    improved_owners = improve_owners(regular.owners, fetched, counts, visits_per_fetch(sizes))
    improved = _choose_for_owners(improved_owners, masks, sizes)
    return improved if improved.seconds < _WORTHWHILE_SHARE * regular.seconds else regular


def _choose_for_owners(owners: Owners, masks: Sequence[_MaskOptions], sizes: SequenceSizes) -> Choice:
    """Chooses the fastest strategy of each mask."""
    total, strategies, by_mask = 0.0, [], []
    for mask in masks:
        costs = {name: block_costs(owners.with_visits(visits), sizes) for name, visits in mask.visits.items()}
        if mask.heads is not None:
            costs["heads"] = mask.heads
        best = min(costs, key=lambda name: costs[name].seconds)
        total += mask.layers * costs[best].seconds
        strategies.append(best)
        by_mask.append(costs)
    fetched = tuple(mask.visits.get(name) for mask, name in zip(masks, strategies, strict=True))
    return Choice(owners, tuple(strategies), fetched, tuple(by_mask), total)
