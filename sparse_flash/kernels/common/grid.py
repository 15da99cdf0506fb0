"""Positions of programs in a grid."""

import triton
import triton.language as tl


@triton.jit
def tile_and_batch_head(tiles):
    """(a program's tile, of ``tiles`` per batch-head, its batch-head), in a grid of one axis. There may be more batch-heads than
    ``config.SECOND_AXIS``."""
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles
