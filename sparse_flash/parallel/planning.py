"""Computes one rank's numbers of a plan from masks, on the host: who owns which tokens, strategies by estimated times, tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from ..core.variant import check_counts
from ..masks.block_mask import BlockMask, MaskLike, as_block_mask
from ..selection.block_selection import BlockSelection
from ..selection.packed_selection import PackedSelection
from .assignment import CONTIGUOUS, Owners, Visits, blocks_per_chunk, candidates
from .estimates import LINK_RATE, SequenceSizes, block_seconds, head_seconds
from .routes import Route

Strategy = Literal["blocks", "heads"]
STRATEGIES: tuple[Strategy, ...] = "blocks", "heads"
# The exchange of blocks under strategy "blocks" on several ranks, otherwise the mask of the rank's heads.
Local = BlockMask | Route


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
        check_counts(**{name: n for name, n in (("heads", self.heads), ("kv_heads", self.kv_heads)) if n is not None})
        if self.kv_heads and (not self.heads or self.heads % self.kv_heads):
            raise ValueError(
                f"kv_heads must divide heads; got {self.kv_heads} and {self.heads}; pass the numbers of the attention calls"
            )
        if self.strategy not in ("auto", *STRATEGIES):
            raise ValueError(
                f"strategy must be 'auto', 'blocks' or 'heads'; got {self.strategy!r}; 'auto' takes what is estimated to be fastest"
            )
        kv_heads = self.kv_heads or self.heads
        if self.strategy == "heads" and kv_heads is None:
            raise ValueError("strategy 'heads' needs heads=; got None; pass heads= and kv_heads= of the attention calls")
        if self.strategy == "heads" and kv_heads is not None and kv_heads % ranks:
            raise ValueError(
                f"strategy 'heads' needs a number of ranks that divides kv_heads; got {ranks} ranks and {kv_heads} kv_heads; pass "
                "strategy='blocks', or a smaller mesh"
            )

    def sizes(self, masks: Sequence[BlockMask]) -> SequenceSizes:
        """Returns the sizes of the sequence. Raises ValueError if the masks have other numbers of heads, or several blocks."""
        if len({mask.block_size for mask in masks}) > 1:
            raise ValueError(
                f"the masks of all layers must have one block_size, the unit that ranks own; got {masks[0].block_size} and others; "
                "compile them with one block_size, or pass patterns"
            )
        of_masks = {mask.mask_index.shape[1] for mask in masks}
        heads = max(of_masks) if self.heads is None else self.heads
        if other := of_masks - {1, heads}:
            raise ValueError(f"mask must have 1 head or {heads}; got {min(other)}; pass heads= of the attention calls")
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        return SequenceSizes(masks[0].q_len, masks[0].block_size, heads, kv_heads, self.link_rate)


class Choice(NamedTuple):
    """Holds the fastest owners of the tokens, and the strategy of each mask. seconds: of a forward pass of all layers."""

    seconds: float
    owners: Owners
    strategies: tuple[Strategy, ...]


def plan_sequence(
    masks: Sequence[BlockMask], layers: Sequence[int], rank: int, ranks: int, options: PlanOptions
) -> tuple[Choice, list[Local]]:
    """Plans one rank's part of a sequence. Returns (the choice, what the rank attends by under each mask, on the CPU). layers: how
    many layers have each mask. Raises ValueError for options that do not fit the masks."""
    sizes = options.sizes(masks)
    allowed: Sequence[Strategy] = [options.strategy] if options.strategy != "auto" else STRATEGIES
    if options.strategy == "auto" and (options.heads is None or sizes.kv_heads % ranks):
        allowed = ["blocks"]
    chunk_blocks = blocks_per_chunk(masks[0].grid.q_blocks, sizes.block_size, ranks)
    visits = [Visits.from_mask(mask, chunk_blocks) for mask in masks]
    choice = choose_strategies(visits, layers, sizes, ranks, allowed)
    local_masks: list[Local] = []
    for mask, visited, strategy in zip(masks, visits, choice.strategies, strict=True):
        if strategy == "blocks" and ranks > 1:
            local_masks.append(Route.from_assignment(choice.owners.with_visits(visited), rank, options.overlap, sizes))
        else:
            index, for_all = mask.mask_index, ranks == 1 or mask.mask_index.shape[1] == 1
            local_masks.append(mask if for_all else replace(mask, mask_index=index.chunk(ranks, 1)[rank]))
    return choice, local_masks


def choose_strategies(
    visits: Sequence[Visits], layers: Sequence[int], sizes: SequenceSizes, ranks: int, allowed: Sequence[Strategy]
) -> Choice:
    """Chooses owners of the tokens and a strategy for each mask, to minimize the time of all layers, each that of its slowest rank.
    Heads are exchanged only if each rank owns one piece of the sequence."""
    choices = []
    for owners in candidates(visits, layers, ranks):
        seconds: dict[Strategy, list[float]] = {}
        if "blocks" in allowed:
            seconds["blocks"] = [block_seconds(owners.with_visits(one), sizes) for one in visits]
        if "heads" in allowed and owners.name == CONTIGUOUS:
            seconds["heads"] = [head_seconds(one.mask, owners.blocks.shape[1], sizes, ranks) for one in visits]
        if seconds:
            by_mask = np.array(list(seconds.values()))
            strategies = tuple(list(seconds)[number] for number in by_mask.argmin(0))
            choices.append(Choice(float((by_mask.min(0) * layers).sum()), owners, strategies))
    return min(choices, key=lambda choice: choice.seconds)


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
