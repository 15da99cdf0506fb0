"""Libraries that train attention over key blocks which each query picked, called as their users call them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch

import sparse_flash
from sparse_flash import BlockSelection

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_FLA = "fla.ops.nsa.parallel"


class SelectionPeer:
    """order: the memory order that it wants of the dimensions (batch, heads, tokens, head_dim)."""

    order: ClassVar[tuple[int, ...]] = (0, 2, 1, 3)

    def refuses(self, leaves: Leaves, selection: BlockSelection) -> str | None:
        """Why it cannot compute attention over a selection, or None. Choices of key heads, without ``always``, are given."""
        return None

    def settings(self) -> AbstractContextManager:
        """A context that must be active while it runs."""
        return nullcontext()

    def prepare(self, leaves: Leaves, selection: BlockSelection) -> Callable[[], torch.Tensor]:
        """``fn``; ``fn()`` runs one forward pass and returns out, (batch, heads, tokens, head_dim), differentiable in leaves."""
        raise NotImplementedError


@dataclass(frozen=True)
class SparseFlashSelection(SelectionPeer):
    backend: str = "auto"
    order = (0, 1, 2, 3)

    def prepare(self, leaves, selection):
        return lambda: sparse_flash.attention(*leaves, selection, backend=self.backend)


class CausalSdpa(SelectionPeer):
    """Causal attention over all keys, by cuDNN: what a selection is to be faster than. Its results are other ones."""

    order = (0, 1, 2, 3)

    def refuses(self, leaves, selection):
        return None if leaves[0].is_cuda else "cuDNN runs on GPUs"

    def settings(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)

    def prepare(self, leaves, selection):
        grouped = leaves[0].shape[1] != leaves[1].shape[1]
        return lambda: torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=grouped)


def _picks_refusal(leaves: Leaves, selection: BlockSelection) -> str | None:
    if selection.every > 1:
        return "each of its queries picks for itself"
    if selection.heads != leaves[1].shape[1]:
        return "query heads that share keys share its picks"
    return None


class Fla(SelectionPeer):
    """parallel_nsa of flash-linear-attention (fla-core), its selected branch alone."""

    def refuses(self, leaves, selection):
        group = leaves[0].shape[1] // leaves[1].shape[1]
        if group < 16 or group & (group - 1):
            return f"it wants a power of two of 16 and more query heads for each key head; got {group}"
        return _picks_refusal(leaves, selection) or _import_refusal(_FLA)

    def prepare(self, leaves, selection):
        parallel_nsa = importlib.import_module(_FLA).parallel_nsa
        picks = selection.picks.transpose(1, 2).contiguous()  # (batch, tokens, kv_heads, picks)
        options = {"block_indices": picks, "block_counts": picks.shape[3], "block_size": selection.block_size}

        def run():
            q, k, v = (t.transpose(1, 2) for t in leaves)
            return parallel_nsa(q, k, v, **options).transpose(1, 2)

        return run


@dataclass(frozen=True)
class PackedNsa(SelectionPeer):
    """A call of q, k, v (tokens, heads, head_dim), picks (kv_heads, tokens, picks), block_size and cu_seqlens: that of
    native-sparse-attention-triton and of Flash-Sparse-Attention (arXiv:2508.18224)."""

    module: str
    name: str

    def refuses(self, leaves, selection):
        if leaves[0].shape[0] > 1:
            return f"its sequences are packed, and batches are not measured; got a batch of {leaves[0].shape[0]}"
        return _picks_refusal(leaves, selection) or _import_refusal(self.module)

    def prepare(self, leaves, selection):
        attend = getattr(importlib.import_module(self.module), self.name)
        picks = selection.picks[0].contiguous()
        cu_seqlens = torch.tensor([0, selection.q_len], dtype=torch.int32, device=picks.device)

        def run():
            q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in leaves)
            return attend(q, k, v, picks, selection.block_size, cu_seqlens).transpose(0, 1)[None]

        return run


def _import_refusal(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a library that is there and does not load says why
        return f"{module} does not load: {type(error).__name__}: {error}".replace("\n", " ")[:300]
    return None


DENSE = "sdpa-cudnn"
PEERS: dict[str, SelectionPeer] = {
    "sparse_flash": SparseFlashSelection(),
    "sparse_flash:triton": SparseFlashSelection("triton"),
    DENSE: CausalSdpa(),
    "fla": Fla(),
    "nsa-triton": PackedNsa("native_sparse_attention.ops.triton.topk_sparse_attention", "topk_sparse_attention"),
    "fsa": PackedNsa("fsa.ops.FSA_topk_sparse_attention", "FSA_topk_sparse_attention"),
}
