"""A chooser that reads the exact softmax mass, at the price of dense attention: what an exact choice loses."""

from dataclasses import dataclass

import torch

import sparse_flash as sf
from sparse_flash.choosers.features import Features
from sparse_flash.choosers.rules_torch import score_blocks
from sparse_flash.masks.grid import BlockGrid

_HELD = 1 << 27  # logits held at a time


@sf.register_chooser("true_mass")
@dataclass(frozen=True)
class TrueMass(sf.Chooser):
    """The softmax weights of all queries of a block under causal attention, summed over each block of keys. reduce: "mean", the
    mean over the queries; "max", the largest weight for any of them.
    """

    reduce: str = "mean"

    def scores(self, q: torch.Tensor, k: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
        size, until = grid.block_size, torch.arange(1, grid.q_len + 1, device=q.device) + grid.offset
        of = Features(q, k, 1, q.shape[3] ** -0.5, size, size, until, takes_max=self.reduce == "max")
        step = max(1, _HELD // (q.shape[0] * q.shape[1] * grid.kv_len * size))
        parts = [(low, min(low + step, grid.q_blocks)) for low in range(0, grid.q_blocks, step)]
        return torch.cat([score_blocks(of, grid, low, high) for low, high in parts], 2)
