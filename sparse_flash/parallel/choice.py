"""Makes the plan's decision: which rank owns which tokens, and the strategy of each mask, by estimated times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from .assignment import Owners, Visits, candidates, improve_owners
from .costs import SequenceSizes
from .estimates import Estimates

Strategy = Literal["blocks", "queries", "heads"]
STRATEGIES: tuple[Strategy, ...] = "blocks", "queries", "heads"

# Chunks are exchanged if the time falls below this share of the best regular assignment's: smaller gains are within the
# estimate's error.
_WORTHWHILE_SHARE = 0.98


@dataclass(frozen=True, eq=False)
class Choice:
    """Holds the fastest owners and strategies. owners: of the tokens. strategies: one for each mask. seconds: estimated, of a
    forward pass of all layers."""

    owners: Owners
    strategies: tuple[Strategy, ...]
    seconds: float


class _MaskOptions(NamedTuple):
    """Holds what the choice knows of a mask. layers: how many have the mask.

    visits: for each allowed strategy that fetches blocks and suits the mask, the visits that decide which blocks. head_seconds: the
    time of strategy "heads", whoever owns the tokens; None if it is not allowed.
    """

    layers: int
    visits: dict[Strategy, Visits]
    head_seconds: float | None


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
    estimates = Estimates(sizes, ranks, link_rate)
    masks = [_list_options(one, count, estimates, allowed) for one, count in zip(visits, layers, strict=True)]
    owners = candidates(visits, layers, ranks)
    if any("queries" in mask.visits for mask in masks):
        owners += candidates([mask.visits.get("queries", one) for mask, one in zip(masks, visits, strict=True)], layers, ranks)
    regular = min((_choose_for_owners(one, masks, estimates) for one in owners), key=attrgetter("seconds"))
    fetching = [(mask, name) for mask, name in zip(masks, regular.strategies, strict=True) if name in mask.visits]
    if not fetching:
        return regular
    fetched, counts = [mask.visits[name] for mask, name in fetching], [mask.layers for mask, _ in fetching]
    improved_owners = improve_owners(regular.owners, fetched, counts, estimates.visits_per_fetch)
    improved = _choose_for_owners(improved_owners, masks, estimates)
    return improved if improved.seconds < _WORTHWHILE_SHARE * regular.seconds else regular


def _list_options(visits: Visits, layers: int, estimates: Estimates, allowed: Sequence[Strategy]) -> _MaskOptions:
    by_strategy: dict[Strategy, Visits] = {"blocks": visits} if "blocks" in allowed else {}
    if "queries" in allowed and (light := visits.without_shared_rows(estimates.sizes)):
        by_strategy["queries"] = light
    return _MaskOptions(layers, by_strategy, estimates.head_costs(visits.mask).seconds if "heads" in allowed else None)


def _choose_for_owners(owners: Owners, masks: Sequence[_MaskOptions], estimates: Estimates) -> Choice:
    """Chooses the fastest strategy of each mask."""
    total, strategies = 0.0, []
    for mask in masks:
        seconds = {name: estimates.block_costs(owners.with_visits(visits)).seconds for name, visits in mask.visits.items()}
        if mask.head_seconds is not None:
            seconds["heads"] = mask.head_seconds
        best = min(seconds, key=seconds.__getitem__)
        total += mask.layers * seconds[best]
        strategies.append(best)
    return Choice(owners, tuple(strategies), total)
