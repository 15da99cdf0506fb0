"""Who looks on while attention is computed: nobody, or shadow checks (``tools.shadow_check``).

An observer has ``saw(q, k, v, mask, scale, out, lse, variant)``: the tensors of one call, where q, k and v are this call's own
uses of what it was given, so that their gradients are this call's alone. mask: as it was given. variant: a Variant or None. It is
called after each eager call.
"""

from __future__ import annotations

import torch

observers: list = []


def looked_at() -> bool:
    # In this order: a graph of torch.compile must not depend on who looks on.
    return not torch.compiler.is_compiling() and bool(observers)


def saw(*call) -> None:
    """Shows a call to all observers."""
    for observer in list(observers):
        observer.saw(*call)
