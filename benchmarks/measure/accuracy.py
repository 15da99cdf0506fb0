"""Checks a peer's results at full size, against float64 attention for a few sampled queries.

Gradients are checked with an incoming gradient that is zero except at the sampled queries. Then dQ is zero elsewhere, and dK and
dV, for every key, depend only on the sampled rows of the score matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..workload.problem import Problem

SAMPLES = 32
# Largest relative error (Frobenius norm) by dtype: a few times that of rounding; a wrong mask is far above.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3, torch.float64: 1e-9}

# attend() -> (out,), without gradients; attend(dout) -> (out, dq, dk, dv). dout: like out.
Attend = Callable[..., tuple[torch.Tensor, ...]]


def as_attend(leaves: tuple[torch.Tensor, ...], fn: Callable[[], torch.Tensor]) -> Attend:
    """Both passes of a peer's prepared ``fn``, as plain calls. leaves: q, k and v."""

    def attend(dout=None):
        if dout is None:
            with torch.no_grad():
                return (fn(),)
        out = fn()
        return (out, *torch.autograd.grad(out, leaves, dout))

    return attend


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The L2 distance as a share of the norm. exact: in float64."""
    return float((found.double() - exact).norm() / exact.norm())


def is_right(errors: dict[str, float], dtype: torch.dtype) -> bool:
    """Also False if an error is NaN."""
    return all(error <= TOLERANCE[dtype] for error in errors.values())


def sampled_errors(problem: Problem, attend: Attend, backward: bool = True) -> dict[str, float]:
    """Relative errors over the sampled queries, of out and, with ``backward``, of dq, dk and dv. Out covers the calls without and
    with gradients, which may take different paths."""
    q, k, v = problem.leaves
    tokens = q.shape[2]
    rng = np.random.default_rng(0)
    chosen = np.unique(np.concatenate([[0, tokens - 1], rng.integers(0, tokens, SAMPLES - 2)]))
    rows = torch.from_numpy(chosen).to(q.device)

    (out,) = attend()
    dout_rows = torch.randn(*out.shape[:2], len(chosen), out.shape[3], device=q.device, dtype=q.dtype)
    found = {"out": [out.detach()[:, :, rows]]}
    if backward:
        with_gradients, dq, dk, dv = attend(torch.zeros_like(out).index_copy_(2, rows, dout_rows))
        found["out"].append(with_gradients.detach()[:, :, rows])
        found |= {"dq": [dq[:, :, rows]], "dk": [dk], "dv": [dv]}

    group = q.shape[1] // k.shape[1]
    squares = {name: torch.zeros(2, dtype=torch.float64, device=q.device) for name in found}
    for batch in range(q.shape[0]):
        for kv_head in range(k.shape[1]):
            heads = range(kv_head * group, (kv_head + 1) * group)
            wanted = []
            for head in heads:
                own = q[batch, head], k[batch, kv_head], v[batch, kv_head], dout_rows[batch, head]
                wanted.append(_reference([t.detach().double() for t in own], rows, problem.kept(batch, head, rows)))
            for name, tensors in found.items():
                # dK and dV of a key head are sums over the query heads that share it.
                shared = name in ("dk", "dv")
                right = torch.stack([w[name] for w in wanted])
                right = right.sum(0, keepdim=True) if shared else right
                place = slice(kv_head, kv_head + 1) if shared else slice(heads.start, heads.stop)
                for tensor in tensors:
                    difference = tensor[batch, place].double() - right
                    squares[name] += torch.stack([difference.square().sum(), right.square().sum()])
    return {name: float((s[0] / s[1].clamp(min=1e-300)).sqrt()) for name, s in squares.items()}


def _reference(tensors: list[torch.Tensor], rows, kept) -> dict[str, torch.Tensor]:
    """tensors: q, k, v: (tokens, head_dim) float64. dout: (samples, head_dim). kept: (samples, tokens)."""
    q, k, v, dout = tensors
    scale = q.shape[1] ** -0.5
    scores = (scale * q[rows] @ k.T).masked_fill(~kept, -torch.inf)
    p = torch.softmax(scores, dim=1).nan_to_num(0.0)
    out = p @ v
    ds = p * (dout @ v.T - (dout * out).sum(1, keepdim=True)) * scale
    return {"out": out, "dq": ds @ k, "dk": ds.T @ q[rows], "dv": p.T @ dout}
