"""Tile sizes of the portable kernels: frozen data, chosen by measurement, apart from the code that they drive."""

from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import product
from math import log2

import torch

from .tuned import choose, key_of, remembered


@dataclass(frozen=True)
class Config:
    """tile_m, tile_n: queries and keys of one step. num_warps, num_stages: Triton's launch options."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# By padded head_dim. Measured on an H200 (bf16, torch 2.11, triton 3.6, 2026-11-20) over dense, causal, window and butterfly
# masks of 16,384 tokens; TFLOP/s are over kept pairs, each pass counted by its own products. Two programs of four warps
# share a multiprocessor, and one computes while the other starts or ends: on short rows that is worth 6 to 20 %.
# Entries without figures were not measured; they are chosen by what compiling for sm_90 says of registers and spills.
_FORWARD = {
    16: Config(128, 64, 4, 3),
    32: Config(128, 64, 4, 3),
    # 442 dense, 436 causal, 374 butterfly; (128, 64, 4, 3): 435, 413, 377; (128, 128, 8, 3): 397, 377, 314.
    64: Config(64, 128, 4, 3),
    # 558 dense, 483 causal, 429 butterfly; (128, 64, 8, 3): 470, 468, 402; with two stages: 470, 425, 408.
    128: Config(64, 64, 4, 3),
    256: Config(128, 64, 8, 2),
}
_GRAD_Q = {
    16: Config(128, 64, 4, 3),
    32: Config(128, 64, 4, 3),
    # 632 dense, 639 causal, 534 butterfly; (64, 64, 4, 2): 604, 569, 482.
    64: Config(128, 64, 4, 3),
    # 649 dense, 642 causal, 510 butterfly; (64, 64, 4, 2): 634, 569, 508.
    128: Config(128, 64, 8, 3),
    256: Config(64, 32, 4, 2),
}
_GRAD_KV = {
    16: Config(64, 64, 4, 3),
    32: Config(64, 64, 4, 3),
    # 524 dense, 457 causal, 395 butterfly; (128, 64, 4, 2): 540, 314, 277; (32, 128, 4, 3): 446, 447, 417.
    64: Config(64, 64, 4, 3),
    # 578 dense, 580 causal, 489 butterfly; (64, 128, 8, 3): 575, 557, 467; three stages spill: 495, 472, 389.
    128: Config(64, 64, 4, 2),
    256: Config(32, 64, 8, 2),
}
# For few queries; of one query of a few heads, with four warps. Not measured yet: chosen by what compiling for sm_90 says of
# registers, spills and shared memory, of which two programs a multiprocessor shall have enough.
_DECODE = {
    16: Config(64, 64, 8, 3),
    32: Config(64, 64, 8, 3),
    64: Config(64, 64, 8, 3),
    128: Config(32, 64, 8, 3),
    256: Config(16, 32, 4, 3),
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


def _fitted(
    table: dict[int, Config], dtype: torch.dtype, head_dim: int, block_size: int | None, v_head_dim: int | None = None
) -> Config:
    config = (_FLOAT32 if dtype == torch.float32 else table)[padded_head_dim(max(head_dim, v_head_dim or 0))]
    if block_size is None:
        return config
    tile_m, tile_n = min(config.tile_m, block_size), min(config.tile_n, block_size)
    # A tensor-core step wants 64 x 64 a warp group; smaller tiles leave warps without work.
    warps = max(1, min(config.num_warps, tile_m * tile_n // 512))
    return replace(config, tile_m=tile_m, tile_n=tile_n, num_warps=warps)


_TABLES = {"forward": _FORWARD, "grad_q": _GRAD_Q, "grad_kv": _GRAD_KV}
KERNELS = tuple(_TABLES)
MOST_CANDIDATES = 24
_LARGEST_TILE = 128


def candidates(
    kernel: str, dtype: torch.dtype, head_dim: int, block_size: int | None, v_head_dim: int | None = None
) -> tuple[Config, ...]:
    """What is worth measuring, MOST_CANDIDATES at most and all distinct: the built-in config, then its neighbours, nearest
    first: a tile halved or doubled, warps halved or doubled, a stage more or less; two such changes at most.

    kernel: one of KERNELS. v_head_dim: that of q and k by default. Tiles are powers of two that divide the table's block.
    """
    builtin = _fitted(_TABLES[kernel], dtype, head_dim, block_size, v_head_dim)
    largest = min(_LARGEST_TILE, block_size or _LARGEST_TILE)
    found = []
    for changes in product((0, 1, -1), repeat=4):
        m, n, warps, stages = changes
        config = Config(
            int(builtin.tile_m * 2**m), int(builtin.tile_n * 2**n), int(builtin.num_warps * 2**warps), builtin.num_stages + stages
        )
        fits = min(config.tile_m, config.tile_n) >= 16 and max(config.tile_m, config.tile_n) <= largest
        # Warps: as in _fitted. Below two stages nothing is loaded ahead; above four, shared memory is full.
        most_warps = max(builtin.num_warps, min(8, config.tile_m * config.tile_n // 512))
        fits = fits and 1 <= config.num_warps <= most_warps
        if config == builtin or (fits and 2 <= config.num_stages <= 4 and sum(map(abs, changes)) <= 2):
            found.append(config)
    return tuple(sorted(found, key=lambda config: _distance(config, builtin))[:MOST_CANDIDATES])


def _distance(one: Config, other: Config) -> float:
    """Changes between two configs, as ``candidates`` counts them."""
    *sizes, stages = zip(astuple(one), astuple(other), strict=True)
    return sum(abs(log2(a / b)) for a, b in sizes) + abs(stages[0] - stages[1])


@lru_cache(maxsize=256)
def decode_config(dtype: torch.dtype, head_dim: int, block_size: int | None, rows: int, v_head_dim: int | None = None) -> Config:
    """For few queries against many keys. rows: of stacked queries, of several heads, so that tile_m may pass the table's
    block."""
    config = (_FLOAT32 if dtype == torch.float32 else _DECODE)[padded_head_dim(max(head_dim, v_head_dim or 0))]
    tile_m = min(config.tile_m, max(16, 1 << (rows - 1).bit_length()))
    return replace(
        config,
        tile_m=tile_m,
        tile_n=min(config.tile_n, block_size or config.tile_n),
        num_warps=4 if tile_m == 16 else config.num_warps,
    )


def _chosen(
    kernel: str, dtype: torch.dtype, head_dim: int, block_size: int | None, device: torch.device, v_head_dim: int | None
) -> Config:
    key = key_of("triton", kernel, dtype, padded_head_dim(head_dim), block_size, device, padded_head_dim(v_head_dim or head_dim))
    return choose(candidates(kernel, dtype, head_dim, block_size, v_head_dim), key)


@remembered
def forward_config(
    dtype: torch.dtype, head_dim: int, block_size: int | None, device: torch.device, v_head_dim: int | None = None
) -> Config:
    """For the forward pass: the built-in config, or what ``sparse-flash tune`` chose for this GPU. block_size: the table's, or
    None for dense attention. v_head_dim: that of q and k by default."""
    return _chosen("forward", dtype, head_dim, block_size, device, v_head_dim)


@remembered
def grad_q_config(
    dtype: torch.dtype, head_dim: int, block_size: int | None, device: torch.device, v_head_dim: int | None = None
) -> Config:
    """For the pass over queries that computes dQ."""
    return _chosen("grad_q", dtype, head_dim, block_size, device, v_head_dim)


@remembered
def grad_kv_config(
    dtype: torch.dtype, head_dim: int, block_size: int | None, device: torch.device, v_head_dim: int | None = None
) -> Config:
    """For the pass over keys that computes dK and dV."""
    return _chosen("grad_kv", dtype, head_dim, block_size, device, v_head_dim)
