"""Data that a function of a user reads, such as document numbers: what tells whether they were changed in place."""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Callable

import numpy as np
import torch


def state_of(function: Callable) -> tuple[object, ...]:
    """Equal as long as the tensors and arrays that a function reads are the same and hold the same. It reads those in its closure,
    defaults and globals, those that functions in its closure read, and attributes of its object.

    A tensor counts its changes; the bytes of an array are read. Changes of a tensor through ``.data`` or an array that shares its
    memory are not seen, nor are lists.
    """
    found: list[object] = []
    waiting: list[object] = [function]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append((id(one), 0 if one.is_inference() else one._version))
        elif isinstance(one, np.ndarray) and not one.dtype.hasobject:
            found.append((id(one), one.shape, zlib.crc32(one.tobytes())))
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.FunctionType):
            cells = (cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY)
            read = (one.__globals__.get(name) for name in one.__code__.co_names)
            waiting += [*cells, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), *filter(_is_data, read)]
        elif isinstance(one, types.MethodType):
            waiting += [one.__func__, *filter(_is_data, vars(one.__self__).values() if hasattr(one.__self__, "__dict__") else ())]
        elif isinstance(one, (tuple, list)):
            waiting += [part for part in one if _is_data(part) or isinstance(part, types.FunctionType)]
        elif callable(one) and not isinstance(one, (type, types.BuiltinFunctionType, types.ModuleType)):
            waiting += filter(_is_data, getattr(one, "__dict__", {}).values())
    return tuple(found)


_EMPTY = types.CellType()


def _is_data(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))
