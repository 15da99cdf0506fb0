"""Checks the arguments of ``attention_varlen``: packed tensors and the bounds of their documents."""

from itertools import pairwise

import numpy as np
import torch

from ..compat.pytorch import is_recorded
from ..core.arguments import check_alike, check_head_groups
from .documents import PackedDocuments


def check_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks as ``check_tensors`` does, for ``attention_varlen``, whose tensors have no batch dimension and may be empty."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have shape (tokens of all documents, heads, head_dim); got {tuple(tensor.shape)}")
        if tensor.shape[2] == 0:
            raise ValueError(f"{name} must have a head_dim of at least 1; got shape {tuple(tensor.shape)}")
    check_alike(q, k, v)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must agree in tokens and heads; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must agree in head_dim, the last dimension; got {tuple(q.shape)} and {tuple(k.shape)}")
    check_head_groups(q.shape[1], k.shape[1])


def to_documents(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int | None) -> PackedDocuments:
    """The packed documents of x, (tokens, heads, head_dim). Raises as ``resolve_longest`` does."""
    longest = resolve_longest(name, x, cu_seqlens, longest)
    return PackedDocuments(cu_seqlens.contiguous(), len(x), longest)


def resolve_longest(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int | None) -> int:
    """The length that no document of x, (tokens, heads, head_dim), exceeds. Raises ValueError or TypeError where cu_seqlens,
    checked as far as the host can see, or ``longest`` does not fit x. name: what errors call x."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(
            f"cu_seqlens_{name} must be a tensor on {x.device}; got {type(cu_seqlens).__name__}; "
            f"use torch.tensor(..., dtype=torch.int32, device={str(x.device)!r})"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens_{name} must be int32 or int64 of shape (documents + 1,), at least one document; "
            f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens_{name} is on {cu_seqlens.device} and {name} on {x.device}; use .to({str(x.device)!r})")
    tokens = len(x)
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, (int, np.integer)) or longest < 0):
        raise ValueError(f"max_seqlen_{name} must be a number of tokens on the host, an int of at least 0; got {longest!r}")
    longest = tokens if longest is None else min(longest if isinstance(longest, int) else int(longest), tokens)
    if x.device.type == "cpu" and not is_recorded(x.device):
        _check_bounds(name, cu_seqlens.tolist(), tokens, longest)
    return longest


def _check_bounds(name: str, bounds: list[int], tokens: int, longest: int) -> None:
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[0] != 0 or min(lengths) < 0 or bounds[-1] > tokens:
        raise ValueError(
            f"cu_seqlens_{name} must start with 0, not decrease, and end with at most the {tokens} tokens of {name}; "
            f"got {bounds if len(bounds) < 6 else f'{bounds[:4]} ... {bounds[-1]}'}"
        )
    if max(lengths) > longest:
        raise ValueError(f"a document of {name} has {max(lengths)} tokens, more than max_seqlen_{name}={longest}")
