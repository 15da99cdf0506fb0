"""Makes the plan's decision: which rank owns which tokens, and the strategy of each mask, by estimated times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from .assignment import Owners, Visits, candidates, improve_owners
from .costs import SequenceSizes
from .estimates import StrategyCosts, block_costs, head_costs, visits_per_fetch

Strategy = Literal["blocks", "queries", "heads"]
STRATEGIES: tuple[Strategy, ...] = "blocks", "queries", "heads"

# For each allowed strategy that suits a mask: the visits that decide which blocks are fetched; for "heads" the costs, which do not
# depend on who owns the tokens.
_Options = dict[Strategy, Visits | StrategyCosts]

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


def choose_strategies(
    visits: Sequence[Visits], layers: Sequence[int], sizes: SequenceSizes, ranks: int, allowed: Sequence[Strategy]
) -> Choice:
    """Chooses owners of the tokens and a strategy for each mask, to minimize the time of all layers. Ranks meet in the exchange of
    each layer, so a layer takes the time of its slowest rank.

    visits: of the masks. layers: how many layers have each mask. Raises ValueError if no allowed strategy suits a mask.
    """
    lights = [one.without_shared_rows(sizes) if "queries" in allowed else None for one in visits]
    if list(allowed) == ["queries"] and None in lights:
        raise ValueError(
            "strategy 'queries' needs masks in which a few block rows visit more than half of all columns, as global tokens do; "
            "got a mask in which none do, or too many; pass strategy='blocks'"
        )
    owners = candidates(visits, layers, ranks)
    if any(lights):
        owners += candidates([light or one for light, one in zip(lights, visits, strict=True)], layers, ranks)
    masks = []
    for one, light in zip(visits, lights, strict=True):
        options: _Options = {"blocks": one} if "blocks" in allowed else {}
        if light is not None:
            options["queries"] = light
        if "heads" in allowed:
            options["heads"] = head_costs(one.mask, owners[0].blocks.shape[1], sizes, ranks)
        masks.append(options)
    regular = min((_choose_for_owners(one, masks, layers, sizes) for one in owners), key=attrgetter("seconds"))
    fetched = [one for one in regular.visits if one is not None]
    if not fetched:
        return regular
    counts = [count for one, count in zip(regular.visits, layers, strict=True) if one is not None]
    improved_owners = improve_owners(regular.owners, fetched, counts, visits_per_fetch(sizes))
    improved = _choose_for_owners(improved_owners, masks, layers, sizes)
    return improved if improved.seconds < _WORTHWHILE_SHARE * regular.seconds else regular


def _choose_for_owners(owners: Owners, masks: Sequence[_Options], layers: Sequence[int], sizes: SequenceSizes) -> Choice:
    """Chooses the fastest strategy of each mask."""
    total, strategies, fetched, by_mask = 0.0, [], [], []
    for mask, count in zip(masks, layers, strict=True):
        costs = {name: block_costs(owners.with_visits(of), sizes) if isinstance(of, Visits) else of for name, of in mask.items()}
        best = min(costs, key=lambda name: costs[name].seconds)
        chosen = mask[best]
        total += count * costs[best].seconds
        strategies.append(best)
        fetched.append(chosen if isinstance(chosen, Visits) else None)
        by_mask.append(costs)
    return Choice(owners, tuple(strategies), tuple(fetched), tuple(by_mask), total)
