"""What a pass costs a rank: estimates to choose by, from visited blocks and received bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

# Assumed where nothing is said, as both costs are proportional to it and so no choice depends on it.
HEAD_DIM = 128
ELEMENT_BYTES = 2  # float16, bfloat16
LSE_BYTES = 4  # float32

# Two H200 on NVLink, torch 2.11, bf16, 2026-11-21: 786 MB of keys and values took 4.83 ms, packing included. (The link itself is
# more than twice as fast.) Links between nodes are slower: link_rate= says how fast.
LINK_RATE = 163e9  # bytes per second that a rank receives
# One H200, bf16, head_dim 128, forward, over the pairs of visited blocks: docs/performance.md, windows and butterflies.
FLOP_RATE = 500e12  # per second
# Of one H200, in copies and sums of tensors: three quarters of its data sheet's 4.8e12.
_MEMORY_RATE = 3.6e12  # bytes per second
# A backward pass has five products where a forward pass has two.
_BACKWARD = 2.5
# What two backward calls take, relative to one on the same blocks. The prototype, on the H200s above: 3 to 8 % of forward and
# backward together, of which the sums that are counted apart are the smaller part.
_TWO_BACKWARD_CALLS = 1.05
# Bytes moved to join an element of two results: two scaled in place and added. Of two gradients: one read and added to the other.
_JOIN_BYTES, _ADD_BYTES = 10, 6


@dataclass(frozen=True)
class SequenceSizes:
    """Of one sequence. q_len, block_size: tokens. heads, kv_heads: of queries, and of keys and values."""

    q_len: int
    block_size: int
    heads: int
    kv_heads: int

    @property
    def block_bytes(self) -> int:
        """Of the keys and values of one block."""
        return self.block_size * self.kv_heads * 2 * HEAD_DIM * ELEMENT_BYTES

    def of_share(self, ranks: int) -> SequenceSizes:
        """Where ranks hold equal shares of the heads."""
        return replace(self, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks)


class Node(NamedTuple):
    """What is near a rank: the second dimension of a mesh of two. ranks: of a node, 1 in a mesh of one dimension. link_rate: bytes
    per second that a rank receives from ranks of its own node."""

    ranks: int = 1
    link_rate: float = LINK_RATE


ALONE = Node()  # in a mesh of one dimension


def seconds(blocks: float, received: float, sizes: SequenceSizes, link_rate: float) -> float:
    """Of a rank's forward pass: its visited blocks, summed over heads, then the bytes that it receives."""
    return blocks * sizes.block_size**2 * 4 * HEAD_DIM / FLOP_RATE + received / link_rate


class CallTimes(NamedTuple):
    """Seconds of a pass in which blocks travel. one: the exchange, and one call on all columns. two: a call on the rank's own
    columns, behind which the exchange hides, and one on the columns of others."""

    one: float
    two: float

    @property
    def overlaps(self) -> bool:
        return self.two < self.one


def call_times(
    near: float, far: float, own: int, received: float, sizes: SequenceSizes, link_rate: float
) -> tuple[CallTimes, CallTimes]:
    """(of the forward pass, of the backward pass) of one rank.

    near, far: its visited blocks in its own columns and in those of others, summed over heads. own, received: blocks that it holds,
    and that it gets.
    """
    on_near, on_far = seconds(near, 0, sizes, link_rate), seconds(far, 0, sizes, link_rate)
    travel = seconds(0, received * sizes.block_bytes, sizes, link_rate)
    # For one call the rank's own blocks and the others' are copied into one tensor: read and written.
    gathered = 2 * (own + received) * sizes.block_bytes / _MEMORY_RATE if received else 0.0
    # A row is joined where it visits a column of others, so no more rows are than such blocks.
    joined = min(own * sizes.heads, far) * sizes.block_size * HEAD_DIM / _MEMORY_RATE
    forward = CallTimes(on_near + on_far + travel + gathered, max(on_near, travel) + on_far + _JOIN_BYTES * joined)
    # Gradients return to the rank instead of blocks; it is taken to have sent as many as it gets.
    near_back, far_back = (_BACKWARD * _TWO_BACKWARD_CALLS * t for t in (on_near, on_far))
    backward = CallTimes(
        _BACKWARD * (on_near + on_far) + travel + gathered, far_back + max(near_back, travel) + _ADD_BYTES * joined
    )
    return forward, backward
