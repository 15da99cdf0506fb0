"""Sets marks that torch.compile reads; PyTorch's own functions for that import torch._dynamo, and with it triton."""

from functools import wraps
from typing import cast

import torch

from .constants import FUNCTION


def outside_inference(function: FUNCTION) -> FUNCTION:
    """Decorator: the function makes ordinary tensors in inference mode too, as autograd saves no others."""

    @wraps(function)
    def call(*args, **options):
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **options)
        with torch.inference_mode(False), torch.no_grad():  # the first alone would enable gradients
            return function(*args, **options)

    return cast(FUNCTION, call)


def outside_graphs(function: FUNCTION, reason: str = "") -> FUNCTION:
    """Decorator: torch.compile breaks the graph at the function, which works on the host; it runs ``outside_inference``. reason: of
    the error if a graph may not break."""
    reason = reason or (
        f"sparse_flash's {function.__name__} works on the host and cannot be part of a graph; call it outside of the compiled "
        "function. attention also takes patterns and their text, and topk_blocks and BlockMask.from_blocks run within graphs"
    )
    function = outside_inference(function)

    @wraps(function)
    def call(*args, **options):
        if not torch.compiler.is_compiling():
            return function(*args, **options)
        torch._dynamo.graph_break(msg=reason)
        # Otherwise it would compile what the function calls.
        return torch._dynamo.disable(function)(*args, **options)

    return cast(FUNCTION, call)


def mark_lengths_dynamic(tensor, *dims: int) -> None:
    """No recompilation for other lengths of these dimensions: the mark of torch._dynamo.maybe_mark_dynamic."""
    tensor._dynamo_weak_dynamic_indices = set(dims)


def with_fixed_lengths(tensor):
    """The tensor, whose lengths torch.compile takes as numbers, also with dynamic=True: the mark of torch._dynamo.mark_static."""
    tensor._dynamo_static_indices = set(range(tensor.dim()))
    return tensor


def keep_saved_tensors() -> None:
    """Lets a compiled backward pass run several times on one graph: it does not overwrite the tensors that forward saved."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
