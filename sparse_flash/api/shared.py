"""The interface of a plan that splits one sequence over ranks, for layers and models. ``parallel`` makes plans."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class SharedSequence(Protocol):
    """One sequence over several ranks, under one mask. See ``ContextPlan``."""

    q_len: int
    tokens: int
    positions: torch.Tensor
    document_starts: torch.Tensor

    def shard(self, x: torch.Tensor, dim: int, fill: float = 0) -> torch.Tensor: ...

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        select: Any = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        deterministic: bool | None = None,
        backend: str = "auto",
    ) -> Any: ...
