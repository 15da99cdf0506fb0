"""MoBA, Mixture of Block Attention (arXiv:2502.13189): each query attends to its own block and to the blocks whose mean keys score
highest with it.

As in the paper: scores are products of a query with the mean key of a block, without parameters and without a gradient; each query
head chooses for itself; the own block is always kept, up to the query, and counts among ``keep``; later blocks are never chosen.
Not as in the paper: no layers of dense attention among these, and no change to dense attention late in training.
"""

import sparse_flash as sf
from examples.train_lm.model import Positions

from .shared import ChoosingAttention


class MoBA(ChoosingAttention):
    def attend_chosen(self, x, q, k, v, positions: Positions):
        selection = sf.topk_blocks(q, k, self.sizes.keep, every=1, block_size=self.sizes.block)
        return sf.attention(q, k, v, selection)
