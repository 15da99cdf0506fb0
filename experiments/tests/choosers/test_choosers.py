"""Chosen blocks in a pretrained model: what is measured, by its definition, and the commands on a tiny model."""

import json

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import sparse_flash as sf
from experiments.choosers import texts as texts_module
from experiments.choosers.cli import app
from experiments.choosers.measure import LayerStatistics
from experiments.choosers.model import mask_of

TOKENS, BLOCK = 256, 64
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with random weights, and its tokenizer."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["The special magic number for Paris is 1. Remember it.\n\nQuestion: Answer: What"] * 9, 400)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, initializer_range=0.3, **sizes))
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture
def short_texts(monkeypatch):
    """Cuts all texts, because tokens take seconds."""
    whole = texts_module._ids
    monkeypatch.setattr(texts_module, "_ids", lambda tokenizer, text: whole(tokenizer, text[:10_000]))


def content(heads: int = 4) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(2, some, TOKENS, 16) * 2 for some in (heads, heads // 2, heads // 2))


def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    logits = q @ k.repeat_interleave(2, 1).mT / 4
    return logits.masked_fill(~CAUSAL, -torch.inf).softmax(-1)


@pytest.mark.smoke
def test_rows_are_measured_once_and_drawn(folder, short_texts, tmp_path):
    wanted = ["dense", "window local 0.25", "sampled(8) floor 0.15", "true_mass budget 0.15"]
    out, options = tmp_path / "results.json", ["--length", "128", "--length", str(TOKENS), "--windows", "1", "--needles", "4"]

    def run(command, *arguments):
        result = CliRunner().invoke(app, [command, *map(str, arguments)], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    def measure(*names):
        return run(
            "measure", folder, "--out", out, *options, *(text for name in names for text in ("--rows", name)), "--device", "cpu"
        )

    assert "2 rows, 0 of those asked for are missing" in measure(*wanted[:2])
    before = out.read_text()
    assert measure(*wanted[:2]).count("nats") == 0 and out.read_text() == before  # nothing is measured again
    assert "missing" in measure(*wanted)
    dense, window, *chosen = json.loads(out.read_text())["rows"]
    assert [row["row"] for row in chosen] == ["sampled(8) floor 0.15", "true_mass budget 0.15", "sampled(8) floor 0.15, by head"]
    longest = [row["lengths"][str(TOKENS)] for row in (dense, window, *chosen)]
    assert (longest[0]["density"], longest[0]["recall"], longest[0]["error"]) == (1, 1, 0)
    assert all(0.3 < found["density"] <= 1 and 0 < found["recall"] <= 1.0001 and found["error"] >= 0 for found in longest[1:])
    assert all(set(found["loss"]) == {"english", "python", "c++", "docstrings"} and found["digits"] <= 1 for found in longest)
    assert chosen[2]["spec"].startswith("causal & (sampled(8, floor=") and len(chosen[2]["shares"][0]) == 4
    said = run("draw", out, "--target", tmp_path / "picture.png", "--keep", tmp_path / "kept.json")
    assert said.count("| true_mass") == 1 and (tmp_path / "picture.png").exists()
    kept = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert [row["row"] for row in kept] == [row["row"] for row in (dense, window, *chosen)] and "by_head" not in kept[-1]


def test_true_mass_is_the_sum_of_softmax_weights_over_a_block():
    q, k, _ = content()
    mass = weights(q, k).unflatten(3, (-1, BLOCK)).sum(4).unflatten(2, (-1, BLOCK))
    for reduce, wanted in (("mean", mass.mean(3)), ("max", mass.amax(3))):
        chooser = sf.parse(f"true_mass(floor=0.1, reduce='{reduce}', block={BLOCK})")
        torch.testing.assert_close(chooser.scores(q, k, sf.compile_mask("causal", TOKENS, block_size=BLOCK).grid), wanted)


def test_density_recall_and_error_are_what_their_names_say():
    q, k, v = content()
    spec, seen = f"causal & sampled(8, keep=0.4, block={BLOCK})", LayerStatistics(1, BLOCK)
    for one in range(2):  # in two batches
        seen(0, spec, *(part[one : one + 1] for part in (q, k, v)))
    kept, found = mask_of(spec, q, k, BLOCK).to_dense(), seen.summarize()[0]
    mass, values = weights(q, k), v.repeat_interleave(2, 1)
    out = [(one / one.sum(-1, keepdim=True)) @ values for one in (mass * kept, mass)]
    torch.testing.assert_close(found["recall"][0], (mass * kept).sum(-1).mean((0, 2)))
    error = (out[0] - out[1]).square().sum((0, 2, 3)) / out[1].square().sum((0, 2, 3))
    torch.testing.assert_close(found["error"][0], error.sqrt(), rtol=1e-4, atol=1e-5)
    blocks = kept[..., ::BLOCK, ::BLOCK].float().sum((2, 3)).mean(0) / 10
    torch.testing.assert_close(found["density"][0], blocks)
    assert seen.summarize()[1]["recall"] == pytest.approx(found["recall"].mean().item(), abs=1e-4)
