"""Estimates how long a pass takes a rank, from its visited blocks and the bytes that it receives. Strategies are chosen by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..masks.costs import BLOCK, COPY_RATE, HEAD_DIM, row_us

ELEMENT_BYTES = 2  # float16, bfloat16
LSE_BYTES = 4  # float32

# Times of calls are those of ``masks/costs``, the same on all ranks. What it does not know was fitted to runs on two H100:
# docs/performance/several-gpus.md, "The rates behind the estimates", has the measured ranges and the results files.

_MEMORY_RATE = 1e6 * COPY_RATE  # bytes per second of copies, merges and calls on few keys
# Other links may be slower: link_rate= gives their rate.
LINK_RATE = 255e9  # bytes per second that a rank receives
# An exchange slows the call beside it. The cost is a share of the time in which both run.
_COST_OF_HIDING = 0.25
# Blocks of others take longer in a backward call of their own than in one call on all blocks, by this factor.
_OTHERS_BACKWARD = 1.2
# Bytes that kernels read and write in a forward pass for each element of a row in 16 bits.
_CALL_BYTES = 4  # a call on blocks of others: reads q, writes out
_MERGE_BYTES = 6  # the merge after it: reads both results, writes one


@dataclass(frozen=True)
class SequenceSizes:
    """Holds the sizes of one sequence. q_len, block_size: tokens. heads: of queries. kv_heads: of keys and values."""

    q_len: int
    block_size: int
    heads: int
    kv_heads: int

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of the keys and values of one block."""
        return self.block_size * self.kv_heads * 2 * HEAD_DIM * ELEMENT_BYTES


def forward_seconds(rows: float, blocks: float, received: float, sizes: SequenceSizes, link_rate: float) -> float:
    """Returns the seconds of a rank's forward pass that first computes, then receives, with no overlap.

    rows, blocks: block rows and visited blocks, summed over heads. received: bytes. link_rate: bytes per second.
    """
    return _call_seconds(False, rows, blocks, sizes) + received / link_rate


def _call_seconds(backward: bool, rows: float, blocks: float, sizes: SequenceSizes) -> float:
    """Returns the seconds of a pass of a call. All blocks count as full."""
    size = sizes.block_size / BLOCK  # kernels rarely run smaller ones (``masks/coarsen``)
    return 1e-6 * row_us(backward, BLOCK, rows * size, blocks * size**2)


def copy_seconds(size: float) -> float:
    """Returns the seconds that copying ``size`` bytes takes."""
    return 2 * size / _MEMORY_RATE


class CallTimes(NamedTuple):
    """Holds the seconds of a pass in which blocks travel. one_call: the exchange, then one call on all columns. two_calls: a call
    on the rank's own columns, which overlaps the exchange, then a call on the columns of others."""

    one_call: float
    two_calls: float

    @property
    def overlaps(self) -> bool:
        return self.two_calls < self.one_call


class RankWork(NamedTuple):
    """Holds what decides one rank's times.

    own_visits, other_visits: visited blocks in the rank's own columns and in the columns of others, summed over heads.
    visiting_rows: how many of the rank's block rows visit blocks of others. held: blocks of the rank, padding included. received:
    blocks that it gets.
    """

    own_visits: float
    other_visits: float
    visiting_rows: float
    held: int
    received: float


def slowest(times: Iterable[CallTimes]) -> CallTimes:
    """Returns the time of the slowest rank if all ranks make one call, and if all make two.

    All ranks make equally many calls: if they differ, a rank with two calls waits for a rank with one, which sends its gradients
    late (docs/performance/several-gpus.md, "One call or two").
    """
    return CallTimes(*(max(seconds) for seconds in zip(*times, strict=True)))


def call_times(work: RankWork, sizes: SequenceSizes, link_rate: float) -> tuple[CallTimes, CallTimes]:
    """Returns one rank's times: (forward pass, backward pass)."""
    # In the backward pass gradients travel instead of blocks. The estimate assumes that a rank sends as many blocks as it gets.
    travel = work.received * sizes.block_bytes / link_rate
    # One call needs all blocks in one tensor, so own and fetched blocks are copied into it, and gradients out of it. In a forward
    # pass the exchange hides the copy of own blocks. Two calls copy only the gradients of fetched blocks.
    copy_own = copy_seconds(work.held * sizes.block_bytes) if work.received else 0.0
    copy_fetched = copy_seconds(work.received * sizes.block_bytes)
    # Queries that visit no block of others are read, and their zeros written, but not merged. Backward calls accumulate into one dQ
    # (``calls.JointCalls``).
    byte_of_row = sizes.heads * sizes.block_size * HEAD_DIM / _MEMORY_RATE  # seconds of a byte for each element
    merge = (_CALL_BYTES * work.held * bool(work.visiting_rows) + _MERGE_BYTES * work.visiting_rows) * byte_of_row
    # Visits are summed before the conversion, so that assignments with equal sums tie to the last bit.
    rows, all_visits = work.held * sizes.heads, work.own_visits + work.other_visits
    call_on_all, call_on_own, call_on_others = (
        [_call_seconds(backward, of_rows, visits, sizes) for backward in (False, True)]
        for of_rows, visits in ((rows, all_visits), (rows, work.own_visits), (0, work.other_visits))
    )
    forward = CallTimes(
        call_on_all[0] + max(travel, copy_own) + copy_fetched,
        _overlapped_seconds(call_on_own[0], travel) + call_on_others[0] + merge,
    )
    backward = CallTimes(
        call_on_all[1] + travel + 2 * (copy_own + copy_fetched),
        _OTHERS_BACKWARD * call_on_others[1] + _overlapped_seconds(call_on_own[1], travel) + copy_fetched,
    )
    return forward, backward


def _overlapped_seconds(call: float, travel: float) -> float:
    """Returns the seconds of a call and of an exchange that overlap."""
    return max(call, travel) + _COST_OF_HIDING * min(call, travel)
