"""Records which tokens of a sequence a rank of a mesh holds; shards and unshards tensors of tokens. Compares the arguments of all
ranks, on the host, before they exchange tensors whose sizes depend on these."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh; got {type(mesh).__name__}; use init_device_mesh(device_type, (ranks,))")
    if mesh.ndim != 1:
        names = ", ".join(map(repr, mesh.mesh_dim_names or ())) or "no names"
        raise ValueError(
            f"mesh must have one dimension, all of whose ranks share the sequence; got {mesh.ndim} ({names}); name one: mesh['cp']"
        )
    return mesh.get_group()


def check_agreement(given: dict[str, str] | Exception, group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank if their values differ, or if one failed. given: values by name; or this rank's error."""
    every = gather_objects(f"{type(given).__name__}: {given}" if isinstance(given, Exception) else given, group)
    if isinstance(given, Exception):
        raise given
    if failed := [f"rank {rank}: {theirs}" for rank, theirs in enumerate(every) if isinstance(theirs, str)]:
        raise ValueError(f"all ranks of a mesh must make a plan; others could not: {'; '.join(failed)}")
    differing = []
    for name in given:
        by_rank = [theirs[name] for theirs in every]
        if len(values := dict.fromkeys(by_rank)) > 1:
            ranks_of = {value: [rank for rank, theirs in enumerate(by_rank) if theirs == value] for value in values}
            differing.append(f"{name} is " + ", ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_of.items()))
    if differing:
        raise ValueError(f"all ranks of a mesh must make the same plan; {'; '.join(differing)}; pass the same on every rank")


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the object of each rank, in the order of ranks. A collective call."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


@dataclass(eq=False, repr=False)
class TokenShards:
    """Holds one rank's tokens of a sequence of q_len. Every rank has equally many; some have padding at their end. all_positions:
    (ranks, tokens) int64 on the host, of the tokens in the sequence, -1 for padding. cu_seqlens: where documents start."""

    q_len: int
    all_positions: np.ndarray
    cu_seqlens: tuple[int, ...]
    group: dist.ProcessGroup
    device: torch.device

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(self.group), len(self.all_positions)
        self.tokens = self.all_positions.shape[1]
        own = torch.from_numpy(self.all_positions[self.rank])
        self.exists = (own >= 0).to(self.device)
        self.positions = own.clamp(min=0).to(self.device)

    def __copy__(self, memo: object = None) -> Self:
        """Returns itself, as copies of a model share its ranks."""
        return self

    __deepcopy__ = __copy__

    @cached_property
    def document_positions(self) -> torch.Tensor:
        """Returns (tokens,) int64, on the plan's device: each token's position in its document."""
        starts = torch.tensor(self.cu_seqlens, device=self.device)
        return self.positions - starts[torch.searchsorted(starts, self.positions, right=True) - 1]

    @cached_property
    def document_starts(self) -> torch.Tensor:
        """Returns (q_len,) bool, on the plan's device: which tokens of the sequence start a document."""
        tokens = torch.arange(self.q_len, device=self.device)
        return torch.isin(tokens, torch.tensor(self.cu_seqlens, device=self.device))

    @cached_property
    def _inverse(self) -> torch.Tensor:
        """Returns (q_len,) int64: each token's index among the tokens of all ranks, rank after rank."""
        flat = self.all_positions.ravel()
        inverse = np.empty(self.q_len, np.int64)
        inverse[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        return torch.from_numpy(inverse).to(self.device)

    def shard(self, x: torch.Tensor, dim: int, fill: float = 0) -> torch.Tensor:
        """Returns this rank's tokens of x, with ``fill`` for padding: dimension ``dim`` has ``tokens`` elements instead of q_len.

        x: all tokens in order, on any device; differentiable. Shift labels before. Raises ValueError for other lengths of ``dim``.
        """
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.q_len:
            raise ValueError(
                f"dimension {dim} of x must hold the {self.q_len} tokens of the whole sequence; got shape {tuple(x.shape)}; pass "
                "all tokens, and their dimension as dim"
            )
        if self.ranks == 1:
            return x
        padding = ~self.exists.to(x.device).view([-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())])
        return x.index_select(dim, self.positions.to(x.device)).masked_fill(padding, fill)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns all tokens of x in order, without padding, on every rank: dimension ``dim`` has q_len elements.

        x: this rank's tokens, on the plan's device, with one shape and dtype on all ranks. A collective call, not differentiable.
        Raises ValueError if ``dim`` does not hold this rank's tokens.
        """
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
            raise ValueError(
                f"dimension {dim} of x must hold the {self.tokens} tokens of this rank; got shape {tuple(x.shape)}; pass them, "
                "and their dimension as dim"
            )
        x = x.detach()
        if self.ranks == 1:
            return x
        by_token = x.movedim(dim, 0).contiguous()
        every = by_token.new_empty(self.ranks * self.tokens, *by_token.shape[1:])
        dist.all_gather_into_tensor(every, by_token, group=self.group)
        return every.index_select(0, self._inverse).movedim(0, dim)
