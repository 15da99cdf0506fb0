"""The floating-point operations of a kept pair: for ``explain`` and the benchmarks."""


def forward_flops(head_dim: int, v_head_dim: int) -> int:
    """Counts a pair's score and its term of out."""
    return 2 * (head_dim + v_head_dim)


def backward_flops(head_dim: int, v_head_dim: int) -> int:
    """Counts a pair's recomputed score, the gradient of its weight, and its terms of dq, dk and dv."""
    return 2 * (3 * head_dim + 2 * v_head_dim)
