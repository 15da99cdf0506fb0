"""Layers whose queries choose: what each computes by its paper's words, what it may see, what it learns."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import sparse_flash as sf
from examples.selection_layers import msa as msa_module
from experiments.recall.task import Task
from experiments.selection_layers.cli import app
from experiments.selection_layers.compare import LAYERS, PRESETS, LayerTrial, model_of

CPU = torch.device("cpu")
TOKENS, BLOCK = 72, 16  # the last block is not whole
parametrize = pytest.mark.parametrize


def trial(arm: str, **changes) -> LayerTrial:
    tiny = PRESETS["tiny"]
    task = Task(length=64, pairs=8, nearest=4, keys=12, values=8, fillers=8)
    shape = replace(tiny.shape, dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp_dim=32, vocabulary=task.vocabulary)
    sizes = {"window": 8, "block": BLOCK, "keep": 2, "shortest": 16, "step_tokens": 512, "learning_rate": 1e-2}
    return replace(tiny, arm=arm, task=task, shape=shape, **sizes | changes)


def layer_and_input(arm: str, **changes):
    one = trial(arm, **changes)
    model = model_of(one, CPU)
    for parameter in model.parameters():  # far from their first values, under which queries choose almost at random
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(0))
    return model.blocks[0].attention, x, model.positions(TOKENS, CPU)


@parametrize("arm", LAYERS)
def test_no_token_sees_a_later_one_and_what_is_not_picked_is_not_seen(arm):
    layer, x, positions = layer_and_input(arm)
    changed = x.clone()
    changed[:, 20] += 1
    differs = (layer(x, positions) - layer(changed, positions)).abs().amax((0, 2)) > 1e-6
    assert not differs[:20].any() and differs[20]
    assert differs[48:].any() and (arm == "nsa" or not differs[48:].all())  # NSA reads every block, compressed


@parametrize("arm", ["moba", "msa"])
def test_where_all_blocks_are_kept_a_layer_is_causal_attention(arm):
    layer, x, positions = layer_and_input(arm, keep=99)
    q, k, v = (t.transpose(1, 2) for t in layer.qkv(x, positions))
    wanted = layer.out_proj(sf.attention(q, k, v, "causal").transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, positions), wanted)


def test_nsa_joins_three_branches_by_their_definitions():
    layer, x, positions = layer_and_input("nsa")
    q, k, v = (t.transpose(1, 2) for t in layer.qkv(x, positions))
    of_compressed, of_window = (
        [layer.more_kv(x).unflatten(2, (4, 1, 16))[:, :, n].transpose(1, 2) for n in two] for two in ((0, 1), (2, 3))
    )
    scale, token, whole = 16**-0.5, torch.arange(TOKENS), TOKENS // BLOCK

    def compressed(by, t):
        t = t[:, :, : whole * BLOCK].unflatten(2, (whole, BLOCK))
        return (t + by.down(torch.nn.functional.silu(by.up(t + by.place)))).mean(3)

    def turned(t, at):
        t = torch.nn.functional.rms_norm(t, (16,), eps=1e-6)
        cos, sin = positions.cos[at, 0], positions.sin[at, 0]
        a, b = t.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def attend(q, k, v, kept):
        weights = (q @ k.mT * scale).masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num()
        return weights @ v, weights

    ends = (torch.arange(whole) + 1) * BLOCK
    keys, values = (compressed(by, t) for by, t in zip((layer.compress_k, layer.compress_v), of_compressed, strict=True))
    first, weights = attend(q, turned(keys, ends - 1), values, ends <= token[:, None])
    scores = weights.sum(1)  # one key head
    picked = torch.zeros(2, TOKENS, whole + 1, dtype=torch.bool)
    picked[:, token, token // BLOCK] = True
    for b, t in torch.cartesian_prod(torch.arange(2), token[BLOCK:]).tolist():
        picked[b, t, scores[b, t].argmax()] = True
    causal = token <= token[:, None]
    second, _ = attend(q, k, v, picked[:, None, :, token // BLOCK] & causal)
    third, _ = attend(q, turned(of_window[0], token), of_window[1], causal & (token > token[:, None] - 8))
    gates = layer.gates(x).sigmoid().unflatten(2, (3, 2)).permute(2, 0, 3, 1)[..., None]
    wanted = gates[0] * first + gates[1] * second + gates[2] * third
    torch.testing.assert_close(layer(x, positions), layer.out_proj(wanted.transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-5)


def test_only_msas_indexer_learns_from_the_divergence_and_from_nothing_else(monkeypatch):
    def gradients():
        layer, x, positions = layer_and_input("msa")
        layer(x.requires_grad_(), positions).square().sum().backward()
        return {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}

    found = gradients()
    monkeypatch.setattr(msa_module, "divergence", lambda index_q, index_k, *_: 0 * (index_q.sum() + index_k.sum()))
    without = gradients()
    for name, gradient in found.items():
        of_index = name.startswith(("index", "sharpness"))
        assert gradient.any()
        assert not without[name].any() if of_index else torch.equal(gradient, without[name])


def test_the_divergence_is_that_of_the_masses_of_picked_blocks_and_zero_for_equal_ones():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, TOKENS, 16, generator=generator), torch.randn(2, 1, TOKENS, 16, generator=generator)
    selection = sf.topk_blocks(q, k, 3, every=1, block_size=BLOCK)
    _, lse, block_lse = sf.attention(q, k, k, selection, return_lse=True, return_block_lse=True)
    own = (block_lse - lse[..., None]).exp()
    assert msa_module.divergence(q, k, own, selection).abs() < 1e-6
    other = torch.rand(own.shape, generator=generator) * (selection.picks >= 0)
    other /= other.sum(-1, keepdim=True)
    rows = torch.distributions.kl_divergence(*(torch.distributions.Categorical(probs=p + 1e-30) for p in (other, own)))
    torch.testing.assert_close(msa_module.divergence(q, k, other, selection), rows.mean())


@pytest.mark.smoke
def test_the_command_trains_all_layers_and_prints_their_answers_side_by_side(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", trial("dense"))
    options = ["--steps", "1", "--keep", "3", "--questions", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert all(f"│ {name} " in result.output for name in ("dense", "window", *LAYERS)) and "right answers in %" in result.output
