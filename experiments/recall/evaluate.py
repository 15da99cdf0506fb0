"""Right answers by distance, and by how many hops a mask needs."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch
from rich.progress import track

from examples.train_lm.model import IGNORED, Decoder
from examples.train_lm.parallel import World, mixed_precision

from .arms import count_hops
from .settings import Trial


@dataclass(frozen=True)
class Answers:
    """Results of held-out questions, an element for each. right: bool. distance: tokens. hops: the least number of layers through
    whose attention the answer can come; layers + 1 if it cannot. stops: the same, if the answer comes only by way of earlier
    questions of its key, whose tokens must hold it; see ``count_stops``."""

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

    def by_count(self, name: Literal["hops", "stops"]) -> list[dict]:
        """For each number of hops, or of stops, that has questions. The last may mean out of reach."""
        counts = getattr(self, name)
        return [{name: count, **self.share(counts == count)} for count in counts.unique().tolist()]


@torch.no_grad()
def answer_questions(model: Decoder, trial: Trial, questions: int, device: torch.device) -> Answers:
    """Answers at least this many questions, minus colliding ones and ones that did not fit, in held-out sequences of the seed."""
    task, arm = trial.task, trial.masks
    least, unit = count_hops(arm, trial.shape.layers, task.length, trial.block)
    sequences = trial.step_tokens // task.length
    found = []
    batches = math.ceil(questions / (sequences * task.pairs * task.askings))
    with torch.compiler.set_stance("force_eager"):  # compiled again for this pass, it would take longer
        for number in track(range(batches), description="evaluating", transient=True):
            tokens, labels, distances = task.batch(trial.seed, number, sequences, device, held_out=True)
            asked = labels != IGNORED
            with mixed_precision(model, World(device)):
                guess = model.head(model.hidden(tokens)[asked]).argmax(-1)
            right, distance = (guess == labels[asked]).cpu(), distances[asked].cpu()
            sequence, question = asked.nonzero().T.cpu()
            statement = question - distance
            hops = _hops_from_statement(least, unit, question, statement)
            stops = count_stops(least, unit, sequence * task.length + statement, question, statement, trial.shape.layers)
            found.append((right, distance, hops, stops))
    return Answers(*(torch.cat(parts) for parts in zip(*found, strict=True)), trial.shape.layers)


@torch.no_grad()
def ablate_layers(model: Decoder, trial: Trial, questions: int, device: torch.device) -> list[float]:
    """For each layer the share of right answers without its attention: low for layers that find the values."""
    found = []
    for block in model.blocks:
        left_out = block.attention.register_forward_hook(lambda _, given, out: torch.zeros_like(out))
        found.append(answer_questions(model, trial, questions, device).right.double().mean().item())
        left_out.remove()
    return found


def _hops_from_statement(least: torch.Tensor, unit: int, questions: torch.Tensor, statements: torch.Tensor) -> torch.Tensor:
    """Hops to a question from the value, one token after the key's statement, or from the next token, whose embedding tells of the
    value too (``PairEmbedding``)."""
    return torch.minimum(*(least[questions // unit, (statements + later) // unit] for later in (1, 2)))


def count_stops(
    least: torch.Tensor, unit: int, pairs: torch.Tensor, questions: torch.Tensor, statements: torch.Tensor, layers: int
) -> torch.Tensor:
    """The least number of hops that bring the value to each question if every hop ends at a question of the same key; layers + 1 if
    there are no such hops. A hop is what one layer reads, so all layers must have one mask.

    least, unit: see ``count_hops``. pairs, questions, statements: (questions,) int64 on the CPU: the number of the pair, the
    question's position and the position of the key's statement. Questions of one pair are in the order of their positions.
    """
    from_statement = _hops_from_statement(least, unit, questions, statements) == 1
    hops, stops = least.numpy(), []
    asked = defaultdict(list)  # by pair: (unit, stops) of its questions so far
    for pair, own, direct in zip(pairs.tolist(), (questions // unit).tolist(), from_statement.tolist(), strict=True):
        relayed = [count + 1 for earlier, count in asked[pair] if hops[own, earlier] == 1]
        stops.append(1 if direct else min([*relayed, layers + 1]))
        asked[pair].append((own, stops[-1]))
    return torch.tensor(stops)
