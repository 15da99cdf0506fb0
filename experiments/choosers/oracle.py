"""A chooser that reads the exact softmax mass, at the price of dense attention: what an exact choice loses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import sparse_flash as sf
from sparse_flash.masks.grid import BlockGrid

_HELD = 1 << 27  # logits held at a time


@sf.register_chooser("true_mass")
@dataclass(frozen=True)
class TrueMass(sf.Chooser):
    """The softmax weights of all queries of a block under causal attention, summed over each block of keys. reduce: "mean" by
    default, the mean over the queries; "max", the largest weight for any of them.
    """

    def scores(self, q: torch.Tensor, k: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
        size = grid.block_size
        if grid.q_len % size or grid.kv_len != grid.q_len:
            raise ValueError(f"true_mass takes as many keys as queries, in whole blocks of {size}; got {grid.q_len}, {grid.kv_len}")
        group = q.shape[1] // k.shape[1]
        queries, keys = q.float().unflatten(1, (k.shape[1], group)), k.float()[:, :, None]
        position = torch.arange(grid.kv_len, device=q.device)
        step = max(1, _HELD // (q.shape[0] * q.shape[1] * grid.kv_len * size)) * size
        made = q.new_zeros(*q.shape[:2], *grid.shape, dtype=torch.float32)
        for first in range(0, grid.q_len, step):
            stop = min(first + step, grid.q_len)
            logits = queries[:, :, :, first:stop] @ keys[..., :stop, :].mT * q.shape[3] ** -0.5
            hidden = position[:stop] > position[first:stop, None]
            weights = logits.flatten(1, 2).masked_fill(hidden, -math.inf).softmax(-1)
            by_block = weights.unflatten(3, (-1, size)).sum(4).unflatten(2, (-1, size))
            reduced = by_block.amax(3) if self.reduction == "max" else by_block.mean(3)
            made[:, :, first // size : stop // size, : stop // size] = reduced
        return made
