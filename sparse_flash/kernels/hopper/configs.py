"""Shapes of the Hopper kernels' rings: frozen data, apart from the code that they drive."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardConfig:
    """stages: tiles of 128 keys, and of their values, that shared memory holds; 2 to 4. registers: a thread of the second
    warp group; the first gets what is left."""

    stages: int
    registers: int = 240

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4}  # of the first partition; Gluon adds those of the others


@dataclass(frozen=True)
class BackwardConfig:
    """queries: of a step, 64 or 128. dout_stages: tiles of their gradients that shared memory holds, 2 to 4; it holds one
    tile of queries more, as scores are computed a step ahead."""

    queries: int
    dout_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 8}


# By padded head_dim.
FORWARD = {64: ForwardConfig(3), 128: ForwardConfig(2)}
BACKWARD = {64: BackwardConfig(128, 2), 128: BackwardConfig(64, 2)}
