"""Sends queries between ranks. Each rank attends the shared rows of all ranks to its own columns, and their owners merge the
partial results."""

from __future__ import annotations

import torch

from .calls import PartialAttention, QueryRows
from .routes import Route, SharedRows
from .transfer import Message, PendingExchange, as_blocks, as_tokens, split_packed

_Exchanges = tuple[PendingExchange, PendingExchange]


def send_queries(q: torch.Tensor, shared: SharedRows, route: Route) -> PendingExchange:
    """Sends the rank's shared rows of q to all ranks. The shared rows of all ranks arrive."""
    return _send_to_all(_take_shared_rows(q, shared), shared, route)


def attend_queries(
    q: PendingExchange, k: torch.Tensor, v: torch.Tensor, run: PartialAttention, shared: SharedRows, route: Route
) -> _Exchanges:
    """Attends the queries that arrived to the rank's own columns, and sends the results to their owners, who get (out, lse)."""
    out, lse = run.forward(as_tokens(q.wait()), k, v, shared.mask)
    return _return_to_owners(out, shared, route), _return_to_owners(lse[..., None], shared, route)


def merge_shared_rows(out: torch.Tensor, lse: torch.Tensor, partials: _Exchanges, shared: SharedRows) -> None:
    """Merges the partial results of the rank's shared rows, and writes them to out and lse."""
    outs, logs = (partial.wait() for partial in partials)
    total = logs.logsumexp(0)
    # A query that keeps nothing has lse -inf in every partial result: its weights are 0, not NaN.
    weights = (logs - total).exp().masked_fill(logs == float("-inf"), 0)
    _write(out, (weights * outs).sum(0), shared)
    _write(lse[..., None], total, shared)


def send_results(rows: QueryRows, shared: SharedRows, route: Route) -> _Exchanges:
    """Sends to all ranks what the gradients of the rank's shared rows need: (q and dout, lse and delta - dlse of each query)."""
    q, dout, out, lse = (_take_shared_rows(t, shared) for t in (rows.q, rows.dout, rows.out, rows.lse[..., None]))
    # The gradient of a score is p * (dp - delta), so out and dlse enter only through delta (arXiv:2307.08691, Alg. 2).
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    if rows.dlse is not None:
        delta -= _take_shared_rows(rows.dlse[..., None], shared)
    # Back ends get delta as a gradient of lse. For a query that keeps nothing, 0 * dout may be NaN.
    delta.masked_fill_(lse.isneginf(), 0.0)
    return _send_to_all(torch.cat([q, dout], -1), shared, route), _send_to_all(torch.cat([lse, delta], -1), shared, route)


def differentiate_queries(
    results: _Exchanges, k: torch.Tensor, v: torch.Tensor, run: PartialAttention, shared: SharedRows, route: Route
) -> tuple[PendingExchange, torch.Tensor, torch.Tensor]:
    """Returns (partial dq of the rank's shared rows, arriving; dk, dv of its own columns from the shared rows of all ranks)."""
    packed, logs = (as_tokens(sent.wait()) for sent in results)
    q, dout = split_packed(packed, k.shape[3])
    lse, delta = (t.contiguous() for t in logs.unbind(-1))
    dq, dk, dv = run.backward(QueryRows(q, dout, -delta, torch.zeros_like(dout), lse), k, v, shared.mask)
    return _return_to_owners(dq, shared, route), dk, dv


def write_query_gradients(dq: torch.Tensor, partial: PendingExchange, shared: SharedRows) -> None:
    """Sums partial dq of the rank's shared rows in the order of ranks, and writes it to dq."""
    wide = torch.promote_types(dq.dtype, torch.float32)
    _write(dq, partial.wait().sum(0, dtype=wide), shared)


def _take_shared_rows(x: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """Returns (blocks, block, batch, heads, size): the rank's shared rows of x, (batch, heads, tokens, size)."""
    return as_blocks(x, shared.block_size).index_select(0, shared.rows)


def _send_to_all(blocks: torch.Tensor, shared: SharedRows, route: Route) -> PendingExchange:
    message = Message.allocate(blocks, shared.traffic, route)
    message.pieces.unflatten(0, (len(shared.traffic.sends), len(blocks))).copy_(blocks)
    return message.send()


def _return_to_owners(x: torch.Tensor, shared: SharedRows, route: Route) -> PendingExchange:
    """Sends the rows of x, (batch, heads, tokens of all shared rows, size), to their owners. The rank's own shared rows arrive from
    all ranks: (ranks, blocks, block, batch, heads, size)."""
    traffic, blocks = shared.traffic.reverse, as_blocks(x, shared.block_size)
    message = Message.allocate(blocks, traffic, route)
    message.pieces.copy_(blocks)
    returning = message.send()
    return returning._replace(received=returning.received.unflatten(0, (len(traffic.receives), len(shared.rows))))


def _write(x: torch.Tensor, rows: torch.Tensor, shared: SharedRows) -> None:
    as_blocks(x, shared.block_size).index_copy_(0, shared.rows, rows.to(x.dtype))
