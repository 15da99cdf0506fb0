"""What the launchers of the Hopper kernels share."""

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Bytes of keys and values that stay in the L2 cache while programs walk them, with room left for all else.
L2_BYTES = 32 << 20

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
FLOAT_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def described(tensor: torch.Tensor, block_shape: list[int], layout=TILE_LAYOUT) -> TensorDescriptor:
    """A descriptor for tiles of ``block_shape``."""
    # Not through its constructor, whose checks the back end has made already.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = tensor
    descriptor.shape = list(tensor.shape)
    descriptor.strides = list(tensor.stride())
    descriptor.block_shape = block_shape
    descriptor.layout = layout
    descriptor.padding = "zero"
    descriptor.round_f32_to_tf32 = False
    return descriptor


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def heads_together(k: torch.Tensor) -> int:
    """How many heads' keys and values the L2 cache holds."""
    return max(1, L2_BYTES // (2 * k.shape[2] * k.shape[3] * k.element_size()))
