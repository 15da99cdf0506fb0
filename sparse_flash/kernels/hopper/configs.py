"""Shapes of the Hopper kernels' rings: frozen data, apart from the code that they drive."""

from dataclasses import dataclass

NUM_WARPS = {"forward": 4, "backward": 8}  # of the first partition; Gluon adds those of the others


@dataclass(frozen=True)
class ForwardConfig:
    """stages: tiles of 128 keys, and of their values, that shared memory holds. registers: a thread of the second
    warp group."""

    stages: int
    registers: int = 240


@dataclass(frozen=True)
class BackwardConfig:
    """queries: of a step. q_stages, dout_stages: tiles of queries and of their gradients that shared memory holds."""

    queries: int
    q_stages: int
    dout_stages: int


# By padded head_dim.
FORWARD = {64: ForwardConfig(3), 128: ForwardConfig(2)}
BACKWARD = {64: BackwardConfig(128, 3, 2), 128: BackwardConfig(64, 3, 2)}
