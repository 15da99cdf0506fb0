"""Differences between releases of Triton and its interpreter; ``gluon.py`` has the same for Gluon, and private names."""

import os

import triton.language as tl

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):

    def is_rows(tensor) -> bool:
        """Whether a kernel received ``Rows`` instead of a descriptor; known at compile time."""
        return hasattr(tensor, "token_stride")

else:
    # Not a constexpr_function: in Triton 3.6 that receives a tuple without its field names.
    @tl.core.builtin
    def is_rows(tensor, _semantic=None):
        """Whether a kernel received ``Rows`` instead of a descriptor; known at compile time."""
        return tl.constexpr(isinstance(tensor, tl.tuple))
