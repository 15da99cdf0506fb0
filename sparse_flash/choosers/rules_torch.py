"""Scores and rules in PyTorch operations: the definition of what ``rules_kernels`` streams, and the way on chips without kernels.

Shapes do not depend on values, so graphs may capture all of it. Logits are held for a range of rows at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..backends import compute_dtype, lse_to_subtract
from ..masks.chooser import LastQueries
from ..masks.grid import BlockGrid
from .features import Features

_ROUNDING = 1e-6  # 0.07 * 100 is 7.000000000000001, and must not become 8


class Limits(NamedTuple):
    """The part of a choice that does not depend on queries and keys.

    allowed, forced: (q_blocks, kv_blocks) bool, which blocks may be kept, and which are in any case; for kernels as bits, see
    ``rules_kernels.pack_block_bits``. counts: (q_blocks,) int64, how many blocks of a row may be kept.
    """

    allowed: torch.Tensor
    forced: torch.Tensor
    counts: torch.Tensor


def score_blocks(features: Features, grid: BlockGrid, low: int, high: int, reduce: str) -> torch.Tensor:
    """Scores of the blocks of queries low .. high - 1: (batch, heads, high - low, kv_blocks), float32 or wider."""
    per_q, per_kv, span = features.per_q_block, features.per_kv_block, features.span
    rows, until = slice(low * per_q, min(high * per_q, features.row_count)), features.until
    exact = compute_dtype(features.rows)
    queries = _in_spans(features.rows.to(exact), span).flip(3)[:, :, rows].flatten(3)
    keys = _in_spans(features.columns.to(exact), span).flatten(3)
    group = queries.shape[1] // keys.shape[1]
    logits = (queries.unflatten(1, (keys.shape[1], group)) @ keys[:, :, None].mT).flatten(1, 2) * features.factor
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
    weights = weights.unflatten(3, (grid.kv_blocks, per_kv)).sum(4)
    there = weights.shape[2]
    weights = torch.nn.functional.pad(weights, (0, 0, 0, (high - low) * per_q - there)).unflatten(2, (high - low, per_q))
    if reduce == "max":
        return weights.amax(3)
    of_block = torch.arange(low, high, device=weights.device)[:, None] * per_q
    return weights.sum(3) / (existing.clamp(max=features.row_count)[:, None] - of_block).clamp(1, per_q)


def _in_spans(x: torch.Tensor, span: int) -> torch.Tensor:
    """(batch, heads, ceil(tokens / span), span, head_dim), with zeros past the end."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % span)).unflatten(2, (-1, span))


def columns_and_slashes(
    chooser: LastQueries,
    q: torch.Tensor,
    k: torch.Tensor,
    grid: BlockGrid,
    scale: float,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    q_ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean weight of the last queries by block of keys, and by distance in blocks, (batch, heads, kv_blocks) each. A range of
    keys at a time. starts, ends, q_ends: see ``features_of``."""
    size, count = grid.block_size, min(chooser.count, grid.q_len)
    queries, position, missing = _take_last_queries(q, k.shape[1], count, grid, q_ends)
    step = max(1, (1 << 15) // size) * size

    def logits(first: int) -> torch.Tensor:
        key = torch.arange(first, min(first + step, grid.kv_len), device=q.device)
        products = (queries @ k[:, :, None, first : first + step].to(queries.dtype).mT).flatten(1, 2) * scale
        hidden = (key > position) | (position < grid.offset)
        if starts is not None:
            hidden = hidden | (key < starts.view(-1, 1, 1, 1))
        if ends is not None:
            hidden = hidden | (key >= ends.view(-1, 1, 1, 1))
        return products.masked_fill(hidden, -math.inf)

    log_sum = torch.stack([logits(first).logsumexp(-1) for first in range(0, grid.kv_len, step)]).logsumexp(0)[..., None]
    log_sum = lse_to_subtract(log_sum)
    columns = queries.new_zeros(*q.shape[:2], grid.kv_blocks * size)
    slashes = torch.zeros_like(columns)
    # All sums have a fixed order, unlike index_add_ on GPUs: the same inputs choose the same blocks.
    for first in range(0, grid.kv_len, step):
        weights = (logits(first) - log_sum).exp()
        keys = weights.shape[3]
        columns[:, :, first : first + keys] = weights.sum(2)
        farthest = grid.kv_len - first - 1  # from the last position; below 0 are keys past a query, whose weight is 0
        sums = _sum_diagonals(weights)[..., : farthest + 1]
        slashes[:, :, max(0, farthest + 2 - keys - count) : farthest + 1] += sums.flip(2)
    if missing is not None:  # distances so far count from the last position; from here on, from the last existing query
        distance = torch.arange(slashes.shape[2], device=q.device) + missing
        slashes = torch.nn.functional.pad(slashes, (0, 1)).take_along_dim(distance.clamp(max=slashes.shape[2]), 2)
    columns, slashes = (of_tokens.unflatten(2, (-1, size)).sum(3) / count for of_tokens in (columns, slashes))
    return columns, slashes


def _take_last_queries(
    q: torch.Tensor, kv_heads: int, count: int, grid: BlockGrid, q_ends: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(queries, their positions, missing), from the last existing query to the first: distances fall from key to key and from query
    to query. queries: (batch, kv_heads, group, count, head_dim). missing: (batch, 1, 1), how many queries past the last existing
    one do not exist, or None."""
    position, missing = torch.arange(grid.kv_len - 1, grid.kv_len - count - 1, -1, device=q.device)[:, None], None
    if q_ends is None:
        queries = q[:, :, -count:].flip(2)
    else:
        missing = grid.q_len - q_ends.clamp(0, grid.q_len).view(-1, 1, 1)
        position = position - missing[..., None]
        queries = q.take_along_dim((position - grid.offset).clamp(min=0), 2)
    return queries.to(compute_dtype(q)).unflatten(1, (kv_heads, -1)), position, missing


def _sum_diagonals(weights: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, columns) -> (batch, heads, columns + rows - 1) sums of weights[..., row, diagonal - row]."""
    rows = weights.shape[2]
    # Read in rows that are one number shorter, each row begins one column further right: a column then is a diagonal.
    return torch.nn.functional.pad(weights, (0, rows)).flatten(2)[..., :-rows].unflatten(2, (rows, -1)).sum(2)


def score_columns_and_slashes(sums: tuple[torch.Tensor, torch.Tensor], grid: BlockGrid, low: int, high: int) -> torch.Tensor:
    """Scores as ``score_blocks`` returns them, from ``columns_and_slashes``; 0 for blocks with no key up to the row's last
    query."""
    columns, slashes = sums
    last = (torch.arange(low + 1, high + 1, device=columns.device) * grid.block_size).clamp(max=grid.q_len) - 1 + grid.offset
    row = last.div(grid.block_size, rounding_mode="floor")
    distance = row[:, None] - torch.arange(grid.kv_blocks, device=columns.device)
    scores = columns[:, :, None] + slashes[:, :, distance.clamp(0, grid.kv_blocks - 1)]
    scores = scores.masked_fill(distance < 0, 0)
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def apply_rule(scores: torch.Tensor, allowed: torch.Tensor, forced: torch.Tensor, rule: str, number: int | float) -> torch.Tensor:
    """The blocks that a rule keeps, bool of the shape of scores, (batch, heads, rows, kv_blocks).

    allowed, forced: (rows, kv_blocks) bool, what may be kept and what is kept in any case; the second within the first. All heads
    have a budget in common. Of equal scores the first are kept, by head and then by block.
    """
    possible = allowed & (scores > -math.inf)  # NaN is not
    scores = torch.where(possible, scores, -math.inf)
    if rule == "floor":
        return (possible & (scores >= number)) | forced
    if rule == "relative":
        return (possible & (scores >= number * scores.amax(-1, keepdim=True).clamp(min=0))) | forced
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
        taken = taken.unflatten(2, (scores.shape[1], -1)).transpose(1, 2)
    return (taken & possible) | forced


def count_kept_blocks(rule: str, number: int | float, allowed: torch.Tensor, heads: int) -> torch.Tensor:
    """How many blocks "keep" and "budget" keep of each row, int64 of the shape of ``allowed``, the blocks that may be kept; of all
    heads together for "budget". 0 for other rules."""
    if rule not in ("keep", "budget"):
        return torch.zeros_like(allowed)
    if isinstance(number, int):
        return torch.full_like(allowed, min(number, 1 << 30))  # kernels count in int32
    return torch.ceil(number * (allowed * (heads if rule == "budget" else 1)).double() - _ROUNDING).long()
