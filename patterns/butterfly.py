"""butterfly: flat block butterfly; a unit sees itself and the units whose number differs in one binary digit.

use: long inputs read as a whole (encoders), where every token must reach every other in few layers
formula: i == j or (i ^ j in {1, 2, 4, ...} and i ^ j < 2**factors), with i = q // block, j = kv // block
source: arXiv:2112.00029, sec. 3.2; arXiv:2205.14135, sec. 3.3
specimen: butterfly()

    ###.#...
    ##.#.#..        butterfly(block=1)
    #.##..#.
    .###...#
    #...###.
    .#..##.#
    ..#.#.##
    ...#.###
"""

from dataclasses import dataclass

import numpy as np

from ..masks.fields import Factors, Positive
from ..masks.registry import register_pattern
from ..masks.rules import UnitPattern


@register_pattern("butterfly")
@dataclass(frozen=True)
class Butterfly(UnitPattern):
    """Units at a Hamming distance of at most one. factors: how many low digits may differ; None: all. block: tokens in a unit.

    Without causal, log2(units) layers connect every pair of units. With causal, a key's number can only *clear* digits of the
    query's, so most of the past stays out of reach at any depth: use ``power_of_two``, the difference form, or add ``local``.
    """

    factors: Factors | None = None
    block: Positive = 128

    def unit_rule(self, i, j):
        differ = i ^ j
        # Queries before the first key have negative units, which differ from every key's unit in the sign.
        kept = (differ >= 0) & (differ & (differ - 1) == 0)
        return kept if self.factors is None else kept & (differ < 1 << self.factors)

    def kept_units(self, first, stop):  # listed, as few of the pairs are kept
        from scipy.sparse import csc_array

        i = np.arange(max(first, 0), stop)[:, None]
        j = i ^ np.append(0, 1 << np.arange(stop.bit_length())[: self.factors])
        row, flip = np.nonzero(j < stop)
        return csc_array((np.ones(len(row), np.int32), (i[row, 0] - first, j[row, flip])), shape=(stop - first, stop))
