"""Associative recall: pairs of a key and a value, and later each key once more, as a question whose answer is the value.

After multi-query associative recall (arXiv:2312.04927): filler is random, and no answer stands after its question. Distances are
log-uniform here, from near ones, which every mask lets a model learn from, to almost the whole sequence. A key may also be asked
again and again, a bounded way after the last time: a token that is asked knows which answer it must hold for the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from examples.train_lm.model import IGNORED

SLOT = 2  # tokens of a pair; a question and one token of filler
_BATCHES = 1_000_003  # seeds of a stream's batches start so far apart


class Batch(NamedTuple):
    """Each (sequences, length) int64. labels: the answer at each question, IGNORED elsewhere. distances: tokens from a question
    back to its key's first place, 0 elsewhere; the value stands one token after that place."""

    tokens: torch.Tensor
    labels: torch.Tensor
    distances: torch.Tensor


@dataclass(frozen=True)
class Task:
    """length: tokens of a sequence. pairs: drawn for each; where two want one place, one is left out. nearest: the least distance
    from a question to its key, in tokens. keys, values, fillers: how many kinds of tokens; fillers have the first numbers, then
    values, then keys. askings: how often each key is asked, if its questions fit in. apart: the most tokens from a key to its first
    question and from each question to the next; 0 for 15/16 of the length. Raises ValueError for numbers that do not fit
    together."""

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
        """No question is farther from its key, or from the question before it: 15/16 of the length, in tokens, or ``apart``."""
        return min(self.length * 15 // 16, self.apart or self.length)

    @property
    def mean_distance(self) -> float:
        """The mean of a question's distance from its key, or from the question before it, in tokens."""
        return (self.farthest - self.nearest) / math.log(self.farthest / self.nearest)

    @property
    def vocabulary(self) -> int:
        return self.fillers + self.values + self.keys

    def batch(self, seed: int, number: int, sequences: int, device: torch.device | str, held_out: bool = False) -> Batch:
        """Batch ``number`` of the training or the held-out stream of a seed. Equal arguments give equal batches on one kind of
        device. Nothing here waits for a GPU."""
        generator = torch.Generator(device).manual_seed((2 * seed + held_out) * _BATCHES + number)
        drawn = {"generator": generator, "device": device}
        slots, shape = self.length // SLOT, (sequences, self.pairs)
        *along, where = torch.rand((self.askings + 1, *shape), dtype=torch.float64, **drawn)
        gaps = (self.nearest * (self.farthest / self.nearest) ** torch.stack(along, 2) / SLOT).long()
        stated = (where * (slots - gaps[..., 0])).long()
        back = gaps.cumsum(2)
        asked = stated[..., None] + back
        key = self.fillers + self.values + torch.rand((sequences, self.keys), **drawn).argsort(1)[:, : self.pairs]
        value = self.fillers + torch.randint(self.values, shape, **drawn)
        tokens = torch.randint(self.fillers, (sequences, self.length + 1), **drawn)

        # A slot goes to the first pair that wants it. A pair stays if it has its own slot and the slot of its first question. Pairs
        # without a slot are written to an extra column: shapes must not depend on what was drawn.
        wanted = torch.cat([stated[..., None], asked], 2).clamp(max=slots)
        rank = torch.arange(self.pairs, device=device)[:, None].expand(wanted.shape)
        first = torch.full((sequences, slots + 1), self.pairs, device=device)
        first.scatter_reduce_(1, wanted.flatten(1), rank.flatten(1), "amin")
        has = (first.gather(1, wanted.flatten(1)).view(wanted.shape) == rank) & (wanted < slots)
        stays = has[..., 0] & has[..., 1]
        statement = torch.where(stays, stated * SLOT, self.length)
        question = torch.where(stays[..., None] & has[..., 1:], asked * SLOT, self.length).flatten(1)
        asked_for, answer = (kind[..., None].expand(asked.shape).flatten(1) for kind in (key, value))
        tokens.scatter_(1, (statement + 1).clamp(max=self.length), value)
        tokens.scatter_(1, statement, key).scatter_(1, question, asked_for)
        labels = torch.full_like(tokens, IGNORED).scatter_(1, question, answer)
        distances = torch.zeros_like(tokens).scatter_(1, question, back.flatten(1) * SLOT)
        return Batch(*(t[:, : self.length].contiguous() for t in (tokens, labels, distances)))
