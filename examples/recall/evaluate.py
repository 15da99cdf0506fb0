"""Right answers by distance, and by how many hops a mask needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.progress import track

from examples.train_lm.model import IGNORED, Decoder
from examples.train_lm.parallel import World, precision

from .arms import hops
from .settings import Trial


@dataclass(frozen=True)
class Answers:
    """Of held-out questions, one for each: right: bool. distance: tokens. hops: through how many layers' attention, at least, the
    answer can come; layers + 1 where it cannot."""

    right: torch.Tensor
    distance: torch.Tensor
    hops: torch.Tensor
    layers: int

    def share(self, chosen: torch.Tensor) -> dict:
        """Of the chosen ones. error: the standard error, questions taken as independent. within_reach: the share of questions whose
        answer the mask lets through."""
        questions = int(chosen.sum())
        right = self.right[chosen].double().mean().item()
        error = math.sqrt(right * (1 - right) / questions)
        within = (self.hops[chosen] <= self.layers).double().mean().item()
        return {"questions": questions, "right": right, "error": error, "within_reach": within}

    def by_distance(self) -> list[dict]:
        """For each octave of distances that has questions: those from ``first`` to ``last`` tokens."""
        octave = self.distance.double().log2().floor().long()
        return [{"first": 1 << o, "last": (2 << o) - 1, **self.share(octave == o)} for o in octave.unique().tolist()]

    def by_hops(self) -> list[dict]:
        """The last row may be of questions out of reach."""
        return [{"hops": count, **self.share(self.hops == count)} for count in self.hops.unique().tolist()]


@torch.no_grad()
def answers(model: Decoder, trial: Trial, questions: int, device: torch.device) -> Answers:
    """To at least so many questions, less those that fell onto one place, in sequences of the seed's held-out stream."""
    task, arm = trial.task, trial.masks
    least, unit = hops(arm, trial.shape.layers, task.length, trial.block)
    least = least.to(device)
    sequences = trial.step_tokens // task.length
    found = []
    batches = math.ceil(questions / (sequences * task.pairs))
    with torch.compiler.set_stance("force_eager"):  # compiled again for this pass, it would take longer
        for number in track(range(batches), description="evaluating", transient=True):
            tokens, labels, distances = task.batch(trial.seed, number, sequences, device, held_out=True)
            at = labels != IGNORED
            with precision(model, World(device)):
                guess = model.head(model.hidden(tokens)[at]).argmax(-1)
            question, distance = at.nonzero()[:, 1], distances[at]
            value = question - distance + 1
            # The token after the value knows it too: see PairEmbedding.
            reached = torch.minimum(*(least[question // unit, (value + later) // unit] for later in (0, 1)))
            found.append((guess == labels[at], distance, reached))
    return Answers(*(torch.cat(parts).cpu() for parts in zip(*found, strict=True)), trial.shape.layers)
