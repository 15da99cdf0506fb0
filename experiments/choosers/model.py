"""The model, and attention of its layers under any expression."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import sparse_flash as sf
from sparse_flash.masks.chooser import has_choosers

_NAME = "experiments_choosers"
DENSE = "causal"


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer, from a folder with a GGUF file or with what ``save_pretrained`` writes. No network is used."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not folder.is_dir():
        raise ValueError(f"the model must be a folder; got {folder}")
    source: dict[str, Any] = {"local_files_only": True, "trust_remote_code": True}  # a folder of train_lm brings its own file
    options: dict[str, Any] = {"dtype": dtype}
    if files := sorted(folder.glob("*.gguf")):
        from transformers import GgufConfig

        source["gguf_file"] = files[0].name
        options["quantization_config"] = GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    model = AutoModelForCausalLM.from_pretrained(folder, **source, **options)
    return model.to(device).eval(), tokenizer


class Layers:
    """The expressions under which a model's layers attend.

    specs: one for each layer. note: (layer, spec, q, k, v) -> out, called instead of attention if it is set. options: of attention
    in a precision, None for the model's own; on a CPU by its definition.
    """

    def __init__(self, model: PreTrainedModel, precision: str | None = None):
        backend = "reference" if precision and model.device.type == "cpu" else "auto"
        self.options: dict[str, Any] = {"precision": precision, "backend": backend}
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, lambda *_, **__: None)  # windows are whole: no padding
        model.set_attn_implementation(_NAME)
        attending = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "q_proj")]
        for module in attending:
            module.under = self
        self.specs = [DENSE] * len(attending)
        self.note: Callable[..., torch.Tensor] | None = None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        spec = self.specs[layer]
        return sf.attention(q, k, v, spec, **self.options) if self.note is None else self.note(layer, spec, q, k, v)


def _attend(module, query, key, value, attention_mask, scaling=None, **_):
    """Attends for Transformers. Returns (batch, tokens, heads, head_dim), None."""
    if scaling not in (None, query.shape[3] ** -0.5):
        raise ValueError(f"the model must scale logits by 1 / sqrt(head_dim); got {scaling}")
    out = module.under.attend(module.layer_idx, query, key, value)
    return out.transpose(1, 2).contiguous(), None


def mask_of(spec: str, q: torch.Tensor, k: torch.Tensor, block: int) -> sf.BlockMask:
    """The mask that attention under ``spec`` uses, for patterns in blocks of ``block``."""
    if has_choosers(spec):
        return sf.choose_blocks(spec, q, k)
    return sf.compile_mask(spec, q.shape[2], block_size=block, device=q.device)


def density(mask: sf.BlockMask, shape: torch.Size) -> torch.Tensor:
    """(heads,): which share of the causal blocks a mask keeps, a partial block counted as one. shape: of q."""
    kept, blocks = mask.kept_blocks().float().sum((-2, -1)), mask.grid.q_blocks
    return kept.expand(shape[:2]).mean(0) / (blocks * (blocks + 1) / 2)
