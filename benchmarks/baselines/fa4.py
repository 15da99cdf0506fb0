"""FlashAttention-4: the CuTe kernels of the flash-attention project (flash_attn.cute), which work on
(batch, tokens, heads, head_dim), or (tokens of all documents, heads, head_dim) for documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from sparse_flash.masks.pattern import And, Pattern
from sparse_flash.patterns import documents, local

from ..workload.problem import Problem
from .base import Peer


@dataclass(frozen=True)
class FlashAttention4(Peer):
    """Dense, causal, a causal window, and causal attention in documents through its variable-length call."""

    deterministic: bool = False
    order = (0, 2, 1, 3)

    def refuses(self, problem: Problem) -> str | None:
        if problem.dropout_p or problem.kv_lens is not None:
            return "its calls have no dropout, and padding is not measured"
        inner = _inside_causal(problem)
        if problem.name not in ("full", "causal") and not isinstance(inner, (local, documents)):
            return "its block-sparse call is not measured; it has dense, causal, causal window and causal documents"
        if self.deterministic and inner is not None:
            return "its deterministic backward pass is measured dense and causal"
        if isinstance(inner, documents) and inner.cu_seqlens[-1] != problem.q.shape[2]:
            return f"its documents must end at the last of {problem.q.shape[2]} tokens; these end at {inner.cu_seqlens[-1]}"
        try:
            import flash_attn.cute  # noqa: F401
        except ImportError as error:
            return f"flash_attn.cute is not installed ({error})"
        return None

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        inner = _inside_causal(problem)
        if isinstance(inner, documents):
            return _documents(problem, inner.cu_seqlens)
        import flash_attn.cute

        options: dict[str, bool | tuple[int, int]] = {"causal": problem.name != "full"}
        if isinstance(inner, local):
            options["window_size"] = (inner.window - 1, 0)  # keys before the query's own, and after
        if self.deterministic:
            options["deterministic"] = True

        def run():
            out = flash_attn.cute.flash_attn_func(*(t.transpose(1, 2) for t in problem.leaves), **options)
            return _first(out).transpose(1, 2)

        return run


def _inside_causal(problem: Problem) -> Pattern | None:
    """``p`` if the problem's only pattern is ``causal & p``."""
    if len(problem.patterns) > 1 or not isinstance(problem.patterns[0], And):
        return None
    operands = problem.patterns[0].operands
    others = [p for p in operands if p.name != "causal"]
    return others[0] if len(operands) == 2 and len(others) == 1 else None


def _documents(problem: Problem, bounds: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    """bounds: where documents start, and where the last one ends. The sequences of a batch are concatenated."""
    import flash_attn.cute

    batch, _, tokens, _ = problem.q.shape
    starts = [b * tokens + start for b in range(batch) for start in bounds[:-1]]
    cu_seqlens = torch.tensor([*starts, batch * tokens], dtype=torch.int32, device=problem.q.device)
    longest = max(stop - start for start, stop in pairwise(bounds))
    options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def run():
        packed = (t.transpose(1, 2).flatten(0, 1) for t in problem.leaves)
        out = flash_attn.cute.flash_attn_varlen_func(*packed, **options, causal=True)
        return _first(out).unflatten(0, (batch, tokens)).transpose(1, 2)

    return run


def _first(out):
    """out, also from versions that return (out, lse)."""
    return out[0] if isinstance(out, tuple) else out
