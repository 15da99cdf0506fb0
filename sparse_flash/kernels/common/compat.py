"""Differences between releases of Triton and its interpreter. ``gluon.py`` has those of Gluon, and private names."""

import os
from dataclasses import dataclass
from typing import Any

import triton.language as tl

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@dataclass(frozen=True)
class Constants:
    """Gives a kernel the attributes and properties of a frozen dataclass as compile-time constants. Triton 3.6 and 3.7 do not take
    plain numbers everywhere; the interpreter takes only these."""

    of: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look names up before ``of`` is set
            raise AttributeError(name)
        value = getattr(self.of, name)
        return value if _INTERPRETED else tl.constexpr(value)


if _INTERPRETED:

    def is_rows(tensor) -> bool:
        """Whether a kernel received ``Rows`` instead of a descriptor; known at compile time."""
        return hasattr(tensor, "token_stride")

else:
    # Not a constexpr_function: in Triton 3.6 that receives a tuple without its field names.
    @tl.core.builtin
    def is_rows(tensor, _semantic=None):
        """Whether a kernel received ``Rows`` instead of a descriptor; known at compile time."""
        return tl.constexpr(isinstance(tensor, tl.tuple))
