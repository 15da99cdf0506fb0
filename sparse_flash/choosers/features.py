"""Makes the rows of queries and columns of keys that built-in choosers compare.

A row's logits are its products with the columns that it sees; a block's share of the row is the softmax weight of its columns; its
score for a block of queries is the mean, or the maximum, of the shares of the rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.pytorch import is_recorded
from ..core.torch import block_means
from ..masks.grid import BlockGrid
from ..masks.memory import cached_until_cleared


@dataclass(frozen=True)
class Features:
    """Rows and columns of one chooser.

    rows: (batch, heads, tokens, head_dim). columns: (batch, kv_heads, tokens, head_dim). A row or a column is ``span`` tokens in
    turn, the row's in descending order: its logit is the sum of their products, times ``factor``. Tokens past the end are 0.
    per_q_block, per_kv_block: rows and columns of a whole block. until: (rows,) int32, how many first columns each row sees.
    bounds: (batch, 3) int32, the first column that exists, the first past them, the first row past the existing; None if all exist.
    takes_max: whether scores are maxima of a block's rows, not means.
    """

    rows: Tensor
    columns: Tensor
    span: int
    factor: float
    per_q_block: int
    per_kv_block: int
    until: Tensor
    bounds: Tensor | None = None
    takes_max: bool = False

    @cached_property
    def row_count(self) -> int:
        return -(-self.rows.shape[2] // self.span)

    @cached_property
    def column_count(self) -> int:
        return -(-self.columns.shape[2] // self.span)


class Content(NamedTuple):
    """What choosers look at, and the features that built-in ones compare.

    causal: whether rows see no later columns. user_scores: scores that a caller computed, or None. starts, ends, q_ends: (batch,)
    int, the first existing key of each sequence, the first past them, and the first query past the existing; None if all exist.
    Nonexistent tokens of q and k are 0.
    """

    q: Tensor
    k: Tensor
    grid: BlockGrid
    causal: bool
    scale: float
    user_scores: Tensor | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None
    q_ends: Tensor | None = None

    @property
    def group(self) -> int:
        """How many query heads share keys."""
        return self.q.shape[1] // self.k.shape[1]

    def means(self) -> Features:
        """The means of blocks of queries and of blocks of keys."""
        size = self.grid.block_size
        rows, columns = _means(self.q, size, None, self.q_ends), _means(self.k, size, self.starts, self.ends)
        seen, bounds = self._seen_columns(size, None, size), self._bounds(size, size, self.q_ends)
        return Features(rows, columns, 1, self.scale, 1, 1, seen, bounds)

    def antidiagonals(self, stride: int) -> Features:
        """The tokens of each ``stride`` queries, in descending order, and of each ``stride`` keys."""
        per_block, bounds = self.grid.block_size // stride, self._bounds(stride, stride, self.q_ends)
        seen = self._seen_columns(stride, None, stride)
        return Features(self.q, self.k, stride, self.scale / stride, per_block, per_block, seen, bounds)

    def samples(self, count: int) -> Features:
        """``count`` queries of each block, and single keys."""
        (q, size), step = (self.q, self.grid.block_size), self.grid.block_size // count
        if self.q_ends is not None:
            rows = q.take_along_dim(sampled_rows(self.grid, count, q.device, self.q_ends)[:, None, :, None], 2)
        elif size % count == 0 and self.grid.q_len % size == 0:  # then without a copy
            rows = q[:, :, step - 1 :: step]
        else:
            rows = q.index_select(2, sampled_rows(self.grid, count, q.device))
        return Features(rows, self.k, 1, self.scale, count, size, self._seen_columns(1, count, 1), self._bounds(1, 1, None), True)

    def _seen_columns(self, tokens: int, sampled: int | None, width: int) -> Tensor:
        """(rows,) int32: how many columns of ``width`` keys a row of ``tokens`` sees. sampled: queries of a block, or None."""
        device = self.q.device
        count = _columns_seen if is_recorded(device) else _lasting_columns_seen
        return count(tokens, sampled, width, self.grid, self.causal, device)

    def _bounds(self, width: int, height: int, q_ends: Tensor | None) -> Tensor | None:
        """See ``Features``. width, height: tokens of a column and of a row. Without q_ends all rows exist."""
        starts, ends, grid = self.starts, self.ends, self.grid
        given = next((one for one in (starts, ends, q_ends) if one is not None), None)
        if given is None:
            return None
        first = torch.zeros_like(given) if starts is None else starts.clamp(0, grid.kv_len).div(width, rounding_mode="floor")
        stop = torch.full_like(given, grid.kv_len) if ends is None else ends.clamp(0, grid.kv_len)
        row_stop = torch.full_like(given, 2**31 - height) if q_ends is None else q_ends.clamp(0, grid.q_len)
        return torch.stack([first, -(-stop // width), -(-row_stop // height)], 1).to(torch.int32)


def _means(x: Tensor, size: int, starts: Tensor | None, ends: Tensor | None) -> Tensor:
    """The means of ``size`` tokens each. Tokens that do not exist are left out."""
    means = block_means(x, size)
    if starts is not None or ends is not None:
        first = torch.arange(0, x.shape[2], size, device=x.device)
        last = (first + size).clamp(max=x.shape[2])
        from_here = first if starts is None else first.maximum(starts[:, None])
        to_there = last if ends is None else last.minimum(ends[:, None])
        means = means * ((last - first) / (to_there - from_here).clamp(min=1)).view(-1, 1, len(first), 1)
    return means.to(x.dtype)


def sampled_rows(grid: BlockGrid, count: int, device: torch.device, q_ends: Tensor | None = None) -> Tensor:
    """(q_blocks * count,) int64: the queries that stand for each block; with q_ends (batch, q_blocks * count)."""
    first = torch.arange(grid.q_blocks, device=device)[:, None] * grid.block_size
    there = (grid.q_len - first).clamp(max=grid.block_size)
    if q_ends is not None:
        there = (q_ends.view(-1, 1, 1) - first).clamp(min=1).minimum(there)
    number = torch.arange(1, count + 1, device=device)
    return (first + (number * there + count - 1).div(count, rounding_mode="floor") - 1).flatten(-2)


def _columns_seen(tokens: int, sampled: int | None, width: int, grid: BlockGrid, causal: bool, device: torch.device) -> Tensor:
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


_lasting_columns_seen = cached_until_cleared(maxsize=64)(_columns_seen)
