"""Tile sizes of the portable kernels: measured on Hopper, and a rule for other chips, from what a chip reports.

docs/chips.csv has the shared memory, registers and spills of the kernels, compiled for each chip.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from ..common.config import Config, padded_head_dim
from ..common.variant import KernelVariant
from ..launch.memory import cached_until_cleared

# By kernel, bytes of an element, and whether a program has _LARGE_KIB of shared memory: tile_m, tile_n, num_warps and num_stages
# for each of _DIMS. A kernel without an entry for True takes the one for False. Entries for True were measured on an H200 at
# head_dim 64 and 128: docs/performance/kernels.md, "Portable tile sizes". All others were compiled, and chosen by registers, spills
# and shared memory.
_DIMS = (32, 64, 128, 256)  # padded; a call takes the smallest that fits
_TILES = {
    # Two programs of four warps share a multiprocessor, and one computes while the other starts or ends.
    ("forward", 2, True): ((128, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
    ("grad_q", 2, True): ((128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 2)),
    ("grad_kv", 2, True): ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 8, 2)),
    # For products that read operands from registers (mma.sync), as on all GPUs with less shared memory.
    ("forward", 2, False): ((128, 64, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 3)),
    ("grad_q", 2, False): ((128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (32, 32, 4, 2)),
    ("grad_kv", 2, False): ((64, 64, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 2)),
    # For few queries: two programs per multiprocessor.
    ("decode", 2, False): ((64, 64, 8, 3), (64, 64, 8, 3), (32, 64, 8, 3), (16, 32, 4, 3)),
    # fp32 products do not use tensor cores: small tiles, to fit in registers. With four warps dK and dV would spill 880 to 1,800
    # bytes a thread.
    ("forward", 4, False): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
    ("grad_q", 4, False): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
    ("grad_kv", 4, False): ((64, 32, 4, 2), (32, 32, 8, 2), (32, 32, 8, 2), (16, 16, 4, 2)),
    ("decode", 4, False): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
}
_LARGE_KIB, _KIB_OF_THREE_STAGES = 227, 160
_LEAST_KIB = 99  # for the smallest of these tiles
# For e4m3 caches on Hopper without a table, and up to 16 rows of queries: half as many steps, of twice the keys. With a table or
# scales of tokens it takes more registers than two programs have (docs/internals/decoding.md has the figures).
STEPS_OF_128 = Config(16, 128, 8, 3)
KERNELS = ("forward", "grad_q", "grad_kv")
OLDEST = (8, 0)  # the oldest compute capability that Triton supports


class Gpu(NamedTuple):
    """A GPU. capability: its compute capability. shared: bytes of shared memory available to a program."""

    capability: tuple[int, int]
    shared: int

    @property
    def has_large_memory(self) -> bool:
        """Whether programs have the shared memory of 9.0, 10.x and 11.0; products of other chips read registers (mma.sync)."""
        return self.shared >= _LARGE_KIB * 1024

    def config(self, kernel: str, dtype: torch.dtype, dim: int) -> Config:
        """The config before it is fitted to a table's block. dim: padded."""
        by_dim = _TILES.get((kernel, dtype.itemsize, self.has_large_memory)) or _TILES[kernel, dtype.itemsize, False]
        tile_m, tile_n, warps, stages = next(tile for most, tile in zip(_DIMS, by_dim, strict=True) if dim <= most)
        return Config(tile_m, tile_n, warps, min(stages, 3 if self.shared >= _KIB_OF_THREE_STAGES * 1024 else 2))


HOPPER = Gpu((9, 0), 232448)


@cache
def detect_gpu(device: torch.device) -> Gpu:
    """Returns a GPU as its driver reports it; HOPPER for the interpreter, on a CPU."""
    if device.type != "cuda":
        return HOPPER
    from triton.runtime import driver

    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return Gpu((properties.major, properties.minor), shared)


def refusal(device: torch.device, e4m3: bool = False) -> str | None:
    """Why the kernels do not run on this GPU, or None. e4m3: whether they must read e4m3 caches."""
    (major, minor), shared = chip = detect_gpu(device)
    if chip.capability < OLDEST:
        return f"Triton needs compute capability {OLDEST[0]}.{OLDEST[1]} or newer; this GPU has {major}.{minor}"
    if shared < _LEAST_KIB * 1024:
        return f"its tiles need {_LEAST_KIB} KiB of shared memory a program; this GPU has {shared // 1024}"
    if e4m3 and chip.capability < (8, 9):
        return f"it reads e4m3 caches on GPUs of compute capability 8.9 or newer; this GPU has {major}.{minor}"
    return None


@cached_until_cleared
def builtin_config(
    chip: Gpu, kernel: str, dtype: torch.dtype, head_dim: int, block_size: int | None, v_head_dim: int | None = None
) -> Config:
    """The built-in config for a table's block. kernel: one of KERNELS."""
    dim = padded_head_dim(max(head_dim, v_head_dim or 0))
    config = chip.config(kernel, dtype, dim)
    if block_size is None:
        return config
    tile_m, tile_n = min(config.tile_m, block_size), min(config.tile_n, block_size)
    if (tile_m, tile_n) == (config.tile_m, config.tile_n):
        return config
    # A backward pass holds its tile's rows in registers. With 32 rows of wide heads it spills up to 6,400 bytes a thread.
    if kernel == "grad_q" and dim > 128:
        tile_m = min(16, tile_m)
    if kernel == "grad_kv" and dim > 64:
        tile_n = min(16, tile_n)
    warps = min(config.num_warps, _useful_warps(kernel, tile_m, tile_n, dim))
    return replace(config, tile_m=tile_m, tile_n=tile_n, num_warps=warps)


def _useful_warps(kernel: str, tile_m: int, tile_n: int, dim: int) -> int:
    """How many warps a tile takes, measured for blocks of 16 and 32: docs/performance/kernels.md. dim: padded."""
    columns = 64 if kernel == "forward" else max(64, dim)
    return max(1, min(8, tile_m * tile_n * columns // 2**15))


def adapt_to_variant(config: Config, kernel: str, chip: Gpu, given: KernelVariant, switches: dict, dim: int) -> Config:
    """The config for a variant of a kernel. kernel: one of KERNELS. dim: padded.

    dQ: a bias with a user's function takes 262 KB for 128 queries at head_dim 128, more than any chip has. Lengths: if products
    read operands from registers, four warps spill 200 to 1,600 bytes a thread at head_dim 128, and eight at most 100. dK and dV on
    Hopper in blocks of 32 at head_dim 256 spill 2,200 and 16.
    """
    biased = given.rel_bias is not None and switches["SCORE"] is not None
    if kernel == "grad_q" and biased and dim >= 128 and config.tile_m * config.tile_n > 64 * 64:
        config = replace(config, tile_m=config.tile_m // 2)
    if given.q_lens is not None and not chip.has_large_memory and dim >= 128 and config.tile_m * config.tile_n >= 32 * 64:
        config = replace(config, num_warps=max(8, config.num_warps))
    if given.q_lens is not None and kernel == "grad_kv" and dim > 128 and (config.tile_m, config.tile_n) == (32, 16):
        config = replace(config, num_warps=8)
    return config


@cached_until_cleared
def decode_config(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int | None,
    rows: int,
    v_head_dim: int | None = None,
    chip: Gpu = HOPPER,
    e4m3: bool = False,
    alike: bool = False,
) -> Config:
    """The config for few queries and many keys. rows: of stacked queries. e4m3: of the cache. alike: whether its 128 keys share a
    scale."""
    dim = padded_head_dim(max(head_dim, v_head_dim or 0))
    config = chip.config("decode", dtype, dim)
    # From 64 rows on, products read shared memory on Hopper. Triton 3.6's assembler gets the second of two products with the same
    # weights wrong: on an H200 odd columns of out were wrong, and right without its optimization.
    tile_m = min(config.tile_m, 32 if e4m3 else config.tile_m, max(16, 1 << (rows - 1).bit_length()))
    of_hopper = chip.capability == HOPPER.capability and dtype != torch.float32
    if alike and of_hopper and (dim, tile_m) == (128, 16) and block_size is None:
        return STEPS_OF_128
    warps = 4 if tile_m == 16 else config.num_warps
    if e4m3 and 16 < tile_m >= padded_head_dim(v_head_dim or head_dim) // 2:
        warps = tile_m // 16  # Triton divides such products by rows; more warps would repeat work
    return replace(config, tile_m=tile_m, tile_n=min(config.tile_n, block_size or config.tile_n), num_warps=warps)


def combined_at_a_time(rows: int, dim: int) -> int:
    """How many splits of this many rows fit in a program's registers. Unrolled: at head_dim 16, 32 compile in 4 s, 128 in 65 s."""
    return max(1, min(32, 4096 // (rows * dim)))


# Tokens of queries and keys of all heads, for each multiprocessor, up to which both backward passes share a launch. One launch less
# saves time, and each pass fills multiprocessors that the other leaves idle; each step of a key tile must also load out. Measured:
# docs/performance/kernels.md, "Both backward passes in one launch".
ONE_LAUNCH_TOKENS = 128


def takes_one_launch(tokens: int, multiprocessors: int) -> bool:
    """Whether both backward passes share a launch, with the config of dK and dV. tokens: of queries and keys of all heads."""
    return tokens <= ONE_LAUNCH_TOKENS * multiprocessors
