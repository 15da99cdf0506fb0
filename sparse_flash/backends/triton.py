"""Triton kernels, on any GPU that Triton runs on; under TRITON_INTERPRET=1 on the CPU, slowly, for tests."""

from __future__ import annotations

import os
from functools import cache

import torch

from . import Call, missing_feature

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


@cache
def available() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton is not installed ({error})"
    if not torch.cuda.is_available() and not interpreted():
        return "there is no GPU (set TRITON_INTERPRET=1 before the first import to run the kernels on the CPU, slowly)"
    return None


@cache
def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU; it reads the variable when kernels are defined."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def supports(call: Call) -> str | None:
    reason = missing_feature(call) or available()
    if reason:
        return reason
    if call.dtype not in DTYPES:
        return f"it runs float16, bfloat16 and float32; got {call.dtype}"
    if call.head_dim > MAX_HEAD_DIM:
        return f"it runs head_dim up to {MAX_HEAD_DIM}; got {call.head_dim}"
    if call.device.type != "cuda" and not interpreted():
        return f"it runs on a GPU; q is on {call.device}"
    if interpreted() and call.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly; use float16 or float32"
    return None


def forward(q, k, v, mask, scale):
    from ..kernels.forward import attention_forward

    padded = (_padded(t) for t in (q, k, v))
    out, lse = attention_forward(*padded, mask, scale)
    return _like(q, out), lse


def backward(dout, dlse, q, k, v, out, lse, mask, scale, deterministic):
    # Two passes without atomics: repeatable whether asked to be or not.
    from ..kernels.backward import attention_backward

    dout, q_padded, k_padded, v_padded, out = (_padded(t) for t in (dout, q, k, v, out))
    grads = attention_backward(dout, dlse, q_padded, k_padded, v_padded, out, lse, mask, scale)
    return tuple(_like(tensor, grad) for tensor, grad in zip((q, k, v), grads))


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with rows of whole 16-byte pieces, which the copy engine needs; head dimensions that are multiples of 8
    are so already."""
    missing = -tensor.shape[3] % (16 // tensor.element_size())
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _like(tensor: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    return padded if padded.shape == tensor.shape else torch.empty_like(tensor).copy_(padded[..., : tensor.shape[3]])
