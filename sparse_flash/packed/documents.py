"""Packed documents: where their tokens are, and the axis on which each document starts in a new block. PyTorch operations of fixed
shapes: on a GPU nothing synchronizes with the host."""

from operator import index
from typing import NamedTuple

import torch

BLOCK = 128


class TokenPositions(NamedTuple):
    """Each (tokens,): the token's document and its position there, int64, and whether it belongs to one."""

    document: torch.Tensor
    within: torch.Tensor
    exists: torch.Tensor


class PackedDocuments(NamedTuple):
    """The documents of queries or of keys. cu_seqlens: (documents + 1,). longest: tokens beyond it in a document are dropped."""

    cu_seqlens: torch.Tensor
    tokens: int
    longest: int

    def extents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(first token, tokens) of each document, (documents,) int64, clamped: none overlaps another or exceeds the tokens."""
        bounds = self.cu_seqlens.long().clamp(0, self.tokens).cummax(0).values
        return bounds[:-1], bounds.diff().clamp(max=self.longest)

    def locate(self) -> TokenPositions:
        """The document and position of each token. A token of no document has position 0."""
        start, length = self.extents()
        token = torch.arange(self.tokens, device=start.device)
        # If several documents start at the same token, all except the last are empty.
        document = (torch.searchsorted(start, token, right=True) - 1).clamp(min=0)
        within = token - start[document]
        exists = (within >= 0) & (within < length[document])
        return TokenPositions(document, torch.where(exists, within, 0), exists)


def read_sizes(queries: PackedDocuments, keys: PackedDocuments | None) -> tuple[PackedDocuments, PackedDocuments]:
    """The documents of queries and of keys, None for the same, with plain numbers: a graph holds the table of one long document."""
    q_side, k_side = (
        PackedDocuments(side.cu_seqlens, index(side.tokens), index(side.longest)) for side in (queries, keys or queries)
    )
    return q_side, k_side


class Axis(NamedTuple):
    """An axis of whole blocks. row_of_token: (tokens,) int64. The last of ``rows`` is of tokens of no document; none keeps it."""

    row_of_token: torch.Tensor
    rows: int

    def to_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_dim) -> (1, heads, rows, head_dim), 0 where there is no token."""
        return put_rows(x, 0, self.row_of_token, self.rows).transpose(0, 1).unsqueeze(0)

    def to_tokens(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Takes the tokens' rows of a dimension of the axis."""
        return _TakeRows.apply(x, dim, self.row_of_token)


def put_rows(x: torch.Tensor, dim: int, index: torch.Tensor, rows: int) -> torch.Tensor:
    """Zeros with so many rows in a dimension, of which row index[i] is row i of x."""
    shape = *x.shape[:dim], rows, *x.shape[dim + 1 :]
    return x.new_zeros(shape).index_copy_(dim, index, x)


class _TakeRows(torch.autograd.Function):
    """index_select of rows that are taken once, except the last: its gradient is a copy, where PyTorch's is a sum."""

    @staticmethod
    def forward(ctx, x, dim, index):
        ctx.save_for_backward(index)
        ctx.dim, ctx.rows = dim, x.shape[dim]
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx, grad):
        return put_rows(grad, ctx.dim, ctx.saved_tensors[0], ctx.rows), None, None


def lay_out_blocks(
    side: PackedDocuments, blocks: int, block: int = BLOCK, skipped: torch.Tensor | int = 0
) -> tuple[Axis, torch.Tensor, torch.Tensor]:
    """The axis of so many blocks, and each document's first block and number of blocks. skipped: rows before its first token."""
    _, length = side.extents()
    at, count = side.locate(), torch.where(length > 0, (length + skipped + block - 1) // block, 0)
    first = count.cumsum(0) - count
    row = (first * block + skipped)[at.document] + at.within
    return Axis(torch.where(at.exists, row, blocks * block - 1), blocks * block), first, count


def most_blocks(tokens: int, documents: int, skipped: int = 0, block: int = BLOCK) -> int:
    """Enough blocks for any lengths, if up to ``skipped`` rows before a document stay empty."""
    return max(1, (tokens + min(documents, tokens) * (block - 1 + skipped)) // block)
