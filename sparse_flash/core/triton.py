"""Triton kernels, on any GPU that Triton supports; under TRITON_INTERPRET=1 on the CPU, slowly, for tests."""

import os
from functools import cache

import numpy
import torch

from ..compat.constants import constant_in_graphs
from ..kernels.common.layout import as_contiguous_rows, restore_out
from .caches import E4M3
from .description import Call
from .eight_bits import EIGHT_BITS
from .variant import LEARNED

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
FEW_QUERIES, MANY_KEYS = 64, 2048  # tokens


@constant_in_graphs  # torch.compile cannot trace the import
@cache
def why_unavailable() -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"triton is not installed ({error})"
    if torch.version.hip is not None and not is_interpreted():
        return "it needs an NVIDIA GPU; this torch is built for AMD's, on which its tiles were never run"
    if not torch.cuda.is_available() and not is_interpreted():
        return "there is no GPU (set TRITON_INTERPRET=1 before the first import to run the kernels on the CPU, slowly)"
    return _interpreter_refusal(triton.__version__, numpy.__version__) if is_interpreted() else None


def _interpreter_refusal(triton_version: str, numpy_version: str) -> str | None:
    """Triton 3.6's interpreter converts one-element arrays to integers, which NumPy 2.4 rejects."""
    series = [tuple(map(int, version.split(".")[:2])) for version in (triton_version, numpy_version)]
    if series[0] >= (3, 7) or series[1] < (2, 4):
        return None
    return (
        f"Triton {triton_version}'s interpreter fails with NumPy {numpy_version}: pip install 'numpy<2.4', or torch 2.12 or newer"
    )


def can_use_kernels(device: torch.device) -> bool:
    """Whether kernels choose blocks, make tables of documents, and merge and pack results. Elsewhere PyTorch operations do."""
    return device.type == "cuda" and why_unavailable() is None


@constant_in_graphs
@cache
def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU. Triton reads the variable when kernels are defined."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@constant_in_graphs  # torch.compile cannot trace the import
def _refusal(device: torch.device, e4m3: bool) -> str | None:
    """Why this GPU has no tile sizes, or none for e4m3 caches; None if it has."""
    from ..kernels.portable.configs import refusal

    return refusal(device, e4m3)


def supports(call: Call) -> str | None:
    reason = why_unavailable()
    if reason:
        return reason
    if EIGHT_BITS in call.features:
        return f"it does not support {EIGHT_BITS}"
    if call.dtype not in DTYPES:
        return f"it runs float16, bfloat16 and float32; got {call.dtype}"
    if (widest := max(call.head_dim, call.v_head_dim)) > MAX_HEAD_DIM:
        return f"it runs head_dim up to {MAX_HEAD_DIM}; got {widest}"
    if call.device.type != "cuda" and not is_interpreted():
        return f"it runs on a GPU; q is on {call.device}"
    if not is_interpreted() and (reason := _refusal(call.device, call.e4m3)):
        return reason
    if call.e4m3 and (call.head_dim % 2 or call.v_head_dim % 2):
        return f"it reads e4m3 caches of an even head_dim; got {call.head_dim} and {call.v_head_dim} of v"
    if is_interpreted() and call.dtype == torch.bfloat16 and not call.e4m3:
        return "Triton's interpreter computes bfloat16 products wrongly; use float16 or float32"
    if call.score_mod is not None and call.score_mod.triton is None:
        return f"it does not support the score_mod {call.score_mod.name}, which has no triton function"
    if call.deterministic and LEARNED in call.features:
        return "it adds up the gradient of rel_bias in an order that varies, and this call is deterministic"
    return None


def forward(call):
    if decodes(call):
        return _decode(*call[:3], call.table, call.scale, sinks=call.sinks, at_end=False)
    from ..kernels.portable.forward import attention_forward

    return attention_forward(call)


def backward(call, dout, dlse, out, lse):
    # Two passes without atomics, except for the gradient of rel_bias: repeatable whether requested or not.
    from ..kernels.portable.backward import attention_backward

    return attention_backward(call, dout, dlse, out, lse)


def decode(q, k, v, mask, kv_lens, block_table, causal, scale, k_scale, v_scale, kv_starts):
    kv_lens, kv_starts, block_table = (t if t is None else t.contiguous() for t in (kv_lens, kv_starts, block_table))
    options = {"kv_lens": kv_lens, "kv_starts": kv_starts, "block_table": block_table, "k_scale": k_scale, "v_scale": v_scale}
    return _decode(q, k, v, mask, scale, **options, causal=causal)


def _decode(q, k, v, mask, scale, **options):
    from ..kernels.portable.decode import attention_decode

    ready = [as_contiguous_rows(t, in_pairs=k.dtype == E4M3) for t in (q, k, v)]
    out, lse = attention_decode(*ready, mask, scale, **options)
    return restore_out(out, ready[0], q, v), lse


def decodes(call) -> bool:
    """Whether the decoding kernel runs a forward pass: one program per head would leave multiprocessors idle."""
    q, k = call.q, call.k
    if q.shape[2] > FEW_QUERIES or k.shape[2] < MANY_KEYS or call.rest is not None:
        return False
    from ..kernels.launch.launch import multiprocessors

    return q.shape[0] * q.shape[1] < multiprocessors(q.device)
