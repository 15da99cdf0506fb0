"""MiniMax-M3 of Transformers, whose queries choose blocks of keys: over the chosen blocks it equals its own dense attention."""

import pytest
import torch
from tiny_models import EXPERTS, close, close_outcomes, made, outcome
from tiny_models import SIZES as USUAL
from tiny_models import words as words_of

import sparse_flash as sf
from sparse_flash.integrations.transformers import use_sparse_flash

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


def test_chosen_blocks_give_the_logits_and_gradients_of_dense_attention(model):
    given = {"input_ids": words(), "use_cache": False}
    wanted = outcome(model, given)
    with sf.record_masks(use_sparse_flash(model)) as record:
        close_outcomes(outcome(model, given), wanted)
    assert all(0 < record[layer].kept < 0.8 for layer in (1, 2))
    with torch.no_grad():
        close(torch.compile(model, backend="eager")(**given).logits, wanted[0])


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_reads_the_chosen_blocks_and_goes_on_as_dense_attention_does(model, cache):
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "cache_implementation": cache}
    wanted = model.generate(words()[:, :20], **options)
    with sf.record_masks(use_sparse_flash(model)) as record:
        assert torch.equal(model.generate(words()[:, :20], **options), wanted)
    assert all(0 < record[layer].kept < 0.9 and record[layer].calls == 30 for layer in (1, 2))


@pytest.mark.parametrize(
    "masks, arguments, message",
    [
        ({1: "causal & local(20)"}, {}, "chooses blocks of keys, .* a mask of its own: leave it out, or pass 'own' for this layer"),
        ("own", {"attention_mask": (words() < 80).int()}, "chooses blocks of keys, .* does not support (padding|a 4-D)"),
        ("own", {"position_ids": torch.arange(TOKENS)[None] % 40}, "chooses blocks of keys, .* does not support packed sequences"),
    ],
)
def test_what_does_not_go_beside_chosen_blocks_is_refused_by_name(model, masks, arguments, message):
    use_sparse_flash(model, masks)
    with pytest.raises(ValueError, match=message):
        model(words(), use_cache=False, **arguments)
