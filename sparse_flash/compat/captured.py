"""Checks the arguments that a function of a user takes, and finds what it reads besides them: document numbers of a mask, learned
tensors of a score."""

from __future__ import annotations

import ctypes
import inspect
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

_CONTAINERS = (list, tuple, torch.nn.ModuleList, torch.nn.ParameterList)
_MAPPINGS = (dict, torch.nn.ModuleDict, torch.nn.ParameterDict)
_PLAIN = (int, float, complex, str, bytes, np.generic, CodeType)
_NO_NAMES: frozenset[str] = frozenset()
_EMPTY = CellType()


def check_parameters(function: Callable[..., Any], caller: str, names: tuple[str, ...], way_out: str) -> None:
    """Raises TypeError for a function that cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C code, which may have none
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise TypeError(f"{caller} needs a function of ({', '.join(names)}); got one of {signature}: {error}; {way_out}") from None


def learned(function: Any) -> str | None:
    """Returns how the code writes a tensor that requires a gradient and that the function reads besides its arguments; None if
    there is none."""
    return next((path for path, value in _data_of(function) if isinstance(value, torch.Tensor) and value.requires_grad), None)


def state_of(function: Any) -> tuple[object, ...]:
    """Returns a value that stays equal as long as what the function reads is the same and holds the same: tensors, arrays, plain
    values (numbers, texts), and functions.

    A tensor counts its changes. The bytes of an array are read, and the bytes of a tensor of inference mode on a CPU, which does
    not count. Not seen are changes of other tensors through ``.data`` or through an array that shares their memory, and changes in
    place of tensors of inference mode on a GPU.
    """
    return tuple((path, _state(value)) for path, value in _data_of(function))


def _state(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return id(value), _inference_bytes(value) if value.is_inference() else value._version
    if not isinstance(value, np.ndarray):
        return value if isinstance(value, CodeType) else repr(value)  # hash(-1) is hash(-2)
    bytes_of = None if value.dtype.hasobject or not value.size else zlib.crc32(np.ascontiguousarray(value).tobytes())
    return id(value), value.shape, bytes_of


def _inference_bytes(tensor: torch.Tensor) -> int:
    """A checksum; 0 where the host cannot read the tensor. Of the storage, so that no dispatch mode sees an operation."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return 0
    storage = tensor.untyped_storage()
    return zlib.crc32((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())) if storage.nbytes() else 0


def _data_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields (how the code writes it, the tensor, array, plain value or code of a function). Follows closures, globals, defaults,
    bound arguments, containers, and the attributes and functions that the code names."""
    yield from _visit_data(function, "", _NO_NAMES, set())


def _visit_data(value: Any, path: str, names: frozenset[str], seen: set[tuple[int, frozenset[str]]]) -> Iterator[tuple[str, Any]]:
    """names: of the code that reads the value."""
    if isinstance(value, (torch.Tensor, np.ndarray, *_PLAIN)):
        yield path, value
    elif (id(value), names) in seen:
        yield path, id(value)  # which of those seen it is
    else:
        seen.add((id(value), names))
        for place, child, its_names in _iter_children(value, path, names):
            yield from _visit_data(child, place, its_names, seen)


def _iter_children(value: Any, path: str, names: frozenset[str]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Yields each value that code reads through another: (how the code writes it, the value, the names in the code)."""
    if isinstance(value, _CONTAINERS):
        yield from ((f"{path}[{number}]", child, names) for number, child in enumerate(value))
    elif isinstance(value, _MAPPINGS):
        yield from ((f"{path}[{key!r}]", child, names) for key, child in value.items())
    elif isinstance(value, partial):
        yield path, value.func, names
        yield from (("a bound argument", child, names) for child in (*value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        if isinstance(value.__func__, FunctionType):
            yield from _iter_function_data(value.__func__)
            yield "self", value.__self__, frozenset(_names(value.__func__.__code__))
    elif isinstance(value, FunctionType):
        yield from _iter_function_data(value)
    else:
        own = getattr(value, "__dict__", {})
        if isinstance(value, torch.nn.Module):
            own = {**own, **value._parameters, **value._buffers, **value._modules}
        yield from ((f"{path}.{name}", own[name], names) for name in sorted(names & own.keys()))
        call = getattr(value, "forward" if isinstance(value, torch.nn.Module) else "__call__", None)
        if isinstance(call, MethodType):
            yield path, call, names


def _iter_function_data(function: FunctionType) -> Iterator[tuple[str, Any, frozenset[str]]]:
    names = frozenset(_names(function.__code__))
    yield "", function.__code__, names
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != _EMPTY:
            yield name, cell.cell_contents, names
    if not (function.__module__ or "").startswith("torch."):  # whose functions read a user's through closures alone
        yield from ((name, function.__globals__[name], names) for name in sorted(names & function.__globals__.keys()))
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from (("a default", child, names) for child in defaults)


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that code names, and functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
