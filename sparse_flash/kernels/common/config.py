"""A kernel's tile and launch options, how head dimensions are padded, and the limits of a grid."""

from dataclasses import dataclass, replace

SECOND_AXIS = 65535  # programs that CUDA allows along the second axis of a grid; along the first, 2^31 - 1


@dataclass(frozen=True)
class Config:
    """tile_m, tile_n: queries and keys per step. num_warps, num_stages: Triton's launch options."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def shrink_config(config: Config) -> Config | None:
    """A config that takes less shared memory: one stage less, then half the longer side of the tile; None for the smallest."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1)
    tile_m, tile_n = config.tile_m, config.tile_n
    if tile_m == tile_n == 16:
        return None
    tile_m, tile_n = (tile_m // 2, tile_n) if tile_m >= tile_n else (tile_m, tile_n // 2)
    return replace(config, tile_m=tile_m, tile_n=tile_n, num_warps=max(1, min(config.num_warps, tile_m * tile_n // 512)))


def padded_head_dim(head_dim: int) -> int:
    """The power of two, at least 16, to which kernels pad a head dimension."""
    return max(16, 1 << (head_dim - 1).bit_length())


def used_columns(head_dim: int) -> int:
    """Returns how many columns the products of Hopper kernels cover."""
    return next(columns for columns in (64, 80, 96, 128, 192, 256) if head_dim <= columns)
