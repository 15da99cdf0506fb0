"""Differentiable row moves from one token axis to another: the gradient is the reverse move."""

from __future__ import annotations

import torch

from ..compat.names import operator_name
from ..compat.pytorch import is_plain_eager
from ..core.operators import refuse_batched, refuse_transforms
from ..core.triton import can_use_kernels as can_use_kernels
from ..kernels.common.streams import current_device


def take_rows(x: torch.Tensor, index: torch.Tensor, reverse: torch.Tensor, fill: float, heads_first: bool) -> torch.Tensor:
    """(rows, heads, head_dim): row r is x[index[r]], or ``fill`` where the index is -1. Differentiable in x.

    x: (n, heads, head_dim). index: (rows,) int32, without repeated rows of x. reverse: (n,) int32, the destination of each row of
    x, or -1. heads_first: whether the result's memory order is head by head or row by row.
    """
    if is_plain_eager(x):
        return _TakeRows.apply(x, index, reverse, fill, heads_first)
    refuse_transforms(x)
    return _take_rows_operator(x, index, reverse, fill, heads_first)


def _take_rows(x: torch.Tensor, index: torch.Tensor, reverse: torch.Tensor, fill: float, heads_first: bool) -> torch.Tensor:
    if can_use_kernels(x.device):
        from .kernels.rows import take_rows_into

        target = _empty_rows(x, len(index), heads_first)
        with current_device(x.device):
            take_rows_into(x, index, fill, target)
        return target
    taken = x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None, None], fill)
    return taken.transpose(0, 1).contiguous().transpose(0, 1) if heads_first else taken


def _empty_rows(x: torch.Tensor, rows: int, heads_first: bool) -> torch.Tensor:
    _, heads, dim = x.shape
    return x.new_empty((heads, rows, dim)).transpose(0, 1) if heads_first else x.new_empty((rows, heads, dim))


class _TakeRows(torch.autograd.Function):
    """The operator's autograd without its dispatch: see ``core/operators``."""

    @staticmethod
    def forward(ctx, x, index, reverse, fill, heads_first):
        ctx.save_for_backward(index, reverse)
        ctx.heads_first = heads_first
        return _take_rows(x, index, reverse, fill, heads_first)

    @staticmethod
    def backward(ctx, grad):
        refuse_batched(grad)
        index, reverse = ctx.saved_tensors
        return take_rows(grad, reverse, index, 0.0, not ctx.heads_first), None, None, None, None


_take_rows_operator = torch.library.custom_op(operator_name("take_rows"), _take_rows, mutates_args=())


@_take_rows_operator.register_fake
def _(x, index, reverse, fill, heads_first):
    return _empty_rows(x, index.shape[0], heads_first)


def _keep_indices(ctx, inputs, output):
    _, index, reverse, _, ctx.heads_first = inputs
    ctx.save_for_backward(index, reverse)


torch.library.register_autograd(operator_name("take_rows"), _TakeRows.backward, setup_context=_keep_indices)
