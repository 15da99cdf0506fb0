"""What this package remembers between calls, kernels' launches apart (``kernels/launch/memory``): tables, plans, texts, choices of
back ends. Each memory has a bound, and ``clear`` empties all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

FUNCTION = TypeVar("FUNCTION", bound=Callable[..., Any])

_ways_to_clear: list[Callable[[], None]] = []


def cleared_by(clear: Callable[[], None]) -> None:
    """``clear`` calls this, too."""
    _ways_to_clear.append(clear)


def remembered(maxsize: int) -> Callable[[FUNCTION], FUNCTION]:
    """Decorator: lru_cache of so many results, which ``clear`` empties. For what follows from the arguments alone, and so is never
    out of date. A result that was dropped is made anew; who holds it keeps it."""

    def decorate(function: FUNCTION) -> FUNCTION:
        cached = lru_cache(maxsize=maxsize)(function)
        cleared_by(cached.cache_clear)
        return cast(FUNCTION, cached)

    return decorate


def clear() -> None:
    for forget in _ways_to_clear:
        forget()
