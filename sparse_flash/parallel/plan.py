"""The public plans: a plan says which rank owns which tokens of a sequence, and attends a rank's queries to all tokens."""

from hashlib import sha256
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..api.attention import attention
from ..core.arguments import cast_for_autocast, check_tensors, check_types, resolve_deterministic, resolve_scale
from ..core.variant import build_variant
from ..masks.block_mask import BlockMask, MaskLike, check_batch_and_heads
from ..masks.parsing import parse, text_of
from ..masks.pattern import And, Pattern
from ..patterns import documents
from .attend import BlockAttention, HeadAttention, Select, resolve_select
from .estimates import LINK_RATE
from .peer_memory import peer_memory
from .planning import Local, PlanOptions, Strategy, plan_sequence, to_square_mask
from .routes import Route
from .sharding import TokenShards, check_agreement, group_of


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
) -> Any:  # a ContextPlan, or a list of them
    """Plans the attention of one sequence over the ranks of a mesh. Every rank owns equally many tokens, in whole blocks. Their
    queries attend to all tokens of the sequence that the mask keeps.

    mask: a Pattern or its spec text, compiled for q_len tokens; or a square BlockMask on any device, which may have a mask for each
    head. A BlockMask is read on the host. A list gives a mask to each layer and returns a list of plans. One assignment of tokens
    then works for all layers and balances their total work. Layers with equal masks have the same plan.
    q_len: tokens of the whole sequence.
    mesh: a DeviceMesh of one dimension, such as ``mesh["cp"]`` of a larger one. All of its ranks share the sequence.
    heads, kv_heads: of the attention calls; kv_heads defaults to heads. A plan that may exchange heads needs them.
    block_size: tokens on a side of a pattern's blocks, the unit that ranks own and exchange. A BlockMask has its own.
    strategy: "blocks", "heads" or "auto", as listed below.
    link_rate: bytes per second that a rank receives from others. The default was measured between two GPUs that NVLink joins.
    overlap: True makes two calls, one on the rank's columns while fetched blocks or their gradients travel, and one on fetched
    columns. False makes one call on all columns. None takes what is estimated to be faster, for each pass, the same on all ranks.

    The strategies:

    - "blocks": a rank fetches the blocks of keys and values that its queries visit. Each pass has one exchange.
    - "heads": ranks exchange tokens for heads before the call, and back after it. Between the exchanges, each rank has all tokens
      of some heads (arXiv:2309.14509). The number of ranks must divide kv_heads. Each rank owns one piece of the sequence.
    - "auto": for each mask, the strategy whose slowest rank is estimated to take least time. Without heads=, heads are not
      exchanged.

    If NVLink joins the GPUs of one host, their copy engines move long messages, and ranks keep memory for the longest one. With the
    environment variable SPARSE_FLASH_COPY_ENGINES=0, NCCL moves all messages.

    A collective call: all ranks of the mesh make it together, and compare their arguments on the host. Raises ValueError on every
    rank if arguments differ, or if one rank raises for an argument; TypeError for a BlockSelection.
    """
    group = group_of(mesh)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    options = PlanOptions(heads, kv_heads, block_size, strategy, link_rate, overlap)
    by_layer = mask if isinstance(mask, (list, tuple)) else [mask]
    try:
        options.check(ranks)
        if not by_layer:
            raise ValueError("mask must name at least one mask, or be one; got an empty list")
        by_layer = [parse(one) if isinstance(one, str) else one for one in by_layer]
        different = list(dict.fromkeys(by_layer))
        masks = [to_square_mask(one, q_len, block_size) for one in different]
        choice, local_masks = plan_sequence(masks, [by_layer.count(one) for one in different], rank, ranks, options)
    except Exception as error:
        check_agreement(error, group)
        raise
    layers = [different.index(one) for one in by_layer]
    words = ", ".join(map(_describe_mask, different, masks)) + (f" for layers {layers}" if len(layers) > 1 else "")
    assignment = f"{choice.owners.name} ({sha256(choice.owners.blocks.tobytes()).hexdigest()[:12]})"
    decided = {"strategy": ", ".join(choice.strategies), "assignment": assignment}
    # Links may differ, if the decisions do not.
    facts = {name: str(value) for name, value in vars(options).items() if name != "link_rate"}
    check_agreement({"mask": words, "q_len": str(q_len), **facts, "block_size": str(masks[0].block_size), **decided}, group)
    device = torch.empty(0, device=mesh.device_type).device
    starts = set.intersection(*map(_document_starts, different))
    positions = choice.owners.positions(q_len, masks[0].block_size)
    shards = TokenShards(q_len, positions, tuple(sorted(starts)), group, device)
    planned = zip(masks, choice.strategies, local_masks, strict=True)
    plans = [ContextPlan(shards, choice.owners.name, options, *one) for one in planned]
    return [plans[number] for number in layers] if isinstance(mask, (list, tuple)) else plans[0]


class ContextPlan(TokenShards):
    """Holds one rank's view of a sequence that several ranks share. ``context_parallel`` makes plans.

    tokens: of this rank, the same number on every rank, some with padding at their end. q_len: tokens of the whole sequence.
    positions: (tokens,) int64 on the plan's device, each token's position in the whole sequence, ascending; 0 for padding.
    document_positions: (tokens,) int64 on the plan's device, each token's position in its document, for a mask with documents.
    exists: (tokens,) bool on the plan's device, False for padding.
    mask: of the whole sequence, on the CPU. strategy: "blocks" or "heads". rank: this rank. ranks: their number. device: of the
    plan's tensors. overlap: (forward, backward), whether a pass makes two calls, one of which overlaps the exchange.
    """

    def __init__(self, shards: TokenShards, owners: str, options: PlanOptions, mask: BlockMask, strategy: Strategy, local: Local):
        """owners: their name. local: see ``plan_sequence``."""
        vars(self).update(vars(shards))  # the same tensors under all masks
        self.mask, self.strategy, self.overlap, self._assigned = mask, strategy, (False, False), owners
        self._heads = None if options.heads is None else (options.heads, options.kv_heads or options.heads)
        # On one rank, the mask itself.
        self._local: BlockMask | HeadAttention | BlockAttention
        if isinstance(local, Route):
            route = local.to(self.device, self.group, peer_memory(self.group, self.device))
            self._local, self.overlap = BlockAttention(route, self.device), local.overlap
        else:
            self._local = local.to(self.device) if self.ranks == 1 else HeadAttention(local, shards)

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
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
        backend: str = "auto",
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Attends this rank's queries to all tokens of the sequence, under the plan's mask. On one rank it is ``sf.attention``.

        q: (batch, heads, tokens, head_dim). k: (batch, kv_heads, tokens, head_dim). v: (batch, kv_heads, tokens, v_head_dim). All
        three hold this rank's tokens, on the plan's device.
        select: replaces the plan's mask by blocks chosen from queries, under strategy "heads" only: a BlockSelection, a BlockMask,
        or a function of (q, k) that returns one, as ``topk_blocks`` does. The function gets all q_len tokens in order, without
        padding, of the rank's heads: heads / ranks of q, from number rank * heads / ranks on, and the matching ones of k.
        scale, sinks, return_lse, deterministic, backend: as for ``sf.attention``; "reference" under strategy "heads" only. With
        deterministic=True, gradients have the same bits in every run with equally many ranks.

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
        scale, deterministic = resolve_scale(scale, q.shape[3]), resolve_deterministic(deterministic)
        options: dict[str, Any] = {"scale": scale, "deterministic": deterministic, "backend": backend}
        local = self._local
        if isinstance(local, BlockMask):
            mask = local if select is None else resolve_select(select, q, k)
            return attention(q, k, v, mask, sinks=sinks, return_lse=return_lse, **options)
        self._check(q, k, v)
        if sinks is not None:
            build_variant(q, k, sinks=sinks)  # raises if they do not fit
        if isinstance(local, HeadAttention):
            out, lse = local.attend([q, k, v], select, sinks, return_lse, **options)
            return out if lse is None else (out, lse)
        if select is not None:
            raise ValueError(
                f"select needs all tokens of a head on one rank; this plan's strategy is {self.strategy!r}; pass strategy='heads' "
                "to context_parallel, with a number of ranks that divides kv_heads"
            )
        if backend == "reference":
            raise ValueError(
                "backend 'reference' needs all keys of a query in one call; got a plan of strategy "
                f"{self.strategy!r}, whose calls get some of them; pass backend='torch', or strategy='heads' to context_parallel"
            )
        out, lse = local.attend(q, k, v, sinks, scale, deterministic, backend)
        return (out, lse) if return_lse else out

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
        if self._heads is not None and (q.shape[1], k.shape[1]) != self._heads:
            raise ValueError(
                f"q and k must have the plan's {self._heads[0]} query and {self._heads[1]} key heads; got {q.shape[1]} "
                f"and {k.shape[1]}; pass heads= and kv_heads= of these calls to context_parallel"
            )
        check_batch_and_heads(self.mask.mask_index.shape, *q.shape[:2])


def _document_starts(given: MaskLike) -> set[int]:
    """Returns the first tokens of the documents that all pairs of a pattern lie in; {0} for one document, and for a table."""
    parts = given.operands if isinstance(given, And) else [given]
    return {0}.union(*(one.cu_seqlens[:-1] for one in parts if isinstance(one, documents)))


def _describe_mask(given: MaskLike, whole: BlockMask) -> str:
    # A pattern of a function has no text, and its repr differs from rank to rank.
    text = (text_of(given) if isinstance(given, Pattern) else None) or ""
    return f"{whole.digest.hex()[:12]}{' of ' * bool(text)}{text[:100]}"
