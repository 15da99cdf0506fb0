"""Models with ``precision="fp8"``: which of their calls it is of, and what is refused beside it."""

import copy

import pytest
import torch
from test_diffusers import TILE, WINDOW, made, run
from tiny_models import config_of, padded, transformers, words

from sparse_flash.integrations import diffusers as of_diffusers
from sparse_flash.integrations import transformers as of_transformers

CHOOSER = "causal & (sampled(8, keep=1, block=64) | sinks(4))"


def llama(mask, precision=None, **options):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of("llama", head_dim=16)).bfloat16().eval()
    return of_transformers.use_sparse_flash(model, mask, precision=precision, backend="reference", **options)


@pytest.mark.parametrize("mask, options", [("causal & local(100)", {}), (CHOOSER, {"dense_below": 0})])
def test_prompts_are_computed_in_it_and_steps_of_decoding_are_not(mask, options):
    model, plain = llama(mask, "fp8", **options), llama(mask, **options)
    with torch.no_grad():
        logits, wanted = (one(words(2, 150)).logits.float() for one in (model, plain))
    assert not torch.equal(logits, wanted) and (logits - wanted).norm() < 0.1 * wanted.norm()
    with torch.no_grad():  # the same cache, so a step differs only by its own precision
        cache = plain(words(1, 100)).past_key_values
        steps = [one(words(1, 1), past_key_values=copy.deepcopy(cache)).logits for one in (model, plain)]
    assert torch.equal(*steps)


@pytest.mark.parametrize("mask, options", [("causal", {}), (CHOOSER, {"dense_below": 0})])
def test_unsupported_calls_are_refused(mask, options):
    model, ids = llama(mask, "fp8", **options), words(2, 100)
    with pytest.raises(ValueError, match="gives no gradients"):
        model(ids)
    packed = torch.arange(100) % 50
    with torch.no_grad(), pytest.raises(ValueError, match="packed sequences"):
        model(ids, position_ids=packed[None].expand(2, -1), use_cache=False)
    with torch.no_grad(), pytest.raises(ValueError, match="in precision='fp8' it does not support"):
        llama("causal", "fp8")(ids, attention_mask=padded(ids, "left"))


def test_a_video_transformer_computes_all_its_layers_in_it(monkeypatch):
    called, attention = [], of_diffusers.attention

    def on_a_cpu(*tensors, precision, **options):
        called.append(precision)
        return attention(*tensors, precision=precision, **options, backend="reference")

    monkeypatch.setattr(of_diffusers, "attention", on_a_cpu)
    model, inputs = made("wan")
    model.bfloat16()
    inputs |= {name: inputs[name].bfloat16() for name in ("hidden_states", "encoder_hidden_states")}
    out = []
    for precision in ("fp8", None):
        of_diffusers.use_sparse_flash(model, WINDOW, TILE, precision=precision)
        out.append(run(model, inputs).float())
    assert called == ["fp8"] * 2 + [None] * 2
    assert not torch.equal(*out) and (out[0] - out[1]).norm() < 0.1 * out[1].norm()
