"""Exchanges tokens for heads, and back. Between the two exchanges, each rank holds all tokens of some heads."""

from __future__ import annotations

import torch

from .exchange import all_to_all


def exchange_tokens_for_heads(tensors: list[torch.Tensor], ranks: int, handle: torch.Tensor) -> list[torch.Tensor]:
    """Exchanges tensors of (batch, heads, tokens, size) for (batch, heads of a rank, tokens of all ranks, size), in one
    exchange."""
    # (ranks, tokens, batch, heads of a rank, size) each, so that tokens that arrive follow each other.
    sent = [t.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4) for t in tensors]
    # Heads of one size are concatenated in one copy. Heads of several sizes must be flattened first, which is another copy.
    alike = len({t.shape[3] for t in tensors}) == 1
    if not alike:
        sent = [t.flatten(3) for t in sent]
    every = all_to_all(torch.cat(sent, 3), handle).flatten(0, 1).split([t.shape[3] for t in sent], 2)
    if not alike:
        every = [t.unflatten(2, (-1, of.shape[3])) for t, of in zip(every, tensors, strict=True)]
    return [t.permute(1, 2, 0, 3) for t in every]


def exchange_heads_for_tokens(x: torch.Tensor, ranks: int, handle: torch.Tensor) -> torch.Tensor:
    """Exchanges x, (batch, heads of a rank, tokens of all ranks, size), for (batch, heads, tokens, size)."""
    parts = x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4)
    return all_to_all(parts, handle).flatten(0, 1).transpose(0, 1)
