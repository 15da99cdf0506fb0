"""From masks to one rank's numbers of a plan: on the host, and with no message to other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..masks.block_mask import BlockMask, MaskLike
from ..masks.block_selection import BlockSelection
from ..masks.cache import as_block_mask
from ..packed.picks import PackedSelection
from .assignment import Owners, Visits, chunk_blocks
from .costs import Node, SequenceSizes
from .explanation import STRATEGIES, Strategy, chosen, possible_strategies, visits_of_nodes
from .routes import BlockExchange, PartMask


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is asked for, besides masks and lengths: see ``context_parallel``."""

    heads: int | None
    kv_heads: int | None
    block_size: int
    strategy: Strategy | Literal["auto"]
    link_rate: float | tuple[float, float]
    overlap: bool | None
    keep_fetched: bool

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes per second that a rank receives: from any other, from one of its node."""
        return self.link_rate if isinstance(self.link_rate, tuple) else (self.link_rate, self.link_rate)

    def check(self, ranks: int, ranks_of_node: int, dimensions: int) -> None:
        """Raises ValueError for what cannot be. dimensions: of the mesh."""
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise ValueError(
                f"overlap must be True, False or None; got {self.overlap!r}; None takes what is estimated to be faster"
            )
        if not isinstance(self.keep_fetched, bool):
            raise ValueError(f"keep_fetched must be True or False; got {self.keep_fetched!r}")
        if self.heads is None and self.kv_heads is not None:
            raise ValueError(f"kv_heads={self.kv_heads} says nothing without heads=; pass both")
        for name, value in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer; got {value!r}")
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads; got {self.kv_heads} and {self.heads}")
        if self.strategy not in ("auto", *STRATEGIES):
            raise ValueError(f"strategy must be 'auto', 'blocks', 'queries', 'heads' or 'nodes'; got {self.strategy!r}")
        if len(self.rates) != 2 or not all(isinstance(rate, (int, float)) and rate > 0 for rate in self.rates):
            raise ValueError(
                f"link_rate must be a positive number of bytes per second, or two, between nodes and within; got {self.link_rate!r}"
            )
        if dimensions == 2 and not isinstance(self.link_rate, tuple):
            raise ValueError(
                "all ranks of a mesh share one sequence; where its two dimensions are nodes and the ranks of each, pass two rates, "
                f"link_rate=(between nodes, within); got {self.link_rate!r}; for one sequence in each row of a mesh of data and "
                "context ranks, pass mesh['cp']"
            )
        kv_heads = self.kv_heads or self.heads
        if self.strategy == "nodes" and not 1 < ranks_of_node < ranks:
            raise ValueError(
                "strategy 'nodes' needs a mesh of two dimensions, nodes and the ranks of each, with at least two of both; got "
                f"{ranks // ranks_of_node} x {ranks_of_node}; use strategy='heads' or 'blocks'"
            )
        if self.strategy not in ("heads", "nodes"):
            return
        dividing = ranks if self.strategy == "heads" else ranks_of_node
        if kv_heads is None:
            raise ValueError(f"strategy {self.strategy!r} needs heads= and kv_heads= of the attention calls")
        if kv_heads % dividing:
            raise ValueError(
                f"strategy {self.strategy!r} needs a number of ranks that divides kv_heads; got {dividing} ranks and {kv_heads} "
                "kv_heads; use strategy='blocks', or a smaller dimension of the mesh"
            )

    def sizes(self, masks: Sequence[BlockMask]) -> SequenceSizes:
        """Raises ValueError for masks of other heads."""
        of_masks = {mask.mask_index.shape[1] for mask in masks}
        heads = max(of_masks) if self.heads is None else self.heads
        if other := of_masks - {1, heads}:
            raise ValueError(f"the mask is of {min(other)} heads and heads={heads}; it must be of 1 or {heads}")
        return SequenceSizes(masks[0].q_len, masks[0].block_size, heads, heads if self.kv_heads is None else self.kv_heads)


@dataclass(frozen=True, eq=False)
class PlannedSequence:
    """One rank's numbers of a plan, on the host.

    owners: of the tokens, which all masks share. Of each mask: strategies; fits: the (batch | 1, heads | 1) that it is for; parts:
    what the rank attends by: the blocks that it gets and sends; or, where it attends from all tokens, a mask of them in the order
    of ranks; or, on one rank, the mask.
    """

    sizes: SequenceSizes
    owners: Owners
    strategies: tuple[Strategy, ...]
    fits: tuple[tuple[int, ...], ...]
    parts: tuple[BlockMask | PartMask | BlockExchange, ...]


def planned(
    masks: Sequence[BlockMask], layers: Sequence[int], rank: int, ranks: int, options: PlanOptions, ranks_of_node: int = 1
) -> PlannedSequence:
    """masks: different ones, on the CPU, of one length and block size. layers: how many layers have each. ranks_of_node: 1 in a
    mesh of one dimension. Raises ValueError for options that do not fit them."""
    sizes = options.sizes(masks)
    link_rate, node = options.rates[0], Node(ranks_of_node, options.rates[1])
    possible = possible_strategies(sizes, ranks, options.heads is not None, node)
    allowed = possible if options.strategy == "auto" else (options.strategy,)
    per = chunk_blocks(masks[0].grid.q_blocks, sizes.block_size, ranks)
    visits = [Visits.of(mask, per) for mask in masks]
    if options.strategy == "queries" and not all(one.without_shared_rows(sizes) for one in visits):
        raise ValueError(
            "strategy 'queries' is for masks in which a few block rows visit more than half of all columns, as global tokens do; "
            "use strategy='blocks'"
        )
    choice = chosen(visits, layers, sizes, ranks, link_rate, allowed, node)

    def part(one: Visits, strategy: Strategy) -> BlockMask | PartMask | BlockExchange:
        if ranks == 1:
            return one.mask
        if strategy == "heads":
            order = choice.owners.blocks.flatten()
            return PartMask.of(_heads_of(one.mask, rank, ranks), order, order)
        if strategy == "nodes":
            number, within = divmod(rank, ranks_of_node)
            mask, owners = _heads_of(one.mask, within, ranks_of_node), choice.owners.of_nodes(ranks_of_node)
            fetched_by, _ = visits_of_nodes(choice.owners, one, sizes, ranks, link_rate, node)
            share = sizes.of_share(ranks_of_node)
            return BlockExchange.of(mask, owners.under(fetched_by), number, options.overlap, share, link_rate)
        travelling = one.without_shared_rows(sizes) if strategy == "queries" else None
        return BlockExchange.of(one.mask, choice.owners.under(travelling or one), rank, options.overlap, sizes, link_rate)

    parts = tuple(part(*both) for both in zip(visits, choice.strategies, strict=True))
    return PlannedSequence(sizes, choice.owners, choice.strategies, tuple(tuple(mask.mask_index.shape) for mask in masks), parts)


def square(mask: MaskLike, q_len: int, block_size: int) -> BlockMask:
    """The mask of the whole sequence, on the CPU. Raises ValueError for one of other lengths, TypeError for a selection."""
    if isinstance(mask, (BlockSelection, PackedSelection)):
        raise TypeError(
            f"a plan is made before there are queries, and a {type(mask).__name__} is of blocks chosen from them; plan 'causal' "
            "with strategy='heads', and let plan.attention(..., select=) choose"
        )
    whole = as_block_mask(mask, q_len=q_len, kv_len=q_len, block_size=block_size).to("cpu")
    if (whole.q_len, whole.kv_len) != (q_len, q_len):
        raise ValueError(
            f"context parallelism is of self-attention over q_len={q_len} tokens; got a mask of {whole.q_len} queries and "
            f"{whole.kv_len} keys; compile it for {q_len}, or pass the pattern itself"
        )
    return whole


def _heads_of(mask: BlockMask, rank: int, ranks: int) -> BlockMask:
    """The mask of a rank's heads, where ranks exchange tokens for heads."""
    index = mask.mask_index
    return mask if index.shape[1] == 1 else replace(mask, mask_index=index.chunk(ranks, 1)[rank])


def described(masks: str, q_len: int, block_size: int, options: PlanOptions, numbers: PlannedSequence) -> dict[str, str]:
    """What must be the same on all ranks, in short words. masks: in words."""
    return {
        "mask": masks,
        "q_len": str(q_len),
        "block_size": str(block_size),
        "heads": str(options.heads),
        "kv_heads": str(options.kv_heads),
        "strategy": ", ".join(map(repr, numbers.strategies)),
        "assignment": f"{numbers.owners.name} ({short_digest(numbers.owners.blocks.tobytes())})",
        "overlap": str(options.overlap),
        "keep_fetched": str(options.keep_fetched),
    }


def short_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
