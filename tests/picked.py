"""Picks of key blocks to test with, and what they keep by definition."""

from __future__ import annotations

import torch
from accepted import DEVICE


def drawn_picks(shape: tuple[int, int, int, int], every: int, block: int, q_len: int, kv_len: int, seed: int = 0) -> torch.Tensor:
    """(batch, pickers, choices, n) int32: the block of each choice's first query and earlier ones, sorted, then -1."""
    generator = torch.Generator().manual_seed(seed)
    own = ((torch.arange(shape[2]) * every + kv_len - q_len).clamp(min=0) // block)[:, None]
    picks = (torch.rand(shape, generator=generator) * (own + 1)).int()
    picks[..., 0] = own[:, 0]
    return sorted_picks(picks)


def sorted_picks(picks: torch.Tensor) -> torch.Tensor:
    """Ascending, duplicates once, then -1."""
    none = 1 << 20
    picks = picks.where(picks >= 0, none).sort(3).values
    again = torch.zeros_like(picks, dtype=torch.bool)
    again[..., 1:] = picks[..., 1:] == picks[..., :-1]
    picks = picks.where(~again, none).sort(3).values
    return picks.where(picks < none, -1).to(DEVICE, torch.int32).contiguous()


def kept_by_picks(picks: torch.Tensor, every: int, block: int, q_len: int, kv_len: int) -> torch.Tensor:
    """(batch, pickers, q_len, n, kv_len) bool: the pairs of each pick."""
    pick = picks.cpu().repeat_interleave(every, 2)[:, :, :q_len, :, None]
    key, query = torch.arange(kv_len), torch.arange(q_len)
    causal = key <= (query + kv_len - q_len)[:, None]
    return (pick >= 0) & (key // block == pick) & causal[:, None]
