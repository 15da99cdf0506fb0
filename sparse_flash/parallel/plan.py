"""A plan: which rank owns which tokens of a sequence, and how its queries attend to all of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Literal, TypeAlias, overload

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..api.arguments import (
    autocast,
    check_deterministic,
    check_mask,
    check_sinks,
    check_tensors,
    check_types,
    checked_scale,
    select_backend,
)
from ..api.attention import attention
from ..compat.dynamo import length_may_vary
from ..dispatch import operators
from ..dispatch.call import AttentionCall
from ..masks.block_mask import BlockMask, MaskLike, check_batch_and_heads
from ..masks.block_selection import BlockSelection
from ..masks.pattern import Pattern
from ..variant.definition import with_sinks
from ..variant.variant import Variant, checked_variant
from .agreement import check_agreement
from .calls import walked_of
from .costs import LINK_RATE, Node
from .exchange import attention_of_blocks, exchange_blocks, seed_of_first_rank
from .explanation import ContextExplanation, Strategy, explained
from .heads import own_tokens_of_all_heads, some_heads_of_all_tokens
from .meshes import device_of, group_of, ranks_of_node_of
from .planning import PlannedSequence, PlanOptions, described, planned, square
from .routes import BlockExchange, Overlap, PartMask, Peers, Route
from .sharding import TokenShards

# (q, k) -> which blocks of keys queries attend to
BlockChoice: TypeAlias = Callable[[torch.Tensor, torch.Tensor], BlockSelection | BlockMask]


@overload
def context_parallel(
    mask: MaskLike,
    q_len: int,
    mesh: DeviceMesh,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    block_size: int = 128,
    strategy: Strategy | Literal["auto"] = "auto",
    link_rate: float | tuple[float, float] = LINK_RATE,
    overlap: bool | None = None,
    keep_fetched: bool = True,
) -> ContextPlan: ...


@overload
def context_parallel(
    mask: list[MaskLike] | tuple[MaskLike, ...],
    q_len: int,
    mesh: DeviceMesh,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    block_size: int = 128,
    strategy: Strategy | Literal["auto"] = "auto",
    link_rate: float | tuple[float, float] = LINK_RATE,
    overlap: bool | None = None,
    keep_fetched: bool = True,
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
    link_rate: float | tuple[float, float] = LINK_RATE,
    overlap: bool | None = None,
    keep_fetched: bool = True,
) -> ContextPlan | ContextPlans:
    """A plan for one sequence over the ranks of a mesh: every rank owns some blocks of tokens, the same number on each, and attends
    from them to all tokens that the mask keeps.

    mask: a Pattern or its spec text, compiled for q_len tokens; or a square BlockMask on any device, which may have a mask for each
    head; it is read on the host. A list gives a mask to each layer and returns ``ContextPlans``: one assignment of tokens serves
    all layers, balanced by their sum; equal masks are planned and stored once. q_len: tokens of the whole sequence.
    mesh: a DeviceMesh of one dimension, ``mesh["cp"]`` of a larger one, or of two with names, ``mesh["node", "cp"]``: the nodes and
    the ranks of each. All its ranks share the sequence.
    heads, kv_heads: of the attention calls; kv_heads defaults to heads. Needed to exchange heads, and to choose that.
    block_size: tokens on a side of a pattern's blocks, the unit that ranks own and exchange; a BlockMask has its own.
    strategy: "blocks": a rank gets the blocks of keys and values that its queries visit, in one exchange forward and one backward.
    "queries": as that, but where a few rows visit more than half of all columns, as those of global tokens do, their queries travel
    to all ranks; each attends them to its own columns, and their owner joins the parts.
    "heads": ranks exchange tokens for heads before the call and back after it, so that each attends from all tokens in some heads
    (arXiv:2309.14509); the number of ranks must divide kv_heads. "nodes", for a mesh of two dimensions: the ranks of a node
    exchange tokens for heads, and fetch blocks of those heads from other nodes, or send queries as above where that is estimated to
    be faster; the ranks of a node must divide kv_heads. "auto"
    takes the one whose slowest rank is estimated to take least time, for each mask; it exchanges no heads where they are not given.
    link_rate: bytes per second that a rank receives from others; the default was measured between two H200, and
    ``measured_link_rate`` measures other links. A mesh of two dimensions needs two: (from other nodes, from ranks of its own).
    overlap: whether a rank attends its own columns while fetched blocks, or their gradients, travel: in two calls, where True, in
    place of one on all columns. None takes what is estimated to be faster, for each pass and rank by itself.
    keep_fetched: whether fetched blocks are kept for the backward pass; if not, they are fetched again, and between the passes take
    no memory.

    Between GPUs of one host that NVLink joins, blocks are copied by the GPUs' copy engines, which leave the multiprocessors to
    attention; each rank then keeps memory for the longest message of any rank: of blocks that it sends, or of gradients of those
    that it gets. The environment variable SPARSE_FLASH_COPY_ENGINES=0 leaves them to NCCL.

    A collective call: all ranks of the mesh make it together and compare, on the host, what they were given. Raises ValueError on
    every rank where they differ, or where one of them raises for an unsuitable argument; TypeError for a BlockSelection.
    """
    group, ranks_of_node = group_of(mesh), ranks_of_node_of(mesh)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    options = PlanOptions(heads, kv_heads, block_size, strategy, link_rate, overlap, keep_fetched)
    given = list(mask) if isinstance(mask, (list, tuple)) else [mask]
    try:
        options.check(ranks, ranks_of_node, mesh.ndim)
        if not given:
            raise ValueError("mask must name at least one mask, or be one; got an empty list")
        masks, layers = _distinct([square(one, q_len, block_size) for one in given])
        numbers = planned(masks, [layers.count(number) for number in range(len(masks))], rank, ranks, options, ranks_of_node)
    except (TypeError, ValueError) as error:
        check_agreement(error, group)
        raise
    in_words = [_in_words(given[layers.index(number)], one) for number, one in enumerate(masks)]
    words = ", ".join(in_words) + (f" for layers {layers}" if isinstance(mask, (list, tuple)) else "")
    check_agreement(described(words, q_len, masks[0].block_size, options, numbers), group)
    plans = plans_of(numbers, layers, options, masks.__getitem__, mesh)
    return plans if isinstance(mask, (list, tuple)) else plans[0]


def plans_of(
    numbers: PlannedSequence,
    layers: list[int],
    options: PlanOptions,
    whole: Callable[[int], BlockMask],
    mesh: DeviceMesh,
    cu_seqlens: tuple[int, ...] = (0,),
) -> ContextPlans:
    """layers: the number of each layer's mask among those that were planned. whole: gives a mask by its number, on the CPU.
    cu_seqlens: of the documents; one by default."""
    places = numbers.owners.places(numbers.sizes.q_len, numbers.sizes.block_size)
    shards = TokenShards(numbers.sizes.q_len, places, cu_seqlens, group_of(mesh), device_of(mesh))
    plans = [ContextPlan(shards, numbers, number, options, partial(whole, number), mesh) for number in range(len(numbers.parts))]
    return ContextPlans(shards, [plans[number] for number in layers])


class ContextPlan(TokenShards):
    """One rank's view of a sequence that several ranks share; ``context_parallel`` makes it, the same on all of them.

    tokens: int, the tokens that this rank holds. The same on every rank: some hold padding at their end. A plan for one rank holds
    all tokens, unpadded. q_len: tokens of the whole sequence.
    positions: (tokens,) int64 on the plan's device, the place of each in the whole sequence, ascending; 0 for padding. For rotary
    embeddings, for instance. document_positions: the same, the place of each in its document, for a plan of ``ContextParallel``.
    exists: (tokens,) bool on the plan's device, False for padding.
    strategy: "blocks", "queries", "heads" or "nodes". rank, ranks: this rank, and how many there are. device: of its tensors.
    overlap: (forward, backward), whether ranks attend their own columns while blocks travel. keep_fetched: as given.
    """

    def __init__(
        self,
        shards: TokenShards,
        numbers: PlannedSequence,
        number: int,
        options: PlanOptions,
        whole: Callable[[], BlockMask],
        mesh: DeviceMesh,
    ):
        """number: of the mask among those that were planned. whole: gives the mask, on the CPU."""
        vars(self).update(vars(shards))  # the same tensors under all masks
        self.strategy, self.keep_fetched = numbers.strategies[number], options.keep_fetched
        self._sizes, self._owners, self._fits = numbers.sizes, numbers.owners, numbers.fits[number]
        self._knows_heads, self._rates, self._whole = options.heads is not None, options.rates, whole
        self._ranks_of_node = ranks_of_node_of(mesh)
        part = numbers.parts[number]
        self._one_rank = part.to(self.device) if isinstance(part, BlockMask) else None
        # Of the call between exchanges, where all tokens are on the rank.
        self._gathered = part.to(self.device) if isinstance(part, PartMask) else None
        # Where each token of the sequence lies in those of all ranks; None where they lie in order.
        in_order = self.ranks == 1 or np.array_equal(self.places.ravel(), np.arange(self.q_len))
        self._order = None if in_order or self.strategy != "heads" else shards._inverse
        across = mesh.get_group(0) if self.strategy == "nodes" else self.group
        self._route = Route.on(part, across, self.device) if isinstance(part, BlockExchange) else None
        self._route_handle = None if self._route is None else self._route.handle()
        # With those that exchange tokens for heads: how many, and the handle of their group.
        self._sharing, self._peers = 1, None
        if self.strategy == "heads" and self.ranks > 1:
            self._sharing, self._peers = self.ranks, Peers(self.group).handle()
        elif self.strategy == "nodes":
            self._sharing, self._peers = self._ranks_of_node, Peers(mesh.get_group(1)).handle()
        self._everyone = Peers(self.group).handle()
        self.overlap = self._route.overlap if self._route else Overlap(False, False)
        # The compiler reads its length alone; it takes lengths below two for constants.
        self._columns = torch.zeros(max(2, self._route.received if self._route else 0), dtype=torch.int8, device=self.device)
        length_may_vary(self._columns, 0)

    @cached_property
    def mask(self) -> BlockMask:
        """The mask of the whole sequence, on the CPU."""
        return self._whole()

    def __repr__(self) -> str:
        return (
            f"ContextPlan({self.q_len} tokens over {self.ranks} ranks, {self.tokens} on each, strategy {self.strategy!r}, "
            f"{self._owners.name}; this is rank {self.rank})"
        )

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        select: BlockChoice | BlockSelection | BlockMask | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
        backend: str = "auto",
        **refused: object,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """``sf.attention`` of the whole sequence under the plan's mask, for this rank's queries. On one rank it is that call.

        q: (batch, heads, tokens, head_dim). k: (batch, kv_heads, tokens, head_dim). v: (batch, kv_heads, tokens, v_head_dim): this
        rank's tokens, on the plan's device. scale, dropout_p, sinks, return_lse, deterministic, backend: as for ``sf.attention``.
        With deterministic=True, gradients are the same bits in every run with as many ranks. dropout_p: the same on all ranks. They
        drop together what one GPU drops with the first rank's seed; each rank draws one, so all generators advance. Backend
        "reference" is for strategy "heads" only.
        select: blocks chosen from queries, in place of the plan's mask, under strategy "heads" only. A function of (q, k) that
        returns a BlockSelection, or a BlockMask, as ``topk_blocks`` does: it gets all q_len tokens in order, without padding, in
        the rank's heads: the next heads / ranks of q for each rank, and kv_heads / ranks of k. Or such a selection or mask itself.
        Dropout is for a BlockMask.

        Returns out, (batch, heads, tokens, v_head_dim), or (out, lse); both are differentiable in q, k, v and sinks. The gradient
        of sinks is this rank's share, as that of any parameter: the sum over ranks is the whole. Padding has out 0, and adds
        nothing to any gradient.

        A collective call, forward and backward: every rank of the mesh makes it, in the same order as its other calls, also a rank
        whose loss has no valid token (a sum over none of them, still connected to its output). Lengths and changes of scores are
        not supported yet, and raise ValueError, as do tensors that do not fit. TypeError for a choice of another type.
        """
        if refused:
            raise ValueError(
                f"plan.attention does not support {', '.join(sorted(refused))}; it takes select, scale, dropout_p, sinks, "
                "return_lse, deterministic and backend; use sf.attention on one GPU for the rest"
            )
        check_types(q, k, v)
        q, k, v = autocast(q, k, v)
        if self.ranks == 1:
            mask = self._one_rank if select is None else _chosen(select, q, k)
            # fmt: off
            return attention(q, k, v, mask, scale=scale, dropout_p=dropout_p, sinks=sinks, return_lse=return_lse,
                             deterministic=deterministic, backend=backend)
            # fmt: on
        self._check(q, k, v)
        if select is not None and self.strategy != "heads":
            raise ValueError(
                "select needs all tokens of a head on one rank, as where heads are exchanged for tokens; this plan's strategy is "
                f"{self.strategy!r}; pass strategy='heads' to context_parallel, with a number of ranks that divides kv_heads"
            )
        if backend == "reference" and self._route is not None:
            raise ValueError(
                "backend 'reference' computes gradients from the softmax of the keys that it gets, and here a call gets a part of "
                "them; pass backend='torch', or strategy='heads' to the plan"
            )
        if sinks is not None:
            check_sinks(sinks, q)
        dropout = self._dropout(q, k, dropout_p) if dropout_p else None
        if self._peers is None:
            out, lse = self._between(q, k, v, None, scale, dropout, sinks, deterministic, backend)
            return (out, lse) if return_lse else out
        ranks, handle = self._sharing, self._peers
        if sinks is not None:
            sinks = sinks.unflatten(0, (ranks, -1))[self.rank % ranks]
        q, k, v = some_heads_of_all_tokens([q, k, v], ranks, handle)
        out, lse = self._between(q, k, v, select, scale, dropout, sinks, deterministic, backend)
        out = own_tokens_of_all_heads(out, ranks, handle)
        return (out, own_tokens_of_all_heads(lse[..., None], ranks, handle)[..., 0]) if return_lse else out

    def _dropout(self, q: torch.Tensor, k: torch.Tensor, dropout_p: float) -> Variant | None:
        """The seed of all ranks and, where this one attends in some heads, their lines. q, k: in all heads."""
        drawn = checked_variant(q, k, dropout_p=dropout_p)
        if drawn is None:  # too small a number
            return None
        assert drawn.seed is not None
        lines = None
        if self._sharing > 1:
            batch, heads = q.shape[:2]
            every = torch.arange(batch * heads, dtype=torch.int32, device=q.device).view(batch, self._sharing, -1)
            lines = every[:, self.rank % self._sharing].contiguous()
        return replace(drawn, seed=seed_of_first_rank(drawn.seed, self._everyone), lines=lines)

    def _between(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        select: BlockChoice | BlockSelection | BlockMask | None,
        scale: float | None,
        dropout: Variant | None,
        sinks: torch.Tensor | None,
        deterministic: bool | None,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), where tokens have been exchanged for heads, or stay where they are."""
        check_deterministic(deterministic)
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if select is not None:
            q, k, v = (_in_order(t, self._order) for t in (q, k, v))
            out, lse = _of_all_tokens(q, k, v, _chosen(select, q, k), scale, dropout, sinks, deterministic, backend)
            tokens = self.ranks * self.tokens
            return _from_order(out, self._order, tokens, 0.0), _from_order(lse, self._order, tokens, float("-inf"))
        if self._gathered is not None:
            return _of_all_tokens(q, k, v, self._gathered, scale, dropout, sinks, deterministic, backend)
        assert self._route is not None and self._route_handle is not None
        scale = None if scale is None else checked_scale(scale, q.shape[3])
        options = self._route.block_size, self.keep_fetched, scale, deterministic, backend
        out, lse = attention_of_blocks(q, k, v, self._columns, self._route_handle, *options, dropout)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks, None)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        check_tensors(q, k, v)
        for name, tensor in (("q", q), ("k", k)):
            if tensor.shape[2] != self.tokens:
                raise ValueError(
                    f"{name} must hold the {self.tokens} tokens of this rank, padding included; got {tensor.shape[2]}; "
                    "plan.shard gives them"
                )
        if q.device != self.device:
            raise ValueError(f"the plan is on {self.device} and q on {q.device}; make the mesh for {q.device.type}, or move q")
        if self._knows_heads and (q.shape[1], k.shape[1]) != (self._sizes.heads, self._sizes.kv_heads):
            raise ValueError(
                f"the plan is for {self._sizes.heads} query and {self._sizes.kv_heads} key heads; got {q.shape[1]} and {k.shape[1]}"
            )
        check_batch_and_heads(self._fits, *q.shape[:2])

    def explain(self, ranks: int | None = None, ranks_of_node: int | None = None) -> ContextExplanation:
        """What one forward pass costs each rank by strategy, beside a ring and an all-gather of all keys and values; prints as a
        table. Nothing runs.

        ranks: of the plan by default; any other number shows what as many would do, with this mask in all layers. ranks_of_node:
        those of the mesh's second dimension, also by default; 1 is for a mesh of one. heads and kv_heads are those that the plan
        was given, else the mask's heads.
        """
        ranks = self.ranks if ranks is None else operator.index(ranks)
        of_node = self._ranks_of_node if ranks_of_node is None else operator.index(ranks_of_node)
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1; got {ranks}")
        if of_node < 1 or ranks % of_node:
            raise ValueError(f"ranks_of_node must divide the {ranks} ranks; got {of_node}")
        owners = self._owners if ranks == self.ranks else None
        rate, near = self._rates
        return explained(self.mask, self._sizes, ranks, rate, self._knows_heads, owners, Node(of_node, near))


@torch.no_grad()
def exchange_alone(plan: ContextPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Exchanges what a forward pass of ``plan.attention`` does, and computes nothing: to time that part. v: with q's head_dim.

    A collective call, under strategies "blocks" and "heads"; the others raise ValueError.
    """
    if plan._peers is not None and plan.strategy == "heads":
        q, *_ = some_heads_of_all_tokens([q, k, v], plan._sharing, plan._peers)
        own_tokens_of_all_heads(q, plan._sharing, plan._peers)  # as out would return
    elif plan._route is not None and plan.strategy == "blocks":
        exchange_blocks(k, v, plan._route)
    elif plan.ranks > 1:
        raise ValueError(f"strategy {plan.strategy!r} exchanges between its calls; 'blocks' and 'heads' can be told apart")


class ContextPlans(TokenShards, Sequence[ContextPlan]):
    """The plans of a model's layers over one assignment of tokens: ``plans[i]`` is the ``ContextPlan`` of layer i, the same object
    for layers with equal masks. tokens, positions, exists, shard, unshard and the rest of the tokens are as of a ContextPlan."""

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


def _chosen(select: BlockChoice | BlockSelection | BlockMask, q: torch.Tensor, k: torch.Tensor) -> BlockSelection | BlockMask:
    found = select(q, k) if callable(select) else select
    if not isinstance(found, (BlockSelection, BlockMask)):
        raise TypeError(
            "select must be a BlockSelection or a BlockMask, or a function of (q, k) that returns one, as topk_blocks does; got "
            f"{type(found).__name__}"
        )
    return found


def _in_order(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """x, (batch, heads, tokens of all ranks, size), with the sequence's tokens alone, in their order."""
    return x if order is None else x.index_select(2, order)


def _from_order(x: torch.Tensor, order: torch.Tensor | None, tokens: int, fill: float) -> torch.Tensor:
    """The reverse; padding gets ``fill``."""
    return x if order is None else x.new_full((*x.shape[:2], tokens, *x.shape[3:]), fill).index_copy(2, order, x)


def _of_all_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: PartMask | BlockSelection | BlockMask,
    scale: float | None,
    dropout: Variant | None,
    sinks: torch.Tensor | None,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), where a rank has all tokens of its heads."""
    if dropout is None:
        given = mask.mask if isinstance(mask, PartMask) else mask
        # fmt: off
        out, lse = attention(q, k, v, given, scale=scale, sinks=sinks, return_lse=True, deterministic=deterministic,
                             backend=backend)
        # fmt: on
        return out, lse
    if isinstance(mask, BlockSelection):
        raise ValueError(
            "a BlockSelection does not take dropout_p; leave it out, or choose a BlockMask, as topk_blocks with every=None does"
        )
    if isinstance(mask, PartMask):
        given, (walked, variant) = mask.mask, walked_of(mask, dropout, q.is_cuda)
    else:
        check_mask(mask, q, k)
        given, walked, variant = mask, mask.walked(q.is_cuda), dropout
    scale = checked_scale(scale, q.shape[3])
    call = AttentionCall(q, k, v, given, walked, scale, deterministic, backend, variant, None, True, None, None)
    out, lse = operators.attention(call, select_backend(call))
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks, None)


def _distinct(masks: list[BlockMask]) -> tuple[list[BlockMask], list[int]]:
    """(the different masks, for each of ``masks`` the number of its equal)"""
    if other := next((mask for mask in masks if mask.block_size != masks[0].block_size), None):
        raise ValueError(
            f"the masks of all layers must have one block_size, the unit that ranks own; got {masks[0].block_size} and "
            f"{other.block_size}; compile them alike, or pass patterns"
        )
    if len(masks) == 1:
        return masks, [0]
    found = {mask.digest: mask for mask in masks}
    return list(found.values()), [list(found).index(mask.digest) for mask in masks]


def _in_words(given: MaskLike, whole: BlockMask) -> str:
    try:
        text = given.to_spec() if isinstance(given, Pattern) else given if isinstance(given, str) else ""
    except ValueError:
        text = ""  # a pattern of a function has no text, and its repr differs from rank to rank
    return f"{whole.digest.hex()[:12]}{' of ' * bool(text)}{text}"
