"""What the launchers share: descriptors of tensors, the arguments that a table becomes, and the launch itself."""

import torch
import triton
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from .terms import KernelTerms

# Triton compiles anew for integers that are 1 or multiples of 16. Few gain by it, and a new number of heads or of keys
# shall not wait for a compiler. q_len does: rows of lse and delta that start on 16 bytes make dK and dV up to 16 % faster.
NOT_SPECIALIZED = ["heads", "group", "kv_len", "q_blocks", "kv_blocks", "mask_batch_stride", "mask_head_stride"]


def described(tensor: torch.Tensor, rows: int, dim: int) -> TensorDescriptor:
    """A descriptor of a (batch, heads, tokens, head_dim) tensor for tiles of (rows, dim)."""
    # Not through its constructor, whose checks the back end has made already: a call makes up to sixteen of these.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = tensor
    descriptor.shape = list(tensor.shape)
    descriptor.strides = list(tensor.stride())
    descriptor.block_shape = [1, 1, rows, dim]
    return descriptor


def table_arguments(mask, table, placeholder: torch.Tensor) -> tuple:
    """The mask's arguments of a kernel that walks ``table``; a dense kernel has no use for them, and gets placeholders."""
    if mask is None:
        return (placeholder,) * 8 + (0, 0)
    index = mask.mask_index
    several = table.row_ptr.shape[0] > 1
    strides = (stride if size > 1 and several else 0 for size, stride in zip(index.shape, index.stride(), strict=True))
    return (index, *table[:5], *mask.tiles, *strides)


def length_variant(q_len: int) -> tuple[bool, bool]:
    """What of q_len the portable kernels are compiled for: see NOT_SPECIALIZED."""
    return q_len % 16 == 0, q_len == 1


def row_count(table, length: int, tile: int, block_size: int | None) -> int:
    """How many programs along the rows of a table, or of ``length`` tokens."""
    return triton.cdiv(length, tile) if table is None else table.row_order.shape[1] * (block_size // tile)


_launched: dict[tuple, CompiledKernel] = {}


def launch(kernel, grid: tuple[int, int], arguments: list, constants: dict, options: dict, variant: tuple = ()) -> None:
    """``kernel[grid](*arguments, **constants, **options)``; where the like was launched before, without Triton's search for
    the compiled code, which takes the host as long as all else.

    arguments: all but the compile-time ones, which come last in the kernel's signature and in ``constants``; the last of them may
    be ``KernelTerms``. variant: what else Triton compiles differently for.
    """
    first = arguments[0].base  # a descriptor, whose dtype the other types follow from
    pointers = [a.data_ptr() for a in arguments if isinstance(a, torch.Tensor)]
    if isinstance(arguments[-1], KernelTerms):
        pointers += arguments[-1].pointers()
    key = (kernel.fn, first.device, first.dtype, variant, *options.values(), *constants.values())
    aligned = not any(pointer % 16 for pointer in pointers)
    if aligned and key in _launched:
        _launched[key][(*grid, 1)](*arguments, *constants.values())
        return
    compiled = kernel[grid](*arguments, **constants, **options)
    if aligned and isinstance(compiled, CompiledKernel):  # the interpreter has none
        _launched[key] = compiled
