"""MSA, MiniMax Sparse Attention (arXiv:2606.13392): a small indexer chooses blocks, and learns where attention's weight lies.

As in the paper: an index query for each key head, one index key for all; a block's score is the largest product with one of its
keys; the query heads that share keys share the choice; the own block is always kept; the indexer reads what the layer reads
without a gradient, and learns from a KL divergence alone, in which attention, also without a gradient, is the teacher.
Unlike in the paper, the divergence compares the masses of picked blocks, not of tokens in them; there is no separate start with
dense attention: recall's first sequences are short enough that all blocks are picked.
"""

import torch
import torch.nn.functional as F
from torch import nn

import sparse_flash as sf
from examples.train_lm.model import Positions, apply_rotary
from examples.train_lm.settings import Shape

from .shared import ChoosingAttention, Sizes, WithLoss


class MSA(ChoosingAttention):
    def __init__(self, shape: Shape, sizes: Sizes):
        super().__init__(shape, sizes)
        self.index_q = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.index_k = nn.Linear(shape.dim, shape.head_dim, bias=False)
        self.sharpness = nn.Parameter(torch.ones(shape.kv_heads))

    def attend_chosen(self, x, q, k, v, positions: Positions):
        index_q, index_k = self.project_index(x.detach(), positions)
        selection = sf.topk_blocks(index_q, index_k, self.sizes.keep, every=1, block_size=self.sizes.block, score="max")
        if not torch.is_grad_enabled():
            return sf.attention(q, k, v, selection)
        out, lse, block_lse = sf.attention(q, k, v, selection, return_lse=True, return_block_lse=True)
        masses = (block_lse - lse[..., None]).exp().detach()
        return WithLoss.apply(out, divergence(index_q, index_k, masses, selection))

    def project_index(self, x, positions: Positions):
        """(queries, keys) of the index: (batch, kv_heads | 1, tokens, head_dim)."""
        q, k = (project(x).unflatten(2, (-1, self.head_dim)) for project in (self.index_q, self.index_k))
        q = F.rms_norm(q, (self.head_dim,)) * self.sharpness[:, None].to(q.dtype)
        q, k = (apply_rotary(t, positions.cos, positions.sin).to(x.dtype) for t in (q, F.rms_norm(k, (self.head_dim,))))
        return q.transpose(1, 2), k.transpose(1, 2)


def divergence(index_q, index_k, masses, selection: sf.BlockSelection):
    """The KL divergence of the index's masses of picked blocks from the masses of attention, mean over queries, in nats.

    masses: (batch, heads, tokens, picks), attention's; masses of heads that share a choice are averaged.
    """
    _, index_lse = sf.attention(index_q, index_k, index_k, selection, return_block_lse=True)
    picked = selection.picks >= 0
    index = index_lse.masked_fill(~picked, torch.finfo(index_lse.dtype).min).log_softmax(-1)
    masses = masses.unflatten(1, (selection.heads, -1)).mean(2)
    return (torch.special.xlogy(masses, masses) - masses * index.masked_fill(~picked, 0.0)).sum(-1).mean()
