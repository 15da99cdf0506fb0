"""shifted: a pattern that starts at a token of the sequence and counts positions from there.

use: an image, a video or documents with other tokens, such as text, before or after them
formula: q >= tokens and kv >= tokens and pattern(q - tokens, kv - tokens)
specimen: shifted(neighborhood((48, 64), 13), 512)

    .....
    .....        shifted(documents([0, 2, 3]), 2)
    ..##.
    ..##.
    ....#
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import BEYOND, Natural, set_fields
from ..masks.parsing import parse
from ..masks.pattern import DerivedPattern, Pattern
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern, move_pattern


@register_pattern("shifted")
@dataclass(frozen=True)
class Shifted(DerivedPattern):
    """A pattern on the tokens from ``tokens`` on.

    pattern: a Pattern or its spec text, which counts positions from 0. tokens: where its position 0 is; 0 and more.

    The tokens before, and those past a pattern that names how many it has keep nothing and are seen by nothing. Text, then a video,
    is ``global_tokens(n) | shifted(neighborhood(...), n)``, a video, then text ``shifted(neighborhood(...), 0) | last_tokens(n)``.
    """

    pattern: Pattern
    tokens: Natural

    def __post_init__(self):
        set_fields(self, pattern=parse(self.pattern) if isinstance(self.pattern, str) else self.pattern)
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"shifted: pattern must be a Pattern or its spec text; got {type(self.pattern).__name__}")
        super().__post_init__()

    @property
    def expression(self):
        return _From(self.tokens) & move_pattern(self.pattern, self.tokens)

    def leaves(self):
        yield self

    def bind_length(self, kv_len):
        bound = self.pattern.bind_length(kv_len - self.tokens)
        return self if bound == self.pattern else _From(self.tokens) & move_pattern(bound, self.tokens)


@dataclass(frozen=True)
class _From(RunPattern):
    """The tokens from ``first`` on, as queries and as keys."""

    first: int

    def row_runs(self, q):
        q = q[..., None]
        return np.full_like(q, self.first), np.where(q >= self.first, BEYOND, 0)
