"""Checks that several calls share: tensors, dtypes, devices, scales, masks. Each error says what an argument must be, what it was,
and what to do."""

import math
import sys
import warnings

import torch

from ..compat.names import PACKAGE
from ..compat.pytorch import is_distributed
from ..masks.block_mask import BlockMask, check_batch_and_heads
from .caches import E4M3
from .variant import check_number

_MOST_HEADS = 128  # of models

_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


def check_types(q: object, k: object, v: object) -> None:
    """Raises TypeError or ValueError unless q, k and v are plain tensors, and NotImplementedError under torch.jit.trace."""
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "sparse_flash's calls look up tables for their lengths, which torch.jit.trace turns into constants; use "
            "torch.export.export or torch.compile"
        )
    for name, value in (("q", q), ("k", k), ("v", v)):
        if type(value) is not torch.Tensor:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} must be a tensor of shape (batch, heads, tokens, head_dim); got {type(value).__name__}")
            if not torch.compiler.is_compiling() and is_distributed(value):
                raise TypeError(
                    f"{name} must be a tensor of one rank; got a DTensor; make the call in a function that "
                    "torch.distributed.tensor.experimental.local_map wraps, with batch or heads sharded; tokens are shared among "
                    "ranks by sparse_flash.context_parallel"
                )
        if value.layout is not torch.strided or value.is_nested:
            layout = "a nested tensor" if value.is_nested else value.layout
            raise ValueError(
                f"{name} must be a tensor of layout torch.strided; got {layout}; sequences of many lengths, the values and "
                "offsets of a nested tensor, go to sparse_flash.attention_varlen"
            )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, may_be_empty: bool = False) -> None:
    """Raises ValueError if q, k and v do not fit together, and warns if they look transposed. may_be_empty: except in head_dim."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (batch, heads, tokens, head_dim); got {tuple(tensor.shape)}")
    check_alike(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[3] == 0 or (0 in tensor.shape and not may_be_empty):
            raise ValueError(f"{name} must not be empty; got shape {tuple(tensor.shape)}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and tokens; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head_dim; got {tuple(q.shape)} and {tuple(k.shape)}")
    check_head_groups(q.shape[1], k.shape[1])
    if not torch.compiler.is_compiling() and looks_transposed(q, k):  # lengths are symbols there
        warnings.warn(
            f"q, k and v must be (batch, heads, tokens, head_dim); got q of shape {tuple(q.shape)}, {q.shape[1]} heads of "
            f"{q.shape[2]} tokens; if tokens come before heads, pass q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2), "
            "and transpose the result back",
            stacklevel=callers_level(),
        )


def looks_transposed(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether tokens seem to come before heads, unlike decoding steps and windows of images: more heads than models have."""
    return min(q.shape[1], k.shape[1]) > _MOST_HEADS >= q.shape[2] and k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0


def check_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cast: str = "cast with .to({0})") -> None:
    """Raises ValueError for unsupported or differing dtypes or devices. cast: the fix, formatted with q's and the other dtype."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, tensor)
        if tensor.dtype != q.dtype:
            way_out = cast.format(q.dtype, tensor.dtype)
            raise ValueError(f"q, k and v must have one dtype; q is {q.dtype}, {name} is {tensor.dtype}; {way_out}")
        if tensor.device != q.device:
            raise ValueError(f"q, k and v must be on one device; q is on {q.device}, {name} on {tensor.device}")


def check_shapes(shapes: str, *tensors: object) -> None:
    """Raises ValueError unless tensors have these shapes. None passes.

    shapes: of all tensors, as in "q: batch tokens 64; k: batch tokens". A name is one size throughout.
    """
    sizes: dict[str, int] = {}
    for each, x in zip(shapes.split("; "), tensors, strict=True):
        name, shape = each.split(": ")
        names, found = shape.split(), tuple(x.shape) if isinstance(x, torch.Tensor) else ()
        given = {one: int(one) if one.isdigit() else sizes.get(one, n) for one, n in zip(names, found, strict=False)}
        if x is not None and (len(names) != len(found) or any(given[one] != n for one, n in zip(names, found, strict=True))):
            wanted = ", ".join(f"{one}={sizes[one]}" if one in sizes else one for one in names)
            raise ValueError(f"{name} must be a tensor of shape ({wanted}); got {found or type(x).__name__}")
        sizes |= given


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError if back ends do not support a tensor's dtype."""
    if tensor.dtype not in _DTYPES:
        way_out = "cast with .to(torch.bfloat16)"
        if tensor.dtype == E4M3:
            way_out = "multiply it by its scale, or pass a cache and its scales to attention_decode"
        raise ValueError(
            f"{name} must be a floating-point tensor, of float16, bfloat16, float32 or float64; got {tensor.dtype}; {way_out}"
        )


def check_head_groups(heads: int, kv_heads: int) -> None:
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"the number of key heads must divide that of query heads; got {heads} query heads and {kv_heads} key heads"
        )


def stand_in_for_empty_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tensors, or if all have a batch of 0, zeros with a batch of 1, whose other sizes can be checked."""
    if any(tensor.shape[:1] != (0,) for tensor in (q, k, v)):
        return q, k, v
    one, other, last = (tensor.new_zeros(1).expand(1, *tensor.shape[1:]) for tensor in (q, k, v))
    return one, other, last


def cast_for_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Casts q, k and v to the dtype that autocast asks for, as for scaled_dot_product_attention."""
    if autocast_applies(q.device):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v


def autocast_applies(device: torch.device) -> bool:
    """Whether autocast is enabled on a device; never on "meta", for which PyTorch raises."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def resolve_scale(scale: float | None, head_dim: int) -> float | None:
    """Checks and returns the scale. Within torch.compile None stays None, as head_dim may be symbolic."""
    if scale is None:
        return None if torch.compiler.is_compiling() else head_dim**-0.5
    check_number("scale", scale)
    scale = float(scale)
    if not 0 < scale < math.inf:  # torch.compile cannot trace isfinite of a symbolic number
        raise ValueError(f"scale must be positive and finite; got {scale}; negate q for a negative scale")
    return scale


def resolve_deterministic(deterministic: bool | None) -> bool:
    """Resolves None. Raises TypeError unless it is a bool or None; numbers too, because 1 equals True in keys of earlier calls."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if deterministic is not True and deterministic is not False:
        raise TypeError(
            f"deterministic must be True, False or None; got {deterministic!r}; None follows "
            "torch.are_deterministic_algorithms_enabled()"
        )
    return deterministic


def check_precision(precision: object) -> None:
    """Raises ValueError for a precision that does not exist."""
    if precision not in (None, "fp8"):
        raise ValueError(f"precision must be None or 'fp8'; got {precision!r}")


def check_mask(mask: BlockMask, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError unless a mask was made for these numbers of queries and keys."""
    if (mask.q_len, mask.kv_len) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the mask was compiled for q_len={mask.q_len}, kv_len={mask.kv_len}; q and k have {q.shape[2]} and {k.shape[2]} "
            "tokens; compile it for these lengths, or pass the pattern itself"
        )
    check_mask_fits(mask, q)


def check_mask_fits(mask: BlockMask, q: torch.Tensor) -> None:
    if mask.device != q.device:
        way_out = f"use mask.to({str(q.device)!r}), in a module's _apply, or pass the pattern, which suits every device"
        raise ValueError(f"the mask is on {mask.device} and q on {q.device}; {way_out}")
    check_batch_and_heads(mask.mask_index.shape, q.shape[0], q.shape[1])


def callers_level() -> int:
    """The ``stacklevel`` of the user's code: outside the package, and outside torch, which calls layers."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith((f"{PACKAGE}.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def refuse_probabilities(dropout_p: float, return_attn_probs: bool) -> None:
    """Raises ValueError for calls that ask for weights together with dropout."""
    if return_attn_probs and dropout_p:
        raise ValueError(
            "return_attn_probs with dropout asks for S_dmask, the matrix of weights with dropout's signs, which is never formed; "
            "leave out return_attn_probs, or take lse from sparse_flash.attention(..., return_lse=True)"
        )
