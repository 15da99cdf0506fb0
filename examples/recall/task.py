"""Associative recall: pairs of a key and a value, and later each key once more, as a question whose answer is the value.

After multi-query associative recall (arXiv:2312.04927): filler is random, and no answer stands after its question. Distances are
log-uniform here, from near ones, which every mask lets a model learn from, to almost the whole sequence.
"""

from __future__ import annotations

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
    values, then keys. Raises ValueError for numbers that do not fit together."""

    length: int
    pairs: int
    nearest: int
    keys: int
    values: int = 64
    fillers: int = 64

    def __post_init__(self):
        for name in ("length", "pairs", "nearest", "keys", "values", "fillers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("length", "nearest"):
            if getattr(self, name) % SLOT:
                raise ValueError(f"{name} must be even, as a pair takes {SLOT} tokens; got {getattr(self, name)}")
        if self.nearest >= self.farthest:
            raise ValueError(f"length must be more than nearest * 16 / 15; got {self.length:,} and {self.nearest:,}")
        if self.keys < self.pairs:
            raise ValueError(f"keys must be at least pairs, as no key stands for two values; got {self.keys:,} and {self.pairs:,}")

    @property
    def farthest(self) -> int:
        """No question is farther from its key: 15/16 of the length, in tokens."""
        return self.length * 15 // 16

    @property
    def vocabulary(self) -> int:
        return self.fillers + self.values + self.keys

    def batch(self, seed: int, number: int, sequences: int, device: torch.device | str, held_out: bool = False) -> Batch:
        """Batch ``number`` of the training or the held-out stream of a seed. Equal arguments give equal batches on one kind of
        device. Nothing here waits for a GPU."""
        generator = torch.Generator(device).manual_seed((2 * seed + held_out) * _BATCHES + number)
        drawn = {"generator": generator, "device": device}
        slots, shape = self.length // SLOT, (sequences, self.pairs)
        along, where = torch.rand((2, *shape), dtype=torch.float64, **drawn)
        gap = (self.nearest * (self.farthest / self.nearest) ** along / SLOT).long()
        stated = (where * (slots - gap)).long()
        asked = stated + gap
        key = self.fillers + self.values + torch.rand((sequences, self.keys), **drawn).argsort(1)[:, : self.pairs]
        value = self.fillers + torch.randint(self.values, shape, **drawn)
        tokens = torch.randint(self.fillers, (sequences, self.length + 1), **drawn)

        # Of the pairs that want a slot, the first has it. A pair stays if it has both of its own.
        rank = torch.arange(self.pairs, device=device).expand(shape)
        first = torch.full((sequences, slots), self.pairs, device=device)
        first.scatter_reduce_(1, torch.cat([stated, asked], 1), rank.repeat(1, 2), "amin")
        stays = (first.gather(1, stated) == rank) & (first.gather(1, asked) == rank)

        # What does not stay is written to one column more: shapes must not depend on what was drawn.
        statement, question = (torch.where(stays, slot * SLOT, self.length) for slot in (stated, asked))
        tokens.scatter_(1, (statement + 1).clamp(max=self.length), value)
        tokens.scatter_(1, statement, key).scatter_(1, question, key)
        labels = torch.full_like(tokens, IGNORED).scatter_(1, question, value)
        distances = torch.zeros_like(tokens).scatter_(1, question, gap * SLOT)
        return Batch(*(t[:, : self.length].contiguous() for t in (tokens, labels, distances)))
