"""The decoder: its loss, its masks, its documents and its cache."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from tiny_lm import SETTINGS, SHAPE
from transformers import AutoModelForCausalLM

from examples.train_lm import model as model_module
from examples.train_lm.export import export
from examples.train_lm.generate import Cache, generate, step
from examples.train_lm.model import IGNORED, ChunkedLoss, Decoder, Documents, chunk_loss
from sparse_flash.integrations.transformers import use_sparse_flash

CHOOSING = "topk_blocks(2, block=16) | local(20)"
IDS = torch.randint(0, 300, (2, 65), generator=torch.Generator().manual_seed(1))
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def made(**changes) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(replace(SETTINGS, **changes))
    with torch.no_grad():  # as after some training: not all heads alike, scores that are not flat
        for block in model.blocks:
            block.attention.gain.copy_(torch.linspace(0.5, 4, 4))
    return model


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(IDS[:, :-1], IDS[:, 1:], None)
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
    close(ours, theirs)


def test_a_causal_mask_and_a_choice_of_all_blocks_give_what_pytorchs_dense_attention_gives():
    dense, causal, every, few = (
        loss_and_gradients(made(masks=(mask,))) for mask in ("sdpa", "causal", "topk_blocks(4, block=16)", CHOOSING)
    )
    close(causal, dense)
    close(every, dense)
    assert abs(few[0] - dense[0]) > 1e-2


@pytest.mark.parametrize("masks", [SETTINGS.masks, (CHOOSING,)], ids=["masks", "choices"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradients(recompute, masks):
    close(*(loss_and_gradients(made(recompute=how, masks=masks)) for how in (recompute, "none")))


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_kept_on_the_host_and_an_mlp_in_pieces_change_no_gradient(compiled, monkeypatch):
    masks = ("causal & local(16)",)  # one graph
    wanted = loss_and_gradients(made(recompute="full", masks=masks))
    monkeypatch.setattr(model_module, "MLP_TOGETHER", 24)
    model = made(recompute="full", masks=masks, offload=1)
    for block in model.blocks if compiled else ():
        block.compile(fullgraph=True, backend="aot_eager")
    close(loss_and_gradients(model), wanted)


def test_packed_documents_equal_separate_calls():
    model, ids, bounds = made(), IDS[:1], [0, 10, 11, 40, 64]
    documents = Documents(torch.tensor([*bounds, 64, 64], dtype=torch.int32), 64)
    alone = [model(ids[:, a:b]) for a, b in pairwise(bounds)]
    close(model.head(model.hidden(ids[:, :64], documents)), torch.cat(alone, 1))


@pytest.mark.parametrize(
    ("prompt", "changes"), [(1, {}), (30, {}), (70, {}), (70, {"masks": (CHOOSING,)}), (70, {"log_length": True})], ids=str
)
def test_generation_through_the_cache_gives_the_logits_of_the_whole_sequence(prompt, changes):
    model = made(**changes).requires_grad_(False)
    ids = torch.randint(0, 300, (1, 90), generator=torch.Generator().manual_seed(2))
    cache, wanted = Cache(model, 90), model(ids)[0]
    close(step(model, ids[:, :prompt], cache), wanted[prompt - 1])
    for token in range(prompt, 90):
        close(step(model, ids[:, token : token + 1], cache), wanted[token])
    with pytest.raises(ValueError, match="has room for 90 tokens"):
        step(model, ids[:, :1], cache)


def test_log_length_scaling_multiplies_scores_with_the_log_of_the_keys():
    plain, scaled = (made(shape=replace(SHAPE, layers=1), masks=("causal",), log_length=how) for how in (False, True))
    with torch.no_grad():
        plain.blocks[0].attention.gain.mul_(math.log(65) / math.log(1024))
    close(plain(IDS)[:, -1], scaled(IDS)[:, -1])


def test_generated_tokens_are_the_likeliest_each_time_or_drawn_by_a_seed():
    model, prompt = made().requires_grad_(False), [5, 6, 7]
    written = list(generate(model, prompt, 10))
    assert written == [int(model(torch.tensor([prompt + written[:i]]))[0, -1].argmax()) for i in range(10)]
    drawn = [list(generate(model, prompt, 10, temperature=1.0, seed=3)) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_a_hugging_face_export_gives_the_same_logits_dense_and_sparse(tmp_path):
    masks = ("causal & local(16)", "causal")
    model, settings = made(masks=masks), replace(SETTINGS, masks=masks)
    export(model, settings, tmp_path / "none.json", tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert theirs.config.sparse_flash_masks == [*masks]
    use_sparse_flash(theirs, per_layer=theirs.config.sparse_flash_masks)
    close(theirs(IDS).logits, model(IDS))
    generated = theirs.generate(IDS[:1, :20], max_new_tokens=5, do_sample=False)[0, 20:].tolist()
    assert generated == list(generate(model, IDS[0, :20].tolist(), 5))
    with pytest.raises(FileExistsError, match="not empty"):
        export(model, settings, tmp_path / "none.json", tmp_path / "hf")
    for changes, said in (
        ({"masks": (CHOOSING,)}, r"a model with mask 'topk_blocks\(2, block=16\) .*' cannot be exported"),
        ({"log_length": True}, "log-length scaling cannot be exported"),
    ):
        with pytest.raises(ValueError, match=said):
            export(model, replace(settings, **changes), tmp_path / "none.json", tmp_path / "other")
