"""Types of a pattern's fields that say which values they take. ``Pattern.__post_init__`` checks the fields by them.

    window: Positive                       an integer of at least 1
    seed: Natural = 0                      an integer of at least 0
    left: Natural | None = None            likewise, or None
    cu_seqlens: tuple[Natural, ...]        a tuple of them, from a list, an array or a tensor too
    density: Share                         a number, 0 < density <= 1

Type checkers see int, float and so on. Fields of other types are checked to be hashable, and no more.
"""

import dataclasses
import math
from numbers import Real
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeAlias, Union, get_args, get_origin

import numpy as np

from ..compat.constants import constant_in_graphs
from .memory import cached_until_cleared

# The end of an unbounded run: past every position, and far enough from 2^63 to add positions to.
BEYOND = 1 << 62


# With the least and the greatest number, as ``range`` has them.
Positive: TypeAlias = Annotated[int, range(1, BEYOND + 1)]
Natural: TypeAlias = Annotated[int, range(BEYOND + 1)]
Factors: TypeAlias = Annotated[int, range(63)]  # how many powers of two
Share: TypeAlias = Annotated[float, range(2)]


class Limit(NamedTuple):
    """The values that one field of a pattern takes. optional: None too."""

    field: str
    form: str  # "integer", "integers" or "share"
    least: int
    most: int
    optional: bool


@constant_in_graphs
@cached_until_cleared(maxsize=256)
def limits_of(cls: type) -> tuple[str, tuple[Limit, ...], bool]:
    """(the pattern's name in messages, the limits of those fields that have some, whether all have)."""
    limits = [_limit_of(field.name, field.type) for field in dataclasses.fields(cls)]
    return vars(cls).get("name") or cls.__qualname__, tuple(filter(None, limits)), None not in limits


def _limit_of(field: str, annotation: Any) -> Limit | None:
    """None for a type without a range, and for one in quotes."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    optional = len(kinds) == 2 and kinds[1] is type(None)
    kind = kinds[0] if optional else annotation
    is_tuple = get_origin(kind) is tuple and get_args(kind)[1:] == (...,)
    number, *rest = get_args(get_args(kind)[0] if is_tuple else kind) or (None,)
    ranges = [one for one in rest if isinstance(one, range)]
    form = "integers" if is_tuple else "share" if number is float else "integer"
    return Limit(field, form, ranges[0][0], ranges[0][-1], optional) if ranges else None


def check_fields(pattern: object) -> bool:
    """Checks the fields that have limits, and sets them to Python's own numbers. Returns whether all have. Raises ValueError."""
    name, limits, all_limited = limits_of(type(pattern))
    for limit in limits:
        value = getattr(pattern, limit.field)
        if value is not None or not limit.optional:
            set_fields(pattern, **{limit.field: _check_value(name, value, limit)})
    return all_limited


def set_fields(pattern: object, /, **values: Any) -> None:
    """Sets fields of a frozen dataclass, for its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(pattern, name, value)


def _check_value(pattern: str, value: object, limit: Limit) -> Any:
    if limit.form == "share":
        is_number = isinstance(value, (Real, np.floating)) and not isinstance(value, (bool, np.bool_))
        share = float(value) if is_number else math.nan  # type: ignore[arg-type]  # a Real has __float__
        if not limit.least < share <= limit.most:
            raise ValueError(f"{pattern}: {limit.field} must be a number, 0 < {limit.field} <= 1; got {value!r}")
        return share
    if limit.form == "integers":
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, (tuple, list)):
            raise ValueError(f"{pattern}: {limit.field} must be a sequence of integers; got {values!r}")
        return tuple(positive_int(pattern, f"{limit.field}[{k}]", one, limit.least) for k, one in enumerate(values))
    return positive_int(pattern, limit.field, value, limit.least, limit.most)


def positive_int(pattern: str, name: str, value: object, least: int = 1, most: int = BEYOND) -> int:
    """``value`` as an int from ``least`` to ``most``, so that arithmetic on positions cannot overflow; raises ValueError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        bound = f" and at most {'2**62' if most == BEYOND else most}" if isinstance(value, int) and value > most else ""
        raise ValueError(f"{pattern}: {name} must be an integer of at least {least}{bound}; got {value!r}")
    return int(value)
