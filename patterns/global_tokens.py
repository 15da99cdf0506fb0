"""global_tokens: the first tokens see every token and are seen by every token.

use: prompts, text next to an image, or a classification token, which all others see and which see all others
formula: 0 <= q < tokens or kv < tokens
source: arXiv:2004.05150, sec. 3.1; arXiv:2007.14062, sec. 2
specimen: global_tokens(256)

    ####
    #...        global_tokens(1)
    #...
    #...
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import BEYOND, Positive
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("global_tokens")
@dataclass(frozen=True)
class GlobalTokens(RunPattern):
    """The first ``tokens`` tokens, as keys and as queries. ``sinks`` is for keys only, ``last_tokens`` for the last tokens."""

    tokens: Positive

    def row_runs(self, q):
        q = q[..., None]
        return np.zeros_like(q), np.where((q >= 0) & (q < self.tokens), BEYOND, self.tokens)
