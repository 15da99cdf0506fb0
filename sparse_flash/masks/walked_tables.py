"""What kernels walk in place of a mask's own tables, where they are faster over it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .table import Table


class TallRows(NamedTuple):
    """``BlockMask.by_query`` in rows of ``row_queries`` queries and blocks of ``block_size`` keys.

    tile_runs: (run tiles, row_queries) int32. tile_bits: (bit tiles, row_queries, block_size / 32) int32. A full block may lie past
    the end of the queries.
    """

    block_size: int
    row_queries: int
    mask_index: torch.Tensor
    by_query: Table
    tile_runs: torch.Tensor
    tile_bits: torch.Tensor
    grouped: bool  # as in ``BlockMask``

    @property
    def starts(self) -> None:
        return None

    @property
    def from_host(self) -> bool:
        return True

    @property
    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tile_runs, self.tile_bits


class DocumentBlocks(NamedTuple):
    """Both tables of a mask of as many queries as keys, in blocks of ``block_size`` that start where documents start.

    starts: (blocks + 1,) int32, the token with which each block starts; it ends where the next one starts, or is full. by_query,
    by_key: tables of these blocks, no row of which is split. Unlike in other tables, ``col_idx`` and the first field of a work item
    are not the number of a block but its start. Fields 5 to 7 of an item are how many blocks have tokens, what leads from a token
    of the row's document to its place on an axis of whole blocks, and where the row's tokens end. Items of blocks without tokens,
    for which a table made on a device has room, come last.

    A tile says nothing of queries past the end of its row.
    """

    block_size: int
    mask_index: torch.Tensor
    by_query: Table
    by_key: Table
    tile_runs: torch.Tensor
    tile_bits: torch.Tensor
    starts: torch.Tensor

    @property
    def row_queries(self) -> int:
        return self.block_size

    @property
    def grouped(self) -> bool:
        return True

    @property
    def whole_columns(self) -> torch.Tensor:
        return self.by_key.work

    @property
    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tile_runs, self.tile_bits
