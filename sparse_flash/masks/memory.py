"""Caches tables, plans and texts between calls, each within a bound; ``clear_memories`` empties all that are registered.
``kernels/launch/memory`` keeps choices of back ends and launches."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

FUNCTION = TypeVar("FUNCTION", bound=Callable[..., Any])

_ways_to_clear: list[Callable[[], None]] = []
register_clear = _ways_to_clear.append


def cached_until_cleared(maxsize: int) -> Callable[[FUNCTION], FUNCTION]:
    """Decorator: an lru_cache of this size that ``clear_memories`` empties."""

    def decorate(function: FUNCTION) -> FUNCTION:
        cached = lru_cache(maxsize=maxsize)(function)
        register_clear(cached.cache_clear)
        return cast(FUNCTION, cached)

    return decorate


def clear_memories() -> None:
    for forget in _ways_to_clear:
        forget()
