"""Documents on an axis with as many rows for each: for calls whose options depend on positions in a document."""

from typing import NamedTuple

import torch

from ..core.caches import check_read_pages
from .documents import Axis, PackedDocuments


class DocumentRows(NamedTuple):
    """first, length: (documents,) int32, the first row that a document fills, and its tokens. longest: rows of each."""

    first: torch.Tensor
    length: torch.Tensor
    longest: int
    axis: Axis

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_dim) -> (documents, heads, longest, head_dim)."""
        rows = self.axis.to_blocks(x)[0, :, :-1]
        return rows.unflatten(1, (-1, self.longest)).transpose(0, 1)

    def put_back(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """(documents, heads, longest, head_dim) -> (tokens, heads, head_dim), with ``fill`` for tokens of no document."""
        rows = torch.nn.functional.pad(x.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1), value=fill)
        return self.axis.to_tokens(rows, 0)


def lay_out_rows(cu_seqlens: torch.Tensor, tokens: int, longest: int, at_end: bool) -> DocumentRows:
    """Lays packed documents out, ``longest`` rows for each: at the end of these, or at their start."""
    side = PackedDocuments(cu_seqlens, tokens, longest)
    at, length = side.locate(), side.extents()[1]
    first, rows = longest - length if at_end else torch.zeros_like(length), longest * length.shape[0]
    row = torch.where(at.exists, at.document * longest + first[at.document] + at.within, rows)
    return DocumentRows(first.int(), length.int(), longest, Axis(row, rows + 1))


def read_to_end(caches: tuple[torch.Tensor, ...], table: torch.Tensor, lens: torch.Tensor, longest: int) -> list[torch.Tensor]:
    """Returns the first row of each document, and copies of caches, (documents, kv_heads, longest, head_dim), in which all
    documents end with the last row. caches: (pages, page_size, kv_heads, head_dim). table: (documents, pages of one). lens:
    (documents,). Raises as ``check_read_pages`` does."""
    first = longest - lens
    token = torch.arange(longest, device=table.device) - first[:, None]
    index = _find_pages(caches[0], table, token.clamp(min=0).long(), token >= 0)
    return [first, *(cache[index].transpose(1, 2) for cache in caches)]


def write(cache: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor, table: torch.Tensor) -> None:
    """Writes tokens (documents, n, heads, head_dim) to their positions. Those past the capacity write what the first one writes."""
    capacity = table.shape[1] * cache.shape[1]
    fits = position < capacity
    position = torch.where(fits, position, torch.where(fits[:, :1], position[:, :1], capacity - 1))
    page, offset = _find_pages(cache, table, position, torch.ones_like(fits))
    there = torch.where(fits[:, :1, None, None], tokens[:, :1].to(cache.dtype), cache[page[:, :1], offset[:, :1]])
    cache.index_put_((page, offset), torch.where(fits[:, :, None, None], tokens.to(cache.dtype), there))


def _find_pages(cache: torch.Tensor, table: torch.Tensor, position: torch.Tensor, used: torch.Tensor):
    """Returns (page, offset in it) of positions (documents, n); page 0 where they are not ``used``."""
    page = table.long().gather(1, (position // cache.shape[1]).clamp(0, table.shape[1] - 1))
    check_read_pages(page, used, len(cache))
    return torch.where(used, page, 0), position % cache.shape[1]
