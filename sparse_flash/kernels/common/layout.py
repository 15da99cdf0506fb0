"""The memory order of results: for launchers, back ends and the operators' fake implementations. Imports no triton."""

import torch


def empty_out(q: torch.Tensor, v_head_dim: int, device=None) -> torch.Tensor:
    """Allocates out: (batch, heads, q_len, v_head_dim) in q's memory order. device: q's by default."""
    if q.shape[3] == v_head_dim:
        return torch.empty_like(q, device=device)
    shape, strides = (*q.shape[:3], v_head_dim), q.stride()
    # Broadcast dimensions (stride 0) have no order. Among equal strides the last dimension is innermost, as kernels need it.
    outermost_first = range(4) if 0 in strides else sorted(range(4), key=lambda axis: (-strides[axis], axis))
    back = [outermost_first.index(axis) for axis in range(4)]
    return q.new_empty([shape[axis] for axis in outermost_first], device=device).permute(back)
