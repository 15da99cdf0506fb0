"""Block-sparse attention of full blocks: NVIDIA's, of cuDNN's frontend, and FastVideo's, of its package of kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import ClassVar

import torch

from ..workload.problem import Problem
from .base import Peer


class FullBlockPeer(Peer):
    """module: what is imported. sizes: tokens of a block."""

    module: ClassVar[str]
    sizes: ClassVar[tuple[int, ...]]

    def refuses(self, problem: Problem) -> str | None:
        mask = problem.mask
        if problem.dropout_p or problem.kv_lens is not None:
            return "its calls have no dropout, and padding is not measured"
        if problem.grouped:
            return "its backward pass has as many heads of keys as of queries"
        if mask.block_size not in self.sizes or mask.q_len % mask.block_size or mask.kv_len % mask.block_size:
            sizes = " or ".join(map(str, self.sizes))
            return f"its blocks have {sizes} tokens, all of them whole; got blocks of {mask.block_size} of {mask.q_len} tokens"
        if mask.keeps_all or mask.entries()[2].any():
            return "its masks are of full blocks, and some are missing"
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.module} is not installed ({error})"
        return None

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        kept = problem.mask.kept_blocks().expand(*problem.q.shape[:2], -1, -1)
        count = kept.sum(-1, dtype=torch.int32)
        index = torch.argsort(~kept, dim=-1, stable=True)[..., : int(count.max())].int().contiguous()  # kept ones first, in order
        return self.attend(problem, index, count)

    def attend(self, problem: Problem, index: torch.Tensor, count: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Returns what ``prepare`` does. index: (batch, heads, q_blocks, most blocks of a row) int32, kept blocks first.
        count: (batch, heads, q_blocks) int32."""
        raise NotImplementedError


class FastVideoBlocks(FullBlockPeer):
    """Its backward pass transposes the lists of blocks in each call."""

    module, sizes = "fastvideo_kernel", (64,)

    def attend(self, problem, index, count):
        from fastvideo_kernel import block_sparse_attn_from_indices

        size = problem.mask.block_size
        tokens = torch.full((problem.k.shape[2] // size,), size, dtype=torch.int32, device=index.device)
        return lambda: block_sparse_attn_from_indices(*problem.leaves, index, count, tokens)[0]


class CudnnBlocks(FullBlockPeer):
    """For Hopper and newer GPUs."""

    module, sizes = "cudnn.block_sparse_attention", (64, 128)

    def attend(self, problem, index, count):
        return lambda: _OfCudnn.apply(*problem.leaves, index, count, problem.mask.block_size)


class _OfCudnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, index, count, block_size):
        from cudnn.block_sparse_attention import BSA

        ctx.options = {"q2k_block_nums": count, "sparse_block_size": block_size}
        found = BSA.block_sparse_attention_forward(q, k, v, index, **ctx.options)
        out = found["o_tensor"]
        ctx.save_for_backward(q, k, v, out, found["lse_tensor"], index)
        return out

    @staticmethod
    def backward(ctx, dout):
        from cudnn.block_sparse_attention import BSA

        *saved, index = ctx.saved_tensors
        found = BSA.block_sparse_attention_backward(dout.contiguous(), *saved, index, **ctx.options)
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"], None, None, None
