"""bigbird: a window, a few global units, and random units.

use: long text read as a whole (encoders): documents to classify, search or answer questions about
formula: dilated(window, 1, block) | global_tokens(global_blocks * block) | random(density, seed, block)
source: arXiv:2007.14062, sec. 2 and app. D
specimen: bigbird(density=0.06)

    ########
    ####....        bigbird(density=0.1, block=1)
    ####....
    #.###...
    #.####..
    #.#.###.
    #....###
    #.....##
"""

from dataclasses import dataclass

from ..masks.fields import Natural, Positive, Share
from ..masks.pattern import DerivedPattern
from ..masks.registry import register_pattern
from .dilated import Dilated
from .global_tokens import GlobalTokens
from .random import Random


@register_pattern("bigbird")
@dataclass(frozen=True)
class BigBird(DerivedPattern):
    """Window, global and random units together. Symmetric except for the random ones, and meant for use without causal.

    window: units to each side, the unit itself included: 2 is the paper's window of three blocks. global_blocks: units at the
    start. density: the probability of a random unit; the paper has r per row, r / units. seed: of these. block: tokens in a unit.
    """

    window: Positive = 2
    global_blocks: Positive = 1
    density: Share = 0.01
    seed: Natural = 0
    block: Positive = 128

    @property
    def expression(self):
        return (
            Dilated(self.window, 1, self.block)
            | GlobalTokens(self.global_blocks * self.block)
            | Random(self.density, self.seed, self.block)
        )
