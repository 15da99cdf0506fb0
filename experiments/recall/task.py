"""Associative recall: pairs of a key and a value, and later each key once more, as a question whose answer is the value.

After multi-query associative recall (arXiv:2312.04927): filler is random, and no answer stands after its question. Distances are
log-uniform here, from near ones, which every mask lets a model learn from, to almost the whole sequence. A key may also be asked
again and again, a bounded way after the last time: a token that is asked knows which answer it must hold for the next one.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from examples.train_lm.model import IGNORED

SLOT = 2  # tokens of a pair, or of a question and one token of filler
_BATCHES = 1_000_003  # from the seed of one stream's first batch to the next stream's


class Batch(NamedTuple):
    """Each (sequences, length) int64. labels: the answer at each question, IGNORED elsewhere. distances: tokens from a question
    back to its key's first place, 0 elsewhere; the value stands one token after that place."""

    tokens: torch.Tensor
    labels: torch.Tensor
    distances: torch.Tensor


@dataclass(frozen=True)
class Task:
    """Sizes of sequences. Raises ValueError for sizes that do not fit together.

    length: tokens of a sequence. pairs: how many are drawn for a sequence; if two want one slot, one is left out. keys, values,
    fillers: how many kinds of tokens; fillers have the first numbers, then values, then keys. askings: questions of each key, as
    far as they fit into the sequence. nearest, apart: the least and the greatest gap, in tokens, from a key to its first question
    and from each question to the next; apart = 0 is 15/16 of the length.
    """

    length: int
    pairs: int
    nearest: int
    keys: int
    values: int = 64
    fillers: int = 64
    askings: int = 1
    apart: int = 0

    def __post_init__(self):
        for name in ("length", "pairs", "nearest", "keys", "values", "fillers", "askings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("length", "nearest"):
            if getattr(self, name) % SLOT:
                raise ValueError(f"{name} must be even, as a pair takes {SLOT} tokens; got {getattr(self, name)}")
        if self.apart and self.apart <= self.nearest:
            raise ValueError(f"apart must be 0 or more than nearest; got {self.apart:,} and {self.nearest:,}")
        if self.nearest >= self.farthest:
            raise ValueError(f"length must be more than nearest * 16 / 15; got {self.length:,} and {self.nearest:,}")
        if self.keys < self.pairs:
            raise ValueError(f"keys must be at least pairs, as no key stands for two values; got {self.keys:,} and {self.pairs:,}")

    @property
    def farthest(self) -> int:
        """The greatest gap in tokens: ``apart``, or 15/16 of the length."""
        return min(self.length * 15 // 16, self.apart or self.length)

    @property
    def mean_distance(self) -> float:
        """The mean gap in tokens."""
        return (self.farthest - self.nearest) / math.log(self.farthest / self.nearest)

    @property
    def vocabulary(self) -> int:
        return self.fillers + self.values + self.keys

    def batch(self, seed: int, number: int, sequences: int, device: torch.device | str, held_out: bool = False) -> Batch:
        """Batch ``number`` of the training or the held-out stream of a seed. Equal arguments give equal batches on one kind of
        device. Nothing here waits for a GPU."""
        generator = torch.Generator(device).manual_seed((2 * seed + held_out) * _BATCHES + number)
        random = {"generator": generator, "device": device}
        stated, gaps = self._draw_slots(sequences, random)
        back = gaps.cumsum(2)
        asked = stated[..., None] + back
        key = self.fillers + self.values + torch.rand((sequences, self.keys), **random).argsort(1)[:, : self.pairs]
        value = self.fillers + torch.randint(self.values, stated.shape, **random)
        tokens = torch.randint(self.fillers, (sequences, self.length + 1), **random)

        # Pairs and questions that are left out go to an extra last column, which the batch does not return: shapes must not depend
        # on random numbers.
        stays, is_asked = _claim_slots(stated, asked, self.length // SLOT)
        statement = torch.where(stays, stated * SLOT, self.length)
        question = torch.where(is_asked, asked * SLOT, self.length).flatten(1)
        question_key, answer = (kind[..., None].expand(asked.shape).flatten(1) for kind in (key, value))
        tokens.scatter_(1, (statement + 1).clamp(max=self.length), value)
        tokens.scatter_(1, statement, key).scatter_(1, question, question_key)
        labels = torch.full_like(tokens, IGNORED).scatter_(1, question, answer)
        distances = torch.zeros_like(tokens).scatter_(1, question, back.flatten(1) * SLOT)
        return Batch(*(t[:, : self.length].contiguous() for t in (tokens, labels, distances)))

    def _draw_slots(self, sequences: int, random: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(the slot of each statement: (sequences, pairs), the slots from it to the first question and from each question to the
        next: (sequences, pairs, askings)). Gaps are log-uniform. First questions are in the sequence; later ones may be beyond."""
        *log_gaps, where = torch.rand((self.askings + 1, sequences, self.pairs), dtype=torch.float64, **random)
        gaps = (self.nearest * (self.farthest / self.nearest) ** torch.stack(log_gaps, 2) / SLOT).long()
        return (where * (self.length // SLOT - gaps[..., 0])).long(), gaps


def _claim_slots(stated: torch.Tensor, asked: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(which pairs stay: (sequences, pairs) bool, which of their questions stay: (sequences, pairs, askings) bool). A slot goes to
    the first pair that wants it. A pair stays if it has the slots of its statement and of its first question."""
    wanted = torch.cat([stated[..., None], asked], 2).clamp(max=slots)
    sequences, pairs, _ = wanted.shape
    pair = torch.arange(pairs, device=wanted.device)[:, None].expand(wanted.shape)
    owner = torch.full((sequences, slots + 1), pairs, device=wanted.device)
    owner.scatter_reduce_(1, wanted.flatten(1), pair.flatten(1), "amin")
    has = (owner.gather(1, wanted.flatten(1)).view(wanted.shape) == pair) & (wanted < slots)
    stays = has[..., 0] & has[..., 1]
    return stays, stays[..., None] & has[..., 1:]
