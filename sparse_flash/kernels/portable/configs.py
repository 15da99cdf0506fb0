"""Tile sizes of the portable kernels: static data by chip family, separate from the code that uses it.

A chip in no family uses the tables of the same maker's family with the most shared memory that does not exceed the chip's.
docs/chips.csv lists what the kernels compile to for each chip: shared memory, registers and spills.
"""

from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import product
from math import log2

import torch

from ..common.config import Config, padded_head_dim
from ..common.variant import KernelVariant
from ..launch.tuned import key_of, remembered, tuned_config

# By padded head_dim. Measured on an H200: docs/performance/kernels.md, "Portable tile sizes". Entries for 16, 32 and 256 were not
# measured, but chosen by register and spill counts when compiled for sm_90. Two programs of four warps share a multiprocessor, and
# one computes while the other starts or ends.
_FORWARD = {
    16: Config(128, 64, 4, 3),
    32: Config(128, 64, 4, 3),
    64: Config(64, 128, 4, 3),
    128: Config(64, 64, 4, 3),
    256: Config(128, 64, 8, 2),
}
_GRAD_Q = {
    16: Config(128, 64, 4, 3),
    32: Config(128, 64, 4, 3),
    64: Config(128, 64, 4, 3),
    128: Config(128, 64, 8, 3),
    256: Config(64, 32, 4, 2),
}
_GRAD_KV = {
    16: Config(64, 64, 4, 3),
    32: Config(64, 64, 4, 3),
    64: Config(64, 64, 4, 3),
    128: Config(64, 64, 4, 2),
    256: Config(32, 64, 8, 2),
}
# For few queries; four warps for one query of few heads. Not measured: chosen by registers, spills and shared memory when compiled
# for sm_90, with enough for two programs per multiprocessor.
_DECODE = {
    16: Config(64, 64, 8, 3),
    32: Config(64, 64, 8, 3),
    64: Config(64, 64, 8, 3),
    128: Config(32, 64, 8, 3),
    256: Config(16, 32, 4, 3),
}
# fp32 products run on the ordinary units, in full precision: small tiles, to fit in registers.
_FLOAT32 = {
    16: Config(64, 32, 4, 2),
    32: Config(64, 32, 4, 2),
    64: Config(32, 32, 4, 2),
    128: Config(32, 32, 4, 2),
    256: Config(16, 16, 4, 2),
}
# With four warps dK and dV would spill 880 to 1,800 bytes a thread.
_GRAD_KV_FLOAT32 = _FLOAT32 | {64: Config(32, 32, 8, 2), 128: Config(32, 32, 8, 2)}


# Compute capability 8.0. mma.sync products read operands from registers, so tiles are 64 x 64; three stages fit.
_FORWARD_80 = {16: Config(128, 64, 4, 3), 32: Config(128, 64, 4, 3), 64: Config(128, 64, 4, 3), 128: Config(64, 64, 4, 3)}
_FORWARD_80 |= {256: Config(64, 32, 4, 3)}
_GRAD_Q_80 = {16: Config(128, 64, 4, 3), 32: Config(128, 64, 4, 3), 64: Config(64, 64, 4, 3), 128: Config(64, 64, 4, 2)}
_GRAD_Q_80 |= {256: Config(32, 32, 4, 2)}
_GRAD_KV_80 = {16: Config(64, 64, 4, 3), 32: Config(64, 64, 4, 3), 64: Config(64, 64, 4, 3), 128: Config(32, 64, 4, 3)}
_GRAD_KV_80 |= {256: Config(32, 32, 4, 2)}

# 99 KiB (compute capability 8.6, 8.9, 12.0): as for 8.0, with two stages.
_FORWARD_99 = {16: Config(128, 64, 4, 3), 32: Config(128, 64, 4, 3), 64: Config(128, 64, 4, 2), 128: Config(64, 64, 4, 2)}
_FORWARD_99 |= {256: Config(64, 32, 4, 2)}
_GRAD_Q_99 = {16: Config(128, 64, 4, 2), 32: Config(128, 64, 4, 2), 64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2)}
_GRAD_Q_99 |= {256: Config(32, 32, 4, 2)}
_GRAD_KV_99 = {16: Config(64, 64, 4, 2), 32: Config(64, 64, 4, 2), 64: Config(64, 64, 4, 2), 128: Config(32, 64, 4, 2)}
_GRAD_KV_99 |= {256: Config(32, 32, 4, 2)}
_DECODE_99 = {16: Config(64, 64, 8, 3), 32: Config(64, 64, 8, 3), 64: Config(64, 64, 8, 3), 128: Config(32, 64, 8, 2)}
_DECODE_99 |= {256: Config(16, 32, 4, 2)}

# gfx942: four warps are 256 threads; with two stages, one tile is in shared memory while the next waits in registers.
_FORWARD_64 = {16: Config(128, 64, 4, 2), 32: Config(128, 64, 4, 2), 64: Config(128, 64, 4, 2), 128: Config(128, 64, 4, 2)}
_FORWARD_64 |= {256: Config(64, 32, 4, 2)}
_GRAD_Q_64 = {16: Config(64, 64, 4, 2), 32: Config(64, 64, 4, 2), 64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2)}
_GRAD_Q_64 |= {256: Config(32, 32, 4, 2)}
_GRAD_KV_64 = {16: Config(64, 64, 4, 2), 32: Config(64, 64, 4, 2), 64: Config(64, 64, 4, 2), 128: Config(32, 64, 4, 2)}
_GRAD_KV_64 |= {256: Config(32, 32, 4, 2)}
_DECODE_64 = {16: Config(64, 64, 4, 2), 32: Config(64, 64, 4, 2), 64: Config(64, 64, 4, 2), 128: Config(32, 64, 4, 2)}
_DECODE_64 |= {256: Config(16, 32, 4, 2)}
_FLOAT32_64 = {16: Config(64, 32, 4, 2), 32: Config(64, 32, 4, 2), 64: Config(32, 32, 4, 2), 128: Config(32, 16, 4, 2)}
_FLOAT32_64 |= {256: Config(16, 16, 4, 1)}


@dataclass(frozen=True)
class Family:
    """Chips that share tables. chips: compute capabilities, or AMD's names. shared: bytes of shared memory available to a program.
    measured: on which chip, where and when, or None: only compiled. tables: for 16-bit types, by kernel. float32: the same for
    float32."""

    name: str
    chips: tuple[tuple[int, int] | str, ...]
    shared: int
    measured: str | None
    tables: dict[str, dict[int, Config]]
    float32: dict[str, dict[int, Config]]

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def amd(self) -> bool:
        return isinstance(self.chips[0], str)

    @property
    def holds_operands(self) -> bool:
        """Whether the tensor cores take operands from registers alone (mma.sync)."""
        return not self.amd and self.chips[0][0] not in (9, 10)

    def config(self, kernel: str, dtype: torch.dtype, dim: int) -> Config:
        """The config before it is fitted to a table's block. dim: padded."""
        return (self.float32 if dtype == torch.float32 else self.tables)[kernel][dim]


def _tables(forward, grad_q, grad_kv, decode) -> dict[str, dict[int, Config]]:
    return {"forward": forward, "grad_q": grad_q, "grad_kv": grad_kv, "decode": decode}


_HOPPER_TABLES = _tables(_FORWARD, _GRAD_Q, _GRAD_KV, _DECODE)
_TABLES_80 = _tables(_FORWARD_80, _GRAD_Q_80, _GRAD_KV_80, _DECODE)
_TABLES_99 = _tables(_FORWARD_99, _GRAD_Q_99, _GRAD_KV_99, _DECODE_99)
_TABLES_64 = _tables(_FORWARD_64, _GRAD_Q_64, _GRAD_KV_64, _DECODE_64)
_FLOAT32_TABLES = _tables(_FLOAT32, _FLOAT32, _GRAD_KV_FLOAT32, _FLOAT32)
_FLOAT32_TABLES_64 = _tables(*[_FLOAT32_64] * 4)
HOPPER = Family(
    "compute capability 9.0", ((9, 0),), 232448, "an H200, torch 2.11, triton 3.6, 2026-11-20", _HOPPER_TABLES, _FLOAT32_TABLES
)
FAMILIES = (
    HOPPER,
    # tcgen05 products: two thirds of the registers of 9.0, and no spills.
    Family("compute capability 10.x", ((10, 0), (10, 3)), 232448, None, _HOPPER_TABLES, _FLOAT32_TABLES),
    Family("compute capability 8.0", ((8, 0), (8, 7)), 166912, None, _TABLES_80, _FLOAT32_TABLES),
    Family("compute capability 8.6, 8.9, 12.x", ((8, 6), (8, 9), (12, 0), (12, 1)), 101376, None, _TABLES_99, _FLOAT32_TABLES),
    Family("gfx942", ("gfx942",), 65536, None, _TABLES_64, _FLOAT32_TABLES_64),
)
OLDEST = (8, 0)  # the oldest compute capability that Triton supports


def family_of_chip(chip: tuple[int, int] | str, shared: int) -> Family | None:
    """The family that names the chip; otherwise the one of its maker with the most shared memory that the chip also has; None if
    the chip has less than all families, or is older than OLDEST. shared: bytes available to a program, as reported by the
    driver."""
    amd = isinstance(chip, str)
    if not amd and chip < OLDEST:
        return None
    fits = [family for family in FAMILIES if family.amd == amd and family.shared <= shared]
    return next((family for family in fits if chip in family.chips), max(fits, key=lambda family: family.shared, default=None))


@cache
def chip_of(device: torch.device) -> tuple[tuple[int, int] | str, int]:
    """(compute capability, or AMD's name; bytes of shared memory available to a program) of a GPU."""
    from triton.runtime import driver

    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return (properties.gcnArchName.split(":")[0] if torch.version.hip else (properties.major, properties.minor)), shared


@cache
def family_of(device: torch.device) -> Family:
    """A GPU's family; Hopper's for the interpreter, on a CPU. Raises ValueError for a GPU that ``refusal`` refuses."""
    if device.type != "cuda":
        return HOPPER
    family = family_of_chip(*chip_of(device))
    if family is None:
        raise ValueError(refusal(device))
    return family


def refusal(device: torch.device, dropout: bool = False, e4m3: bool = False) -> str | None:
    """Why the kernels do not run on this GPU, or None. dropout, e4m3: whether they must support dropout, or e4m3 caches."""
    chip, shared = chip_of(device)
    if e4m3 and (isinstance(chip, str) or chip < (8, 9)):
        here = chip if isinstance(chip, str) else f"{chip[0]}.{chip[1]}"
        return f"it reads e4m3 caches on NVIDIA GPUs of compute capability 8.9 or newer; this GPU is {here}"
    if family_of_chip(chip, shared) is not None:
        if dropout and isinstance(chip, str):
            # An assertion of GCNRewritePartialRegUses, in tiles of 64 x 64 and of 128 x 64.
            return "the AMD compiler of Triton 3.9 ends the process on the forward kernel with dropout"
        return None
    if not isinstance(chip, str) and chip < OLDEST:
        return f"Triton needs compute capability {OLDEST[0]}.{OLDEST[1]} or newer; this GPU has {chip[0]}.{chip[1]}"
    least = min(family.shared for family in FAMILIES if family.amd == isinstance(chip, str))
    return f"its tiles need {least // 1024} KiB of shared memory a program; this GPU has {shared // 1024}"


def provenance(chip: tuple[int, int] | str, family: Family) -> str:
    """In words: the family whose tables a chip uses, and whether they were measured on such a chip."""
    if chip not in family.chips:
        return f"those of {family.name}, by shared memory; neither compiled for this chip nor measured on it"
    if family.measured is None:
        return f"of {family.name}: compiled for it only, not measured on such a chip ('sparse-flash tune' measures)"
    return f"of {family.name}: measured on {family.measured}"


def fitted(
    family: Family, kernel: str, dtype: torch.dtype, head_dim: int, block_size: int | None, v_head_dim: int | None = None
) -> Config:
    """The built-in config for a table's block. kernel: one of KERNELS."""
    config = family.config(kernel, dtype, padded_head_dim(max(head_dim, v_head_dim or 0)))
    if block_size is None:
        return config
    tile_m, tile_n = min(config.tile_m, block_size), min(config.tile_n, block_size)
    if (tile_m, tile_n) == (config.tile_m, config.tile_n):
        return config
    # A tensor-core step needs 64 x 64 per warp group; smaller tiles leave warps idle.
    warps = max(1, min(config.num_warps, tile_m * tile_n // 512))
    return replace(config, tile_m=tile_m, tile_n=tile_n, num_warps=warps)


def for_variant(config: Config, kernel: str, family: Family, given: KernelVariant, switches: dict, dim: int) -> Config:
    """The config for a variant of a kernel. kernel: one of KERNELS. dim: padded.

    dQ: a bias with a user's function takes 262 KB for 128 queries at head_dim 128, more than any chip has. Half the queries take
    164 to 172 KB, and with the same warps spill half as much as with four. Lengths: where products hold their operands in
    registers, four warps spill 200 to 1,600 bytes a thread at head_dim 128, and eight at most 100.
    """
    biased = given.rel_bias is not None and switches["SCORE"] is not None
    if kernel == "grad_q" and biased and dim >= 128 and config.tile_m * config.tile_n > 64 * 64:
        config = replace(config, tile_m=config.tile_m // 2)
    if given.q_lens is not None and family.holds_operands and dim >= 128 and config.tile_m * config.tile_n >= 32 * 64:
        config = replace(config, num_warps=max(8, config.num_warps))
    return config


KERNELS = ("forward", "grad_q", "grad_kv")
MOST_CANDIDATES = 24
_LARGEST_TILE = 128


def candidates(
    kernel: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int | None,
    v_head_dim: int | None = None,
    family: Family = HOPPER,
) -> tuple[Config, ...]:
    """Configs worth measuring, distinct and at most MOST_CANDIDATES: the built-in config, then its neighbours, nearest first: a
    tile halved or doubled, warps halved or doubled, one stage more or less; at most two such changes.

    kernel: one of KERNELS. v_head_dim: defaults to that of q and k. Tiles are powers of two that divide the table's block.
    """
    builtin = fitted(family, kernel, dtype, head_dim, block_size, v_head_dim)
    largest = min(_LARGEST_TILE, block_size or _LARGEST_TILE)
    found = []
    for changes in product((0, 1, -1), repeat=4):
        m, n, warps, stages = changes
        config = Config(
            int(builtin.tile_m * 2**m), int(builtin.tile_n * 2**n), int(builtin.num_warps * 2**warps), builtin.num_stages + stages
        )
        fits = min(config.tile_m, config.tile_n) >= 16 and max(config.tile_m, config.tile_n) <= largest
        # Warps: as in fitted. Below two stages nothing is prefetched; above four, shared memory is full.
        most_warps = max(builtin.num_warps, min(8, config.tile_m * config.tile_n // 512))
        fits = fits and 1 <= config.num_warps <= most_warps
        if config == builtin or (fits and 2 <= config.num_stages <= 4 and sum(map(abs, changes)) <= 2):
            found.append(config)
    return tuple(sorted(found, key=lambda config: _distance(config, builtin))[:MOST_CANDIDATES])


def cannot_fit(config: Config, kernel: str, dtype: torch.dtype, dims: tuple[int, int], shared: int) -> bool:
    """Whether the tiles that a step loads exceed shared memory, however Triton lays out the rest. dims: padded, of q and k and of
    v. All stages but one are in shared memory at the same time."""
    rows = config.tile_m if kernel == "grad_kv" else config.tile_n
    return (config.num_stages - 1) * rows * sum(dims) * dtype.itemsize > shared


def _distance(one: Config, other: Config) -> float:
    """The number of changes between two configs, as ``candidates`` counts them."""
    *sizes, stages = zip(astuple(one), astuple(other), strict=True)
    return sum(abs(log2(a / b)) for a, b in sizes) + abs(stages[0] - stages[1])


@remembered
def decode_config(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int | None,
    rows: int,
    v_head_dim: int | None = None,
    family: Family = HOPPER,
    several: bool = False,
    e4m3: bool = False,
) -> Config:
    """For few queries and many keys. rows: of stacked queries, from several heads, so tile_m may exceed the table's block. several:
    more than one query per head. e4m3: whether the cache is."""
    config = family.config("decode", dtype, padded_head_dim(max(head_dim, v_head_dim or 0)))
    tile_m = min(config.tile_m, max(16, 1 << (rows - 1).bit_length()))
    if family.amd and several and block_size is not None:
        # Triton 3.9 cannot compile masks that branches modify in a pipelined loop, if they differ between queries.
        config = replace(config, num_stages=1)
    warps = 4 if tile_m == 16 else config.num_warps
    if e4m3 and 16 < tile_m >= padded_head_dim(v_head_dim or head_dim) // 2:
        warps = tile_m // 16  # Triton divides such products by rows, and each further warp would repeat the work of another
    return replace(config, tile_m=tile_m, tile_n=min(config.tile_n, block_size or config.tile_n), num_warps=warps)


# Tokens of queries and keys of all heads, for each multiprocessor, up to which both backward passes share a launch. That saves a
# launch's own time and fills multiprocessors that either pass leaves idle; it costs another load of out for each step of a key
# tile. Measured: docs/performance/kernels.md, "Both backward passes in one launch".
ONE_LAUNCH_TOKENS = 128


def takes_one_launch(tokens: int, multiprocessors: int) -> bool:
    """Whether both backward passes share a launch, with the config of dK and dV. tokens: batch * (heads * q_len + kv_heads *
    kv_len)."""
    return tokens <= ONE_LAUNCH_TOKENS * multiprocessors


@remembered
def config_for(
    kernel: str, dtype: torch.dtype, head_dim: int, block_size: int | None, device: torch.device, v_head_dim: int | None = None
) -> Config:
    """The built-in config of a kernel, or the one that ``sparse-flash tune`` chose for this GPU. kernel: one of KERNELS.
    block_size: the table's, or None for dense attention. v_head_dim: defaults to that of q and k."""
    key = key_of(kernel, dtype, padded_head_dim(head_dim), block_size, device, padded_head_dim(v_head_dim or head_dim))
    return tuned_config(candidates(kernel, dtype, head_dim, block_size, v_head_dim, family_of(device)), key)
