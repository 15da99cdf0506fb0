"""Ways to divide one sequence over the ranks of a mesh: ours, by strategy, and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import DeviceMesh

import sparse_flash as sf
from sparse_flash.compat.pytorch import private
from sparse_flash.masks.block_mask import BlockMask
from sparse_flash.masks.pattern import And, Pattern
from sparse_flash.parallel.costs import LINK_RATE, SequenceSizes
from sparse_flash.parallel.explanation import explained

from .flash import Asked, FlashAttention4
from .flex import mask_function

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sequence:
    """pattern, mask: the mask of all tokens in both forms, the second on the device. q: (1, heads, tokens, head_dim) of the whole
    sequence, k, v: (1, kv_heads, tokens, head_dim): the same on every rank."""

    pattern: Pattern
    mask: BlockMask
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]


class Divided(NamedTuple):
    """leaves: q, k and v of the rank's tokens. attend: one forward pass, out of the rank's tokens. whole: what all ranks have of a
    tensor of such tokens, in the order of the sequence; a collective call. received: bytes that the slowest rank gets in a forward
    pass; None: not known."""

    leaves: Leaves
    attend: Callable[[], torch.Tensor]
    whole: Callable[[torch.Tensor], torch.Tensor]
    received: float | None


class Way:
    def refuses(self, sequence: Sequence, ranks: int) -> str | None:
        """Why it cannot divide the sequence, or None; the same on every rank."""
        return None

    @contextmanager
    def divided(self, sequence: Sequence, mesh: DeviceMesh) -> Iterator[Divided]:
        """Calls are made within this context."""
        raise NotImplementedError
        yield


@dataclass(frozen=True)
class Planned(Way):
    """sf.context_parallel. strategy, overlap: as it takes them."""

    strategy: str = "auto"
    overlap: bool | None = None

    def refuses(self, sequence, ranks):
        if self.strategy == "auto":
            return None
        sizes = SequenceSizes(sequence.mask.q_len, sequence.mask.block_size, *sequence.heads)
        costs = explained(sequence.mask.to("cpu"), sizes, ranks, LINK_RATE, True).costs
        return None if self.strategy in costs else f"the mask, {ranks} ranks and {sequence.heads[1]} key heads do not allow it"

    @contextmanager
    def divided(self, sequence, mesh):
        heads, kv_heads = sequence.heads
        # fmt: off
        plan = sf.context_parallel(sequence.pattern, sequence.mask.q_len, mesh, heads=heads, kv_heads=kv_heads,
                                   strategy=self.strategy, overlap=self.overlap)
        # fmt: on
        q, k, v = (plan.shard(t, 2).requires_grad_() for t in (sequence.q, sequence.k, sequence.v))
        received = plan.explain().costs[plan.strategy].received.max()
        yield Divided((q, k, v), lambda: plan.attention(q, k, v), lambda t: plan.unshard(t, 2), float(received))


class _Pieces(Way):
    """Each rank has one piece of the sequence."""

    def refuses(self, sequence, ranks):
        tokens = sequence.mask.q_len
        return f"{ranks} ranks must divide the {tokens} tokens" if tokens % ranks else None

    @staticmethod
    def piece(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return x.chunk(mesh.size(), 2)[mesh.get_local_rank()].contiguous()

    def leaves(self, sequence: Sequence, mesh: DeviceMesh) -> Leaves:
        q, k, v = (self.piece(t, mesh).requires_grad_() for t in (sequence.q, sequence.k, sequence.v))
        return q, k, v

    @staticmethod
    def whole(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
        def of_all(t: torch.Tensor) -> torch.Tensor:
            every = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
            dist.all_gather(every, t.contiguous(), mesh.get_group())
            return torch.cat(every, 2)

        return of_all

    @staticmethod
    def bytes_of(tensors: tuple[torch.Tensor, ...], ranks: int, share: float) -> float:
        return share * (ranks - 1) * sum(t.numel() * t.element_size() for t in tensors)


class GatheredKeys(_Pieces):
    """Every rank gets all keys and values, then attends to them by FlexAttention: what PyTorch's context parallelism does for it,
    in pieces without its rearrangement."""

    def refuses(self, sequence, ranks):
        return super().refuses(sequence, ranks) if sequence.q.is_cuda else "FlexAttention has no backward pass on a CPU"

    @contextmanager
    def divided(self, sequence, mesh):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = self.leaves(sequence, mesh)
        tokens, own, form = sequence.mask.q_len, q.shape[2], mask_function(sequence.pattern, sequence.mask, 0)
        first, on_gpu = mesh.get_local_rank() * own, q.is_cuda
        torch.compiler.reset()
        mask = create_block_mask(
            lambda b, h, i, j: form(b, h, i + first, j), None, None, own, tokens, device=q.device.type, _compile=on_gpu
        )
        attend = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
        grouped = q.shape[1] != k.shape[1]

        def gathered(t: torch.Tensor) -> torch.Tensor:
            # Tokens outermost, as the gradient of all_gather is wrong for pieces that are not contiguous.
            return torch.cat(differentiable.all_gather(t.transpose(0, 2).contiguous(), mesh.get_group())).transpose(0, 2)

        def run():
            keys, values = map(gathered, (k, v))
            return attend(q, keys, values, block_mask=mask, enable_gqa=grouped)

        yield Divided((q, k, v), run, self.whole(mesh), self.bytes_of((k, v), mesh.size(), 1.0))


class ExchangedHeads(_Pieces):
    """Tokens exchanged for heads around FlashAttention-4, and back (arXiv:2309.14509): causal, with or without a window."""

    def refuses(self, sequence, ranks):
        if sequence.heads[1] % ranks:
            return f"{ranks} ranks must divide the {sequence.heads[1]} key heads"
        if _window(sequence.pattern) is None:
            return "it is measured causal, and in a causal window"
        return FlashAttention4().missing() or super().refuses(sequence, ranks)

    @contextmanager
    def divided(self, sequence, mesh):
        q, k, v = self.leaves(sequence, mesh)
        ranks, width, kernel = mesh.size(), _window(sequence.pattern), FlashAttention4()
        asked = Asked(True, None if width == 0 else width - 1)

        def to_heads(t: torch.Tensor) -> torch.Tensor:
            """(1, tokens of all, heads of a rank, head_dim) of (1, heads, tokens, head_dim)"""
            every = self._exchanged(t[0].unflatten(0, (ranks, -1)), mesh)
            return every.permute(0, 2, 1, 3).flatten(0, 1)[None]

        def run():
            out = kernel.attend(*map(to_heads, (q, k, v)), asked)[0]
            back = self._exchanged(out.unflatten(0, (ranks, -1)).permute(0, 2, 1, 3), mesh)
            return back.flatten(0, 1)[None]

        yield Divided((q, k, v), run, self.whole(mesh), self.bytes_of((q, k, v, q), ranks, 1 / ranks))

    @staticmethod
    def _exchanged(parts: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The parts that are this rank's of all ranks: (ranks, ...) -> (ranks, ...)."""
        mine = parts.contiguous()
        return differentiable.all_to_all_single(torch.empty_like(mine), mine, group=mesh.get_group())


class TorchRing(Way):
    """PyTorch's context parallelism around cuDNN's dense causal attention, its load balancing included."""

    def refuses(self, sequence, ranks):
        if sequence.pattern.to_spec() != "causal":
            return "it is measured causal"
        if not sequence.q.is_cuda:
            return "PyTorch divides attention on GPUs"
        return None

    @contextmanager
    def divided(self, sequence, mesh):
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        unshard = private("distributed.tensor.experimental._attention:context_parallel_unshard")
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
    """Of a causal window; 0 for causal without one; None for other masks."""
    if pattern.to_spec() == "causal":
        return 0
    others = [p for p in pattern.operands if p.name != "causal"] if isinstance(pattern, And) else []
    return others[0].window if len(others) == 1 and isinstance(others[0], sf.local) else None


WAYS: dict[str, Way] = {
    "blocks, two calls": Planned("blocks", True),
    "blocks, one call": Planned("blocks", False),
    "queries": Planned("queries"),
    "heads": Planned("heads"),
    "auto": Planned(),
    "all-gather and FlexAttention": GatheredKeys(),
    "heads around FlashAttention-4": ExchangedHeads(),
    "PyTorch's ring": TorchRing(),
}


def barrier() -> None:
    """On the host: a collective that waits on a GPU would slow what runs there."""
    dist.barrier(group=_host_group(dist.group.WORLD))


def of_all_ranks(value) -> list:
    """What each rank has, in their order; any picklable object."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, value, group=_host_group(dist.group.WORLD))
    return every


@cache
def _host_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """world: makes one for each initialization of the process group."""
    return dist.new_group(backend="gloo")
