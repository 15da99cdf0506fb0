"""Holds the sizes of a sequence, and how long a rank takes to attend, to receive and to copy."""

from __future__ import annotations

from dataclasses import dataclass

from ..masks.costs import BLOCK, COPY_RATE, HEAD_DIM, row_us

ELEMENT_BYTES = 2  # float16, bfloat16
LSE_BYTES = 4  # float32

# Times of calls are those of ``masks/costs``, the same on all ranks. What it does not know was fitted to runs on two H100:
# docs/performance/several-gpus.md, "The rates behind the estimates", has the measured ranges and the results files.

_MEMORY_RATE = 1e6 * COPY_RATE  # bytes per second of copies, merges and calls on few keys
# Other links may be slower: link_rate= gives their rate.
LINK_RATE = 255e9  # bytes per second that a rank receives


@dataclass(frozen=True)
class SequenceSizes:
    """Holds the sizes of one sequence. q_len, block_size: tokens. heads: of queries. kv_heads: of keys and values. link_rate: bytes
    per second that a rank receives."""

    q_len: int
    block_size: int
    heads: int
    kv_heads: int
    link_rate: float = LINK_RATE

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of the keys and values of one block."""
        return self.block_size * self.kv_heads * 2 * HEAD_DIM * ELEMENT_BYTES


def pass_seconds(backward: bool, rows: float, blocks: float, sizes: SequenceSizes) -> float:
    """Returns the seconds of a pass. rows, blocks: block rows and visited blocks, all taken for full, summed over heads."""
    size = sizes.block_size / BLOCK  # kernels rarely run smaller ones (``masks/coarsen``)
    return 1e-6 * row_us(backward, BLOCK, rows * size, blocks * size**2)


def copy_seconds(size: float) -> float:
    """Returns the seconds that copying ``size`` bytes takes."""
    return 2 * size / _MEMORY_RATE
