"""A plan: which rank owns which tokens of a sequence, and how its queries attend to all of them."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..api.arguments import autocast, check_sinks, check_tensors, check_types, checked_scale
from ..api.attention import attention
from ..compat.dynamo import length_may_vary
from ..masks.block_mask import BlockMask, MaskLike
from ..masks.build import part_of
from ..masks.cache import as_block_mask
from ..variant.definition import with_sinks
from .agreement import check_agreement
from .assignment import Assignment
from .costs import LINK_RATE, SequenceSizes
from .exchange import Route, all_to_all, attention_of_blocks
from .explanation import STRATEGIES, ContextExplanation, Strategy, explained


def context_parallel(
    mask: MaskLike,
    q_len: int,
    mesh: DeviceMesh,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    block_size: int = 128,
    strategy: Literal["auto", "blocks", "heads"] = "auto",
    link_rate: float = LINK_RATE,
) -> ContextPlan:
    """A plan for one sequence over the ranks of a mesh: every rank owns some blocks of tokens, the same number on each, and attends
    from them to all tokens that the mask keeps.

    mask: a Pattern or its spec text, compiled for q_len tokens; or a square BlockMask on any device, which may have a mask for each
    head; it is read on the host. q_len: tokens of the whole sequence.
    mesh: a DeviceMesh of one dimension, ``mesh["cp"]`` of a larger one.
    heads, kv_heads: of the attention calls; kv_heads defaults to heads. Needed by strategy "heads", and to choose a strategy.
    block_size: tokens on a side of a pattern's blocks, the unit that ranks own and exchange; a BlockMask has its own.
    strategy: "blocks": a rank gets the blocks of keys and values that its queries visit, in one exchange forward and one backward.
    "heads": ranks exchange tokens for heads before the call and back after it, so that each attends from all tokens in some heads
    (arXiv:2309.14509); the number of ranks must divide kv_heads. "auto" takes the one whose slowest rank is estimated to take less
    time, and "blocks" where heads are not given.
    link_rate: bytes per second that a rank receives from others; the default was measured between two H200.

    A collective call: all ranks of the mesh make it together and compare, on the host, what they were given. Raises ValueError on
    every rank where they differ, or where one of them raises for an unsuitable argument.
    """
    group = _group_of(mesh)
    ranks = dist.get_world_size(group)
    try:
        whole = _square(mask, q_len, block_size)
        sizes = _sizes(whole, heads, kv_heads)
        assignment, chosen = divided(whole, sizes, ranks, strategy, link_rate, heads is not None)
    except (TypeError, ValueError) as error:
        check_agreement(error, group)
        raise
    described = _described(mask, whole, heads, kv_heads, assignment, chosen)
    check_agreement(described, group)
    return ContextPlan(whole, sizes, heads is not None, assignment, chosen, link_rate, group, _device_of(mesh))


class ContextPlan:
    """One rank's view of a sequence that several ranks share; ``context_parallel`` makes it, the same on all of them.

    tokens: int, the tokens that this rank holds. The same on every rank: some hold padding at their end. A plan for one rank holds
    all tokens, unpadded.
    positions: (tokens,) int64 on the plan's device, the place of each in the whole sequence, ascending; 0 for padding. For rotary
    embeddings, for instance.
    exists: (tokens,) bool on the plan's device, False for padding.
    strategy: "blocks" or "heads". rank, ranks: this rank, and how many there are. device: of the plan's tensors.
    mask: the BlockMask of the whole sequence, on the CPU.
    """

    def __init__(
        self,
        mask: BlockMask,
        sizes: SequenceSizes,
        knows_heads: bool,
        assignment: Assignment,
        strategy: Strategy,
        link_rate: float,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        self.mask, self.strategy, self.device = mask, strategy, device
        self.rank, self.ranks = dist.get_rank(group), assignment.ranks
        self._sizes, self._knows_heads, self._assignment = sizes, knows_heads, assignment
        self._link_rate, self._group = link_rate, group
        places = assignment.places(mask.q_len, mask.block_size)
        self.tokens = places.shape[1]
        own = torch.from_numpy(places[self.rank])
        self.exists = (own >= 0).to(device)
        self.positions = own.clamp(min=0).to(device)
        flat = places.flatten()
        inverse = np.empty(mask.q_len, np.int64)
        inverse[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        self._inverse = torch.from_numpy(inverse).to(device)
        self._route = self._routed()
        # The compiler reads its length alone.
        self._columns = torch.zeros(self._route.mask.grid.kv_blocks, dtype=torch.int8, device=device)
        length_may_vary(self._columns, 0)

    def _routed(self) -> Route:
        """This rank's part in exchanges."""
        rank, ranks, assignment = self.rank, self.ranks, self._assignment
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        if ranks == 1:
            return Route(self._group, self.mask.to(self.device), nothing, [0], [0], True)
        if self.strategy == "heads":
            order = assignment.blocks.flatten()
            mask = part_of(_heads_of(self.mask, rank, ranks), order, order)
            return Route(self._group, mask.to(self.device), nothing, [], [], True)
        sent = [assignment.sent(rank, target) for target in range(ranks)]
        sends, receives = [len(blocks) for blocks in sent], [len(assignment.sent(source, rank)) for source in range(ranks)]
        own = assignment.blocks[rank]
        mask = part_of(self.mask, own, assignment.columns(rank)).to(self.device)
        send = torch.from_numpy(np.searchsorted(own[own >= 0], np.concatenate(sent))).to(self.device)
        return Route(self._group, mask, send, sends, receives, silent=not assignment.received.any())

    def __repr__(self) -> str:
        return (
            f"ContextPlan({self.mask.q_len} tokens over {self.ranks} ranks, {self.tokens} on each, strategy {self.strategy!r}, "
            f"{self._assignment.name}; this is rank {self.rank})"
        )

    def shard(self, x: torch.Tensor, dim: int, fill: float = 0) -> torch.Tensor:
        """This rank's tokens of x, and ``fill`` for padding: x with ``tokens`` in place of q_len on dimension ``dim``.

        x: all tokens in natural order, on any device. Differentiable. Shift labels before they are sharded: the next token may be
        on another rank.
        """
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.mask.q_len:
            raise ValueError(
                f"dimension {dim} of x must hold the {self.mask.q_len} tokens of the whole sequence; got shape {tuple(x.shape)}"
            )
        if self.ranks == 1:
            return x
        padding = ~self.exists.to(x.device).view([-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())])
        return x.index_select(dim, self.positions.to(x.device)).masked_fill(padding, fill)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens of x in natural order, without padding, on every rank: x with q_len in place of ``tokens`` on ``dim``.

        x: this rank's tokens, on the plan's device; of one shape and dtype on all ranks. A collective call, and not differentiable:
        the result is detached.
        """
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
            raise ValueError(f"dimension {dim} of x must hold the {self.tokens} tokens of this rank; got shape {tuple(x.shape)}")
        x = x.detach()
        if self.ranks == 1:
            return x
        by_token = x.movedim(dim, 0).contiguous()
        every = by_token.new_empty(self.ranks * self.tokens, *by_token.shape[1:])
        dist.all_gather(list(every.chunk(self.ranks)), by_token, group=self._group)
        return every.index_select(0, self._inverse).movedim(0, dim)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
        backend: str = "auto",
        **refused: object,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """``sf.attention`` of the whole sequence under the plan's mask, for this rank's queries. On one rank it is that call.

        q: (batch, heads, tokens, head_dim). k: (batch, kv_heads, tokens, head_dim). v: (batch, kv_heads, tokens, v_head_dim): this
        rank's tokens, on the plan's device. scale, sinks, return_lse, deterministic, backend: as for ``sf.attention``. With
        deterministic=True, gradients are the same bits in every run with as many ranks.

        Returns out, (batch, heads, tokens, v_head_dim), or (out, lse); both are differentiable in q, k, v and sinks. The gradient
        of sinks is this rank's share, as that of any parameter: the sum over ranks is the whole. Padding has out 0, and adds
        nothing to any gradient.

        A collective call, forward and backward: every rank of the mesh makes it, in the same order as its other calls, also a rank
        whose loss has no valid token (a sum over none of them, still connected to its output). Dropout, lengths and changes of
        scores are not supported yet, and raise ValueError, as do tensors that do not fit.
        """
        if refused:
            raise ValueError(
                f"plan.attention does not support {', '.join(sorted(refused))}; it takes scale, sinks, return_lse, deterministic "
                "and backend; use sf.attention on one GPU for the rest"
            )
        if self.ranks == 1:
            # fmt: off
            return attention(q, k, v, self._route.mask, scale=scale, sinks=sinks, return_lse=return_lse,
                             deterministic=deterministic, backend=backend)
            # fmt: on
        check_types(q, k, v)
        q, k, v = autocast(q, k, v)
        self._check(q, k, v)
        if self.strategy == "heads":
            return self._through_heads(q, k, v, scale, sinks, return_lse, deterministic, backend)
        if sinks is not None:
            check_sinks(sinks, q)
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        scale = None if scale is None else checked_scale(scale, q.shape[3])
        out, lse = attention_of_blocks(q, k, v, self._columns, self._route, scale, deterministic, backend)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks, None)
        return (out, lse) if return_lse else out

    def _through_heads(self, q, k, v, scale, sinks, return_lse, deterministic, backend):
        """Tokens are exchanged for heads, and back."""
        ranks, handle = self.ranks, self._route.handle
        if sinks is not None:
            check_sinks(sinks, q)
            sinks = sinks.unflatten(0, (ranks, -1))[self.rank]
        # (ranks, tokens, batch, heads of a rank x head_dim) each, so that all tokens of what arrives follow each other.
        sent = [t.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4).flatten(3) for t in (q, k, v)]
        every = all_to_all(torch.cat(sent, 3), handle).flatten(0, 1).split([t.shape[3] for t in sent], 2)
        q, k, v = (t.unflatten(2, (-1, of.shape[3])).permute(1, 2, 0, 3) for t, of in zip(every, (q, k, v), strict=True))
        # fmt: off
        out, lse = attention(q, k, v, self._route.mask, scale=scale, sinks=sinks, return_lse=True,
                             deterministic=deterministic, backend=backend)
        # fmt: on
        out = self._own_tokens(out)
        return (out, self._own_tokens(lse[..., None])[..., 0]) if return_lse else out

    def _own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, heads, tokens, size) of x, (batch, heads of a rank, tokens of all ranks, size)."""
        parts = x.unflatten(2, (self.ranks, -1)).permute(2, 1, 0, 3, 4)
        return all_to_all(parts, self._route.handle).flatten(0, 1).transpose(0, 1)

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
        for name, size, wanted in zip(("batch", "heads"), self.mask.mask_index.shape, q.shape[:2], strict=True):
            if size not in (1, wanted):
                raise ValueError(f"the plan's mask has {name} {size}; q has {wanted}; it must be 1 or {wanted}")

    def explain(self, ranks: int | None = None) -> ContextExplanation:
        """What one forward pass costs each rank by strategy, beside a ring and an all-gather of all keys and values; prints as a
        table. Nothing runs.

        ranks: of the plan by default; any other number shows what as many would do. heads and kv_heads are those that the plan was
        given, else the mask's heads.
        """
        ranks = self.ranks if ranks is None else operator.index(ranks)
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1; got {ranks}")
        return explained(self.mask, self._sizes, ranks, self._link_rate, self._knows_heads)


def divided(
    mask: BlockMask,
    sizes: SequenceSizes,
    ranks: int,
    strategy: Literal["auto", "blocks", "heads"],
    link_rate: float,
    knows_heads: bool,
) -> tuple[Assignment, Strategy]:
    """(who owns what, the strategy) for a mask on the CPU. Raises ValueError for a strategy that cannot be."""
    if strategy not in ("auto", *STRATEGIES):
        raise ValueError(f"strategy must be 'auto', 'blocks' or 'heads'; got {strategy!r}")
    if not link_rate > 0:
        raise ValueError(f"link_rate must be a positive number of bytes per second; got {link_rate!r}")
    if strategy == "heads" and not knows_heads:
        raise ValueError("strategy 'heads' needs heads= and kv_heads= of the attention calls")
    if strategy == "heads" and sizes.kv_heads % ranks:
        raise ValueError(
            f"strategy 'heads' needs a number of ranks that divides kv_heads; got {ranks} ranks and {sizes.kv_heads} kv_heads; use "
            "strategy='blocks', or a smaller dimension of the mesh"
        )
    explanation = explained(mask, sizes, ranks, link_rate, knows_heads)
    chosen: Strategy = explanation.choice if strategy == "auto" else strategy
    return explanation.assignments[chosen], chosen


def _square(mask: MaskLike, q_len: int, block_size: int) -> BlockMask:
    """The mask of the whole sequence, on the CPU."""
    whole = as_block_mask(mask, q_len=q_len, kv_len=q_len, block_size=block_size).to("cpu")
    if (whole.q_len, whole.kv_len) != (q_len, q_len):
        raise ValueError(
            f"context parallelism is of self-attention over q_len={q_len} tokens; got a mask of {whole.q_len} queries and "
            f"{whole.kv_len} keys; compile it for {q_len}, or pass the pattern itself"
        )
    return whole


def _sizes(mask: BlockMask, heads: int | None, kv_heads: int | None) -> SequenceSizes:
    of_mask = mask.mask_index.shape[1]
    if heads is None and kv_heads is not None:
        raise ValueError(f"kv_heads={kv_heads} says nothing without heads=; pass both")
    count = of_mask if heads is None else heads
    of_keys = count if kv_heads is None else kv_heads
    for name, value in (("heads", count), ("kv_heads", of_keys)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer; got {value!r}")
    if count % of_keys:
        raise ValueError(f"kv_heads must divide heads; got {of_keys} and {count}")
    if of_mask not in (1, count):
        raise ValueError(f"the mask is of {of_mask} heads and heads={count}; it must be of 1 or {count}")
    return SequenceSizes(mask.q_len, mask.block_size, count, of_keys)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh; got {type(mesh).__name__}; use init_device_mesh(device_type, (ranks,))")
    if mesh.ndim != 1:
        names = ", ".join(map(repr, mesh.mesh_dim_names or ())) or "no names"
        raise ValueError(f"mesh must have one dimension; got {mesh.ndim} ({names}); name one: mesh['cp']")
    return mesh.get_group()


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.empty(0, device=mesh.device_type).device


def _heads_of(mask: BlockMask, rank: int, ranks: int) -> BlockMask:
    """The mask of a rank's heads, where ranks exchange tokens for heads."""
    index = mask.mask_index
    return mask if index.shape[1] == 1 else replace(mask, mask_index=index.chunk(ranks, 1)[rank])


def _described(
    mask: MaskLike, whole: BlockMask, heads: int | None, kv_heads: int | None, assignment: Assignment, strategy: Strategy
) -> dict[str, str]:
    """What must be the same on all ranks, in short words."""
    text = "" if isinstance(mask, BlockMask) else f" of {mask}"
    owners = hashlib.sha256(assignment.blocks.tobytes()).hexdigest()[:12]
    return {
        "mask": f"{whole.digest.hex()[:12]}{text}",
        "q_len": str(whole.q_len),
        "block_size": str(whole.block_size),
        "heads": str(heads),
        "kv_heads": str(kv_heads),
        "strategy": repr(strategy),
        "assignment": f"{assignment.name} ({owners})",
    }
