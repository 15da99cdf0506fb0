"""Checks a peer's results at full size, against float64 attention for a few sampled queries.

Gradients are checked with an incoming gradient that is zero except at the sampled queries. Then dQ is zero elsewhere, and dK and
dV, for every key, depend only on the sampled rows of the score matrix.
"""

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
        with_gradients, dq, dk, dv, *dsinks = attend(torch.zeros_like(out).index_copy_(2, rows, dout_rows))
        found["out"].append(with_gradients.detach()[:, :, rows])
        found |= {"dq": [dq[:, :, rows]], "dk": [dk], "dv": [dv]}

    group = q.shape[1] // k.shape[1]
    squares = {name: torch.zeros(2, dtype=torch.float64, device=q.device) for name in found}
    sums = torch.zeros(q.shape[1], dtype=torch.float64, device=q.device)  # the gradient of sinks
    for batch in range(q.shape[0]):
        for kv_head in range(k.shape[1]):
            heads = range(kv_head * group, (kv_head + 1) * group)
            wanted = []
            for head in heads:
                own = q[batch, head, rows], k[batch, kv_head], v[batch, kv_head], dout_rows[batch, head]
                wanted.append(_reference(problem, [t.detach().double() for t in own], batch, head, rows))
                sums[head] += wanted[-1]["dsinks"]
            for name, tensors in found.items():
                # dK and dV of a key head are sums over the query heads that share it.
                shared = name in ("dk", "dv")
                right = torch.stack([w[name] for w in wanted])
                right = right.sum(0, keepdim=True) if shared else right
                place = slice(kv_head, kv_head + 1) if shared else slice(heads.start, heads.stop)
                for tensor in tensors:
                    difference = tensor[batch, place].double() - right
                    squares[name] += torch.stack([difference.square().sum(), right.square().sum()])
    errors = {name: float((s[0] / s[1].clamp(min=1e-300)).sqrt()) for name, s in squares.items()}
    return errors | ({"dsinks": relative_error(dsinks[0], sums)} if backward and dsinks else {})


@torch.enable_grad()
def _reference(problem: Problem, tensors: list[torch.Tensor], batch: int, head: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """tensors: the sampled queries and their dout, (samples, head_dim), around k and v, (tokens, head_dim), float64."""
    *inputs, dout = tensors
    sink = torch.full((), -torch.inf) if problem.sinks is None else problem.sinks[head].detach()
    q, k, v, sink = inputs = [t.requires_grad_() for t in (*inputs, sink.to(dout))]
    kept, scores = problem.kept(batch, head, rows), q.shape[1] ** -0.5 * q @ k.T
    if problem.change.score:
        scores = problem.change.score(scores, batch, head, rows[:, None], torch.arange(len(k), device=k.device))
    scores = torch.cat([scores.masked_fill(~kept, -torch.inf), sink.expand(len(rows), 1)], 1)
    p = torch.softmax(scores.masked_fill(scores.amax(1, keepdim=True) == -torch.inf, 0.0), 1)[:, :-1] * kept
    out = p @ v
    return dict(zip(("out", "dq", "dk", "dv", "dsinks"), (out.detach(), *torch.autograd.grad(out, inputs, dout)), strict=True))
