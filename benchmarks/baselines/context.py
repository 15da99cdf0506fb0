"""Ways to divide one sequence over the ranks of a mesh: ours, by strategy, and others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import DeviceMesh

import sparse_flash as sf
from sparse_flash.compat.pytorch import import_private
from sparse_flash.masks.block_mask import BlockMask
from sparse_flash.masks.pattern import And, Pattern
from sparse_flash.parallel import exchange, transfer
from sparse_flash.parallel.attend import BlockAttention, HeadAttention
from sparse_flash.parallel.plan import ContextPlan

from .flash import FlashAttention4, FlashOptions
from .flex import mask_function

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# How long a rank waits for others, whose first calls compile.
PATIENCE = timedelta(seconds=150)


@dataclass(frozen=True)
class DividedSequence:
    """pattern, mask: the mask of all tokens in both forms, the second on the device. q: (1, heads, tokens, head_dim) of the whole
    sequence, k, v: (1, kv_heads, tokens, head_dim): the same on every rank. ranks: that share it."""

    pattern: Pattern
    mask: BlockMask
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    ranks: int

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]


class Divided(NamedTuple):
    """leaves: q, k and v of the rank's tokens. attend: one forward pass, out of the rank's tokens. whole: what all ranks have of a
    tensor of such tokens, in the order of the sequence; a collective call. received: bytes that the slowest rank gets in a forward
    pass; None: not known. exchange: the exchange of a forward pass alone; None: it cannot be separated."""

    leaves: Leaves
    attend: Callable[[], torch.Tensor]
    whole: Callable[[torch.Tensor], torch.Tensor]
    received: float | None
    exchange: Callable[[], object] | None = None


class Way:
    def refuses(self, sequence: DividedSequence) -> str | None:
        """Why it cannot divide the sequence, or None; the same on every rank."""
        return None

    @contextmanager
    def divided(self, sequence: DividedSequence, mesh: DeviceMesh) -> Iterator[Divided]:
        """Calls are made within this context."""
        raise NotImplementedError
        yield


@dataclass(frozen=True)
class Planned(Way):
    """sf.context_parallel. strategy, overlap: as it takes them."""

    strategy: str = "auto"
    overlap: bool | None = None

    @contextmanager
    def divided(self, sequence, mesh):
        heads, kv_heads = sequence.heads
        # fmt: off
        plan = sf.context_parallel(sequence.pattern, sequence.mask.q_len, mesh, heads=heads, kv_heads=kv_heads,
                                   strategy=self.strategy, overlap=self.overlap)
        # fmt: on
        q, k, v = (plan.shard(t, 2).requires_grad_() for t in (sequence.q, sequence.k, sequence.v))
        exchange = partial(_exchange_alone, plan, q, k, v)
        yield Divided((q, k, v), lambda: plan.attention(q, k, v), lambda t: plan.unshard(t, 2), exchange(), exchange)


@torch.no_grad()
def _exchange_alone(plan: ContextPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Makes the exchanges of a forward pass and computes nothing. Returns the most bytes that a rank gets. v: with q's head_dim."""
    if isinstance(plan._local, HeadAttention):
        plan._local.exchange_heads_for_tokens(plan._local.exchange_tokens_for_heads([q, k, v])[0])  # q has the size of out
        return _Pieces.bytes_of((q, k, v, q), plan.ranks, 1 / plan.ranks)
    assert isinstance(plan._local, BlockAttention)
    route = plan._local.route
    fetched = transfer.empty_blocks(k, v, route.traffic.received, route.block_size)
    exchange._fetch(k, v, fetched, route).wait()
    return int(route.traffic.pieces.sum(0).max()) * _Pieces.bytes_of((k, v), 2, 1.0) * route.block_size / plan.tokens


class _Pieces(Way):
    """Each rank has one piece of the sequence."""

    def refuses(self, sequence):
        ranks, tokens = sequence.ranks, sequence.mask.q_len
        return f"{ranks} ranks must divide the {tokens} tokens" if tokens % ranks else None

    @staticmethod
    def piece(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return x.chunk(mesh.size(), 2)[mesh.get_local_rank()].contiguous()

    def leaves(self, sequence: DividedSequence, mesh: DeviceMesh) -> Leaves:
        q, k, v = (self.piece(t, mesh).requires_grad_() for t in (sequence.q, sequence.k, sequence.v))
        return q, k, v

    @staticmethod
    def whole(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: _GatheredTokens.apply(t.detach(), mesh.get_group())

    @staticmethod
    def bytes_of(tensors: tuple[torch.Tensor, ...], ranks: int, share: float) -> float:
        return share * (ranks - 1) * sum(t.numel() * t.element_size() for t in tensors)


class _GatheredTokens(torch.autograd.Function):
    """Gathers the tokens of all ranks, (batch, heads, tokens, size)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        mine = x.movedim(2, 0).contiguous()
        every = mine.new_empty(dist.get_world_size(group) * mine.shape[0], *mine.shape[1:])
        dist.all_gather_into_tensor(every, mine, group)
        return every.movedim(0, 2)

    @staticmethod
    def backward(ctx, gradient):
        every = gradient.movedim(2, 0).contiguous()
        mine = every.new_empty(every.shape[0] // dist.get_world_size(ctx.group), *every.shape[1:])
        dist.reduce_scatter_tensor(mine, every, group=ctx.group)
        return mine.movedim(0, 2), None


class GatheredKeys(_Pieces):
    """Every rank gets all keys and values, then attends to them by FlexAttention: what PyTorch's context parallelism does for it,
    in pieces without its rearrangement."""

    def refuses(self, sequence):
        return super().refuses(sequence) if sequence.q.is_cuda else "FlexAttention has no backward pass on a CPU"

    @contextmanager
    def divided(self, sequence, mesh):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = self.leaves(sequence, mesh)
        tokens, own, form = sequence.mask.q_len, q.shape[2], mask_function(sequence.pattern, sequence.mask)
        first, on_gpu = mesh.get_local_rank() * own, q.is_cuda
        torch.compiler.reset()
        mask = create_block_mask(
            lambda b, h, i, j: form(b, h, i + first, j), None, None, own, tokens, device=q.device.type, _compile=on_gpu
        )
        attend = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
        grouped = q.shape[1] != k.shape[1]

        def run():
            keys, values = (_GatheredTokens.apply(t, mesh.get_group()) for t in (k, v))
            return attend(q, keys, values, block_mask=mask, enable_gqa=grouped)

        yield Divided((q, k, v), run, self.whole(mesh), self.bytes_of((k, v), mesh.size(), 1.0))


class ExchangedHeads(_Pieces):
    """Tokens exchanged for heads around FlashAttention-4, and back (arXiv:2309.14509): causal, with or without a window."""

    def refuses(self, sequence):
        if sequence.heads[1] % sequence.ranks:
            return f"{sequence.ranks} ranks must divide the {sequence.heads[1]} key heads"
        if _window(sequence.pattern) is None:
            return "it is measured causal, and in a causal window"
        return FlashAttention4().missing() or super().refuses(sequence)

    @contextmanager
    def divided(self, sequence, mesh):
        q, k, v = self.leaves(sequence, mesh)
        ranks, width, kernel = mesh.size(), _window(sequence.pattern), FlashAttention4()
        asked = FlashOptions(True, None if width == 0 else width - 1)

        def to_heads(t: torch.Tensor) -> torch.Tensor:
            """(1, tokens of all, heads of a rank, head_dim) of (1, heads, tokens, head_dim)"""
            every = self._exchange(t[0].unflatten(0, (ranks, -1)), mesh)
            return every.permute(0, 2, 1, 3).flatten(0, 1)[None]

        def run():
            out = kernel.attend(*map(to_heads, (q, k, v)), asked)[0]
            back = self._exchange(out.unflatten(0, (ranks, -1)).permute(0, 2, 1, 3), mesh)
            return back.flatten(0, 1)[None]

        yield Divided((q, k, v), run, self.whole(mesh), self.bytes_of((q, k, v, q), ranks, 1 / ranks))

    @staticmethod
    def _exchange(parts: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Returns this rank's pieces from all ranks: (ranks, ...) -> (ranks, ...)."""
        mine = parts.contiguous()
        return differentiable.all_to_all_single(torch.empty_like(mine), mine, group=mesh.get_group())


@dataclass(frozen=True)
class TorchContext(Way):
    """PyTorch's context parallelism around cuDNN's dense causal attention, its load balancing included. rotation: how keys and
    values come to a rank: "alltoall", in a ring, or "allgather", after the first call, its default."""

    rotation: str

    def refuses(self, sequence):
        if sequence.pattern.to_spec() != "causal":
            return "it is measured causal"
        if not sequence.q.is_cuda:
            return "PyTorch divides attention on GPUs"
        return None

    @contextmanager
    def divided(self, sequence, mesh):
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        unshard = import_private("distributed.tensor.experimental._attention:context_parallel_unshard")
        import_private("distributed.tensor.experimental._attention:set_rotate_method")(self.rotation)
        grouped = sequence.heads[0] != sequence.heads[1]
        buffers = [t.detach().clone() for t in (sequence.q, sequence.k, sequence.v)]
        dims = [2] * 3
        with (
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)),
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        ):
            q, k, v = (t.detach().requires_grad_() for t in buffers)
            received = _Pieces.bytes_of((k, v), mesh.size(), 1.0)

            def run():
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

            yield Divided((q, k, v), run, lambda t: unshard(mesh, [t.contiguous()], [2])[0], received)


def _window(pattern: Pattern) -> int | None:
    """Returns the width of a causal window; 0 for causal without one; None for other masks."""
    if pattern.to_spec() == "causal":
        return 0
    others = [p for p in pattern.operands if p.name != "causal"] if isinstance(pattern, And) else []
    return others[0].window if len(others) == 1 and isinstance(others[0], sf.local) else None


WAYS: dict[str, Way] = {
    "blocks, two calls": Planned("blocks", True),
    "blocks, one call": Planned("blocks", False),
    "heads": Planned("heads"),
    "auto": Planned(),
    "all-gather and FlexAttention": GatheredKeys(),
    "heads around FlashAttention-4": ExchangedHeads(),
    "PyTorch's ring": TorchContext("alltoall"),
    "PyTorch's all-gather": TorchContext("allgather"),
}


def barrier() -> None:
    """On the host: a collective that waits on a GPU would slow what runs there."""
    dist.barrier(group=_host_group(dist.group.WORLD))


def gather_from_ranks(value) -> list:
    """Returns the value of each rank, in their order; any picklable object."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, value, group=_host_group(dist.group.WORLD))
    return every


@cache
def _host_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """world: makes one for each initialization of the process group."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)
