"""PyTorch operators of attention over picked blocks: what torch.compile, autograd and autocast see.

A selection crosses the boundary as its picks, the tensors of ``always`` (or again the picks: see ``core/operators``) and its
numbers. A back end is a module of this package with

    supports(call, selection) -> str | None
    forward(q, k, v, selection, scale) -> (out, lse)
    backward(QueryRows(q, dout, dlse, out, lse), k, v, selection, scale) -> (dq, dk, dv)
    block_lse(q, k, selection, scale) -> (batch, heads, q_len, n), for each picked block the lse of its pairs, -inf without pairs
    block_lse_backward(dblock_lse, q, k, block_lse, selection, scale) -> (dq, dk)

with shapes as for the back ends of masks (``core/backends``). Gradients repeat bit for bit, whether asked or not.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..compat.names import operator_name
from ..core import backends, operators
from ..core.description import Call
from ..core.operators import define_operator, prepare_upstream
from ..core.results import QueryRows, compute_dtype
from ..masks.block_mask import BlockMask
from . import hopper, reference, triton
from . import torch as selection_torch
from .block_selection import BlockSelection

_Call: TypeAlias = tuple[Tensor, list[Tensor], int, int, float | None, str]

BACKENDS: dict[str, ModuleType] = {"hopper": hopper, "triton": triton, "torch": selection_torch, "reference": reference}


def attend_to_picks(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float | None, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the pairs that a selection keeps, differentiable in q, k and v. scale: None for 1 / sqrt(head_dim)."""
    operators.refuse_transforms(q, k, v)
    if q.shape[0] == 0:
        backends.check_name(backend)
        return operators.make_empty_results(q, k, v, None)
    return _forward(q, k, v, *_pack_selection(selection), scale, backend)


def block_lse(q: Tensor, k: Tensor, selection: BlockSelection, scale: float | None, backend: str) -> Tensor:
    """(batch, heads, q_len, n): for each picked block the lse of a query's pairs in it; differentiable in q and k."""
    operators.refuse_transforms(q, k)
    if q.shape[0] == 0:
        return operators.make_empty_results(q, k, k, None)[1][..., None].expand(*q.shape[:3], selection.picks.shape[3])
    # A pair that only ``always`` keeps is in no picked block.
    return _block_lse(q, k, *_pack_selection(replace(selection, always=None)), scale, backend)


def _pack_selection(selection: BlockSelection) -> tuple[Tensor, list[Tensor], int, int]:
    """A selection in the form an operator takes."""
    always = selection.always
    tables, size = ([selection.picks], 0) if always is None else (always.tensors(), always.block_size)
    return selection.picks, tables, size, selection.block_size


# The last arguments of each operator: of ``_pack_selection``, the scale and the back end.
_CALL = "Tensor picks, Tensor[] tables, SymInt tables_block, SymInt block_size, float? scale, str backend"


def _prepare_call(q: Tensor, k: Tensor, v: Tensor, *call: *_Call) -> tuple[ModuleType, BlockSelection, float]:
    """(back end, selection, scale) of a call; the same for both passes."""
    picks, tables, tables_block, block_size, scale, backend = call
    q_len, kv_len = q.shape[2], k.shape[2]
    always = BlockMask.from_tensors(q_len, kv_len, tables_block, tables) if tables_block else None
    selection = BlockSelection(picks, q_len, kv_len, block_size, always)

    def supports(name: str, call: Call) -> str | None:
        return BACKENDS[name].supports(call, selection) if name in BACKENDS else "it does not take a BlockSelection"

    name = backends.choose_backend(backend, Call.from_tensors(q, k, v, block_size), supports)
    return BACKENDS[name], selection, q.shape[3] ** -0.5 if scale is None else scale


@define_operator("selected_attention", f"Tensor q, Tensor k, Tensor v, {_CALL}")
def _forward(q: Tensor, k: Tensor, v: Tensor, *call: *_Call) -> tuple[Tensor, Tensor]:
    chosen, selection, scale = _prepare_call(q, k, v, *call)
    return chosen.forward(q, k, v, selection, scale)


_forward.register_fake(operators.fake_results)


@define_operator(
    "selected_attention_backward",
    f"Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_CALL}",
    "(Tensor, Tensor, Tensor)",
)
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: *_Call
) -> tuple[Tensor, Tensor, Tensor]:
    chosen, selection, scale = _prepare_call(q, k, v, *call)
    return chosen.backward(QueryRows(q, dout, dlse, out, lse), k, v, selection, scale)


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in (q, k, v))


@define_operator("picked_block_lse", f"Tensor q, Tensor k, {_CALL}", "Tensor")
def _block_lse(q: Tensor, k: Tensor, *call: *_Call) -> Tensor:
    chosen, selection, scale = _prepare_call(q, k, k, *call)
    return chosen.block_lse(q, k, selection, scale)


@_block_lse.register_fake
def _(q: Tensor, k: Tensor, *call: *_Call) -> Tensor:
    return q.new_empty(*q.shape[:3], call[0].shape[3], dtype=compute_dtype(q))


@define_operator("picked_block_lse_backward", f"Tensor dblock_lse, Tensor q, Tensor k, Tensor block_lse, {_CALL}")
def _block_lse_backward(dblock_lse: Tensor, q: Tensor, k: Tensor, block_lse: Tensor, *call: *_Call) -> tuple[Tensor, Tensor]:
    chosen, selection, scale = _prepare_call(q, k, k, *call)
    return chosen.block_lse_backward(dblock_lse, q, k, block_lse, selection, scale)


@_block_lse_backward.register_fake
def _(dblock_lse: Tensor, q: Tensor, k: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _keep_call(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    """inputs: q, k and perhaps v, then ``_Call``."""
    tensors, (picks, tables, *ctx.options) = inputs[:-6], inputs[-6:]
    ctx.save_for_backward(*tensors, *(output if isinstance(output, tuple) else (output,)), picks, *tables)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, picks, *tables = ctx.saved_tensors
    grads: Any = (None, None, None)
    if dout is not None or dlse is not None:
        grads = _backward(*prepare_upstream(dout, dlse, out, lse), q, k, v, out, lse, picks, tables, *ctx.options)
    return *grads, None, [None] * len(tables), *(None for _ in ctx.options)


def _gradients_of_block_lse(ctx: Any, dblock_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, result, picks, *tables = ctx.saved_tensors
    grads: Any = (None, None)
    if dblock_lse is not None:
        operators.refuse_batched(dblock_lse)
        grads = _block_lse_backward(dblock_lse, q, k, result, picks, tables, *ctx.options)
    return *grads, None, [None] * len(tables), *(None for _ in ctx.options)


torch.library.register_autograd(operator_name("selected_attention"), _gradients, setup_context=_keep_call)
torch.library.register_autograd(operator_name("selected_attention_backward"), operators.refuse_second_derivatives)
torch.library.register_autograd(operator_name("picked_block_lse"), _gradients_of_block_lse, setup_context=_keep_call)
torch.library.register_autograd(operator_name("picked_block_lse_backward"), operators.refuse_second_derivatives)
