"""Compares tables by their counts alone, before a call's heads are known: how long both passes take a GPU whose programs all have
work, at head_dim 128. Work and bytes are both proportional to head_dim, so no choice depends on it."""

from functools import cache
from typing import NamedTuple

import numpy as np

from ..hopper.configs import FORWARD, FORWARD_OF_64, backward_config
from .chips import Chip, KernelFamily, shipped_chips
from .hopper import backward_row_bytes
from .portable import PORTABLE_ROW_BYTES, family_of_blocks

HEAD_DIM, DENSE_BLOCK = 128, 128
# Predictions are a few percent off, so a smaller gain is none.
LEAST_GAIN = 1.05
# Constants of the portable kernels rest on few measurements. Time per visited pair of blocks of 32 and 16, over that of Hopper's
# kernels in blocks of 128, was 2.1 to 3.6 (H200, 2026-11-21, causal and causal & local(1024)), and they predict 3.9 in long rows.
PORTABLE_MARGIN = 1.5
_MOST_KEPT = 0.9  # of the pairs of dense or causal attention


@cache
def reference_chip() -> Chip:
    """Returns the chip whose constants decide what is decided without knowledge of a GPU, or by several ranks alike."""
    return next(iter(shipped_chips().values()))


class BlockTimes(NamedTuple):
    """Microseconds of a pass over a table of one head: for a row of blocks (in the backward pass, a row and a column), for a full
    block, and for a partial block."""

    row: float
    full: float
    partial: float

    def of(self, rows: float, full: float, partial: float = 0.0) -> float:
        return rows * self.row + full * self.full + partial * self.partial


@cache
def block_times(block_size: int, backward: bool) -> BlockTimes:
    """Returns the times of blocks of so many tokens, by the kernels that take them."""
    chip, row_bytes = reference_chip(), backward_row_bytes(HEAD_DIM, HEAD_DIM)
    if block_size < 64:
        family, row_bytes = family_of_blocks(backward, HEAD_DIM, HEAD_DIM, block_size), PORTABLE_ROW_BYTES * HEAD_DIM
    else:
        config = backward_config(HEAD_DIM, block_size) if backward else (FORWARD_OF_64 if block_size == 64 else FORWARD)[HEAD_DIM]
        family = KernelFamily(backward, HEAD_DIM, HEAD_DIM, config.queries, config.keys, config.programs)
    times, programs = chip.times(family), chip.multiprocessors * family.programs
    tiles, steps = block_size / (family.keys if backward else family.queries), block_size**2 / (family.queries * family.keys)
    beside = row_bytes * block_size / chip.bytes_per_us if backward else 0.0
    return BlockTimes(tiles * times.row / programs + beside, steps * times.full / programs, steps * times.partial / programs)


def predict_both_passes(block_size: int, rows: float, full: float, partial: float = 0.0) -> float:
    """Returns the microseconds of a forward and a backward pass over a table of one head with these counts."""
    return sum(block_times(block_size, backward).of(rows, full, partial) for backward in (False, True))


class DenseCall(NamedTuple):
    """A call without a mask, beside one with a mask. gain: how often the time of the call with the mask goes into the time of this
    one. pairs: how many pairs this one keeps."""

    gain: float
    pairs: int


def compare_with_dense(mask) -> DenseCall:
    """Returns dense attention beside a mask, or causal attention if no visited block lies past the diagonal. mask: a BlockMask
    on the host."""
    size, offset, table = mask.block_size, mask.kv_len - mask.q_len, mask.by_query
    ptr, split, cols = (bounds.numpy().astype(np.int64) for bounds in (table.row_ptr, table.row_split, table.col_idx))
    shares = np.bincount(mask.mask_index.flatten().numpy(), minlength=len(ptr)) / mask.mask_index.numel()
    ends = np.stack([split[..., 0], split[..., 1], ptr[:, 1:]])  # of full blocks, of run tiles, of bit tiles
    begins = np.stack([ptr[:, :-1], split[..., 0], split[..., 1]])
    last = np.where(begins < ends, cols[np.maximum(ends, 1) - 1], -1)
    first_query = np.arange(ptr.shape[1] - 1) * size
    causal = (last * size <= first_query + size - 1 + offset).all() and ((last[0] + 1) * size <= first_query + offset + 1).all()
    counts = shares @ (ends - begins).sum(-1)[0], shares @ (ptr[:, -1] - ptr[:, 0])  # full blocks, all blocks
    dense = predict_dense_passes(mask.q_len, mask.kv_len, bool(causal))
    until = np.clip(np.arange(mask.q_len) + offset + 1, 0, mask.kv_len) if causal else np.full(mask.q_len, mask.kv_len)
    return DenseCall(float(dense / predict_both_passes(size, len(first_query), counts[0], counts[1] - counts[0])), int(until.sum()))


def is_dense_as_fast(mask) -> bool:
    """Whether a mask gains nothing over the call without it. False for a mask that keeps nearly as many pairs: its user expects no
    gain. mask: a BlockMask on the host."""
    gain, pairs = compare_with_dense(mask)
    return gain < LEAST_GAIN and mask.density * mask.q_len * mask.kv_len <= _MOST_KEPT * pairs


def predict_dense_passes(q_len: int, kv_len: int, causal: bool) -> float:
    """Returns the microseconds of a forward and a backward pass of dense attention, or of causal attention, of one head."""
    rows = np.arange(-(-q_len // DENSE_BLOCK)) * DENSE_BLOCK + kv_len - q_len  # the last key of each row's first query
    keys = -(-kv_len // DENSE_BLOCK)
    full = np.clip((rows + 1) // DENSE_BLOCK, 0, keys) if causal else np.full(len(rows), keys)
    visited = np.clip((rows + DENSE_BLOCK - 1) // DENSE_BLOCK + 1, 0, keys) if causal else full
    return predict_both_passes(DENSE_BLOCK, len(rows), full.sum(), visited.sum() - full.sum())
