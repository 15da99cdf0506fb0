"""local: a sliding window to both sides.

use: long text, audio and series: what matters is near; with causal, the sliding window of language models
formula: abs(q - kv) < window
source: arXiv:2004.05150, sec. 3.1
specimen: local(512)

    ##..
    ###.        local(2)
    .###
    ..##
"""

from dataclasses import dataclass

from ..masks.fields import Positive
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("local")
@dataclass(frozen=True)
class Local(RunPattern):
    """Keys nearer than ``window`` tokens: |q - kv| < window. With causal a query sees window keys, itself included."""

    window: Positive
    shift_invariant = True

    def row_runs(self, q):
        q = q[..., None]
        return q - self.window + 1, q + self.window
