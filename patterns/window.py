"""window: a sliding window with a separate reach to each side.

use: what window_size=(left, right) of other libraries says: long text, audio, series
formula: -right <= q - kv <= left          source: FlashAttention's window_size=(left, right); arXiv:2004.05150, sec. 3.1

    ##..
    ###.        window(2, 1)
    ####
    .###
"""

from dataclasses import dataclass

from sparse_flash.masks.pattern import register_pattern
from sparse_flash.masks.rules import BEYOND, RunPattern, positive_int


@register_pattern("window")
@dataclass(frozen=True)
class Window(RunPattern):
    """The ``left`` keys before a query, its own, and the ``right`` keys after it: -right <= q - kv <= left; None is no limit. Both
    ends are kept, as in FlashAttention: window(w - 1, 0) is causal & local(w)."""

    left: int | None = None
    right: int | None = None
    shift_invariant = True

    def __post_init__(self):
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, positive_int("window", name, getattr(self, name), least=0))

    def row_runs(self, q):
        q = q[..., None]
        first = q * 0 if self.left is None else q - self.left
        return first, (q * 0 + BEYOND if self.right is None else q + self.right + 1)
