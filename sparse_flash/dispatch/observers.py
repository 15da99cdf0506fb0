"""Observers of attention calls: none, or shadow checks (``tools.shadow_check``).

An observer has ``notify(q, k, v, mask, scale, out, lse, variant)``, called after each eager call. q, k and v are this
call's own uses of its inputs, so their gradients come from this call alone. mask: as it was given. variant: a Variant or None.
"""

from __future__ import annotations

import torch

observers: list = []


def is_observed() -> bool:
    # In this order: a graph of torch.compile must not depend on observers.
    return not torch.compiler.is_compiling() and bool(observers)


def notify(*call) -> None:
    """Shows a call to all observers."""
    for observer in list(observers):
        observer.notify(*call)
