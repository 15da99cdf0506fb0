"""full: every query sees every key.

use: short sequences; a baseline to compare with; the heads or layers that must see everything
formula: True
source: arXiv:1706.03762, sec. 3.2.1
specimen: full()

    ####
    ####        full()
    ####
    ####
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import BEYOND
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("full")
@dataclass(frozen=True)
class Full(RunPattern):
    """Every pair. Attention takes the dense path for it; in expressions it is the neutral element of ``&``."""

    shift_invariant = True

    def row_runs(self, q):
        q = q[..., None]
        return np.zeros_like(q), np.full_like(q, BEYOND)
