"""prefix: prefix-LM; the first tokens are seen from everywhere, the others as in a causal mask.

use: a prompt, question or image read as a whole, then an answer generated token by token
formula: kv < tokens or kv <= q
source: arXiv:1910.10683, sec. 3.2.1 and fig. 3 (right)
specimen: prefix(1024)

    ##..
    ##..        prefix(2)
    ###.
    ####
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import Positive
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("prefix")
@dataclass(frozen=True)
class Prefix(RunPattern):
    """The causal pattern and the first ``tokens`` keys, which see each other both ways. It *includes* causal, as in T5: write
    ``prefix(n)``, not ``causal & prefix(n)``, which is causal again. For the keys only, use ``sinks``."""

    tokens: Positive

    def row_runs(self, q):
        q = q[..., None]
        return np.zeros_like(q), np.maximum(q + 1, self.tokens)
