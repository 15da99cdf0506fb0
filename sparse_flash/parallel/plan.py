"""The public plans: a plan says which rank owns which tokens of a sequence, and attends a rank's queries to all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..api.attention import attention
from ..core.arguments import cast_for_autocast, check_tensors, check_types, resolve_deterministic, resolve_scale
from ..core.call import AttentionCall
from ..core.variant import Variant, build_variant
from ..masks.block_mask import BlockMask, MaskLike, check_batch_and_heads
from ..masks.parsing import parse
from ..masks.pattern import And, Pattern
from ..patterns import documents
from .agreement import check_agreement
from .attend import BlockAttention, HeadAttention, Select, resolve_select
from .estimates import LINK_RATE
from .exchange import all_to_all
from .peer_memory import peer_memory
from .planning import PlanKeywords, PlannedSequence, PlanOptions, Strategy, plan_sequence, to_square_mask
from .routes import BlockExchange, Peers, Route
from .sharding import TokenShards, group_of


@overload
def context_parallel(mask: MaskLike, q_len: int, mesh: DeviceMesh, **options: Unpack[PlanKeywords]) -> ContextPlan: ...


@overload
def context_parallel(
    mask: list[MaskLike] | tuple[MaskLike, ...], q_len: int, mesh: DeviceMesh, **options: Unpack[PlanKeywords]
) -> ContextPlans: ...


def context_parallel(
    mask: MaskLike | list[MaskLike] | tuple[MaskLike, ...],
    q_len: int,
    mesh: DeviceMesh,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    block_size: int = 128,
    strategy: Strategy | Literal["auto"] = "auto",
    link_rate: float = LINK_RATE,
    overlap: bool | None = None,
) -> ContextPlan | ContextPlans:
    """Plans the attention of one sequence over the ranks of a mesh. Every rank owns equally many tokens, in whole blocks. Their
    queries attend to all tokens of the sequence that the mask keeps.

    mask: a Pattern or its spec text, compiled for q_len tokens; or a square BlockMask on any device, which may have a mask for each
    head. A BlockMask is read on the host. A list gives a mask to each layer and returns ``ContextPlans``. One assignment of tokens
    then serves all layers and balances their total work. Equal masks are planned and stored once.
    q_len: tokens of the whole sequence.
    mesh: a DeviceMesh of one dimension, such as ``mesh["cp"]`` of a larger one. All of its ranks share the sequence.
    heads, kv_heads: of the attention calls; kv_heads defaults to heads. A plan that may exchange heads needs them.
    block_size: tokens on a side of a pattern's blocks, the unit that ranks own and exchange. A BlockMask has its own.
    strategy: "blocks", "queries", "heads" or "auto", as listed below.
    link_rate: bytes per second that a rank receives from others. The default was measured between two GPUs that NVLink joins.
    overlap: True makes two calls, one on the rank's own columns while fetched blocks or their gradients travel, and one on fetched
    columns. False makes one call on all columns. None takes what is estimated to be faster, for each pass, the same on all ranks.

    The strategies:

    - "blocks": a rank fetches the blocks of keys and values that its queries visit. Each pass has one exchange.
    - "queries": as "blocks", except for rows that visit more than half of all columns, such as global tokens. If these are few,
      their queries travel to all ranks instead. Each rank attends them to its own columns, and their owner merges the results.
    - "heads": ranks exchange tokens for heads before the call, and back after it. Between the exchanges, each rank has all tokens
      of some heads (arXiv:2309.14509). The number of ranks must divide kv_heads.
    - "auto": for each mask, the strategy whose slowest rank is estimated to take least time. Without heads=, heads are not
      exchanged.

    If NVLink joins the GPUs of one host, their copy engines move long messages of blocks, which leaves the multiprocessors to
    attention. Each rank then keeps memory for the longest message of any rank: the blocks that it sends, or the gradients of the
    blocks that it gets. With the environment variable SPARSE_FLASH_COPY_ENGINES=0, NCCL moves all messages.

    A collective call: all ranks of the mesh make it together, and compare their arguments on the host. Raises ValueError on every
    rank if arguments differ, or if one rank raises for an argument; TypeError for a BlockSelection.
    """
    group = group_of(mesh)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    options = PlanOptions(heads, kv_heads, block_size, strategy, link_rate, overlap)
    given = list(mask) if isinstance(mask, (list, tuple)) else [mask]
    try:
        options.check(ranks)
        if not given:
            raise ValueError("mask must name at least one mask, or be one; got an empty list")
        masks, layers = _distinct([to_square_mask(one, q_len, block_size) for one in given])
        numbers = plan_sequence(masks, layers, rank, ranks, options)
    except (TypeError, ValueError) as error:
        check_agreement(error, group)
        raise
    in_words = [_describe_mask(given[layers.index(number)], one) for number, one in enumerate(masks)]
    words = ", ".join(in_words) + (f" for layers {layers}" if isinstance(mask, (list, tuple)) else "")
    facts = {"mask": words, "q_len": str(q_len), **options.facts(), "block_size": str(masks[0].block_size), **numbers.decisions}
    check_agreement(facts, group)
    starts = [_document_starts(one) for one in given]
    plans = plans_of(numbers, options, mesh, tuple(sorted(set.intersection(*starts))))
    return plans if isinstance(mask, (list, tuple)) else plans[0]


def plans_of(numbers: PlannedSequence, options: PlanOptions, mesh: DeviceMesh, cu_seqlens: tuple[int, ...]) -> ContextPlans:
    """Makes a plan for each layer. cu_seqlens: the bounds of documents."""
    positions = numbers.owners.positions(numbers.sizes.q_len, numbers.sizes.block_size)
    device = torch.empty(0, device=mesh.device_type).device
    shards = TokenShards(numbers.sizes.q_len, positions, cu_seqlens, group_of(mesh), device)
    plans = [ContextPlan(shards, numbers, number, options) for number in range(len(numbers.masks))]
    return ContextPlans(shards, [plans[number] for number in numbers.layers])


class ContextPlan(TokenShards):
    """Holds one rank's view of a sequence that several ranks share. ``context_parallel`` and ``ContextParallel`` make plans.

    tokens: int, the tokens of this rank, the same number on every rank. Some ranks have padding at their end. A plan of one rank
    has none. q_len: tokens of the whole sequence.
    positions: (tokens,) int64 on the plan's device, each token's position in the whole sequence, ascending; 0 for padding. Rotary
    embeddings use them, for instance.
    document_positions: (tokens,) int64 on the plan's device, each token's position in its document, for a mask with documents.
    exists: (tokens,) bool on the plan's device, False for padding.
    mask: of the whole sequence, on the CPU. strategy: "blocks", "queries" or "heads". rank: this rank. ranks: their number. device:
    of the plan's tensors. overlap: (forward, backward), whether a pass makes two calls, one of which overlaps the exchange.
    """

    def __init__(self, shards: TokenShards, numbers: PlannedSequence, number: int, options: PlanOptions):
        """number: of the plan's mask among the planned masks."""
        vars(self).update(vars(shards))  # the same tensors under all masks
        self.mask, self.strategy = numbers.masks[number], numbers.strategies[number]
        self._costs, self._assigned = numbers.costs[number], numbers.owners.name
        self._sizes, self._knows_heads = numbers.sizes, options.heads is not None
        self._peers, self.overlap = Peers(self.group).handle(), (False, False)
        # On one rank, the mask itself.
        self._local: BlockMask | HeadAttention | BlockAttention
        local = numbers.local_masks[number]
        if isinstance(local, BlockExchange):
            of_device, memory = local.to(self.device), peer_memory(self.group, self.device)
            self._local = BlockAttention(Route(group=self.group, memory=memory, **vars(of_device)), self.device)
            self.overlap = local.overlap
        else:
            self._local = local.to(self.device) if isinstance(local, BlockMask) else HeadAttention(local, shards, self._peers)

    def __repr__(self) -> str:
        return (
            f"ContextPlan({self.q_len} tokens over {self.ranks} ranks, {self.tokens} on each, strategy {self.strategy!r}, "
            f"{self._assigned}; this is rank {self.rank})"
        )

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        select: Select | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
        backend: str = "auto",
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Attends this rank's queries to all tokens of the sequence, under the plan's mask. On one rank it is ``sf.attention``.

        q: (batch, heads, tokens, head_dim). k: (batch, kv_heads, tokens, head_dim). v: (batch, kv_heads, tokens, v_head_dim). All
        three hold this rank's tokens, on the plan's device.
        select: replaces the plan's mask by blocks chosen from queries, under strategy "heads" only. It is a function of (q, k) that
        returns a BlockSelection or a BlockMask, as ``topk_blocks`` does; or such a selection or mask. The function gets all q_len
        tokens in order, without padding. Rank r gets heads / ranks heads of q, from number r * heads / ranks on, and the matching
        kv_heads / ranks heads of k.
        scale, sinks, return_lse: as for ``sf.attention``.
        dropout_p: as for ``sf.attention``, the same on all ranks. The ranks together drop what one GPU drops with the first rank's
        seed. Each rank draws a seed, so all generators advance. A BlockSelection takes no dropout.
        deterministic: as for ``sf.attention``. With True, gradients have the same bits in every run with equally many ranks.
        backend: as for ``sf.attention``; "reference" under strategy "heads" only.

        Returns out, (batch, heads, tokens, v_head_dim), or (out, lse); both are differentiable in q, k, v and sinks. The gradient
        of sinks is this rank's share, as for any parameter: the sum over ranks is the whole gradient. Padding has out 0, and adds
        nothing to any gradient.

        A collective call, forward and backward: every rank of the mesh makes it, in the same order as its other calls. So does a
        rank whose loss has no valid token: its loss is then an empty sum that is connected to out. Raises ValueError for lengths
        and changes of scores, which are not supported yet, and for tensors that do not fit; TypeError if select is or returns
        another type.
        """
        check_types(q, k, v)
        q, k, v = cast_for_autocast(q, k, v)
        if isinstance(self._local, BlockMask):
            mask = self._local if select is None else resolve_select(select, q, k)
            # fmt: off
            return attention(q, k, v, mask, scale=scale, dropout_p=dropout_p, sinks=sinks, return_lse=return_lse,
                             deterministic=deterministic, backend=backend)
            # fmt: on
        self._check(q, k, v)
        by_blocks = isinstance(self._local, BlockAttention)
        if select is not None and by_blocks:
            raise ValueError(
                f"select needs all tokens of a head on one rank; this plan's strategy is {self.strategy!r}; pass strategy='heads' "
                "to context_parallel, with a number of ranks that divides kv_heads"
            )
        if backend == "reference" and by_blocks:
            raise ValueError(
                "backend 'reference' needs all keys of a query in one call; got a plan of strategy "
                f"{self.strategy!r}, whose calls get some of them; pass backend='torch', or strategy='heads' to context_parallel"
            )
        scale, deterministic = resolve_scale(scale, q.shape[3]), resolve_deterministic(deterministic)
        variant = self._build_variant(q, k, dropout_p, sinks)
        call = AttentionCall(q, k, v, None, None, scale, deterministic, backend, variant)
        local = self._local
        out, lse = local.attend(call) if isinstance(local, BlockAttention) else local.attend(call, select, return_lse)
        return out if lse is None or not return_lse else (out, lse)

    def _build_variant(self, q: torch.Tensor, k: torch.Tensor, dropout_p: float, sinks: torch.Tensor | None) -> Variant | None:
        """Returns sinks, the seed of all ranks and, if this rank has only some heads, their batch-heads. q, k: with all heads."""
        drawn = build_variant(q, k, dropout_p=dropout_p, sinks=sinks)
        if drawn is None or drawn.seed is None:  # dropout_p may round to 0
            return drawn
        batch_heads = None
        if self.strategy == "heads":
            batch, heads = q.shape[:2]
            by_rank = torch.arange(batch * heads, dtype=torch.int32, device=q.device).view(batch, self.ranks, -1)
            batch_heads = by_rank[:, self.rank].contiguous()
        seeds = all_to_all(drawn.seed.expand(self.ranks, -1), self._peers)  # by an operator, which checkpointing keeps or repeats
        return drawn._replace(seed=seeds[0], batch_heads=batch_heads)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        check_tensors(q, k, v)
        for name, tensor in (("q", q), ("k", k)):
            if tensor.shape[2] != self.tokens:
                raise ValueError(
                    f"{name} must hold the {self.tokens} tokens of this rank, padding included; got {tensor.shape[2]}; "
                    "plan.shard gives them"
                )
        if q.device != self.device:
            raise ValueError(
                f"q must be on the plan's device {self.device}; got {q.device}; make the mesh for {q.device.type}, or move q"
            )
        if self._knows_heads and (q.shape[1], k.shape[1]) != (self._sizes.heads, self._sizes.kv_heads):
            raise ValueError(
                f"q and k must have the plan's {self._sizes.heads} query and {self._sizes.kv_heads} key heads; got {q.shape[1]} "
                f"and {k.shape[1]}; pass heads= and kv_heads= of these calls to context_parallel"
            )
        check_batch_and_heads(self.mask.mask_index.shape, *q.shape[:2])

    def explain(self) -> str:
        """Returns a line for each strategy that was estimated: the time of a forward pass with head_dim 128 in 16 bits, the most
        that a rank receives, and the visited blocks of the heaviest rank / the mean. The plan takes the fastest."""
        lines = [
            f"{name:8}{1e3 * seconds:10.2f} ms,{received / 2**20:10,.1f} MiB received, heaviest / mean work {balance:.2f}"
            for name, (seconds, received, balance) in self._costs.items()
        ]
        return "\n".join([repr(self), *lines])


class ContextPlans(TokenShards, Sequence[ContextPlan]):
    """Holds the plans of a model's layers over one assignment of tokens. ``plans[i]`` is the ``ContextPlan`` of layer i, the same
    object for layers with equal masks. tokens, positions, exists, shard, unshard and its other attributes of tokens mean the same
    as in a ContextPlan."""

    def __init__(self, shards: TokenShards, by_layer: list[ContextPlan]):
        vars(self).update(vars(shards))
        self._by_layer = by_layer

    def __len__(self) -> int:
        return len(self._by_layer)

    @overload
    def __getitem__(self, layer: int) -> ContextPlan: ...
    @overload
    def __getitem__(self, layer: slice) -> list[ContextPlan]: ...

    def __getitem__(self, layer: int | slice) -> ContextPlan | list[ContextPlan]:
        return self._by_layer[layer]

    def __repr__(self) -> str:
        return f"ContextPlans of {len(self)} layers, {len(set(map(id, self)))} different; {self[0]!r}"


def _distinct(masks: list[BlockMask]) -> tuple[list[BlockMask], list[int]]:
    """Returns (the different masks, for each of ``masks`` the number of its equal among these)."""
    if other := next((mask for mask in masks if mask.block_size != masks[0].block_size), None):
        raise ValueError(
            f"the masks of all layers must have one block_size, the unit that ranks own; got {masks[0].block_size} and "
            f"{other.block_size}; compile them alike, or pass patterns"
        )
    if len(masks) == 1:
        return masks, [0]
    found = {mask.digest: mask for mask in masks}
    return list(found.values()), [list(found).index(mask.digest) for mask in masks]


def _document_starts(given: MaskLike) -> set[int]:
    """Returns the first tokens of the documents that all pairs of a pattern lie in; {0} for one document, and for a table."""
    pattern = parse(given) if isinstance(given, str) else given
    parts = pattern.operands if isinstance(pattern, And) else [pattern]
    return {0}.union(*(one.cu_seqlens[:-1] for one in parts if isinstance(one, documents)))


def _describe_mask(given: MaskLike, whole: BlockMask) -> str:
    try:
        text = given.to_spec() if isinstance(given, Pattern) else given if isinstance(given, str) else ""
    except ValueError:
        text = ""  # a pattern of a function has no text, and its repr differs from rank to rank
    return f"{whole.digest.hex()[:12]}{' of ' * bool(text)}{text}"
