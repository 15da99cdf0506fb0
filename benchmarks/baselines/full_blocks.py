"""Block-sparse attention of full blocks: NVIDIA's, of cuDNN's frontend, and FastVideo's, whose blocks may lack their last keys."""

from collections.abc import Callable

import numpy as np
import torch

from sparse_flash.masks.block_mask import BlockMask
from sparse_flash.masks.tiles import unpack_runs

from ..workload.problem import Problem
from .base import NOT_MEASURED, Peer, why_missing


def list_kept(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers of the kept blocks, in order; how many there are) for each row, int32. kept: (batch, heads, rows, blocks) bool."""
    count = kept.sum(-1, dtype=torch.int32)
    return torch.argsort(~kept, dim=-1, stable=True)[..., : int(count.max())].int().contiguous(), count


class CudnnBlocks(Peer):
    """For Hopper and newer GPUs."""

    def refuses(self, problem: Problem) -> str | None:
        mask = problem.mask
        if not problem.plain:
            return NOT_MEASURED
        if problem.grouped:
            return "its backward pass has as many heads of keys as of queries"
        if mask.block_size not in (64, 128) or mask.q_len % mask.block_size or mask.kv_len % mask.block_size:
            return f"its blocks have 64 or 128 tokens, all of them whole; got blocks of {mask.block_size} of {mask.q_len} tokens"
        if mask.keeps_all or mask.by_query.entries()[2].any():
            return "its masks are of full blocks, and some are missing"
        return why_missing("cudnn.block_sparse_attention")

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        kept = problem.mask.kept_blocks().expand(*problem.q.shape[:2], -1, -1)
        lists = list_kept(kept)
        return lambda: _CudnnFunction.apply(*problem.leaves, *lists, problem.mask.block_size)


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


class FastVideoBlocks(Peer):
    """The kernels for Hopper of FastVideo's video sparse attention. Their lists of blocks are made before, as our table is."""

    def refuses(self, problem: Problem) -> str | None:
        mask, head_dim = problem.mask, problem.q.shape[3]
        if not problem.plain:
            return NOT_MEASURED
        if len(problem.q) > 1 or problem.grouped or head_dim not in (64, 128):
            return "its calls have one sequence, as many heads of keys as of queries, and a head_dim of 64 or 128"
        if mask.block_size != 64 or mask.q_len % 64 or mask.kv_len % 64:
            return f"its blocks have 64 tokens, all of them whole; got blocks of {mask.block_size} of {mask.q_len} tokens"
        if mask.keeps_all or _count_keys(mask) is None or not mask.kept_blocks().any(-1).all():
            return "its masks are of full blocks, which may lack their last keys, and each query keeps some"
        return why_missing("fastvideo_kernel._C.fastvideo_kernel_ops")

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        kept = problem.mask.kept_blocks().expand(*problem.q.shape[:2], -1, -1)
        lists = *list_kept(kept), *list_kept(kept.mT), torch.from_numpy(_count_keys(problem.mask)).to(problem.q.device)
        return lambda: _FastVideoFunction.apply(*problem.leaves, *lists)


def _count_keys(mask: BlockMask) -> np.ndarray | None:
    """How many keys each block of keys has, int32, if no query sees a key after them. None if the mask has other partial blocks."""
    _, cols, kind, tile = mask.by_query.entries()
    first, stop = unpack_runs(mask.tiles[0].cpu().numpy())
    count, cut = np.full(mask.grid.kv_blocks, mask.block_size, np.int32), kind > 0
    if (kind > 1).any() or first[tile[cut]].any():
        return None
    count[cols[cut]] = stop[tile[cut], 0]
    agree = (stop[tile[cut]] == count[cols[cut], None]).all() and (count[cols[~cut]] == mask.block_size).all()
    return count if agree else None


class _FastVideoFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, keys, key_count, queries, query_count, keys_of_block):
        from fastvideo_kernel._C import fastvideo_kernel_ops

        out, lse = fastvideo_kernel_ops.block_sparse_fwd(q, k, v, keys, key_count, keys_of_block)
        ctx.save_for_backward(q, k, v, out, lse, queries, query_count, keys_of_block)
        return out

    @staticmethod
    def backward(ctx, dout):
        from fastvideo_kernel._C import fastvideo_kernel_ops

        *saved, queries, query_count, keys_of_block = ctx.saved_tensors
        found = fastvideo_kernel_ops.block_sparse_bwd(*saved, dout.contiguous(), queries, query_count, keys_of_block)
        return *(grad.to(dout.dtype) for grad in found), None, None, None, None, None  # they are in float32
