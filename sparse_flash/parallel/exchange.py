"""Operators that exchange tensors among ranks, each with its gradient.

An exchange starts and ends within its operator, because waiting for a functional collective under torch.compile is not dependable
(pytorch#168352, #179858). Meanwhile the operator attends the columns that the rank has. The process group moves tensors on its own
stream, and keeps them alive until the current stream waits for that stream. The host never waits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import backends
from ..compat.flop_counter import flop_formula
from ..compat.names import operator_name
from ..dispatch.flops import backward_flops, count_mask_pairs, forward_flops, have_values, kept_pairs
from ..dispatch.operators import prepare_upstream, refuse_second_derivatives
from ..variant.variant import Variant
from .calls import PartialAttention, RowResults, add_blocks, merge
from .queries import attend_queries, differentiate_queries, merge_shared_rows, send_queries, send_results, write_query_gradients
from .routes import OneCall, Peers, Route, TwoCalls
from .transfer import (
    PendingExchange,
    allocate_message,
    append_fetched,
    as_tokens,
    block_shape,
    empty_blocks,
    memory_for,
    pack,
    pack_with_space,
    split_packed,
    start_exchange,
    unpacked,
)


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: torch.Tensor,
    handle: torch.Tensor,
    block_size: int,
    keep_fetched: bool,
    scale: float | None,
    deterministic: bool,
    backend: str,
    dropout: Variant | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends the rank's queries to its own keys and to fetched keys. Returns (out, lse), differentiable in q, k and v.

    q, k, v: as for ``sf.attention``, the rank's tokens, whole blocks. columns: a tensor with an element for each fetched block, at
    least two. Its length tells the compiler their number as a dynamic shape. handle: of a Route of block_size. keep_fetched:
    whether fetched blocks are saved for the backward pass. dropout: as in ``PartialAttention``.
    """
    seed, batch_heads, dropout_p = (None, None, 0.0) if dropout is None else (dropout.seed, dropout.batch_heads, dropout.dropout_p)
    options = block_size, keep_fetched, scale, deterministic, backend, dropout_p
    return _attend_blocks(q, k, v, columns, handle, seed, batch_heads, *options)[:2]


@torch.library.custom_op(operator_name("context_attention"), mutates_args=())
def _attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: torch.Tensor,
    handle: torch.Tensor,
    seed: torch.Tensor | None,
    batch_heads: torch.Tensor | None,
    block_size: int,
    keep_fetched: bool,
    scale: float | None,
    deterministic: bool,
    backend: str,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out, lse, the fetched blocks). The third is empty if they are not kept."""
    route = Route.from_handle(handle)
    calls, shared = route.forward, route.shared
    run = PartialAttention(_scale_of(q, scale), deterministic, backend, _dropout_variant(seed, batch_heads, dropout_p))
    buffer = empty_blocks(k, v, len(columns), block_size)
    # All ranks start their exchanges in this order, whatever they compute in between.
    queries = send_queries(q, shared, route) if shared else None
    arriving = _fetch(k, v, buffer, route)
    every = None
    if isinstance(calls, TwoCalls):
        arriving.wait_for_start()
        out, lse = run.forward(q, k, v, calls.near)
    elif route.received:
        every = pack_with_space(k, v, route.received, block_size)
    parts = attend_queries(queries, k, v, run, shared, route) if shared and queries else None
    fetched = arriving.arrived()
    if isinstance(calls, OneCall):
        out, lse = run.forward(q, *append_fetched(k, v, fetched, every), calls.mask)
    elif calls.far is not None:
        merge(out, lse, run.forward(q, *unpacked(fetched, k.shape[3]), calls.far))
    if shared and parts:
        merge_shared_rows(out, lse, parts, shared)
    return out, lse, buffer if keep_fetched else buffer.new_empty(0)


@_attend_blocks.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: torch.Tensor,
    handle: torch.Tensor,
    seed: torch.Tensor | None,
    batch_heads: torch.Tensor | None,
    block_size: int,
    keep_fetched: bool,
    scale: float | None,
    deterministic: bool,
    backend: str,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    buffer = empty_blocks(k, v, columns.shape[0], block_size) if keep_fetched else k.new_empty(0)
    return backends.empty_out(q, v.shape[3]), lse, buffer


@torch.library.custom_op(operator_name("context_attention_backward"), mutates_args=())
def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    buffer: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: torch.Tensor,
    seed: torch.Tensor | None,
    batch_heads: torch.Tensor | None,
    block_size: int,
    keep_fetched: bool,
    scale: float | None,
    deterministic: bool,
    backend: str,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv) of the rank's tokens."""
    route = Route.from_handle(handle)
    calls, shared = route.backward, route.shared
    run = PartialAttention(_scale_of(q, scale), deterministic, backend, _dropout_variant(seed, batch_heads, dropout_p))
    results = RowResults(dout, dlse, out, lse)
    sent = send_results(q, results, shared, route) if shared else None
    fetching = None
    if not keep_fetched:
        buffer = empty_blocks(k, v, route.received, block_size)
        fetching = _fetch(k, v, buffer, route)
    fetched = buffer[: route.received]
    if isinstance(calls, OneCall):
        if fetching:
            fetching.arrived()
        dq, dk, dv = run.backward(q, *append_fetched(k, v, fetched), results, calls.mask)
        own = k.shape[2]
        gradients = _allocate_gradients(k, v, route)
        pack(dk[:, :, own:], dv[:, :, own:], gradients)
        returning = _send_gradients(gradients, route)
        dk, dv = (torch.empty_like(t).copy_(d[:, :, :own]) for t, d in ((k, dk), (v, dv)))
    else:
        # The call on the rank's own columns overlaps an exchange: of blocks if they are fetched again, else of gradients.
        of, near = run.split_backward(q, k, v, fetched, results, calls), None
        if fetching:
            fetching.wait_for_start()
            near = of.near(k, v)
            fetching.arrived()
        # The previous message must have arrived, as this one may be written to the same memory.
        gradients = _allocate_gradients(k, v, route)
        of.far(fetched, gradients)
        returning = _send_gradients(gradients, route)
        if near is None:
            returning.wait_for_start()
        dk, dv = near or of.near(k, v)
        dq = of.queries()
    if shared and sent:
        parts, *of_own = differentiate_queries(sent, q.shape[3], k, v, run, shared, route)
        for gradient, more in zip((dk, dv), of_own, strict=True):
            gradient.add_(more)
        write_query_gradients(dq, parts, shared)
    _add_returned(dk, dv, returning.arrived(), route)
    return dq, dk, dv


@_backward.register_fake
def _(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_tensors(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    q, k, v, _, handle, seed, batch_heads, *ctx.options = inputs
    out, lse, buffer = output
    ctx.save_for_backward(q, k, v, buffer, out, lse, handle, seed, batch_heads)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, *saved = ctx.saved_tensors
    _, out, lse, *_ = saved
    return *_backward(*prepare_upstream(dout, dlse, out, lse), q, k, v, *saved, *ctx.options), *(None,) * (4 + len(ctx.options))


def _count_pairs(q: torch.Tensor, k: torch.Tensor, handle: torch.Tensor, forward: bool) -> int:
    """How many pairs a pass attends on this rank."""
    if not have_values(handle):
        return kept_pairs(q, k, None)
    route = Route.from_handle(handle)
    calls = route.forward if forward else route.backward
    parts = [calls.mask] if isinstance(calls, OneCall) else [calls.near, calls.far]
    shared = None if route.shared is None else route.shared.mask
    return sum(count_mask_pairs(part.mask, q.shape[0], q.shape[1]) for part in (*parts, shared) if part is not None)


@flop_formula("context_attention")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, columns: torch.Tensor, handle: torch.Tensor, *_: Any, **__: Any) -> int:
    return forward_flops(q.shape[3], v.shape[3]) * _count_pairs(q, k, handle, forward=True)


@flop_formula("context_attention_backward")
def _(dout: object, dlse: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *saved: Any, **_: Any) -> int:
    return backward_flops(q.shape[3], v.shape[3]) * _count_pairs(q, k, saved[3], forward=False)  # after buffer, out and lse


_attend_blocks.register_autograd(_gradients, setup_context=_save_tensors)
_backward.register_autograd(refuse_second_derivatives)


@torch.library.custom_op(operator_name("seed_of_first_rank"), mutates_args=())
def seed_of_first_rank(seed: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """Returns the first rank's seed on every rank. It is an operator of its own, so checkpointing keeps or recomputes the seed as
    it does on one rank."""
    seed = seed.clone()
    dist.broadcast(seed, group=Peers.from_handle(handle).group, group_src=0)
    return seed


@seed_of_first_rank.register_fake
def _(seed: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(seed)


@torch.library.custom_op(operator_name("all_to_all"), mutates_args=())
def all_to_all(parts: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """Exchanges parts: part i of rank j becomes part j of rank i. The operator is its own gradient. parts: (ranks, ...), of one
    shape on all ranks."""
    parts = parts.contiguous()
    theirs = torch.empty_like(parts)
    dist.all_to_all_single(theirs, parts, group=Peers.from_handle(handle).group)
    return theirs


@all_to_all.register_fake
def _(parts: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return parts.new_empty(parts.shape)


def _keep_handle(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _exchange_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return all_to_all(gradient, *ctx.saved_tensors), None


all_to_all.register_autograd(_exchange_gradient, setup_context=_keep_handle)


def exchange_blocks(k: torch.Tensor, v: torch.Tensor, route: Route) -> None:
    """Fetches the blocks that a forward pass fetches, and computes nothing."""
    _fetch(k, v, empty_blocks(k, v, route.received, route.block_size), route).arrived()


def _fetch(k: torch.Tensor, v: torch.Tensor, buffer: torch.Tensor, route: Route) -> PendingExchange:
    """Starts fetching the blocks of others to the start of the buffer."""
    piece = buffer.shape[1:]
    packed = allocate_message(buffer, route.traffic, *piece, route=route)
    pack(k, v, packed, route.send_once if memory_for(route.traffic, piece, buffer, route) else route.send)
    return start_exchange(buffer[: route.received], packed, route.traffic, route)


def _allocate_gradients(k: torch.Tensor, v: torch.Tensor, route: Route) -> torch.Tensor:
    """Returns memory for the gradients of fetched blocks."""
    return allocate_message(k, route.traffic.reverse, *block_shape(k, v, route.block_size), route=route)


def _send_gradients(gradients: torch.Tensor, route: Route) -> PendingExchange:
    """Sends the gradients of fetched blocks to their owners. The gradients of the rank's sent blocks arrive, in ``send``'s
    order."""
    return start_exchange(gradients.new_empty(len(route.send), *gradients.shape[1:]), gradients, route.traffic.reverse, route)


def _add_returned(dk: torch.Tensor, dv: torch.Tensor, theirs: torch.Tensor, route: Route) -> None:
    """Adds the gradients that other ranks computed to dk and dv, in the order of ranks, so that bits repeat. Rounds once."""
    for gradient, half in zip((dk, dv), split_packed(theirs, dk.shape[3]), strict=True):
        add_blocks(gradient, as_tokens(half), route.answered, route.block_size, route.answers)


def _scale_of(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale


def _dropout_variant(seed: torch.Tensor | None, batch_heads: torch.Tensor | None, dropout_p: float) -> Variant | None:
    return None if seed is None else Variant(seed=seed, batch_heads=batch_heads, dropout_p=dropout_p)
