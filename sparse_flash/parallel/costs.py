"""What a forward pass costs a rank: an estimate to choose by, from visited blocks and received elements."""

from __future__ import annotations

from dataclasses import dataclass

# Assumed where nothing is said, as both costs are proportional to it and so no choice depends on it.
HEAD_DIM = 128
ELEMENT_BYTES = 2  # float16, bfloat16

# Two H200 on NVLink, torch 2.11, bf16, 2026-11-21: 786 MB of keys and values took 4.83 ms, packing included. (The link itself is
# more than twice as fast.) Links between nodes are slower: link_rate= says how fast.
LINK_RATE = 163e9  # bytes per second that a rank receives
# One H200, bf16, head_dim 128, forward, over the pairs of visited blocks: docs/performance.md, windows and butterflies.
_FLOPS = 500e12


@dataclass(frozen=True)
class SequenceSizes:
    """Of one sequence. q_len, block_size: tokens. heads, kv_heads: of queries, and of keys and values."""

    q_len: int
    block_size: int
    heads: int
    kv_heads: int


def seconds(blocks: float, received: float, sizes: SequenceSizes, link_rate: float) -> float:
    """Of a rank's forward pass: its visited blocks, summed over heads, then the bytes that it receives."""
    return blocks * sizes.block_size**2 * 4 * HEAD_DIM / _FLOPS + received / link_rate
