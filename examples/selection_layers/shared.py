"""The common parts of the layers: sizes, attention in train_lm's decoder, and a loss that a layer adds."""

from dataclasses import dataclass

import torch

from examples.train_lm.model import Attention, Documents, Positions
from examples.train_lm.settings import Shape
from sparse_flash.api.shared import SharedSequence


@dataclass(frozen=True)
class Sizes:
    """keep: blocks that a query attends to, its own among them. block: keys of a block. window: tokens that a query sees next to
    it, itself included, in layers that have a window."""

    keep: int
    block: int
    window: int

    def count_picked_pairs(self, tokens: int) -> int:
        """Pairs of one head that are in picked blocks. tokens: of a sequence."""
        return sum(t % self.block + 1 + min(self.keep - 1, t // self.block) * self.block for t in range(tokens))


class ChoosingAttention(Attention):
    """train_lm's attention, whose queries choose. A layer defines ``attend_chosen``."""

    def __init__(self, shape: Shape, sizes: Sizes):
        super().__init__(shape, "causal")
        self.sizes = sizes

    def forward(self, x, positions: Positions, documents: Documents | None = None, plan: SharedSequence | None = None):
        if documents is not None or plan is not None:
            raise ValueError(f"{type(self).__name__} takes whole sequences; got packed documents or a plan; pass neither")
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x, positions))
        return self.out_proj(self.attend_chosen(x, q, k, v, positions).transpose(1, 2).flatten(2))

    def attend_chosen(self, x, q, k, v, positions: Positions):
        """x: (batch, tokens, dim), what the layer reads. q, k, v: (batch, heads or kv_heads, tokens, head_dim), normalized and
        rotated. Returns the shape of q."""
        raise NotImplementedError

    @staticmethod
    def count_pairs(sizes: Sizes, tokens: int) -> int:
        """Pairs of a query and a key that one head attends to: those in picked blocks, unless a layer says otherwise."""
        return sizes.count_picked_pairs(tokens)


class WithLoss(torch.autograd.Function):
    """Returns a tensor unchanged, and adds a loss of the layer that made it, a float32 scalar, to whatever is differentiated."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), device=gradient.device)
