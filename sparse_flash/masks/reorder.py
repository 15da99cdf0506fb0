"""Gathers tokens of tensors into another order, by indices that are kept on each device."""

from __future__ import annotations

import torch

from ..compat.dynamo import constant_in_graphs
from .cache import as_operations_take_them, keep_if_captured, made_apart, traceable
from .memory import remembered
from .pattern import Pattern, parse


def gathered(x: torch.Tensor, dim: int, layout: Pattern, name: str) -> torch.Tensor:
    """Gathers x along ``dim`` by the layout's int64 array ``name``. Within torch.compile that array is a constant."""
    if torch.compiler.is_compiling():
        (index,) = _constant_index(traceable(layout), name, x.device)
        return x.index_select(dim, index.detach())  # an operation's result keeps its length with dynamic=True, a constant does not
    index = _index(layout, name, x.device)
    keep_if_captured(index, x.device)
    return x.index_select(dim, *as_operations_take_them([index]))


@constant_in_graphs
def _constant_index(layout: Pattern | str, name: str, device: torch.device) -> list[torch.Tensor]:
    return [_index(parse(layout) if isinstance(layout, str) else layout, name, device)]


@remembered(maxsize=64)
def _index(layout: Pattern, name: str, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the order of {layout} cannot be made while a CUDA graph is captured; reorder a tensor before")
    return made_apart(lambda: torch.from_numpy(getattr(layout, name)).to(device))
