"""A checked attention call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import backends
from ..masks.block_mask import BlockMask
from ..variant.variant import Variant


class ChosenBlocks(NamedTuple):
    """A mask of blocks chosen in a compiled graph, whose table the operator makes: one graph then serves all lengths.

    bits: (batch * heads * q_blocks * ceil(kv_blocks / 32) + 1,) int32, the blocks that are kept. The last element means nothing: it
    keeps the size from being 1, which PyTorch tells from other sizes, and a graph would serve fewer lengths.
    block_size: tokens on a side of a block. within: spec text of what limits the blocks, "" for nothing.
    """

    bits: torch.Tensor
    block_size: int
    within: str


class AttentionCall(NamedTuple):
    """The arguments of one attention call, checked and resolved.

    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim). v: (batch, kv_heads, kv_len, v_head_dim). All are in
    the dtype that autocast asks for.
    mask: as the caller passed it, or as read from another library's mask. table: what a back end reads, None for dense attention
    and for a selection of blocks; spec text or ChosenBlocks if the operator makes the table. scale: None within torch.compile, for
    1 / sqrt(head_dim). deterministic: True or False, never None. backend: the one that runs the call; "auto" if the operator
    chooses. precision: "fp8" or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: object
    table: BlockMask | ChosenBlocks | str | None
    scale: float | None
    deterministic: bool
    backend: str
    variant: Variant | None = None
    precision: str | None = None


def backend_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: BlockMask | ChosenBlocks | str | None,
    variant: Variant | None,
    deterministic: bool,
    backend: str,
    precision: str | None = None,
) -> str:
    """The back end that runs a call: the one asked for, or for "auto" the fastest that supports it. Raises ValueError if there is
    none. Unchanged if the operator chooses: a choice that depends on a length would make torch.compile recompile."""
    if isinstance(table, str) or torch.compiler.is_compiling():
        return backend
    block_size = None if table is None else table.block_size
    return backends.choose_backend(backend, backends.Call.from_tensors(q, k, v, block_size, variant, deterministic, precision))
