"""Spec text: the one-line notation of patterns, such as ``causal & (local(1024) | butterfly(block=128))``.

    expression := term ("|" term)*          term := factor ("&" factor)*
    factor     := "~" factor | "(" expression ")" | name ["(" arguments ")"]
    value      := integer | float | string | True | False | None | "(" value, ... ")" | "[" value, ... "]" | expression

This module writes text and splits it into tokens; ``parsing.py`` reads patterns from these. Nothing is ever evaluated as code.
"""

import operator
import re
from typing import Any, cast

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>-?(?:inf\b|(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?))|(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)"""
    r"""|(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<mark>[&|~()\[\],=])|(?P<unknown>\S))"""
)


class SpecError(ValueError):
    """Spec text that cannot be read; the message shows the text with a caret under the column."""

    def __init__(self, message: str, text: str, column: int):
        self.text, self.column = text, column
        super().__init__(f"{message} (column {column + 1})\n  {text}\n  {' ' * column}^")


def split_tokens(text: str) -> list[tuple[str, str, int]]:
    """(kind, token, column) of each token of spec text. kind: "number", "name", "string", "mark"; "end" of a last one."""
    tokens, position = [], 0
    while match := _TOKEN.match(text, position):
        kind = cast(str, match.lastgroup)  # every alternative is a group with a name
        if kind == "unknown":
            raise SpecError(f"unexpected {match[kind]!r}", text, match.start(kind))
        tokens.append((kind, match[kind], match.start(kind)))
        position = match.end()
    return [*tokens, ("end", "the end of the spec", len(text))]


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
        # Parentheses around an expression would be read as part of it.
        if any(type(one) is not int and hasattr(one, "to_spec") for one in value):
            return f"[{', '.join(map(write_value, value))}]"
        return f"({', '.join(map(write_value, value))}{',' if len(value) == 1 else ''})"
    if value is None or type(value) in (bool, float, str):
        return repr(value)
    for kind in (int, float, str):  # subclasses write themselves otherwise, such as numpy.float64(0.5) or a member of an enum
        if isinstance(value, kind):
            return kind.__repr__(value)  # torch.compile of 2.11 cannot trace this, so other values do not come here
    raise ValueError(f"a {type(value).__name__} has no spec text; use integers, floats, strings, booleans and tuples as fields")
