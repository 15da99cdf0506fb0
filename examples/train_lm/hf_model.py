"""The decoder as a Hugging Face model: Qwen3 whose query norm has a gain for each head.

This file is copied next to the exported weights: ``AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`` finds it
there. It imports nothing but torch and transformers; the masks of the layers are in ``config.sparse_flash_masks``:

    use_sparse_flash(model, per_layer=model.config.sparse_flash_masks)
"""

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM


class SparseLMConfig(Qwen3Config):
    model_type = "sparse_lm"

    def __init__(self, sparse_flash_masks=None, **options):
        self.sparse_flash_masks = sparse_flash_masks
        super().__init__(**options)


class HeadNorm(nn.Module):
    """RMSNorm over head_dim, times a gain for each head. (batch, tokens, heads, head_dim) -> the same."""

    def __init__(self, heads: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(heads, 1)), eps

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight.to(x.dtype)


class SparseLMForCausalLM(Qwen3ForCausalLM):
    config_class = SparseLMConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.q_norm = HeadNorm(config.num_attention_heads, config.rms_norm_eps)
        self.post_init()
