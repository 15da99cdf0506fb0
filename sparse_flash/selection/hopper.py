"""Attention over picked blocks on Hopper GPUs (H100, H200): like ``triton``, except that the two kernels which gather queries by
key block are written for these chips."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..core import hopper as backend_of_masks
from ..core.description import Call
from . import triton
from .block_selection import BlockSelection

BLOCK_SIZES = (64, 128, 256, 512)
HEAD_DIMS = range(33, 129)


def supports(call: Call, selection: BlockSelection) -> str | None:
    if (reason := backend_of_masks.why_unavailable()) is not None:
        return reason
    if call.block_size not in BLOCK_SIZES:
        return f"it runs picks of blocks of {', '.join(map(str, BLOCK_SIZES))} keys; got {call.block_size}"
    if call.head_dim not in HEAD_DIMS:
        return f"it runs head_dim {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; got {call.head_dim}"
    if call.v_head_dim != call.head_dim:
        return f"it runs v of the head_dim of q and k; got head_dim {call.v_head_dim} of v and {call.head_dim} of q and k"
    # Masks have other block sizes.
    return backend_of_masks.supports(replace(call, block_size=BLOCK_SIZES[0])) or triton.supports(call, selection)


def forward(*call: Any) -> tuple[Tensor, Tensor]:
    """Does what ``triton.forward`` does."""
    from .kernels.hopper_forward import picked_parts

    return triton.forward(*call, parts_kernel=picked_parts)


def backward(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Does what ``triton.backward`` does."""
    from .kernels import hopper_backward

    return triton.backward(*call, gathering=hopper_backward)


# The masses of picked blocks are a single product, and are not often asked for.
block_lse = triton.block_lse
block_lse_backward = triton.block_lse_backward
