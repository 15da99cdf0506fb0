"""MiniMax-M3 of Transformers, whose queries choose blocks of keys: over the chosen blocks it equals its own dense attention."""

import pytest
import torch
from tiny_models import EXPERTS, close, close_outcomes, made, outcome
from tiny_models import SIZES as USUAL
from tiny_models import words as words_of

import sparse_flash as sf
from sparse_flash.integrations.transformers import attend, use_sparse_flash

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl", reason="needs a release with MiniMax-M3")
SIZES = USUAL | EXPERTS | {"rotary_dim": 8, "dense_intermediate_size": 48, "shared_intermediate_size": 32, "num_hidden_layers": 3}
SIZES |= {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8}
SIZES |= {"index_block_size": 16, "index_topk_blocks": 2}
TOKENS = 75  # the last block is not whole


def words() -> torch.Tensor:
    return words_of(tokens=TOKENS)


@pytest.fixture
def model():
    torch._dynamo.reset()
    model = made(modeling.MiniMaxM3VLForCausalLM, modeling.MiniMaxM3VLTextConfig(**SIZES))
    model.set_attn_implementation("eager")
    return model


def calls_of(monkeypatch, name):
    """The masks that go through one of the integration's calls."""
    seen, original = [], getattr(attend, name)
    monkeypatch.setattr(attend, name, lambda *args, **options: seen.append(args[3]) or original(*args, **options))
    return seen


def test_chosen_blocks_give_the_logits_and_gradients_of_dense_attention(model, monkeypatch):
    given = {"input_ids": words(), "use_cache": False}
    wanted, seen = outcome(model, given), calls_of(monkeypatch, "attention")
    close_outcomes(outcome(use_sparse_flash(model), given), wanted)
    chosen = [mask for mask in seen if isinstance(mask, sf.BlockSelection)]
    assert len(chosen) == 2 and all(s.block_size == 16 and s.density < 0.4 for s in chosen)
    with torch.no_grad():
        close(torch.compile(model, backend="eager")(**given).logits, wanted[0])


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_reads_the_chosen_blocks_and_goes_on_as_dense_attention_does(model, cache, monkeypatch):
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "cache_implementation": cache}
    wanted = model.generate(words()[:, :20], **options)
    seen = calls_of(monkeypatch, "attention_decode")
    assert torch.equal(use_sparse_flash(model).generate(words()[:, :20], **options), wanted)
    assert sum(isinstance(mask, sf.BlockSelection) for mask in seen) == 2 * 30  # the prompt is short


@pytest.mark.parametrize(
    "masks, arguments, message",
    [
        ({1: "causal & local(20)"}, {}, r"chooses blocks of keys and has a mask of its own \(leave it out, or pass 'own'"),
        ("own", {"attention_mask": (words() < 80).int()}, "chooses blocks of keys and has a 4-D attention_mask or padding"),
        ("own", {"position_ids": torch.arange(TOKENS)[None] % 40}, "chooses blocks of keys and has packed sequences"),
    ],
)
def test_what_chosen_blocks_do_not_support_is_refused_by_name(model, masks, arguments, message):
    use_sparse_flash(model, masks)
    with pytest.raises(ValueError, match=message):
        model(words(), use_cache=False, **arguments)
