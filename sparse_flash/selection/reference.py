"""Attention over picked blocks by its definition: the oracle of ``core/reference``, on the dense mask of the selection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core import reference as dense
from ..core.call import AttentionCall
from ..core.description import Call
from ..core.results import QueryRows, compute_dtype, lse_to_subtract
from .block_selection import BlockSelection


def supports(call: Call, selection: BlockSelection) -> str | None:
    return dense.supports(call)


def forward(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse), computed in float64 whatever the inputs' dtype."""
    return dense.forward(_to_call(q, k, v, selection, scale))


def backward(rows: QueryRows, k: Tensor, v: Tensor, selection: BlockSelection, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a forward pass recomputed in float64; ``out`` and ``lse`` are not used."""
    q, dout, dlse, out, lse = rows
    return dense.backward(_to_call(q, k, v, selection, scale), dout, dlse, out, lse)


def _to_call(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float) -> AttentionCall:
    """The call over the pairs of a selection by query head, as the part of a BlockMask that the oracle uses."""
    pairs = selection.to_dense().repeat_interleave(q.shape[1] // selection.heads, 1)
    table: Any = SimpleNamespace(to_dense=lambda: pairs)
    return AttentionCall(q, k, v, selection, table, scale, True, "reference")


def block_lse(q: Tensor, k: Tensor, selection: BlockSelection, scale: float) -> Tensor:
    """(batch, heads, q_len, n): see ``operators``."""
    by_block, picks = _scores(q, k, selection, scale).logsumexp(-1), _picks(selection, q)
    result = by_block.gather(3, picks.clamp(min=0)).masked_fill(picks < 0, float("-inf"))
    return result.to(compute_dtype(q))


def block_lse_backward(
    dblock_lse: Tensor, q: Tensor, k: Tensor, block_lse: Tensor, selection: BlockSelection, scale: float
) -> tuple[Tensor, Tensor]:
    """(dq, dk) of a forward pass recomputed in float64; ``block_lse`` is not used."""
    scores, picks = _scores(q, k, selection, scale), _picks(selection, q)
    by_block = scores.logsumexp(-1)
    grads = torch.zeros_like(by_block).scatter_add_(3, picks.clamp(min=0), dblock_lse.double().masked_fill(picks < 0, 0.0))
    shares = (scores - lse_to_subtract(by_block)[..., None]).exp()
    dscores = scale * (shares * grads[..., None]).flatten(3)[..., : selection.kv_len]
    dq, dk = dscores @ _keys(q, k), dscores.mT @ q.double()
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk.unflatten(1, (k.shape[1], -1)).sum(2))


def _picks(selection: BlockSelection, q: Tensor) -> Tensor:
    """(batch, heads, q_len, n) int64."""
    query = torch.arange(selection.q_len, device=q.device)
    return selection.picks[:, :, query // selection.every].long().repeat_interleave(q.shape[1] // selection.heads, 1)


def _keys(q: Tensor, k: Tensor) -> Tensor:
    return k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)


def _scores(q: Tensor, k: Tensor, selection: BlockSelection, scale: float) -> Tensor:
    """(batch, heads, q_len, blocks, block_size) float64, -inf for keys after the query and past the last."""
    query, key = (torch.arange(length, device=q.device) for length in (selection.q_len, selection.kv_len))
    scores = scale * q.double() @ _keys(q, k).mT
    scores = scores.masked_fill(key > query[:, None] + selection.offset, float("-inf"))
    beyond = selection.kv_blocks * selection.block_size - selection.kv_len
    return torch.nn.functional.pad(scores, (0, beyond), value=float("-inf")).unflatten(3, (-1, selection.block_size))
