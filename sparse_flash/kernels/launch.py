"""What the launchers share: descriptors of tensors and the arguments that a table becomes."""

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

# Triton compiles anew for integers that are 1 or multiples of 16. Few gain by it, and a new number of heads or of keys
# shall not wait for a compiler. q_len does: rows of lse and delta that start on 16 bytes make dK and dV up to 16 % faster.
NOT_SPECIALIZED = ["heads", "group", "kv_len", "q_blocks", "kv_blocks", "mask_batch_stride", "mask_head_stride"]


def described(tensor: torch.Tensor, rows: int, dim: int) -> TensorDescriptor:
    """A descriptor of a (batch, heads, tokens, head_dim) tensor for tiles of (rows, dim)."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, dim])


def table_arguments(mask, table, placeholder: torch.Tensor) -> tuple:
    """The mask's arguments of a kernel that walks ``table``; a dense kernel has no use for them, and gets placeholders."""
    if mask is None:
        return (placeholder,) * 8 + (0, 0)
    index = mask.mask_index
    strides = (stride if size > 1 else 0 for size, stride in zip(index.shape, index.stride(), strict=True))
    return (index, *table, *mask.tiles, *strides)


def row_count(table, length: int, tile: int, block_size: int | None) -> int:
    """How many programs along the rows of a table, or of ``length`` tokens."""
    return triton.cdiv(length, tile) if table is None else table.row_order.shape[1] * (block_size // tile)
