"""Makes Triton's interpreter faster, which the tests spend most of their time in.

For each launch it replaces what ``triton.language`` has, and searches the language for that again with every call of a jit'd
function, which takes some 40 % of its time. Within a launch, once is enough.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest


@cache
def _languages(fn) -> frozenset[str]:
    """The names of the modules that would be searched for a function."""
    from triton import language

    return frozenset(value.__name__ for value in fn.__globals__.values() if value is language or value is language.core)


def search_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    search, replaced = interpreter._patch_lang, set()

    def searched(fn):
        if _languages(fn) <= replaced:
            return SimpleNamespace(restore=lambda: None)
        # The launch's own, as its function comes first: it restores what the calls within it replaced as well.
        begins = not replaced
        scope = search(fn)
        replaced.update(_languages(fn))
        if not begins:
            return scope

        def restore():
            replaced.clear()
            scope.restore()

        return SimpleNamespace(restore=restore)

    patch.setattr(interpreter, "_patch_lang", searched)
