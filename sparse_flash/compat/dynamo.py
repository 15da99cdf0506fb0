"""Sets marks that torch.compile reads; PyTorch's own functions for that import torch._dynamo, and with it triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

FUNCTION = TypeVar("FUNCTION", bound=Callable)


def constant_in_graphs(function: FUNCTION) -> FUNCTION:
    """Decorator: torch.compile calls the function while tracing and treats its result as a constant of the graph. This is the mark
    that torch.compiler.assume_constant_result sets."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions do not declare this mark
    return function


def length_may_vary(tensor, dim: int) -> None:
    """torch.compile treats the length of this dimension as dynamic, unless something reads its value: no recompilation for another
    length. This is the mark that torch._dynamo.maybe_mark_dynamic sets."""
    tensor._dynamo_weak_dynamic_indices = {dim}


def with_fixed_lengths(tensor):
    """The tensor, whose lengths torch.compile takes as numbers, also with dynamic=True. This is the mark that
    torch._dynamo.mark_static sets."""
    tensor._dynamo_static_indices = set(range(tensor.dim()))
    return tensor


def keep_saved_tensors() -> None:
    """Lets a compiled backward pass run several times on one graph: it does not overwrite the tensors that forward saved."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
