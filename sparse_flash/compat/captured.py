"""Checks the arguments that a function of a user takes, and finds what it reads besides them: document numbers of a mask, learned
tensors of a score."""

from __future__ import annotations

import array
import ctypes
import dis
import inspect
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .names import PACKAGE

_CONTAINERS = (list, tuple, set, frozenset, deque, torch.nn.ModuleList, torch.nn.ParameterList)
_MAPPINGS = (dict, torch.nn.ModuleDict, torch.nn.ParameterDict)
_PLAIN = (int, float, complex, str, bytes, bytearray, array.array, np.generic, torch.device, torch.dtype, CodeType)
_USES_OF_OBJECTS = ("__call__", "__getitem__", "__len__", "__contains__", "__iter__")
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
    bound arguments, containers, and the attributes, properties, methods and functions that the code names."""
    yield from _visit(_Read("", function, _NO_NAMES, True), {})


@dataclass(frozen=True)
class _Names:
    """Holds what code names. bare: names with whose values the code does more than reading an attribute, such as calling them."""

    globals: frozenset[str]
    attributes: frozenset[str]
    bare: frozenset[str]


class _Read(NamedTuple):
    """Holds a value that code reads. path: how the code writes it. names: of that code. bare: whether the code may call or index
    the value itself."""

    path: str
    value: Any
    names: _Names
    bare: bool


_known_names: WeakKeyDictionary[CodeType, _Names] = WeakKeyDictionary()
_NO_NAMES = _Names(frozenset(), frozenset(), frozenset())


def _visit(read: _Read, seen: dict[object, Any]) -> Iterator[tuple[str, Any]]:
    """seen: the values visited, kept alive, as otherwise another could get the id of one of them."""
    value = read.value
    if isinstance(value, (torch.Tensor, np.ndarray, *_PLAIN)):
        yield read.path, value
        return
    # A method is another object each time that it is read.
    identity = (id(value.__func__), id(value.__self__)) if isinstance(value, MethodType) else id(value)
    key = identity, read.names, read.bare
    if key in seen:
        yield read.path, identity  # which of those seen it is
        return
    seen[key] = value
    for child in _iter_children(read):
        yield from _visit(child, seen)


def _iter_children(read: _Read) -> Iterator[_Read]:
    """Yields each value that code reads through another."""
    path, value, names, bare = read
    if isinstance(value, _CONTAINERS):
        yield from (_Read(f"{path}[{number}]", child, names, True) for number, child in enumerate(value))
    elif isinstance(value, _MAPPINGS):
        yield from (_Read(f"{path}[{key!r}]", child, names, True) for key, child in value.items())
    elif isinstance(value, partial):
        yield _Read(path, value.func, names, True)
        yield from (_Read("a bound argument", child, names, True) for child in (*value.args, *value.keywords.values()))
    elif isinstance(value, MethodType):
        if isinstance(function := value.__func__, FunctionType):
            yield from _iter_function_data(function)
            its_names = _names_of(function.__code__)
            yield _Read("self", value.__self__, its_names, not its_names.bare.isdisjoint(function.__code__.co_varnames[:1]))
    elif isinstance(value, FunctionType):
        yield from _iter_function_data(value)
    elif (type(value).__module__ or "").startswith(f"{PACKAGE}."):  # a pattern, say, which may hold a function
        yield from (_Read(f"{path}.{name}", child, names, True) for name, child in getattr(value, "__dict__", {}).items())
    elif not (isinstance(value, ModuleType) and _is_library(value.__name__)):
        for name in sorted(names.attributes):
            yield from (_Read(f"{path}.{name}", child, names, name in names.bare) for child in _find_attribute(value, name))
        if bare and not isinstance(value, (ModuleType, type)):
            for name in ("forward",) if isinstance(value, torch.nn.Module) else _USES_OF_OBJECTS:
                if isinstance(method := getattr(value, name, None), MethodType):
                    yield _Read(path, method, names, False)


def _find_attribute(value: Any, name: str) -> Iterator[Any]:
    """Yields the value of an attribute, if there is one; of a property, its function as a method."""
    is_module = isinstance(value, torch.nn.Module)
    own = getattr(value, "__dict__", {})
    if is_module:
        own = {**own, **value._parameters, **value._buffers, **value._modules}
    of_type = inspect.getattr_static(type(value), name, None)
    function = of_type.fget if isinstance(of_type, property) else of_type
    if name in own:
        yield own[name]
    elif isinstance(function, FunctionType):
        if not _is_library(function.__module__):
            yield MethodType(function, value)
    elif of_type is not None or isinstance(value, type) or (hasattr(value, "__getattr__") and not is_module):
        with suppress(AttributeError):
            yield getattr(value, name)


def _iter_function_data(function: FunctionType) -> Iterator[_Read]:
    names = _names_of(function.__code__)
    yield _Read("", function.__code__, names, False)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != _EMPTY:
            yield _Read(name, cell.cell_contents, names, name in names.bare)
    if not _is_library(function.__module__):
        read = sorted(names.globals & function.__globals__.keys())
        yield from (_Read(name, function.__globals__[name], names, name in names.bare) for name in read)
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from (_Read("a default", child, names, True) for child in defaults)


def _is_library(module: str | None) -> bool:
    """Whether a module reads a user's data through closures and arguments alone."""
    return f"{module}.".startswith(("torch.", "numpy.", f"{PACKAGE}."))


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")  # of Python's byte code
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")


def _names_of(code: CodeType) -> _Names:
    """Returns what code names, as ``_read_names`` finds it."""
    found = _known_names.get(code)
    if found is None:
        found = _known_names[code] = _read_names(code)
    return found


def _read_names(code: CodeType) -> _Names:
    """Returns what code names, functions within it included. Texts count as attributes where ``getattr`` may read them."""
    of_globals: set[str] = set()
    attributes: set[str] = set()
    bare: set[str] = set()
    texts: set[str] = set()
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    for one, following in zip_longest(instructions, instructions[1:]):
        if not one.opname.startswith("LOAD_"):
            continue
        several = one.argval if isinstance(one.argval, tuple) else (one.argval,)  # of which an attribute is read of the last alone
        loaded = [name for name in several if isinstance(name, str)]
        if one.opname == "LOAD_CONST":
            texts.update(loaded)
            continue
        if one.opname in _ATTRIBUTES:
            attributes.update(loaded)
        elif one.opname in _GLOBALS:
            of_globals.update(loaded)
        read_on = following is not None and following.opname in _ATTRIBUTES
        bare.update(loaded[:-1] if read_on else loaded)
    for inner in (_names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)):
        of_globals |= inner.globals
        attributes |= inner.attributes
        bare |= inner.bare
    if "getattr" in of_globals:
        attributes |= texts
    return _Names(frozenset(of_globals), frozenset(attributes), frozenset(bare))
