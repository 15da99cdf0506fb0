"""Whether a peer computed the right thing, at full size: float64 attention of a few sampled queries.

Gradients are checked with an incoming gradient that is zero but at the sampled queries: then dQ is zero elsewhere, and
dK and dV follow from the sampled rows of the score matrix alone, for every key.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

SAMPLES = 32
# Largest relative error (Frobenius norm) by dtype: a few times what rounding gives; a wrong mask is far beyond.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3, torch.float64: 1e-9}


def sampled_errors(problem, fn: Callable[[], torch.Tensor], backward: bool = True) -> dict[str, float]:
    """Relative errors of out, and with ``backward`` of dq, dk and dv, over the sampled queries."""
    q, k, v = problem.leaves
    tokens = q.shape[2]
    rng = np.random.default_rng(0)
    chosen = np.unique(np.concatenate([[0, tokens - 1], rng.integers(0, tokens, SAMPLES - 2)]))
    position = chosen + k.shape[2] - tokens
    kept = np.broadcast_to(problem.pattern.token_rule(position[:, None], np.arange(k.shape[2])[None]), (len(chosen), k.shape[2]))
    kept = torch.from_numpy(kept.copy()).to(q.device)
    rows = torch.from_numpy(chosen).to(q.device)
    with torch.set_grad_enabled(backward):
        out = fn()
    dout_rows = torch.randn(*out.shape[:2], len(chosen), out.shape[3], device=q.device, dtype=q.dtype)
    found = {"out": [out.detach()[:, :, rows]]}
    if backward:
        dout = torch.zeros_like(out).index_copy_(2, rows, dout_rows)
        dq, dk, dv = torch.autograd.grad(out, problem.leaves, dout)
        found |= {"dq": [dq[:, :, rows]], "dk": [dk], "dv": [dv]}
    squares = {name: torch.zeros(2, dtype=torch.float64, device=q.device) for name in found}
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            wanted = _reference(*(t.detach()[batch, head].double() for t in (q, k, v, dout_rows)), rows, kept)
            for name, (got,) in found.items():
                difference = got[batch, head].double() - wanted[name]
                squares[name] += torch.stack([difference.square().sum(), wanted[name].square().sum()])
    return {name: float((s[0] / s[1].clamp(min=1e-300)).sqrt()) for name, s in squares.items()}


def _reference(q, k, v, dout, rows, kept) -> dict[str, torch.Tensor]:
    """q, k, v: (tokens, head_dim) float64. dout: (samples, head_dim). kept: (samples, tokens)."""
    scale = q.shape[1] ** -0.5
    scores = (scale * q[rows] @ k.T).masked_fill(~kept, -torch.inf)
    p = torch.softmax(scores, dim=1).nan_to_num(0.0)
    out = p @ v
    ds = p * (dout @ v.T - (dout * out).sum(1, keepdim=True)) * scale
    return {"out": out, "dq": ds @ k, "dk": ds.T @ q[rows], "dv": p.T @ dout}
