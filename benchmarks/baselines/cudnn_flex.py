"""cuDNN's flex attention: intervals of keys for each query, compiled into a plan (nvidia-cudnn-frontend 1.32)."""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from ..workload.problem import Problem
from .base import NOT_MEASURED, Peer, why_missing

_ROWS = 1024  # queries whose pairs are looked at together


class CudnnFlex(Peer):
    """For Hopper and newer GPUs. The plan is made before, as our table is."""

    order = (0, 2, 1, 3)

    def refuses(self, problem: Problem) -> str | None:
        if not problem.plain:
            return NOT_MEASURED
        if len(problem.patterns) > 1:
            return "masks of each head are not measured"
        return why_missing("cudnn.flex_attention")

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        def leaves():
            return (t.transpose(1, 2) for t in problem.leaves)

        plan = create_mask_plan(list_intervals(problem), *leaves())
        return lambda: flex_attn_func(*leaves(), mask_plan=plan).transpose(1, 2)


def list_intervals(problem: Problem) -> torch.Tensor:
    """(1, edges, batch * q_len) int32. A query sees keys in [0, edge 0), [edge 1, edge 2), and so on. Queries with fewer intervals
    end with edges of kv_len."""
    (batch, _, q_len, _), kv_len = problem.q.shape, problem.k.shape[2]
    chunks = []
    for first in range(0, q_len, _ROWS):
        queries = torch.arange(first, min(q_len, first + _ROWS), device=problem.q.device)
        changes = torch.diff(pad(problem.kept(0, 0, queries).int(), (1, 1)), dim=1)  # 1 where an interval starts, -1 past its end
        row, key = changes.nonzero(as_tuple=True)
        nth = changes.abs().cumsum(1)[row, key] - 1
        edges = torch.full((len(queries), int(nth.max()) + 1), kv_len, dtype=torch.int32, device=key.device)
        edges[row, nth] = key.int()
        chunks.append(edges)
    most = max(edges.shape[1] for edges in chunks)
    edges = torch.cat([pad(edges, (0, most - edges.shape[1]), value=kv_len) for edges in chunks])
    edges = edges[:, 1:] if (edges[:, 0] == 0).all() else pad(edges, (1, 0))
    return edges.T[None].repeat(1, 1, batch).contiguous()
