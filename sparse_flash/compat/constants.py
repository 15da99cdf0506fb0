"""The mark of functions that torch.compile calls while tracing, set without importing PyTorch."""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

FUNCTION = TypeVar("FUNCTION", bound=Callable)


def constant_in_graphs(function: FUNCTION) -> FUNCTION:
    """Decorator: torch.compile takes the function's result for a constant: the mark of torch.compiler.assume_constant_result."""

    def call(*args):  # torch.compile looks through caches, but not through a function
        return function(*args)

    marked: Any = function if isinstance(function, FunctionType) else wraps(function)(call)
    marked._dynamo_marked_constant = True
    return marked
