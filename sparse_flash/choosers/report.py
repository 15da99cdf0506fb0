"""Reports what a choice of blocks loses: the kept mass and the error of some queries, against attention within the expression."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..compat.dynamo import outside_graphs
from ..core.results import compute_dtype, lse_to_subtract
from ..core.torch import without_autocast
from ..masks.block_mask import BlockMask, resolve_within
from ..masks.chooser import choices_of
from ..masks.pattern import Pattern

# Queries per sequence and head. A prime, so that positions within blocks differ: 256 queries of 32,768 would all end a block.
SAMPLED = 251


@dataclass(frozen=True, eq=False)
class ChoiceReport:
    """Reports what a choice of blocks loses on the given queries and keys, by head. See ``choose_blocks``. Prints as a table.

    Each tensor is (batch, heads) on q's device: float32, or float64 for float64 inputs.

    density: kept blocks / blocks in which ``within`` keeps a pair; 0 if there are none.
    recall: the share of softmax mass under ``within`` that the kept pairs have, on average over the sampled queries; 1 for a query
    for which ``within`` keeps no key.
    error: the L2 distance between the sampled queries' outputs under the mask and under only ``within``, divided by the L2 norm of
    the latter. None without v.

    251 queries of each sequence and head are sampled, evenly spaced; of shorter sequences, all are. Kernels' rounding is left out.
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


def _attend(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse). logits: (batch, heads, queries, keys), -inf for pairs left out. values: (batch, 1, keys, v_head_dim)."""
    lse = logits.logsumexp(3)
    return (logits - lse_to_subtract(lse)[..., None]).exp() @ values, lse


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
    chosen, seen = blocks[:, :, query // grid.block_size], torch.ones(1, dtype=torch.bool, device=q.device)
    if within is not None:
        pairs = within.bind_length(grid.kv_len).token_rule(sampled[:, None] + grid.offset, np.arange(grid.kv_len)[None])
        seen = torch.from_numpy(np.array(np.broadcast_to(pairs, (count, grid.kv_len)), bool)).to(q.device)
    rows = q[:, :, query].to(exact) * (q.shape[3] ** -0.5 if scale is None else scale)
    values, group, results = k[..., :0] if v is None else v, heads // k.shape[1], []
    with without_autocast(q):
        for head in range(heads):  # one at a time, as logits take memory
            key = slice(head // group, head // group + 1)
            logits = (rows[:, head : head + 1] @ k[:, key].to(exact).mT).masked_fill(~seen, -math.inf)
            kept = chosen[:, head : head + 1].repeat_interleave(grid.block_size, 3)[..., : grid.kv_len]
            value = values[:, key].to(exact)
            results.append((*_attend(logits, value), *_attend(logits.masked_fill(~kept, -math.inf), value)))
    dense_out, dense_lse, kept_out, kept_lse = (torch.cat(of_heads, 1) for of_heads in zip(*results, strict=True))
    recall = (kept_lse - dense_lse).clamp(max=0).exp().masked_fill(dense_lse == -math.inf, 1).mean(2)
    error = None
    if v is not None:
        lost, size = (x.norm(dim=(2, 3)) for x in (kept_out - dense_out, dense_out))
        error = lost / size.clamp(min=torch.finfo(exact).tiny)
    return ChoiceReport(density, recall, error)
