"""Descriptors, pointers of tables and queues, for the launchers of the Hopper kernels."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.streams import raw_stream
from ..launch.launch import table_arguments
from ..launch.memory import zeros_of_stream
from .scheduler import TablePointers

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
# Tiles of operands in e4m3, by the bytes of a row, 64 or 128.
EIGHT_BIT_LAYOUTS = {width: gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8, rank=4) for width in (64, 128)}
FLOAT_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def gluon_descriptor(tensor: torch.Tensor, block_shape: list[int], layout=None) -> TensorDescriptor:
    """Returns Gluon's descriptor for tiles of ``block_shape``. layout: None for the one of operands in 16 bits, or in e4m3."""
    if layout is None:
        layout = TILE_LAYOUT if tensor.element_size() == 2 else EIGHT_BIT_LAYOUTS[block_shape[3]]
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


def table_pointers(mask, table, work: torch.Tensor, placeholder: torch.Tensor) -> tuple[TablePointers, list[int]]:
    """Returns (the pointers of a table, the strides of its mask index). work: its items. Other arguments as for
    ``table_arguments``."""
    index, _, _, _, *entries, mask_batch_stride, mask_head_stride = table_arguments(mask, table, placeholder)
    return TablePointers(index, work, *entries), [mask_batch_stride, mask_head_stride]


def tile_queue(device: torch.device) -> torch.Tensor:
    """Returns (2,) int32 zeros, which a launch resets to zeros: see ``scheduler``. A launch captured in a graph has its own, as the
    graph's replays may overlap with anything."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return zeros_of_stream("queue", 2, device, raw_stream(device.index))
