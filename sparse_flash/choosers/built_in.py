"""The built-in choosers: a class each, whose docstring has a ``specimen`` for tests, and which says what it compares."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ..masks.chooser import Chooser, register_chooser
from ..masks.fields import Positive

if TYPE_CHECKING:
    from .features import Content, Features


@register_chooser("pooled")
@dataclass(frozen=True)
class Pooled(Chooser):
    """Mean queries against mean keys: the softmax weights of a block's mean query over the mean keys of blocks.

    The cheapest, and the worst at finding single tokens. Source: arXiv:2407.02490 (block-sparse heads). The scores are
    the softmax of the logits in ``_build_block_index`` of microsoft/MInference (commit fb56c91, MIT), to 6e-8.

    specimen: pooled(keep=3, block=64)
    """

    def compared_features(self, content: "Content") -> "Features":
        return content.means()


@register_chooser("antidiagonal")
@dataclass(frozen=True)
class Antidiagonal(Chooser):
    """Sums of scores along antidiagonals: of each ``stride`` x ``stride`` square of scores, the mean over its antidiagonal,
    softmax over the squares of a row, summed over a block of keys; the mean over the rows of a block of queries.

    stride: tokens of a square's side; it divides 64. Source: arXiv:2503.16428 (XAttention).

    specimen: antidiagonal(16, keep=3, block=64)
    """

    stride: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        if 64 % self.stride:
            raise ValueError(f"antidiagonal: stride must divide blocks of 64, as 8 and 16 do; got {self.stride}")

    def compared_features(self, content: "Content") -> "Features":
        return content.antidiagonals(self.stride)


@register_chooser("sampled")
@dataclass(frozen=True)
class Sampled(Chooser):
    """Some queries of each block, exactly: their softmax weights, summed over each block of keys; a block's largest weight for any
    of them.

    queries: how many of each block, at most 64: evenly spaced, the block's last included.

    specimen: sampled(8, keep=3, block=64)
    """

    queries: Annotated[int, range(1, 65)]  # at most the smallest block

    def compared_features(self, content: "Content") -> "Features":
        return content.samples(self.queries)


@register_chooser("scored")
@dataclass(frozen=True)
class Scored(Chooser):
    """Scores that a caller computes: ``choose_blocks(spec, q, k, scores=...)``.

    specimen: scored(keep=3, block=64)
    """
