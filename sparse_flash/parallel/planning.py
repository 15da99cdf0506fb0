"""Computes one rank's numbers of a plan from masks, on the host, without messages to other ranks: which rank owns which tokens, the
strategy of each mask, by estimated times, and this rank's tables."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, TypedDict

from ..masks.block_mask import BlockMask, MaskLike, as_block_mask
from ..selection.block_selection import BlockSelection
from ..selection.packed_selection import PackedSelection
from .assignment import Owners, Visits, blocks_per_chunk, candidates, improve_owners
from .estimates import LINK_RATE, SequenceSizes, StrategyCosts, block_costs, head_costs, visits_per_fetch
from .routes import BlockExchange, LocalMask

Strategy = Literal["blocks", "queries", "heads"]
STRATEGIES: tuple[Strategy, ...] = "blocks", "queries", "heads"

# For each allowed strategy that suits a mask: the visits that decide which blocks are fetched; for "heads" the costs, which do not
# depend on who owns the tokens.
_Options = dict[Strategy, Visits | StrategyCosts]

# Chunks are exchanged if the time falls below this share of the best regular assignment's: smaller gains are within the
# estimate's error.
_WORTHWHILE_SHARE = 0.98


class PlanKeywords(TypedDict, total=False):
    """Types the fields of ``PlanOptions`` as keywords."""

    heads: int | None
    kv_heads: int | None
    block_size: int
    strategy: Strategy | Literal["auto"]
    link_rate: float
    overlap: bool | None


@dataclass(frozen=True)
class PlanOptions:
    """Holds the arguments of ``context_parallel`` other than masks and lengths."""

    heads: int | None = None
    kv_heads: int | None = None
    block_size: int = 128
    strategy: Strategy | Literal["auto"] = "auto"
    link_rate: float = LINK_RATE
    overlap: bool | None = None

    def check(self, ranks: int) -> None:
        """Raises ValueError for options that are not valid."""
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise ValueError(
                f"overlap must be True, False or None; got {self.overlap!r}; None takes what is estimated to be faster"
            )
        if self.heads is None and self.kv_heads is not None:
            raise ValueError(f"kv_heads must come with heads=; got kv_heads={self.kv_heads} alone; pass both")
        for name, value in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer; got {value!r}; pass {name} of the attention calls")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads; got {self.kv_heads} and {self.heads}; pass the numbers of the attention calls"
            )
        if self.strategy not in ("auto", *STRATEGIES):
            raise ValueError(
                f"strategy must be 'auto', 'blocks', 'queries' or 'heads'; got {self.strategy!r}; 'auto' takes what is estimated "
                "to be fastest"
            )
        if not isinstance(self.link_rate, (int, float)) or self.link_rate <= 0:
            raise ValueError(
                f"link_rate must be a positive number of bytes per second; got {self.link_rate!r}; pass what a rank receives"
            )
        kv_heads = self.kv_heads or self.heads
        if self.strategy != "heads":
            return
        if kv_heads is None:
            raise ValueError("strategy 'heads' needs heads=; got None; pass heads= and kv_heads= of the attention calls")
        if kv_heads % ranks:
            raise ValueError(
                f"strategy 'heads' needs a number of ranks that divides kv_heads; got {ranks} ranks and {kv_heads} kv_heads; pass "
                "strategy='blocks', or a smaller mesh"
            )

    def facts(self) -> dict[str, str]:
        """Returns the options that must be the same on all ranks. Links may differ, if the decisions do not."""
        return {name: str(value) for name, value in vars(self).items() if name != "link_rate"}

    def sizes(self, masks: Sequence[BlockMask]) -> SequenceSizes:
        """Returns the sizes of the sequence. Raises ValueError if the masks have another number of heads."""
        of_masks = {mask.mask_index.shape[1] for mask in masks}
        heads = max(of_masks) if self.heads is None else self.heads
        if other := of_masks - {1, heads}:
            raise ValueError(f"mask must have 1 head or {heads}; got {min(other)}; pass heads= of the attention calls")
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        return SequenceSizes(masks[0].q_len, masks[0].block_size, heads, kv_heads, self.link_rate)


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


@dataclass(frozen=True, eq=False)
class PlannedSequence(Choice):
    """Holds one rank's numbers of a plan, on the host.

    layers: for each layer, the number of its mask. masks: of the whole sequence, on the CPU. local_masks: for each mask, under
    strategy "heads" that of all tokens in the order of ranks; on one rank the mask itself; else the exchange of blocks.
    """

    sizes: SequenceSizes
    layers: Sequence[int]
    masks: tuple[BlockMask, ...]
    local_masks: tuple[BlockMask | LocalMask | BlockExchange, ...]

    @property
    def decisions(self) -> dict[str, str]:
        """Returns short descriptions, by name, that must be the same on all ranks."""
        return {
            "strategy": ", ".join(map(repr, self.strategies)),
            "assignment": f"{self.owners.name} ({short_digest(self.owners.blocks.tobytes())})",
        }


def plan_sequence(
    masks: Sequence[BlockMask], layers: Sequence[int], rank: int, ranks: int, options: PlanOptions
) -> PlannedSequence:
    """Plans one rank's part of a sequence.

    masks: different masks, on the CPU, of one length and block size. layers: for each layer, the number of its mask. Raises
    ValueError for options that do not fit the masks.
    """
    sizes = options.sizes(masks)
    allowed: Sequence[Strategy] = [options.strategy] if options.strategy != "auto" else STRATEGIES
    if options.strategy == "auto" and (options.heads is None or sizes.kv_heads % ranks):
        allowed = [name for name in STRATEGIES if name != "heads"]
    chunk_blocks = blocks_per_chunk(masks[0].grid.q_blocks, sizes.block_size, ranks)
    visits = [Visits.from_mask(mask, chunk_blocks) for mask in masks]
    counts = [list(layers).count(number) for number in range(len(masks))]
    choice = choose_strategies(visits, counts, sizes, ranks, allowed)

    def localize(mask: BlockMask, fetching: Visits | None) -> BlockMask | LocalMask | BlockExchange:
        if ranks == 1:
            return mask
        if fetching is not None:
            return BlockExchange.from_assignment(mask, choice.owners.with_visits(fetching), rank, options.overlap, sizes)
        order, index = choice.owners.blocks.flatten(), mask.mask_index
        of_rank = mask if index.shape[1] == 1 else replace(mask, mask_index=index.chunk(ranks, 1)[rank])
        return LocalMask.from_blocks(of_rank, order, order)

    local_masks = tuple(map(localize, masks, choice.visits))
    return PlannedSequence(**vars(choice), sizes=sizes, layers=layers, masks=tuple(masks), local_masks=local_masks)


def choose_strategies(
    visits: Sequence[Visits], layers: Sequence[int], sizes: SequenceSizes, ranks: int, allowed: Sequence[Strategy]
) -> Choice:
    """Chooses owners of the tokens and a strategy for each mask, to minimize the time of all layers. Ranks meet in the exchange of
    each layer, so a layer takes the time of its slowest rank.

    visits: of the masks. layers: how many layers have each mask. Raises ValueError if no allowed strategy suits a mask.
    """
    lights = [one.without_shared_rows(sizes.heads / sizes.kv_heads) if "queries" in allowed else None for one in visits]
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


def to_square_mask(mask: MaskLike, q_len: int, block_size: int) -> BlockMask:
    """Returns the mask of the sequence, on the CPU. Raises ValueError for one of other lengths, TypeError for a selection."""
    if isinstance(mask, (BlockSelection, PackedSelection)):
        raise TypeError(
            f"mask must be a pattern, its spec text or a BlockMask, as a plan is made before there are queries; got a "
            f"{type(mask).__name__}, which queries choose; plan 'causal' with strategy='heads', and pass select= to plan.attention"
        )
    whole = as_block_mask(mask, q_len=q_len, kv_len=q_len, block_size=block_size).to("cpu")
    if (whole.q_len, whole.kv_len) != (q_len, q_len):
        raise ValueError(
            f"mask must have q_len={q_len} queries and as many keys; got {whole.q_len} queries and {whole.kv_len} keys; compile it "
            f"for {q_len}, or pass the pattern itself"
        )
    return whole


def short_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
