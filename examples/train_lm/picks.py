"""Measures how alike neighbouring queries of a trained model would choose their blocks of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import sparse_flash as sf

from .model import Decoder
from .parallel import World, mixed_precision

TILES = (4, 16, 64)  # queries


@dataclass(frozen=True)
class HeadPicks:
    """Summarizes the picks of a head's queries, or of the heads that share keys, in a sequence: means over the queries after its
    first eighth, which have more blocks to choose from.

    alike: the share of picks, besides a query's own block, that the query before picked too. union: by number of neighbouring
    queries, up to the number there are, how many different blocks they pick together.
    """

    layer: int
    head: int
    alike: float
    union: dict[int, float]


@torch.no_grad()
def queries_and_keys(model: Decoder, tokens: torch.Tensor, world: World) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns (q, k) of each layer as its attention gets them, (1, heads, tokens, head_dim) each. tokens: (1, tokens) int64. The
    model must not be compiled."""
    found = []

    def kept(attend):
        def attend_and_keep(q, k, v, documents):
            found.append((q.transpose(1, 2), k.transpose(1, 2)))
            return attend(q, k, v, documents)

        return attend_and_keep

    layers = [block.attention for block in model.blocks]
    for layer in layers:
        layer.attend = kept(layer.attend)
    try:
        with mixed_precision(model, world):
            model.hidden(tokens)
    finally:
        for layer in layers:
            del layer.attend  # the method of its class again
    return found


def pick_blocks(q: torch.Tensor, k: torch.Tensor, keep: int, block_size: int) -> torch.Tensor:
    """Returns (kv_heads, tokens, keep) int32, ascending, then -1: each query's own block and the best earlier blocks, by products
    with mean keys, summed over the heads that share keys."""
    return sf.topk_blocks(q, k, keep=keep, every=1, block_size=block_size, share_group=True).picks[0]


def summary(picks: torch.Tensor, block_size: int, layer: int) -> list[HeadPicks]:
    """Summarizes picks, as ``pick_blocks`` returns them, head by head."""
    tokens = picks.shape[1]
    first = max(1, tokens // 8)  # each has one before it
    own = (torch.arange(tokens, device=picks.device) // block_size)[:, None]
    rows = []
    for head, of_head in enumerate(picks):
        chosen = of_head.where(of_head != own, -1)
        now, before = chosen[first:], chosen[first - 1 : -1]
        again = ((now[:, :, None] == before[:, None, :]) & (now[:, :, None] >= 0)).any(2)
        union = {tile: _union(of_head[first:], tile) for tile in TILES if tile <= tokens - first}
        rows.append(HeadPicks(layer, head, again.sum().item() / max(1, (now >= 0).sum().item()), union))
    return rows


def _union(picks: torch.Tensor, tile: int) -> float:
    """Returns how many different blocks ``tile`` neighbouring queries pick, the mean over tiles."""
    together = picks[: len(picks) // tile * tile].reshape(-1, tile * picks.shape[1]).sort(1).values
    new = torch.ones_like(together, dtype=torch.bool)
    new[:, 1:] = together[:, 1:] != together[:, :-1]
    return (new & (together >= 0)).sum(1).float().mean().item()
