"""Queries that travel: each rank attends the shared rows of all ranks to its own columns, and the parts return to be joined."""

from __future__ import annotations

import torch

from .calls import PartialAttention, RowResults
from .routes import Route, SharedRows
from .transfer import Arriving, by_block, by_head, message, started


def sent_queries(q: torch.Tensor, shared: SharedRows, route: Route) -> Arriving:
    """Sends the rank's shared rows of q to all ranks; those of all ranks arrive."""
    return _to_all(_shared(q, shared), shared, route)


def attended_queries(
    q: Arriving, k: torch.Tensor, v: torch.Tensor, run: PartialAttention, shared: SharedRows, route: Route
) -> tuple[Arriving, Arriving]:
    """Attends what arrived to the rank's own columns and returns it; parts of (out, lse) arrive."""
    out, lse = run.forward(by_head(q.arrived()), k, v, shared.mask)
    return _returned(out, shared, route), _returned(lse[..., None], shared, route)


def join_parts(out: torch.Tensor, lse: torch.Tensor, parts: tuple[Arriving, Arriving], shared: SharedRows) -> None:
    """Writes the results of the rank's shared rows."""
    outs, logs = (part.arrived() for part in parts)
    total = logs.logsumexp(0)
    # A query that keeps nothing has -inf throughout: weights of 0, not NaN.
    weights = (logs - total).exp().masked_fill(logs == float("-inf"), 0)
    _write(out, (weights * outs).sum(0), shared)
    _write(lse[..., None], total, shared)


def sent_results(q: torch.Tensor, results: RowResults, shared: SharedRows, route: Route) -> tuple[Arriving, Arriving]:
    """Sends what the gradients of the rank's shared rows depend on to all ranks: (q and dout, lse and a number for each query)."""
    q_rows, dout, out = (_shared(t, shared) for t in (q, results.dout, results.out))
    lse = _shared(results.lse[..., None], shared)
    # The gradient by a score is p * (dp - delta): all that it needs of out and dlse (arXiv:2307.08691, Alg. 2).
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    if results.dlse is not None:
        delta -= _shared(results.dlse[..., None], shared)
    # It goes to back ends as a gradient of lse does, and what is 0 * dout may be NaN.
    delta.masked_fill_(lse.isneginf(), 0.0)
    return _to_all(torch.cat([q_rows, dout], -1), shared, route), _to_all(torch.cat([lse, delta], -1), shared, route)


def differentiated_queries(
    results: tuple[Arriving, Arriving],
    head_dim: int,
    k: torch.Tensor,
    v: torch.Tensor,
    run: PartialAttention,
    shared: SharedRows,
    route: Route,
) -> tuple[Arriving, torch.Tensor, torch.Tensor]:
    """(parts of dq, which arrive; dk and dv of the rank's own columns from the shared rows of all ranks)"""
    packed, logs = (by_head(part.arrived()) for part in results)
    q, dout = packed[..., :head_dim], packed[..., head_dim:]
    lse, delta = (t.contiguous() for t in logs.unbind(-1))
    dq, dk, dv = run.backward(q, k, v, RowResults(dout, -delta, torch.zeros_like(dout), lse), shared.mask)
    return _returned(dq, shared, route), dk, dv


def write_query_gradients(dq: torch.Tensor, parts: Arriving, shared: SharedRows) -> None:
    wide = torch.promote_types(dq.dtype, torch.float32)
    _write(dq, parts.arrived().sum(0, dtype=wide), shared)


def _shared(x: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """(blocks, block, batch, heads, size): the rank's shared rows of x, (batch, heads, tokens, size)."""
    return by_block(x, shared.block_size).index_select(0, shared.rows)


def _to_all(blocks: torch.Tensor, shared: SharedRows, route: Route) -> Arriving:
    traffic, piece = shared.traffic, blocks.shape[1:]
    mine = message(blocks, traffic, *piece, route=route)
    mine.view(len(traffic.sends), len(blocks), *piece).copy_(blocks)
    return started(blocks.new_empty(traffic.received, *piece), mine, traffic, route)


def _returned(x: torch.Tensor, shared: SharedRows, route: Route) -> Arriving:
    """Sends the rows of x, (batch, heads, tokens of all shared rows, size), to their owners. (ranks, blocks, block, batch, heads,
    size) arrive."""
    traffic, blocks = shared.traffic.returned, by_block(x, shared.block_size)
    mine = message(blocks, traffic, *blocks.shape[1:], route=route).copy_(blocks)
    theirs = blocks.new_empty(len(traffic.receives), len(shared.rows), *blocks.shape[1:])
    return started(theirs.flatten(0, 1), mine, traffic, route)._replace(theirs=theirs)


def _write(x: torch.Tensor, rows: torch.Tensor, shared: SharedRows) -> None:
    by_block(x, shared.block_size).index_copy_(0, shared.rows, rows.to(x.dtype))
