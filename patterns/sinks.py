"""sinks: every query sees the first tokens.

use: long text and endless streams: the first tokens stay in sight with a sliding window
formula: kv < tokens
source: arXiv:2309.17453, sec. 3.2
specimen: sinks(256)

    #...
    #...        sinks(1)
    #...
    #...
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import Positive
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("sinks")
@dataclass(frozen=True)
class Sinks(RunPattern):
    """The first ``tokens`` keys. StreamingLLM is ``causal & (sinks(4) | local(window))``."""

    tokens: Positive

    def row_runs(self, q):
        q = q[..., None]
        return np.zeros_like(q), np.full_like(q, self.tokens)
