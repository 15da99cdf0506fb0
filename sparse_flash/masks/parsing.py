"""Makes patterns of spec text, with errors that point at the column, and text of patterns."""

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any, NoReturn

from ..compat.constants import constant_in_graphs
from .memory import cached_until_cleared
from .pattern import And, Or, Pattern
from .registry import pattern_class
from .spec import SpecError, split_tokens

_LAYOUT_WORD = re.compile(r"(?<![\w.])layout(?![\w.])(?!\s*[=(])")
_SIGN_OF = {"and": "&", "or": "|", "not": "~"}
_CONSTANTS: dict[str, bool | None] = {"True": True, "False": False, "None": None}


def parse(text: str) -> Pattern:
    """The pattern for spec text such as ``"causal & (local(1024) | butterfly(block=128))"``.

    Raises ``SpecError`` (a ValueError) that points at the column.
    """
    if not isinstance(text, str):
        raise TypeError(f"a pattern spec must be a string; got {type(text).__name__}")
    reader = _Reader(text)
    pattern = reader.expression()
    return pattern if reader.accept("end") else reader.fail("'&', '|' or the end of the spec")


Pattern.from_spec = staticmethod(parse)


def split_at_layout(text: object) -> tuple[str, ...]:
    """Splits spec text at the word layout. Raises ValueError for a mask without that word."""
    pieces = tuple(_LAYOUT_WORD.split(text)) if isinstance(text, str) else ()
    if len(pieces) < 2:
        raise ValueError(f"spec must say where the layout of the video goes, as 'tile_window(layout, (3, 3, 3))'; got {text!r}")
    return pieces


@constant_in_graphs
@cached_until_cleared(maxsize=256)
def text_of(pattern: Pattern | str) -> str | None:
    """The spec text that reads back as this pattern; None if part of it is not registered. Raises ``SpecError`` for other text."""
    if isinstance(pattern, str):
        return parse(pattern).to_spec()
    try:
        text = pattern.to_spec()
        return text if parse(text) == pattern else None
    except ValueError:
        return None


class _Reader:
    """Reads the tokens of spec text in order; a method for each rule of the notation (see ``spec``)."""

    def __init__(self, text: str):
        self.text, self.tokens, self.next = text, split_tokens(text), 0

    def fail(self, expected: str) -> NoReturn:
        kind, value, column = self.tokens[self.next]
        way_out = f"; write {_SIGN_OF[value]!r}" if value in _SIGN_OF else ""
        raise SpecError(f"expected {expected}, got {value if kind == 'end' else repr(value)}{way_out}", self.text, column)

    def accept(self, kind: str, value: str | None = None) -> tuple[str, int] | None:
        token_kind, token, column = self.tokens[self.next]
        if token_kind != kind or (value is not None and token != value):
            return None
        self.next += 1
        return token, column

    def expression(self) -> Pattern:
        return self.chain("|", Or.of, lambda: self.chain("&", And.of, self.factor))

    def chain(self, symbol: str, combine: Callable[..., Pattern], operand: Callable[[], Pattern]) -> Pattern:
        operands = [operand()]
        while self.accept("mark", symbol):
            operands.append(operand())
        return operands[0] if len(operands) == 1 else combine(*operands)

    def factor(self) -> Pattern:
        if self.accept("mark", "~"):
            return ~self.factor()
        if self.accept("mark", "("):
            inner = self.expression()
            return inner if self.accept("mark", ")") else self.fail("')'")
        if self.tokens[self.next][1] not in _SIGN_OF and (name := self.accept("name")):
            return self.call(*name)
        return self.fail("a pattern name, '~' or '('")

    def call(self, name: str, column: int) -> Pattern:
        positional: list[Any] = []
        keyword: dict[str, Any] = {}
        if self.accept("mark", "("):
            self.items(")", lambda: self.argument(positional, keyword))
        try:
            cls = pattern_class(name)
        except ValueError as error:
            raise SpecError(str(error), self.text, column) from None
        try:
            return cls(*positional, **keyword)
        except (TypeError, ValueError) as error:
            said = _misfit(name, inspect.signature(cls), positional, keyword) or str(error)
            raise SpecError(said, self.text, column) from error

    def items(self, closing: str, read_item: Callable[[], None]) -> None:
        """Reads items between commas, and the mark that closes them."""
        while not self.accept("mark", closing):
            read_item()
            if not self.accept("mark", ",") and self.tokens[self.next][:2] != ("mark", closing):
                self.fail(f"',' or {closing!r}")

    def argument(self, positional: list[Any], keyword: dict[str, Any]) -> None:
        kind, token, column = self.tokens[self.next]
        if kind == "name" and self.tokens[self.next + 1][1] == "=":
            self.next += 2
            if token in keyword:
                raise SpecError(f"argument {token!r} is given twice", self.text, column)
            keyword[token] = self.value()
        elif keyword:
            raise SpecError("a positional argument after a named one", self.text, column)
        else:
            positional.append(self.value())

    def is_expression(self) -> bool:
        """Whether the next value is an expression: a name, perhaps after '~' and '('."""
        at = self.next
        while self.tokens[at][:2] in (("mark", "~"), ("mark", "(")):
            at += 1
        return self.tokens[at][0] == "name" and self.tokens[at][1] not in _CONSTANTS

    def value(self) -> Any:
        kind, token, column = self.tokens[self.next]
        if self.is_expression():
            return self.expression()
        self.next += 1
        if kind == "name":
            return _CONSTANTS[token]
        if kind in ("number", "string"):
            try:
                return _read_number(token) if kind == "number" else ast.literal_eval(token)
            except (SyntaxError, ValueError):
                raise SpecError(f"cannot read {token!r} as a {kind}", self.text, column) from None
        if token in ("(", "["):
            values: list[Any] = []
            self.items(")" if token == "(" else "]", lambda: values.append(self.value()))
            return tuple(values)
        self.next -= 1
        return self.fail("a number, a string, True, False, None, a pattern or a tuple of them")


def _misfit(name: str, signature: inspect.Signature, positional: list[Any], keyword: dict[str, Any]) -> str | None:
    """Says what is wrong with the number and the names of a pattern's arguments; None if nothing is."""
    try:
        signature.bind(*positional, **keyword)
    except TypeError as error:
        names = ", ".join(str(one.replace(annotation=one.empty)) for one in signature.parameters.values())
        return f"{name} takes ({names}): {error}"
    return None


def _read_number(text: str) -> int | float:
    """Returns the number. Raises ValueError for what Python would not read either. torch.compile can trace this."""
    return int(text) if text.lstrip("-").replace("_", "").isdigit() else float(text)
