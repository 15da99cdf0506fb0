"""Layouts of tensors: which ones kernels take, copies of the others, and the memory order of results. Imports no triton."""

from collections.abc import Iterable

import torch


def layouts(tensors: Iterable[torch.Tensor]) -> tuple[object, ...]:
    """Everything of these tensors that a call and its launches depend on, except values and addresses."""
    return tuple([(t.dtype, t.device, t.layout, t.shape, t.stride()) for t in tensors])


def empty_out(q: torch.Tensor, v_head_dim: int, device=None) -> torch.Tensor:
    """Allocates out: (batch, heads, q_len, v_head_dim) in q's memory order and dtype. device: q's by default."""
    if q.shape[3] == v_head_dim:
        return torch.empty_like(q, device=device)
    shape, strides = (*q.shape[:3], v_head_dim), q.stride()
    # Broadcast dimensions (stride 0) have no order. Among equal strides the last dimension is innermost, as kernels need it.
    outermost_first = range(4) if 0 in strides else sorted(range(4), key=lambda axis: (-strides[axis], axis))
    back = [outermost_first.index(axis) for axis in range(4)]
    return q.new_empty([shape[axis] for axis in outermost_first], device=device).permute(back)


def is_addressable(tensor: torch.Tensor) -> bool:
    """Whether TMA can address a tensor: its last dimension must be contiguous, its base and strides multiples of 16 bytes, as in
    joint projections of q, k and v with head dimensions that are multiples of 8."""
    unit = 16 // tensor.element_size()
    *strides, last = tensor.stride()
    pieces = strides[0] | strides[1] | strides[2] | tensor.shape[3]
    # No stride is 0, and all are multiples of 16 bytes.
    return last == 1 and not tensor.data_ptr() % 16 and all(strides) and not pieces % unit


def as_addressable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if TMA can address it, otherwise a copy with rows padded to multiples of 16 bytes."""
    if is_addressable(tensor):
        return tensor
    padded = torch.nn.functional.pad(tensor, (0, -tensor.shape[3] % (16 // tensor.element_size())))
    return padded.clone(memory_format=torch.contiguous_format)  # contiguous() would keep odd strides of size-1 dimensions


def as_contiguous_rows(tensor: torch.Tensor, in_pairs: bool = False) -> torch.Tensor:
    """The tensor if its last dimension is contiguous, otherwise a copy. in_pairs: rows must also begin at even positions."""
    ready = tensor.stride(-1) == 1 and not (in_pairs and any(stride % 2 for stride in tensor.stride()[:3]))
    return tensor if ready else tensor.clone(memory_format=torch.contiguous_format)


def restore_layout(result: torch.Tensor, ready: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Converts a result with the layout of ``ready`` to the head_dim and memory order of ``tensor``."""
    return result if ready is tensor else torch.empty_like(tensor).copy_(result[..., : tensor.shape[3]])


def restore_out(out: torch.Tensor, ready: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Converts out of a kernel that received ``ready`` instead of q: v's head_dim, in q's memory order."""
    fits = ready is q and out.shape[3] == v.shape[3]
    return out if fits else empty_out(q, v.shape[3]).copy_(out[..., : v.shape[3]])
