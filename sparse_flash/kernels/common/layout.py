"""How results lie in memory: for launchers, back ends and the operators' fakes. Imports no triton."""

import torch


def empty_out(q: torch.Tensor, v_head_dim: int, device=None) -> torch.Tensor:
    """Room for out: (batch, heads, q_len, v_head_dim) in q's memory order. device: q's by default."""
    if q.shape[3] == v_head_dim:
        return torch.empty_like(q, device=device)
    shape, strides = (*q.shape[:3], v_head_dim), q.stride()
    # What is repeated in memory (stride 0) has no place there. Of equal strides the last is innermost, as kernels need it.
    outermost_first = range(4) if 0 in strides else sorted(range(4), key=lambda axis: (-strides[axis], axis))
    back = [outermost_first.index(axis) for axis in range(4)]
    return q.new_empty([shape[axis] for axis in outermost_first], device=device).permute(back)
