"""Finds the setting by which a choice keeps a wanted share of blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

_STEPS, _NEAR = 14, 0.02  # of the search, and how near the density must come, relative


def find_setting(density_at: Callable[[float], float], ends: tuple[float, float], wanted: float) -> float:
    """The setting whose density is nearest to the wanted one, by bisection. ends: the sparsest and the densest setting. Nothing is
    compiled by torch.compile meanwhile: it would compile again for some settings, then give up."""
    low, high = ends
    tried: list[tuple[float, float]] = []
    with torch.compiler.set_stance("force_eager"):
        for _ in range(_STEPS):
            setting = (low + high) / 2
            density = density_at(setting)
            tried.append((abs(density - wanted), setting))
            if tried[-1][0] <= _NEAR * wanted:
                break
            low, high = (setting, high) if density < wanted else (low, setting)
    return min(tried)[1]
