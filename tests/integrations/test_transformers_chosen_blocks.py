"""MiniMax-M3 of Transformers, whose queries choose blocks of keys: over these blocks it equals its own dense attention. Kernels
choose after ``use_sparse_flash``, and the model does if this package is loaded by name."""

from functools import wraps
from itertools import pairwise

import pytest
import torch
from tiny_models import EXPERTS, close, close_outcomes, made, outcome, padded
from tiny_models import SIZES as USUAL
from tiny_models import words as words_of
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.masking_utils import eager_mask

import sparse_flash as sf
from sparse_flash.integrations.transformers import attend, use_sparse_flash

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl", reason="needs a release with MiniMax-M3")
SIZES = USUAL | EXPERTS | {"rotary_dim": 8, "dense_intermediate_size": 48, "shared_intermediate_size": 32, "num_hidden_layers": 3}
SIZES |= {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8}
SIZES |= {"index_block_size": 16, "index_topk_blocks": 2, "mlp_layer_types": ["dense", "dense", "sparse"]}
TOKENS = 75  # the last block is not whole
BOUNDS = [
    0,
    20,
    47,
    75,
]  # of sequences in a row; none of them starts with a block, or is longer than the blocks that a query chooses
CHOOSERS = pytest.mark.parametrize("chooser", ["kernels", "model"])


def words() -> torch.Tensor:
    return words_of(tokens=TOKENS)


def positions(bounds=BOUNDS) -> torch.Tensor:
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(bounds)])[None]


@pytest.fixture
def model():
    torch._dynamo.reset()
    model = made(modeling.MiniMaxM3VLForCausalLM, modeling.MiniMaxM3VLTextConfig(**SIZES))
    model.set_attn_implementation("eager")
    return model


def switched(model, chooser, masks="own"):
    use_sparse_flash(model, masks)
    if chooser == "model":
        for layer in model.model.layers[1:]:
            del layer.self_attn.indexer.forward
    return model


def dense_attention(module, query, key, value, attention_mask, block_indices=None, position_ids=None, **options):
    """By the model's formula, with 0 for queries that keep nothing: the model gives them, all tokens of padding, the mean value."""
    if block_indices is not None:
        like = key.shape[2], query.dtype, query.device
        attention_mask = module.indexer.build_block_mask(block_indices, attention_mask, *like, position_ids)
    out, _ = modeling.eager_attention_forward(module, query, key, value, attention_mask, **options)
    return out * (attention_mask == 0).any(3).transpose(1, 2)[..., None], None


AttentionInterface.register("dense", dense_attention)
AttentionMaskInterface.register("dense", eager_mask)


def calls_of(monkeypatch, name):
    """The masks that go through one of the integration's calls."""
    seen, original = [], getattr(attend, name)
    monkeypatch.setattr(attend, name, lambda *args, **options: seen.append(args[3]) or original(*args, **options))
    return seen


@CHOOSERS
def test_chosen_blocks_give_the_logits_and_gradients_of_dense_attention(model, chooser, monkeypatch):
    given = {"input_ids": words(), "use_cache": False}
    wanted, seen = outcome(model, given), calls_of(monkeypatch, "attention")
    close_outcomes(outcome(switched(model, chooser), given), wanted)
    chosen = [mask for mask in seen if isinstance(mask, sf.BlockSelection)]
    assert len(chosen) == 2 and all(s.block_size == 16 and s.density < 0.4 for s in chosen)


def test_no_scores_and_no_mask_of_all_pairs_are_made(model, monkeypatch):
    use_sparse_flash(model)
    for name in ("forward", "build_block_mask"):
        refuse = wraps(getattr(modeling.MiniMaxM3VLIndexer, name))(lambda *args: pytest.fail("the model's own code ran"))
        monkeypatch.setattr(modeling.MiniMaxM3VLIndexer, name, refuse)
    for more in ({}, {"attention_mask": padded(words(), "left")}, {"position_ids": positions()}):
        outcome(model, {"input_ids": words(), "use_cache": False, **more})
    model.generate(words()[:, :20], max_new_tokens=2)


@CHOOSERS
@pytest.mark.parametrize("side, count", [("right", 20), ("left", 6), ("left", 16), ("left", 40), ("left", 70)])
def test_padding_gives_the_logits_and_gradients_of_dense_attention(model, chooser, side, count):
    exist = padded(words(), side, count)
    given = {"input_ids": words(), "attention_mask": exist, "use_cache": False}
    model.set_attn_implementation("eager" if side == "right" else "dense")
    wanted = outcome(model, given, exist.bool())
    close_outcomes(outcome(switched(model, chooser), given, exist.bool()), wanted)


def outcome_alone(model, bounds):
    """Returns what the first row's sequences give, each in a separate call."""
    model.zero_grad()
    found = torch.cat([model(words()[:1, low:high], use_cache=False).logits for low, high in pairwise(bounds)], 1)
    found.square().mean().backward()
    return found.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@CHOOSERS
@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens", "padding", "a static cache"])
def test_packed_sequences_attend_as_each_alone(model, chooser, told_by):
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    x, seen, given = words()[:1], slice(None), {"position_ids": positions()}
    if told_by == "cu_seq_lens":
        given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    elif told_by == "padding":
        x, given["position_ids"], exist = (pad(t, (9, 4)) for t in (x, given["position_ids"], torch.ones_like(x)))
        given["attention_mask"], seen = exist, slice(9, 9 + TOKENS)
    elif told_by == "a static cache":
        given |= {"past_key_values": StaticCache(model.config, max_cache_len=96)}
    wanted = outcome_alone(model, BOUNDS)
    given |= {"input_ids": x, "use_cache": False}
    close_outcomes(outcome(switched(model, chooser), given, (slice(None), seen)), wanted)


def test_packed_sequences_of_any_length_attend_as_each_alone_if_kernels_choose(model):
    wanted, given = outcome_alone(model, [0, 10, TOKENS]), {"position_ids": positions([0, 10, TOKENS]), "use_cache": False}
    close_outcomes(outcome(use_sparse_flash(model), {"input_ids": words()[:1], **given}), wanted)


@CHOOSERS
def test_sequences_with_positions_of_the_row_keep_their_blocks_keys_as_under_a_mask_of_pairs(model, chooser):
    bounds = torch.tensor([0, 20, 47, 64, 75, 105, 150], dtype=torch.int32)  # of both rows
    number = torch.bucketize(torch.arange(2 * TOKENS), bounds[1:].long(), right=True).view(2, TOKENS)
    pairs = (number[:, None, :, None] == number[:, None, None]).tril()
    given = {"input_ids": words(), "use_cache": False}
    wanted = outcome(model, given | {"attention_mask": torch.where(pairs, 0.0, torch.finfo(torch.float32).min)})
    close_outcomes(outcome(switched(model, chooser), given | {"cu_seq_lens_q": bounds}), wanted)


@CHOOSERS
@torch.no_grad()
def test_compiled_code_gives_the_same_logits(model, chooser):
    compiled, bounds = torch.compile(switched(model, chooser).model, backend="eager"), torch.tensor(BOUNDS, dtype=torch.int32)
    packed = {"position_ids": positions(), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    for given in ({"attention_mask": padded(words()[:1], "left", 20)}, packed):
        given |= {"input_ids": words()[:1], "use_cache": False}
        close(compiled(**given)[0], model.model(**given)[0])


@CHOOSERS
@torch.no_grad()
def test_one_graph_serves_a_prompt_and_one_the_steps_from_a_static_cache(model, chooser):
    wanted, cache = model.model(words(), use_cache=False)[0], StaticCache(model.config, max_cache_len=96)
    layers = torch.compile(switched(model, chooser).model, backend="eager", fullgraph=True)
    close(layers(words(), use_cache=False)[0], wanted)
    pieces = [model.model(words()[:, :70], past_key_values=cache)[0]]
    pieces += [layers(words()[:, token, None], past_key_values=cache)[0] for token in range(70, TOKENS)]
    close(torch.cat(pieces, 1), wanted)


@CHOOSERS
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("count", [0, 20])
@torch.no_grad()
def test_pieces_with_a_cache_give_the_logits_of_the_whole(model, chooser, kind, count):
    model.set_attn_implementation("dense")
    exist = padded(words(), "left", count)
    wanted = model(words(), attention_mask=exist, use_cache=False).logits
    switched(model, chooser)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=96)
    found = []
    for low, high in [(0, 66), (66, 71), (71, 72), (72, 73), (73, TOKENS)]:
        found.append(model(words()[:, low:high], attention_mask=exist[:, :high], past_key_values=cache).logits)
    close(torch.cat(found, 1)[exist.bool()], wanted[exist.bool()])


@CHOOSERS
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_reads_the_chosen_blocks_and_goes_on_as_dense_attention_does(model, chooser, cache, monkeypatch):
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "cache_implementation": cache}
    wanted = model.generate(words()[:, :20], **options)
    seen = calls_of(monkeypatch, "attention_decode")
    assert torch.equal(switched(model, chooser).generate(words()[:, :20], **options), wanted)
    assert sum(isinstance(mask, sf.BlockSelection) for mask in seen) == 2 * 30  # the prompt is short


@pytest.mark.parametrize("chooser, tokens", [("kernels", 45), ("model", 12)])
@pytest.mark.parametrize("cache", [None, "static"])
def test_sequences_padded_on_the_left_generate_as_each_alone(model, chooser, tokens, cache):
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "cache_implementation": cache}
    x, exist = words()[:, :tokens], padded(words()[:, :tokens], "left", 9)
    wanted = [model.generate(row[one.bool()][None], **options)[0, -20:] for row, one in zip(x, exist, strict=True)]
    found = switched(model, chooser).generate(x, attention_mask=exist, **options)
    assert torch.equal(found[:, -20:], torch.stack(wanted))


@pytest.mark.parametrize(
    "chooser, masks, arguments, message",
    [
        ("kernels", {1: "causal & local(20)"}, {}, r"chooses blocks of keys and has a mask of its own \(leave it out, or pass 'ow"),
        ("kernels", "own", {"attention_mask": (words() < 80).int()}, "has a 4-D attention_mask, or padding between tokens"),
        ("model", "own", {"position_ids": positions([0, 10, TOKENS])}, "than 32 tokens.*; got position 0 at index 10 of one of 65"),
    ],
)
def test_what_chosen_blocks_do_not_support_is_refused_by_name(model, chooser, masks, arguments, message):
    with pytest.raises(ValueError, match=message):
        switched(model, chooser, masks)(words(), use_cache=False, **arguments)
