"""Which answers each mask lets through, and results of a model of each arm."""

from dataclasses import replace

import pytest
import torch

from experiments.recall.arms import build_arms, count_hops
from experiments.recall.evaluate import count_stops
from experiments.recall.model import build_decoder
from experiments.recall.settings import PRESETS, Trial

LENGTH, WINDOW, BLOCK, LAYERS = 256, 32, 16, 4
ARMS = build_arms(WINDOW, BLOCK, LENGTH)
CPU = torch.device("cpu")


def trial(arm: str, **changes) -> Trial:
    tiny = PRESETS["tiny"]
    shape = replace(tiny.shape, dim=32, head_dim=16, layers=2, vocabulary=300)
    return replace(tiny, arm=arm, task=replace(tiny.task, length=LENGTH, keys=172), shape=shape, **changes)


def test_stops_are_only_questions_of_the_same_key():
    least, unit = count_hops(ARMS["window"], LAYERS, LENGTH, BLOCK)  # 31 tokens back in a layer
    places = {0: (10, [41, 70, 100, 140, 141]), 1: (12, [60, 80])}
    rows = [(pair, place, stated) for pair, (stated, asked) in places.items() for place in asked]
    rows.sort(key=lambda row: row[1])  # the order in a sequence: questions of one pair are not next to each other
    pair, question, stated = torch.tensor(rows).T
    found = count_stops(least, unit, pair, question, stated, LAYERS)
    by_pair = {number: found[pair == number].tolist() for number in places}
    # 41 reads the value at 11, 70 reads 41, 100 reads 70; nothing that knows the key is within reach of 140. Of the second, 60
    # could have the value through any token between, but none of its own, and 80 reads 60, which does not know it.
    assert by_pair == {0: [1, 2, 3, LAYERS + 1, LAYERS + 1], 1: [LAYERS + 1, LAYERS + 1]}
    assert (least[question, stated + 1] <= found).all()


@pytest.mark.parametrize("name", ARMS)
def test_no_arm_sees_later_tokens_or_farther_ones_than_its_hops_say(name):
    # Beyond, and before: the choice of a block's earlier queries, which depends on its later ones, is made in whole blocks.
    one = trial(name)
    model = build_decoder(one, CPU).requires_grad_(False)
    tokens = torch.randint(300, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    place = 6 * BLOCK
    changed = tokens.clone()
    changed[0, place] = (tokens[0, place] + 1) % 300
    differs = (model(tokens) - model(changed)).abs().amax(-1)[0] > 1e-6
    least, _ = count_hops(one.masks, 2, LENGTH, BLOCK)
    reads = least[:, place : place + 2].amin(1) <= 2  # the next token's embedding tells of it too
    assert differs[place] and not differs[:place].any() and not (differs & ~reads).any()
    assert (differs & reads).sum() > 0.9 * reads.sum()


@pytest.mark.parametrize("name", ["chosen", "chosen-max"])
def test_all_blocks_chosen_are_dense_attention_and_one_seed_gives_all_arms_the_same_weights(name):
    dense, chosen = build_decoder(trial("dense", seed=5), CPU), build_decoder(trial(name, seed=5), CPU)
    assert all(map(torch.equal, dense.parameters(), chosen.parameters()))
    tokens = torch.randint(300, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(dense(tokens), chosen(tokens), rtol=1e-3, atol=1e-4)
    for block in chosen.blocks:
        block.attention.choice["keep"] = LENGTH // BLOCK
    torch.testing.assert_close(dense(tokens), chosen(tokens), rtol=1e-4, atol=1e-4)
    assert not torch.equal(dense.head.weight, build_decoder(trial("dense", seed=6), CPU).head.weight)
