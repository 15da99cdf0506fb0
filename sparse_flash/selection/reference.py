"""Attention over picked blocks by the oracle of ``core/reference``; masses of blocks by the back end ``torch`` in float64."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core import reference as dense
from ..core.call import AttentionCall
from ..core.description import Call
from ..core.results import QueryRows, compute_dtype
from . import torch as selection_torch
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
    return selection_torch.block_lse(q.double(), k.double(), selection, scale).to(compute_dtype(q))


def block_lse_backward(
    dblock_lse: Tensor, q: Tensor, k: Tensor, block_lse: Tensor, selection: BlockSelection, scale: float
) -> tuple[Tensor, Tensor]:
    """(dq, dk)."""
    dq, dk = selection_torch.block_lse_backward(dblock_lse.double(), q.double(), k.double(), block_lse.double(), selection, scale)
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk)
