"""last_tokens: the last tokens see every token and are seen by every token.

use: text after an image or a video, a question after a document: tokens that all others see and which see all others
formula: q >= kv_len - tokens or kv >= kv_len - tokens
source: arXiv:2004.05150, sec. 3.1 (there at any tokens)
specimen: last_tokens(256)

    ...#
    ...#        last_tokens(1)
    ...#
    ####
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import BEYOND, Positive
from ..masks.fit import check_known_end
from ..masks.pattern import Pattern
from ..masks.registry import register_pattern
from ..masks.rules import RunPattern


@register_pattern("last_tokens")
@dataclass(frozen=True)
class LastTokens(Pattern):
    """The last ``tokens`` tokens of the sequence, both as keys and as queries; ``global_tokens`` is the first ones. Calls that read
    lengths from tensors raise ValueError: ``attention_varlen``, ``attention_decode``, and ``attention`` with ``q_lens``."""

    tokens: Positive

    def bind_length(self, kv_len):
        return _Ending(max(0, kv_len - self.tokens))

    def block_rule(self, grid):
        check_known_end(self)

    def token_rule(self, q, kv):
        self.block_rule(None)


@dataclass(frozen=True)
class _Ending(RunPattern):
    """The tokens from ``first`` on, see and are seen by all."""

    first: int

    def row_runs(self, q):
        q = q[..., None]
        return np.where(q >= self.first, 0, self.first), np.full_like(q, BEYOND)
