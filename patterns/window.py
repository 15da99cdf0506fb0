"""window: a sliding window with a separate reach to each side.

use: what window_size=(left, right) of other libraries says: long text, audio, series
formula: -right <= q - kv <= left
source: FlashAttention's window_size=(left, right); arXiv:2004.05150, sec. 3.1
specimen: window(1024, 256)

    ##..
    ###.        window(2, 1)
    ####
    .###
"""

from dataclasses import dataclass

from ..masks.fields import BEYOND, Natural
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("window")
@dataclass(frozen=True)
class Window(RunPattern):
    """The ``left`` keys before a query, its own, and the ``right`` keys after it: -right <= q - kv <= left; None is no limit. Both
    ends are kept, as in FlashAttention: window(w - 1, 0) is causal & local(w)."""

    left: Natural | None = None
    right: Natural | None = None
    shift_invariant = True

    def row_runs(self, q):
        q = q[..., None]
        first = q * 0 if self.left is None else q - self.left
        return first, (q * 0 + BEYOND if self.right is None else q + self.right + 1)
