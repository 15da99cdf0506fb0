"""Checks the arguments that a function of a user takes, and finds what it reads besides them."""

import ctypes
import inspect
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from .names import PACKAGE

_CONTAINERS = (list, tuple, set, frozenset, deque, dict, torch.nn.ModuleList, torch.nn.ParameterList, torch.nn.ParameterDict)
_PLAIN = (int, float, complex, str, bytes, bytearray, np.generic, torch.device, torch.dtype, CodeType, type(None))
_USES = ("__call__", "__getitem__", "__len__", "__contains__", "__iter__", "forward")  # of objects, without naming an attribute
_Names = frozenset[str] | None  # of the code that reads a value; None for an attribute, whose own attributes are not followed


def check_parameters(function: Callable[..., Any], caller: str, names: tuple[str, ...], way_out: str) -> None:
    """Raises TypeError for a function that cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*names)
    except ValueError:  # of C code, which may have no signature
        return
    except TypeError as error:
        found = inspect.signature(function)
        raise TypeError(f"{caller} needs a function of ({', '.join(names)}); got one of {found}: {error}; {way_out}") from None


def learned(function: Any) -> str | None:
    """Returns how the code writes a tensor that the function reads besides its arguments and that requires a gradient, or None."""
    return next((path for path, value in _data_of(function, {}) if isinstance(value, torch.Tensor) and value.requires_grad), None)


def uses_torch(function: Any) -> bool:
    """Whether the code names PyTorch, or reads a tensor besides the function's arguments."""
    return any(value is torch or isinstance(value, torch.Tensor) for _, value in _data_of(function, {}))


def state_of(function: Any) -> tuple[object, ...]:
    """Returns a value that stays equal as long as what a function reads is the same and holds the same. Guide: masks."""
    return tuple((path, _state(value)) for path, value in _data_of(function, {}))


def _state(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        version = None if value.is_inference() else value._version
        if version is None and type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided:
            storage = value.untyped_storage()  # of which no dispatch mode sees an operation
            version = zlib.crc32((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
        return id(value), version
    if not isinstance(value, np.ndarray):
        return value if isinstance(value, CodeType) else repr(value)  # hash(-1) is hash(-2)
    return id(value), value.shape, None if value.dtype.hasobject else zlib.crc32(np.ascontiguousarray(value).tobytes())


def _data_of(value: Any, seen: dict, path: str = "", names: _Names = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yields (how the code writes it, the tensor, array, plain value, code or torch) of a value and what is read through it. seen:
    the values visited, kept alive, as otherwise another could get the id of one."""
    # A method is another object each time that it is read.
    identity = (id(value.__func__), id(value.__self__)) if isinstance(value, MethodType) else id(value)
    if isinstance(value, (torch.Tensor, np.ndarray, *_PLAIN)) or value is torch:
        yield path, value
    elif (identity, names) in seen:
        yield path, identity  # which of those seen it is
    else:
        seen[identity, names] = value
        for child, its_path, its_names in _children(path, value, names):
            yield from _data_of(child, seen, its_path, its_names)


def _children(path: str, value: Any, names: _Names) -> Iterator[tuple[Any, str, _Names]]:
    if names is None and isinstance(value, torch.nn.Module):  # an attribute that a method may call
        value = {**value._parameters, **value._buffers}
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, (dict, torch.nn.ParameterDict)) else enumerate(value)
        yield from ((child, f"{path}[{key!r}]", names) for key, child in items)
    elif isinstance(value, partial):
        yield (value.func, value.args, value.keywords), "a bound argument", _names_of(getattr(value.func, "__code__", None))
    elif isinstance(value, MethodType):
        yield value.__func__, path, names
        yield value.__self__, "self", _names_of(getattr(value, "__code__", None))
    elif isinstance(value, FunctionType):
        code, of_code = value.__code__, _names_of(value.__code__)
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        found = {name: cell.cell_contents for name, cell in cells if cell != CellType()}  # an empty one
        if not _is_library(value.__module__):
            found |= {name: value.__globals__[name] for name in sorted(of_code & value.__globals__.keys())}
        found |= {"its code": code, "a default": (value.__defaults__, value.__kwdefaults__)}
        yield from ((child, name, of_code) for name, child in found.items())
    elif f"{type(value).__module__}.".startswith(f"{PACKAGE}."):  # a pattern, say, which may hold a function
        yield from ((child, f"{path}.{name}", names) for name, child in getattr(value, "__dict__", {}).items())
    elif names is not None and not (isinstance(value, ModuleType) and _is_library(value.__name__)):
        named = [(child, f"{path}.{name}", None) for name in sorted(names) for child in _find_attribute(value, name)]
        uses = () if named and isinstance(value, torch.nn.Module) else _USES
        yield from (*named, *((child, path, None) for name in uses for child in _find_attribute(value, name)))


def _find_attribute(value: Any, name: str) -> Iterator[Any]:
    """Yields the value of an attribute, if there is one; of a property, its function as a method."""
    getter = getattr(inspect.getattr_static(type(value), name, None), "fget", None)
    with suppress(Exception):  # of a user's own __getattr__
        found = getattr(value, name) if getter is None else MethodType(getter, value)
        if name == "forward" or not (isinstance(found, MethodType) and _is_library(found.__module__)):
            yield found


def _is_library(module: str | None) -> bool:
    """Whether a module reads a user's data only through closures and arguments."""
    return f"{module}.".startswith(("torch.", "numpy.", f"{PACKAGE}."))


def _names_of(code: CodeType | None) -> frozenset[str]:
    """The globals and attributes that code names, functions within it included, and texts that ``getattr`` may read."""
    constants, names = (code.co_consts, code.co_names) if code is not None else ((), ())
    texts = (text for text in constants if isinstance(text, str) and "getattr" in names)
    return frozenset(names).union(texts, *(_names_of(inner) for inner in constants if isinstance(inner, CodeType)))
