"""NSA, Native Sparse Attention (arXiv:2502.11089): attention to compressed blocks, to chosen blocks and to a window, with gates.

As in the paper: a learned compression with positions inside the block; a query attends to the compressed blocks that end before it;
the weights of that attention, summed over the query heads that share keys, choose blocks for them together; keys and values of
their own for each branch; a gate of each branch, query and head, between 0 and 1.
Not as in the paper: compressed blocks do not overlap and are the blocks that are chosen; the compression is an MLP of each token,
then the mean; the own block is always kept, but the first and the one before are not.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import sparse_flash as sf
from examples.train_lm.model import Positions, apply_rotary
from examples.train_lm.settings import Shape

from .shared import ChoosingAttention, Sizes

BRANCHES = 3


@dataclass(frozen=True)
class BlocksBefore(sf.RunPattern):
    """A token, the query, keeps the blocks, the keys, that end before it. block: tokens of one. ahead: tokens less blocks, as
    patterns align the last query with the last key."""

    block: int
    ahead: int

    def row_runs(self, q):
        stop = (q + self.ahead)[..., None] // self.block
        return np.zeros_like(stop), stop


class Compression(nn.Module):
    """(batch, kv_heads, tokens, head_dim) -> (batch, kv_heads, whole blocks, head_dim)."""

    def __init__(self, block: int, head_dim: int):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(block, head_dim))
        self.up, self.down = nn.Linear(head_dim, 2 * head_dim, bias=False), nn.Linear(2 * head_dim, head_dim, bias=False)

    def forward(self, x):
        block = len(self.place)
        whole = x.shape[2] // block
        x = x[:, :, : whole * block].unflatten(2, (whole, block))
        return (x + self.down(F.silu(self.up(x + self.place)))).mean(3)


class NSA(ChoosingAttention):
    def __init__(self, shape: Shape, sizes: Sizes):
        super().__init__(shape, sizes)
        self.compress_k, self.compress_v = (Compression(sizes.block, shape.head_dim) for _ in range(2))
        # Keys and values of the two branches besides the chosen blocks.
        self.more_kv = nn.Linear(shape.dim, 4 * shape.kv_heads * shape.head_dim, bias=False)
        self.gates = nn.Linear(shape.dim, BRANCHES * shape.heads, bias=False)

    def attend_chosen(self, x, q, k, v, positions: Positions):
        more = self.more_kv(x).unflatten(2, (4, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        compressed, selection = self.attend_compressed(q, self.compress_k(more[0]), self.compress_v(more[1]), positions)
        near_k = normalize_and_rotate(more[2], positions)
        near = sf.attention(q, near_k.to(q.dtype), more[3], f"causal & local({self.sizes.window})")
        branches = torch.stack([compressed, sf.attention(q, k, v, selection), near])
        gates = self.gates(x).unflatten(2, (BRANCHES, -1)).permute(2, 0, 3, 1)
        return (gates.sigmoid()[..., None] * branches).sum(0)

    def attend_compressed(self, q, k, v, positions: Positions):
        """(what queries read from compressed blocks, the blocks that they choose by it). k, v: compressed."""
        block = self.sizes.block
        # A compressed key has the position of its block's last token.
        k = normalize_and_rotate(k, Positions(*(t[block - 1 :: block] for t in (positions.cos, positions.sin)))).to(q.dtype)
        out, lse = sf.attention(q, k, v, BlocksBefore(block, q.shape[2] - k.shape[2]), return_lse=True)
        options = {"every": 1, "block_size": block, "share_group": True}
        return out, sf.topk_blocks(q, k, self.sizes.keep, score="softmax", lse=lse, **options)

    @staticmethod
    def count_pairs(sizes: Sizes, tokens: int) -> int:
        near = sum(min(t + 1, sizes.window) for t in range(tokens))
        return sizes.count_picked_pairs(tokens) + near + sum(t // sizes.block for t in range(tokens))


def normalize_and_rotate(k, positions: Positions):
    """k normalized and rotated, as train_lm's are: (batch, kv_heads, tokens, head_dim)."""
    k = F.rms_norm(k, (k.shape[3],), eps=1e-6)
    return apply_rotary(k, *(t.transpose(0, 1) for t in (positions.cos, positions.sin)))
