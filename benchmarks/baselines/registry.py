"""The peers by name. Two of them need little code and are here: sparse_flash itself and PyTorch's dense attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import sparse_flash
from sparse_flash.core import backends
from sparse_flash.core.description import Call

from ..workload.cases import OURS
from ..workload.changes import CHANGES
from ..workload.problem import Problem
from .base import Peer
from .cudnn_flex import CudnnFlex
from .flash import FlashAttention3, FlashAttention4
from .flex import Flex
from .full_blocks import CudnnBlocks, FastVideoBlocks


@dataclass(frozen=True)
class SparseFlash(Peer):
    backend: str = "auto"
    deterministic: bool = False

    def refuses(self, problem: Problem) -> str | None:
        return None if self.backend == "auto" else backends.get_backend(self.backend).supports(self.call(problem))

    def call(self, problem: Problem) -> Call:
        table = problem.mask.kernel_table(problem.q.is_cuda)
        block_size = None if table is None else table.block_size
        call = Call.from_tensors(*problem.leaves, block_size, deterministic=self.deterministic)
        return replace(call, features=tuple(_extra_arguments(problem)))

    def runs_on(self, problem: Problem) -> str | None:
        return None if _extra_arguments(problem) else backends.choose_backend(self.backend, self.call(problem))

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        mask = None if problem.mask.keeps_all else problem.mask
        options: dict[str, Any] = {"backend": self.backend, "deterministic": self.deterministic, **_extra_arguments(problem)}
        if problem.change.packed:
            return self._prepare_packed(problem, options)
        return lambda: sparse_flash.attention(*problem.leaves, mask, **options)  # type: ignore[return-value]  # no return_lse

    def _prepare_packed(self, problem: Problem, options: dict[str, Any]) -> Callable[[], torch.Tensor]:
        terms = problem.terms
        assert terms is not None and terms.bounds is not None
        cu_seqlens, longest = problem.pack(terms.bounds)
        options |= {"mask": "causal" if terms.window is None else f"causal & local({terms.window})", "max_seqlen_q": longest}
        return lambda: problem.unpack(sparse_flash.attention_varlen(*problem.packed_leaves(), cu_seqlens, **options))  # type: ignore[arg-type]


def _extra_arguments(problem: Problem) -> dict:
    """The arguments for dropout, lengths, sinks and changes of scores, if the problem has them."""
    given = {"dropout_p": problem.dropout_p or None, "kv_lens": problem.kv_lens, "sinks": problem.sinks}
    given |= problem.change.arguments(problem.q.shape[1], problem.q.device)
    return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Sdpa(Peer):
    """PyTorch's dense attention. Any mask other than full and causal would be an array of tokens x tokens."""

    backend: str
    most_tokens: int | None = None  # on a CPU, whose memory other programs need; a GPU reports when it has none left

    def refuses(self, problem: Problem) -> str | None:
        if problem.name not in ("full", "causal") or problem.change is not CHANGES[""]:
            return "it is dense: any mask but causal, or change of scores, would be an array of tokens x tokens"
        if problem.name == "causal" and problem.kv_lens is not None:
            return "causal with padding would be an array of tokens x tokens"
        if self.backend == "CUDNN_ATTENTION" and not problem.q.is_cuda:
            return "cuDNN runs on GPUs"
        if self.most_tokens and problem.q.shape[2] > self.most_tokens and problem.q.device.type == "cpu":
            return f"it builds the score matrix, which is left out beyond {self.most_tokens} tokens"
        return None

    def settings(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.backend))

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        options: dict[str, Any] = {
            "is_causal": problem.name == "causal",
            "enable_gqa": problem.grouped,
            "dropout_p": problem.dropout_p,
        }
        if problem.kv_lens is not None:
            key = torch.arange(problem.k.shape[2], device=problem.k.device)
            options["attn_mask"] = (key < problem.kv_lens[:, None])[:, None, None]
        return lambda: torch.nn.functional.scaled_dot_product_attention(*problem.leaves, **options)


def find_peer(name: str) -> Peer:
    """The peer of a case. Raises ValueError for an unknown name."""
    base, _, backend = name.partition(":")
    if backend and base in PEERS and isinstance(PEERS[base], SparseFlash):
        return SparseFlash(backend, PEERS[base].deterministic)
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)} and {OURS}:BACKEND")
    return PEERS[name]


PEERS = {
    OURS: SparseFlash(),
    f"{OURS}-deterministic": SparseFlash(deterministic=True),
    "sdpa-flash": Sdpa("FLASH_ATTENTION"),
    "sdpa-cudnn": Sdpa("CUDNN_ATTENTION"),
    "sdpa-efficient": Sdpa("EFFICIENT_ATTENTION"),
    "sdpa-math": Sdpa("MATH", most_tokens=8192),
    "flex": Flex(),
    "flex-fa4": Flex("FLASH"),
    "fa3": FlashAttention3(),
    "fa4": FlashAttention4(),
    "cudnn-blocks": CudnnBlocks(),
    "cudnn-flex": CudnnFlex(),
    "fastvideo": FastVideoBlocks(),
}
