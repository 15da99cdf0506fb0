"""How alike neighbouring queries choose."""

import torch
from tiny_lm import ON_CPU, SETTINGS

from examples.train_lm import picks
from examples.train_lm.model import Decoder

BLOCK, TOKENS = 4, 64


def test_what_attention_gets_is_handed_out_and_the_model_computes_as_before():
    model = Decoder(SETTINGS).requires_grad_(False)
    ids = torch.randint(0, 300, (1, 128))
    before = model.hidden(ids)
    layers = picks.queries_and_keys(model, ids, ON_CPU)
    assert torch.equal(model.hidden(ids), before) and len(layers) == 2
    first = model.blocks[0]
    q, k, _ = first.attention.qkv(first.attention_norm(model.embed(ids)), model.positions(128, ids.device))
    assert torch.equal(layers[0][0], q.transpose(1, 2)) and torch.equal(layers[0][1], k.transpose(1, 2))


def test_a_query_picks_its_own_block_and_those_before_it_whose_mean_keys_match_best():
    k = torch.zeros(1, 1, 256, 2)
    k[:, :, 32:48, 0], k[:, :, 80:96, 1] = 1, 1  # blocks 2 and 5 of 16
    q = torch.tensor([1.0, 0.5]).expand(1, 2, 256, 2)
    found = picks.pick_blocks(q, k, 3, 16)
    assert found.shape == (1, 256, 3)
    assert found[0, 160].tolist() == [2, 5, 10] and found[0, 1].tolist() == [0, -1, -1]


def test_picks_that_neighbours_share_and_those_that_they_do_not_are_counted():
    token = torch.arange(TOKENS, dtype=torch.int32)
    of_heads = torch.zeros_like(token), token % 2  # besides the own block: always the first; in turns the first and the second
    both = torch.stack([torch.stack([other, token // BLOCK], 1) for other in of_heads])
    same, apart = picks.summary(both, BLOCK, layer=3)
    assert same == picks.HeadPicks(3, 0, 1.0, {4: 2.0, 16: 5.0})
    assert apart == picks.HeadPicks(3, 1, 0.0, {4: 3.0, 16: 6.0})


def test_a_sequence_of_a_few_tokens_is_summed_up_too():
    few = torch.zeros(1, 4, 1, dtype=torch.int32)
    assert picks.summary(few, BLOCK, layer=0) == [picks.HeadPicks(0, 0, 0.0, {})]
