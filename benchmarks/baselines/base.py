"""A peer: a way to compute attention for a problem, or the reason why it cannot."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import ClassVar

import torch

from ..workload.problem import Problem

NOT_MEASURED = "its calls have no dropout, sinks or changes of scores, and padding is not measured"


def why_missing(module: str) -> str | None:
    """Why a library's module cannot be imported, or None."""
    try:
        import_module(module)
    except ImportError as error:
        return f"{module} is not installed ({error})"
    return None


class Peer:
    """order: the memory order that it wants of the dimensions (batch, heads, tokens, head_dim).
    deterministic: whether it promises gradients that repeat bit for bit."""

    order: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    deterministic: bool = False

    def refuses(self, problem: Problem) -> str | None:
        """Why it cannot compute the problem, or None."""
        return None

    def settings(self) -> AbstractContextManager:
        """A context that must be active while it runs; entered once, not for every call."""
        return nullcontext()

    def runs_on(self, problem: Problem) -> str | None:
        """Which of its back ends takes the call, if it has several."""
        return None

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        """``fn``; ``fn()`` runs one forward pass and returns out, (batch, heads, tokens, head_dim),
        differentiable in ``problem.leaves``."""
        raise NotImplementedError
