"""Operators that exchange tensors among ranks, each with its gradient.

An exchange starts and ends within its operator, as waiting for a functional collective under torch.compile is not dependable
(pytorch#168352, #179858). In between, the operator attends what the rank has. The process group moves tensors on a stream of its
own, and keeps them until the current stream waits for it; the host never does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import backends
from ..dispatch.operators import refuse_second_derivatives
from ..masks.block_mask import BlockMask
from .routes import OneCall, Peers, Route


def attention_of_blocks(
    q, k, v, columns: torch.Tensor, route: Route, keep_fetched: bool, scale: float | None, deterministic: bool, backend: str
):
    """(out, lse) of the rank's queries over its own keys and those that it gets; differentiable in q, k and v.

    q, k, v: as for ``sf.attention``, the rank's tokens, whole blocks. columns: a tensor with an element for each block that is
    fetched, and two at least: the compiler knows their number by its shape, and lets it vary. keep_fetched: for the backward pass.
    """
    options = route.block_size, keep_fetched, scale, deterministic, backend
    return _attention_of_blocks(q, k, v, columns, route.handle, *options)[:2]


@torch.library.custom_op("sparse_flash::context_attention", mutates_args=())
def _attention_of_blocks(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, the fetched blocks; none if they are not kept)"""
    route = Route.behind(handle)
    calls, run = route.forward, _Call(_scale_of(q, scale), deterministic, backend)
    buffer = _empty_blocks(k, v, len(columns), block_size)
    arriving = _fetch(k, v, buffer, route)
    if isinstance(calls, OneCall):
        out, lse = run.forward(q, *_gathered(k, v, arriving.arrived()), calls.mask)
    else:
        out, lse = run.forward(q, k, v, calls.near)
        fetched = arriving.arrived()
        if calls.far is not None:
            part = run.forward(_of_blocks(q, calls.rows, block_size), *_unpacked(fetched, k.shape[3]), calls.far)
            _join(out, lse, part, calls.rows, block_size)
    return out, lse, buffer if keep_fetched else buffer.new_empty(0)


@_attention_of_blocks.register_fake
def _(q, k, v, columns, handle, block_size, keep_fetched, scale, deterministic, backend):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    buffer = _empty_blocks(k, v, columns.shape[0], block_size) if keep_fetched else k.new_empty(0)
    return backends.empty_out(q, v.shape[3]), lse, buffer


@torch.library.custom_op("sparse_flash::context_attention_backward", mutates_args=())
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
    block_size: int,
    keep_fetched: bool,
    scale: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of the rank's tokens"""
    route = Route.behind(handle)
    calls, run = route.backward, _Call(_scale_of(q, scale), deterministic, backend)
    fetching = None
    if not keep_fetched:
        buffer = _empty_blocks(k, v, route.received, block_size)
        fetching = _fetch(k, v, buffer, route)
    fetched, gradients = buffer[: route.received], _empty_blocks(k, v, route.received, block_size)
    results = _Results(dout, dlse, out, lse)
    if isinstance(calls, OneCall):
        if fetching:
            fetching.arrived()
        dq, dk, dv = run.backward(q, *_gathered(k, v, fetched), results, calls.mask)
        own = k.shape[2]
        _pack(dk[:, :, own:], dv[:, :, own:], gradients)
        returning = _give_back(gradients, route)
        dk, dv = (torch.empty_like(t).copy_(d[:, :, :own]) for t, d in ((k, dk), (v, dv)))
    else:
        # The call on the rank's own columns overlaps what travels: blocks that are fetched again, else gradients.
        near = dq_far = None
        if fetching:
            near = run.backward(q, k, v, results, calls.near)
            fetching.arrived()
        if calls.far is not None:
            far_q, far_results = _of_blocks(q, calls.rows, block_size), results.of_blocks(calls.rows, block_size)
            dq_far, dk, dv = run.backward(far_q, *_unpacked(fetched, k.shape[3]), far_results, calls.far)
            _pack(dk, dv, gradients)
        returning = _give_back(gradients, route)
        dq, dk, dv = near or run.backward(q, k, v, results, calls.near)
        if dq_far is not None:
            _add(dq, dq_far, calls.rows, block_size)
    _add_returned(dk, dv, returning.arrived(), route)
    return dq, dk, dv


@_backward.register_fake
def _(dout, dlse, q, k, v, *_):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx, inputs, output):
    q, k, v, _, handle, *ctx.options = inputs
    out, lse, buffer = output
    ctx.save_for_backward(q, k, v, buffer, out, lse, handle)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, _):
    q, k, v, buffer, out, lse, handle = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    return *_backward(dout, dlse, q, k, v, buffer, out, lse, handle, *ctx.options), *(None,) * 7


_attention_of_blocks.register_autograd(_gradients, setup_context=_keep)
_backward.register_autograd(refuse_second_derivatives)


@torch.library.custom_op("sparse_flash::all_to_all", mutates_args=())
def all_to_all(parts: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """Part i of rank j becomes part j of rank i. parts: (ranks, ...), of one shape on all ranks. Its own gradient."""
    parts = parts.contiguous()
    theirs = torch.empty_like(parts)
    dist.all_to_all_single(theirs, parts, group=Peers.behind(handle).group)
    return theirs


@all_to_all.register_fake
def _(parts, handle):
    return parts.new_empty(parts.shape)


def _keep_handle(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _returned(ctx, gradient):
    return all_to_all(gradient, *ctx.saved_tensors), None


all_to_all.register_autograd(_returned, setup_context=_keep_handle)


class _Results(NamedTuple):
    """What a backward pass starts from. dlse: None if nothing depends on lse."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor

    def of_blocks(self, rows: torch.Tensor | None, block_size: int) -> _Results:
        dlse = None if self.dlse is None else _of_blocks(self.dlse, rows, block_size)
        dout, out, lse = (_of_blocks(t, rows, block_size) for t in (self.dout, self.out, self.lse))
        return _Results(dout, dlse, out, lse)


class _Call(NamedTuple):
    """Calls of back ends on parts of a rank's attention."""

    scale: float
    deterministic: bool
    backend: str

    def forward(self, q, k, v, mask: BlockMask):
        """(out, lse)"""
        run, walked = self._prepared(q, k, v, mask)
        return run.forward(q, k, v, walked, self.scale, None)

    def backward(self, q, k, v, results: _Results, mask: BlockMask):
        """(dq, dk, dv) of the pairs of one part. results: of all parts, as a part's probabilities follow from the whole lse."""
        run, walked = self._prepared(q, k, v, mask)
        dout, dlse, out, lse = results
        return run.backward(dout, dlse, q, k, v, out, lse, walked, self.scale, self.deterministic, None)

    def _prepared(self, q, k, v, mask: BlockMask):
        walked = mask.walked(q.is_cuda)
        size = None if walked is None else walked.block_size
        call = backends.Call.of(q, k, v, size, deterministic=self.deterministic)
        return backends.backend(backends.choose(self.backend, call)), walked


class _Arriving(NamedTuple):
    """What an exchange fills, and what it reads. They live until it is done."""

    theirs: torch.Tensor
    mine: torch.Tensor | None = None
    work: dist.Work | None = None

    def arrived(self) -> torch.Tensor:
        """From here on the current stream may read it."""
        if self.work is not None:
            self.work.wait()
        return self.theirs


def _started(theirs: torch.Tensor, mine: torch.Tensor, receives: list[int], sends: list[int], route: Route) -> _Arriving:
    """Sends ``mine`` and fills ``theirs``; both contiguous, block after block."""
    return _Arriving(theirs, mine, dist.all_to_all_single(theirs, mine, receives, sends, group=route.group, async_op=True))


def _fetch(k: torch.Tensor, v: torch.Tensor, buffer: torch.Tensor, route: Route) -> _Arriving:
    """The blocks of others, at the start of the buffer."""
    fetched = buffer[: route.received]
    if route.silent:
        return _Arriving(fetched)
    packed = buffer.new_empty(len(route.send), *buffer.shape[1:])
    # Straight from k and v: one pass over the blocks that go out, and none over the others.
    for tensor, half in zip((k, v), _halves(packed, k.shape[3]), strict=True):
        torch.index_select(_by_block(tensor, buffer.shape[1]), 0, route.send, out=half)
    return _started(fetched, packed, route.receives, route.sends, route)


def _give_back(gradients: torch.Tensor, route: Route) -> _Arriving:
    """Sends the gradients of fetched blocks to their owners. Those of the blocks sent arrive, in the order of ``send``."""
    mine = gradients.new_empty(len(route.send), *gradients.shape[1:])
    return _Arriving(mine) if route.silent else _started(mine, gradients, route.sends, route.receives, route)


def _add_returned(dk: torch.Tensor, dv: torch.Tensor, theirs: torch.Tensor, route: Route) -> None:
    """Adds what others computed to dk and dv, rank after rank, so that bits repeat, and rounds once."""
    if not len(theirs):
        return
    block_size, head_dim = theirs.shape[1], dk.shape[3]
    wide = torch.promote_types(theirs.dtype, torch.float32)
    mine = [_by_block(t, block_size) for t in (dk, dv)]
    total = torch.cat([t.index_select(0, route.answered) for t in mine], -1).to(wide)
    # No block comes twice from one rank.
    for index, part in zip(route.returned.split(route.sends), theirs.split(route.sends), strict=True):
        total.index_add_(0, index, part.to(wide))
    for tensor, half in zip(mine, _halves(total, head_dim), strict=True):
        tensor.index_copy_(0, route.answered, half.to(tensor.dtype))


def _empty_blocks(k: torch.Tensor, v: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """(count, block, batch, kv_heads, head_dim + v_head_dim): a block is one piece, with its keys and its values."""
    return k.new_empty(count, block_size, *k.shape[:2], k.shape[3] + v.shape[3])


def _halves(packed: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return packed[..., :head_dim], packed[..., head_dim:]


def _by_block(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """(blocks, block, batch, heads, size), a view of x, (batch, heads, tokens, size)."""
    return x.unflatten(2, (-1, block_size)).permute(2, 3, 0, 1, 4)


def _pack(k: torch.Tensor, v: torch.Tensor, packed: torch.Tensor) -> None:
    """Fills blocks with keys and values."""
    for tensor, half in zip((k, v), _halves(packed, k.shape[3]), strict=True):
        half.copy_(_by_block(tensor, packed.shape[1]))


def _unpacked(packed: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, (batch, kv_heads, tokens, head_dim), as views."""
    return _halves(packed.flatten(0, 1).permute(1, 2, 0, 3), head_dim)


def _gathered(k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of the rank and of the fetched blocks behind them."""
    if not len(fetched):
        return k, v
    block_size = fetched.shape[1]
    own = k.shape[2] // block_size
    every = _empty_blocks(k, v, own + len(fetched), block_size)
    _pack(k, v, every[:own])
    every[own:] = fetched
    return _unpacked(every, k.shape[3])


def _of_blocks(x: torch.Tensor, rows: torch.Tensor | None, block_size: int) -> torch.Tensor:
    """Some blocks of x, (batch, heads, tokens, ...); None: all."""
    return x if rows is None else x.unflatten(2, (-1, block_size)).index_select(2, rows).flatten(2, 3)


def _join(out: torch.Tensor, lse: torch.Tensor, part: tuple[torch.Tensor, torch.Tensor], rows, block_size: int) -> None:
    """Joins the results of some blocks over other keys to out and lse, in place."""
    part_out, part_lse = part
    mine = _of_blocks(lse, rows, block_size)
    total = torch.logaddexp(mine, part_lse)
    # A query that keeps nothing anywhere has -inf three times: weights of 0, not NaN.
    of_mine, of_part = ((x - total).exp().masked_fill(x == float("-inf"), 0)[..., None] for x in (mine, part_lse))
    joined = _of_blocks(out, rows, block_size).mul_(of_mine).addcmul_(part_out, of_part)
    if rows is None:
        lse.copy_(total)
        return
    for tensor, of_rows in ((out, joined), (lse, total)):
        tensor.unflatten(2, (-1, block_size)).index_copy_(2, rows, of_rows.unflatten(2, (-1, block_size)))


def _add(dq: torch.Tensor, part: torch.Tensor, rows, block_size: int) -> None:
    """Adds the gradients of some blocks, in place."""
    if rows is None:
        dq.add_(part)
    else:
        dq.unflatten(2, (-1, block_size)).index_add_(2, rows, part.unflatten(2, (-1, block_size)))


def _scale_of(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale
