"""Frees what calls leave behind."""

from __future__ import annotations

from ..kernels.launch import memory as launches
from ..masks import memory


def clear_caches() -> None:
    """Drops everything that calls keep to make later ones faster: compiled masks and plans, choices of back ends and configs,
    remembered launches, counters on GPUs. The memory is freed once nothing else refers to it.

    Results do not change; the next calls take longer. What captured CUDA graphs read or write stays, as do masks that you hold,
    compiled kernels in Triton's own cache, and tile sizes that were measured. Call it between steps, not while other threads make
    calls.
    """
    memory.clear_memories()
    launches.clear()
