"""The call: checks the arguments once and chooses the back end."""

from __future__ import annotations

import math

import torch

from .. import backends
from ..dispatch import observers, operators
from ..masks.block_mask import BlockMask, compiled_once, of_another_library
from ..masks.pattern import Pattern, text_of
from ..variant.definition import with_sinks
from ..variant.variant import ScoreFunction, check_deterministic, check_dtype, check_number, check_sinks, terms_of
from .keywords import shown_without_foreign, unexpected

DEFAULT_BLOCK_SIZE = operators.PATTERN_BLOCK_SIZE


@shown_without_foreign
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | Pattern | str | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    kv_lens: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    rel_bias: torch.Tensor | None = None,
    score_mod: ScoreFunction | None = None,
    score_params: tuple[torch.Tensor, ...] = (),
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    **foreign,
):
    """softmax(scale * q k^T, over the pairs that the mask keeps) v, at a cost proportional to what the mask keeps; with as much
    of what else is done to scores and weights as is asked for.

    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim); kv_heads divides heads (grouped-query attention).
    v: (batch, kv_heads, kv_len, v_head_dim), v_head_dim being head_dim or another. All of one dtype and device; any strides, of
    which an unbroken last dimension costs no copy.
    mask: a BlockMask; a Pattern or its spec text, compiled and cached for these lengths; a BlockMask of FlexAttention, read at its
    first use; None for dense attention. (Within torch.compile: spec text, and Patterns and BlockMasks made outside of the
    compiled function; PyTorch before 2.13 takes no Pattern there. One graph serves all lengths of text and of patterns that have
    some; it is compiled anew for each length of a pattern without text, and for each pair of lengths of BlockMasks.)
    scale: positive; 1 / sqrt(head_dim) by default.

    Which tokens exist (padded batches), each (batch,) int32 or int64 on q's device, read there without waiting for it:
    kv_lens, q_lens: tokens at or past these numbers do not exist. kv_starts, q_starts: nor do tokens before these numbers.
    A query that does not exist has out 0, lse -inf and no gradient; blocks that hold no existing token are not visited. Positions
    stay those of the padded lengths.

    What is done to scores, in this order after scale; a query has position i + kv_len - q_len, a key its own number:
    softcap: positive; score becomes softcap * tanh(score / softcap).
    alibi_slopes: (heads,) or (batch, heads): adds -slope * |q_pos - k_pos|. (arXiv:2108.12409.)
    rel_bias: (heads, 2 * max_distance + 1): adds rel_bias[head, d + max_distance], d being k_pos - q_pos held within
    -max_distance .. max_distance. Differentiable. (arXiv:1910.10683.)
    score_mod, score_params: your own ``ScoreFunction``, and the tensors that it reads, which get no gradient.
    sinks: (heads,), a logit for each head that joins each query's softmax and takes its share of weight; lse includes it.
    Differentiable. (arXiv:2309.17453; logits as in gpt-oss.)

    dropout_p: the share of softmax weights that are set to 0, the others being divided by 1 - dropout_p; lse is that without
    it. In [0, 1), rounded to a multiple of 2^-16: 2^-17 or less is no dropout, the most is 1 - 2^-16. Drawn from PyTorch's
    generator: torch.manual_seed repeats it, checkpointed activations and replayed CUDA graphs get theirs. The same seed drops
    the same pairs on every back end. (arXiv:2205.14135, Alg. 2 and 5.)

    return_lse: also return lse, (batch, heads, q_len) float32 (float64 for float64 inputs): the natural logarithm of each query's
    softmax sum.
    deterministic: bitwise repeatable gradients; None follows torch.are_deterministic_algorithms_enabled().
    backend: "auto", "hopper", "triton", "torch" or "reference". A named back end runs or raises; "auto" takes the fastest that
    supports the call, and never turns a sparse mask into a dense one.

    Returns out, (batch, heads, q_len, v_head_dim) in q's dtype and memory order, or (out, lse). Both are differentiable in q, k and
    v, once and in reverse mode; torch.func's transforms and forward mode raise NotImplementedError. A query that keeps nothing has
    out 0, lse -inf and no gradient; tensors may be empty, but for head_dim. Raises ValueError for arguments that do not fit
    together, TypeError for wrong types.
    Under autocast, q, k and v are cast as for scaled_dot_product_attention.

    Source: arXiv:2205.14135 (Alg. 5), arXiv:2307.08691.
    """
    if foreign:
        raise unexpected(attention, foreign)
    _check_types(q, k, v)
    check_deterministic(deterministic)
    q, k, v = autocast(q, k, v)
    if 0 in q.shape or 0 in k.shape:
        return _of_nothing(q, k, v, sinks, return_lse)
    if not (mask is None or isinstance(mask, (BlockMask, Pattern, str))):
        mask = of_another_library(mask)
    given, terms = mask, None
    has_terms = (
        dropout_p
        or softcap is not None
        or not isinstance(score_params, tuple)
        or score_params
        or not (kv_lens is q_lens is kv_starts is q_starts is alibi_slopes is rel_bias is score_mod is None)
    )
    is_pattern = mask is not None and not isinstance(mask, BlockMask)
    if has_terms or sinks is not None or is_pattern:  # what follows reads their shapes
        check_tensors(q, k, v)
    if has_terms:
        terms = terms_of(
            q,
            k,
            dropout_p=dropout_p,
            kv_lens=kv_lens,
            q_lens=q_lens,
            kv_starts=kv_starts,
            q_starts=q_starts,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            rel_bias=rel_bias,
            score_mod=score_mod,
            score_params=score_params,
        )
    if sinks is not None:
        check_sinks(sinks, q)
    if is_pattern:
        mask = _compiled(mask, q.shape[2], k.shape[2], q.device)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    walked = mask.walked(q.is_cuda) if isinstance(mask, BlockMask) else mask
    name = select_backend(q, k, v, mask, walked, terms, deterministic, backend)
    scale = checked_scale(scale, q.shape[3])
    watched = observers.looked_at()
    if watched:
        q, k, v = (t.view_as(t) for t in (q, k, v))
    out, lse = operators.attention(q, k, v, walked, scale, deterministic, name, terms)
    if watched:
        observers.saw(q, k, v, given, scale, out, lse, terms)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks, terms)
    return (out, lse) if return_lse else out


def _of_nothing(q, k, v, sinks, return_lse: bool):
    """The call where there are no queries or no keys at all, which no kernel need see; gradients are 0."""
    check_tensors(q, k, v, may_be_empty=True)
    nought = sum(t.flatten()[:0].sum() for t in (q, k, v))
    out = torch.zeros_like(backends.empty_out(q, v.shape[3])) + nought
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=lse_dtype) + nought.to(lse_dtype)
    if sinks is not None:
        check_sinks(sinks, q)
        out, lse = with_sinks(out, lse, sinks, None)
    return (out, lse) if return_lse else out


_TAKES_TEXT_ALONE = torch.__version__ < "2.13"  # a TorchVersion, which compares numbers
_MOST_SELECTED = 4096
_selected_backends: dict[tuple, str] = {}


def select_backend(q, k, v, mask, walked, terms, deterministic: bool, backend: str) -> str:
    """The back end of a call, of which all is checked; a plain call like one before takes no second look.

    mask: a BlockMask, spec text or None. walked: what of it the back end is given.
    """
    if isinstance(mask, str) or torch.compiler.is_compiling():
        # The operator chooses: what depends on a length here, compiled code is compiled anew for.
        check_tensors(q, k, v)
        if isinstance(mask, BlockMask):
            _check_mask(mask, q, k)
        if backend != "auto":
            backends.backend(backend)
        return backend
    key = None
    if terms is None:
        fits = None if mask is None else (mask.fits, walked is None or walked.block_size)
        shapes = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
        key = (*shapes, fits, deterministic, backend)
        if key in _selected_backends:
            return _selected_backends[key]
    check_tensors(q, k, v)
    if mask is not None:
        _check_mask(mask, q, k)
    block_size = None if walked is None else walked.block_size
    name = backends.choose(backend, backends.Call.of(q, k, v, block_size, terms, deterministic=deterministic))
    if key is not None:
        if len(_selected_backends) >= _MOST_SELECTED:
            _selected_backends.clear()
        _selected_backends[key] = name
    return name


def checked_scale(scale: float | None, head_dim: int) -> float | None:
    """The scale of a call; raises ValueError or TypeError for one that cannot be. Within torch.compile None stays None, as a
    head_dim may be symbolic there."""
    if scale is None:
        return None if torch.compiler.is_compiling() else head_dim**-0.5
    check_number("scale", scale)
    scale = float(scale)
    if not 0 < scale < math.inf:  # torch.compile traces no isfinite of a symbolic number
        raise ValueError(f"scale must be positive and finite; got {scale}; negate q for a negative scale")
    return scale


def _compiled(pattern: Pattern | str, q_len: int, kv_len: int, device: torch.device) -> BlockMask | str:
    """Its table for these lengths; where the operator is seen, the spec text of a pattern that has some."""
    if not operators.is_seen():
        return compiled_once(pattern, q_len, kv_len, DEFAULT_BLOCK_SIZE, device)
    if _TAKES_TEXT_ALONE and torch.compiler.is_compiling() and isinstance(pattern, Pattern):
        raise TypeError(
            f"torch.compile of PyTorch {torch.__version__} takes no Pattern objects; pass pattern.to_spec(), or a table"
        )
    # Not through as_block_mask, which torch.compile would trace into its dispatch.
    text = text_of(pattern)
    return compiled_once(pattern, q_len, kv_len, DEFAULT_BLOCK_SIZE, device) if text is None else text


def autocast(q, k, v):
    """q, k and v in the dtype that autocast asks for, as for scaled_dot_product_attention."""
    device_type = q.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # which raises for "meta"
        dtype = torch.get_autocast_dtype(device_type)
        return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v


def _check_types(q, k, v) -> None:
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor of shape (batch, heads, tokens, head_dim); got {type(value).__name__}")


def check_tensors(q, k, v, may_be_empty: bool = False) -> None:
    """Raises ValueError where q, k and v do not fit together. may_be_empty: but for head_dim."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (batch, heads, tokens, head_dim); got {tuple(tensor.shape)}")
        check_dtype(name, tensor)
        if tensor.dtype != q.dtype:
            raise ValueError(f"q, k and v must have one dtype; q is {q.dtype}, {name} is {tensor.dtype}; cast with .to({q.dtype})")
        if tensor.device != q.device:
            raise ValueError(f"q, k and v must be on one device; q is on {q.device}, {name} on {tensor.device}")
        if tensor.shape[3] == 0 or (0 in tensor.shape and not may_be_empty):
            raise ValueError(f"{name} must not be empty; got shape {tuple(tensor.shape)}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and tokens; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head_dim; got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"the number of key heads must divide that of query heads; got {q.shape[1]} query heads and {k.shape[1]} key heads"
        )


def _check_mask(mask: BlockMask, q, k) -> None:
    if (mask.q_len, mask.kv_len) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the mask was compiled for q_len={mask.q_len}, kv_len={mask.kv_len}; q and k have {q.shape[2]} and {k.shape[2]} "
            "tokens; compile it for these lengths, or pass the pattern itself"
        )
    check_mask_fits(mask, q)


def check_mask_fits(mask: BlockMask, q) -> None:
    """Raises ValueError where a mask is not for this device, batch or number of heads."""
    if mask.device != q.device:
        raise ValueError(f"the mask is on {mask.device} and q on {q.device}; use mask.to({str(q.device)!r})")
    for name, size, wanted in (("batch", mask.mask_index.shape[0], q.shape[0]), ("heads", mask.mask_index.shape[1], q.shape[1])):
        if size not in (1, wanted):
            raise ValueError(f"the mask has {name} {size}; q has {wanted}; it must be 1 or {wanted}")
