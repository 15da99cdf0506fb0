"""Patterns: immutable values that say which (query, key) pairs may attend; their algebra, registry and spec text.

A pattern knows nothing of lengths, devices or kernels. ``compile_mask`` turns it into a lookup table for given lengths.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib import metadata
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar

import numpy as np

from ..compat.dynamo import constant_in_graphs
from . import spec
from .grid import BlockGrid, BlockRuns, SparseMatrix
from .memory import clear, remembered

ENTRY_POINT_GROUP = "sparse_flash.patterns"
PATTERN = TypeVar("PATTERN", bound="Pattern")
# The starts and the ends of runs of keys.
Runs: TypeAlias = tuple[np.ndarray, np.ndarray]


class Pattern:
    """Base class of patterns. Subclass it as a frozen dataclass and define ``token_rule``; the rest is derived.

        @sparse_flash.register_pattern("ring")
        @dataclass(frozen=True)
        class Ring(sparse_flash.Pattern):
            period: int

            def token_rule(self, q, kv):
                return (q - kv) % self.period == 0

    A ``block_rule`` speeds up compilation if whole blocks can be ruled in or out; without one, every block is evaluated.
    ``shift_invariant`` says that the token rule depends only on ``q - kv``, so blocks on one diagonal are alike and only one of
    them is evaluated. A pattern made of whole blocks may define ``block_rule`` alone.

    Fields are hashable, as tables are looked up by their pattern: tuples, not lists or arrays. Others raise a TypeError. Equal
    patterns, which share tables, have equal fields of one kind: 1, 1.0 and True differ.
    """

    name: ClassVar[str | None] = None
    shift_invariant: ClassVar[bool] = False
    # Subclasses are dataclasses and have this.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__eq__" not in vars(cls):
            cls.__eq__ = _equal  # type: ignore[method-assign,assignment]  # a dataclass keeps the one that it finds

    def __post_init__(self) -> None:
        try:
            hash(self)
        except TypeError:
            for field in dataclasses.fields(self):
                if field.compare:
                    _check_hashable(self, field.name)
            raise TypeError(
                f"{type(self).__qualname__} must be hashable, as tables are looked up by their pattern; make it a frozen "
                "dataclass: @dataclass(frozen=True)"
            ) from None

    @property
    def shift_period(self) -> int | None:
        """The token rule repeats when both positions move by this many tokens; None if it need not."""
        return 1 if self.shift_invariant else None

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        """Which pairs may attend: bool, broadcastable to the broadcast shape of the two int64 position arrays.

        kv: positions of keys, 0 .. kv_len - 1. q: positions of queries; the last query has the position of the last key, so with as
        many queries as keys these are plain indices (negative if there are more queries than keys).
        """
        raise NotImplementedError(f"{type(self).__name__} defines no token_rule, and some of its blocks are partial")

    def block_rule(self, grid: BlockGrid) -> BlockRuns | SparseMatrix | None:
        """States of the grid's blocks (1 partial, 2 full) as a (q_blocks, kv_blocks) scipy.sparse matrix or a BlockRuns, or None if
        only the tokens of blocks tell them apart.

        It may call an empty or full block partial: compiling evaluates the tokens of partial blocks.
        """
        return None

    def row_runs(self, q: np.ndarray) -> Runs | None:
        """The keys that each query keeps, as runs [first, stop) of positions, or None if that is not a natural form.

        q: any shape S of int64 positions. Returns two int64 arrays of shape (*S, runs); the runs of a query are ascending and
        disjoint; a run with stop <= first is empty.
        """
        return None

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        """The token rule on many blocks: q (n, block), kv (n, block) positions -> (n, block, block) bool."""
        shape = (*q.shape, kv.shape[1])
        with on_arrays(self, "the token rule"):
            # A rule may change its arguments in place, and other rules get the same positions.
            kept = np.asarray(self.token_rule(q[:, :, None].copy(), kv[:, None, :].copy()))
        if kept.dtype != bool:
            raise TypeError(f"the token rule of {self} must return booleans; got {kept.dtype}; compare or use .astype(bool)")
        try:
            return np.broadcast_to(kept, shape)
        except ValueError:
            raise ValueError(f"the token rule of {self} must broadcast to {shape}; it returned {kept.shape}") from None

    def to_spec(self) -> str:
        """Canonical spec text: equal patterns have equal text, and ``Pattern.from_spec`` reads it back."""
        name = _own_name(type(self))
        if name is None:
            raise ValueError(f"{type(self).__qualname__} has no spec text: register it with @register_pattern('...')")
        positional: list[Any] = []
        keyword: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and not keyword:
                positional.append(value)
            elif required or value is not None or field.default is not None:
                keyword[field.name] = value
        return spec.write_call(name, positional, keyword)

    @staticmethod
    def from_spec(text: str) -> Pattern:
        """The pattern for this spec text. Raises ``SpecError``, which points at the column."""
        return parse(text)

    def __and__(self, other: Pattern | str) -> Pattern:
        return _combined(And, self, other)

    def __or__(self, other: Pattern | str) -> Pattern:
        return _combined(Or, self, other)

    __rand__, __ror__ = __and__, __or__  # with spec text on the left; operand order does not matter

    def __invert__(self) -> Pattern:
        return Not(self)

    def __getstate__(self) -> dict[str, Any]:
        # Fields only: cached hashes and arrays are recomputed where the pattern is unpickled.
        if not dataclasses.is_dataclass(self):
            return dict(vars(self))
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __bool__(self) -> NoReturn:
        raise TypeError("a pattern has no truth value; combine patterns with & | ~ instead of and, or, not")

    def __str__(self) -> str:
        try:
            return self.to_spec()
        except ValueError:
            return repr(self)


@contextmanager
def on_arrays(pattern: Pattern, rule: str) -> Iterator[None]:
    """Errors of a rule that does not take arrays name it and say what to write."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(
            f"{rule} of {pattern} failed on arrays of positions: {error} (use NumPy's functions, and & | ~ instead of and, or, not)"
        ) from error


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


def _check_hashable(pattern: Pattern, name: str) -> None:
    value, owner = getattr(pattern, name), _own_name(type(pattern)) or type(pattern).__qualname__
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{owner}: {name} must be hashable, as tables are looked up by their pattern; got "
            f"{type(value).__name__}; pass tuples in place of lists and arrays, also within tuples"
        ) from None


def _equal(pattern: Pattern, other: object) -> bool:
    params = getattr(type(pattern), "__dataclass_params__", None)
    if type(pattern) is not type(other) or params is None or not params.eq:
        return NotImplemented
    names = [field.name for field in dataclasses.fields(pattern) if field.compare]
    return all(_of_a_kind(getattr(pattern, name)) == _of_a_kind(getattr(other, name)) for name in names)


def _of_a_kind(value: object) -> object:
    """Tells 1, 1.0 and True apart, also within tuples."""
    if isinstance(value, tuple):
        return tuple(map(_of_a_kind, value))
    return isinstance(value, (bool, np.bool_)), isinstance(value, (float, np.floating)), value


class DerivedPattern(Pattern):
    """A pattern that names an expression of others: define ``expression``."""

    @property
    def expression(self) -> Pattern:
        """The expression that this pattern stands for."""
        raise NotImplementedError(f"{type(self).__name__} defines no expression")

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        return self.expression.token_rule(q, kv)


@dataclass(frozen=True, repr=False)
class _Composite(Pattern):
    """Operands in canonical order: flattened, without repeats, shorter text first, so that ``a & b == b & a``."""

    operands: tuple[Pattern, ...]
    symbol: ClassVar[str]
    combine: ClassVar[np.ufunc]

    @classmethod
    def of(cls, *operands: Pattern) -> Pattern:
        flat = [p for o in operands for p in (o.operands if isinstance(o, cls) else (o,))]
        ordered = sorted(dict.fromkeys(flat), key=lambda p: (len(str(p)), str(p)))
        return ordered[0] if len(ordered) == 1 else cls(tuple(ordered))

    @cached_property
    def _hash(self) -> int:
        return hash((self.symbol, self.operands))

    def __hash__(self) -> int:
        return self._hash

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        return reduce(self.combine, (p.token_rule(np.array(q), np.array(kv)) for p in self.operands))

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        # Each operand evaluates as few pairs as it can.
        return reduce(self.combine, (p.token_tiles(q, kv) for p in self.operands))

    def _write(self, write: Callable[[Pattern], str]) -> str:
        parts = (f"({write(p)})" if isinstance(p, _Composite) else write(p) for p in self.operands)
        return f" {self.symbol} ".join(parts)

    def to_spec(self) -> str:
        return self._write(lambda p: p.to_spec())

    def __repr__(self) -> str:
        return self._write(repr)


def _combined(kind: type[_Composite], pattern: Pattern, other: Pattern | str) -> Pattern:
    other = parse(other) if isinstance(other, str) else other
    if isinstance(other, type) and issubclass(other, Pattern):
        raise TypeError(f"{_own_name(other) or other.__qualname__} is a class of patterns; call it for a pattern, as in causal()")
    return kind.of(pattern, other) if isinstance(other, Pattern) else NotImplemented


class And(_Composite):
    """The pairs that every operand keeps."""

    symbol = "&"
    combine = np.logical_and


class Or(_Composite):
    """The pairs that some operand keeps."""

    symbol = "|"
    combine = np.logical_or


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """The pairs that the operand does not keep."""

    operand: Pattern

    def __invert__(self) -> Pattern:
        return self.operand

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        return np.logical_not(self.operand.token_rule(q, kv))

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        return np.logical_not(self.operand.token_tiles(q, kv))

    def _write(self, write: Callable[[Pattern], str]) -> str:
        inner = write(self.operand)
        return f"~({inner})" if isinstance(self.operand, _Composite) else f"~{inner}"

    def to_spec(self) -> str:
        return self._write(lambda p: p.to_spec())

    def __repr__(self) -> str:
        return self._write(repr)


_registry: dict[str, type[Pattern]] = {}
_entry_points_read = False


def register_pattern(name: str) -> Callable[[type[PATTERN]], type[PATTERN]]:
    """Class decorator: makes a pattern available to spec text and the command line under ``name``.

    The class must be a frozen dataclass derived from Pattern. A taken name raises a ValueError that names both owners; redefining a
    class of ``__main__`` (rerunning a notebook cell) replaces it.
    """
    if not isinstance(name, str) or not spec.is_name(name):
        raise ValueError(f"a pattern name must be an identifier such as 'ring', in ASCII and not 'inf'; got {name!r}")

    def decorate(cls: type[PATTERN]) -> type[PATTERN]:
        if not (isinstance(cls, type) and issubclass(cls, Pattern)):
            raise TypeError(f"@register_pattern({name!r}) must decorate a subclass of sparse_flash.Pattern; got {cls!r}")
        params = vars(cls).get("__dataclass_params__")
        if params is None or not params.frozen:
            raise TypeError(
                f"pattern {name!r}: {cls.__qualname__} must be a frozen dataclass; "
                "put @dataclass(frozen=True) under @register_pattern"
            )
        owner = _registry.get(name)
        if owner is not None and not (_owner(owner) == _owner(cls) and cls.__module__ == "__main__"):
            raise ValueError(f"pattern {name!r} of {_owner(cls)} is already registered by {_owner(owner)}; choose another name")
        cls.name = name
        _registry[name] = cls
        clear()  # spec text may mean something else now
        return cls

    return decorate


def _own_name(cls: type[Pattern]) -> str | None:
    """The name that a class was registered under; not that of a class it derives from, nor a field called ``name``."""
    return vars(cls).get("name")


def _owner(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _read_entry_points() -> None:
    """Loads what other packages offer, once, on first use of the registry rather than at import."""
    global _entry_points_read
    if _entry_points_read:
        return
    _entry_points_read = True
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            loaded = entry.load()
            if isinstance(loaded, type) and not (issubclass(loaded, Pattern) and _own_name(loaded)):
                register_pattern(entry.name)(loaded)
        except Exception as error:
            # One broken plug-in must not disable the others; the warning names it.
            warnings.warn(f"pattern plug-in {entry.name!r} ({entry.value}) could not be loaded: {error}", stacklevel=3)


def list_patterns() -> list[str]:
    """The registered names, sorted: the built-in patterns, the user's, and those of installed packages."""
    _read_entry_points()
    return sorted(_registry)


def pattern_class(name: str) -> type[Pattern]:
    """The class registered under ``name``. Raises ValueError that lists the nearest names."""
    _read_entry_points()
    if name not in _registry:
        raise ValueError(f"unknown pattern {name!r}; {_nearest(name, list_patterns())}")
    return _registry[name]


def use_of(cls: type[Pattern]) -> str:
    """What a pattern is for, in a user's words: the line ``use: ...`` of its class's or its module's docstring, or ""."""
    for text in (cls.__doc__, sys.modules[cls.__module__].__doc__):
        if found := re.search(r"^\s*use: (.+)$", text or "", re.MULTILINE):
            return found[1]
    return ""


def _nearest(name: str, known: list[str]) -> str:
    """What an error about an unknown name suggests."""
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known) or 'none'}"


def parse(text: str) -> Pattern:
    """The pattern for spec text such as ``"causal & (local(1024) | butterfly(block=128))"``.

    Raises ``SpecError`` (a ValueError) that points at the column.
    """
    return _build(spec.read(text), text)


@constant_in_graphs
def text_of(pattern: Pattern | str) -> str | None:
    """The spec text that reads back as this pattern; None if some part of it is not registered. Raises ``SpecError`` for text that
    cannot be read."""
    return _text_of(pattern)


@remembered(maxsize=256)
def _text_of(pattern: Pattern | str) -> str | None:
    if isinstance(pattern, str):
        return parse(pattern).to_spec()
    try:
        text = pattern.to_spec()
        return text if parse(text) == pattern else None
    except ValueError:
        return None


def _build(tree: spec.Tree, text: str) -> Pattern:
    if isinstance(tree, spec.Operation):
        operands = [_build(operand, text) for operand in tree.operands]
        return ~operands[0] if tree.symbol == "~" else {"&": And, "|": Or}[tree.symbol].of(*operands)
    try:
        cls = pattern_class(tree.name)
    except ValueError as error:
        raise spec.SpecError(str(error), text, tree.column) from None
    signature = inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)
    named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in tree.keyword:
        if not (takes_any or name in named):
            raise spec.SpecError(f"{tree.name}{signature}: unknown argument {name!r}; {_nearest(name, named)}", text, tree.column)
    try:
        signature.bind(*tree.positional, **tree.keyword)
    except TypeError as error:
        raise spec.SpecError(f"{tree.name}{signature}: {error}", text, tree.column) from None
    try:
        return cls(*tree.positional, **tree.keyword)
    except (TypeError, ValueError) as error:
        raise spec.SpecError(str(error), text, tree.column) from error
