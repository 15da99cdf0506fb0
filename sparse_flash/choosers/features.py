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
from ..compat.pytorch import is_recorded
from ..masks.chooser import Antidiagonal, Chooser, Pooled, PooledKeys, Sampled, SubBlocks
from ..masks.grid import BlockGrid
from ..masks.memory import remembered


@dataclass(frozen=True)
class Features:
    """Rows and columns of one chooser.

    rows: (batch, heads, tokens, head_dim). columns: (batch, kv_heads, tokens, head_dim). A row or a column is ``span`` tokens in
    turn, the row's in descending order: its logit is the sum of their products, times ``factor``. Tokens past the end are 0.
    per_q_block, per_kv_block: rows and columns of a whole block. until: (rows,) int32, how many columns each row sees, the first
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
    size, device = grid.block_size, q.device
    if isinstance(chooser, Antidiagonal):
        stride = chooser.stride
        return Features(
            q, k, stride, scale / stride, size // stride, size // stride, _seen(stride, None, stride, grid, causal, device)
        )
    if isinstance(chooser, Sampled):
        count = chooser.queries
        step = size // count
        evenly = size % count == 0 and grid.q_len % size == 0  # then without a copy
        rows = q[:, :, step - 1 :: step] if evenly else q.index_select(2, sampled_rows(grid, count, device))
        return Features(rows, k, 1, scale, count, size, _seen(1, count, 1, grid, causal, device))
    if isinstance(chooser, Pooled):
        queries, keys, seeing = size, size, size
    elif isinstance(chooser, PooledKeys):  # the mean of a block of keys has no part for each query
        queries, keys, seeing = 1, size, size
    elif isinstance(chooser, SubBlocks):
        queries, keys, seeing = chooser.size, chooser.size, chooser.size
    else:
        return None
    rows, columns = (x if n == 1 else block_means(x, n).to(x.dtype) for x, n in ((q, queries), (k, keys)))
    until = _seen(seeing, None, keys, grid, causal, device)
    if queries < seeing:
        until = until.repeat_interleave(seeing // queries)[: grid.q_len]
    return Features(rows, columns, 1, scale, size // queries, size // keys, until)


def sampled_rows(grid: BlockGrid, count: int, device: torch.device) -> torch.Tensor:
    """(q_blocks * count,) int64: the queries that stand for each block, evenly spaced, its last one included."""
    first = torch.arange(grid.q_blocks, device=device)[:, None] * grid.block_size
    there = (grid.q_len - first).clamp(max=grid.block_size)
    number = torch.arange(1, count + 1, device=device)
    return (first + (number * there + count - 1).div(count, rounding_mode="floor") - 1).flatten()


def _seen(tokens: int, sampled: int | None, width: int, grid: BlockGrid, causal: bool, device: torch.device) -> torch.Tensor:
    """(rows,) int32: how many columns of ``width`` keys a row of ``tokens`` sees. sampled: how many queries stand for a block of
    queries, or None."""
    return (_columns_seen if is_recorded(device) else _lasting_columns_seen)(tokens, sampled, width, grid, causal, device)


def _columns_seen(
    tokens: int, sampled: int | None, width: int, grid: BlockGrid, causal: bool, device: torch.device
) -> torch.Tensor:
    if sampled is not None:
        last = sampled_rows(grid, sampled, device)
    else:  # the last existing token of each group
        last = torch.arange(tokens - 1, grid.q_len + tokens - 1, tokens, device=device).clamp(max=grid.q_len - 1)
    columns = -(-grid.kv_len // width)
    if not causal:
        return torch.full_like(last, columns, dtype=torch.int32)
    position = last + grid.offset
    whole = (position + 1).clamp(min=0).div(width, rounding_mode="floor")
    return torch.where(position >= grid.kv_len - 1, columns, whole).to(torch.int32)


_lasting_columns_seen = remembered(maxsize=64)(_columns_seen)
