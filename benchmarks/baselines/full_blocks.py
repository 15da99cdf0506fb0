"""Block-sparse attention of full blocks: NVIDIA's, of cuDNN's frontend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..workload.problem import Problem
from .base import Peer


class CudnnBlocks(Peer):
    """For Hopper and newer GPUs."""

    def refuses(self, problem: Problem) -> str | None:
        mask = problem.mask
        if problem.dropout_p or problem.kv_lens is not None:
            return "its calls have no dropout, and padding is not measured"
        if problem.grouped:
            return "its backward pass has as many heads of keys as of queries"
        if mask.block_size not in (64, 128) or mask.q_len % mask.block_size or mask.kv_len % mask.block_size:
            return f"its blocks have 64 or 128 tokens, all of them whole; got blocks of {mask.block_size} of {mask.q_len} tokens"
        if mask.keeps_all or mask.entries()[2].any():
            return "its masks are of full blocks, and some are missing"
        try:
            import cudnn.block_sparse_attention  # noqa: F401
        except ImportError as error:
            return f"cudnn.block_sparse_attention is not installed ({error})"
        return None

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        kept = problem.mask.kept_blocks().expand(*problem.q.shape[:2], -1, -1)
        count = kept.sum(-1, dtype=torch.int32)
        index = torch.argsort(~kept, dim=-1, stable=True)[..., : int(count.max())].int().contiguous()  # kept ones first, in order
        return lambda: _CudnnFunction.apply(*problem.leaves, index, count, problem.mask.block_size)


class _CudnnFunction(torch.autograd.Function):
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
