"""train_lm's decoder with pairs embedded together, and with blocks that are chosen by content."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import sparse_flash as sf
from examples.train_lm.model import Attention, Decoder, Documents
from examples.train_lm.settings import Shape

from .arms import Arm
from .settings import Trial


class PairEmbedding(nn.Embedding):
    """Embeds a token and the token before it, from two tables. (batch, tokens) int64 -> (batch, tokens, dim).

    So a value's token knows its key, as after a shift (arXiv:2212.14052, sec. 3), and a question finds it in one layer. Otherwise
    one layer must learn to move keys by a token and the next to match them, and neither helps before the other does
    (arXiv:2209.11895): two to four dense layers had not learned it after 600 steps of 2,048 tokens in sequences of 32.
    """

    def __init__(self, kinds: int, dim: int):
        super().__init__(kinds, dim)
        self.before = nn.Embedding(kinds, dim)

    def forward(self, tokens):
        return super().forward(tokens) + F.pad(self.before(tokens[:, :-1]), (0, 0, 1, 0))


class ChosenBlocks(Attention):
    """Attention to the window, and to blocks that ``sf.topk_blocks`` chooses by the same queries and keys."""

    def __init__(self, shape: Shape, mask: str, arm: Arm, block: int):
        super().__init__(shape, mask)
        self.choice = arm.choice(mask, block)

    def attend(self, q, k, v, documents: Documents | None):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return sf.attention(q, k, v, sf.topk_blocks(q, k, **self.choice)).transpose(1, 2)


def build_decoder(trial: Trial, device: torch.device, attention: Callable[[], Attention] | None = None) -> Decoder:
    """A new model of an arm. One seed gives the same first weights to all arms. attention: makes each block's attention
    instead of the arm's."""
    shape, arm = trial.shape, trial.masks
    with device:
        model = Decoder(trial.to_lm_settings())
        model.embed = PairEmbedding(shape.vocabulary, shape.dim)
        for block in model.blocks:
            if attention is not None:
                block.attention = attention()
            elif arm.keep:
                block.attention = ChosenBlocks(shape, block.attention.mask, arm, trial.block)
    torch.manual_seed(trial.seed)
    model.reset_parameters()
    if trial.compiled:
        model.compile()
    return model
