"""Writes a checkpoint as a Hugging Face model: weights, config, the file that defines it, the tokenizer."""

from pathlib import Path

import torch

from .data import END
from .hf_model import SparseLMConfig, SparseLMForCausalLM
from .model import Decoder
from .settings import SDPA, Choice, Settings

_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.out_proj.weight": "self_attn.o_proj.weight",
    "gate_proj.weight": "mlp.gate_proj.weight",
    "up_proj.weight": "mlp.up_proj.weight",
    "down_proj.weight": "mlp.down_proj.weight",
}


def config_of(settings: Settings, masks: list[str]) -> SparseLMConfig:
    """masks: of each layer."""
    shape = settings.shape
    return SparseLMConfig(
        sparse_flash_masks=masks,
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.mlp_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=settings.length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rotary_base},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )


def export(model: Decoder, settings: Settings, tokenizer: Path, target: Path):
    """Writes the folder ``target`` and returns the Hugging Face model. Raises FileExistsError if the folder is not empty."""
    from transformers import PreTrainedTokenizerFast

    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; pass another folder")
    if settings.log_length:
        raise ValueError("a model with log-length scaling cannot be exported: Hugging Face's layers have nothing like it")
    if chosen := next(filter(Choice.of, settings.masks), None):
        raise ValueError(f"a model with mask {chosen!r} cannot be exported: the exported file has masks alone")
    shape = settings.shape
    masks = ["causal" if (mask := settings.mask_of(layer)) == SDPA else mask for layer in range(shape.layers)]
    config = config_of(settings, masks)
    SparseLMConfig.register_for_auto_class()
    SparseLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    exported = SparseLMForCausalLM(config)
    exported.load_state_dict(_rename_weights(model.state_dict(), shape))
    exported.save_pretrained(target)
    if tokenizer.exists():
        PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token=END).save_pretrained(target)
    return exported


def _rename_weights(state: dict[str, torch.Tensor], shape) -> dict[str, torch.Tensor]:
    found = {
        "model.embed_tokens.weight": state["embed.weight"],
        "model.norm.weight": state["norm.weight"],
        "lm_head.weight": state["head.weight"],
    }
    for layer in range(shape.layers):
        for ours, theirs in _LAYER.items():
            found[f"model.layers.{layer}.{theirs}"] = state[f"blocks.{layer}.{ours}"]
        found[f"model.layers.{layer}.self_attn.q_norm.weight"] = state[f"blocks.{layer}.attention.gain"][:, None]
        found[f"model.layers.{layer}.self_attn.k_norm.weight"] = torch.ones(shape.head_dim)
    return found
