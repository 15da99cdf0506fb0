"""Tile sizes of the portable kernels: frozen data, chosen by measurement, apart from the code that they drive."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Config:
    """tile_m, tile_n: queries and keys of one step. num_warps, num_stages: Triton's launch options."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


# By padded head_dim. H200, bf16.
_FORWARD = {
    16: Config(128, 64, 4, 3),
    32: Config(128, 64, 4, 3),
    64: Config(128, 128, 8, 3),
    128: Config(128, 64, 8, 3),
    256: Config(128, 64, 8, 2),
}
_GRAD_Q = {
    16: Config(128, 64, 4, 3),
    32: Config(128, 64, 4, 3),
    64: Config(128, 64, 8, 3),
    128: Config(128, 64, 8, 3),
    256: Config(64, 32, 4, 2),
}
_GRAD_KV = {
    16: Config(64, 128, 4, 3),
    32: Config(64, 128, 4, 3),
    64: Config(64, 128, 8, 3),
    128: Config(64, 128, 8, 3),
    256: Config(32, 64, 8, 2),
}
# fp32 products run on the ordinary units, in full precision: small tiles, so that they stay in registers.
_FLOAT32 = {
    16: Config(64, 32, 4, 2),
    32: Config(64, 32, 4, 2),
    64: Config(32, 32, 4, 2),
    128: Config(32, 32, 4, 2),
    256: Config(16, 16, 4, 2),
}


def padded_head_dim(head_dim: int) -> int:
    """The power of two, at least 16, that a head dimension is padded to inside a kernel."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _fitted(table: dict[int, Config], dtype: torch.dtype, head_dim: int, block_size: int | None) -> Config:
    config = (_FLOAT32 if dtype == torch.float32 else table)[padded_head_dim(head_dim)]
    if block_size is None:
        return config
    tile_m, tile_n = min(config.tile_m, block_size), min(config.tile_n, block_size)
    # A tensor-core step wants 64 x 64 a warp group; smaller tiles leave warps without work.
    warps = max(1, min(config.num_warps, tile_m * tile_n // 512))
    return replace(config, tile_m=tile_m, tile_n=tile_n, num_warps=warps)


@lru_cache(maxsize=256)
def forward_config(dtype: torch.dtype, head_dim: int, block_size: int | None) -> Config:
    """For the forward pass; block_size: the table's, or None for dense attention."""
    return _fitted(_FORWARD, dtype, head_dim, block_size)


@lru_cache(maxsize=256)
def grad_q_config(dtype: torch.dtype, head_dim: int, block_size: int | None) -> Config:
    """For the pass over queries that computes dQ."""
    return _fitted(_GRAD_Q, dtype, head_dim, block_size)


@lru_cache(maxsize=256)
def grad_kv_config(dtype: torch.dtype, head_dim: int, block_size: int | None) -> Config:
    """For the pass over keys that computes dK and dV."""
    return _fitted(_GRAD_KV, dtype, head_dim, block_size)
