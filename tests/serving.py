"""Stand-ins for what docs/guides/serving.md calls of vLLM-Omni 0.30.0 and SGLang 0.5.23. Neither is installed where tests run."""

import enum
import pkgutil
from abc import ABC
from dataclasses import dataclass

import problems
import torch


class OmniNames(enum.Enum):
    TORCH_SDPA = "its own class"

    def get_class(self):
        return pkgutil.resolve_name(OVERRIDES[self])


OVERRIDES = {}


class SDPAImpl:
    def __init__(self, num_heads, head_size, softmax_scale, causal=False, **others):
        self.softmax_scale, self.causal = softmax_scale, causal

    def forward_cuda(self, query, key, value, attn_metadata=None):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        call = torch.nn.functional.scaled_dot_product_attention
        return call(q, k, v, is_causal=self.causal, scale=self.softmax_scale).transpose(1, 2)


@dataclass
class OmniMetadata:
    attn_mask: torch.Tensor | None = None
    video_layout: object = None


@dataclass
class VideoTokenLayout:
    prefix_len: int | None = None
    latent_grid: tuple[int, int, int] | None = None
    used_len: int | None = None


@dataclass
class StepMetadata:
    current_timestep: int


OMNI = "vllm_omni.diffusion.attention.backends"
SGLANG = "sglang.multimodal_gen.runtime"
PROVIDED = {
    f"{OMNI}.registry": {"DiffusionAttentionBackendEnum": OmniNames, "register_diffusion_backend": OVERRIDES.__setitem__},
    f"{OMNI}.sdpa": {"SDPABackend": type("SDPABackend", (), {}), "SDPAImpl": SDPAImpl},
    f"{OMNI}.abstract": {"AttentionMetadata": OmniMetadata, "VideoTokenLayout": VideoTokenLayout},
    f"{SGLANG}.layers.attention.backends.attention_backend": {
        "AttentionMetadata": StepMetadata,
        **{name: type(name, (ABC,), {}) for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder")},
    },
    f"{SGLANG}.platforms": {"AttentionBackendEnum": enum.Enum("AttentionBackendEnum", ["TORCH_SDPA", "BLOCK_SPARSE_ATTN"])},
    f"{SGLANG}.platforms.plugins": {
        "HookRegistry": type("HookRegistry", (), {"register": staticmethod(lambda target, hook, kind: None)}),
        "HookType": enum.Enum("HookType", ["AROUND"]),
    },
}


def provide(monkeypatch) -> None:
    """Makes them importable under the programs' names."""
    for name, contents in PROVIDED.items():
        problems.provide(monkeypatch, name, **contents)
