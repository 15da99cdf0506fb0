"""Tokens exchanged for heads, and back: between the two, each rank holds the tokens of all in some heads."""

from __future__ import annotations

import torch

from .exchange import all_to_all


def some_heads_of_all_tokens(tensors: list[torch.Tensor], ranks: int, handle: torch.Tensor) -> list[torch.Tensor]:
    """(batch, heads of a rank, tokens of all ranks, size) of each of them, (batch, heads, tokens, size): one exchange."""
    # (ranks, tokens, batch, heads of a rank, size) each, so that all tokens of what arrives follow each other.
    sent = [t.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4) for t in tensors]
    if len({t.shape[4] for t in sent}) == 1:  # their rows are joined in one copy
        every = all_to_all(torch.cat(sent, 3), handle).flatten(0, 1).split([t.shape[3] for t in sent], 2)
        return [t.permute(1, 2, 0, 3) for t in every]
    flat = [t.flatten(3) for t in sent]
    every = all_to_all(torch.cat(flat, 3), handle).flatten(0, 1).split([t.shape[3] for t in flat], 2)
    return [t.unflatten(2, (-1, of.shape[3])).permute(1, 2, 0, 3) for t, of in zip(every, tensors, strict=True)]


def own_tokens_of_all_heads(x: torch.Tensor, ranks: int, handle: torch.Tensor) -> torch.Tensor:
    """(batch, heads, tokens, size) of x, (batch, heads of a rank, tokens of all ranks, size)."""
    parts = x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4)
    return all_to_all(parts, handle).flatten(0, 1).transpose(0, 1)
