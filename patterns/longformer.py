"""longformer: a sliding window and a few global tokens.

use: long documents to classify, search or answer questions about (encoders)
formula: local(window) | global_tokens(tokens)
source: arXiv:2004.05150, sec. 3.1
specimen: longformer(384, tokens=128)

    ######
    ###...        longformer(2)
    ####..
    #.###.
    #..###
    #...##
"""

from dataclasses import dataclass

from ..masks.fields import Positive
from ..masks.pattern import DerivedPattern
from ..masks.registry import register_pattern
from .global_tokens import GlobalTokens
from .local import Local


@register_pattern("longformer")
@dataclass(frozen=True)
class Longformer(DerivedPattern):
    """Window and global tokens together. window: tokens to each side, the token itself included; the paper's w counts both sides.
    tokens: how many tokens at the start are global (the classification token: 1)."""

    window: Positive
    tokens: Positive = 1

    @property
    def expression(self):
        return Local(self.window) | GlobalTokens(self.tokens)
