"""The model of time: a pass is a queue of tiles, and kernels along whole rows.

A tile takes the time of its row's start, of its steps in full blocks, and of those in partial blocks. Each program takes the next
tile when it is done with its last. Kernels along whole rows take the time of their bytes.
"""

import heapq
from typing import NamedTuple

import numpy as np

from .chips import Chip, KernelFamily, Times

# Microseconds: of one launch, and of the host of an eager call, forward and backward.
_LAUNCH_US, HOST_US = 2.5, (26.0, 155.0)
# The kernels along rows, by whether they are portable, forward and backward.
_BESIDE = {False: ("merging split rows", "sums of dQ"), True: ("", "sums of out * dOut")}
KINDS = len(Times._fields)  # what a tile has of each: rows (1), full steps, partial steps, reloaded steps


class AttentionSizes(NamedTuple):
    """The sizes of a call. q_len, kv_len: tokens. Elements have two bytes."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.head_dim

    @property
    def tensor_bytes(self) -> int:
        """Returns the bytes of q, k, v and out."""
        dims = self.head_dim + self.v_head_dim
        return 2 * self.batch * dims * (self.heads * self.q_len + self.kv_heads * self.kv_len)


class Launch(NamedTuple):
    """Describes the launches of a pass. Bytes are read or written.

    tiles: (stored masks, tiles of a head, KINDS), in the queue's order. mask_of: (batch-heads,) integers, the stored mask of each.
    together: batch-heads that follow each other together. row_bytes: of the kernels along whole rows. launches: how many kernels
    there are. least_bytes: of the queue's kernel, if it touches each element once.
    """

    family: KernelFamily
    programs: int
    tiles: np.ndarray
    mask_of: np.ndarray
    together: int
    row_bytes: float
    launches: int
    least_bytes: float

    def amounts(self) -> np.ndarray:
        """Returns (tiles of all heads, KINDS) in the queue's order: groups of heads, and within a group the tiles of all heads in
        turn."""
        groups = [self.mask_of[first : first + self.together] for first in range(0, len(self.mask_of), self.together)]
        return np.concatenate([self.tiles[group].swapaxes(0, 1).reshape(-1, KINDS) for group in groups])


class LastProgram(NamedTuple):
    """The program that finishes last. time: until it does. busy: the mean time of a program at work. amounts: its sums of what the
    tiles have, (kinds,)."""

    time: float
    busy: float
    amounts: np.ndarray


class Pass(NamedTuple):
    """A predicted pass.

    us: microseconds on the GPU. host_us: that the host takes to launch it, call by call; CUDA graphs take none. parts: microseconds
    by name, whose sum is ``us``. beside: microseconds beside the queue's kernel. last: the program that finishes last. measured:
    whether constants of these kernels were measured on the chip. portable: whether they are the portable ones.
    """

    us: float
    host_us: float
    parts: dict[str, float]
    beside: float
    last: LastProgram
    measured: bool
    portable: bool

    @property
    def bound(self) -> str:
        """Returns what bounds an eager call: the host, or the part that takes the most time."""
        return "the host" if self.host_us > self.us else max(self.parts, key=self.parts.__getitem__)


def predict_pass(launch: Launch, chip: Chip) -> Pass:
    """Returns a pass on a chip."""
    times, backward = np.array(chip.times(launch.family)), launch.family.backward
    amounts = launch.amounts()
    last = simulate_queue(amounts @ times, min(launch.programs, len(amounts)), amounts)
    rows, full, partial, reloaded = amounts.sum(0) * times / launch.programs
    of_memory = launch.least_bytes / chip.bytes_per_us
    parts = {
        "products": full + partial,
        "row starts": rows,
        "loads past the L2 cache": reloaded,
        "idle programs": last.time - rows - full - partial - reloaded,
    }
    if of_memory > last.time:
        parts = {"memory, once for each element": of_memory}
    beside = {
        _BESIDE[launch.family.portable][backward]: launch.row_bytes / chip.bytes_per_us,
        "launches": launch.launches * _LAUNCH_US,
    }
    parts = {name: float(us) for name, us in (parts | beside).items() if us}
    measured, us = launch.family in chip.measured, sum(parts.values())
    return Pass(us, HOST_US[backward], parts, sum(beside.values()), last, measured, launch.family.portable)


def simulate_queue(times: np.ndarray, programs: int, amounts: np.ndarray) -> LastProgram:
    """Returns the last of ``programs`` programs, at least one, that take tiles from a queue.

    times: (tiles,) in the queue's order. amounts: (tiles, kinds), what each tile has, such as steps.
    """
    free = [(0.0, program) for program in range(programs)]
    taken_by = np.empty(len(times), np.int64)
    for tile, time in enumerate(times.tolist()):
        now, program = free[0]
        taken_by[tile] = program
        heapq.heapreplace(free, (now + time, program))
    end, last = max(free)
    return LastProgram(end, float(times.sum()) / programs, amounts[taken_by == last].sum(0))


class CallWork(NamedTuple):
    """Describes a call whose time is a sum. kind: its kernels, which share factors. amounts: by part, microseconds at the chip's
    peak or at the rate of its copies, or counts. host_us, portable: see ``Pass``."""

    kind: str
    amounts: dict[str, float]
    host_us: float
    portable: bool


def predict_work(work: CallWork, chip: Chip) -> Pass:
    """Returns a call on a chip: its amounts times the factors of its kind."""
    factors = chip.factors_of(work.kind)
    parts = {name: factors[name] * amount for name, amount in work.amounts.items() if factors.get(name) and amount}
    none = LastProgram(0.0, 0.0, np.zeros(KINDS))
    return Pass(sum(parts.values()), work.host_us, parts, 0.0, none, work.kind in chip.factors, work.portable)


def dense_tiles(items: int, full: int, partial: bool) -> np.ndarray:
    return np.broadcast_to(np.array([1.0, full, partial, 0.0]), (1, items, KINDS))


def tile_amounts(begin, runs, end, steps: int, reloaded=0.0) -> np.ndarray:
    """Returns (masks, items, KINDS): what a tile of each item has. begin, runs, end: (masks, items), where entries begin, full ones
    end, and all end. steps: of a block. reloaded: a share of all steps."""
    amounts = np.ones(begin.shape), (runs - begin) * steps, (end - runs) * steps, (end - begin) * steps * reloaded
    return np.stack(amounts, -1).astype(float)


def mask_of_heads(tables, batch: int, heads: int) -> np.ndarray:
    if tables is None:
        return np.zeros(batch * heads, np.int64)
    return np.broadcast_to(tables.mask_index.numpy(), (batch, heads)).reshape(-1)
