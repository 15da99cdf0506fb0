"""causal: a query sees the keys up to its own position.

use: language models and everything else that is generated token by token
formula: kv <= q
source: arXiv:1706.03762, sec. 3.2.3
specimen: causal()

    #...
    ##..        causal()
    ###.
    ####
"""

from dataclasses import dataclass

import numpy as np

from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("causal")
@dataclass(frozen=True)
class Causal(RunPattern):
    """Keys up to the query's own position. With q_len != kv_len the last query sees the last key, as in decoding; with
    more queries than keys, the first queries keep nothing."""

    shift_invariant = True

    def row_runs(self, q):
        q = q[..., None]
        return np.zeros_like(q), q + 1
