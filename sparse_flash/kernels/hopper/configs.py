"""Shapes of the Hopper kernels' rings: static data, separate from the code that uses it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..launch.tuned import choose, key_of, remembered


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
class BackwardConfig:
    """The tiles of the backward kernel."""

    queries: int  # of a step, 64 or 128
    dout_stages: int  # tiles of dOut in shared memory, 1 to 4
    keys: int = 128  # of a tile, 64 or 128
    pieces: int = 1  # of the columns of a tile of dQ, 1, 2 or 4
    programs: int = 1  # that share a multiprocessor
    more: int = 1  # tiles of queries in shared memory beyond ``dout_stages``: 1 if scores are computed a step ahead, else 0
    parts: int = 1  # of a tile, with a warp group each

    @property
    def q_stages(self) -> int:
        return self.dout_stages + self.more

    @property
    def keys_together(self) -> int:
        """Keys of a part."""
        return self.keys // self.parts

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.keys // (16 * self.parts)} | _registers(self.programs)


def _registers(programs: int) -> dict[str, int]:
    """Returns the option that lets programs share a multiprocessor. Each has one computing warp group, and one of other warps."""
    return {"maxnreg": 65536 // (256 * programs) // 8 * 8} if programs > 1 else {}  # registers come in eights


# By padded head_dim. docs/performance/kernels.md has the figures behind each choice.
FORWARD = {64: ForwardConfig(3), 128: ForwardConfig(2)}
# At 256, two warp groups have a role each (``wide_backward``).
BACKWARD = {64: BackwardConfig(128, 2), 128: BackwardConfig(64, 2), 256: BackwardConfig(64, 2, 64, 4, more=0)}
# For q and k of 129 to 192 and v of 65 to 128, ``paired_backward`` takes less time than ``wide_backward``.
PAIRED_BACKWARD = BackwardConfig(64, 2, 128, 4, more=0, parts=2)
# Three warp groups share the keys and values of each step. Their registers suffice at 64 only. A table of blocks of 128 needs rows
# of 192 queries for it (``BlockMask.tall``).
FORWARD_OF_192 = {64: ForwardConfig(3, 160, 192)}
TIME_OF_192 = 1.34  # of a tile of 192 queries, in tiles of 128
# A short call has at most SHORT_TILES tiles of 64 queries for each multiprocessor, by padded head_dim. Two programs of 64 queries
# then share a multiprocessor; at 128 two are no faster than one of 128 queries.
SHORT_TILES = {64: 2, 128: 1, 256: 1}
SHORT_FORWARD = {64: ForwardConfig(1, 0, 64, 128, 2), 128: ForwardConfig(2, 0, 64, 64, 2)}
SHORT_FORWARD_OF_TABLES = {dim: ForwardConfig(1, 0, 64, 128, 2) for dim in (64, 128)}
# For tables of blocks of 64, each a step. Two programs share a multiprocessor: while one waits for a barrier, the other computes.
FORWARD_OF_64 = {64: ForwardConfig(4, 0, 64, 64, 2), 128: ForwardConfig(2, 0, 64, 64, 2)}
BACKWARD_OF_64 = {64: BackwardConfig(64, 2, 64, 1, 2), 128: BackwardConfig(64, 1, 64, 2, 2), 256: BACKWARD[256]}
# Dropout's draws, and what else a variant adds, need the registers that steps of 128 queries would take.
BACKWARD_OF_DROPOUT = {64: BackwardConfig(64, 3), 128: BACKWARD[128], 256: BACKWARD[256]}
# One program has the registers of two. With fewer, the assembler would serialize products.
BACKWARD_OF_64_ALONE = {64: BACKWARD_OF_64[64], 128: BackwardConfig(64, 1, 64, 2), 256: BACKWARD[256]}

# Other configs that fit in shared memory, for ``sparse-flash tune``; at 128, and for blocks of 64, there are none.
_OTHER_FORWARD = {64: (ForwardConfig(2), ForwardConfig(3), ForwardConfig(4), ForwardConfig(3, 0, 64, 64, 3))}
_OTHER_BACKWARD = {
    64: (BackwardConfig(128, 2), BackwardConfig(64, 2), BackwardConfig(64, 3), BackwardConfig(64, 4)),
}


def candidates(kernel: str, dim: int, block_size: int | None) -> tuple[ForwardConfig, ...] | tuple[BackwardConfig, ...]:
    """Configs worth measuring, all distinct, the built-in one first. kernel: "forward" or "backward". dim: padded. block_size: the
    table's, or None for dense attention."""
    if block_size == 64:
        return ((FORWARD_OF_64 if kernel == "forward" else BACKWARD_OF_64)[dim],)
    builtin, others = (FORWARD, _OTHER_FORWARD) if kernel == "forward" else (BACKWARD, _OTHER_BACKWARD)
    first = FORWARD_OF_192.get(dim) if kernel == "forward" and block_size in (None, 128) else None
    return tuple(dict.fromkeys((*filter(None, (first,)), builtin[dim], *others.get(dim, ()))))


@remembered
def forward_config(dtype: torch.dtype, dim: int, block_size: int | None, device: torch.device) -> ForwardConfig:
    """The built-in config, or the one that ``sparse-flash tune`` chose for this GPU. Arguments as for ``candidates``."""
    return choose(candidates("forward", dim, block_size), key_of("hopper", "forward", dtype, dim, block_size, device))


def forward_of_call(
    dtype: torch.dtype, dim: int, block_size: int | None, tiles: Callable[[int], int], device: torch.device, multiprocessors: int
) -> ForwardConfig:
    """The config for a call, whose tiles of so many queries ``tiles`` counts, 0 if its table has no such rows. A short call takes
    smaller tiles; others take what ``forward_config`` says, or two warp groups where a third fills the last round of a grid worse
    than it saves."""

    def rounds(queries: int) -> int:
        return -(-tiles(queries) // multiprocessors)

    if block_size != 64 and tiles(64) <= SHORT_TILES[dim] * multiprocessors:
        return SHORT_FORWARD_OF_TABLES[dim] if block_size else SHORT_FORWARD[dim]
    config = forward_config(dtype, dim, block_size, device)
    if config.queries == 192 and (not tiles(192) or rounds(128) < TIME_OF_192 * rounds(192)):
        return FORWARD[dim]
    return config


def forward_of_variant(dtype: torch.dtype, dim: int, block_size: int | None, device: torch.device) -> ForwardConfig:
    """For a call with a variant, which needs the registers that a third warp group, or a second program, would take."""
    config = forward_config(dtype, dim, block_size, device)
    return config if block_size == 64 or config.queries == 128 else FORWARD[dim]


def wide_forward(
    dim: int, dim_v: int, block_size: int | None, short_tiles: int, multiprocessors: int, plain: bool
) -> ForwardConfig:
    """The config for calls whose head dimensions exceed 128 or differ: steps of as many keys as registers hold beside sums of dim_v
    columns, and shared memory holds twice. dim, dim_v: columns of q and k, and of v, in shared memory. short_tiles: how many tiles
    of 64 queries there are. plain: whether the call has no variant."""

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


@remembered
def backward_config(
    dtype: torch.dtype, dim: int, block_size: int | None, device: torch.device, dim_v: int | None = None
) -> BackwardConfig:
    """For the backward pass. dim_v: of v, padded; dim by default."""
    return choose(candidates("backward", dim, block_size), key_of("hopper", "backward", dtype, dim, block_size, device, dim_v))


def backward_keys(dim: int, block_size: int | None) -> int:
    """Keys of a tile. Arguments as for ``candidates``, which all have as many."""
    return (BACKWARD_OF_64 if block_size == 64 else BACKWARD)[dim].keys


def backward_of_variant(dim: int, block_size: int | None, scored: bool) -> BackwardConfig:
    """For the backward pass of a call with a variant. dim: padded. scored: whether scores are more than scaled products."""
    if block_size != 64:
        return BACKWARD_OF_DROPOUT[dim]
    return (BACKWARD_OF_64_ALONE if scored else BACKWARD_OF_64)[dim]


@dataclass(frozen=True)
class Footprint:
    """Bytes of shared memory per program, and of stack per thread, into which registers spill: the maximum over dense and
    table-driven kernels of bf16 on triton 3.6 to 3.9. Tests enforce these limits."""

    shared: int
    stack: int


# By pass and padded head_dim, or the columns in use. Without dropout, all spills lie outside the loop over full blocks; but on
# triton 3.9 each backward step at 192 with 128 for v reads some twenty words back.
FOOTPRINT = {
    ("forward", 64): Footprint(131712, 0),
    ("forward", 96): Footprint(197184, 16),
    ("forward", 128): Footprint(197144, 0),
    ("backward", 64): Footprint(201404, 144),
    ("backward", 96): Footprint(232124, 0),
    ("backward", 128): Footprint(232124, 48),
    ("forward_of_192", 64): Footprint(147980, 32),
    ("forward_of_tall", 64): Footprint(148028, 64),
    ("forward_of_documents", 64): Footprint(135556, 0),
    ("backward_of_documents", 64): Footprint(201420, 160),
    ("forward_of_documents", 128): Footprint(200964, 0),
    ("backward_of_documents", 128): Footprint(232140, 48),
    ("backward_of_heads_together", 128): Footprint(231340, 48),
    # Two of these share a multiprocessor's 227 KiB.
    ("forward_of_short", 64): Footprint(49580, 0),
    ("forward_of_short", 128): Footprint(98740, 0),
    ("forward_of_64", 64): Footprint(82436, 0),
    ("forward_of_64", 128): Footprint(98756, 0),
    ("backward_of_64", 64): Footprint(84700, 0),
    ("backward_of_64", 128): Footprint(108524, 264),
    ("forward_of_dropout", 64): Footprint(131608, 0),
    ("forward_of_dropout", 128): Footprint(197080, 0),
    ("backward_of_dropout", 64): Footprint(142780, 0),
    ("backward_of_dropout", 128): Footprint(232108, 0),
    ("forward_of_softcap", 64): Footprint(131656, 0),
    ("backward_of_softcap", 64): Footprint(141756, 0),
    ("forward_of_softcap", 128): Footprint(197128, 0),
    ("backward_of_softcap", 128): Footprint(231340, 128),
    ("forward_of_softcap_of_64", 128): Footprint(98756, 0),
    ("backward_of_softcap_of_64_alone", 128): Footprint(108012, 144),
    ("forward_of_alibi", 64): Footprint(131656, 0),
    ("backward_of_alibi", 64): Footprint(141756, 0),
    ("forward_of_alibi", 128): Footprint(197128, 0),
    ("backward_of_alibi", 128): Footprint(231340, 168),
    ("forward_of_alibi_of_64", 128): Footprint(98756, 0),
    ("backward_of_alibi_of_64_alone", 128): Footprint(108012, 168),
    ("forward_of_own", 64): Footprint(131656, 0),
    ("backward_of_own", 64): Footprint(141756, 0),
    ("forward_of_own", 128): Footprint(197128, 0),
    ("backward_of_own", 128): Footprint(231340, 48),
    ("forward_of_own_of_64", 128): Footprint(98756, 0),
    ("backward_of_own_of_64_alone", 128): Footprint(108012, 104),
    ("forward_of_lengths", 64): Footprint(131840, 112),
    ("backward_of_lengths", 64): Footprint(141900, 120),
    ("forward_of_lengths", 128): Footprint(197248, 184),
    ("backward_of_lengths", 128): Footprint(231484, 240),
    ("forward_of_lengths_of_64", 128): Footprint(98908, 72),
    ("backward_of_lengths_of_64", 128): Footprint(108108, 288),
    ("forward", 256): Footprint(200964, 112),
    ("forward_of_64_alone", 256): Footprint(231684, 32),
    ("forward_of_dropout", 256): Footprint(200964, 136),
    ("forward_of_alibi", 256): Footprint(200964, 168),
    ("forward_of_lengths", 256): Footprint(201092, 200),
    ("forward", 192): Footprint(225540, 8),
    ("forward_of_64_alone", 192): Footprint(198916, 0),
    ("forward_of_dropout", 192): Footprint(225540, 0),
    ("forward_of_192_and_128", 192): Footprint(217348, 72),
    ("forward_of_192_and_128_of_64", 192): Footprint(108804, 0),
    ("forward_of_192_and_128_of_dropout", 192): Footprint(217348, 48),
    ("forward_of_192_and_128_of_alibi", 192): Footprint(217348, 120),
    ("forward_of_192_and_128_of_lengths", 192): Footprint(217476, 192),
    ("backward", 192): Footprint(231856, 0),
    ("backward_of_192_and_128", 192): Footprint(232032, 224),
    ("backward_of_192_and_128_of_64_alone", 192): Footprint(182192, 0),
    ("backward", 256): Footprint(231856, 24),
    ("backward_of_64_alone", 256): Footprint(231344, 40),
    ("backward_of_dropout", 256): Footprint(231344, 40),
    ("backward_of_softcap", 256): Footprint(231344, 16),
    ("backward_of_alibi", 256): Footprint(231344, 56),
    ("backward_of_own", 256): Footprint(231344, 24),
    ("backward_of_lengths", 256): Footprint(231440, 152),
}
