"""What a pass costs a rank: estimates to choose by, from visited blocks and received bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

# Assumed where nothing is said, as both costs are proportional to it and so no choice depends on it.
HEAD_DIM = 128
ELEMENT_BYTES = 2  # float16, bfloat16
LSE_BYTES = 4  # float32

# Rates and factors are of two H100 of one host, NVLink, torch 2.11, bf16, head_dim 128, 2026-11-25, from
# benchmarks/results/h100x2-2026-11-25-context-calls and, for single kernels, h100x2-2026-11-25-context-again/profile.json. By them
# each pass of the twelve cases there takes the faster way, or one at most 2 % slower.

# NCCL alone received 201 to 1,074 MB of keys and values at 248 to 310e9; from 788 MB on, 251 to 256e9 with packing. Links between
# nodes are slower: link_rate= says how fast.
LINK_RATE = 255e9  # bytes per second that a rank receives
# Of a forward pass on one GPU, over the pairs of visited blocks: windows 694 to 699e12, causal 672 to 745e12, documents 624 to
# 699e12, butterflies and powers of two 576 to 663e12.
FLOP_RATE = 680e12  # per second
# Of copies, of joining and of calls on few keys: seven tenths of the data sheet's 3.35e12. Under a butterfly over 524,288 tokens
# with 32 heads the call on fetched blocks and joining took 4.8 ms; by these rates, 5.3.
_MEMORY_RATE = 2.4e12  # bytes per second
# Of rows gathered by index_select: 0.65e12 (8 heads) to 1.4e12 (32) on two H200, scaled as the rate of memory.
_GATHER_RATE = 0.67e12  # bytes per second
# What an exchange slows the call beside it by, of the time in which both run: 0.8 of 3.5 ms under that butterfly.
_COST_OF_HIDING = 0.25
# A backward pass has five products where a forward pass has two, at four fifths of their rate: causal calls and windows on one GPU
# took 2.8 to 3.3 times what FLOP_RATE predicts for the forward pass. Other masks took 3.8 to 5.1 times, either way.
_BACKWARD = 3.1
# What the visited blocks of others take in a backward call of their own, relative to one call on all: documents less than 1.1 to
# 1.37 in three runs, causal with 8 heads 1.31, with 32 heads 1.03.
_FAR_BACKWARD = 1.2
# Bytes moved for an element of a row, with 16-bit numbers, by a call on blocks of others and by what follows it: what the kernels
# read and write.
_CALL, _CALL_BACK = 4, 10  # q is read and out written; q is read once, out and dout twice in all, and dq is written
_JOIN = 6  # one is read and joined, or added, to the other
_GATHER, _GATHER_BACK = 4, 12  # q is read and written; q, dout and out are
# Rows are gathered for the call on blocks of others only where a smaller share of them visits such blocks. By the numbers above it
# pays below 0.22 in a forward pass, and below 0.27 in a backward pass of separate calls; both walk one table.
_GATHERED_SHARE = 0.25


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


def copied(size: float) -> float:
    """Seconds in which so many bytes are read and written."""
    return 2 * size / _MEMORY_RATE


class CallTimes(NamedTuple):
    """Seconds of a pass in which blocks travel. one: the exchange, and one call on all columns. two: a call on the rank's own
    columns, behind which the exchange hides, and one on the columns of others."""

    one: float
    two: float

    @property
    def overlaps(self) -> bool:
        return self.two < self.one


def slowest(times: Iterable[CallTimes]) -> CallTimes:
    """Of several ranks, all of which make one call, or all two. A rank of two calls beside one of one call waits for what that one
    sends late: documents of 524,288 tokens with 8 heads took 63 ms backward, where two calls took 56 and one 59."""
    return CallTimes(*(max(of_way) for of_way in zip(*times, strict=True)))


def gathers_rows(visiting: float, own: float) -> bool:
    """Whether a call on blocks of others gathers the rows that visit some, or walks all that the rank has."""
    return visiting < _GATHERED_SHARE * own


def call_times(
    near: float, far: float, visiting: float, own: int, received: float, sizes: SequenceSizes, link_rate: float
) -> tuple[CallTimes, CallTimes]:
    """(of the forward pass, of the backward pass) of one rank.

    near, far: its visited blocks in its own columns and in those of others, summed over heads. visiting: how many of its block rows
    visit blocks of others. own, received: blocks that it holds, with padding, and that it gets.
    """
    # One call's blocks are summed first: assignments that differ in what is near alone are then a tie to the last bit.
    on_near, on_far, on_all = (seconds(blocks, 0, sizes, link_rate) for blocks in (near, far, near + far))
    # Gradients return to the rank instead of blocks; it is taken to have sent as many as it gets.
    travel = seconds(0, received * sizes.block_bytes, sizes, link_rate)
    # For one call the rank's own blocks, in a forward pass while others travel, and those of others are copied into one tensor, and
    # their gradients from one: read and written. For two calls, only the gradients of blocks of others are.
    copied_own = copied(own * sizes.block_bytes) if received else 0.0
    sent_back = copied(received * sizes.block_bytes)
    gathers = gathers_rows(visiting, own)
    walked = visiting if gathers else own
    row = sizes.heads * sizes.block_size * HEAD_DIM  # elements
    joined = (_CALL * walked + _JOIN * visiting) * row / _MEMORY_RATE
    added = 0.0  # Backward calls that share all rows share their sum of dQ (``calls.JointCalls``).
    if gathers:
        joined += _GATHER * walked * row / _GATHER_RATE
        added = ((_CALL_BACK + _JOIN) / _MEMORY_RATE + _GATHER_BACK / _GATHER_RATE) * walked * row
    forward = CallTimes(on_all + max(travel, copied_own) + sent_back, _both(on_near, travel) + on_far + joined)
    near_back, far_back = _BACKWARD * on_near, _BACKWARD * on_far
    backward = CallTimes(
        _BACKWARD * on_all + travel + 2 * (copied_own + sent_back),
        _FAR_BACKWARD * far_back + _both(near_back, travel) + sent_back + added,
    )
    return forward, backward


def _both(call: float, travel: float) -> float:
    """Seconds of a call and of the exchange that it hides."""
    return max(call, travel) + _COST_OF_HIDING * min(call, travel)
