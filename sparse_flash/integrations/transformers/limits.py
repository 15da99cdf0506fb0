"""Joins masks with a model's restrictions, such as windows, and says what those depend on."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from ...compat.constants import constant_in_graphs
from ...masks.memory import cached_until_cleared
from ...masks.parsing import parse, text_of
from ...masks.pattern import And, Pattern
from ...masks.rules import move_pattern


def restrict_mask(mask: Any, limits: tuple[str | Pattern, ...], start: int = 0, position: int = 0) -> Any:
    """Returns the mask within the model's restrictions, for keys from a position on; as text if it has one.

    mask: a Pattern, spec text, or None for all pairs. Without limits and start, it may also be a BlockMask.
    start: the first key's position counted from the sequence's first token, as masks count. position: the same counted from the
    row's first token, as limits count.
    """
    if not limits and (mask is None or not start):
        return mask
    return _restrict_mask(mask, limits, start, position)


@constant_in_graphs
def _restrict_mask(mask: Pattern | str | None, limits: tuple[str | Pattern, ...], start: int, position: int) -> Pattern | str:
    return _restrict_cached(mask, limits, start, position)


@cached_until_cleared(maxsize=1024)
def _restrict_cached(mask: Pattern | str | None, limits: tuple[str | Pattern, ...], start: int, position: int) -> Pattern | str:
    parts = [move_pattern(_read(limit), -position) for limit in limits]
    if mask is not None:
        parts.append(_read(mask).map_leaves(partial(_move_leaf, by=-start)))
    restricted = And.of(*parts)
    return text_of(restricted) or restricted


def _move_leaf(leaf: Pattern, by: int) -> Pattern:
    counts_from_the_end = leaf.bind_length(0) != leaf
    return leaf if leaf.chooses or counts_from_the_end else move_pattern(leaf, by)


def _read(mask: Pattern | str) -> Pattern:
    return parse(mask) if isinstance(mask, str) else mask


def limits_of_entry(limits: tuple[tuple[str | Pattern, ...], ...], entry: int) -> tuple[str | Pattern, ...]:
    """Returns the restrictions of a batch entry, from ``ModelMask.limits``."""
    return tuple(limit[entry if len(limit) > 1 else 0] for limit in limits)


def depends_on_position(mask: Any) -> bool:
    """Whether a mask depends on more than the distance of query and key."""
    mask = parse(mask) if isinstance(mask, str) else mask
    return mask is not None and (not isinstance(mask, Pattern) or move_pattern(mask, 1) != mask)


def is_window(limit: str | Pattern) -> bool:
    return isinstance(limit, str) and limit.startswith("local(")


def keeps_all(limit: str | Pattern, kv_length: int, first: int = 0) -> bool:
    """Whether the limit is a window that covers all keys, or chunks of which the first does. first: the first key's position."""
    if is_window(limit):
        return int(str(limit)[6:-1]) >= kv_length
    chunk = re.fullmatch(r"block_diagonal\(block=(\d+)\)", str(limit))
    return chunk is not None and int(chunk[1]) >= first + kv_length
