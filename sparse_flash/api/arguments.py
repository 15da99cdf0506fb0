"""Checks the arguments of calls. Each error says what must be passed, what was passed, and how to fix it. ``checked`` makes the
record of a call. ``checked_variant`` checks lengths, score modifications and dropout; ``keywords`` answers unknown keywords."""

from __future__ import annotations

import math
import sys
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .. import backends
from ..choosers.choose import chosen_in_graph, chosen_mask
from ..compat.dynamo import constant_in_graphs
from ..compat.names import PACKAGE
from ..compat.pytorch import is_distributed, is_recorded
from ..dispatch import operators
from ..dispatch.call import AttentionCall, ChosenBlocks, backend_for
from ..masks.block_mask import BlockMask, check_batch_and_heads
from ..masks.cache import compiled_once, of_another_library, traceable
from ..masks.chooser import is_chosen, looking_ahead
from ..masks.meaning import later_keys_decide
from ..masks.memory import cleared_by, remembered
from ..masks.pattern import Pattern, check_known_end, shortened, text_of
from ..packed.repack import Side
from ..selection.block_selection import BlockSelection, checked_selection_block, checked_sharing
from ..selection.choice import COMPRESSED, SCORES
from ..variant.eight_bits import PRECISIONS
from ..variant.variant import ScoreFunction, check_counts, check_number, check_same_device, checked_variant, int32_lengths
from .shared import SharedSequence

DEFAULT_BLOCK_SIZE = operators.PATTERN_BLOCK_SIZE
MAX_QUERIES = 64  # per sequence, in decoding
MOST_HEADS = 128  # of models

_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64

# The back end chosen for each plain call so far, by everything that checks and choice depend on. At _MOST_CHOSEN entries all are
# dropped. Entries never go stale: what back ends support on a device does not change while a process runs.
_chosen_backends: dict[tuple[object, ...], str] = {}
_MOST_CHOSEN = 4096
cleared_by(_chosen_backends.clear)


def checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | BlockSelection | ChosenBlocks | Pattern | str | None,
    scale: float | None,
    dropout_p: float,
    kv_lens: torch.Tensor | None,
    q_lens: torch.Tensor | None,
    kv_starts: torch.Tensor | None,
    q_starts: torch.Tensor | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    rel_bias: torch.Tensor | None,
    score_mod: ScoreFunction | None,
    score_params: tuple[torch.Tensor, ...],
    sinks: torch.Tensor | None,
    deterministic: bool | None,
    backend: str,
    precision: str | None = None,
) -> AttentionCall:
    """The arguments of ``sf.attention`` as one call, with its table and back end. Raises ValueError for arguments that do not fit
    together, TypeError for wrong types. A plain call like an earlier one is not checked again."""
    check_types(q, k, v)
    deterministic = checked_deterministic(deterministic)
    backends.check_name(backend)
    e4m3 = precision is not None and q.dtype == backends.E4M3
    if not e4m3:
        q, k, v = autocast(q, k, v)
    if precision is not None:
        _check_precision(precision, q, k, v, mask, sinks)
    if isinstance(mask, (Pattern, str)):
        spec = traceable(mask) if torch.compiler.is_compiling() else mask
        chooses = is_chosen(spec)
        # It raises for an expression that mixes patterns and choosers wrongly, also if there are no tokens.
        ahead = looking_ahead(spec) if chooses else None
        if chooses and 0 not in q.shape and 0 not in k.shape:
            check_tensors(q, k, v)
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                _refuse_looking_ahead(ahead)
                _warn_of_later_keys(spec)
            if not (kv_lens is q_lens is None):
                check_known_end(spec)
            lengths = checked_variant(q, k, kv_lens=kv_lens, q_lens=q_lens, kv_starts=kv_starts, q_starts=q_starts)
            choose = chosen_in_graph if torch.compiler.is_compiling() else chosen_mask
            mask = choose(spec, q, k, checked_scale(scale, q.shape[3]), None, lengths)
    has_lengths_or_bias = not (kv_lens is q_lens is kv_starts is q_starts is alibi_slopes is rel_bias is None)
    others: dict[str, Any] = {}
    if has_lengths_or_bias or not _is_plain(dropout_p, softcap, score_mod, score_params):
        others = {"dropout_p": dropout_p, "kv_lens": kv_lens, "q_lens": q_lens, "kv_starts": kv_starts, "q_starts": q_starts}
        others |= {"softcap": softcap, "alibi_slopes": alibi_slopes, "rel_bias": rel_bias}
        others |= {"score_mod": score_mod, "score_params": score_params}
    pattern = mask if isinstance(mask, (Pattern, str)) else None
    if not (mask is None or pattern is not None or isinstance(mask, (BlockMask, ChosenBlocks))):
        if isinstance(mask, BlockSelection):
            _refuse_beside_selection(others)
            check_tensors(*of_some_batch(q, k, v))
            _check_selection(mask, q, k)
            check_sinks(sinks, q)
            return AttentionCall(q, k, v, mask, None, checked_scale(scale, q.shape[3]), deterministic, backend, None, sinks)
        mask = _of_another_library(mask)
    q_shape, k_shape, device = q.shape, k.shape, q.device
    is_empty = 0 in q_shape or 0 in k_shape
    shapes_are_read = len(others) > 0 or sinks is not None or is_empty or pattern is not None  # before the key is looked up
    if shapes_are_read:
        check_tensors(q, k, v, may_be_empty=is_empty, e4m3=e4m3)
    variant = None
    if others:
        variant = checked_variant(q, k, **others)
        if pattern is not None and not (kv_lens is q_lens is None):
            check_known_end(traceable(pattern) if torch.compiler.is_compiling() else pattern)
    check_sinks(sinks, q)
    if is_empty:
        if isinstance(mask, str):
            text_of(mask)  # raises SpecError for text that cannot be read
        scale = checked_scale(scale, q_shape[3])
        return AttentionCall(q, k, v, mask, None, scale, deterministic, operators.NOTHING, variant, sinks, precision)
    table: BlockMask | ChosenBlocks | str | None = (
        None if pattern is None else _table_or_text(pattern, q_shape[2], k_shape[2], device)
    )
    if isinstance(mask, (BlockMask, ChosenBlocks)):
        table = mask
    kernel_table = table.kernel_table(q.is_cuda) if isinstance(table, BlockMask) else table
    key = known = None
    if not (variant is not None or isinstance(table, (str, ChosenBlocks)) or torch.compiler.is_compiling()):
        types = q.dtype, k.dtype, v.dtype, device, k.device, v.device
        fits = None if table is None else (table.fits, isinstance(kernel_table, BlockMask) and kernel_table.block_size)
        key = q_shape, k_shape, v.shape, types, fits, deterministic, backend, precision
        known = _chosen_backends.get(key)
    if known is not None:
        scale = checked_scale(scale, q_shape[3])
        return AttentionCall(q, k, v, mask, kernel_table, scale, deterministic, known, None, sinks, precision)
    if not shapes_are_read:
        check_tensors(q, k, v, e4m3=e4m3)
    if isinstance(table, BlockMask):
        check_mask(table, q, k)
    scale = checked_scale(scale, q_shape[3])
    if backend == "auto" and not torch.compiler.is_compiling() and isinstance(table, BlockMask) and table.slow:
        _say_that_dense_is_as_fast()
    backend = backend_for(q, k, v, kernel_table, variant, deterministic, backend, precision)
    if key is not None and backend != "auto":  # which stays if a graph breaks within this function
        if len(_chosen_backends) >= _MOST_CHOSEN:
            _chosen_backends.clear()
        _chosen_backends[key] = backend
    return AttentionCall(q, k, v, mask, kernel_table, scale, deterministic, backend, variant, sinks, precision)


def check_precision(precision: object) -> None:
    """Raises ValueError for a precision that does not exist. None passes."""
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {', '.join(map(repr, PRECISIONS))}; got {precision!r}")


def _check_precision(precision: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, sinks: object) -> None:
    """Raises ValueError for a precision that does not exist, or that does not apply to these arguments."""
    check_precision(precision)
    if isinstance(mask, BlockSelection):
        raise ValueError(
            f"precision={precision!r} does not take a BlockSelection as mask; pass a BlockMask, or leave precision out"
        )
    trained = [
        name for name, t in (("q", q), ("k", k), ("v", v), ("sinks", sinks)) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if trained and torch.is_grad_enabled():
        raise ValueError(
            f"precision={precision!r} gives no gradients, and {trained[0]} requires one; leave precision out, or call it under "
            "torch.no_grad()"
        )
    if q.dtype not in (torch.float16, torch.bfloat16, backends.E4M3):
        raise ValueError(
            f"with precision={precision!r}, q, k and v must be float16, bfloat16 or torch.float8_e4m3fn; got {q.dtype}; cast them"
        )


def checked_input_scales(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_scale: object, k_scale: object, v_scale: object
) -> tuple[torch.Tensor, ...] | None:
    """The scales of e4m3 inputs, (batch, heads or kv_heads) each; None for other inputs."""
    given = (("q_scale", q_scale, q), ("k_scale", k_scale, k), ("v_scale", v_scale, v))
    if q.dtype != backends.E4M3:
        if any(scale is not None for _, scale, _ in given):
            raise ValueError(f"q_scale, k_scale and v_scale are of torch.float8_e4m3fn; got q of {q.dtype}; leave them out")
        return None
    found = []
    for name, scale, x in given:
        shape = f"{tuple(x.shape[:2])}, (batch, heads)"
        found.append(_checked_scale_of(name, scale, x, q, "e4m3 inputs", shape).expand(x.shape[:2]))
    return tuple(found)


def _checked_scale_of(
    name: str, scale: object, x: torch.Tensor, q: torch.Tensor, owner: str, shape: str, by_token: str = ""
) -> torch.Tensor:
    """A scale of x, which is e4m3. owner: what x is, in words. shape: of a scale for each head, in words. by_token: in words, the
    shape of a scale for each token, if that is allowed."""
    if not isinstance(scale, torch.Tensor):
        raise TypeError(
            f"{name} of {owner} must be a float32 tensor of shape {shape}; got {type(scale).__name__}; pass what stored numbers "
            "are to be multiplied by, torch.ones if by nothing"
        )
    check_same_device(name, scale, q, "detach it")
    fits = scale.dim() in ((2, 3) if by_token else (2,))
    if scale.dtype != torch.float32 or not (fits and all(n in (1, whole) for n, whole in zip(scale.shape, x.shape, strict=False))):
        more = f", or {by_token} for a scale of each token" if by_token else ""
        raise ValueError(
            f"{name} must be float32 of shape {shape}{more}, and a size of 1 serves all; got {scale.dtype} of shape "
            f"{tuple(scale.shape)} for {owner} whose first dimensions are {tuple(x.shape[:3])}"
        )
    return scale


@remembered(1)
def _say_that_dense_is_as_fast() -> None:
    warnings.warn(
        "this mask is predicted to take as long as attention without a mask, or as mask='causal' if no query sees a later key; "
        "sf.explain(mask) says what it visits (said of one mask only)",
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """The ``stacklevel`` of the user's line for a warning of the function that calls this: beyond the package, and beyond torch,
    which calls layers."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith((f"{PACKAGE}.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def _of_another_library(mask: object) -> BlockMask:
    """Reads a mask of another library as a BlockMask, once. Raises TypeError for anything else."""
    if not torch.compiler.is_compiling() and isinstance(mask, SharedSequence):
        raise TypeError(f"a {type(mask).__name__} is no mask: it attends itself; call plan.attention(q, k, v) on every rank")
    return of_another_library(mask)


def _is_plain(dropout_p: object, softcap: float | None, score_mod: ScoreFunction | None, score_params: object) -> bool:
    """Whether ``checked_variant`` has nothing to do for these, not even to raise an error."""
    no_dropout = isinstance(dropout_p, float) and dropout_p == 0.0
    no_params = isinstance(score_params, tuple) and len(score_params) == 0  # Dynamo traces no "not" of a tuple
    return no_dropout and no_params and softcap is None and score_mod is None


def _refuse_looking_ahead(chooser: str | None) -> None:
    if chooser is not None:
        raise ValueError(
            f"{chooser} must not be trained with, as later queries change what a block keeps; use torch.no_grad() for prompts, "
            "or another chooser for training; choose_blocks makes a mask that has gradients"
        )


@constant_in_graphs
def _warn_of_later_keys(spec: Pattern | str) -> None:
    if (within := later_keys_decide(spec)) is not None:
        _say_that_later_keys_decide(within)


@remembered(256)
def _say_that_later_keys_decide(within: str) -> None:
    warnings.warn(
        f"no query sees a later key under {shortened(within)}, but later keys change what the choosers beside it keep, so training "
        f"sees the future; write causal & {shortened(within)} & (...) (said once of each mask)",
        stacklevel=_callers_level(),
    )


def _refuse_beside_selection(others: dict[str, Any]) -> None:
    """Raises ValueError for arguments that a BlockSelection does not take."""
    nothing = int, float, tuple, list  # 0 and () change nothing
    given = [name for name, value in others.items() if value is not None and (not isinstance(value, nothing) or value)]
    if given:
        raise ValueError(f"a BlockSelection does not take {' and '.join(given)}; leave it out, or pass a BlockMask")


def _table_or_text(pattern: Pattern | str, q_len: int, kv_len: int, device: torch.device) -> BlockMask | str:
    """The pattern's table for these lengths; where the operator is visible, the pattern's spec text if it has one."""
    if not operators.is_seen():
        return compiled_once(pattern, q_len, kv_len, DEFAULT_BLOCK_SIZE, device)
    if torch.compiler.is_compiling():
        pattern = traceable(pattern)
    # Not through as_block_mask, which torch.compile would trace into its dispatch.
    text = text_of(pattern)
    return compiled_once(pattern, q_len, kv_len, DEFAULT_BLOCK_SIZE, device) if text is None else text


def autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in the dtype that autocast asks for, as for scaled_dot_product_attention."""
    if autocasts(q.device):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v


def autocasts(device: torch.device) -> bool:
    """Whether autocast is enabled on a device; never on "meta", for which PyTorch raises."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def checked_scale(scale: float | None, head_dim: int) -> float | None:
    """The scale of a call; raises ValueError or TypeError for an invalid one. Within torch.compile None stays None, as head_dim may
    be symbolic there."""
    if scale is None:
        return None if torch.compiler.is_compiling() else head_dim**-0.5
    check_number("scale", scale)
    scale = float(scale)
    if not 0 < scale < math.inf:  # torch.compile cannot trace isfinite of a symbolic number
        raise ValueError(f"scale must be positive and finite; got {scale}; negate q for a negative scale")
    return scale


def check_types(q: object, k: object, v: object) -> None:
    """Raises TypeError or ValueError for what is no plain tensor, and NotImplementedError under torch.jit.trace."""
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


def check_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cast: str = "cast with .to({0})", e4m3: bool = False) -> None:
    """Raises ValueError where back ends do not support a dtype, or where dtypes or devices differ. cast: the fix to suggest,
    formatted with q's dtype and the other dtype. e4m3: whether that is supported."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not (e4m3 and tensor.dtype == backends.E4M3):
            check_dtype(name, tensor)
        if tensor.dtype != q.dtype:
            way_out = cast.format(q.dtype, tensor.dtype)
            raise ValueError(f"q, k and v must have one dtype; q is {q.dtype}, {name} is {tensor.dtype}; {way_out}")
        if tensor.device != q.device:
            raise ValueError(f"q, k and v must be on one device; q is on {q.device}, {name} on {tensor.device}")


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where back ends do not support a tensor's dtype."""
    if tensor.dtype not in _DTYPES:
        way_out = "cast with .to(torch.bfloat16)"
        if tensor.dtype == backends.E4M3:
            way_out = "multiply it by its scale, or pass the scale to attention_decode, or to attention with precision='fp8'"
        raise ValueError(
            f"{name} must be a floating-point tensor, of float16, bfloat16, float32 or float64; got {tensor.dtype}; {way_out}"
        )


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, may_be_empty: bool = False, e4m3: bool = False) -> None:
    """Raises ValueError if q, k and v do not fit together, and warns if they look transposed. may_be_empty: sizes other than
    head_dim may be 0. e4m3: see ``check_alike``."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (batch, heads, tokens, head_dim); got {tuple(tensor.shape)}")
    check_alike(q, k, v, e4m3=e4m3)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[3] == 0 or (0 in tensor.shape and not may_be_empty):
            raise ValueError(f"{name} must not be empty; got shape {tuple(tensor.shape)}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and tokens; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head_dim; got {tuple(q.shape)} and {tuple(k.shape)}")
    _check_groups(q.shape[1], k.shape[1])
    if not torch.compiler.is_compiling():  # lengths are symbols there
        _warn_of_transposed(q, k)


def _warn_of_transposed(q: torch.Tensor, k: torch.Tensor) -> None:
    """Warns if tokens seem to come before heads: more heads than models have, fewer tokens than that, and no more keys than
    queries. Decoding steps and windows of images look different."""
    if min(q.shape[1], k.shape[1]) > MOST_HEADS >= q.shape[2] and k.shape[2] and q.shape[2] % k.shape[2] == 0:
        warnings.warn(
            f"q, k and v must be (batch, heads, tokens, head_dim); got q of shape {tuple(q.shape)}, {q.shape[1]} heads of "
            f"{q.shape[2]} tokens; if tokens come before heads, pass q.transpose(1, 2), k.transpose(1, 2) and v.transpose(1, 2), "
            "and transpose the result back",
            stacklevel=_callers_level(),
        )


def of_some_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tensors; if all have a batch of 0, zeros with a batch of 1, whose other sizes ``check_tensors`` can check."""
    if any(tensor.shape[:1] != (0,) for tensor in (q, k, v)):
        return q, k, v
    one, other, last = (tensor.new_zeros(1).expand(1, *tensor.shape[1:]) for tensor in (q, k, v))
    return one, other, last


def _check_groups(heads: int, kv_heads: int) -> None:
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"the number of key heads must divide that of query heads; got {heads} query heads and {kv_heads} key heads"
        )


def checked_deterministic(deterministic: bool | None) -> bool:
    """Resolves None. Raises TypeError for anything but a bool or None, numbers included: 1 equals True as a key of remembered
    calls."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if deterministic is not True and deterministic is not False:
        raise TypeError(
            f"deterministic must be True, False or None; got {deterministic!r}; None follows "
            "torch.are_deterministic_algorithms_enabled()"
        )
    return deterministic


def check_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raises ValueError or TypeError for sinks that do not fit."""
    if sinks is None:
        return
    check_same_device("sinks", sinks, q)
    if tuple(sinks.shape) != (q.shape[1],) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks must be of a floating-point type and shape (heads,), here ({q.shape[1]},); got {sinks.dtype} of shape "
            f"{tuple(sinks.shape)}"
        )


def check_mask(mask: BlockMask, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError where a mask was not made for these queries and keys."""
    if (mask.q_len, mask.kv_len) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the mask was compiled for q_len={mask.q_len}, kv_len={mask.kv_len}; q and k have {q.shape[2]} and {k.shape[2]} "
            "tokens; compile it for these lengths, or pass the pattern itself"
        )
    _check_mask_fits(mask, q)


def _check_mask_fits(mask: BlockMask, q: torch.Tensor) -> None:
    if mask.device != q.device:
        raise ValueError(f"the mask is on {mask.device} and q on {q.device}; use mask.to({str(q.device)!r})")
    check_batch_and_heads(mask.mask_index.shape, q.shape[0], q.shape[1])


def check_decoding_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor | None) -> None:
    """Checks as ``check_tensors`` does, for ``attention_decode``, whose k and v are a cache. head_dim and the sizes of pages must
    not be 0; other sizes may."""
    order = "(batch, kv_heads, capacity, head_dim)" if block_table is None else "(pages, kv_heads, page_size, head_dim)"
    for name, tensor, shape in (("q", q, "(batch, heads, q_len, head_dim)"), ("k", k, order), ("v", v, order)):
        if tensor.dim() != 4 or tensor.shape[3] == 0:
            raise ValueError(f"{name} must have shape {shape}, head_dim not 0; got {tuple(tensor.shape)}")
    if block_table is not None and 0 in k.shape[::2]:
        raise ValueError(f"k must have at least one page of one token, {order}; got {tuple(k.shape)}")
    if k.dtype == v.dtype == backends.E4M3:
        check_dtype("q", q)
        check_same_device("k", k, q)
        check_same_device("v", v, q)
    else:
        check_alike(q, k, v, cast="cast q with .to({1})")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "attention_decode gives no gradients, and q, k or v requires one; use sparse_flash.attention, or call it under "
            "torch.no_grad()"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in all but head_dim; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in head_dim; got {tuple(q.shape)} and {tuple(k.shape)}, k of {order}")
    _check_groups(q.shape[1], k.shape[1])
    if block_table is None and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must agree in batch; got {tuple(q.shape)} and {tuple(k.shape)}; pages need a block_table")
    if q.shape[2] > MAX_QUERIES:
        raise ValueError(
            f"attention_decode takes up to {MAX_QUERIES} queries of a sequence; got {q.shape[2]}; use sparse_flash.attention for "
            "more"
        )


def checked_cache_scales(
    q: torch.Tensor, k: torch.Tensor, k_scale: object, v_scale: object, block_table: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(k_scale, v_scale) of ``attention_decode`` as back ends take them: see ``backends``."""
    first, tokens = ("batch", "capacity") if block_table is None else ("pages", "page_size")
    shape = f"({first}, kv_heads)"
    if k.dtype != backends.E4M3:
        if k_scale is None and v_scale is None:
            return None, None
        raise ValueError(f"k_scale and v_scale belong to a cache of torch.float8_e4m3fn; got k of {k.dtype}; leave them out")
    found: list[torch.Tensor] = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        one = _checked_scale_of(name, scale, k, q, "an e4m3 cache", shape, f"{shape[:-1]}, {tokens})")
        found.append(one[..., None] if one.dim() == 2 else one)
    found = torch.broadcast_tensors(*found)
    if found[0].stride() != found[1].stride() or found[0].stride(2) != 1:
        found = [scale.contiguous() for scale in found]
    return found[0].expand(k.shape[:3]), found[1].expand(k.shape[:3])


def checked_cache_lengths(
    q: torch.Tensor, page_size: int, kv_lens: torch.Tensor | None, block_table: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(kv_lens, block_table) of ``attention_decode``, both in int32."""
    batch = q.shape[0]
    if kv_lens is not None:
        kv_lens = _integers("kv_lens", kv_lens, q)
        if tuple(kv_lens.shape) != (batch,):
            raise ValueError(f"kv_lens must have shape ({batch},), a length for each sequence; got {tuple(kv_lens.shape)}")
        kv_lens = int32_lengths("kv_lens", kv_lens)
    if block_table is not None:
        block_table = _integers("block_table", block_table, q).to(torch.int32)
        if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.shape[1] == 0:
            raise ValueError(f"block_table must have shape ({batch}, pages of a sequence); got {tuple(block_table.shape)}")
        if page_size & (page_size - 1):
            raise ValueError(f"page_size, the third dimension of k, must be a power of two; got {page_size}")
    return kv_lens, block_table


def _integers(name: str, tensor: object, q: torch.Tensor) -> torch.Tensor:
    way_out = f"{name}.to(torch.int32)" if isinstance(tensor, torch.Tensor) else f"torch.tensor({name}, dtype=torch.int32)"
    way_out = f"use {way_out}.to({str(q.device)!r})"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be an int32 or int64 tensor on {q.device}; got {type(tensor).__name__}; {way_out}")
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.device != q.device:
        raise ValueError(f"{name} must be int32 or int64 on {q.device}; got {tensor.dtype} on {tensor.device}; {way_out}")
    return tensor


def check_decoding_mask(mask: BlockMask, capacity: int, q: torch.Tensor) -> None:
    """Raises ValueError where a mask was not made for a cache of this capacity."""
    if mask.q_len != mask.kv_len or mask.q_len < capacity:
        raise ValueError(
            f"a mask for decoding must be square and cover the cache's capacity of {capacity} tokens; got q_len={mask.q_len}, "
            f"kv_len={mask.kv_len}; compile it for {capacity}, or pass the pattern itself"
        )
    _check_mask_fits(mask, q)


def check_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Checks as ``check_tensors`` does, for ``attention_varlen``, whose tensors have no batch dimension. head_dim must not be 0;
    other sizes may."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have shape (tokens of all documents, heads, head_dim); got {tuple(tensor.shape)}")
        if tensor.shape[2] == 0:
            raise ValueError(f"{name} must have a head_dim of at least 1; got shape {tuple(tensor.shape)}")
    check_alike(q, k, v)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must agree in tokens and heads; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must agree in head_dim, the last dimension; got {tuple(q.shape)} and {tuple(k.shape)}")
    _check_groups(q.shape[1], k.shape[1])


def documents_of(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int | None) -> Side:
    """The packed documents of x, (tokens, heads, head_dim). Raises as ``checked_documents`` does."""
    longest = checked_documents(name, x, cu_seqlens, longest)
    return Side(cu_seqlens.contiguous(), len(x), longest)


def checked_documents(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int | None) -> int:
    """The length that no document of x, (tokens, heads, head_dim), exceeds. Raises ValueError or TypeError where cu_seqlens,
    checked as far as the host can see, or ``longest`` does not fit x. name: what errors call x."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(
            f"cu_seqlens_{name} must be a tensor on {x.device}; got {type(cu_seqlens).__name__}; "
            f"use torch.tensor(..., dtype=torch.int32, device={str(x.device)!r})"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens_{name} must be int32 or int64 of shape (documents + 1,), at least one document; "
            f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens_{name} is on {cu_seqlens.device} and {name} on {x.device}; use .to({str(x.device)!r})")
    tokens = len(x)
    longest = tokens if longest is None else min(_count(f"max_seqlen_{name}", longest), tokens)
    if x.device.type == "cpu" and not is_recorded(x.device):
        _check_bounds(name, cu_seqlens.tolist(), tokens, longest)
    return longest


def _count(name: str, value: object) -> int:
    """A number of tokens, of any host integer type."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"{name} must be a number of tokens on the host, an int of at least 0; got {value!r}")
    return value if isinstance(value, int) else int(value)


def _check_bounds(name: str, bounds: list[int], tokens: int, longest: int) -> None:
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[0] != 0 or min(lengths) < 0 or bounds[-1] > tokens:
        raise ValueError(
            f"cu_seqlens_{name} must start with 0, not decrease, and end with at most the {tokens} tokens of {name}; "
            f"got {bounds if len(bounds) < 6 else f'{bounds[:4]} ... {bounds[-1]}'}"
        )
    if max(lengths) > longest:
        raise ValueError(f"a document of {name} has {max(lengths)} tokens, more than max_seqlen_{name}={longest}")


def _check_selection(selection: BlockSelection, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError where a selection was not made for these queries and keys."""
    if (selection.q_len, selection.kv_len) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the selection is of q_len={selection.q_len}, kv_len={selection.kv_len}; q and k have {q.shape[2]} and {k.shape[2]} "
            "tokens; pass q_len= and kv_len= to BlockSelection.from_picks, or choose again for these"
        )
    check_selected_heads(selection, q, k)


def check_selected_heads(selection: BlockSelection, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ValueError where a selection is of another device, batch or number of heads than these queries and keys."""
    if selection.device != q.device:
        raise ValueError(f"the selection is on {selection.device} and q on {q.device}; use selection.to({str(q.device)!r})")
    if selection.batch != q.shape[0] or selection.heads not in (k.shape[1], q.shape[1]):
        raise ValueError(
            f"picks must be of batch {q.shape[0]} and of {k.shape[1]} key heads or {q.shape[1]} query heads; got "
            f"{tuple(selection.picks.shape)}"
        )


def checked_choice(keep: object, every: object, block_size: object, score: str) -> tuple[int, int, int]:
    """(keep, every, block_size). Raises TypeError or ValueError for arguments of ``topk_blocks`` by which no query can choose."""
    keep, every, block_size = checked_keep(keep), checked_sharing(every), checked_selection_block(block_size)
    if isinstance(keep, float):
        raise TypeError(f"keep of a selection must be an int, how many blocks; got {keep}, a share; pass every=None for shares")
    if score not in (*SCORES, COMPRESSED):
        names = ", ".join(map(repr, (*SCORES, COMPRESSED)))
        raise ValueError(f"score must be one of {names}; got {score!r}; pass scores= for others")
    return keep, every, block_size


def checked_compression(
    compression: object, k: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, block_size: int, kv_len: int
) -> tuple[int, int]:
    """(length, stride) of compressed keys. Raises TypeError or ValueError for what does not fit k or the block size."""
    if compression is None:
        compression = block_size, block_size
    if not (isinstance(compression, tuple) and len(compression) == 2 and all(type(number) is int for number in compression)):
        raise TypeError(
            "compression must be two ints, tokens of a compressed key and tokens from one to the next; got "
            f"{compression!r}; pass compression=(32, 16) for NSA's"
        )
    length, stride = compression
    if not (stride > 0 and length > 0 and length % stride == 0 and block_size % stride == 0):
        raise ValueError(f"compression=(length, stride): stride must divide length and blocks of {block_size}; got {compression}")
    check_counts(kv_len=kv_len)
    count = max(0, (kv_len - length) // stride + 1)
    if k.shape[2] != count:
        raise ValueError(
            f"{kv_len} tokens have {count} compressed keys of {length} tokens, {stride} from one to the next; got k of "
            f"{k.shape[2]}, shape {tuple(k.shape)}; pass kv_len= and compression= that fit"
        )
    if lse is not None and not (isinstance(lse, torch.Tensor) and lse.is_floating_point() and lse.device == q.device):
        found = f"{lse.dtype} on {lse.device}" if isinstance(lse, torch.Tensor) else type(lse).__name__
        raise TypeError(f"lse must be a floating-point tensor on {q.device}; got {found}")
    if lse is not None and lse.shape != q.shape[:3]:
        raise ValueError(f"lse must have shape {tuple(q.shape[:3])}, (batch, heads, q_len); got {tuple(lse.shape)}")
    return length, stride


def checked_keep(keep: object) -> int | float:
    """``keep`` of ``topk_blocks``. Raises TypeError or ValueError for what is neither a number of blocks nor a share."""
    if isinstance(keep, bool) or not isinstance(keep, (int, np.integer, float)):
        raise TypeError(f"keep must be an int, blocks a row, or a float, a share of them; got {type(keep).__name__}")
    if isinstance(keep, float) and not 0 < keep <= 1:
        raise ValueError(f"keep as a share must be in (0, 1]; got {keep}; pass an int for a number of blocks")
    if not isinstance(keep, float) and keep < 1:
        raise ValueError(f"keep must be at least one block a row; got {keep}")
    return keep if isinstance(keep, float) else int(keep)
