"""Estimates what passes cost a rank under each strategy, and in one call or two."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..masks.block_mask import BlockMask
from ..masks.costs import BLOCK, COPY_RATE, HEAD_DIM, row_us
from .assignment import Assignment

ELEMENT_BYTES = 2  # float16, bfloat16

# ``masks/costs`` gives the times of calls, the same on all ranks. The other rates were fitted to runs on two H100:
# docs/performance/several-gpus.md, "The rates behind the estimates", has the measured ranges and the results files.
_COPIED = 1e6 * COPY_RATE / 2  # bytes per second of copies, merges and calls on few keys; each is read and written
# Other links may be slower: link_rate= gives their rate.
LINK_RATE = 255e9  # bytes per second that a rank receives
# An exchange slows a call that it overlaps. The cost is a share of the time in which both run.
_COST_OF_HIDING = 0.25
# Fetched blocks take longer in a separate backward call than in one call on all blocks, by this factor.
_OTHERS_BACKWARD = 1.2
# Bytes that kernels read and write in a forward pass for each element of a row in 16 bits.
_CALL_BYTES = 4  # a call on blocks of others: reads q, writes out
_MERGE_BYTES = 6  # the merge after it: reads both results, writes one


@dataclass(frozen=True)
class SequenceSizes:
    """Holds the sizes of one sequence. q_len, block_size: tokens. link_rate: bytes per second that a rank receives."""

    q_len: int
    block_size: int
    heads: int
    kv_heads: int
    link_rate: float = LINK_RATE

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of the keys and values of one block."""
        return self.block_size * self.kv_heads * 2 * HEAD_DIM * ELEMENT_BYTES


def _pass_seconds(backward: bool, rows: float, blocks: float, sizes: SequenceSizes) -> float:
    """Returns the seconds of a pass. rows, blocks: block rows and visited blocks, all taken for full, summed over heads."""
    size = sizes.block_size / BLOCK  # kernels rarely run smaller ones (``masks/coarsen``)
    return 1e-6 * row_us(backward, BLOCK, rows * size, blocks * size**2)


class CallTimes(NamedTuple):
    """Holds the seconds of a pass in which blocks travel, (ranks,) each. one_call: the exchange, then one call on all columns.
    two_calls: a call on the rank's columns, which overlaps the exchange, then a call on fetched columns.

    The slowest rank decides for all: docs/performance/several-gpus.md, "One call or two".
    """

    one_call: np.ndarray
    two_calls: np.ndarray

    @property
    def overlaps(self) -> bool:
        return bool(self.two_calls.max() < self.one_call.max())


def block_times(option: Assignment, sizes: SequenceSizes) -> tuple[CallTimes, CallTimes]:
    """Returns the times of ranks: (forward pass, backward pass)."""
    # Visited blocks in the columns of others, and in all columns, summed over heads.
    scale = sizes.heads / option.visits.heads
    other_visits, all_visits = option.visited_of_others * scale, option.visited * scale
    received, visiting_rows, held = option.received, option.visiting_rows, option.blocks.shape[1]
    # In the backward pass gradients travel instead of blocks. The estimate assumes that a rank sends as many blocks as it gets.
    travel = received * sizes.block_bytes / sizes.link_rate
    # One call needs all blocks in one tensor, so all blocks are copied into it, and gradients out of it. In a forward
    # pass the exchange hides the copy of the rank's blocks. Two calls copy only the gradients of fetched blocks.
    copy_block, rows = sizes.block_bytes / _COPIED, held * sizes.heads
    copy_own, copy_fetched = held * copy_block * (received > 0), received * copy_block
    # Queries that visit no block of others are read, and their zeros written, but not merged. Backward calls accumulate into one dQ
    # (``hopper.joint_backward``).
    row_elements = sizes.heads * sizes.block_size * HEAD_DIM
    merge = row_elements / 2 / _COPIED * (_CALL_BYTES * held * (visiting_rows > 0) + _MERGE_BYTES * visiting_rows)
    # Visits are summed before the conversion, so that assignments with equal sums tie to the last bit.
    on_all, on_own, on_others = (
        [_pass_seconds(backward, of_rows, 0, sizes) + visits * _pass_seconds(backward, 0, 1, sizes) for backward in (False, True)]
        for of_rows, visits in ((rows, all_visits), (rows, all_visits - other_visits), (0, other_visits))
    )
    forward = CallTimes(
        on_all[0] + np.maximum(travel, copy_own) + copy_fetched,
        _overlapped_seconds(on_own[0], travel) + on_others[0] + merge,
    )
    backward = CallTimes(
        on_all[1] + travel + 2 * (copy_own + copy_fetched),
        _OTHERS_BACKWARD * on_others[1] + _overlapped_seconds(on_own[1], travel) + copy_fetched,
    )
    return forward, backward


def _overlapped_seconds(call: np.ndarray, travel: np.ndarray) -> np.ndarray:
    """Returns the seconds of a call and of an exchange that overlap."""
    return np.maximum(call, travel) + _COST_OF_HIDING * np.minimum(call, travel)


def block_seconds(option: Assignment, sizes: SequenceSizes) -> float:
    """Returns the seconds of a forward pass that fetches blocks, of the slowest rank."""
    forward, _ = block_times(option, sizes)
    return min(float(of_ranks.max()) for of_ranks in forward)


def head_seconds(mask: BlockMask, own_blocks: int, sizes: SequenceSizes, ranks: int) -> float:
    """Returns the seconds of a forward pass that exchanges heads, of the slowest rank. own_blocks: of a rank, padding included."""
    visited = np.diff(mask.mask_bounds(), prepend=0).astype(np.float64)
    by_head = np.broadcast_to(visited[mask.mask_index.numpy()].mean(0), sizes.heads)
    # A rank copies its q, k, v and out to send them. The share of its heads is not sent.
    copied = own_blocks * sizes.block_bytes * (1 + sizes.heads / sizes.kv_heads)
    received = copied * (ranks - 1) / ranks
    seconds = _pass_seconds(False, own_blocks * sizes.heads, by_head.reshape(ranks, -1).sum(1).max(), sizes)
    return seconds + received / sizes.link_rate + copied / _COPIED
