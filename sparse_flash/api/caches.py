"""Frees what calls cache."""

from ..kernels.launch import memory as launches
from ..masks import memory


def clear_caches() -> None:
    """Clears everything that calls cache: compiled masks and plans, choices of back ends and configs, launches, counters on GPUs.
    The memory is freed once nothing else refers to it.

    Results do not change; the next calls take longer. What captured CUDA graphs read or write stays, and so do masks that you hold,
    compiled kernels in Triton's cache, and measured tile sizes. Call it between steps, not while other threads make calls.
    """
    memory.clear_memories()
    launches.clear()
