"""Reorders the tokens of tensors by a VideoLayout: two linear maps and their transposes, which are their gradients.

    to_tiles                y[p] = x[token_at[p]]
    to_tiles transposed     x[t] = the sum of y at all positions of token t
    to_raster               x[t] = y[position_of[t]]
    to_raster transposed    y[p] = x[token_at[p]], 0 at padding

Nothing is scattered: the positions of a token lie at equal distances, so each map reads rows and writes each of its rows once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..compat.dynamo import constant_in_graphs
from ..compat.names import operator_name
from ..compat.pytorch import active_modes, is_plain_eager
from .cache import fake_tensors_if_needed, keep_if_captured, run_in_thread
from .memory import cached_until_cleared
from .parsing import parse
from .select_blocks import can_launch_kernel

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # what sums of a dtype are made in


def reorder_tensor(x: torch.Tensor, dim: int, layout: Any, to: str, tokens: int) -> torch.Tensor:
    """x in another order along ``dim``. layout: a VideoLayout. to: "to_tiles" or "to_raster". tokens: how many x must have."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor; got {type(x).__name__}; pass torch.as_tensor(x)")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim must be a dimension of x, which has {x.dim()}; got dim={dim} and x of shape {tuple(x.shape)}")
    if x.shape[dim] != tokens:
        said = {"to_tiles": "before it is in tile order", "to_raster": "in tile order"}[to]
        raise ValueError(f"x must have {tokens} tokens in dimension {dim} {said}, of {layout}; got shape {tuple(x.shape)}")
    if torch.compiler.is_compiling():
        # PyTorch before 2.13 takes text alone as a constant. An operation's result keeps its length with dynamic=True, a constant
        # does not.
        order = [index.detach() for index in _constant_order(layout.to_spec(), x.device)]
    else:
        order = _make_order(layout, x.device)
        keep_if_captured(order, x.device)
        order = fake_tensors_if_needed(order)
    return _apply_differentiably(x, dim % x.dim(), order, to, False)


@constant_in_graphs
def _constant_order(layout: str, device: torch.device) -> list[torch.Tensor]:
    return _make_order(parse(layout), device)


@cached_until_cleared(maxsize=64)
def _make_order(layout: Any, device: torch.device) -> list[torch.Tensor]:
    """[token_at, the same with -1 at padding, position_of, copies_of], int32."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the order of {layout} cannot be made while a CUDA graph is captured; reorder a tensor before")
    kept = np.where(layout.exists(np.arange(layout.length)), layout.token_at, -1)
    arrays = layout.token_at, kept, layout.position_of, layout.copies_of
    return run_in_thread(lambda: [torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays])


def _apply_differentiably(x: torch.Tensor, dim: int, order: list[torch.Tensor], to: str, transposed: bool) -> torch.Tensor:
    """One of the four maps. Differentiable."""
    if torch.compiler.is_compiling() or active_modes() or x.is_meta:
        return _operator(x, dim, order, to, transposed)
    if is_plain_eager(x):
        return _ReorderFunction.apply(x, dim, order, to, transposed)
    return _apply_in_torch(x, dim, _select_map(order, to, transposed))  # which transforms and subclasses of tensors see


class _RowMap(NamedTuple):
    """Row r of the result is row source[r] of x. copies: counts and distances of rows to add up, if there are several. padded:
    whether rows of source -1 are zeros."""

    source: torch.Tensor
    copies: torch.Tensor | None = None
    padded: bool = False


def _select_map(order: list[torch.Tensor], to: str, transposed: bool) -> _RowMap:
    token_at, kept, position_of, copies = order
    padded = len(token_at) > len(position_of)
    if (to == "to_tiles") == transposed:
        return _RowMap(position_of, copies if transposed and padded else None)
    return _RowMap(kept, padded=padded) if transposed else _RowMap(token_at)


def _apply_map(x: torch.Tensor, dim: int, order: list[torch.Tensor], to: str, transposed: bool) -> torch.Tensor:
    rows = _select_map(order, to, transposed)
    if can_launch_kernel(x):
        from ..kernels.packed.rows import SUMMED, take_rows_into

        if x.element_size() <= 8 and (rows.copies is None or x.dtype in SUMMED):
            target = _empty(x, dim, rows.source)
            take_rows_into(x.resolve_conj().resolve_neg(), rows.source, 0.0, target, dim, rows.copies)
            return target
    return _apply_in_torch(x, dim, rows)


def _empty(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]))


def _apply_in_torch(x: torch.Tensor, dim: int, rows: _RowMap) -> torch.Tensor:
    """The definition, in PyTorch operations."""
    index, copies, padded = rows
    if padded:
        nothing = (index < 0).view(-1, *[1] * (x.dim() - dim - 1))
        return x.index_select(dim, index.clamp(min=0)).masked_fill(nothing, 0)
    taken = x.index_select(dim, index)
    if copies is None:
        return taken
    total, number = taken.to(_WIDE.get(x.dtype, x.dtype)), 1
    while len(summed := (copies[0] > number).nonzero()[:, 0]):  # few tokens have copies, and fewer have several
        copy = x.index_select(dim, index[summed] + number * copies[1, summed])
        total.index_add_(dim, summed, copy.to(total.dtype))
        number += 1
    return total.to(x.dtype)


class _ReorderFunction(torch.autograd.Function):
    """The operator's autograd without its dispatch: see ``dispatch/operators``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *options: Any) -> torch.Tensor:
        ctx.options = options
        return _apply_map(x, *options)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dim, order, to, transposed = ctx.options
        return _apply_differentiably(grad, dim, order, to, not transposed), None, None, None, None


@torch.library.custom_op(operator_name("reorder_tokens"), mutates_args=())
def _operator(x: torch.Tensor, dim: int, order: list[torch.Tensor], to: str, transposed: bool) -> torch.Tensor:
    return _apply_map(x, dim, order, to, transposed)


@_operator.register_fake
def _(x: torch.Tensor, dim: int, order: list[torch.Tensor], to: str, transposed: bool) -> torch.Tensor:
    return _empty(x, dim, _select_map(order, to, transposed).source)


def _keep_options(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.dim, order, ctx.to, ctx.transposed = inputs
    ctx.save_for_backward(*order)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    order = list(ctx.saved_tensors)
    return _operator(grad, ctx.dim, order, ctx.to, not ctx.transposed), None, [None] * len(order), None, None


torch.library.register_autograd(operator_name("reorder_tokens"), _gradient, setup_context=_keep_options)
