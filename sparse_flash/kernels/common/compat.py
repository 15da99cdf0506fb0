"""Private names of Triton, and what differs between its releases; those of Gluon are in ``gluon.py`` beside it."""

import os

import triton.language as tl
from triton.runtime._async_compile import AsyncCompileMode as AsyncCompileMode  # kernels compiled by workers that it is given

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):

    def is_rows(tensor) -> bool:
        """Whether a kernel got ``Rows`` in place of a descriptor, known at compile time."""
        return hasattr(tensor, "token_stride")

else:
    # Not a constexpr_function, which in Triton 3.6 gets a tuple without the names of its fields.
    @tl.core.builtin
    def is_rows(tensor, _semantic=None):
        """Whether a kernel got ``Rows`` in place of a descriptor, known at compile time."""
        return tl.constexpr(isinstance(tensor, tl.tuple))
