"""Operators that exchange tensors among ranks, each with its gradient.

A plan's numbers do not cross an operator's boundary. A handle does, the number of a ``Route`` in a 0-d tensor on the CPU, so
torch.compile guards on no number of a plan, and one graph serves every plan of one shape. An exchange starts and ends within its
operator, as waiting for a functional collective under torch.compile is not dependable (pytorch#168352, #179858).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from .. import backends
from ..dispatch.operators import refuse_second_derivatives
from ..masks.block_mask import BlockMask

_routes: WeakValueDictionary[int, Route] = WeakValueDictionary()
_numbers = count()


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's part in the exchanges of a plan, on its device.

    mask: of the call that the rank makes. Where blocks are fetched, its rows are the rank's blocks, and its columns these and then
    the blocks that it gets.
    send: (sent blocks,) int64, which of the rank's blocks go out, those for rank 0 first. sends, receives: how many go to each rank
    and come from each. silent: no rank sends anything.
    """

    group: dist.ProcessGroup
    mask: BlockMask
    send: torch.Tensor
    sends: list[int]
    receives: list[int]
    silent: bool
    handle: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        number = next(_numbers)
        object.__setattr__(self, "handle", torch.tensor(number, device="cpu"))
        _routes[number] = self

    @property
    def received(self) -> int:
        return sum(self.receives)

    @classmethod
    def behind(cls, handle: torch.Tensor) -> Route:
        return _routes[int(handle)]

    def forth(self, theirs: torch.Tensor, packed: torch.Tensor) -> None:
        """Sends blocks and fills ``theirs`` with those of others; both contiguous, block after block."""
        if not self.silent:
            dist.all_to_all_single(theirs, packed, self.receives, self.sends, group=self.group)

    def back(self, gradients: torch.Tensor) -> torch.Tensor:
        """Returns the gradients of blocks that came from others; gets those of the blocks sent, in the order of ``send``."""
        mine = gradients.new_empty(len(self.send), *gradients.shape[1:])
        if not self.silent:
            dist.all_to_all_single(mine, gradients, self.sends, self.receives, group=self.group)
        return mine


def attention_of_blocks(q, k, v, columns: torch.Tensor, route: Route, scale: float | None, deterministic: bool, backend: str):
    """(out, lse) of the rank's queries over its own keys and those that it gets; differentiable in q, k and v.

    q, k, v: as for ``sf.attention``, the rank's tokens, whole blocks. columns: a tensor with an element for each block column of
    the route's mask: the compiler knows their number by its shape, and lets it vary.
    """
    block_size = route.mask.block_size
    return _attention_of_blocks(q, k, v, columns, route.handle, block_size, scale, deterministic, backend)[:2]


@torch.library.custom_op("sparse_flash::context_attention", mutates_args=())
def _attention_of_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: torch.Tensor,
    handle: torch.Tensor,
    block_size: int,
    scale: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, keys and values, packed)"""
    route = Route.behind(handle)
    own = _packed(k, v, block_size)
    # What arrives lands behind the rank's own blocks, where the back end reads both.
    every = own.new_empty(len(columns), *own.shape[1:])
    every[: len(own)] = own
    route.forth(every[len(own) :], own.index_select(0, route.send))
    keys, values = _unpacked(every, k.shape[3])
    run, mask = _prepared(q, keys, values, route, deterministic, backend)
    out, lse = run.forward(q, keys, values, mask, _scale_of(q, scale), None)
    return out, lse, every


@_attention_of_blocks.register_fake
def _(q, k, v, columns, handle, block_size, scale, deterministic, backend):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    every = k.new_empty(columns.shape[0], block_size, *k.shape[:2], k.shape[3] + v.shape[3])
    return backends.empty_out(q, v.shape[3]), lse, every


@torch.library.custom_op("sparse_flash::context_attention_backward", mutates_args=())
def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    every: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: torch.Tensor,
    scale: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dq, the gradients of the rank's own keys and values, packed)"""
    route = Route.behind(handle)
    keys, values = _unpacked(every, q.shape[3])
    run, mask = _prepared(q, keys, values, route, deterministic, backend)
    dq, dk, dv = run.backward(dout, dlse, q, keys, values, out, lse, mask, _scale_of(q, scale), deterministic, None)
    gradients = _packed(dk, dv, every.shape[1])
    own = len(every) - route.received
    theirs = route.back(gradients[own:])
    total = gradients[:own].to(torch.promote_types(every.dtype, torch.float32))
    # Rank after rank, so that bits repeat: no block comes twice from one rank.
    for index, part in zip(route.send.split(route.sends), theirs.split(route.sends), strict=True):
        total.index_add_(0, index, part.to(total.dtype))
    return dq, total.to(every.dtype, copy=True)


@_backward.register_fake
def _(dout, dlse, q, every, out, lse, handle, scale, deterministic, backend):
    own = q.shape[2] // every.shape[1]
    return torch.empty_like(q), every.new_empty(own, *every.shape[1:])


def _keep(ctx, inputs, output):
    q, _, _, _, handle, _, *ctx.options = inputs
    out, lse, every = output
    ctx.save_for_backward(q, every, out, lse, handle)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse, _):
    q, every, out, lse, handle = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, packed = _backward(dout, dlse, q, every, out, lse, handle, *ctx.options)
    return dq, *_unpacked(packed, q.shape[3]), *(None,) * 6


_attention_of_blocks.register_autograd(_gradients, setup_context=_keep)
_backward.register_autograd(refuse_second_derivatives)


@torch.library.custom_op("sparse_flash::all_to_all", mutates_args=())
def all_to_all(parts: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """Part i of rank j becomes part j of rank i. parts: (ranks, ...), of one shape on all ranks. Its own gradient."""
    parts = parts.contiguous()
    theirs = torch.empty_like(parts)
    dist.all_to_all_single(theirs, parts, group=Route.behind(handle).group)
    return theirs


@all_to_all.register_fake
def _(parts, handle):
    return parts.new_empty(parts.shape)


def _keep_handle(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _returned(ctx, gradient):
    return all_to_all(gradient, *ctx.saved_tensors), None


all_to_all.register_autograd(_returned, setup_context=_keep_handle)


def _packed(k: torch.Tensor, v: torch.Tensor, block_size: int) -> torch.Tensor:
    """(blocks, block, batch, kv_heads, head_dim + v_head_dim), contiguous: a block is one piece, with its keys and its values."""
    by_token = torch.cat([k, v], 3).permute(2, 0, 1, 3)
    return by_token.unflatten(0, (-1, block_size)).contiguous()


def _unpacked(packed: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, (batch, kv_heads, tokens, head_dim), as views."""
    by_head = packed.flatten(0, 1).permute(1, 2, 0, 3)
    return by_head[..., :head_dim], by_head[..., head_dim:]


def _prepared(q, keys, values, route: Route, deterministic: bool, backend: str):
    """(back end, the mask that it walks)"""
    mask = route.mask.walked(q.is_cuda)
    call = backends.Call.of(q, keys, values, None if mask is None else mask.block_size, deterministic=deterministic)
    return backends.backend(backends.choose(backend, call)), mask


def _scale_of(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale
