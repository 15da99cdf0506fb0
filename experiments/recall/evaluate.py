"""Right answers by distance, and by how many hops a mask needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.progress import track

from examples.train_lm.model import IGNORED, Decoder
from examples.train_lm.parallel import World, mixed_precision

from .arms import count_hops
from .settings import Trial


@dataclass(frozen=True)
class Answers:
    """Results of held-out questions, an element for each. right: bool. distance: tokens. hops: the least number of layers through
    whose attention the answer can come; layers + 1 if it cannot. stops: the same, if it stops only at questions of its own key,
    which know that they must hold it."""

    right: torch.Tensor
    distance: torch.Tensor
    hops: torch.Tensor
    stops: torch.Tensor
    layers: int

    def share(self, chosen: torch.Tensor) -> dict:
        """Shares of the chosen questions. error: the standard error, with independent questions. within_reach: the share of
        questions whose answer the mask lets through."""
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
        return self._by("hops")

    def by_stops(self) -> list[dict]:
        """The last row may be of questions that no such way leads to."""
        return self._by("stops")

    def _by(self, name: str) -> list[dict]:
        counts = getattr(self, name)
        return [{name: count, **self.share(counts == count)} for count in counts.unique().tolist()]


@torch.no_grad()
def answer_questions(model: Decoder, trial: Trial, questions: int, device: torch.device) -> Answers:
    """Answers at least this many questions, minus colliding ones and ones that did not fit, in held-out sequences of the seed."""
    task, arm = trial.task, trial.masks
    least, unit = count_hops(arm, trial.shape.layers, task.length, trial.block)
    least = least.to(device)
    sequences = trial.step_tokens // task.length
    found = []
    batches = math.ceil(questions / (sequences * task.pairs * task.askings))
    with torch.compiler.set_stance("force_eager"):  # compiled again for this pass, it would take longer
        for number in track(range(batches), description="evaluating", transient=True):
            tokens, labels, distances = task.batch(trial.seed, number, sequences, device, held_out=True)
            at = labels != IGNORED
            with mixed_precision(model, World(device)):
                guess = model.head(model.hidden(tokens)[at]).argmax(-1)
            (sequence, question), distance = at.nonzero().T, distances[at]
            stated = question - distance
            reached = _hops_from_statement(least, unit, question, stated)
            passed = count_stops(least, unit, sequence * task.length + stated, question, stated, trial.shape.layers)
            found.append((guess == labels[at], distance, reached, passed))
    return Answers(*(torch.cat(parts).cpu() for parts in zip(*found, strict=True)), trial.shape.layers)


@torch.no_grad()
def ablate_layers(model: Decoder, trial: Trial, questions: int, device: torch.device) -> list[float]:
    """For each layer the share of right answers where its attention is left out: low for layers that find the values."""
    found = []
    for block in model.blocks:
        left_out = block.attention.register_forward_hook(lambda _, given, out: torch.zeros_like(out))
        found.append(answer_questions(model, trial, questions, device).right.double().mean().item())
        left_out.remove()
    return found


def _hops_from_statement(least: torch.Tensor, unit: int, question: torch.Tensor, stated: torch.Tensor) -> torch.Tensor:
    """Hops to a question from the value stated after its key, or from the token after it, which knows it too: see PairEmbedding."""
    return torch.minimum(*(least[question // unit, (stated + later) // unit] for later in (1, 2)))


def count_stops(
    least: torch.Tensor, unit: int, pair: torch.Tensor, question: torch.Tensor, stated: torch.Tensor, layers: int
) -> torch.Tensor:
    """Hops from the value to each question, each of them to a question of the same key, or the last one; layers + 1 where there are
    no such hops. least, unit: of ``count_hops``, where all layers have one mask. pair, question, stated, one for each question: a
    number of the pair, the question's place and its key's first place; of one pair in the order of their places."""
    order = pair.argsort(stable=True)
    _, group, askings = pair[order].unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(pair), device=pair.device) - (askings.cumsum(0) - askings)[group]
    most = int(askings.max())
    places, first = question.new_zeros(2, len(askings), most)
    places[group, rank], first[group, rank] = question[order], stated[order]
    counts = _hops_from_statement(least, unit, places, first)
    counts = torch.where(counts == 1, 1, layers + 1)
    for later in range(1, most):
        for earlier in range(later):
            direct = least[places[:, later] // unit, places[:, earlier] // unit] == 1
            through = torch.where(direct, counts[:, earlier] + 1, layers + 1)
            counts[:, later] = torch.minimum(counts[:, later], through)
    found = torch.empty_like(question)
    found[order] = counts[group, rank].clamp(max=layers + 1)
    return found
