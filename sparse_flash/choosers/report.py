"""Reports what a choice of blocks loses: the kept mass and the error of some queries, against attention within the expression."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..compat.dynamo import outside_graphs
from ..core.results import compute_dtype, lse_to_subtract, merge_results
from ..core.torch import without_autocast
from ..masks.block_mask import BlockMask, resolve_within
from ..masks.chooser import choices_of
from ..masks.grid import BlockGrid
from ..masks.pattern import Pattern

# Queries per sequence and head. A prime, so that positions within blocks differ: 256 queries of 32,768 would all end a block.
SAMPLED = 251
_HELD = 1 << 24  # logits held at a time


@dataclass(frozen=True, eq=False)
class ChoiceReport:
    """Says what a choice of blocks loses on its own queries and keys, by head. See ``choose_blocks``. Prints as a table.

    Each tensor is (batch, heads) on q's device: float32, or float64 for float64 inputs.

    density: kept blocks / blocks in which ``within`` keeps a pair; 0 if there are none. Blocks that are kept in any case count as
    kept. Each block counts as one, even if ``within`` keeps few of its pairs.
    recall: the share of softmax mass under ``within`` that the kept pairs have, on average over the sampled queries; 1 for a query
    for which ``within`` keeps no key.
    error: the L2 distance between the sampled queries' outputs under the mask and under ``within`` alone, divided by the L2 norm of
    the latter. None without v.

    251 queries of each sequence and head are sampled, evenly spaced; of shorter sequences, all are. Results are computed by the
    definition in float32 or wider, so the rounding of kernels is not included.
    """

    density: Tensor
    recall: Tensor
    error: Tensor | None

    def __str__(self) -> str:
        lines = ["         mean    worst head"]
        for name, values in (("density", self.density), ("recall", self.recall), ("error", self.error)):
            if values is not None:
                worst = values.argmin() if name == "recall" else values.argmax()
                batch, head = divmod(int(worst), values.shape[1])
                lines.append(f"{name:<7}  {values.mean():.4f}  {values[batch, head]:.4f} (batch {batch}, head {head})")
        return "\n".join(lines)


def _attend(before: tuple[Tensor, Tensor], logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys before and these. logits: (batch, heads, queries, keys), -inf for pairs left out. values: as v."""
    lse = logits.logsumexp(3)
    weights = (logits - lse_to_subtract(lse)[..., None]).exp().view(*values.shape[:2], -1, logits.shape[3])
    return merge_results(*before, (weights @ values).view(before[0].shape), lse)


def _kept_pairs(within: Pattern, queries: np.ndarray, keys: slice, grid: BlockGrid) -> Tensor:
    """(queries, keys) bool on the CPU."""
    key = np.arange(keys.start, keys.stop)
    kept = within.bind_length(grid.kv_len).token_rule(queries[:, None] + grid.offset, key[None])
    return torch.from_numpy(np.array(np.broadcast_to(kept, (len(queries), len(key))), bool))


@outside_graphs
@torch.no_grad()
def report_of(spec: Pattern | str, mask: BlockMask, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None) -> ChoiceReport:
    """The report of the mask that an expression chose; q, k, v and scale are as in ``choose_blocks``."""
    within, grid, (batch, heads) = choices_of(spec)[0].within, mask.grid, q.shape[:2]
    exact = compute_dtype(q)
    blocks = mask.kept_blocks().expand(batch, heads, -1, -1)
    most = resolve_within(within, grid, q.device).kept_blocks().sum()
    density = blocks.sum((2, 3)).to(exact) / most.clamp(min=1)

    count = min(SAMPLED, grid.q_len)
    sampled = (2 * np.arange(count) + 1) * grid.q_len // (2 * count)  # the middles of equal parts of the sequence
    query = torch.from_numpy(sampled).to(q.device)
    blocks = blocks[:, :, query // grid.block_size]
    # The queries of heads that share keys are rows of one product.
    rows = q[:, :, query].to(exact).reshape(batch, k.shape[1], -1, q.shape[3]) * (q.shape[3] ** -0.5 if scale is None else scale)
    values = k[..., :0] if v is None else v
    dense = kept = rows.new_zeros(batch, heads, count, values.shape[3]), rows.new_full((batch, heads, count), -math.inf)
    step = max(1, _HELD // (batch * heads * count * grid.block_size))
    with without_autocast(q):
        for first in range(0, grid.kv_blocks, step):
            keys = slice(first * grid.block_size, min((first + step) * grid.block_size, grid.kv_len))
            logits = (rows @ k[:, :, keys].to(exact).mT).view(batch, heads, count, -1)
            if within is not None:
                logits = logits.masked_fill(~_kept_pairs(within, sampled, keys, grid).to(q.device), -math.inf)
            here = values[:, :, keys].to(exact)
            dense = _attend(dense, logits, here)
            chosen = blocks[..., first : first + step].repeat_interleave(grid.block_size, 3)[..., : logits.shape[3]]
            kept = _attend(kept, logits.masked_fill(~chosen, -math.inf), here)
    (dense_out, dense_lse), (kept_out, kept_lse) = dense, kept
    recall = (kept_lse - dense_lse).clamp(max=0).exp().masked_fill(dense_lse == -math.inf, 1).mean(2)
    error = None
    if v is not None:
        lost, size = (x.norm(dim=(2, 3)) for x in (kept_out - dense_out, dense_out))
        error = lost / size.clamp(min=torch.finfo(exact).tiny)
    return ChoiceReport(density, recall, error)
