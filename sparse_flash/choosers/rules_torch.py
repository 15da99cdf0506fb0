"""Scores and rules in PyTorch operations of fixed shapes: the definition of what ``kernels`` stream."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.results import compute_dtype, lse_to_subtract
from ..masks.grid import BlockGrid
from .features import Features

_ROUNDING = 1e-6  # 0.07 * 100 is 7.000000000000001, and must not become 8


class Limits(NamedTuple):
    """The part of a choice that does not depend on queries and keys. allowed, forced: (q_blocks, kv_blocks) bool, which blocks may
    be kept, and which are in any case; bits for kernels. counts: (q_blocks,) int64, how many blocks of a row may be kept."""

    allowed: Tensor
    forced: Tensor
    counts: Tensor
    made: dict[tuple[str, int | float, int], Tensor]

    def numbers(self, rule: str, number: int | float, heads: int) -> Tensor:
        """``count_kept_blocks`` of all rows in int32, as kernels take them, made once."""
        key = rule, number, heads
        if key not in self.made:
            self.made[key] = count_kept_blocks(rule, number, self.counts, heads).to(torch.int32)
        return self.made[key]


def score_blocks(features: Features, grid: BlockGrid, low: int, high: int) -> Tensor:
    """Scores of the blocks of queries low .. high - 1: (batch, heads, high - low, kv_blocks), float32 or wider."""
    per_q, per_kv, span = features.per_q_block, features.per_kv_block, features.span
    rows, until = slice(low * per_q, min(high * per_q, features.row_count)), features.until
    exact = compute_dtype(features.rows)
    queries = _in_spans(features.rows.to(exact), span).flip(3)[:, :, rows].flatten(3)
    keys = _in_spans(features.columns.to(exact), span).flatten(3)
    group = queries.shape[1] // keys.shape[1]
    logits = (torch.unflatten(queries, 1, (keys.shape[1], group)) @ keys[:, :, None].mT).flatten(1, 2) * features.factor
    column = torch.arange(features.column_count, device=logits.device)
    hidden, existing = column >= until[rows, None], torch.full((1, 1, 1), features.row_count, device=column.device)
    if features.bounds is not None:
        first, stop, row_stop = features.bounds.view(-1, 3, 1, 1, 1).unbind(1)
        row = torch.arange(rows.start, rows.stop, device=column.device)[:, None]
        hidden, existing = hidden | (column < first) | (column >= stop) | (row >= row_stop), row_stop[:, 0]
    logits = logits.masked_fill(hidden, -math.inf)
    log_sum = logits.logsumexp(-1, keepdim=True)
    weights = (logits - lse_to_subtract(log_sum)).exp()
    weights = torch.nn.functional.pad(weights, (0, grid.kv_blocks * per_kv - weights.shape[3]))
    weights = torch.unflatten(weights, 3, (grid.kv_blocks, per_kv)).sum(4)
    there = weights.shape[2]
    weights = torch.nn.functional.pad(weights, (0, 0, 0, (high - low) * per_q - there)).unflatten(2, (high - low, per_q))
    if features.takes_max:
        return weights.amax(3)
    of_block = torch.arange(low, high, device=weights.device)[:, None] * per_q
    return weights.sum(3) / (existing.clamp(max=features.row_count)[:, None] - of_block).clamp(1, per_q)


def _in_spans(x: Tensor, span: int) -> Tensor:
    """(batch, heads, ceil(tokens / span), span, head_dim), with zeros past the end."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % span)).unflatten(2, (-1, span))


def apply_rule(scores: Tensor, allowed: Tensor, forced: Tensor, rule: str, number: int | float) -> Tensor:
    """The blocks that a rule keeps, bool of the shape of scores, (batch, heads, rows, kv_blocks).

    allowed, forced: (rows, kv_blocks) bool, what may be kept and what is kept in any case; the second within the first. All heads
    have a budget in common. Of equal scores the first are kept, by head and then by block.
    """
    possible = allowed & (scores > -math.inf)  # NaN is not
    scores = torch.where(possible, scores, -math.inf)
    if rule == "floor":
        return (possible & (scores >= number)) | forced
    if rule == "mass":
        weights, order = scores.clamp(min=0).sort(dim=-1, descending=True, stable=True)
        before = torch.nn.functional.pad(weights.cumsum(-1)[..., :-1], (1, 0))
        enough = before < number * weights.sum(-1, keepdim=True)
        return (torch.zeros_like(possible).scatter(-1, order, enough) & possible) | forced
    among = torch.where(forced, math.inf, scores.clamp(max=torch.finfo(scores.dtype).max))
    if rule == "budget":
        among = among.transpose(1, 2).flatten(2)
    count, width = count_kept_blocks(rule, number, allowed.sum(-1), scores.shape[1])[:, None], among.shape[-1]
    # topk does not say which of equal scores it takes, so it only finds the least one that is kept.
    best = among.topk(min(number if isinstance(number, int) else int(number * width) + 1, width)).values
    least = best.gather(-1, (count - 1).clamp(0, best.shape[-1] - 1).expand(*best.shape[:-1], 1))
    spare, equal = count - (best > least).sum(-1, keepdim=True), among == least
    taken = (among > least) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= spare))
    if rule == "budget":
        taken = torch.unflatten(taken, 2, (scores.shape[1], -1)).transpose(1, 2)
    return (taken & possible) | forced


def count_kept_blocks(rule: str, number: int | float, allowed: Tensor, heads: int) -> Tensor:
    """How many of the ``allowed`` blocks of each row "keep" and "budget" keep, the latter of all heads; 0 for other rules."""
    if rule not in ("keep", "budget"):
        return torch.zeros_like(allowed)
    if isinstance(number, int):
        return torch.full_like(allowed, min(number, 1 << 30))  # kernels count in int32
    return torch.ceil(number * (allowed * (heads if rule == "budget" else 1)).double() - _ROUNDING).long()
