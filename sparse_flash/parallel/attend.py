"""Attends a rank's queries under each strategy, after a plan has checked the call."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..api.attention import attention
from ..compat.dynamo import mark_lengths_dynamic
from ..core.definition import with_sinks
from ..masks.block_mask import BlockMask
from ..selection.block_selection import BlockSelection
from .exchange import all_to_all, attend_blocks
from .routes import Route, make_handle
from .sharding import TokenShards

# The blocks of keys that each query attends to, or a function of (q, k) that chooses them.
Selected: TypeAlias = BlockSelection | BlockMask
Select: TypeAlias = Callable[[Tensor, Tensor], Selected] | Selected


class BlockAttention:
    """Attends to the rank's own blocks and to fetched ones: the strategy "blocks"."""

    def __init__(self, route: Route, device: torch.device):
        self.route, self._handle = route, make_handle(route)
        # The compiler reads only its length. Lengths below two would be constants to it.
        self._columns = torch.zeros(max(2, route.traffic.received), dtype=torch.int8, device=device)
        mark_lengths_dynamic(self._columns, 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
        """Returns (out, lse). q, k, v: of the rank's tokens. settings: scale, deterministic and backend of PartialAttention."""
        out, lse, _ = attend_blocks(q, k, v, self._columns, self.route.block_size, self._handle, *settings)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks, None)


class HeadAttention:
    """Exchanges tokens for heads, attends all tokens of the rank's heads, and exchanges back: the strategy "heads". Each rank owns
    one piece of the sequence, so all padding follows the last token. mask: of the whole sequence, for the rank's heads."""

    def __init__(self, mask: BlockMask, shards: TokenShards):
        self._mask, self._handle = mask.to(shards.device), make_handle(shards.group)
        self._rank, self._ranks, self._q_len = shards.rank, shards.ranks, shards.q_len
        self._padding = shards.ranks * shards.tokens - shards.q_len

    def attend(
        self, qkv: list[Tensor], select: Select | None, sinks: Tensor | None, return_lse: bool, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns as ``BlockAttention.attend``; lse only if asked, as it takes an exchange. select: replaces the mask."""
        q, k, v = (t[:, :, : self._q_len] for t in self.exchange_tokens_for_heads(qkv))
        if sinks is not None:
            options["sinks"] = torch.unflatten(sinks, 0, (self._ranks, -1))[self._rank]
        mask = self._mask if select is None else resolve_select(select, q, k)
        out, lse = attention(q, k, v, mask, return_lse=True, **options)
        if self._padding:
            out, lse = pad(out, (0, 0, 0, self._padding)), pad(lse, (0, self._padding), value=float("-inf"))
        out = self.exchange_heads_for_tokens(out)
        return out, self.exchange_heads_for_tokens(lse[..., None])[..., 0] if return_lse else None

    def exchange_tokens_for_heads(self, tensors: list[Tensor]) -> list[Tensor]:
        """Exchanges tensors of (batch, heads, tokens, size) for (batch, heads of a rank, tokens of all ranks, size)."""
        if len({t.shape[3] for t in tensors}) > 1:
            return [self.exchange_tokens_for_heads([t])[0] for t in tensors]
        # (ranks, tokens, batch, heads of a rank, size) each, so that tokens that arrive follow each other.
        sent = [torch.unflatten(t, 1, (self._ranks, -1)).permute(1, 3, 0, 2, 4) for t in tensors]
        every = all_to_all(torch.cat(sent, 3), self._handle).flatten(0, 1).split([t.shape[3] for t in sent], 2)
        return [t.permute(1, 2, 0, 3) for t in every]

    def exchange_heads_for_tokens(self, x: Tensor) -> Tensor:
        """Exchanges x, (batch, heads of a rank, tokens of all ranks, size), for (batch, heads, tokens, size)."""
        parts = torch.unflatten(x, 2, (self._ranks, -1)).permute(2, 1, 0, 3, 4)
        return all_to_all(parts, self._handle).flatten(0, 1).transpose(0, 1)


def resolve_select(select: Select, q: Tensor, k: Tensor) -> Selected:
    chosen = select(q, k) if callable(select) else select
    if not isinstance(chosen, (BlockSelection, BlockMask)):
        raise TypeError(
            "select must be a BlockSelection or a BlockMask, or a function of (q, k) that returns one, as topk_blocks does; got "
            f"{type(chosen).__name__}"
        )
    return chosen
