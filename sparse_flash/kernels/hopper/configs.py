"""Tile sizes and stages of the Hopper kernels: static data, separate from the code that uses it. The figures behind each choice are
in docs/performance/kernels.md, and for blocks chosen by query in docs/performance/selection.md."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..common.config import padded_head_dim


@dataclass(frozen=True)
class ForwardConfig:
    """The tiles of the forward kernel."""

    stages: int  # tiles of keys, and of their values, in shared memory
    registers: int = 240  # per thread of the second and third warp group; the first gets the rest
    queries: int = 128  # of a tile, 64 for each warp group
    keys: int = 128  # of a step
    programs: int = 1  # that share a multiprocessor

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4} | _registers(self.programs)  # of the first role; Gluon adds the warps of other roles


@dataclass(frozen=True)
class EightBitConfig(ForwardConfig):
    """The tiles of the forward kernel for operands in e4m3."""


@dataclass(frozen=True)
class BackwardConfig:
    """The tiles of the backward kernel."""

    queries: int  # of a step, 64 or 128
    dout_stages: int  # tiles of dOut in shared memory, 1 to 4
    keys: int = 128  # of a tile, 64 or 128
    pieces: int = 1  # of the columns of a tile of dQ, 1, 2 or 4
    programs: int = 1  # that share a multiprocessor
    more: int = 1  # tiles of queries in shared memory beyond ``dout_stages``: 1 if scores are computed a step ahead, else 0
    parts: int = 1  # of a tile, with a warp group each
    paired: bool = False

    @property
    def q_stages(self) -> int:
        return self.dout_stages + self.more

    @property
    def keys_per_part(self) -> int:
        """Keys of a part."""
        return self.keys // self.parts

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.keys // (16 * self.parts)} | _registers(self.programs)


def _registers(programs: int) -> dict[str, int]:
    """Returns the option that lets programs share a multiprocessor. Each has one computing warp group, and one of other warps."""
    return {"maxnreg": 65536 // (256 * programs) // 8 * 8} if programs > 1 else {}  # registers come in eights


# Tables by padded head_dim.
FORWARD = {64: ForwardConfig(3), 128: ForwardConfig(2)}
# At 256, two warp groups have a role each (``wide_backward``).
BACKWARD = {64: BackwardConfig(128, 2), 128: BackwardConfig(64, 2), 256: BackwardConfig(64, 2, 64, 4, more=0)}
# To be timed against ``backward_to_128``: which calls run in ``paired_backward``.
PAIRED = set(os.environ.get("PAIRED_BACKWARD", "64 variants blocks").split())
# For calls without a variant: ``paired_backward`` takes less time than ``backward_to_128``, and with v of 65 to 128 also than
# ``wide_backward``.
PAIRED_BACKWARD = {
    64: BackwardConfig(128, 2, 128, 1, more=0, parts=2, paired=True),
    128: BackwardConfig(64, 2, 128, 2, more=0, parts=2, paired=True),
    192: BackwardConfig(64, 2, 128, 4, more=0, parts=2, paired=True),
}
PAIRED_VARIANT = {64: BackwardConfig(64, 3, 128, 2, more=0, parts=2, paired=True), 128: PAIRED_BACKWARD[128]}
PAIRED_BACKWARD_OF_64 = {
    64: BackwardConfig(64, 3, 64, 1, 2, more=0, paired=True),
    128: BackwardConfig(64, 1, 64, 2, 2, more=1, paired=True),
}
PAIRED_SCORED_OF_64 = {64: PAIRED_BACKWARD_OF_64[64], 128: BackwardConfig(64, 1, 64, 2, more=1, paired=True)}


def is_paired(dim: int, block_size: int | None, plain: bool) -> bool:
    """Whether ``paired_backward`` runs calls up to head_dim 128."""
    needed = {"64"} if dim == 64 and plain and block_size != 64 else set()
    needed |= set() if plain else {"variants"}
    needed |= {"blocks"} if block_size == 64 else set()
    return dim <= 128 and needed <= PAIRED


# Three warp groups share the keys and values of each step. Their registers suffice at 64 only. A table of blocks of 128 needs rows
# of 192 queries for it (``BlockMask.tall``).
TALL_FORWARD = {64: ForwardConfig(3, 160, 192)}
TALL_TILE_TIME = 1.34  # of a tile of 192 queries, in tiles of 128
# A short call has at most SHORT_TILES tiles of 64 queries for each multiprocessor. Two programs of 64 queries then share a
# multiprocessor; at 128 two are no faster than one of 128 queries.
SHORT_TILES = {64: 2, 128: 1, 256: 1}
SHORT_FORWARD = {64: ForwardConfig(1, 0, 64, 128, 2), 128: ForwardConfig(2, 0, 64, 64, 2)}
SHORT_FORWARD_OF_TABLES = {dim: ForwardConfig(1, 0, 64, 128, 2) for dim in (64, 128)}
# For tables of blocks of 64, each a step. Two programs share a multiprocessor: while one waits for a barrier, the other computes.
FORWARD_OF_64 = {64: ForwardConfig(4, 0, 64, 64, 2), 128: ForwardConfig(2, 0, 64, 64, 2)}
BACKWARD_OF_64 = {64: BackwardConfig(64, 2, 64, 1, 2), 128: BackwardConfig(64, 1, 64, 2, 2), 256: BACKWARD[256]}
# For operands in e4m3.
EIGHT_BITS = {64: EightBitConfig(4), 128: EightBitConfig(4)}
TALL_EIGHT_BITS = {64: EightBitConfig(4, 160, 192)}
EIGHT_BITS_OF_64 = {64: EightBitConfig(4, 0, 64, 64, 2), 128: EightBitConfig(4, 0, 64, 64, 2)}
# Dropout's draws, and what else a variant adds, need the registers that steps of 128 queries would take.
VARIANT_BACKWARD = {64: BackwardConfig(64, 3), 128: BACKWARD[128], 256: BACKWARD[256]}
# One program has the registers of two. With fewer, the assembler would serialize products.
SCORED_BACKWARD_OF_64 = {64: BACKWARD_OF_64[64], 128: BackwardConfig(64, 1, 64, 2), 256: BACKWARD[256]}


def plain_forward_config(dim: int, block_size: int | None, tiles: Callable[[int], int], multiprocessors: int) -> ForwardConfig:
    """Returns the config for a call without a variant. dim: padded. block_size: the table's, or None for dense attention. tiles:
    queries of a tile -> the call's number of such tiles, 0 if its table has no such rows.

    A short call takes smaller tiles. Three warp groups run unless a third fills the last round of a grid worse than it saves."""

    if block_size != 64 and tiles(64) <= SHORT_TILES[dim] * multiprocessors:
        return SHORT_FORWARD_OF_TABLES[dim] if block_size else SHORT_FORWARD[dim]
    return _taller(TALL_FORWARD.get(dim), block_size, tiles, multiprocessors) or variant_forward_config(dim, block_size)


def _taller(
    config: ForwardConfig | None, block_size: int | None, tiles: Callable[[int], int], multiprocessors: int
) -> ForwardConfig | None:
    """Returns the config of three warp groups if there is one, and it saves time."""

    def rounds(queries: int) -> int:
        return -(-tiles(queries) // multiprocessors)

    pays = config and block_size in (None, 128) and tiles(192) and rounds(128) >= TALL_TILE_TIME * rounds(192)
    return config if pays else None


def variant_forward_config(dim: int, block_size: int | None) -> ForwardConfig:
    """Returns the config for a call with a variant, which needs the registers that a third warp group, or a second program, would
    take. Arguments as for ``plain_forward_config``."""
    return (FORWARD_OF_64 if block_size == 64 else FORWARD)[dim]


def eight_bits_config(dim: int, block_size: int | None, tiles: Callable[[int], int], multiprocessors: int) -> ForwardConfig:
    """Returns the config for operands in e4m3. Arguments as for ``plain_forward_config``."""
    taller = _taller(TALL_EIGHT_BITS.get(dim), block_size, tiles, multiprocessors)
    return taller or (EIGHT_BITS_OF_64 if block_size == 64 else EIGHT_BITS)[dim]


def wide_forward_config(
    dim: int, dim_v: int, block_size: int | None, short_tiles: int, multiprocessors: int, plain: bool
) -> ForwardConfig:
    """Returns the config for calls whose head dimensions exceed 128 or differ: steps of as many keys as registers hold beside sums
    of dim_v columns, and shared memory holds twice. dim, dim_v: columns of q and k, and of v, in shared memory. short_tiles: how
    many tiles of 64 queries there are. plain: whether the call has no variant."""

    def fitting(queries: int, keys: int, programs: int) -> int:
        # Each program reserves one of 228 KiB. For each warp group, barriers and the conversion of results take up to 2.5 KiB.
        room = (228 << 10) // programs - 1024 - queries // 64 * 2560
        return (room - 2 * queries * dim) // (2 * keys * (dim + dim_v))

    short = short_tiles <= SHORT_TILES[256 if max(dim, dim_v) > 128 else 128] * multiprocessors
    if block_size == 64 or (plain and short):
        programs = 2 if plain and dim_v <= 128 and fitting(64, 64, 2) >= 2 else 1
        return ForwardConfig(min(3, fitting(64, 64, programs)), 0, 64, 64, programs)
    keys = 128 if dim_v <= 128 and fitting(128, 128, 1) >= 2 else 64
    return ForwardConfig(min(3, fitting(128, keys, 1)), keys=keys)


def backward_config(dim: int, block_size: int | None) -> BackwardConfig:
    """Returns the config for a call without a variant. Arguments as for ``plain_forward_config``."""
    return (BACKWARD_OF_64 if block_size == 64 else BACKWARD)[dim]


def variant_backward_config(dim: int, dim_v: int, block_size: int | None, scored: bool) -> BackwardConfig:
    """Returns the config for a call with a variant. dim, block_size: as for ``backward_config``. scored: whether scores are more
    than scaled products."""
    if is_paired(dim, block_size, False) and padded_head_dim(dim_v) == dim:
        if block_size != 64:
            return PAIRED_VARIANT[dim]
        return (PAIRED_SCORED_OF_64 if scored else PAIRED_BACKWARD_OF_64)[dim]
    if block_size != 64:
        return VARIANT_BACKWARD[dim]
    return (SCORED_BACKWARD_OF_64 if scored else BACKWARD_OF_64)[dim]
