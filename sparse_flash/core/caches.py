"""Reading caches of keys and values: e4m3, pages."""

from collections.abc import Callable

import torch

from ..compat.pytorch import is_recorded

E4M3 = torch.float8_e4m3fn  # of caches


def cache_capacity(k: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """The tokens that a cache of keys can hold of each sequence."""
    return k.shape[2] if block_table is None else k.shape[2] * block_table.shape[1]


def dequantized(
    stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, read: Callable[..., torch.Tensor] = lambda x: x
) -> torch.Tensor:
    """Keys or values of a cache in this dtype. scale: of e4m3 tensors. read: reads some tokens of both; all by default."""
    if scale is None:
        return read(stored).to(dtype)
    exact = max(dtype, scale.dtype, key=lambda each: each.itemsize)
    return (read(stored).to(exact) * read(scale)[..., None].to(exact)).to(dtype)


def check_pages(pages: torch.Tensor, count: int, sequence: int) -> None:
    """Raises ValueError if a sequence would read pages outside a cache's ``count``; only on a CPU, without synchronization."""
    if pages.device.type == "cpu" and ((pages < 0) | (pages >= count)).any():
        raise ValueError(
            f"block_table must name one of the {count} pages for each token of a sequence; sequence {sequence} has "
            f"{pages.min()} to {pages.max()}"
        )


def check_read_pages(pages: torch.Tensor, read: torch.Tensor, count: int) -> None:
    """``check_pages`` for each sequence, except while operations are only recorded. read: which pages to check, bool."""
    if pages.device.type == "cpu" and not is_recorded(pages.device):
        for sequence, (own, of_own) in enumerate(zip(pages, read, strict=True)):
            check_pages(own[of_own], count, sequence)
