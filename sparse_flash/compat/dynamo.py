"""Marks that torch.compile reads, set by hand: PyTorch's own functions for them import torch._dynamo, and with it triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

FUNCTION = TypeVar("FUNCTION", bound=Callable)


def constant_in_graphs(function: FUNCTION) -> FUNCTION:
    """Decorator: torch.compile calls the function while it traces, and takes its result as a constant of the graph. What
    torch.compiler.assume_constant_result sets."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a mark, which functions do not declare
    return function


def length_may_vary(tensor, dim: int) -> None:
    """torch.compile takes the length of this dimension as one that changes, if nothing asks for its value: no graph is compiled
    anew for another. What torch._dynamo.maybe_mark_dynamic sets."""
    tensor._dynamo_weak_dynamic_indices = {dim}


def keep_saved_tensors() -> None:
    """A compiled backward pass may run several times over one graph: it does not write its results over what forward saved."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
