"""Models and trainers on each rank, against one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from on_ranks import difference, mesh, others_than
from pool import DEVICE
from tiny_lm import SETTINGS

import sparse_flash as sf
from examples.train_lm.parallel import World, build_world
from examples.train_lm.settings import check_settings
from examples.train_lm.train import Run
from sparse_flash.integrations.transformers import use_sparse_flash

TOKENS, WORDS = 500, 97
MASKS = ["causal & local(100)", "causal & (local(64) | sinks(8))"]


SIZES = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
# Of other models than Llama. The chunks of Llama 4 are longer than the sequence.
FAMILIES = {
    "gemma3_text": {"head_dim": 16, "sliding_window": TOKENS, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"num_key_value_heads": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": TOKENS},
    "mixtral": {"num_local_experts": 4},
    "phi3": {"pad_token_id": 0},
}


def config(name: str = "llama", **changes: object) -> transformers.PretrainedConfig:
    given = {**SIZES, "num_key_value_heads": 2, **FAMILIES.get(name, {}), **changes}
    return transformers.CONFIG_MAPPING[name](**given)


def causal_model(name: str, **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    given = config(name, **changes)
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(given)](given)


def words_of(batch: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (batch, TOKENS), generator=torch.Generator(DEVICE).manual_seed(1))


def of_transformers(name: str, labelled: int, compiled: bool = False) -> list[float]:
    """The loss, logits and gradients of parameters of a model with a mask for each layer. labelled: how many tokens
    have labels, from the first."""
    model = causal_model(name)
    whole = copy.deepcopy(model)
    words = words_of(2)
    labels = words.clone()
    labels[:, labelled:] = -100
    wanted = use_sparse_flash(whole, per_layer=MASKS)(words, labels=labels)
    wanted.loss.backward()
    kv_heads = model.config.num_attention_heads if name == "gpt2" else 2
    plans = sf.context_parallel(MASKS, TOKENS, mesh(), heads=4, kv_heads=kv_heads, block_size=64)
    use_sparse_flash(model, plans)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    out = run(words, labels=labels)
    out.loss.backward()
    loss = out.loss.detach().clone()
    for tensor in (loss, *(p.grad for p in model.parameters() if p.grad is not None)):
        dist.all_reduce(tensor)
    gradients = [[p.grad for p in one.parameters() if p.grad is not None] for one in (model, whole)]
    results = [loss, plans[0].unshard(out.logits, 1)], [wanted.loss.detach(), wanted.logits.detach()]
    return [difference(*results), difference(*gradients)]


def of_packed(compiled: bool) -> list[float]:
    """Packed documents whose positions restart."""
    starts = [0, 130, 320]
    words = words_of(1)
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise((*starts, TOKENS))])[None]
    wanted = use_sparse_flash(causal_model("llama"), "causal & local(100)")(words, labels=words, position_ids=positions)
    plan = sf.context_parallel(f"causal & local(100) & documents([0, 130, 320, {TOKENS}])", TOKENS, mesh(), block_size=64)
    model = use_sparse_flash(causal_model("llama"), plan)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    out = run(words, labels=words, position_ids=positions)
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    return [difference([loss, plan.unshard(out.logits, 1)], [wanted.loss.detach(), wanted.logits.detach()])]


def refused_by_transformers() -> list[tuple[str, str]]:
    """Models and calls that a plan does not fit are refused; see ``others_than``."""
    plans = sf.context_parallel(MASKS, TOKENS, mesh(), block_size=64)
    other = sf.context_parallel("causal", TOKENS, mesh(), block_size=64)
    of_future = sf.context_parallel("local(64)", TOKENS, mesh(), block_size=64)
    words, sequences = torch.zeros(1, TOKENS, dtype=torch.int64), torch.tensor([0, 60, TOKENS], dtype=torch.int32)
    window = transformers.MistralConfig(**config().to_diff_dict() | {"model_type": "mistral", "sliding_window": 100})
    window = transformers.MistralForCausalLM(window)
    model = use_sparse_flash(transformers.LlamaForCausalLM(config()), plans)
    tags = use_sparse_flash(transformers.LlamaForTokenClassification(config()), plans)
    mixtral, chunked = causal_model("mixtral", output_router_logits=True), causal_model("llama4_text", attention_chunk_size=100)
    restarted = torch.cat([torch.arange(130), torch.arange(TOKENS - 130)])[None]
    strangers = "layers [1] do not share their tokens with layer 0"
    dropping = use_sparse_flash(causal_model("llama", attention_dropout=0.1), plans).train()
    calls = [
        ("dropout, which config.attention_dropout", lambda: dropping(words)),
        ("labels cannot be used with a plan", lambda: tags(words, labels=words)),
        ("logits_to_keep cannot be used with a plan", lambda: model(words, labels=words, logits_to_keep=1)),
        ("cu_seq_lens_q cannot be used with a plan", lambda: model(words, cu_seq_lens_q=sequences)),
        ("config.output_router_logits cannot be used with a plan", lambda: use_sparse_flash(mixtral, plans)(words)),
        ("past_key_values cannot be used with a plan", lambda: model(words, past_key_values=transformers.DynamicCache())),
        ("attention_chunk_size", lambda: use_sparse_flash(chunked, plans)(words)),
        (
            "position_ids must restart only where a document of the plan's mask starts",
            lambda: model(words, position_ids=restarted),
        ),
        ("leave attention_mask out", lambda: model(words, attention_mask=(torch.arange(TOKENS) < 400)[None])),
        ("must hold the 500 tokens of the whole sequence; got shape (1, 499)", lambda: model(words[:, 1:])),
        ("the layer's own mask is local(100), and a plan cannot be joined", lambda: use_sparse_flash(window, plans)(words)),
        (strangers, lambda: use_sparse_flash(model, {0: other, 1: "causal"})),
        (strangers, lambda: use_sparse_flash(model, [plans[0], other])),
        ("the mask of layers [0, 1] must be within causal", lambda: use_sparse_flash(model, of_future)),
    ]
    return others_than(calls)


PACKED = {"packed": True, "masks": ("causal & local(40)", "causal"), "length": 192}


def trained(tokens: Path, folder: Path, context: int, sharding: str, until: int, **changes: object) -> list[float]:
    """The loss, norm of the gradients and held-out loss of each step in fp32, from the last checkpoint in the folder to another
    after step ``until``. context: how many ranks share a sequence; 0 for a process alone. changes: of the settings."""
    sizes = {"length": 384, "step_tokens": 1536, "micro_tokens": 384, "chunk": 384} | changes
    settings = check_settings(replace(SETTINGS, **sizes, steps=10, context=max(1, context)), dist.get_world_size())
    world = build_world(torch.device("cpu"), dist.get_world_size(), context) if context else World(torch.device("cpu"))
    folder.mkdir(exist_ok=True)
    run, rows = Run(settings, folder, tokens, world, sharding), []
    while run.progress.step < until:
        row = run.step()
        rows += row["loss"], row["gradient_norm"], run.evaluate(3)
    run.save()
    torch.use_deterministic_algorithms(False)
    return rows
