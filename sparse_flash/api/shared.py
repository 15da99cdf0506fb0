"""What layers and models ask of a plan that splits one sequence over ranks. Room ``parallel`` makes plans."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class SharedSequence(Protocol):
    """One sequence over several ranks, under one mask. See ``ContextPlan``."""

    tokens: int
    positions: torch.Tensor

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool | None = None, backend: str = "auto"
    ) -> Any: ...
