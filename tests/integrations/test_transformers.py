"""Transformers' models under a mask equal their own attention with the mask's pairs."""

import copy
import pickle
from functools import partial
from itertools import pairwise

import pytest
import torch
from tiny_models import as_oracle, close, close_outcomes, config_of, decoder_of, made, outcome, padded, transformers
from tiny_models import words as words_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from transformers.masking_utils import and_masks, causal_mask_function

import sparse_flash as sf
from sparse_flash.integrations.transformers import use_sparse_flash
from sparse_flash.integrations.transformers.model_mask import create_model_mask

TOKENS = 150  # more than a block of a table
PATTERN, NEAR = "causal & (local(20) | sinks(2))", "causal & local(9)"
WINDOW = {"sliding_window": 33}  # of Mistral
words = partial(words_of, tokens=TOKENS)


def table(spec: str, **options) -> sf.BlockMask:
    return sf.compile_mask(spec, TOKENS, **options)


def of_heads(*patterns: str) -> sf.BlockMask:
    return sf.BlockMask.per_head(list(patterns), TOKENS, block_size=16)


def in_20(batch, head, q, kv):
    return (q >= kv) & (q - kv < 20)


WITHIN_CAUSAL = [
    table(PATTERN, block_size=16),
    table("causal", block_size=64),
    of_heads("causal", NEAR, "causal & strided(7)", "causal & sinks(2)"),
    "(causal & local(9)) | (causal & sinks(2))",
    "causal & ~(local(3) & ~local(1)) & full",
    create_block_mask(in_20, None, None, TOKENS, TOKENS, device="cpu"),
]
LOOK_AHEAD = [
    "local(64)",
    "full",
    "causal | sinks(3)",
    "~(causal & ~local(1))",
    sf.from_mask_fn(lambda q, kv: (q - kv) % 300 != 299),
    sf.longformer(5),
    table("local(2)", block_size=16),
    table("causal | block_diagonal(block=32)", block_size=16),
    of_heads("causal", "causal", "causal", "causal | sinks(100)"),
]
# What is given, the masks of both layers, and whether they look ahead.
GIVEN = [
    *(({"mask": mask}, [mask, mask], False) for mask in WITHIN_CAUSAL),
    *(({"mask": mask}, [mask, mask], True) for mask in LOOK_AHEAD),
    *((given, ["causal", "causal"], False) for given in ({}, {"mask": "own"}, {"per_layer": [None, "own"]}, {"mask": {0: None}})),
    *((given, ["causal", NEAR], False) for given in ({"per_layer": (None, NEAR)}, {"mask": {1: sf.causal() & sf.local(9)}})),
    *((given, ["causal", "local(9)"], True) for given in ({"mask": {1: "local(9)"}}, {"per_layer": ["causal", "local(9)"]})),
]


def as_table(mask) -> sf.BlockMask:
    if isinstance(mask, sf.BlockMask):
        return mask
    return sf.BlockMask.from_flex(mask) if hasattr(mask, "mask_mod") else table(mask)


@torch.no_grad()
@pytest.mark.parametrize("given, masks, ahead", GIVEN)
def test_each_layer_has_the_mask_that_it_is_given_in_any_form_and_is_asked_before_it_looks_ahead(given, masks, ahead):
    model, x = decoder_of("llama"), words()
    if ahead:
        before = model.config._attn_implementation
        with pytest.raises(ValueError, match=r"must be within causal.*'causal & .*bidirectional=True"):
            use_sparse_flash(model, **given)
        assert model.config._attn_implementation == before
    ours = use_sparse_flash(model, **given, bidirectional=ahead)(x).logits
    model.config.is_causal = not ahead  # else the oracle has a mask beside these
    close(ours, as_oracle(model, specs=[as_table(mask) for mask in masks])(x).logits)


@torch.no_grad()
def test_the_masks_of_a_model_are_those_of_its_layers_and_make_another_model_the_same():
    model, other, x = decoder_of("llama"), decoder_of("llama"), words()
    near = table(NEAR)
    use_sparse_flash(model, {1: near})
    assert sf.masks_of(torch.nn.DataParallel(model)) == {0: "own", 1: near}
    model.cpu()  # DataParallel moved it to a GPU, if there is one
    use_sparse_flash(model, per_layer=[sf.sinks(2) & "causal", None])
    assert sf.masks_of(model) == {0: "causal & sinks(2)", 1: "own"}
    close(use_sparse_flash(other, sf.masks_of(model))(x).logits, model(x).logits)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="must be one that use_sparse_flash switched; got LlamaForCausalLM, which runs 'sdpa'"):
        sf.masks_of(model)


def test_a_printed_model_shows_the_mask_of_each_layer_as_long_as_it_runs():
    model = decoder_of("llama")
    before = str(model)
    use_sparse_flash(model, {0: NEAR})
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "sparse_flash mask: causal & local(9)\n" in str(one) and "sparse_flash mask: own\n" in str(one)
    model.set_attn_implementation("sdpa")
    assert str(model) == before


# Masks that are not patterns.


def test_a_partial_as_mask_function_is_evaluated_for_every_pair():
    def near(batch, head, query, key, distance):
        return (query - key).abs() < distance

    sizes = {"batch_size": 1, "q_length": TOKENS, "kv_length": TOKENS, "q_offset": 0, "kv_offset": 0}
    both = and_masks(causal_mask_function, partial(near, distance=5))
    made = create_model_mask(**sizes, mask_function=both, attention_mask=None, device="cpu")
    assert torch.equal(made.kept_pairs, table("causal & local(5)").to_dense().expand(1, 1, -1, -1))


# Packed and padded sequences.

STARTS = [[0, 7], [0, 131], [0, 50, 100]]
PLACES = [(row, slice(*pair)) for row, starts in enumerate(STARTS) for pair in pairwise([*starts, TOKENS])]
ENDS = torch.tensor([0, *(row * TOKENS + place.stop for row, place in PLACES)], dtype=torch.int32)
CU_SEQ_LENS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": TOKENS, "max_length_k": TOKENS}


def test_packed_sequences_train_in_compiled_code_too():
    torch._dynamo.reset()
    model = use_sparse_flash(decoder_of("mistral", **WINDOW, num_hidden_layers=1), PATTERN)
    x, positions = words(3), torch.zeros(3, TOKENS, dtype=torch.int64)
    for row, place in PLACES:
        positions[row, place] = torch.arange(place.stop - place.start)
    model.train().gradient_checkpointing_enable()
    given = {"input_ids": x, "position_ids": positions, "use_cache": False, **CU_SEQ_LENS}
    close_outcomes(outcome(torch.compile(model, fullgraph=True, backend="aot_eager"), given), outcome(model, given))


@torch.no_grad()
def test_positions_count_from_each_sequences_first_token_in_each_head_and_in_compiled_code_too():
    torch._dynamo.reset()
    mask = "per_head([causal, causal & sinks(2), causal & local(5), causal & prefix(9)])"
    model, x = use_sparse_flash(decoder_of("llama", num_hidden_layers=1), mask), words(3, tokens=90)
    places = [slice(20, 90), slice(0, 77), slice(7, 80)]
    exist = torch.zeros_like(x)
    for row, place in enumerate(places):
        exist[row, place] = 1
    positions = (exist.cumsum(1) - 1).clamp(min=0)
    alone = [model(x[row : row + 1, place]).logits[0] for row, place in enumerate(places)]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    # A prompt at once or in two calls, the second of more queries than attention_decode takes.
    for call, first in ((model, 90), (compiled, 90), (model, 15), (model, 50)):
        found, cache = [], transformers.DynamicCache() if first < 90 else None
        for part in (slice(0, first), slice(first, 90))[: 1 + (first < 90)]:
            given = {"position_ids": positions[:, part], "past_key_values": cache, "use_cache": cache is not None}
            found.append(call(x[:, part], attention_mask=exist[:, : part.stop], **given).logits)
        for row, place in enumerate(places):
            close(torch.cat(found, 1)[row, place], alone[row])


# Compiled models.


@torch.no_grad()
def test_a_compiled_model_takes_many_tokens_with_a_static_cache():
    torch._dynamo.reset()
    model, x = use_sparse_flash(decoder_of("llama", num_hidden_layers=1), "causal & local(100)"), words()
    compiled, cache = torch.compile(model, backend="eager"), transformers.StaticCache(model.config, max_cache_len=TOKENS + 30)
    close(torch.cat([compiled(part, past_key_values=cache).logits for part in x.split(75, 1)], 1), model(x).logits)


def test_a_compiled_model_generates_from_a_static_cache_in_one_graph_for_the_prompt_and_one_for_each_step():
    torch._dynamo.reset()
    model, x = use_sparse_flash(decoder_of("llama", num_hidden_layers=1), PATTERN), words()
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static", "attention_mask": padded(x, "left", 13)}
    options["disable_compile"] = True  # generate compiles by itself on a GPU
    expected, counter = model.generate(x, **options), CompileCounterWithBackend("eager")
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    assert torch.equal(model.generate(x, **options), expected)
    assert counter.frame_count == 2


@pytest.mark.parametrize("name, checkpointing, padding", [("llama", False, None), ("mistral", True, 1 / 4)], ids=str)
def test_a_compiled_model_trains_on_any_length_in_one_graph(name, checkpointing, padding):
    torch._dynamo.reset()
    model = use_sparse_flash(decoder_of(name, **WINDOW, num_hidden_layers=1), PATTERN).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)

    for tokens in (66, 80, TOKENS):  # others are few enough for decoding
        x = words(tokens=tokens)
        exist = padded(x, "left", int(tokens * (padding or 0)))
        given = {"input_ids": x, "attention_mask": exist if padding else None, "use_cache": False}
        close_outcomes(*(outcome(call, given, exist.bool()) for call in (compiled, model)))
    assert counter.frame_count == 2  # for the first length, and for all others


def test_a_compiled_model_fails_where_it_would_have_to_look_at_values():
    torch._dynamo.reset()
    model = use_sparse_flash(decoder_of("mistral", **WINDOW, num_hidden_layers=1), PATTERN)
    compiled, x = torch.compile(model, fullgraph=True, backend="aot_eager"), words(tokens=60)
    exist = padded(x, "left")
    restarting = {"position_ids": torch.arange(60)[None].remainder(25)}
    cached = {"past_key_values": transformers.DynamicCache(config=model.config), "use_cache": True}
    with torch.no_grad():
        close(compiled(x, attention_mask=exist).logits[exist.bool()], model(x, attention_mask=exist).logits[exist.bool()])
        with pytest.raises(RuntimeError, match="zeros between its ones"):
            compiled(x, attention_mask=padded(x, "holes"))
        for options in ({"attention_mask": torch.ones_like(x)}, cached):
            with pytest.raises(RuntimeError, match=r"packed sequences.*cu_seq_lens_q"):
                compiled(x, **{"use_cache": False, **restarting, **options})
    capped = use_sparse_flash(decoder_of("gemma2", num_hidden_layers=1, layer_types=["full_attention"]), "causal")
    with pytest.raises(Exception, match="packed sequences with a soft cap are not supported in compiled code"):
        torch.compile(capped, backend="eager", fullgraph=True)(words(3), **CU_SEQ_LENS, use_cache=False)


# What is carried and what is refused.


def test_attention_drops_weights_only_in_training():
    model, x, logits = use_sparse_flash(decoder_of("gpt2", attn_pdrop=0.3)), words(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(model.train()(x).logits)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    assert torch.equal(model.eval()(x).logits, model(x).logits)


@pytest.mark.parametrize("name", ["output_attentions", "position_bias", "indices", "of_a_later_version"])
def test_keywords_that_are_not_carried_are_refused_by_name(name):
    layer, q = use_sparse_flash(decoder_of("llama"), PATTERN).model.layers[0].self_attn, torch.randn(1, 4, 5, 8)
    attend = transformers.AttentionInterface()["block_sparse"]
    with pytest.raises(ValueError, match=f"passes {name} to its attention"):
        attend(layer, q, q, q, None, **{name: True})
    attend(layer, q, q, q, None, is_causal=True, position_ids=None, output_attentions=False, use_cache=True, labels=torch.zeros(1))


def test_pairs_are_read_once_for_all_layers_and_again_when_they_change(monkeypatch):
    made, from_dense = [], sf.BlockMask.from_dense
    monkeypatch.setattr(sf.BlockMask, "from_dense", lambda *given: made.append(given) or from_dense(*given))
    model, x, pairs = decoder_of("mistral"), words(), torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    ours, theirs = use_sparse_flash(model, "own"), decoder_of("mistral")
    for count in (1, 2):
        close(ours(x, attention_mask=pairs).logits, theirs(x, attention_mask=pairs).logits)
        assert len(made) == count < len(model.model.layers) * count
        pairs[..., 1:, 0] = False


COMPUTES = [lambda mask: torch.zeros(1) + mask, lambda mask: mask.masked_fill(mask, 0), lambda mask: mask[:, :, :3]]


@pytest.mark.parametrize("compute", COMPUTES)
def test_a_model_that_computes_with_its_mask_is_refused_with_the_way_out(compute):
    def change(module, args, kwargs):
        return args, {"attention_mask": compute(kwargs["attention_mask"])}

    model = use_sparse_flash(decoder_of("llama"), PATTERN)
    model.model.layers[0].self_attn.register_forward_pre_hook(change, with_kwargs=True)
    with pytest.raises((ValueError, AttributeError), match=r"computes with its attention mask.*set_attn_implementation"):
        model(words())


def test_a_model_that_shares_the_config_of_a_switched_one_is_told_to_copy_it():
    config = config_of("llama")
    model, other = (made(transformers.LlamaForCausalLM, config) for _ in range(2))
    use_sparse_flash(model, PATTERN)
    with pytest.raises(ValueError, match=r"use_sparse_flash.*made of one config.*copy.deepcopy"):
        other(words())


# Models in other modules.


def with_peft(model):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))  # LoRA begins with zeros


WRAPPERS = {
    "DataParallel": torch.nn.DataParallel,
    "PEFT": with_peft,
    "a module with a head": torch.nn.Sequential,
    "several": lambda model: torch.compile(torch.nn.DataParallel(with_peft(model)), backend="eager"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_is_switched_inside_and_returned_wrapped(name):
    model, x = decoder_of("llama", num_hidden_layers=1), words()
    expected = use_sparse_flash(copy.deepcopy(model), PATTERN)(x).logits
    wrapped = WRAPPERS[name](model)
    assert use_sparse_flash(wrapped, PATTERN) is wrapped
    close(wrapped(x).logits.cpu(), expected)  # DataParallel moves it to GPUs


def test_a_module_that_does_not_hold_one_model_is_refused():
    video, pipeline = type("Video", (torch.nn.Module,), {"__module__": "diffusers.models"})(), type("Pipeline", (), {})()
    type(pipeline).__module__ = "diffusers.pipelines"
    for one in (video, torch.nn.Sequential(video), pipeline):
        with pytest.raises(TypeError, match=r"call use_sparse_flash\(pipe.transformer, spec\) of .*integrations.diffusers"):
            use_sparse_flash(one)
    with pytest.raises(TypeError, match=r"got ModuleList, which holds LlamaForCausalLM and LlamaForCausalLM; pass the one"):
        use_sparse_flash(torch.nn.ModuleList([decoder_of("llama"), decoder_of("llama")]), PATTERN)


def test_trainer_trains_a_switched_model_like_the_unswitched_one(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate; the extra transformers brings it")
    model, own = (decoder_of("llama", num_hidden_layers=1) for _ in range(2))
    before, rows = copy.deepcopy(model.state_dict()), [{"input_ids": row, "labels": row} for row in words(batch=4)]
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.01, "report_to": "none"}
    for trained in (use_sparse_flash(model, "causal"), own):
        arguments = transformers.TrainingArguments(tmp_path, save_strategy="no", use_cpu=True, **settings)
        transformers.Trainer(trained, arguments, train_dataset=rows).train()
    for name, after in own.state_dict().items():
        close(model.state_dict()[name], after)
        assert "self_attn" not in name or not torch.equal(after, before[name])
