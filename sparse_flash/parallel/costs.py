"""Estimates how long a pass takes a rank, from its visited blocks and the bytes that it receives. Strategies are chosen by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ..kernels.cost.choices import DENSE_BLOCK, HEAD_DIM, block_times, reference_chip

ELEMENT_BYTES = 2  # float16, bfloat16
LSE_BYTES = 4  # float32

# Times of calls are those of ``kernels/cost``, on one chip for all ranks. What it does not know was fitted to runs on two H100:
# docs/performance/several-gpus.md, "The rates behind the estimates", has the measured ranges and the results files.

# Other links may be slower: link_rate= gives their rate.
LINK_RATE = 255e9  # bytes per second that a rank receives
# An exchange slows the call beside it. The cost is a share of the time in which both run.
_COST_OF_HIDING = 0.25
# Blocks of others take longer in a backward call of their own than in one call on all blocks, by this factor.
_FAR_BACKWARD = 1.2
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
    size = sizes.block_size / DENSE_BLOCK  # kernels rarely run smaller ones (``masks/coarsen``)
    return 1e-6 * block_times(DENSE_BLOCK, backward).of(rows * size, blocks * size**2)


def copy_seconds(size: float) -> float:
    """Returns the seconds that copying ``size`` bytes takes."""
    return 2 * size / _memory_rate()


@cache
def _memory_rate() -> float:
    """Returns the bytes per second of copies, merges and calls on few keys."""
    return 1e6 * reference_chip().bytes_per_us


class CallTimes(NamedTuple):
    """Holds the seconds of a pass in which blocks travel. one: the exchange, then one call on all columns. two: a call on the
    rank's own columns, which overlaps the exchange, then a call on the columns of others."""

    one: float
    two: float

    @property
    def overlaps(self) -> bool:
        return self.two < self.one


def slowest(times: Iterable[CallTimes]) -> CallTimes:
    """Returns the time of the slowest rank if all ranks make one call, and if all make two.

    All ranks make equally many calls: if they differ, a rank with two calls waits for a rank with one, which sends its gradients
    late (docs/performance/several-gpus.md, "One call or two").
    """
    return CallTimes(*(max(of_all) for of_all in zip(*times, strict=True)))


def call_times(
    near: float, far: float, visiting: float, own: int, received: float, sizes: SequenceSizes, link_rate: float
) -> tuple[CallTimes, CallTimes]:
    """Returns one rank's times: (forward pass, backward pass).

    near, far: visited blocks in the rank's own columns and in the columns of others, summed over heads. visiting: how many of the
    rank's block rows visit blocks of others. own: blocks that the rank holds, padding included. received: blocks that it gets.
    """
    # In the backward pass gradients travel instead of blocks. The estimate assumes that a rank sends as many blocks as it gets.
    travel = received * sizes.block_bytes / link_rate
    # One call needs all blocks in one tensor, so own and fetched blocks are copied into it, and gradients out of it. In a forward
    # pass the exchange hides the copy of own blocks. Two calls copy only the gradients of fetched blocks.
    copied_own = copy_seconds(own * sizes.block_bytes) if received else 0.0
    sent_back = copy_seconds(received * sizes.block_bytes)
    row = sizes.heads * sizes.block_size * HEAD_DIM / _memory_rate()  # seconds of a byte for each element
    # Queries that visit no block of others are read, and their zeros written, but not merged. Backward calls accumulate into one dQ
    # (``calls.JointCalls``).
    merged = (_CALL_BYTES * own * bool(visiting) + _MERGE_BYTES * visiting) * row
    # near and far are summed before the conversion, so that assignments with equal sums tie to the last bit.
    rows = own * sizes.heads
    on_near, on_all, near_back, all_back = (
        _call_seconds(backward, rows, blocks, sizes) for backward in (False, True) for blocks in (near, near + far)
    )
    on_far, far_back = (_call_seconds(backward, 0, far, sizes) for backward in (False, True))
    forward = CallTimes(on_all + max(travel, copied_own) + sent_back, _overlapped_seconds(on_near, travel) + on_far + merged)
    backward = CallTimes(
        all_back + travel + 2 * (copied_own + sent_back),
        _FAR_BACKWARD * far_back + _overlapped_seconds(near_back, travel) + sent_back,
    )
    return forward, backward


def _overlapped_seconds(call: float, travel: float) -> float:
    """Returns the seconds of a call and of an exchange that overlap."""
    return max(call, travel) + _COST_OF_HIDING * min(call, travel)
