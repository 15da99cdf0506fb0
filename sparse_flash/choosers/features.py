"""Makes the rows and columns that built-in choosers compare. Their products are the logits of a softmax.

Each chooser makes rows of queries and columns of keys. A row's logits are its products with the columns that it sees; a block's
share of the row is the softmax weight of the block's columns; a block's score for a block of queries follows from the shares of
its rows, by the maximum or the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..backends.torch import block_means
from ..masks.chooser import Antidiagonal, Chooser, Pooled, PooledKeys, Sampled, SubBlocks
from ..masks.grid import BlockGrid


@dataclass(frozen=True)
class Features:
    """Rows and columns of one chooser.

    rows: (batch, heads, tokens, head_dim). columns: (batch, kv_heads, tokens, head_dim). A row or a column is ``span`` tokens in
    turn, the row's in descending order: its logit is the sum of their products, times ``factor``. Tokens past the end are 0.
    per_q_block, per_kv_block: rows and columns of a whole block. until: (rows,) int64, how many columns each row sees, the first
    ones.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    span: int
    factor: float
    per_q_block: int
    per_kv_block: int
    until: torch.Tensor

    @cached_property
    def row_count(self) -> int:
        return -(-self.rows.shape[2] // self.span)

    @cached_property
    def column_count(self) -> int:
        return -(-self.columns.shape[2] // self.span)


def features_of(chooser: Chooser, q: torch.Tensor, k: torch.Tensor, grid: BlockGrid, causal: bool, scale: float) -> Features | None:
    """The rows and columns of a built-in chooser; None for one that scores in another way."""
    size = grid.block_size
    if isinstance(chooser, Pooled):
        return _of_means(q, k, grid, size, size, causal, scale)
    if isinstance(chooser, PooledKeys):  # the mean of a block of keys has no part for each query
        return _of_means(q, k, grid, 1, size, causal, scale, sees=size)
    if isinstance(chooser, SubBlocks):
        return _of_means(q, k, grid, chooser.size, chooser.size, causal, scale)
    if isinstance(chooser, Antidiagonal):
        stride = chooser.stride
        last = _last_of_groups(grid.q_len, stride, q.device)
        until = _seen(last + grid.offset, stride, grid.kv_len, causal)
        return Features(q, k, stride, scale / stride, size // stride, size // stride, until)
    if isinstance(chooser, Sampled):
        row = sampled_rows(grid, chooser.queries, q.device)
        until = _seen(row + grid.offset, 1, grid.kv_len, causal)
        return Features(q.index_select(2, row), k, 1, scale, chooser.queries, size, until)
    return None


def sampled_rows(grid: BlockGrid, count: int, device: torch.device) -> torch.Tensor:
    """(q_blocks * count,) int64: the queries that stand for each block, evenly spaced, its last one included."""
    first = torch.arange(grid.q_blocks, device=device)[:, None] * grid.block_size
    there = (grid.q_len - first).clamp(max=grid.block_size)
    number = torch.arange(1, count + 1, device=device)
    return (first + (number * there + count - 1).div(count, rounding_mode="floor") - 1).flatten()


def _of_means(
    q: torch.Tensor, k: torch.Tensor, grid: BlockGrid, queries: int, keys: int, causal: bool, scale: float, sees: int | None = None
) -> Features:
    """Means of ``queries`` queries against means of ``keys`` keys. sees: rows see what precedes the end of their group of so many
    queries; their own by default."""
    last = _last_of_groups(grid.q_len, queries if sees is None else sees, q.device)
    if sees is not None:
        last = last.repeat_interleave(sees // queries)[: -(-grid.q_len // queries)]
    until = _seen(last + grid.offset, keys, grid.kv_len, causal)
    rows = q if queries == 1 else block_means(q, queries).to(q.dtype)
    columns = k if keys == 1 else block_means(k, keys).to(k.dtype)
    return Features(rows, columns, 1, scale, grid.block_size // queries, grid.block_size // keys, until)


def _last_of_groups(tokens: int, size: int, device: torch.device) -> torch.Tensor:
    """(groups,) int64: the last existing token of each group of ``size``."""
    return (torch.arange(size - 1, tokens + size - 1, size, device=device)).clamp(max=tokens - 1)


def _seen(position: torch.Tensor, width: int, kv_len: int, causal: bool) -> torch.Tensor:
    """How many columns of ``width`` keys have none after these positions."""
    columns = -(-kv_len // width)
    if not causal:
        return torch.full_like(position, columns)
    whole = (position + 1).clamp(min=0).div(width, rounding_mode="floor")
    return torch.where(position >= kv_len - 1, columns, whole)
