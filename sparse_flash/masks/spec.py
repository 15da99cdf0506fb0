"""Spec text: the one-line notation of patterns, such as ``causal & (local(1024) | butterfly(block=128))``.

    expression := term ("|" term)*          term := factor ("&" factor)*
    factor     := "~" factor | "(" expression ")" | name ["(" arguments ")"]
    value      := integer | float | string | True | False | None | "(" value, ... ")" | "[" value, ... "]" | expression

This module only knows the notation; ``parsing.py`` turns names into patterns. Nothing is ever evaluated as code.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, cast

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>-?(?:inf\b|(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?))|(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)"""
    r"""|(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<mark>[&|~()\[\],=]))"""
)
# Readers and writers call themselves for each level, and deeper text would reach Python's limit on calls.
MOST_NESTED = 100
_CONSTANTS: dict[str, bool | None] = {"True": True, "False": False, "None": None}


class SpecError(ValueError):
    """Spec text that cannot be read; the message shows the text with a caret under the column."""

    def __init__(self, message: str, text: str, column: int):
        self.text, self.column = text, column
        super().__init__(f"{message} (column {column + 1})\n  {text}\n  {' ' * column}^")


@dataclass(frozen=True)
class PatternCall:
    """``name(*positional, **keyword)`` at a column of the text."""

    name: str
    column: int
    positional: tuple[Value, ...] = ()
    keyword: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """``"&"`` or ``"|"`` over two or more operands, or ``"~"`` over one."""

    symbol: str
    operands: tuple[Tree, ...]


Tree: TypeAlias = PatternCall | Operation
Value: TypeAlias = "int | float | str | bool | tuple[Value, ...] | Tree | None"


def read(text: str) -> Tree:
    """Spec text -> a tree of ``PatternCall`` and ``Operation``. Raises SpecError."""
    if not isinstance(text, str):
        raise TypeError(f"a pattern spec must be a string; got {type(text).__name__}")
    reader = _Reader(text)
    tree = reader.expression()
    return tree if reader.accept("end") else reader.fail("'&', '|' or the end of the spec")


def is_name(text: str) -> bool:
    """Whether a pattern of this name can be written in spec text, and is an identifier too."""
    match = _TOKEN.fullmatch(text)
    return match is not None and match.lastgroup == "name" and text.isidentifier()


def write_call(name: str, positional: list[Any], keyword: dict[str, Any]) -> str:
    """The text of one call; a call without arguments is the bare name."""
    parts = [write_value(v) for v in positional] + [f"{k}={write_value(v)}" for k, v in keyword.items()]
    return f"{name}({', '.join(parts)})" if parts else name


def write_value(value: object) -> str:
    if type(value) is int:
        return repr(operator.index(value))  # of a symbol of torch.compile, the number; another number compiles anew
    if hasattr(value, "to_spec"):
        return value.to_spec()
    if isinstance(value, tuple):
        if any(
            type(one) is not int and hasattr(one, "to_spec") for one in value
        ):  # parentheses around an expression would be read as part of it
            return f"[{', '.join(map(write_value, value))}]"
        return f"({', '.join(map(write_value, value))}{',' if len(value) == 1 else ''})"
    if value is None or type(value) in (bool, float, str):
        return repr(value)
    for kind in (int, float, str):  # subclasses write themselves otherwise, such as numpy.float64(0.5) or a member of an enum
        if isinstance(value, kind):
            return kind.__repr__(value)  # torch.compile of 2.11 cannot trace this, so other values do not come here
    raise ValueError(f"a {type(value).__name__} has no spec text; use integers, floats, strings, booleans and tuples as fields")


def _read_number(text: str) -> int | float:
    """Returns the number. Raises ValueError for what Python would not read either. torch.compile can trace this."""
    digits = text.lstrip("-")
    if not digits.replace("_", "").isdigit():
        return float(text)
    if digits.startswith("0") and digits.strip("0_"):
        raise ValueError(f"{text} has a leading 0")
    return int(text)


class _Reader:
    def __init__(self, text: str):
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if not match:
                column = position + len(text[position:]) - len(text[position:].lstrip())
                raise SpecError(f"unexpected {text[column]!r}", text, column)
            kind = cast(str, match.lastgroup)  # every alternative is a group with a name
            self.tokens.append((kind, match[kind], match.start(kind)))
            position = match.end()
        self.tokens.append(("end", "the end of the spec", len(text)))
        self.next = 0
        self.nested = 0

    def fail(self, expected: str) -> NoReturn:
        kind, value, column = self.tokens[self.next]
        raise SpecError(f"expected {expected}, got {value if kind == 'end' else repr(value)}", self.text, column)

    def accept(self, kind: str, value: str | None = None) -> tuple[str, int] | None:
        token_kind, token, column = self.tokens[self.next]
        if token_kind != kind or (value is not None and token != value):
            return None
        self.next += 1
        return token, column

    @contextmanager
    def one_deeper(self, mark: str, column: int) -> Iterator[None]:
        self.nested += 1
        if self.nested > MOST_NESTED:
            raise SpecError(
                f"{mark!r} is nested more than {MOST_NESTED} deep; leave out what changes nothing, such as '~~' and '((', or "
                "combine patterns with & | ~ in Python",
                self.text,
                column,
            )
        yield
        self.nested -= 1

    def expression(self) -> Tree:
        return self.chain("|", lambda: self.chain("&", self.factor))

    def chain(self, symbol: str, operand: Callable[[], Tree]) -> Tree:
        operands = [operand()]
        while self.accept("mark", symbol):
            operands.append(operand())
        return operands[0] if len(operands) == 1 else Operation(symbol, tuple(operands))

    def factor(self) -> Tree:
        if mark := self.accept("mark", "~"):
            with self.one_deeper(*mark):
                return Operation("~", (self.factor(),))
        if mark := self.accept("mark", "("):
            with self.one_deeper(*mark):
                inner = self.expression()
            if not self.accept("mark", ")"):
                self.fail("')'")
            return inner
        name = self.accept("name")
        if not name:
            self.fail("a pattern name, '~' or '('")
        positional, keyword = self.arguments() if self.accept("mark", "(") else ([], {})
        return PatternCall(name[0], name[1], tuple(positional), keyword)

    def arguments(self) -> tuple[list[Value], dict[str, Value]]:
        positional: list[Value] = []
        keyword: dict[str, Value] = {}
        while not self.accept("mark", ")"):
            if positional or keyword:
                if not self.accept("mark", ","):
                    self.fail("',' or ')'")
                if self.accept("mark", ")"):
                    break
            _, token, column = self.tokens[self.next]
            if self.tokens[self.next][0] == "name" and self.tokens[self.next + 1][1] == "=":
                self.next += 2
                if token in keyword:
                    raise SpecError(f"argument {token!r} is given twice", self.text, column)
                keyword[token] = self.value()
            elif keyword:
                raise SpecError("a positional argument after a named one", self.text, column)
            else:
                positional.append(self.value())
        return positional, keyword

    def is_expression(self) -> bool:
        """Whether the next value is an expression: a name, perhaps after '~' and '('."""
        at = self.next
        while self.tokens[at][:2] in (("mark", "~"), ("mark", "(")):
            at += 1
        return self.tokens[at][0] == "name" and self.tokens[at][1] not in _CONSTANTS

    def value(self) -> Value:
        if self.is_expression():
            with self.one_deeper(*self.tokens[self.next][1:]):
                return self.expression()
        for kind in ("number", "string"):
            token = self.accept(kind)
            if token:
                try:
                    return _read_number(token[0]) if kind == "number" else ast.literal_eval(token[0])
                except (SyntaxError, ValueError):
                    raise SpecError(f"cannot read {token[0]!r} as a {kind}", self.text, token[1]) from None
        if name := self.accept("name"):
            return _CONSTANTS[name[0]]
        for opening, closing in (("(", ")"), ("[", "]")):
            if mark := self.accept("mark", opening):
                with self.one_deeper(*mark):
                    return self.values_until(closing)
        return self.fail("a number, a string, True, False, None, a pattern or a tuple of them")

    def values_until(self, closing: str) -> tuple[Value, ...]:
        values: list[Value] = []
        while not self.accept("mark", closing):
            if values and not self.accept("mark", ","):
                self.fail(f"',' or {closing!r}")
            if values and self.accept("mark", closing):
                break
            values.append(self.value())
        return tuple(values)
