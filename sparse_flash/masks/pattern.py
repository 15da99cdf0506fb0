"""Patterns: immutable values that say which (query, key) pairs may attend; and their algebra.

A pattern knows nothing of lengths, devices or kernels. ``compile_mask`` turns it into a lookup table for given lengths.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import Any, ClassVar, NoReturn, TypeAlias

import numpy as np

from ..compat.constants import constant_in_graphs
from . import spec
from .fields import check_fields, set_fields
from .grid import BlockGrid, BlockRuns, SparseMatrix

# The starts and the ends of runs of keys.
Runs: TypeAlias = tuple[np.ndarray, np.ndarray]


class Pattern:
    """Base class of patterns. Subclass it as a frozen dataclass and define ``token_rule``.

        @sparse_flash.register_pattern("ring")
        @dataclass(frozen=True)
        class Ring(sparse_flash.Pattern):
            period: int

            def token_rule(self, q, kv):
                return (q - kv) % self.period == 0

    The rest may be left out. A pattern for one number of tokens, as a grid is, says so by ``named_tokens``. ``block_rule``,
    ``row_runs``, ``block_keys`` and ``shift_invariant``, that the rule depends only on ``q - kv``, make compiling faster and change
    no table. Without a block rule every block is evaluated. A pattern made of whole blocks may define only that.

    Fields are hashable, as tables are looked up by their pattern: tuples, not lists or arrays. Others raise a TypeError. Equal
    patterns, which share tables, have equal fields of one kind: 1, 1.0 and True differ.
    """

    name: ClassVar[str | None] = None
    chooses: ClassVar[bool] = False  # whether it is a chooser, which keeps blocks by the content of q and k
    hides_padding: ClassVar[bool] = False  # whether it keeps no padding of its ``layout``, which is such a pattern itself
    from_spec: ClassVar[Callable[[str], Pattern]]  # ``parse``: module ``parsing``, which knows all classes, sets it
    # Subclasses are dataclasses and have this.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__eq__" not in vars(cls):
            cls.__eq__ = _equal  # type: ignore[method-assign,assignment]  # a dataclass keeps the one that it finds

    def __post_init__(self) -> None:
        if check_fields(self):
            return
        try:
            hash(self)
        except TypeError as error:
            raise TypeError(
                f"{own_name(type(self)) or type(self).__qualname__} must be hashable, as tables are looked up by their pattern; "
                f"{error}; pass tuples instead of lists and arrays, and make it a frozen dataclass: @dataclass(frozen=True)"
            ) from None

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        """Which pairs may attend: bool, broadcastable to the broadcast shape of the two int64 position arrays.

        kv: positions of keys, 0 .. kv_len - 1. q: positions of queries; the last query has the position of the last key, so with as
        many queries as keys these are plain indices (negative if there are more queries than keys).
        """
        raise NotImplementedError(f"{type(self).__name__} defines no token_rule, and some of its blocks are partial")

    def named_tokens(self) -> tuple[int, int] | None:
        """The least and the greatest length of the sequences that the pattern is for, as of a grid; None if it is for any."""
        return None

    def length_refusal(self, q_len: int, kv_len: int) -> str | None:
        """Why the pattern is not for these lengths, or None. In decoding, the last tokens that it names may be yet to come."""
        least, most = self.named_tokens() or (0, kv_len)
        if least <= kv_len <= most or (kv_len < least and q_len < kv_len):
            return None
        return (
            f"{short_text(self)} must name the {kv_len} tokens of the sequence; it names {most}; name all; or pass "
            "shifted(pattern, n), which starts at token n and keeps nothing elsewhere, and what the other tokens keep, such as "
            "global_tokens(n) before it and last_tokens(n) after it"
        )

    # Up to ``token_tiles``: optional, and for speed only. They change no table, as each must agree with ``token_rule``.

    shift_invariant: ClassVar[bool] = False  # then blocks on one diagonal are equal, and one of them is evaluated

    @property
    def shift_period(self) -> int | None:
        """The token rule repeats when both positions move by this many tokens; None if it need not."""
        return 1 if self.shift_invariant else None

    def block_rule(self, grid: BlockGrid) -> BlockRuns | SparseMatrix | None:
        """States of the grid's blocks (1 partial, 2 full) as a (q_blocks, kv_blocks) scipy.sparse matrix or a BlockRuns; None: all
        are partial. Compiling evaluates the tokens of partial blocks, so an empty or full block may be called partial."""
        return None

    def block_keys(self, grid: BlockGrid, rows: np.ndarray, cols: np.ndarray) -> np.ndarray | None:
        """Keys of these blocks, (blocks, numbers) integers, or None. Blocks with equal keys keep equal pairs: one is evaluated."""
        return None

    def row_runs(self, q: np.ndarray) -> Runs | None:
        """The keys that each query keeps, as runs [first, stop) of positions, or None if its form is another. q: any shape S.
        Returns two int64 arrays (*S, runs), ascending and disjoint; a run with stop <= first is empty."""
        return None

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        """The token rule on many blocks: q (n, block), kv (n, block) positions -> (n, block, block) bool."""
        shape = (*q.shape, kv.shape[1])
        return evaluate_rule(self, "the token rule", self.token_rule, (q[:, :, None], kv[:, None, :]), shape)

    def leaves(self) -> Iterator[Pattern]:
        """The patterns that an expression is composed of."""
        yield self

    def map_leaves(self, change: Callable[[Pattern], Any]) -> Any:
        """The expression with ``change`` of each pattern that it is composed of: values with ``& | ~``, such as bool arrays."""
        return change(self)

    def bind_length(self, kv_len: int) -> Pattern:
        """The pattern for sequences of this many keys: another one if it counts tokens from the end."""
        return self

    def to_spec(self) -> str:
        """Canonical spec text: equal patterns have equal text, and ``Pattern.from_spec`` reads it back."""
        name = own_name(type(self))
        if name is None:
            raise ValueError(f"{type(self).__qualname__} has no spec text: register it with @register_pattern('...')")
        positional: list[Any] = []
        keyword: dict[str, Any] = {}
        for field, required, may_be_left_out in _fields_of(type(self)):
            value = getattr(self, field)
            if required and not keyword:
                positional.append(value)
            elif value is not None or not may_be_left_out:
                keyword[field] = value
        return spec.write_call(name, positional, keyword)

    def __and__(self, other: Pattern | str) -> Pattern:
        return _combine_patterns(And, self, other)

    def __or__(self, other: Pattern | str) -> Pattern:
        return _combine_patterns(Or, self, other)

    __rand__, __ror__ = __and__, __or__  # with spec text on the left; operand order does not matter

    def __invert__(self) -> Pattern:
        layout = layout_of(self)
        bare = _strip_layout(self, layout)
        return _exclude_padding(bare.operand if isinstance(bare, Not) else Not(bare), layout)

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


@constant_in_graphs
def _fields_of(cls: type[Pattern]) -> tuple[tuple[str, bool, bool], ...]:
    """(name, whether it has no default, whether its default is None) of each field, those without defaults first."""
    missing = dataclasses.MISSING
    fields = [(f.name, f.default is missing and f.default_factory is missing, f.default is None) for f in dataclasses.fields(cls)]
    return tuple(sorted(fields, key=lambda field: not field[1]))


@constant_in_graphs
def is_made_in_graph(pattern: Pattern) -> bool:
    """Whether torch.compile traces the making of this pattern, which is then an object without fields here."""
    return not all(hasattr(pattern, field) for field, *_ in _fields_of(type(pattern)))


def short_text(pattern: Pattern | str, most: int = 60) -> str:
    """The pattern, or its text, as messages name it, in up to ``most`` characters."""
    text = str(pattern)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _equal(pattern: Pattern, other: object) -> bool:
    params = getattr(type(pattern), "__dataclass_params__", None)
    if type(pattern) is not type(other) or params is None or not params.eq:
        return NotImplemented
    names = [field.name for field in dataclasses.fields(pattern) if field.compare]
    return all(_equality_key(getattr(pattern, name)) == _equality_key(getattr(other, name)) for name in names)


def _equality_key(value: object) -> object:
    """Tells 1, 1.0 and True apart, also within tuples."""
    if isinstance(value, tuple):
        return tuple(map(_equality_key, value))
    return isinstance(value, (bool, np.bool_)), isinstance(value, (float, np.floating)), value


def evaluate_rule(
    pattern: object, name: str, rule: Callable[..., Any], positions: tuple[np.ndarray, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """Evaluates a rule at these positions: bool of this shape."""
    try:
        kept = np.asarray(rule(*(one.copy() for one in positions)))  # a rule may change its arguments in place
    except (ValueError, RuntimeError) as error:
        if "ambiguous" not in str(error):
            raise
        way_out = "combine with & | ~ instead of and, or, not; use np.where, np.minimum and np.maximum instead of if, min and max"
        raise TypeError(f"{name} of {pattern} must take whole arrays of positions; got code for one: {way_out}") from error
    if kept.dtype != bool:
        raise TypeError(f"{name} of {pattern} must return booleans; got {kept.dtype}; compare, and combine with & | ~")
    try:
        return np.broadcast_to(kept, shape)
    except ValueError:
        raise ValueError(f"{name} of {pattern} must return a shape that broadcasts to {shape}; got {kept.shape}") from None


class DerivedPattern(Pattern):
    """A pattern that names an expression of others: define the property ``expression``."""

    @property
    def expression(self) -> Pattern | str:
        """The equal expression, or its spec text."""
        raise NotImplementedError(f"{type(self).__name__} defines no expression")

    def expand_expression(self) -> Pattern:
        """``expression`` as a pattern. Raises TypeError for anything but a pattern or its spec text."""
        given: object = self.expression
        expression = Pattern.from_spec(given) if isinstance(given, str) else given
        if not isinstance(expression, Pattern):
            raise TypeError(f"the expression of {self} must be a property: a Pattern or its spec text; got {type(given).__name__}")
        return expression

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        return self.expand_expression().token_rule(q, kv)

    def leaves(self) -> Iterator[Pattern]:
        return self.expand_expression().leaves()

    def bind_length(self, kv_len: int) -> Pattern:
        whole = self.expand_expression()
        bound = whole.bind_length(kv_len)
        return self if bound == whole else bound


class _Expression(Pattern):
    """Base class of the operators."""

    def bind_length(self, kv_len: int) -> Pattern:
        return self.map_leaves(lambda leaf: leaf.bind_length(kv_len))

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        return self.map_leaves(lambda leaf: np.asarray(leaf.token_rule(np.array(q), np.array(kv)), bool))

    def token_tiles(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        # Each leaf evaluates as few pairs as it can.
        return self.map_leaves(lambda leaf: leaf.token_tiles(q, kv))

    def _write(self, write: Callable[[Pattern], str]) -> str:
        """The text of the expression. write: gives the text of an operand."""
        raise NotImplementedError

    def to_spec(self) -> str:
        return self._write(lambda p: p.to_spec())

    def __repr__(self) -> str:
        return self._write(repr)


@dataclass(frozen=True, repr=False)
class _Composite(_Expression):
    """Operands in canonical order: flattened, without repeats, shorter text first, so that ``a & b == b & a``."""

    operands: tuple[Pattern, ...]
    symbol: ClassVar[str]
    combine: ClassVar[Any]  # of two arrays

    @classmethod
    def of(cls, *operands: Pattern) -> Pattern:
        if kinds := {type(o) for o in operands if isinstance(o, PerEntry)}:
            if len(kinds) > 1:
                raise ValueError("per_head and per_batch do not combine; got both in one expression")
            counts, kind = {len(o.patterns) for o in operands if isinstance(o, PerEntry)}, kinds.pop()
            if len(counts) > 1:
                raise ValueError(f"{kind.name}: patterns must be for as many {kind.entry}s to combine; got {sorted(counts)}")
            each = [o.patterns if isinstance(o, PerEntry) else (o,) * max(counts) for o in operands]
            return kind(tuple(cls.of(*one) for one in zip(*each, strict=True)))
        layout = layout_of(*operands)
        if cls is Or:
            operands = tuple(_strip_layout(o, layout) for o in operands)
        flat = [p for o in operands for p in (o.operands if isinstance(o, cls) else (o,))]
        ordered = sorted(dict.fromkeys(flat), key=lambda p: (len(str(p)), str(p)))
        return _exclude_padding(ordered[0] if len(ordered) == 1 else cls(tuple(ordered)), layout)

    @cached_property
    def _hash(self) -> int | None:
        """None if it may change, with the data of a function."""
        return None if any(map(callable, _fields_in(self.operands))) else hash((self.symbol, self.operands))

    def __hash__(self) -> int:
        return hash((self.symbol, self.operands)) if self._hash is None else self._hash

    def leaves(self) -> Iterator[Pattern]:
        return chain.from_iterable(p.leaves() for p in self.operands)

    def map_leaves(self, change: Callable[[Pattern], Any]) -> Any:
        values = [p.map_leaves(change) for p in self.operands]
        # All patterns at once: each of two would be sorted again.
        return type(self).of(*values) if isinstance(values[0], Pattern) else reduce(self.combine, values)

    def _write(self, write: Callable[[Pattern], str]) -> str:
        parts = (f"({write(p)})" if isinstance(p, _Composite) else write(p) for p in self.operands)
        return f" {self.symbol} ".join(parts)


def layout_of(*patterns: Pattern) -> Any:
    """The VideoLayout of the patterns in these expressions, itself a pattern of all keys but padding, or None. Raises ValueError
    for several. ``| ~``, ``per_head`` and ``per_batch`` put it before what would keep padding."""
    found = (getattr(leaf, "layout", None) for one in patterns for leaf in one.leaves())
    layouts = [one for one in found if isinstance(one, Pattern) and one.hides_padding]
    if any(one != layouts[0] for one in layouts):
        texts = " and ".join(dict.fromkeys(map(str, layouts)))
        raise ValueError(
            f"patterns must be over one layout to combine, as q, k and v are in its order; got {texts}; give all the same"
        )
    return layouts[0] if layouts else None


def _hides_padding(pattern: Pattern) -> bool:
    if isinstance(pattern, _Composite):
        return (all if isinstance(pattern, Or) else any)(map(_hides_padding, pattern.operands))
    return _hides_padding(pattern.expand_expression()) if isinstance(pattern, DerivedPattern) else pattern.hides_padding


def _exclude_padding(pattern: Pattern, layout: Pattern | None) -> Pattern:
    return pattern if layout is None or _hides_padding(pattern) else And.of(layout, pattern)


def _strip_layout(pattern: Pattern, layout: Pattern | None) -> Pattern:
    """The expression without the layout before it: however an expression was put together, it then has one text."""
    rest = tuple(one for one in pattern.operands if one != layout) if isinstance(pattern, And) else (pattern,)
    return rest[0] if len(rest) == 1 else And(rest)


def _fields_in(value: object) -> Iterator[object]:
    """The values of all fields, also of patterns within, and in tuples."""
    if isinstance(value, Pattern) and dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    if isinstance(value, tuple):
        for one in value:
            yield from _fields_in(one)
    else:
        yield value


def _combine_patterns(kind: type[_Composite], pattern: Pattern, other: Pattern | str) -> Pattern:
    other = Pattern.from_spec(other) if isinstance(other, str) else other
    if isinstance(other, type) and issubclass(other, Pattern):
        raise TypeError(f"{own_name(other) or other.__qualname__} is a class of patterns; call it for a pattern, as in causal()")
    return kind.of(pattern, other) if isinstance(other, Pattern) else NotImplemented


class And(_Composite):
    """The pairs that every operand keeps."""

    symbol = "&"
    combine = operator.and_


class Or(_Composite):
    """The pairs that some operand keeps."""

    symbol = "|"
    combine = operator.or_


@dataclass(frozen=True, repr=False)
class Not(_Expression):
    """The pairs that the operand does not keep."""

    operand: Pattern

    def leaves(self) -> Iterator[Pattern]:
        return self.operand.leaves()

    def map_leaves(self, change: Callable[[Pattern], Any]) -> Any:
        return ~self.operand.map_leaves(change)

    def _write(self, write: Callable[[Pattern], str]) -> str:
        inner = write(self.operand)
        return f"~({inner})" if isinstance(self.operand, _Composite) else f"~{inner}"


@dataclass(frozen=True)
class PerEntry(Pattern):
    """Base class of the patterns that differ between heads or between the sequences of a batch."""

    patterns: tuple[Pattern, ...]
    entry: ClassVar[str]  # "head" or "sequence"

    def __post_init__(self) -> None:
        given: object = self.patterns
        if not isinstance(given, (tuple, list)) or not given:
            raise TypeError(
                f"{self.name}: patterns must be a list of patterns or spec texts, one for each {self.entry}; got {given!r}"
            )
        patterns = tuple(Pattern.from_spec(one) if isinstance(one, str) else one for one in given)
        for number, one in enumerate(patterns):
            if not isinstance(one, Pattern) or isinstance(one, PerEntry):
                way_out = f"; BlockMask.{self.name} takes compiled masks" * (type(one).__name__ == "BlockMask")
                raise TypeError(
                    f"{self.name}: patterns[{number}] must be a Pattern of one {self.entry} or its spec text; got "
                    f"{type(one).__name__}{way_out}"
                )
        layout = layout_of(*patterns)
        if layout is not None and not all(map(_hides_padding, patterns)):
            patterns = tuple(And.of(layout, one) for one in patterns)
        set_fields(self, patterns=patterns)

    @property
    def batch_heads(self) -> tuple[int, int]:
        """(batch, heads) of the mask, 1 for all."""
        return (1, len(self.patterns)) if self.entry == "head" else (len(self.patterns), 1)

    def __invert__(self) -> Pattern:
        return self._with_each(lambda one: ~one)

    def token_rule(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        raise ValueError(f"{self} has several token rules; take that of one of its patterns")

    def leaves(self) -> Iterator[Pattern]:
        return chain.from_iterable(one.leaves() for one in self.patterns)

    def map_leaves(self, change: Callable[[Pattern], Pattern]) -> Pattern:
        return self._with_each(lambda one: one.map_leaves(change))

    def bind_length(self, kv_len: int) -> Pattern:
        return self._with_each(lambda one: one.bind_length(kv_len))

    def _with_each(self, change: Callable[[Pattern], Pattern]) -> Pattern:
        return type(self)(tuple(map(change, self.patterns)))


@dataclass(frozen=True)
class PerHead(PerEntry):
    """A pattern for each query head: ``per_head([...])``, in spec text too.

    use: models whose heads see differently: a few heads everything, the others a window

    patterns: as many patterns or spec texts as a call has query heads, in their order, in a list or tuple; or one for all heads.

    Equal patterns are stored once. ``& | ~`` combine it head by head, with one pattern or with as many.
    """

    entry = "head"


@dataclass(frozen=True)
class PerBatch(PerEntry):
    """A pattern for each sequence of a batch: ``per_batch([...])``, in spec text too.

    use: batches whose sequences differ: paragraphs in other places, prefixes of other lengths

    patterns: as many patterns or spec texts as a call has sequences, in their order, in a list or tuple; or one for all. None of
    them has a chooser. ``per_head`` and ``per_batch`` do not combine.
    """

    entry = "sequence"


def own_name(cls: type[Pattern]) -> str | None:
    """The name that a class was registered under; not that of a class it derives from, nor a field called ``name``."""
    return vars(cls).get("name")
