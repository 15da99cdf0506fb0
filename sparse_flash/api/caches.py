"""What calls leave behind, given back."""

from __future__ import annotations

from ..backends import triton
from ..masks import memory


def clear_caches() -> None:
    """Forgets all that calls have left behind to make later ones faster: compiled masks and plans, choices of back ends and of
    configs, remembered launches, counters on GPUs. Their memory is free once nobody else holds it.

    Results do not change; the next calls take longer. What captured CUDA graphs read or write stays, and so do masks that you
    hold, compiled kernels in Triton's own cache, and the file of tuned configs, which is read again. Call it between steps, not
    beside calls of other threads.
    """
    memory.clear()
    triton.forget_launches()
