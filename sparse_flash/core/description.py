"""The description of a call, by which back ends accept or refuse it."""

from dataclasses import dataclass
from typing import Self

import torch

from .caches import E4M3
from .eight_bits import EIGHT_BITS
from .variant import ScoreFunction, Variant


@dataclass(frozen=True)
class Call:
    """Describes a call without its tensors. Lengths are in tokens."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    block_size: int | None  # None: dense
    deterministic: bool = False
    features: tuple[str, ...] = ()  # ``Variant.features``, and ``EIGHT_BITS``
    score_mod: ScoreFunction | None = None
    v_head_dim: int = 0  # 0: head_dim, the one of q and k
    score_params: tuple[torch.dtype, ...] = ()
    softcap: float = 0.0  # 0: none
    e4m3: bool = False  # whether k and v are

    def __post_init__(self):
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_size: int | None,
        variant: Variant | None = None,
        deterministic: bool = False,
        precision: str | None = None,
    ) -> Self:
        """Describes the call on these tensors."""
        (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
        sizes = batch, heads, kv_heads, q_len, kv_len, head_dim, block_size
        variant = Variant() if variant is None else variant
        features = variant.features + (() if precision is None else (EIGHT_BITS,))
        params = tuple(t.dtype for t in variant.score_params)
        of_v = v.shape[3], params, variant.softcap, k.dtype == E4M3
        return cls(q.device, q.dtype, *sizes, deterministic, features, variant.score_mod, *of_v)


def eight_bits_refusal(call: Call) -> str | None:
    """The refusal of a call in e4m3 with other features."""
    features = [name for name in call.features if name != EIGHT_BITS]
    return f"in {EIGHT_BITS} it does not support {' and '.join(features)}" if features else None
