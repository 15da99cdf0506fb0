"""What the tests run on each rank: a plan's results against one process's, in natural order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sparse_flash as sf

RAGGED = sf.documents([0, 70, 333, 334, 900, 1500, 1801])
# name: (mask, tokens, block, batch, heads, kv_heads)
CASES = {
    "causal": ("causal", 2048, 64, 1, 2, 2),
    "window": ("causal & local(300)", 2048, 64, 1, 2, 2),
    "butterfly": ("butterfly(block=64)", 2048, 64, 2, 2, 2),
    "ragged documents": (sf.causal() & RAGGED, 1801, 64, 1, 2, 2),
    "full": ("full", 1024, 64, 1, 2, 2),
    "full, cut block": ("full", 1000, 64, 1, 2, 2),
    "per head": (("causal", "local(100)", "full", "causal & local(64)"), 1024, 64, 2, 4, 4),
    "per head, grouped": (("causal", "causal", "local(100)", "butterfly(block=64)"), 1000, 32, 1, 4, 2),
    "grouped 8:2": ("causal", 1024, 128, 2, 8, 2),
    "1537 tokens": ("causal | local(200)", 1537, 128, 1, 2, 1),
    "bit tiles": ("causal & (dilated(3, 5) | strided(64))", 1100, 32, 1, 2, 2),
    "rows that keep nothing": ("causal & ~local(200)", 1024, 64, 1, 2, 2),
    "bigbird": ("bigbird(block=64, density=0.05)", 1536, 64, 1, 2, 2),
    "nothing travels": ("block_diagonal(256)", 2048, 64, 1, 2, 2),
    "ranks that get nothing": ("causal", 130, 64, 1, 4, 4),
}
HEAD_DIM, V_HEAD_DIM = 32, 16


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def mask_of(name: str):
    mask, tokens, block, *_ = CASES[name]
    return sf.BlockMask.per_head(list(mask), tokens, tokens, block) if isinstance(mask, tuple) else mask


def inputs(name: str, v_head_dim: int = HEAD_DIM) -> list[torch.Tensor]:
    """q, k, v, dout, dlse of the whole sequence"""
    _, tokens, _, batch, heads, kv_heads = CASES[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    sizes = [(heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, v_head_dim), (heads, v_head_dim)]
    drawn = [torch.randn(batch, h, tokens, d, generator=generator) for h, d in sizes]
    return [*drawn, torch.randn(batch, heads, tokens, generator=generator)]


def results(attend, q, k, v, dout, dlse) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv]"""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out, lse = attend(*leaves)
    ((out * dout).sum() + (lse.masked_fill(lse == float("-inf"), 0) * dlse).sum()).backward()
    return [out.detach(), lse.detach(), *(t.grad for t in leaves)]


def of_one_process(name: str, **options) -> list[torch.Tensor]:
    mask, tokens, block, *_ = CASES[name]
    whole = mask_of(name) if isinstance(mask, tuple) else sf.compile_mask(mask, tokens, block_size=block)
    given = inputs(name, options.pop("v_head_dim", HEAD_DIM))
    return results(lambda q, k, v: sf.attention(q, k, v, whole, return_lse=True, **options), *given)


def plan_of(name: str, strategy: str = "blocks", on=None):
    _, tokens, block, _, heads, kv_heads = CASES[name]
    options = {"heads": heads, "kv_heads": kv_heads, "block_size": block, "strategy": strategy}
    return sf.context_parallel(mask_of(name), tokens, on or mesh(), **options)


def of_a_plan(plan, name: str, attend=None, **options) -> list[torch.Tensor]:
    """The same, of all ranks, gathered."""
    given = inputs(name, options.pop("v_head_dim", HEAD_DIM))
    mine = [plan.shard(t, 2) for t in given]
    attend = attend or (lambda q, k, v: plan.attention(q, k, v, return_lse=True, **options))
    return [plan.unshard(t, 2) for t in results(attend, *mine)]


def difference(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The worst, relative to the largest value of each."""
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one == float("-inf"), other == float("-inf")) and not one.isnan().any()
        one, other = (t.masked_fill(other == float("-inf"), 0) for t in (one, other))
        worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(min=1e-3)))
    return worst


def compared(name: str, strategy: str) -> tuple[float, bool]:
    """(the difference from one process, whether a second run gives the same bits)"""
    plan = plan_of(name, strategy)
    once, again = (of_a_plan(plan, name, deterministic=True) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    return difference(once, of_one_process(name)), same
