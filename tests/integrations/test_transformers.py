"""Transformers' models under a mask equal PyTorch's attention with the mask's pairs."""

import copy
import pickle
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_flash as sf

transformers = pytest.importorskip("transformers")
from transformers.masking_utils import and_masks, causal_mask_function  # noqa: E402

from sparse_flash.integrations.transformers import use_sparse_flash  # noqa: E402
from sparse_flash.integrations.transformers.model_mask import create_model_mask  # noqa: E402

TOKENS, WORDS = 150, 97
SIZES = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=96, num_key_value_heads=2),
    "mistral": transformers.MistralConfig(**SIZES, intermediate_size=96, num_key_value_heads=2, sliding_window=None),
    "mistral, window": transformers.MistralConfig(**SIZES, intermediate_size=96, num_key_value_heads=1, sliding_window=33),
    "gpt2": transformers.GPT2Config(**SIZES, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    # v has another head_dim than q and k.
    "deepseek": transformers.DeepseekV3Config(
        **SIZES,
        intermediate_size=96,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,
    ),
}
PATTERN = "causal & (local(20) | sinks(2))"


def twins(name: str, layers: int = 2):
    """Two models with the same weights, the second with PyTorch's attention. Each layer adds a second to a compilation."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = layers
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    dense = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    dense.load_state_dict(model.state_dict())
    return model, dense


def words(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, WORDS, (batch, tokens), generator=torch.Generator().manual_seed(1))


def pairs(pattern: str, batch: int, tokens: int) -> torch.Tensor:
    return sf.compile_mask(pattern, tokens).to_dense().expand(batch, 1, tokens, tokens)


def within(name: str, pattern: str) -> str:
    window = getattr(CONFIGS[name], "sliding_window", None)
    return f"({pattern}) & local({window})" if window else pattern


def assert_same_gradients(model, loss, other, other_loss, atol: float = 1e-6) -> None:
    loss.backward()
    other_loss.backward()
    for (key, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=atol, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


def dense_by_layer(dense, kept: list, x) -> torch.Tensor:
    """The logits of PyTorch's attention to the pairs of each layer."""
    for layer, one in zip(dense.model.layers, kept, strict=True):
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, one=one: (args, kwargs | {"attention_mask": one}), with_kwargs=True
        )
    return dense(x).logits


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_dense_attention_with_the_masks_pairs(name, side):
    model, dense = twins(name)
    assert use_sparse_flash(model, PATTERN) is model
    model.train()
    dense.train()
    x = words()
    padding = torch.ones_like(x)
    padding[0, {"none": slice(0), "left": slice(40), "right": slice(110, None)}[side]] = 0
    # No existing token precedes the first one, so nothing predicts it.
    labels = x.masked_fill(padding.cumsum(1) * padding <= 1, -100)
    # Adds the diagonal, because PyTorch would return NaN for rows that keep nothing.
    kept = pairs(within(name, PATTERN), *x.shape).clone()
    if side == "left":
        kept[0] = kept[0].roll((40, 40), (1, 2))
    kept = kept & padding.bool()[:, None, None] | torch.eye(TOKENS, dtype=torch.bool)
    given = {"labels": labels, "position_ids": (padding.cumsum(1) - 1).clamp(min=0)}
    ours, theirs = model(x, attention_mask=None if side == "none" else padding, **given), dense(x, attention_mask=kept, **given)
    exist = padding.bool()
    torch.testing.assert_close(ours.logits[exist], theirs.logits[exist], atol=1e-5, rtol=1e-4)
    assert_same_gradients(model, ours.loss, dense, theirs.loss)


@pytest.mark.parametrize(
    "masks",
    [
        {"per_layer": ["causal", "causal & local(9)"]},
        {"per_layer": (None, "causal & local(9)")},
        {"mask": {1: "causal & local(9)"}},
        {"mask": {1: sf.causal() & sf.local(9)}},
    ],
)
def test_each_layer_may_have_its_own_mask(masks):
    model, dense = twins("llama")
    x = words()
    ours = use_sparse_flash(model, **masks)(x).logits
    kept = [pairs(mask, *x.shape) for mask in ("causal", "causal & local(9)")]
    torch.testing.assert_close(ours, dense_by_layer(dense, kept, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_a_mask_keeps_its_own(name):
    model, dense = twins(name)
    x = words()
    for given in ({}, {"mask": None}, {"mask": "own"}, {"per_layer": [None, "own"]}, {"mask": {0: None}}):
        torch.testing.assert_close(use_sparse_flash(model, **given)(x).logits, dense(x).logits, atol=1e-5, rtol=1e-4)


def of_heads(*patterns: str) -> sf.BlockMask:
    return sf.BlockMask.per_head(list(patterns), TOKENS, block_size=16)


@pytest.mark.parametrize(
    "given",
    [
        {"mask": "local(64)"},
        {"mask": "full"},
        {"mask": "causal | sinks(3)"},
        {"mask": "~causal"},
        {"mask": sf.from_mask_fn(lambda q, kv: (q - kv) % 300 != 299)},
        {"mask": sf.longformer(5)},
        {"mask": sf.compile_mask("local(2)", TOKENS, block_size=16)},
        {"mask": sf.compile_mask("causal | block_diagonal(block=32)", TOKENS, block_size=16)},
        {"mask": of_heads("causal", "causal", "causal", "causal | sinks(100)")},
        {"mask": {1: "local(9)"}},
        {"per_layer": ["causal", "local(9)"]},
    ],
)
def test_a_mask_that_lets_a_decoder_look_ahead_must_be_asked_for_by_name(given):
    model, dense = twins("llama")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"must be within causal.*'causal & .*bidirectional=True"):
        use_sparse_flash(model, **given)
    assert model.config._attn_implementation == before
    x = words()
    ours = use_sparse_flash(model, **given, bidirectional=True)(x).logits
    last = given["mask"] if not isinstance(given.get("mask", {}), dict) else "local(9)"
    masks = ["causal" if last == "local(9)" else last, last]
    masks = [mask if isinstance(mask, sf.BlockMask) else sf.compile_mask(mask, TOKENS) for mask in masks]
    kept = [mask.to_dense().expand(2, 4, -1, -1) for mask in masks]
    torch.testing.assert_close(ours, dense_by_layer(dense, kept, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "mask",
    [
        sf.compile_mask("causal & (local(20) | sinks(2))", TOKENS, block_size=16),
        sf.compile_mask("causal", TOKENS, block_size=64),
        of_heads("causal", "causal & local(9)", "causal & strided(7)", "causal & sinks(2)"),
        "(causal & local(9)) | (causal & sinks(2))",
        "causal & ~local(3) & full",
    ],
)
def test_a_mask_within_causal_needs_no_such_name(mask):
    use_sparse_flash(twins("llama")[0], mask)


def test_the_masks_of_a_model_are_those_of_its_layers_and_make_another_model_alike():
    model, other = twins("llama")
    table = sf.compile_mask("causal & local(9)", TOKENS)
    use_sparse_flash(model, {1: table})
    assert sf.masks_of(torch.nn.DataParallel(model)) == {0: "own", 1: table}
    model.cpu()  # DataParallel moved it to a GPU, if there is one
    use_sparse_flash(model, per_layer=[sf.sinks(2) & "causal", None])
    assert sf.masks_of(model) == {0: "causal & sinks(2)", 1: "own"}
    x = words()
    torch.testing.assert_close(use_sparse_flash(other, sf.masks_of(model))(x).logits, model(x).logits)
    model.set_attn_implementation("sdpa")
    with pytest.raises(
        ValueError, match=r"model must be one that use_sparse_flash switched; got LlamaForCausalLM, which runs 'sdpa'"
    ):
        sf.masks_of(model)


def test_a_printed_model_shows_the_mask_of_each_layer_as_long_as_it_runs():
    model, _ = twins("llama")
    before = str(model)
    use_sparse_flash(model, {0: "causal & local(9)"})
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert str(one).count("(self_attn): LlamaAttention(\n") == 2
        assert "sparse_flash mask: causal & local(9)\n" in str(one) and "sparse_flash mask: own\n" in str(one)
    use_sparse_flash(model, "causal & sinks(3)")
    assert str(model).count("sparse_flash mask: causal & sinks(3)\n") == 1 and "(0-1): 2 x LlamaDecoderLayer" in str(model)
    model.set_attn_implementation("sdpa")
    assert str(model) == before


def test_a_compiled_model_takes_many_tokens_beside_a_static_cache():
    torch._dynamo.reset()
    model = use_sparse_flash(twins("llama", layers=1)[0].eval(), "causal & local(100)")
    compiled, x = torch.compile(model, backend="eager"), words()
    cache = transformers.StaticCache(model.config, max_cache_len=TOKENS + 30)
    with torch.no_grad():
        found = [compiled(part, past_key_values=cache).logits for part in x.split(75, 1)]
        torch.testing.assert_close(torch.cat(found, 1), model(x).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("padding", [0, 13])
def test_a_compiled_model_generates_from_a_static_cache_in_one_graph_for_the_prompt_and_one_for_each_step(padding):
    model, _ = twins("llama")
    use_sparse_flash(model, PATTERN).eval()
    x = words()
    exist = torch.ones_like(x)
    exist[0, :padding] = 0
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "attention_mask": exist}
    expected = model.generate(x, pad_token_id=0, **options)
    model.forward = torch.compile(model.forward, backend=counted, fullgraph=True)
    assert torch.equal(model.generate(x, pad_token_id=0, **options), expected)
    assert len(graphs) == 2


def test_what_patterns_cannot_say_is_kept_pair_by_pair():
    model, dense = twins("llama")
    use_sparse_flash(model, PATTERN)
    x = words()
    kept = pairs(PATTERN, *x.shape)
    holes = torch.ones_like(x)
    holes[0, 5:9] = 0
    exist = holes.bool()
    with_holes = kept & exist[:, None, None] | torch.eye(TOKENS, dtype=torch.bool)
    ours, theirs = model(x, attention_mask=holes).logits, dense(x, attention_mask=with_holes).logits
    torch.testing.assert_close(ours[exist], theirs[exist], atol=1e-5, rtol=1e-4)

    some = torch.rand(2, 4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.5
    some |= torch.eye(TOKENS, dtype=torch.bool)
    expected = dense(x, attention_mask=some & kept).logits
    additive = torch.where(some, 0.0, torch.finfo(torch.float32).min)
    for given in (some, additive, additive.masked_fill(~some, float("-inf"))):
        torch.testing.assert_close(model(x, attention_mask=given).logits, expected, atol=1e-5, rtol=1e-4)
    shared = some[:1, :1]
    expected = dense(x, attention_mask=shared).logits
    torch.testing.assert_close(use_sparse_flash(model, "own")(x, attention_mask=shared).logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_a_mask_of_pairs_is_not_remembered_past_a_write_to_it(mode):
    model, dense = twins("llama")
    use_sparse_flash(model)
    x = words()
    with mode():
        kept = pairs("causal", *x.shape).clone()
        for _ in range(2):
            theirs = dense(x, attention_mask=kept).logits
            torch.testing.assert_close(model(x, attention_mask=kept).logits, theirs, atol=1e-5, rtol=1e-4)
            kept &= pairs("local(9)", *x.shape)


def test_a_mask_function_without_code_of_its_own_is_kept_pair_by_pair():
    def near(batch, head, query, key, distance):
        return (query - key).abs() < distance

    sizes = {"batch_size": 1, "q_length": TOKENS, "kv_length": TOKENS, "q_offset": 0, "kv_offset": 0}
    both = and_masks(causal_mask_function, partial(near, distance=5))
    made = create_model_mask(**sizes, mask_function=both, attention_mask=None, device="cpu")
    assert torch.equal(made.kept_pairs, pairs("causal & local(5)", 1, TOKENS))


STARTS = {"alike": [[0, 50, 100], [0, 50, 100]], "each its own": [[0, 7], [0, 131]]}


def packed_words(starts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[int, slice]]]:
    """(tokens, position_ids, cu_seqlens of all rows end to end, (row, place) of each sequence)"""
    x = words()
    bounds = [[*row, TOKENS] for row in starts]
    places = [(row, slice(a, b)) for row, edges in enumerate(bounds) for a, b in pairwise(edges)]
    positions = torch.zeros_like(x)
    for row, place in places:
        positions[row, place] = torch.arange(place.stop - place.start)
    ends = [row * TOKENS + place.stop for row, place in places]
    return x, positions, torch.tensor([0, *ends], dtype=torch.int32), places


# Each case compiles a model for four seconds: a model with each way to give starts, once each.
OF_COMPILED_PACKED = [
    ("llama", "alike", "position_ids", "compiled"),
    ("mistral, window", "alike", "cu_seq_lens", "compiled"),
    ("llama", "each its own", "cu_seq_lens", "checkpointed"),
    ("mistral, window", "each its own", "position_ids", "checkpointed"),
]
OF_PACKED = [*product(["llama", "mistral, window"], STARTS, ["position_ids", "cu_seq_lens"], [""]), *OF_COMPILED_PACKED]


@pytest.mark.parametrize("name, starts, given, compiled", OF_PACKED)
def test_packed_sequences_are_what_each_is_alone(name, starts, given, compiled):
    torch._dynamo.reset()
    model, _ = twins(name, layers=1 if compiled else 2)
    use_sparse_flash(model, PATTERN, packed=given == "position_ids")
    x, positions, ends, places = packed_words(STARTS[starts])
    options = {"position_ids": positions, "use_cache": False}
    if given == "cu_seq_lens":
        options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": TOKENS, "max_length_k": TOKENS}
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    if compiled == "checkpointed":
        model.train().gradient_checkpointing_enable()
    logits = call(x, **options).logits
    logits.square().mean().backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    model.zero_grad()
    alone = [model(x[row : row + 1, place], use_cache=False).logits[0] for row, place in places]
    for (row, place), one in zip(places, alone, strict=True):
        torch.testing.assert_close(logits[row, place], one, atol=1e-5, rtol=1e-4)
    (sum(one.square().sum() for one in alone) / logits.numel()).backward()
    torch.testing.assert_close(gradient, model.model.layers[0].self_attn.k_proj.weight.grad, atol=1e-6, rtol=1e-3)


def test_packed_sequences_with_soft_caps_are_refused_in_compiled_code():
    model, (x, _, ends, _) = own_scores("gemma2")[0].eval(), packed_words(STARTS["each its own"])
    with pytest.raises(Exception, match="packed sequences with a soft cap are not supported in compiled code"):
        torch.compile(model, backend="eager", fullgraph=True)(x, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False)


def test_masks_that_cannot_be_carried_are_refused_with_the_way_out():
    model, dense = twins("llama")
    use_sparse_flash(model, PATTERN)
    x = words()
    table = use_sparse_flash(model, sf.compile_mask("causal", TOKENS))
    with pytest.raises(ValueError, match=r"compiled for q_len=150, kv_len=150;.*pass the pattern itself"):
        table.generate(x, max_new_tokens=3, pad_token_id=0)
    with pytest.raises(ValueError, match=r"use_sparse_flash.*made of one config.*copy.deepcopy"):
        dense.set_attn_implementation("block_sparse")
        dense(x)


# Masks that depend on positions, not only on distances.
OF_POSITIONS = [
    PATTERN,
    "causal & global_tokens(3)",
    "causal & block_diagonal(16)",
    "causal & strided(8, block=4)",
    "per_head([causal, causal & sinks(2), causal & local(5), causal & prefix(9)])",
]


@torch.no_grad()
@pytest.mark.parametrize("mask", OF_POSITIONS)
def test_positions_count_from_each_sequences_first_token_wherever_padding_stands(mask):
    model, _ = twins("llama", layers=1)
    use_sparse_flash(model, mask).eval()
    x = words(3, 90)
    places = [slice(20, 90), slice(0, 77), slice(7, 80)]
    padding = torch.zeros_like(x)
    for row, place in enumerate(places):
        padding[row, place] = 1
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    alone = [model(x[row : row + 1, place]).logits[0] for row, place in enumerate(places)]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for called in (model, compiled):
        together = called(x, attention_mask=padding, position_ids=positions, use_cache=False).logits
        for row, place in enumerate(places):
            torch.testing.assert_close(together[row, place], alone[row], atol=1e-5, rtol=1e-4)
    # A prompt in two calls, the second of more queries than attention_decode takes.
    for first in (15, 50):
        cache = model(x[:, :first], attention_mask=padding[:, :first], position_ids=positions[:, :first]).past_key_values
        rest = {"position_ids": positions[:, first:], "past_key_values": cache}
        together = model(x[:, first:], attention_mask=padding, **rest).logits
        for row, place in enumerate(places):
            later = slice(max(place.start, first), place.stop)
            expected = alone[row][later.start - place.start :]
            torch.testing.assert_close(together[row, later.start - first : later.stop - first], expected, atol=1e-5, rtol=1e-4)


def test_attention_dropout_is_carried_in_training_alone():
    config = copy.deepcopy(CONFIGS["gpt2"])
    config.attn_pdrop = 0.3
    torch.manual_seed(0)
    model = use_sparse_flash(transformers.AutoModelForCausalLM.from_config(config))
    x = words()
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(model.train()(x).logits)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    assert torch.equal(model.eval()(x).logits, model(x).logits)


# Models that do more to their scores than scale them.
OWN_SCORES = {
    "gemma2": (transformers.Gemma2Config, {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gpt-oss": (transformers.GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def own_scores(name: str):
    """Two models with the same weights, the second eager. Both are causal, and the first layer has a window. Queries, keys and
    sinks are large, so scores reach the soft cap."""
    kind, options = OWN_SCORES[name]
    sizes = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 33, "pad_token_id": 0}
    config = kind(**sizes, **options, layer_types=["sliding_attention", "full_attention"])
    torch.manual_seed(0)
    model, eager = (
        transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager") for _ in range(2)
    )
    for parameter, value in model.named_parameters():
        if "q_proj" in parameter or "k_proj" in parameter:
            value.data *= 30
        if "sinks" in parameter:
            value.data = torch.randn_like(value) + 1
    eager.load_state_dict(model.state_dict())
    return use_sparse_flash(model, "causal"), eager


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OWN_SCORES)
def test_soft_caps_and_sinks_are_carried_forward_and_backward(name, padded):
    model, eager = own_scores(name)
    model.train()
    eager.train()
    x = words()
    exist = torch.ones_like(x)
    if padded:
        exist[0, 110:] = 0
    labels = x.masked_fill(exist == 0, -100)
    ours, theirs = (one(x, labels=labels, attention_mask=exist, use_cache=False) for one in (model, eager))
    torch.testing.assert_close(ours.logits[exist.bool()], theirs.logits[exist.bool()], atol=1e-4, rtol=1e-4)
    assert_same_gradients(model, ours.loss, eager, theirs.loss, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"output_attentions": True},
        {"position_bias": torch.zeros(1, 4, 5, 5)},
        {"indices": torch.zeros(1)},
        {"of_a_later_version": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_keywords_that_are_not_carried_are_refused_by_name(options):
    layer = use_sparse_flash(twins("llama")[0], PATTERN).model.layers[0].self_attn
    q = torch.randn(1, 4, 5, 16)
    attend = transformers.AttentionInterface()["block_sparse"]
    with pytest.raises(ValueError, match=f"passes {', '.join(options)} to its attention"):
        attend(layer, q, q, q, None, **options)
    attend(layer, q, q, q, None, is_causal=True, position_ids=None, output_attentions=False, use_cache=True, labels=torch.zeros(1))


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def with_peft(model):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))  # LoRA begins with zeros


WRAPPERS = {
    "DataParallel": torch.nn.DataParallel,
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "compiled": partial(torch.compile, backend="eager"),
    "PEFT": with_peft,
    "a module with a head": lambda model: torch.nn.Sequential(model),
    "several": lambda model: torch.compile(torch.nn.DataParallel(with_peft(model)), backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_is_switched_inside_and_returned_wrapped(name, one_process):
    model, x = copy.deepcopy(twins("llama")[0]), words()  # DataParallel moves it to GPUs
    expected = use_sparse_flash(copy.deepcopy(model), PATTERN)(x).logits
    wrapped = WRAPPERS[name](model)
    assert use_sparse_flash(wrapped, PATTERN) is wrapped
    torch.testing.assert_close(wrapped(x).logits, expected, check_device=False)


def test_a_module_that_does_not_hold_one_model_is_refused():
    both = torch.nn.ModuleList(twins("llama"))
    video, pipeline = type("Video", (torch.nn.Module,), {"__module__": "diffusers.models"})(), type("Pipeline", (), {})()
    type(pipeline).__module__ = "diffusers.pipelines"
    for one in (video, torch.nn.Sequential(video), pipeline):
        with pytest.raises(TypeError, match=r"call use_sparse_flash\(pipe.transformer, spec\) of .*integrations.diffusers"):
            use_sparse_flash(one)
    with pytest.raises(TypeError, match=r"got ModuleList, which holds LlamaForCausalLM and LlamaForCausalLM; pass the one"):
        use_sparse_flash(both, PATTERN)


def test_trainer_trains_a_switched_model_as_the_models_own_attention(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate; the extra transformers brings it")
    model, dense = twins("llama")
    before = copy.deepcopy(model.state_dict())
    use_sparse_flash(model, "causal")
    rows = [{"input_ids": row, "labels": row} for row in words(batch=4)]
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.1, "report_to": "none"}
    for trained in (model, dense):
        arguments = transformers.TrainingArguments(tmp_path, save_strategy="no", use_cpu=True, **settings)
        transformers.Trainer(trained, arguments, train_dataset=rows).train()
    after, expected = model.state_dict(), dense.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in after if "self_attn" in name)
    torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "name, checkpointing, padding", [("llama", False, 1 / 4), ("mistral, window", True, 1 / 4), ("llama", True, None)], ids=str
)
def test_a_compiled_model_trains_on_any_length_in_one_graph(name, checkpointing, padding):
    torch._dynamo.reset()
    model, _ = twins(name, layers=1)
    use_sparse_flash(model, PATTERN).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)

    def gradient(call, x):
        model.zero_grad()
        exist = torch.ones_like(x)
        exist[0, : int(x.shape[1] * (padding or 0))] = 0
        options = {"labels": x.masked_fill(exist == 0, -100), "attention_mask": None if padding is None else exist}
        call(x, use_cache=False, **options).loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    for tokens in (30, 41, 150):
        x = words(tokens=tokens)
        torch.testing.assert_close(gradient(compiled, x), gradient(model, x), atol=1e-6, rtol=1e-3)
    assert counter.frame_count <= 3


def test_a_compiled_model_fails_where_it_would_have_to_look_at_values():
    torch._dynamo.reset()
    model, _ = twins("mistral, window", layers=1)
    compiled = torch.compile(use_sparse_flash(model, PATTERN).eval(), fullgraph=True, backend="eager")
    x = words(tokens=60)
    padded, holes = torch.ones_like(x), torch.ones_like(x)
    padded[0, :5], holes[0, 5:9] = 0, 0
    with torch.no_grad():
        for options in ({}, {"attention_mask": padded}):
            torch.testing.assert_close(
                compiled(x, **options).logits[:, 5:], model(x, **options).logits[:, 5:], atol=1e-5, rtol=1e-4
            )
        with pytest.raises(RuntimeError, match="zeros between its ones"):
            compiled(x, attention_mask=holes)
        packed = torch.arange(60)[None].remainder(25)
        cached = transformers.DynamicCache(config=model.config)
        for options in ({}, {"attention_mask": torch.ones_like(x)}, {"past_key_values": cached, "use_cache": True}):
            with pytest.raises(RuntimeError, match=r"packed sequences.*cu_seq_lens_q.*packed=True"):
                compiled(x, position_ids=packed, **{"use_cache": False, **options})


def test_a_model_that_computes_with_its_mask_is_refused_with_the_way_out():
    model, _ = twins("llama")
    use_sparse_flash(model, PATTERN)
    computes = [lambda mask: torch.zeros(1) + mask, lambda mask: mask.masked_fill(mask, 0), lambda mask: mask[:, :, :3]]
    for compute in computes:
        adds = lambda module, args, kwargs, compute=compute: (args, {"attention_mask": compute(kwargs["attention_mask"])})  # noqa: E731
        hook = model.model.layers[0].self_attn.register_forward_pre_hook(adds, with_kwargs=True)
        with pytest.raises((ValueError, AttributeError), match=r"computes with its attention mask.*set_attn_implementation"):
            model(words())
        hook.remove()


def test_a_flex_attention_mask_is_taken_as_the_block_mask_that_it_stands_for():
    model, dense = twins("llama")
    keep = lambda b, h, q, kv: (q >= kv) & (q - kv < 20)  # noqa: E731
    flex = torch.nn.attention.flex_attention.create_block_mask(keep, None, None, TOKENS, TOKENS, device="cpu")
    x = words()
    kept = pairs("causal & local(20)", *x.shape)
    torch.testing.assert_close(use_sparse_flash(model, flex)(x).logits, dense(x, attention_mask=kept).logits, atol=1e-5, rtol=1e-4)
