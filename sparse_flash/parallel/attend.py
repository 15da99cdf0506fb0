"""Attends a rank's queries under each strategy, after a plan has checked the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from ..api.attention import attention
from ..compat.dynamo import mark_lengths_dynamic
from ..compat.pytorch import is_plain_eager
from ..core import operators
from ..core.arguments import check_mask
from ..core.call import AttentionCall, prepare
from ..core.definition import with_sinks
from ..core.variant import Variant
from ..masks.block_mask import BlockMask
from ..selection.block_selection import BlockSelection
from .calls import table_and_variant
from .exchange import all_to_all, attend_blocks
from .routes import LocalMask, Route
from .sharding import TokenShards

# The blocks of keys that each query attends to, or a function of (q, k) that chooses them.
Selected: TypeAlias = BlockSelection | BlockMask
Select: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Selected] | Selected


class BlockAttention:
    """Attends to the rank's own blocks and to fetched ones: the strategies "blocks" and "queries"."""

    def __init__(self, route: Route, device: torch.device):
        self.route, self._handle = route, route.handle()
        # The compiler reads only its length. Lengths below two would be constants to it.
        self._columns = torch.zeros(max(2, route.traffic.received), dtype=torch.int8, device=device)
        mark_lengths_dynamic(self._columns, 0)

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out, lse). call: of the rank's tokens, without a mask; its variant has dropout and sinks at most."""
        variant = call.variant or Variant()
        of_call = call.scale, call.deterministic, call.backend
        settings = self._handle, variant.seed, variant.batch_heads, *of_call, variant.dropout_p
        out, lse, _ = attend_blocks(call.q, call.k, call.v, self._columns, self.route.block_size, *settings)
        return (out, lse) if variant.sinks is None else with_sinks(out, lse, variant.sinks, None)


class HeadAttention:
    """Exchanges tokens for heads, attends all tokens of the rank's heads, and exchanges back: the strategy "heads".

    mask: of all tokens, in the order of ranks. peers: a handle. order: (q_len,) int64, the index of each token of the sequence in
    the order of ranks; None if both orders are the same.
    """

    def __init__(self, mask: LocalMask, shards: TokenShards, peers: torch.Tensor):
        self._mask, self._peers = mask.to(shards.device), peers
        self._rank, self._ranks, self._tokens = shards.rank, shards.ranks, shards.tokens
        same_order = np.array_equal(shards.all_positions.ravel(), np.arange(shards.q_len))
        self.order = None if same_order else shards._inverse

    def attend(self, call: AttentionCall, select: Select | None, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns as ``BlockAttention.attend``; lse only if asked, as it takes an exchange. select: replaces the mask."""
        q, k, v = exchange_tokens_for_heads([call.q, call.k, call.v], self._ranks, self._peers)
        variant = call.variant
        if variant is not None and variant.sinks is not None:
            variant = variant._replace(sinks=torch.unflatten(variant.sinks, 0, (self._ranks, -1))[self._rank])
        call = call.on(q, k, v)._replace(variant=variant)
        out, lse = _attend_all_tokens(call, self._mask) if select is None else self._attend_selected(call, select)
        out = exchange_heads_for_tokens(out, self._ranks, self._peers)
        return out, exchange_heads_for_tokens(lse[..., None], self._ranks, self._peers)[..., 0] if return_lse else None

    def _attend_selected(self, call: AttentionCall, select: Select) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends in the sequence's order, without padding."""
        order = self.order
        if order is None:
            return _attend_all_tokens(call, resolve_select(select, call.q, call.k))
        q, k, v = (t.index_select(2, order) for t in (call.q, call.k, call.v))
        out, lse = _attend_all_tokens(call.on(q, k, v), resolve_select(select, q, k))
        tokens = self._ranks * self._tokens
        all_out = out.new_zeros((*out.shape[:2], tokens, out.shape[3])).index_copy(2, order, out)
        return all_out, lse.new_full((*lse.shape[:2], tokens), float("-inf")).index_copy(2, order, lse)


def exchange_tokens_for_heads(tensors: list[torch.Tensor], ranks: int, handle: torch.Tensor) -> list[torch.Tensor]:
    """Exchanges tensors of (batch, heads, tokens, size) for (batch, heads of a rank, tokens of all ranks, size), at once."""
    # (ranks, tokens, batch, heads of a rank, size) each, so that tokens that arrive follow each other.
    sent = [torch.unflatten(t, 1, (ranks, -1)).permute(1, 3, 0, 2, 4) for t in tensors]
    # Heads of one size are concatenated in one copy. Heads of several sizes must be flattened first, which is another copy.
    alike = len({t.shape[3] for t in tensors}) == 1
    if not alike:
        sent = [t.flatten(3) for t in sent]
    every = all_to_all(torch.cat(sent, 3), handle).flatten(0, 1).split([t.shape[3] for t in sent], 2)
    if not alike:
        every = [torch.unflatten(t, 2, (-1, of.shape[3])) for t, of in zip(every, tensors, strict=True)]
    return [t.permute(1, 2, 0, 3) for t in every]


def exchange_heads_for_tokens(x: torch.Tensor, ranks: int, handle: torch.Tensor) -> torch.Tensor:
    """Exchanges x, (batch, heads of a rank, tokens of all ranks, size), for (batch, heads, tokens, size)."""
    parts = torch.unflatten(x, 2, (ranks, -1)).permute(2, 1, 0, 3, 4)
    return all_to_all(parts, handle).flatten(0, 1).transpose(0, 1)


def resolve_select(select: Select, q: torch.Tensor, k: torch.Tensor) -> Selected:
    chosen = select(q, k) if callable(select) else select
    if not isinstance(chosen, (BlockSelection, BlockMask)):
        raise TypeError(
            "select must be a BlockSelection or a BlockMask, or a function of (q, k) that returns one, as topk_blocks does; got "
            f"{type(chosen).__name__}"
        )
    return chosen


def _attend_all_tokens(call: AttentionCall, mask: LocalMask | Selected) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) on a rank that has all tokens of its heads."""
    given = mask.mask if isinstance(mask, LocalMask) else mask
    sinks, dropout = call.sinks, call.rest
    if dropout is None:
        # fmt: off
        out, lse = attention(*call[:3], given, scale=call.scale, sinks=sinks, return_lse=True,
                             deterministic=call.deterministic, backend=call.backend)
        # fmt: on
        return out, lse
    if isinstance(given, BlockSelection):
        raise ValueError(
            "a BlockSelection does not take dropout_p; leave it out, or choose a BlockMask, as topk_blocks with every=None does"
        )
    if isinstance(mask, LocalMask):
        table, variant = table_and_variant(mask, call.variant, call.q.is_cuda)
    else:
        check_mask(given, call.q, call.k)
        table, variant = given.kernel_table(call.q.is_cuda), call.variant
    call = call._replace(mask=given, table=table, variant=variant)
    return operators.attend(prepare(call, call.key if is_plain_eager(*call.inputs()) else None, given))
