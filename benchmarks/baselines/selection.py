"""Libraries that train attention over key blocks which each query picked, called as their users call them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

import torch

import sparse_flash

from ..workload.problem import Problem
from .base import Peer
from .registry import find_peer

_FLA = "fla.ops.nsa.parallel"


@dataclass(frozen=True)
class SelectionProblem(Problem):
    """Causal attention over the key blocks that queries picked."""

    selection: sparse_flash.BlockSelection = field(kw_only=True)


@dataclass(frozen=True)
class SparseFlashSelection(Peer):
    backend: str = "auto"

    def prepare(self, problem):
        return lambda: sparse_flash.attention(*problem.leaves, problem.selection, backend=self.backend)


def _picks_refusal(problem: SelectionProblem) -> str | None:
    if problem.selection.every > 1:
        return "each of its queries picks for itself"
    if problem.selection.heads != problem.k.shape[1]:
        return "query heads that share keys share its picks"
    return None


class Fla(Peer):
    """parallel_nsa of flash-linear-attention (fla-core), its selected branch alone."""

    order = (0, 2, 1, 3)

    def refuses(self, problem):
        group = problem.q.shape[1] // problem.k.shape[1]
        if group < 16 or group & (group - 1):
            return f"it wants a power of two of 16 and more query heads for each key head; got {group}"
        return _picks_refusal(problem) or _import_refusal(_FLA)

    def prepare(self, problem):
        parallel_nsa = importlib.import_module(_FLA).parallel_nsa
        selection = problem.selection
        picks = selection.picks.transpose(1, 2).contiguous()  # (batch, tokens, kv_heads, picks)
        options = {"block_indices": picks, "block_counts": picks.shape[3], "block_size": selection.block_size}

        def run():
            q, k, v = (t.transpose(1, 2) for t in problem.leaves)
            return parallel_nsa(q, k, v, **options).transpose(1, 2)

        return run


@dataclass(frozen=True)
class PackedNsa(Peer):
    """A call of q, k, v (tokens, heads, head_dim), picks (kv_heads, tokens, picks), block_size and cu_seqlens: that of
    native-sparse-attention-triton and of Flash-Sparse-Attention (arXiv:2508.18224)."""

    module: str
    name: str
    order = (0, 2, 1, 3)

    def refuses(self, problem):
        if problem.q.shape[0] > 1:
            return f"its sequences are packed, and batches are not measured; got a batch of {problem.q.shape[0]}"
        return _picks_refusal(problem) or _import_refusal(self.module)

    def prepare(self, problem):
        attend, selection = getattr(importlib.import_module(self.module), self.name), problem.selection
        picks = selection.picks[0].contiguous()
        cu_seqlens = torch.tensor([0, selection.q_len], dtype=torch.int32, device=picks.device)

        def run():
            q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in problem.leaves)
            return attend(q, k, v, picks, selection.block_size, cu_seqlens).transpose(0, 1)[None]

        return run


def _import_refusal(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a library that is there and does not load says why
        return f"{module} does not load: {type(error).__name__}: {error}".replace("\n", " ")[:300]
    return None


DENSE = "sdpa-cudnn"  # causal attention over all keys: what a selection is to be faster than. Its results are other ones.
PEERS: dict[str, Peer] = {
    "sparse_flash": SparseFlashSelection(),
    "sparse_flash:triton": SparseFlashSelection("triton"),
    DENSE: find_peer(DENSE),
    "fla": Fla(),
    "nsa-triton": PackedNsa("native_sparse_attention.ops.triton.topk_sparse_attention", "topk_sparse_attention"),
    "fsa": PackedNsa("fsa.ops.FSA_topk_sparse_attention", "FSA_topk_sparse_attention"),
}
