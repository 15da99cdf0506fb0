"""Reorders the tokens of tensors by a VideoLayout. Gradients are gathered like results, so they repeat bit for bit.

to_tiles     y[p] = x[token_at[p]]       gradient: x[t] = the sum of y at all positions of token t
to_raster    x[t] = y[position_of[t]]    gradient: y[p] = x[token_at[p]], 0 at padding
"""

from typing import Any

import numpy as np
import torch

from ..compat.constants import constant_in_graphs
from ..compat.pytorch import is_plain_eager
from .cache import fake_tensors_if_needed, keep_if_captured, run_in_thread
from .memory import cached_until_cleared
from .parsing import parse

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # what sums of a dtype are made in


def reorder_tensor(x: torch.Tensor, dim: int, layout: Any, to: str, tokens: int) -> torch.Tensor:
    """x in another order along ``dim``. layout: a VideoLayout. to: "to_tiles" or "to_raster". tokens: how many x must have."""
    if x.shape[dim] != tokens:
        said = {"to_tiles": "before it is in tile order", "to_raster": "in tile order"}[to]
        raise ValueError(f"x must have {tokens} tokens in dimension {dim} {said}, of {layout}; got shape {tuple(x.shape)}")
    if torch.compiler.is_compiling():
        # PyTorch before 2.13 takes only text as a constant. With dynamic=True, only an operation's result keeps its length.
        order = [index.detach() for index in _constant_order(layout.to_spec(), x.device)]
    else:
        order = _make_order(layout, x.device)
        keep_if_captured(order, x.device)
        order = fake_tensors_if_needed(order)
    if torch.compiler.is_compiling() or is_plain_eager(x):
        return _Reorder.apply(x, dim % x.dim(), to, *order)
    return x.index_select(dim, order[int(to == "to_raster")])  # function transforms differentiate it by themselves


@constant_in_graphs
def _constant_order(layout: str, device: torch.device) -> list[torch.Tensor]:
    return _make_order(parse(layout), device)


@cached_until_cleared(maxsize=64)
def _make_order(layout: Any, device: torch.device) -> list[torch.Tensor]:
    """[token_at, position_of, padding, then tokens and positions of their second copies, of their third ones, ...], int32."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the order of {layout} cannot be made while a CUDA graph is captured; reorder a tensor before")
    padding = np.flatnonzero(~layout.exists(np.arange(layout.length)))
    held = np.sort(layout.token_at[padding])
    number = np.arange(len(held)) - np.searchsorted(held, held)  # of a copy, among the copies of its token
    padded = padding[np.argsort(layout.token_at[padding], kind="stable")]
    arrays = [layout.token_at, layout.position_of, padding]
    for copy in range(number.max(initial=-1) + 1):
        arrays += [held[number == copy], padded[number == copy]]
    return run_in_thread(lambda: [torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays])


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, to: str, *order: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.to = dim, to
        ctx.save_for_backward(*order)
        return x.index_select(dim, order[int(to == "to_raster")])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (token_at, position_of, padding, *copies), dim = ctx.saved_tensors, ctx.dim
        nothing = [None] * (5 + len(copies))
        if ctx.to == "to_raster":
            return grad.index_select(dim, token_at).index_fill_(dim, padding.long(), 0), *nothing
        total = grad.index_select(dim, position_of)
        total = total.to(_WIDE.get(grad.dtype, grad.dtype)) if copies else total
        for tokens, positions in zip(copies[::2], copies[1::2], strict=True):  # no token twice, so in one order
            total = total.index_add(dim, tokens, grad.index_select(dim, positions).to(total.dtype))
        return total.to(grad.dtype), *nothing
