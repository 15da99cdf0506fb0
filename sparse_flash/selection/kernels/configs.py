"""Tile sizes of the kernels of picked blocks that run on any GPU. A tile always has ROWS rows."""

from dataclasses import replace

import torch

from ...kernels.common.config import Config
from ...kernels.launch.memory import cached_until_cleared
from ...kernels.portable.configs import detect_gpu

# By the keys of a block: smaller blocks have the first entry, larger ones the last. A key block of one step stays in shared memory.
# docs/performance/selection.md, "Tile sizes", has the figures.
_CONFIGS = {
    "parts": {64: Config(64, 64, 4, 1), 128: Config(64, 128, 4, 2), 256: Config(64, 64, 4, 3)},
    "visit": {64: Config(64, 64, 4, 3)},
    "grad_kv": {64: Config(64, 64, 4, 2), 128: Config(64, 128, 8, 2)},
    "grad_q": {64: Config(64, 64, 4, 2)},
}
_CONFIGS_256 = {  # above head_dim 128
    "parts": {64: Config(64, 64, 8, 1)},
    "visit": {64: Config(64, 64, 8, 2)},
    "grad_kv": {64: Config(64, 64, 8, 1)},
    "grad_q": {64: Config(64, 64, 8, 1)},
}
_LITTLE_SHARED, _KEYS_OF_LITTLE_SHARED = 160 * 1024, 32
_KEYS_OF_FLOAT32 = {16: 64, 32: 64, 64: 32, 128: 16, 256: 16}


@cached_until_cleared
def selection_config(kernel: str, dtype: torch.dtype, dim: int, block_size: int, device: torch.device) -> Config:
    """Returns the config of a kernel. dim: padded, the larger of q's and v's. block_size: the most keys of a step."""
    table = (_CONFIGS_256 if dim > 128 else _CONFIGS)[kernel]
    config = table[min(max(table), max(64, block_size))]
    keys = min(config.tile_n, block_size)
    if detect_gpu(device).shared <= _LITTLE_SHARED:
        keys = min(keys, _KEYS_OF_LITTLE_SHARED)
    if dtype == torch.float32:
        return replace(config, tile_n=min(keys, _KEYS_OF_FLOAT32[dim]), num_warps=8, num_stages=1)
    return replace(config, tile_n=keys)
