"""Positions of programs in a grid."""

import triton
import triton.language as tl

SECOND_AXIS = 65535  # programs that CUDA allows along the second axis of a grid; along the first, 2^31 - 1


@triton.jit
def tile_and_batch_head(tiles):
    """(which of a batch-head's ``tiles`` a program has, its batch-head), in a grid of one axis. Batch-heads may be more than
    ``SECOND_AXIS``."""
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles
