"""MiniMax-M3 of Transformers, whose queries choose blocks of keys: over the chosen blocks it equals its own dense attention."""

import pytest
import torch

pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl", reason="needs a release with MiniMax-M3")
from transformers import MiniMaxM3VLTextConfig  # noqa: E402

import sparse_flash as sf  # noqa: E402
from sparse_flash.integrations.transformers import use_sparse_flash  # noqa: E402

SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "intermediate_size": 48,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 128,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 16,
    "index_topk_blocks": 2,
}
TOKENS = 75  # the last block is not whole


@pytest.fixture
def model():
    torch.manual_seed(0)
    torch._dynamo.reset()
    one = modeling.MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(**SIZES)).eval()
    for parameter in one.parameters():  # far from their first values, under which attention hardly differs between tokens
        parameter.data += 0.1 * torch.randn(parameter.shape)
    one.set_attn_implementation("eager")
    return one


def words() -> torch.Tensor:
    return torch.randint(1, 90, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model):
    model.zero_grad()
    found = model(words(), labels=words(), use_cache=False)
    found.loss.backward()
    return found.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def calls_of(monkeypatch, name):
    """The selections that go through one of the integration's calls."""
    from sparse_flash.integrations.transformers import attend as integration

    seen, original = [], getattr(integration, name)
    monkeypatch.setattr(integration, name, lambda *args, **options: seen.append(args[3]) or original(*args, **options))
    return seen


def test_chosen_blocks_give_the_logits_and_gradients_of_dense_attention(model, monkeypatch):
    wanted, wanted_gradients = logits_and_gradients(model)
    seen = calls_of(monkeypatch, "attention")
    found, gradients = logits_and_gradients(use_sparse_flash(model))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-3, atol=1e-5)
    chosen = [mask for mask in seen if isinstance(mask, sf.BlockSelection)]
    assert len(chosen) == 2 and all(s.block_size == 16 and s.density < 0.4 for s in chosen)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(words(), use_cache=False).logits.detach(), wanted, rtol=1e-4, atol=1e-5)


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
        ({1: "causal & local(20)"}, {}, "chooses blocks of keys, .* a mask of its own: leave it out, or pass 'own' for this layer"),
        ("own", {"attention_mask": (words() < 80).int()}, "chooses blocks of keys, .* does not support (padding|a 4-D)"),
        ("own", {"position_ids": torch.arange(TOKENS)[None] % 40}, "chooses blocks of keys, .* does not support packed sequences"),
    ],
)
def test_what_does_not_go_beside_chosen_blocks_is_refused_by_name(model, masks, arguments, message):
    use_sparse_flash(model, masks)
    with pytest.raises(ValueError, match=message):
        model(words(), use_cache=False, **arguments)
