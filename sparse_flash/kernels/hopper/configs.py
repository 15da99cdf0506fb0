"""Tile sizes and stages of the Hopper kernels: static data, separate from the code that uses it. The figures behind each choice are
in docs/performance/kernels.md, and for blocks chosen by query in docs/performance/selection.md."""

from collections.abc import Callable
from dataclasses import dataclass

from ..common.config import padded_head_dim, used_columns


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
    programs: int = 1  # that share a multiprocessor
    more: int = 0  # tiles of queries in shared memory beyond ``dout_stages``, as if scores are computed a step ahead
    warps: int = 4  # of the first role
    wide: bool = False  # whether two warp groups share 64 keys: see ``wide_backward``

    @property
    def q_stages(self) -> int:
        return self.dout_stages + self.more

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps} | _registers(self.programs)


def _registers(programs: int) -> dict[str, int]:
    """Returns the option that lets programs share a multiprocessor. Each has one computing warp group, and one of other warps."""
    return {"maxnreg": 65536 // (256 * programs) // 8 * 8} if programs > 1 else {}  # registers come in eights


# Tables by padded head_dim.
FORWARD = {64: ForwardConfig(3), 128: ForwardConfig(2)}
BACKWARD = {64: BackwardConfig(128, 2, more=1, warps=8), 128: BackwardConfig(64, 2), 256: BackwardConfig(64, 2, 64, wide=True)}
# For 129 to 192 with v of 65 to 128, without a variant: ``paired_backward`` takes less time than ``wide_backward``.
BACKWARD_OF_192_AND_128 = BackwardConfig(64, 2)
# Dropout's draws, and what else a variant adds, need the registers that steps of 128 queries would take.
VARIANT_BACKWARD = BACKWARD | {64: BackwardConfig(64, 3, more=1, warps=8)}
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
# One warp group computes; at 128, a second tile of queries arrives while the first is in use.
BACKWARD_OF_64 = {64: BackwardConfig(64, 2, 64, 2, more=1), 128: BackwardConfig(64, 1, 64, 2, more=1), 256: BACKWARD[256]}
# One program has the registers of two. With fewer, the assembler would serialize products.
SCORED_BACKWARD_OF_64 = BACKWARD_OF_64 | {128: BackwardConfig(64, 1, 64, more=1)}
# For operands in e4m3.
EIGHT_BITS = {64: EightBitConfig(4), 128: EightBitConfig(4)}
TALL_EIGHT_BITS = {64: EightBitConfig(4, 160, 192)}
EIGHT_BITS_OF_64 = {64: EightBitConfig(4, 0, 64, 64, 2), 128: EightBitConfig(4, 0, 64, 64, 2)}


def plain_forward_config(dim: int, block_size: int | None, tiles: Callable[[int], int], multiprocessors: int) -> ForwardConfig:
    """Returns the config for a call without a variant. dim: padded. block_size: the table's, or None for dense attention. tiles:
    queries of a tile -> the call's number of such tiles, 0 if its table has no such rows.

    A short call takes smaller tiles. Three warp groups run unless a third fills the last round of a grid worse than it saves."""

    if block_size != 64 and is_short(dim, tiles(64), multiprocessors):
        return SHORT_FORWARD_OF_TABLES[dim] if block_size else SHORT_FORWARD[dim]
    return _taller(TALL_FORWARD.get(dim), block_size, tiles, multiprocessors) or variant_forward_config(dim, block_size)


def is_short(dim: int, tiles: int, multiprocessors: int) -> bool:
    """Whether a call has few tiles. dim: padded. tiles: of 64 queries."""
    return tiles <= SHORT_TILES[dim] * multiprocessors


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


def backward_config(head_dim: int, v_head_dim: int, block_size: int | None, plain: bool, scored: bool) -> BackwardConfig:
    """Returns the config of a backward pass. block_size: the table's, or None. plain: whether the call has no variant. scored:
    whether scores are more than scaled products."""
    dim = padded_head_dim(head_dim)
    if block_size == 64:
        return (SCORED_BACKWARD_OF_64 if scored else BACKWARD_OF_64)[dim]
    if plain and used_columns(head_dim) == 192 and padded_head_dim(v_head_dim) == 128:
        return BACKWARD_OF_192_AND_128
    return (BACKWARD if plain else VARIANT_BACKWARD)[dim]
