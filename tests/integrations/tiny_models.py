"""Transformers' architectures at tiny sizes with random weights, and their oracle: their own eager attention, to the pairs that
their own mask and a pattern both keep."""

import inspect
from functools import cache

import pytest
import torch

import sparse_flash as sf

transformers = pytest.importorskip("transformers")
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import and_masks, eager_mask  # noqa: E402

WORDS, TOKENS, LONGEST = 90, 24, 256
PATTERNS = {
    "distance": "causal & (local(5) | strided(11, block=1))",
    "place": "causal & (local(3) | sinks(2) | block_diagonal(block=7))",
    "strides": "causal & (strided(8, block=4) | global_tokens(3))",
}
# Pairs of positions that masks of a model under the oracle must keep, in addition to their own rule: see ``as_oracle``.
KEPT: dict = {}


def oracle_mask(mask_function, allow_is_bidirectional_skip=None, **arguments):
    """Transformers' own mask and the pattern, counted from each sequence's first token, as numbers that are added to scores."""
    if "pairs" in KEPT and (allow_is_bidirectional_skip is None or KEPT["everywhere"]):
        exist = arguments.get("attention_mask")
        first = torch.zeros(64, dtype=torch.int64) if exist is None else exist.int().argmax(1)
        mask_function = and_masks(mask_function, lambda b, head, q, kv: KEPT["pairs"][q - first[b], kv - first[b]])
    return eager_mask(mask_function=mask_function, **arguments)


def oracle_attention(module, query, key, value, attention_mask, **keywords):
    """``module.spec``, if there is one, keeps pairs of prompts: a BlockMask, or a spec whose choosers see q and k."""
    spec = getattr(module, "spec", None)
    if spec is not None and query.shape[2] > 64:
        if isinstance(spec, str):
            window = keywords.get("sliding_window")
            within = sf.parse(spec) & f"local({window})" if window else sf.parse(spec)
            spec = sf.choose_blocks(within, query, key, scale=keywords["scaling"])
        attention_mask = attention_mask.masked_fill(~spec.to_dense(), torch.finfo(query.dtype).min)
    attend = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    return attend(module, query, key, value, attention_mask, **keywords)


AttentionInterface.register("oracle", oracle_attention)
AttentionMaskInterface.register("oracle", oracle_mask)


def as_oracle(model, *parts, pattern: str | None = None, everywhere: bool = False, specs: list = ()):
    """Switches a model, and parts of it that have a choice of their own, to the oracle. pattern: what every causal mask keeps, or
    every mask. specs: of the model's layers, one after another."""
    KEPT.clear()
    if pattern is not None:
        KEPT.update(pairs=sf.compile_mask(pattern, LONGEST).to_dense(), everywhere=everywhere)
    for module in (model, *parts):
        module.set_attn_implementation("oracle")
    layers = [module for module in model.modules() if "ALL_ATTENTION_FUNCTIONS" in type(module).forward.__code__.co_names]
    for layer, spec in zip(layers, specs, strict=False):
        layer.spec = spec
    return model


SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 512}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "attention_dropout": 0.0}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
KINDS = ["sliding_attention", "full_attention"]
WINDOWED = {"layer_types": KINDS}
# Layers that take the keys of earlier ones; generation runs them for the last token of a prompt alone.
SHARED = {"layer_types": 2 * KINDS, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
ALTUP = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": 4 * [0.0], "vocab_size_per_layer_input": WORDS}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CHUNKED = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 7, "no_rope_layers": [1, 0]}
PLAIN = ("bitnet", "ernie4_5", "gemma", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi", "qwen3", "smollm3")
DECODERS = {
    **{name: {} for name in PLAIN},
    "cohere2": WINDOWED,
    "exaone4": WINDOWED,
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**WINDOWED, "query_pre_attn_scalar": 8},
    "gemma3n_text": {**SHARED, **ALTUP},
    "gemma4_text": SHARED,
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_oss": {**WINDOWED, **EXPERTS},
    "llama4_text": {**CHUNKED, **EXPERTS, "intermediate_size_mlp": 48},
    "mixtral": EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phi3": {"original_max_position_embeddings": 512},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
ENCODER = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
ENCODER |= {"num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TWO_WAYS = {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2}
ENCODERS = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "distilbert": {"vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {**ENCODER, "embedding_size": 32},
    "esm": {**ENCODER, "position_embedding_type": "rotary"},
    "modernbert": {**ENCODER, **TWO_WAYS},
}


def config_of(name: str, **more):
    kind = transformers.CONFIG_MAPPING[name]
    wanted = SIZES | DECODERS.get(name, {}) | more
    accepted = {"pad_token_id", "bos_token_id", "eos_token_id", *inspect.signature(kind).parameters, *kind.attribute_map}
    return kind(**{key: value for key, value in wanted.items() if key in accepted})


def made(kind, config):
    """The model, with weights large enough to make attention far from uniform."""
    torch.manual_seed(0)
    model = (kind.from_config(config) if kind is transformers.AutoModel else kind._from_config(config)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def decoder_of(name: str, **more):
    config = config_of(name, **more)
    return made(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def encoder_of(name: str):
    return made(transformers.AutoModel, transformers.CONFIG_MAPPING[name](**ENCODERS[name]))


@cache
def takes_static_caches(name: str, in_chunks: bool = False) -> bool:
    """Whether Transformers itself generates with them. Llama 4 does not before 5.23, and Gemma 4 not in 5.17 for prompts in chunks,
    with any attention."""
    model, x = as_oracle(decoder_of(name)), words(tokens=13)
    options = {"attention_mask": padded(x, "left"), "max_new_tokens": 7, "do_sample": False}
    try:
        found = model.generate(x, cache_implementation="static", prefill_chunk_size=3 if in_chunks else None, **options)
    except Exception:
        return False
    return torch.equal(found, model.generate(x, **options))


def words(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch, tokens), generator=torch.Generator().manual_seed(1))


def padded(x: torch.Tensor, side: str, count: int = 6) -> torch.Tensor:
    """Which tokens exist: all but some of the first sequence."""
    exist = torch.ones_like(x)
    exist[0, {"none": slice(0), "left": slice(count), "right": slice(-count, None), "holes": slice(5, 8)}[side]] = 0
    return exist


def close(ours, theirs, least: float = 0.0) -> None:
    """least: of the largest number, to which differences are compared."""
    torch.testing.assert_close(ours, theirs, atol=2e-4 * max(theirs.abs().max().item(), least), rtol=2e-4)


def outcome(model, inputs, seen=...) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a model returns, of tokens that are seen, and the gradients of its parameters."""
    model.zero_grad()
    found = model(**inputs)[0][seen]
    found.square().mean().backward()
    return found.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def close_outcomes(ours, theirs) -> None:
    close(ours[0], theirs[0])
    largest = max(gradient.abs().max().item() for gradient in theirs[1])
    for mine, right in zip(ours[1], theirs[1], strict=True):
        close(mine, right, least=1e-3 * largest)  # that of a key's bias is 0 but for rounding
