"""Positions of programs in a grid."""

import triton
import triton.language as tl


@triton.jit
def tile_and_batch_head(tiles):
    """(which of a batch-head's ``tiles`` a program has, its batch-head), in a grid of one axis. Batch-heads may be more than
    ``config.SECOND_AXIS``."""
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles
