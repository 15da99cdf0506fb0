"""Attention over key blocks that each query picked: ours, and a library that trains it, called as its users call it."""

import importlib
from dataclasses import dataclass, field

import torch

import sparse_flash

from ..workload.cases import OURS
from ..workload.problem import Problem
from .base import Peer
from .registry import find_peer

_NSA = "native_sparse_attention.ops.triton.topk_sparse_attention"


@dataclass(frozen=True)
class SelectionProblem(Problem):
    """Causal attention over the key blocks that queries picked."""

    selection: sparse_flash.BlockSelection = field(kw_only=True)

    def kept(self, batch, head, queries):
        of_head = self.selection.select(head * self.k.shape[1] // self.q.shape[1])
        pairs = torch.zeros(len(queries), self.k.shape[2], dtype=torch.bool, device=self.q.device)
        for number, query in enumerate(queries.tolist()):
            pairs[number, of_head.kept_keys(query).to(pairs.device)] = True
        return pairs


@dataclass(frozen=True)
class SparseFlashSelection(Peer):
    backend: str = "auto"

    def prepare(self, problem):
        return lambda: sparse_flash.attention(*problem.leaves, problem.selection, backend=self.backend)


class NsaTriton(Peer):
    """native-sparse-attention-triton. Its sequences are packed: q, k and v are (tokens, heads, head_dim)."""

    order = (0, 2, 1, 3)

    def refuses(self, problem):
        try:
            importlib.import_module(_NSA)
        except Exception as error:  # a library that is there and does not load says why
            return f"{_NSA} does not load: {type(error).__name__}: {error}".replace("\n", " ")[:300]
        return None

    def prepare(self, problem):
        attend, selection = importlib.import_module(_NSA).topk_sparse_attention, problem.selection
        picks = selection.picks[0].contiguous()
        cu_seqlens = torch.tensor([0, selection.q_len], dtype=torch.int32, device=picks.device)

        def run():
            q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in problem.leaves)
            return attend(q, k, v, picks, selection.block_size, cu_seqlens).transpose(0, 1)[None]

        return run


# Causal attention over all keys: what a selection is to be faster than. Its results are other ones.
DENSE = {f"dense-{name}": find_peer(name) for name in (OURS, "sdpa-cudnn", "fa3", "fa4")}
PEERS: dict[str, Peer] = {
    "sparse_flash": SparseFlashSelection(),
    "sparse_flash:triton": SparseFlashSelection("triton"),
    "nsa-triton": NsaTriton(),
    **DENSE,
}
