"""Sequences: what stands where, and what depends on what."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.train_lm.model import IGNORED
from experiments.recall.task import Task

TASK = Task(length=256, pairs=32, nearest=8, keys=48, values=16, fillers=5)


@st.composite
def tasks(draw) -> Task:
    length = 2 * draw(st.integers(8, 150))
    pairs = draw(st.integers(1, 40))
    nearest = 2 * draw(st.integers(1, (length * 15 // 16 - 1) // 2))
    return Task(length, pairs, nearest, pairs + draw(st.integers(0, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 9)))


@given(tasks(), st.integers(0, 99), st.integers(1, 3))
def test_each_answer_is_the_value_after_the_only_earlier_use_of_its_key(task, seed, sequences):
    batch = task.batch(seed, 0, sequences, "cpu")
    assert batch.tokens.shape == batch.labels.shape == batch.distances.shape == (sequences, task.length)
    first_value, first_key = task.fillers, task.fillers + task.values
    assert batch.tokens.min() >= 0 and batch.tokens.max() < task.vocabulary
    for tokens, labels, distances in zip(*batch, strict=True):
        asked = (labels != IGNORED).nonzero()[:, 0]
        stated = asked - distances[asked]
        assert (distances[labels == IGNORED] == 0).all()
        assert distances[asked].min() >= task.nearest and distances[asked].max() <= task.farthest and stated.min() >= 0
        assert torch.equal(tokens[asked], tokens[stated]) and torch.equal(tokens[stated + 1], labels[asked])
        assert (labels[asked] >= first_value).all() and (labels[asked] < first_key).all()
        # Keys stand nowhere else, nor do values: neither filler nor another pair can tell an answer.
        assert torch.equal((tokens >= first_key).nonzero()[:, 0], torch.cat([asked, stated]).sort().values)
        assert len(tokens[stated].unique()) == len(stated)
        assert torch.equal(((tokens >= first_value) & (tokens < first_key)).nonzero()[:, 0], (stated + 1).sort().values)


def test_keys_are_asked_again_and_again_within_reach_of_the_last_time():
    task = replace(TASK, length=512, pairs=12, askings=5, apart=40)
    batch = task.batch(0, 0, 50, "cpu")
    asked, steps = 0, []
    for tokens, labels, distances in zip(*batch, strict=True):
        places = (labels != IGNORED).nonzero()[:, 0]
        assert (tokens >= task.fillers + task.values).sum() == len(places) + len((places - distances[places]).unique())
        for stated in (places - distances[places]).unique():
            mine = places[places - distances[places] == stated]
            assert (tokens[mine] == tokens[stated]).all() and (labels[mine] == tokens[stated + 1]).all()
            assert task.nearest <= mine[0] - stated <= task.apart and len(mine) <= task.askings
            steps.append(mine.diff())
            asked += len(mine)
    steps = torch.cat(steps)
    # Now and then a question loses its place to another pair's, and the next one is farther from the one before.
    assert steps.min() >= task.nearest and (steps <= task.apart).float().mean() > 0.9 and asked > 3 * 50 * 12
    assert batch.distances.max() > 3 * task.apart
