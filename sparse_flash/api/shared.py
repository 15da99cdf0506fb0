"""The interface of a plan that splits one sequence over ranks, for layers and models. ``parallel`` makes plans."""

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

    def attention(self, *tensors: Any, **options: Any) -> Any: ...
