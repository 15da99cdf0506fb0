"""Transformers' architectures under a mask, each with random weights. Each equals its own attention with the pairs that its own
mask and the pattern both keep, or is refused. No architecture may be changed, or left unchanged, silently."""

from functools import partial
from importlib import import_module

import pytest
import tiny_models as tiny
import torch
from tiny_models import PATTERNS, TOKENS, as_oracle, close, config_of, decoder_of, encoder_of, made, padded, transformers, words
from transformers import masking_utils

import sparse_flash as sf
from sparse_flash.integrations.transformers import use_sparse_flash

COUNTS_POSITIONS = hasattr(masking_utils, "packed_sequence_compatibility_function")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


# A model, what it is called with for these tokens, and which of its outputs belong to tokens that exist.


def of_text(make, name, x, exist):
    return make(name), {"input_ids": x, "attention_mask": exist}, exist.bool()


def of_low_rank(name, x, exist):
    """Of values whose head_dim is not that of queries and keys."""
    ranks = {"first_k_dense_replace": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "num_key_value_heads": 4}
    dims = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
    return of_text(partial(decoder_of, **ranks, **dims), name, x, exist)


LAYERS = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "vocab_size": tiny.WORDS}
LAYERS |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "dropout": 0.0, "max_position_embeddings": 256}
LAYERS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def of_encoder_and_decoder(name, x, exist):
    more = {"num_global_tokens": 4} if name == "pegasus_x" else {}
    config = transformers.CONFIG_MAPPING[name](**more, **LAYERS)
    model = made(transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)], config)
    return model, {"input_ids": x, "attention_mask": exist, "decoder_input_ids": x.flip(1)}, torch.ones_like(x).bool()


def of_sound(name, x, exist):
    model = made(transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(**LAYERS, **SOUND))
    sound = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(3))
    return model, {"input_features": sound, "decoder_input_ids": x}, torch.ones_like(x).bool()


def of_images_and_text(name, x, exist):
    vision = transformers.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8)
    options = {"image_token_index": 80, "vision_feature_layer": -1}
    config = transformers.LlavaConfig(vision_config=vision, text_config=config_of("llama"), **options)
    model, x = made(transformers.LlavaForConditionalGeneration, config), x.clamp(max=79)
    x[:, 7:11] = 80
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return model, {"input_ids": x, "attention_mask": exist, "pixel_values": images}, exist.bool()


SOUND = {"max_source_positions": 30, "num_mel_bins": 8}
# The default cache of most keeps window - 1 tokens of some layers. Of the last four, two share keys among layers, and GPT-2 reads
# the mask of a static cache.
WINDOWS = ["mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen2", "cohere2", "llama4_text", "gemma3n_text", "gemma4_text", "gpt2"]
DECODERS, ENCODERS = ["llama", *WINDOWS, "deepseek_v3"], [*tiny.ENCODERS]
OF_TWO_PARTS = ["bart", "mbart", "pegasus", "pegasus_x"]
MODELS = dict.fromkeys(DECODERS, partial(of_text, decoder_of)) | {"deepseek_v3": of_low_rank}
MODELS |= dict.fromkeys(ENCODERS, partial(of_text, encoder_of))
MODELS |= dict.fromkeys(OF_TWO_PARTS, of_encoder_and_decoder)
MODELS |= {"whisper": of_sound, "llava": of_images_and_text}
# Random runs draw more of decoders.
CASES = [*((name, side) for name in DECODERS for side in ("none", "left"))]
CASES += [("llama", "right"), ("llama", "holes"), ("llama4_text", "holes"), ("llava", "left"), ("whisper", "none")]
CASES += [*((name, side) for name in ENCODERS for side in ("none", "right", "holes")), *((name, "right") for name in OF_TWO_PARTS)]


def generated(name, model, inputs, side) -> list[torch.Tensor]:
    """Tokens that go on past the window of the default cache, by any kind of cache."""
    if name in ENCODERS or (name in DECODERS and side == "right"):  # nothing goes on from padding
        return []
    prompt = {key: t for key, t in inputs.items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 7, "do_sample": False, "num_beams": 1 if side == "none" else 3}
    static = name in DECODERS and tiny.takes_static_caches(name)
    return [model.generate(**prompt, **options, cache_implementation=cache) for cache in (None, "static")[: 1 + static]]


@pytest.mark.parametrize("name, side", CASES)
def test_outputs_gradients_and_tokens_are_those_of_dense_attention_under_the_mask(name, side):
    x = words(tokens=150)  # more than a block of a table
    model, inputs, seen = MODELS[name](name, x, padded(x, side))
    for pattern in (None, "local(4) | sinks(2)" if name in ENCODERS else PATTERNS["place"]):
        assert use_sparse_flash(model, pattern or "own") is model
        ours, tokens = tiny.outcome(model, inputs, seen), generated(name, model, inputs, side)
        as_oracle(model.get_decoder() if name == "llava" else model, pattern=pattern, everywhere=name in ENCODERS)
        tiny.close_outcomes(ours, tiny.outcome(model, inputs, seen))
        assert all(map(torch.equal, tokens, generated(name, model, inputs, side)))


# Sequences of 5, 1, 11 and 7 tokens.
POSITIONS = torch.cat([torch.arange(n) for n in (5, 1, 11, 7)])[None]
PLACES = [slice(0, 5), slice(5, 6), slice(6, 17), slice(17, 24)]


@torch.no_grad()
def test_packed_sequences_that_go_on_from_a_cache_are_refused():
    model, cache = use_sparse_flash(decoder_of("llama")), transformers.DynamicCache()
    model(words(), past_key_values=cache)
    model(words(tokens=9), position_ids=TOKENS + torch.arange(9)[None], past_key_values=cache)
    with pytest.raises(ValueError, match=r"must be of one sequence where a call goes on from a cache"):
        model(words(tokens=9), position_ids=torch.arange(9)[None] % 4, past_key_values=cache)


@torch.no_grad()
def test_packed_sequences_that_lose_queries_on_their_way_through_the_layers_are_refused():
    model, x, given = use_sparse_flash(decoder_of("gemma4_text")), words(batch=1), {"position_ids": POSITIONS, "use_cache": False}
    try:
        found = model(x, logits_to_keep=1, **given).logits
    except ValueError as error:
        assert "must keep all of their queries in each layer" in str(error) and "leave logits_to_keep out" in str(error)
    else:  # before Transformers 5.23, all layers have all of them
        close(found, model(x, **given).logits[:, -1:])


def test_gradients_of_packed_sequences_equal_separate_calls():
    for name in ("llama", "gpt_oss", "gemma2"):  # plain, with sinks, and with soft caps
        model, x = decoder_of(name).train(), words(batch=1)
        use_sparse_flash(model)
        gradients = []
        for given in ([(x, POSITIONS)], [(x[:, place], None) for place in PLACES]):
            model.zero_grad()
            sum(model(one, position_ids=at, use_cache=False).logits.square().sum() for one, at in given).backward()
            gradients.append([p.grad.clone() for name, p in model.named_parameters() if "self_attn" in name])
        for ours, alone in zip(*gradients, strict=True):
            close(ours, alone)


@torch.no_grad()
def test_chunks_count_from_each_padded_sequences_start_in_compiled_code_too():
    torch._dynamo.reset()
    model, x = use_sparse_flash(decoder_of("llama4_text"), PATTERNS["place"]), words()
    given = {"attention_mask": padded(x, "left"), "use_cache": False}
    exist, compiled = given["attention_mask"].bool(), torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(x, **given).logits[exist], model(x, **given).logits[exist])


@torch.no_grad()
@pytest.mark.skipif(not COUNTS_POSITIONS, reason="this Transformers counts chunks from the row's start")
def test_chunks_count_positions_from_where_a_packed_sequence_says_that_it_starts():
    model, x = decoder_of("llama4_text"), words()
    positions = torch.cat([torch.arange(3, 13), torch.arange(TOKENS - 10)])[None]  # the first goes on from another pack
    ours = use_sparse_flash(model, "own")(x, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation("eager")
    close(ours, model(x, position_ids=positions, use_cache=False).logits)


@torch.no_grad()
def test_assisted_generation_equals_generation_without_an_assistant():
    model, assistant, x = decoder_of("gemma3_text"), decoder_of("gemma3_text"), words(batch=1, tokens=13)
    for parameter in assistant.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(x)}
    try:
        as_oracle(model).generate(x, assistant_model=assistant, **options)
    except Exception as error:
        pytest.skip(f"Transformers itself fails here, with every attention: {error}")
    use_sparse_flash(model, PATTERNS["place"])
    assert torch.equal(model.generate(x, assistant_model=assistant, **options), model.generate(x, **options))


@torch.no_grad()
def test_a_prompt_that_the_model_sees_both_ways_is_kept_pair_by_pair():
    vision = transformers.SiglipVisionConfig(**SMALL, image_size=16, patch_size=8)
    config = transformers.PaliGemmaConfig(vision_config=vision, text_config=config_of("gemma"), image_token_index=80)
    model, x = made(transformers.PaliGemmaForConditionalGeneration, config), words().clamp(max=79)
    inputs = {"input_ids": x, "attention_mask": padded(x, "right")}
    inputs["token_type_ids"] = (torch.arange(TOKENS) >= 10).long().expand(2, -1)
    exist = inputs["attention_mask"].bool()
    masks = ({}, {"mask": "local(5)", "bidirectional": True})
    ours = [use_sparse_flash(model, **mask)(**inputs).logits[exist] for mask in masks]
    for found, pattern in zip(ours, (None, "local(5)"), strict=True):
        as_oracle(model.get_decoder(), model, pattern=pattern)
        close(found, model(**inputs).logits[exist])


REFUSED = {
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": tiny.WORDS},
    "falcon": {**SMALL, "vocab_size": tiny.WORDS},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": tiny.WORDS},
    "big_bird": tiny.ENCODER,
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": tiny.WORDS, "state_size": 4},
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_attention_cannot_be_switched_are_refused_and_stay_as_they_were(name):
    model = made(transformers.AutoModel, transformers.CONFIG_MAPPING[name](**REFUSED[name]))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"interface; call sparse_flash.attention in its code"):
        use_sparse_flash(model, "causal & local(4)")
    assert model.config._attn_implementation == before


def test_a_causal_layer_that_does_not_call_itself_one_sees_no_future_either():
    config, x = transformers.CLIPTextConfig(**SMALL, vocab_size=tiny.WORDS, eos_token_id=2), words()
    model = made(transformers.CLIPTextModel, config)
    with pytest.raises(ValueError, match=r"CLIPAttention must be within causal.*'causal & \(local\(4\)\)'"):
        use_sparse_flash(model, "local(4)")(x)
    use_sparse_flash(model, "local(4)", bidirectional=True)(x)
    use_sparse_flash(model, "causal & local(4)")(x)


@torch.no_grad()
def test_a_decoder_that_its_config_makes_bidirectional_takes_masks_that_look_ahead():
    config, x = config_of("llama"), words()
    config.is_causal = False
    model = made(transformers.LlamaModel, config)
    expected = model(x, use_cache=False)[0]
    close(use_sparse_flash(model)(x, use_cache=False)[0], expected)
    close(use_sparse_flash(model, "full")(x, use_cache=False)[0], expected)


class Shard:
    """Stands for a plan: some tokens of a sequence, each of which sees itself only."""

    q_len, mask, document_starts = TOKENS, sf.compile_mask("causal", TOKENS), torch.arange(TOKENS) == 0

    def __init__(self, *positions: int):
        self.positions, self.tokens = torch.tensor(positions), len(positions)

    def shard(self, x, dim, fill=0):
        return x.index_select(dim, self.positions)

    def attention(self, q, k, v, **options):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


MORE_DECODERS = ["cohere", "glm", "granitemoe", "nemotron", "olmo", "olmoe", "persimmon", "qwen2_moe", "qwen3_moe", "stablelm"]


@torch.no_grad()
@pytest.mark.parametrize("name", [*(name for name in tiny.DECODERS if name != "gemma3n_text"), *MORE_DECODERS])
def test_under_a_plan_each_token_of_a_causal_model_is_what_it_is_in_the_whole_sequence(name):
    more = tiny.EXPERTS | {"attn_logit_softcapping": None, "sliding_window": TOKENS, "attention_chunk_size": TOKENS}
    config = config_of(name, **more, use_sliding_window=True)
    model = made(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    if name == "nemotron" and not hasattr(import_module(type(model).__module__), "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("in Transformers 5.8 its layers do not call the attention interface")
    whole = use_sparse_flash(model, Shard(*range(TOKENS)))(words()).logits
    close(use_sparse_flash(model, Shard(3, 4, 9, 21))(words()).logits, whole[:, [3, 4, 9, 21]])


LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= tiny.EXPERTS
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4, "factor": 2.0}
LONGROPE["original_max_position_embeddings"] = 16
MIX_TOKENS = {
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "conv"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "hybrid"),
    "qwen3_next": (LINEAR, "linear_attention"),
    "minimax": (LINEAR, "linear_attention"),
    "phi3": ({"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}, "rotary embeddings of type 'longrope'"),
    "llama4_text": ({"floor_scale": 16}, "config.attn_temperature_tuning"),
}


@pytest.mark.parametrize("case", MIX_TOKENS)
def test_models_that_mix_tokens_outside_attention_take_no_plan(case):
    changes, found = MIX_TOKENS[case]
    config = config_of(case, **changes)
    model = made(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    with pytest.raises(ValueError, match=f"with {found}; pass masks instead of the plan"):
        use_sparse_flash(model, Shard(*range(TOKENS)))
    assert model.config._attn_implementation != "block_sparse"
