"""The decoder: its loss, its masks, its documents and its cache."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from tiny_lm import SETTINGS

from examples.train_lm import model as model_module
from examples.train_lm.generate import Cache, generate, step
from examples.train_lm.model import IGNORED, ChunkedLoss, Decoder, Documents, chunk_loss

CHOOSING = "topk_blocks(2, block=16) | local(20)"


def made(**changes) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(replace(SETTINGS, **changes))
    with torch.no_grad():  # as after some training: not all heads alike, scores that are not flat
        for block in model.blocks:
            block.attention.gain.copy_(torch.linspace(0.5, 4, 4))
    return model


IDS = torch.randint(0, 300, (2, 65), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model, documents=None, ids=IDS):
    model.zero_grad()
    loss = model(ids[:, :-1], ids[:, 1:], documents)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_the_chunked_loss_and_its_gradients_are_cross_entropys(chunk, monkeypatch):
    monkeypatch.setattr(model_module, "LOGITS_TOGETHER", 300 * chunk)
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    labels = torch.randint(0, 300, (40,))
    labels[3:9] = IGNORED
    got = ChunkedLoss.apply(hidden, weight, labels, chunk_loss)
    wanted = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(got, wanted)
    ours, theirs = (torch.autograd.grad(3 * loss, [hidden, weight]) for loss in (got, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_causal_mask_gives_what_pytorchs_dense_attention_gives():
    sdpa, ours = (loss_and_gradients(made(masks=(mask,))) for mask in ("sdpa", "causal"))
    torch.testing.assert_close(ours, sdpa, rtol=1e-4, atol=1e-4)


def test_queries_that_choose_all_blocks_attend_as_dense_ones_do_and_those_that_choose_few_do_not():
    masks = "causal", "topk_blocks(4, block=16)", CHOOSING
    dense, every, few = (loss_and_gradients(made(masks=(mask,))) for mask in masks)
    torch.testing.assert_close(every, dense, rtol=1e-4, atol=1e-4)
    assert abs(few[0] - dense[0]) > 1e-2


@pytest.mark.parametrize("masks", [SETTINGS.masks, (CHOOSING,)], ids=["masks", "choices"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradients(recompute, masks):
    recomputed, kept = (loss_and_gradients(made(recompute=how, masks=masks)) for how in (recompute, "none"))
    torch.testing.assert_close(recomputed, kept, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_kept_on_the_host_and_an_mlp_in_pieces_change_no_gradient(compiled, monkeypatch):
    def found(offload: int, together: int):
        monkeypatch.setattr(model_module, "MLP_TOGETHER", together)
        model = made(recompute="full", offload=offload)
        for block in model.blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        return loss_and_gradients(model)

    torch.testing.assert_close(found(1, 24), found(0, 1 << 15), rtol=1e-4, atol=1e-4)


def test_packed_documents_are_what_each_is_alone():
    model = made()
    ids = IDS[:1]
    bounds = [0, 10, 11, 40, 64]
    documents = Documents(torch.tensor([*bounds, 64, 64], dtype=torch.int32), 64)
    alone = [model(ids[:, a:b]) for a, b in pairwise(bounds)]
    torch.testing.assert_close(model.head(model.hidden(ids[:, :64], documents)), torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_no_token_sees_a_later_one():
    model, changed = made(), IDS.clone()
    changed[:, 33:] = 7
    torch.testing.assert_close(model(IDS)[:, :33], model(changed)[:, :33])
    assert not torch.equal(model(IDS)[:, 33:], model(changed)[:, 33:])


@pytest.mark.parametrize(("prompt", "masks"), [(1, SETTINGS.masks), (30, SETTINGS.masks), (70, SETTINGS.masks), (70, (CHOOSING,))])
def test_generation_through_the_cache_gives_the_logits_of_the_whole_sequence(prompt, masks):
    model = made(masks=masks).requires_grad_(False)
    ids = torch.randint(0, 300, (1, 90), generator=torch.Generator().manual_seed(2))
    cache = Cache(model, 90)
    wanted = model(ids)[0]
    torch.testing.assert_close(step(model, ids[:, :prompt], cache), wanted[prompt - 1], rtol=1e-4, atol=1e-4)
    for token in range(prompt, 90):
        torch.testing.assert_close(step(model, ids[:, token : token + 1], cache), wanted[token], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="has room for 90 tokens"):
        step(model, ids[:, :1], cache)


def test_generated_tokens_are_the_likeliest_each_time():
    model = made().requires_grad_(False)
    prompt = [5, 6, 7]
    written = list(generate(model, prompt, 10))
    assert written == [int(model(torch.tensor([prompt + written[:i]]))[0, -1].argmax()) for i in range(10)]
    assert list(generate(model, prompt, 10, temperature=1.0, seed=3)) == list(generate(model, prompt, 10, temperature=1.0, seed=3))
    with pytest.raises(ValueError, match="no tokens"):
        list(generate(model, [], 1))


def test_a_hugging_face_export_gives_the_same_logits_dense_and_sparse(tmp_path):
    from transformers import AutoModelForCausalLM

    from examples.train_lm.export import export
    from sparse_flash.integrations.transformers import use_sparse_flash

    model = made(masks=("causal & local(16)", "causal"))
    wanted = model(IDS)
    export(model, replace(SETTINGS, masks=("causal & local(16)", "causal")), tmp_path / "none.json", tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert theirs.config.sparse_flash_masks == ["causal & local(16)", "causal"]
    use_sparse_flash(theirs, per_layer=theirs.config.sparse_flash_masks)
    torch.testing.assert_close(theirs(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    generated = theirs.generate(IDS[:1, :20], max_new_tokens=5, do_sample=False)[0, 20:].tolist()
    assert generated == list(generate(model, IDS[0, :20].tolist(), 5))
    with pytest.raises(FileExistsError, match="not empty"):
        export(model, SETTINGS, tmp_path / "none.json", tmp_path / "hf")
    with pytest.raises(ValueError, match=r"a model with mask 'topk_blocks\(2, block=16\) .*' cannot be exported"):
        export(model, replace(SETTINGS, masks=(CHOOSING,)), tmp_path / "none.json", tmp_path / "other")
