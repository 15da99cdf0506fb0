"""The registry of pattern classes by name: built-in classes and the user's."""

import difflib
import re
import sys
from collections.abc import Callable
from typing import TypeVar

from . import spec
from .memory import clear_memories
from .pattern import Pattern, PerBatch, PerHead

PATTERN = TypeVar("PATTERN", bound="Pattern")
_registry: dict[str, type[Pattern]] = {}


def register_pattern(name: str) -> Callable[[type[PATTERN]], type[PATTERN]]:
    """Class decorator: makes a pattern available to spec text and the command line under ``name``.

    The class must be a frozen dataclass derived from Pattern. A taken name raises a ValueError; redefining a class of ``__main__``
    (rerunning a notebook cell) replaces it.
    """
    if not isinstance(name, str) or not spec.is_name(name):
        raise ValueError(f"a pattern name must be an identifier such as 'ring', in ASCII and not 'inf'; got {name!r}")

    def decorate(cls: type[PATTERN]) -> type[PATTERN]:
        if not (isinstance(cls, type) and issubclass(cls, Pattern)):
            raise TypeError(f"@register_pattern({name!r}) must decorate a subclass of sparse_flash.Pattern; got {cls!r}")
        params = vars(cls).get("__dataclass_params__")
        if params is None or not params.frozen:
            raise TypeError(
                f"{name!r}: {cls.__qualname__} must be a frozen dataclass; put @dataclass(frozen=True) under "
                f"{'@register_chooser' if cls.chooses else '@register_pattern'}"
            )
        owner = _registry.get(name)
        if owner is not None and not (_qualified_name(owner) == _qualified_name(cls) and cls.__module__ == "__main__"):
            raise ValueError(
                f"pattern {name!r} of {_qualified_name(cls)} is already registered by {_qualified_name(owner)}; choose another name"
            )
        cls.name = name
        _registry[name] = cls
        clear_memories()  # spec text may mean something else now
        return cls

    return decorate


register_pattern("per_head")(PerHead)
register_pattern("per_batch")(PerBatch)


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def list_patterns() -> list[str]:
    """The registered names, sorted: built-in patterns and the user's."""
    return list_registered(chooses=False)


def list_registered(chooses: bool) -> list[str]:
    """The registered names of choosers or of other patterns, sorted."""
    return sorted(name for name, cls in _registry.items() if cls.chooses == chooses)


def pattern_class(name: str) -> type[Pattern]:
    """The class registered under ``name``. Raises ValueError that lists the nearest names."""
    if name not in _registry:
        near = difflib.get_close_matches(name.lower(), sorted(_registry), n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(sorted(_registry))}."
        raise ValueError(
            f"unknown pattern {name!r}; {hint} For one of your own, import the file that registers it, on the command line by "
            "--import FILE"
        )
    return _registry[name]


def find_docstring_line(cls: type[Pattern], subject: str) -> str:
    """The rest of the line ``subject: ...`` of a class's or its module's docstring, or "". ``use`` is what a pattern is for."""
    for text in (cls.__doc__, sys.modules[cls.__module__].__doc__):
        if found := re.search(rf"^\s*{subject}: (.+)$", text or "", re.MULTILINE):
            return found[1]
    return ""
