"""Makes Triton's interpreter faster, which the tests spend most of their time in.

For each launch it replaces what ``triton.language`` has, and searches the language for that again with every call of a jit'd
function, which takes some 40 % of its time. Within a launch, once is enough. For each operation it makes a table of all dtypes to
find one in, a tenth of the rest; they never change. And it computes whether integers overflow, a quarter, which nobody reads
without ``debug``. Half of what then remains describes the type and shape of each result anew; all tensors of a type share these.
"""

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


def check_overflows_to_read_them(patch: pytest.MonkeyPatch) -> None:
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def checked(self, *operation):
        if self.builder.options.debug:
            check(self, *operation)

    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", checked)


def find_dtypes_once(patch: pytest.MonkeyPatch) -> None:
    from triton.language import block_type, pointer_type
    from triton.runtime import interpreter

    search = interpreter._get_np_dtype
    of_element = cache(search)

    def found(dtype):
        element = dtype.element_ty if isinstance(dtype, block_type) else dtype
        # Which dtype a pointer points to does not matter, and it has no hash.
        return search(element) if isinstance(element, pointer_type) else of_element(element)

    patch.setattr(interpreter, "_get_np_dtype", found)


def describe_types_once(patch: pytest.MonkeyPatch) -> None:
    from triton.language import core

    describe_block, describe_tensor = core.block_type.__init__, core.tensor.__init__

    def block(self, element_ty, shape):
        blocks = vars(element_ty).setdefault("blocks", {})
        lengths = tuple([getattr(length, "value", length) for length in shape])
        if lengths not in blocks:
            describe_block(self, element_ty, shape)
            blocks[lengths] = vars(self) | {"described": {}}
        vars(self).update(blocks[lengths])

    def tensor(self, handle, type):
        described = vars(type).setdefault("described", {})
        if not described:
            describe_tensor(self, handle, type)
            described.update({name: value for name, value in vars(self).items() if name not in ("handle", "type")})
        vars(self).update(described, handle=handle, type=type)

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)


def hasten(patch: pytest.MonkeyPatch) -> None:
    for change in (search_once_a_launch, check_overflows_to_read_them, find_dtypes_once, describe_types_once):
        change(patch)
