"""Descriptors, splits and queues, for the launchers of the Hopper kernels."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.config import padded_head_dim
from ..common.streams import raw_stream
from ..launch.memory import zeros_of_stream
from .scheduler import TILE

# Bytes of keys and values that stay in the L2 cache while programs walk them; the rest is for other data.
L2_BYTES = 16 << 20
# Of walked operands where rows keep at least this share of the blocks: then the programs of a head read the same ones at about the
# same time, as long as a head has some sixteen programs.
MOSTLY_KEPT = 0.25
BYTES_IN_STEP, HEADS_IN_STEP = 4 * L2_BYTES, 8

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FLOAT_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def described(tensor: torch.Tensor, block_shape: list[int], layout=TILE_LAYOUT) -> TensorDescriptor:
    """A descriptor for tiles of ``block_shape``."""
    # Bypasses the constructor, whose checks the back end has already made.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = tensor
    descriptor.shape = list(tensor.shape)
    descriptor.strides = list(tensor.stride())
    descriptor.block_shape = block_shape
    descriptor.layout = layout
    descriptor.padding = "zero"
    descriptor.round_f32_to_tf32 = False
    return descriptor


def blocks_by_document(q: torch.Tensor, v: torch.Tensor, mask, plain: bool):
    """The blocks by document of a call's mask, if it has some and the kernels of both passes take them, otherwise None. Up to
    head_dim 128 tiles are whole blocks; a variant would need the position of each. plain: whether the call has none."""
    if mask is None or not plain or mask.block_size != TILE.value:
        return None
    return mask.by_document if {padded_head_dim(t.shape[3]) for t in (q, v)} in ({64}, {128}) else None


def heads_together(row_bytes: int, rows: int, mask, lines: int, group: int = 1, by_key: bool = False) -> int:
    """How many of the ``lines`` of query heads follow each other together, the longest rows of all of them first: those of as many
    key heads as fit the L2 cache with their walked operands, two tensors of ``rows`` rows each, or half as many, if that leaves no
    few of them over. group: query heads of a key head.

    Two key heads at least with blocks by document, and backward (by_key) if one just fits. Where rows keep much of what they could,
    as causal ones do, two to eight lines: few heads have too few long rows to keep all programs busy while the last of them are
    computed (up to 24 %: docs/performance/kernels.md). Not for scattered blocks, where heads evict each other's.
    """
    of_head = 2 * rows * row_bytes
    fitting, units = L2_BYTES // of_head, lines // group
    two = (mask is not None and mask.starts is not None) or (by_key and fitting == 1)
    most = max(2 if two else 1, fitting)
    if units <= most:
        return lines
    if _mostly_kept(mask, rows, by_key):
        most = max(most, -(-2 // group), min(-(-HEADS_IN_STEP // group), BYTES_IN_STEP // of_head))
        return -(-units // max(1, units // most)) * group
    # Of numbers from half of it on, the one that leaves the fullest last group.
    return max(range(-(-most // 2), most + 1), key=lambda number: (((units - 1) % number + 1) / number, number)) * group


def _mostly_kept(mask, rows: int, by_key: bool) -> bool:
    """Whether rows visit a large share of the blocks, on average, as far as is known without reading the device."""
    if mask is None or mask.starts is not None or not mask.from_host:
        return False
    table = mask.by_key if by_key else mask.by_query
    return table.col_idx.numel() >= MOSTLY_KEPT * table.row_order.numel() * -(-rows // mask.block_size)


def tile_queue(device: torch.device) -> torch.Tensor:
    """(2,) int32 zeros, which a launch resets to zeros: see ``scheduler``. A launch captured in a graph, whose replays may overlap
    with anything, has its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return zeros_of_stream("queue", 2, device, raw_stream(device.index))
