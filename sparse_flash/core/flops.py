"""The floating-point operations of a kept pair: for ``explain`` and the benchmarks."""


def forward_flops(head_dim: int, v_head_dim: int) -> int:
    """Returns what a pair takes: its score and its part of out."""
    return 2 * (head_dim + v_head_dim)


def backward_flops(head_dim: int, v_head_dim: int) -> int:
    """Returns what a pair takes: its score again, the gradient of its weight, and its parts of dq, dk and dv."""
    return 2 * (3 * head_dim + 2 * v_head_dim)
