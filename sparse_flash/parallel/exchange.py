"""Operators that exchange tensors among ranks, each with its gradient.

An exchange starts and ends within its operator, because waiting for a functional collective under torch.compile is not dependable
(pytorch#168352, #179858). Meanwhile the operator attends the columns that the rank has. The host never waits.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.names import operator_name
from ..core.operators import fake_results, prepare_upstream, refuse_second_derivatives
from .calls import Gradients, PartialAttention, QueryRows, add_blocks, merge
from .routes import Route, TwoCalls, record_of
from .transfer import Message, PendingExchange, append_fetched, as_tokens, empty_blocks, pack, split_packed, unpack

_SETTINGS = "Tensor handle, float? scale, bool deterministic, str backend) -> (Tensor, Tensor, Tensor)"  # as PartialAttention
_FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor columns, SymInt block_size, {_SETTINGS}"
_BACKWARD = f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor buffer, Tensor out, Tensor lse, {_SETTINGS}"


@torch.library.custom_op(operator_name("context_attention"), mutates_args=(), schema=_FORWARD)
def attend_blocks(q: Tensor, k: Tensor, v: Tensor, columns: Tensor, block_size: int, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Attends the rank's queries to its own keys and to fetched keys. Returns (out, lse, the fetched blocks).

    columns: an element for each fetched block, at least two: their number as a dynamic shape. given: the fields of a
    PartialAttention, whose route is of block_size.
    """
    run = PartialAttention(*given)
    route: Route = record_of(run.handle)
    calls, buffer = route.forward, empty_blocks(k, v, len(columns), block_size)
    fetching = _fetch(k, v, buffer, route)
    if isinstance(calls, TwoCalls):
        fetching.wait_for_start()
        out, lse = run.forward(q, k, v, calls.near)
        fetched = fetching.wait()
        if calls.far is not None:
            merge(out, lse, run.forward(q, *unpack(fetched, k.shape[3]), calls.far))
    else:
        out, lse = run.forward(q, *append_fetched(k, v, route.traffic.received, block_size, fetching.wait), calls)
    return out, lse, buffer


@attend_blocks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, columns: Tensor, block_size: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *fake_results(q, k, v), empty_blocks(k, v, columns.shape[0], block_size)


@torch.library.custom_op(operator_name("context_attention_backward"), mutates_args=(), schema=_BACKWARD)
def _backward(dout: Tensor, dlse: Tensor | None, *saved: Any) -> Gradients:
    """Returns (dq, dk, dv) of the rank's tokens. saved: tensors of ``_save_tensors``, then the fields of PartialAttention."""
    q, k, v, buffer, out, lse, *given = saved
    run, rows = PartialAttention(*given), QueryRows(q, dout, dlse, out, lse)
    route: Route = record_of(run.handle)
    calls = route.backward
    fetched, tokens = buffer[: route.traffic.received], k.shape[2]
    # One call allocates the message after its workspace is freed.
    allocate = partial(Message.allocate, buffer, route.traffic.reverse, route)
    if isinstance(calls, TwoCalls):
        (dq, dk, dv), returning = run.backward_in_two_calls(rows, (k, v), fetched, calls, allocate())
    else:
        # Not held by a name, so that they are freed before the message is allocated.
        dq, all_dk, all_dv = run.backward(rows, *append_fetched(k, v, len(fetched), route.block_size, lambda: fetched), calls)
        message = allocate()
        pack(all_dk[:, :, tokens:], all_dv[:, :, tokens:], message.pieces)
        returning = message.send()
        dk, dv = (torch.empty_like(t).copy_(whole[:, :, :tokens]) for t, whole in ((k, all_dk), (v, all_dv)))
    # Gradients of other ranks are added in the order of ranks, so that bits repeat, and rounded once.
    for gradient, half in zip((dk, dv), split_packed(returning.wait(), k.shape[3]), strict=True):
        add_blocks(gradient, as_tokens(half), route.gradient_targets, route.block_size, route.gradient_sources)
    return dq, dk, dv


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Gradients:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_tensors(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, _, _, handle, *ctx.settings = inputs
    out, lse, buffer = output
    ctx.save_for_backward(q, k, v, buffer, out, lse, handle)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    *_, out, lse, _ = saved = ctx.saved_tensors
    gradients = _backward(*prepare_upstream(dout, dlse, out, lse), *saved, *ctx.settings)
    return *gradients, None, None, *[None] * len(PartialAttention._fields)


attend_blocks.register_autograd(_differentiate, setup_context=_save_tensors)
_backward.register_autograd(refuse_second_derivatives)


@torch.library.custom_op(operator_name("all_to_all"), mutates_args=())
def all_to_all(parts: Tensor, handle: Tensor) -> Tensor:
    """Exchanges parts, (ranks, ...): part i of rank j becomes part j of rank i. handle: of the process group."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=record_of(handle))
    return received


@all_to_all.register_fake
def _(parts: Tensor, handle: Tensor) -> Tensor:
    return parts.new_empty(parts.shape)


all_to_all.register_autograd(
    lambda ctx, gradient: (all_to_all(gradient, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def _fetch(k: Tensor, v: Tensor, buffer: Tensor, route: Route) -> PendingExchange:
    """Starts fetching the blocks of others to the start of the buffer."""
    message = Message.allocate(buffer, route.traffic, route)
    pack(k, v, message.pieces, route.sent_blocks if message.memory is None else route.message_blocks)
    return message.send(buffer[: route.traffic.received])
