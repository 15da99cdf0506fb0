"""FlashAttention-3 and -4. Their kernels work on (batch, tokens, heads, head_dim), and documents on (tokens, heads, head_dim)."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from ..workload.changes import CHANGES
from ..workload.problem import Problem
from .base import Peer, why_missing


class FlashOptions(NamedTuple):
    """window: keys before the query's, or None. cu_seqlens: where documents start, and where the last one ends, int32. longest:
    tokens of the longest document. softcap: 0 for none. sinks: (heads,). Tensors are on the device."""

    causal: bool
    window: int | None = None
    cu_seqlens: torch.Tensor | None = None
    longest: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class FlashAttention(Peer):
    """Dense, causal, a causal window, and either in documents through the variable-length call; changes: what it has of
    ``workload.changes``."""

    order = (0, 2, 1, 3)
    changes: ClassVar[tuple[str, ...]] = ("", "varlen", "soft cap")

    def missing(self) -> str | None:
        """Why the library cannot be called, or None."""
        raise NotImplementedError

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: FlashOptions) -> torch.Tensor:
        """The library's call, in its layout."""
        raise NotImplementedError

    def refuses(self, problem: Problem) -> str | None:
        if problem.dropout_p or problem.kv_lens is not None:
            return "its calls have no dropout, and padding is not measured"
        if problem.change not in [CHANGES[name] for name in self.changes]:
            return "it has no such change of scores"
        if problem.terms is None:
            return "its block-sparse call is not measured; it has dense, causal, causal window and causal documents"
        return self.missing()

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        assert problem.terms is not None
        causal, window, bounds = problem.terms
        cap = problem.change.arguments(1, problem.q.device).get("softcap", 0.0)
        asked = FlashOptions(causal, window and window - 1, softcap=cap, sinks=problem.sinks)
        if bounds is not None:
            cu_seqlens, longest = problem.pack(bounds)
            of_documents = asked._replace(cu_seqlens=cu_seqlens, longest=longest)
            return lambda: problem.unpack(self.attend(*problem.packed_leaves(), of_documents))

        def run():
            q, k, v = (t.transpose(1, 2) for t in problem.leaves)
            return self.attend(q, k, v, asked).transpose(1, 2)

        return run


class FlashAttention4(FlashAttention):
    """The CuTe kernels of the flash-attention project (flash_attn.cute)."""

    changes = (*FlashAttention.changes, "sinks")

    def missing(self):
        return why_missing("flash_attn.cute")

    def attend(self, q, k, v, asked):
        import flash_attn.cute

        options: dict[str, Any] = {"causal": asked.causal, "softcap": asked.softcap, "learnable_sink": asked.sinks}
        if asked.window is not None:
            options["window_size"] = (asked.window, 0)
        if asked.cu_seqlens is None:
            return _first(flash_attn.cute.flash_attn_func(q, k, v, **options))
        options |= {"cu_seqlens_q": asked.cu_seqlens, "cu_seqlens_k": asked.cu_seqlens}
        options |= {"max_seqlen_q": asked.longest, "max_seqlen_k": asked.longest}
        return _first(flash_attn.cute.flash_attn_varlen_func(q, k, v, **options))


def _first(out):
    """out, also from versions that return (out, lse)."""
    return out[0] if isinstance(out, tuple) else out


class FlashAttention3(FlashAttention):
    """The CUDA C++ kernels for Hopper: flash_attn_interface of the flash-attention project, or the copy that xformers brings."""

    def missing(self):
        return _load_installed_fa3()

    def attend(self, q, k, v, asked):
        return _FA3Function.apply(q, k, v, asked)


def prepare_fa3_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable:
    """Returns FlashAttention-3's forward call for these tensors, (batch, heads, tokens, head_dim). options: of its operator.
    Raises RuntimeError if it cannot be called. e4m3 tensors go to the package fa3-fwd if it is installed, as xformers'
    library has no FP8 compiled in."""
    if q.dtype == torch.float8_e4m3fn and importlib.util.find_spec("fa3_fwd"):
        importlib.import_module("fa3_fwd._C")
        operators = torch.ops.fa3_fwd
    elif reason := _load_installed_fa3():
        raise RuntimeError(reason)
    else:
        operators = torch.ops.flash_attn_3
    options["softmax_scale"] = q.shape[3] ** -0.5
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: operators.fwd(q, k, v, **options)[0].transpose(1, 2)


def quantize(x: torch.Tensor, by_token: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(x in e4m3, float32 scales). x: (batch or pages, heads, tokens, head_dim). A scale for each head, or for each token of it."""
    stored = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[:3] if by_token else x.shape[:2], dtype=torch.float32, device=x.device)
    for source, target, scale in zip(x, stored, scales, strict=True):  # the float32 copy of all may not fit
        scale.copy_(source.float().abs().amax((-1,) if by_token else (-2, -1)) / 448)
        target.copy_(source.float() / (scale[..., None] if by_token else scale[..., None, None]))
    return stored, scales


@cache
def _load_installed_fa3() -> str | None:
    """Registers torch.ops.flash_attn_3; why it cannot, or None."""
    if importlib.util.find_spec("flash_attn_interface"):
        try:
            importlib.import_module("flash_attn_interface")
        except Exception as error:  # built for another torch
            return f"flash_attn_interface does not load: {error}"[:300]
        return None
    xformers = importlib.util.find_spec("xformers")
    folders = [Path(folder) for folder in (xformers.submodule_search_locations or ())] if xformers else []
    libraries = [path for folder in folders for path in (folder / "flash_attn_3").glob("_C*.so")]
    if not libraries:
        return "neither flash_attn_interface nor an xformers with flash_attn_3 is installed"
    try:
        torch.ops.load_library(str(libraries[0]))
    except Exception as error:
        return f"{libraries[0]} does not load: {error}"[:300]
    return None


class _FA3Function(torch.autograd.Function):
    """Calls the operators themselves, which both copies register, so that both are called alike."""

    @staticmethod
    def forward(ctx, q, k, v, asked: FlashOptions):
        ctx.options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": asked.causal, "softcap": asked.softcap}
        if asked.window is not None:
            ctx.options |= {"window_size_left": asked.window, "window_size_right": 0}
        if asked.cu_seqlens is not None:
            ctx.options |= {"cu_seqlens_q": asked.cu_seqlens, "cu_seqlens_k": asked.cu_seqlens}
            ctx.options |= {"max_seqlen_q": asked.longest, "max_seqlen_k": asked.longest}
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        torch.ops.flash_attn_3.bwd(dout.contiguous(), q, k, v, out, lse, *grads, deterministic=False, **ctx.options)
        return *grads, None
