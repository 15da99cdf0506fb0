"""Helpers of back ends for results: dtypes, queries without keys, merging."""

from typing import NamedTuple

import torch


class QueryRows(NamedTuple):
    """The inputs of a backward pass that belong to queries. dlse: None if nothing depends on lse."""

    q: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def zero_keyless_queries(x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Gradients of results with zeros for queries that keep nothing, to which losses often give NaN gradients."""
    return x.masked_fill(lse.isneginf().view(*lse.shape, *[1] * (x.dim() - lse.dim())), 0.0)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of lse, and of PyTorch operations on x: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def lse_to_subtract(lse: torch.Tensor) -> torch.Tensor:
    """lse with +inf instead of -inf, so that weights without pairs are 0: exp(-inf - inf) is 0, while exp(-inf + inf) is NaN."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def merge_results(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over two sets of keys, from out and lse over each. lse and log are without the last dimension of out and more."""
    total = lse.logaddexp(log)
    base = total.masked_fill(total == float("-inf"), 0.0)
    return out * (lse - base).exp_()[..., None] + more * (log - base).exp_()[..., None], total
