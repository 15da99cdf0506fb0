"""Data that a function of a user reads, such as document numbers: what tells whether they were changed in place."""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

_EMPTY = types.CellType()


def state_of(function: Callable) -> tuple[object, ...]:
    """Equal as long as the tensors and arrays that a function reads are the same and hold the same: those in its closure, defaults
    and globals, in tuples and lists there, in bound arguments, and in attributes that its code names.

    A tensor counts its changes; the bytes of an array are read. Changes of a tensor through ``.data`` or an array that shares its
    memory are not seen, nor are numbers in lists.
    """
    found: list[object] = []
    waiting: list[tuple[object, frozenset[str]]] = [(function, frozenset())]  # with the names in the code that reads it
    seen: set[tuple[int, frozenset[str]]] = set()
    while waiting:
        one, names = waiting.pop()
        if (id(one), names) in seen:
            continue
        seen.add((id(one), names))
        if isinstance(one, torch.Tensor):
            found.append((id(one), 0 if one.is_inference() else one._version))
        elif isinstance(one, np.ndarray) and not one.dtype.hasobject:
            found.append((id(one), one.shape, zlib.crc32(one.tobytes())))
        elif isinstance(one, functools.partial):
            waiting += [(part, names) for part in (one.func, *one.args, *one.keywords.values())]
        elif isinstance(one, (tuple, list)):
            waiting += [(part, names) for part in one if not isinstance(part, (int, float, str))]
        elif isinstance(one, types.FunctionType):
            named = frozenset(_names(one.__code__))
            cells = (cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY)
            read = (value for name in named if _is_data(value := one.__globals__.get(name)))
            defaults = *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()
            waiting += [(value, named) for value in (*cells, *defaults, *read)]
        elif isinstance(one, types.MethodType):
            waiting += [(one.__func__, names), (one.__self__, names | frozenset(_names(getattr(one.__func__, "__code__", None))))]
        elif not isinstance(one, (type, types.ModuleType, types.BuiltinFunctionType)):
            if callable(one) and not isinstance(one, torch.nn.Module):
                names = names | frozenset(_names(getattr(type(one).__call__, "__code__", None)))
            own = getattr(one, "__dict__", {})
            own = own | own.get("_buffers", {}) | own.get("_parameters", {})
            waiting += [(own[name], names) for name in names & own.keys()]
    return tuple(sorted(found, key=repr))


def _names(code: types.CodeType | None) -> Iterator[str]:
    """What code names, and code within it."""
    for part in code.co_consts if code else ():
        if isinstance(part, types.CodeType):
            yield from _names(part)
    yield from code.co_names if code else ()


def _is_data(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))
