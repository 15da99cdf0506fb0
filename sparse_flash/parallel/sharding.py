"""Which tokens of a sequence a rank holds; tensors of tokens, cut and put together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist


@dataclass(eq=False, repr=False)
class TokenShards:
    """One rank's tokens of a sequence, the same number on every rank: some hold padding at their end.

    q_len: tokens of the sequence. places: (ranks, tokens) int64 on the host, the place of each token in the sequence, -1 for
    padding. cu_seqlens: where documents start. group: the ranks. device: of the tensors.
    """

    q_len: int
    places: np.ndarray
    cu_seqlens: tuple[int, ...]
    group: dist.ProcessGroup
    device: torch.device

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(self.group), len(self.places)
        self.tokens = self.places.shape[1]
        own = torch.from_numpy(self.places[self.rank])
        self.exists = (own >= 0).to(self.device)
        self.positions = own.clamp(min=0).to(self.device)

    def __copy__(self) -> Self:
        """Itself, as copies of a model share its ranks."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as above."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a plan is of the ranks of this run, and cannot be pickled, nor can a layer or model that holds it; save a state_dict, "
            "which has no plan, and make the plan again on every rank"
        )

    @cached_property
    def document_positions(self) -> torch.Tensor:
        """(tokens,) int64, as ``positions``: the place of each token in its document."""
        starts = torch.tensor(self.cu_seqlens, device=self.device)
        return self.positions - starts[torch.searchsorted(starts, self.positions, right=True) - 1]

    @cached_property
    def _inverse(self) -> torch.Tensor:
        """(q_len,) int64: where each token lies in the tokens of all ranks, rank after rank."""
        flat = self.places.ravel()
        inverse = np.empty(self.q_len, np.int64)
        inverse[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        return torch.from_numpy(inverse).to(self.device)

    def shard(self, x: torch.Tensor, dim: int, fill: float = 0) -> torch.Tensor:
        """This rank's tokens of x, and ``fill`` for padding: x with ``tokens`` in place of q_len on dimension ``dim``.

        x: all tokens in natural order, on any device. Differentiable. Shift labels before they are sharded: the next token may be
        on another rank.
        """
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x must be a tensor of all {self.q_len} tokens; got {type(x).__name__}")
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.q_len:
            raise ValueError(
                f"dimension {dim} of x must hold the {self.q_len} tokens of the whole sequence; got shape {tuple(x.shape)}"
            )
        if self.ranks == 1:
            return x
        padding = ~self.exists.to(x.device).view([-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())])
        return x.index_select(dim, self.positions.to(x.device)).masked_fill(padding, fill)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens of x in natural order, without padding, on every rank: x with q_len in place of ``tokens`` on ``dim``.

        x: this rank's tokens, on the plan's device; of one shape and dtype on all ranks. A collective call, and not differentiable:
        the result is detached.
        """
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
            raise ValueError(f"dimension {dim} of x must hold the {self.tokens} tokens of this rank; got shape {tuple(x.shape)}")
        x = x.detach()
        if self.ranks == 1:
            return x
        by_token = x.movedim(dim, 0).contiguous()
        every = by_token.new_empty(self.ranks * self.tokens, *by_token.shape[1:])
        dist.all_gather_into_tensor(every, by_token, group=self.group)
        return every.index_select(0, self._inverse).movedim(0, dim)
