"""Simulates a queue of tiles: each program takes the next tile when it is done with its last."""

import heapq
from typing import NamedTuple

import numpy as np

# Tiles that are simulated one by one. What comes before them keeps all programs busy, up to the length of a tile.
MOST_SIMULATED = 2048


class Last(NamedTuple):
    """The program that finishes last. time: until it does. busy: the mean time of a program at work. amounts: its sums of what the
    tiles have, (kinds,)."""

    time: float
    busy: float
    amounts: np.ndarray


def last_to_finish(times: np.ndarray, programs: int, amounts: np.ndarray) -> Last:
    """Returns the last of ``programs`` programs, at least one, that take tiles from a queue.

    times: (tiles,) in the queue's order. amounts: (tiles, kinds), what each tile has, such as steps.
    """
    begin = max(0, len(times) - MOST_SIMULATED)
    before, counted = float(times[:begin].sum()) / programs, amounts[:begin].sum(0) / programs
    free = [(before, program) for program in range(programs)]
    taken_by = np.empty(len(times) - begin, np.int64)
    for tile, time in enumerate(times[begin:].tolist()):
        now, program = free[0]
        taken_by[tile] = program
        heapq.heapreplace(free, (now + time, program))
    end, last = max(free)
    return Last(end, float(times.sum()) / programs, counted + amounts[begin:][taken_by == last].sum(0))
