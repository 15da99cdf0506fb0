"""A checked attention call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..masks.block_mask import BlockMask
from ..masks.pattern import Pattern
from ..variant.variant import Variant


class AttentionCall(NamedTuple):
    """The arguments of ``sf.attention``, checked and resolved.

    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim). v: (batch, kv_heads, kv_len, v_head_dim).
    given: the mask as the caller passed it. mask: the table that a back end walks, None for dense; spec text where the operator
    looks up the table. scale: None within torch.compile, for 1 / sqrt(head_dim). backend: as requested, possibly "auto". sinks:
    (heads,) or None. selected: the back end chosen for an earlier call like this one, or None. key: everything that the choice
    depends on; None if it is not remembered.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    given: BlockMask | Pattern | str | None
    mask: BlockMask | str | None
    scale: float | None
    deterministic: bool
    backend: str
    variant: Variant | None
    sinks: torch.Tensor | None
    return_lse: bool
    selected: str | None
    key: tuple[object, ...] | None
