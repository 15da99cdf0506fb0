"""Changes of a call besides its mask: learned sinks, changes of scores, documents back to back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparse_flash.core.variant import ScoreFunction

CAP, SLOPE = 20.0, 0.01


def _fade(score, batch, head, q_pos, k_pos, params):
    return score * (1.0 - 1e-5 * (q_pos - k_pos))


_KERNELS: tuple[Any, ...] = ()
try:
    import triton

    @triton.jit
    def _slope(score, batch, head, q_pos, k_pos, params):
        return 1.0 - 1e-5 * (q_pos - k_pos)

    _KERNELS = triton.jit(_fade), _slope
except ImportError:
    pass
FADE = ScoreFunction(_fade, *_KERNELS)


@dataclass(frozen=True)
class Change:
    """score: of (score, batch, head, query, key), as FlexAttention calls it, and the float64 reference. arguments: of
    ``sparse_flash.attention``, for query heads on a device. sinks: whether each head has a learned logit. packed: whether the calls
    are those for documents back to back."""

    score: Callable[..., torch.Tensor] | None = None
    arguments: Callable[[int, torch.device], dict[str, Any]] = lambda heads, device: {}
    sinks: bool = False
    packed: bool = False


CHANGES = {
    "": Change(),
    "sinks": Change(sinks=True),
    "soft cap": Change(lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), lambda heads, device: {"softcap": CAP}),
    "ALiBi": Change(
        lambda s, b, h, q, k: s - SLOPE * (q - k).abs(),
        lambda heads, device: {"alibi_slopes": torch.full((heads,), SLOPE, device=device)},
    ),
    "function": Change(lambda s, b, h, q, k: _fade(s, b, h, q, k, ()), lambda heads, device: {"score_mod": FADE}),
    "varlen": Change(packed=True),
}
