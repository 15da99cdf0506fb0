"""Makes patterns of spec text, with errors that point at the column, and text of patterns."""

from __future__ import annotations

import inspect
import re
from typing import Any

from ..compat.constants import constant_in_graphs
from . import spec
from .memory import cached_until_cleared
from .pattern import And, Or, Pattern
from .registry import pattern_class, suggest_names

_LAYOUT_WORD = re.compile(r"(?<![\w.])layout(?![\w.])(?!\s*[=(])")


def parse(text: str) -> Pattern:
    """The pattern for spec text such as ``"causal & (local(1024) | butterfly(block=128))"``.

    Raises ``SpecError`` (a ValueError) that points at the column.
    """
    return _build_pattern(spec.read(text), text)


Pattern.from_spec = staticmethod(parse)


def split_at_layout(text: object) -> tuple[str, ...]:
    """What stands before, between and after the word layout in spec text, which stands for a VideoLayout. Raises ValueError for a
    mask without that word."""
    pieces = tuple(_LAYOUT_WORD.split(text)) if isinstance(text, str) else ()
    if len(pieces) < 2:
        raise ValueError(f"spec must say where the layout of the video goes, as 'tile_window(layout, (3, 3, 3))'; got {text!r}")
    return pieces


def fill_layout(text: Any, layout: Pattern | None) -> Any:
    """The spec text with the text of a VideoLayout in place of the word layout; the mask itself if there is no layout."""
    if not isinstance(layout, Pattern | None):
        raise TypeError(f"layout must be a VideoLayout; got {layout!r}; VideoLayout.of(frames, height, width) makes one")
    return text if layout is None else layout.to_spec().join(split_at_layout(text))


@constant_in_graphs
@cached_until_cleared(maxsize=256)
def text_of(pattern: Pattern | str) -> str | None:
    """The spec text that reads back as this pattern; None if some part of it is not registered. Raises ``SpecError`` for text that
    cannot be read."""
    if isinstance(pattern, str):
        return parse(pattern).to_spec()
    try:
        text = pattern.to_spec()
        return text if parse(text) == pattern else None
    except ValueError:
        return None


def _build_pattern(tree: spec.Tree, text: str) -> Pattern:
    if isinstance(tree, spec.Operation):
        operands = [_build_pattern(operand, text) for operand in tree.operands]
        return ~operands[0] if tree.symbol == "~" else {"&": And, "|": Or}[tree.symbol].of(*operands)
    try:
        cls = pattern_class(tree.name)
    except ValueError as error:
        raise spec.SpecError(str(error), text, tree.column) from None
    positional = [_build_value(value, text) for value in tree.positional]
    keyword = {name: _build_value(value, text) for name, value in tree.keyword.items()}
    try:
        return cls(*positional, **keyword)
    except (TypeError, ValueError) as error:
        raise spec.SpecError(_argument_refusal(cls, tree) or str(error), text, tree.column) from error


def _build_value(value: spec.Value, text: str) -> Any:
    """A value of spec text with its expressions made into patterns."""
    if isinstance(value, tuple):
        return tuple(_build_value(one, text) for one in value)
    return _build_pattern(value, text) if isinstance(value, spec.Tree) else value


def _argument_refusal(cls: type[Pattern], tree: spec.PatternCall) -> str | None:
    """Says what is wrong with the arguments' names or number; None if nothing is."""
    signature = inspect.signature(cls).replace(return_annotation=inspect.Signature.empty)
    named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in tree.keyword:
        if not (takes_any or name in named):
            return f"{_format_signature(tree.name, signature)}: unknown argument {name!r}; {suggest_names(name, named)}"
    try:
        signature.bind(*tree.positional, **tree.keyword)
    except TypeError as error:
        return f"{_format_signature(tree.name, signature)}: {error}"
    return None


def _format_signature(name: str, signature: inspect.Signature) -> str:
    """A call's signature without the limits of its fields."""
    return name + re.sub(r"(?:typing\.)?Annotated\[(\w+), [^]]*\]", r"\1", str(signature))
