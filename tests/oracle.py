"""The rule by which a back end is right, and the oracle behind it: a few lines of dense float64 attention.

A back end passes when its error is at most twice the error of PyTorch's own attention in the same dtype on the same
inputs, plus rounding, for out, lse, dq, dk and dv.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accepted import DEVICE, USUAL, fitted
from hypothesis import currently_in_test_context, reject
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparse_flash as sf
from sparse_flash import backends
from sparse_flash.backends import aten_cpu
from sparse_flash.kernels.common.layout import empty_out
from sparse_flash.masks import document_blocks, table
from sparse_flash.masks import tall as tall_rows
from sparse_flash.masks.grid import BlockGrid

BACKENDS = ("torch", "triton", "hopper", "reference")
LAYOUTS = ("heads first", "tokens first", "sliced", "head_dim first")
NAMES = ("out", "lse", "dq", "dk", "dv")

# Number of each back end's results that were compared with the oracle. A run of all tests requires a minimum: conftest.py.
compared: Counter[str] = Counter()


def tensor(shape, layout="heads first", *, dtype=torch.float32, device=DEVICE, generator=None) -> torch.Tensor:
    """Normal numbers of shape (batch, heads, tokens, head_dim) in one of the memory orders of ``LAYOUTS``."""
    batch, heads, tokens, dim = shape

    def normal(*size):
        return torch.randn(size, generator=generator).to(device, dtype)

    match layout:
        case "heads first":
            return normal(*shape)
        case "tokens first":
            return normal(batch, tokens, heads, dim).transpose(1, 2)
        case "sliced":  # like q in one projection of q, k and v; no two strides fit together
            return normal(batch, tokens, heads, 3 * dim).transpose(1, 2)[..., dim : 2 * dim]
        case "head_dim first":
            return normal(batch, heads, dim, tokens).mT
    raise ValueError(f"layout must be one of {LAYOUTS}; got {layout!r}")


def shifted(q: torch.Tensor, k: torch.Tensor, scale: float | None, by: float) -> None:
    """Adds to q and k, in place, a constant that moves all scores by about ``by``."""
    step = (abs(by) / q.shape[3] / (q.shape[3] ** -0.5 if scale is None else scale)) ** 0.5
    q += step
    k += math.copysign(step, by)


def rising(q: torch.Tensor, k: torch.Tensor, scale: float | None, by: float) -> None:
    """Adds to q and k, in place, what makes scores rise with the key, by about ``by`` from the first to the last: for every
    sixteenth query three times as fast."""
    step = (by / q.shape[3] / (q.shape[3] ** -0.5 if scale is None else scale)) ** 0.5
    q += step
    q[:, :, ::16] *= 3
    k += step * torch.linspace(0, 1, k.shape[2], dtype=k.dtype, device=k.device)[:, None]


@contextmanager
def heavy_rows_split():
    """Masks compiled within split every row of more than two blocks, not only rows far heavier than the mean."""
    limits = {"_HEAVY_BLOCKS": 2, "_HEAVY_RATIO": 0, "_HEAVY_SHARE": 0, "_SPLIT_BLOCKS": 1, "_SPLIT_RATIO": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(table, name, limit)
        yield


@contextmanager
def tiles(short: bool = False, tall: bool = False, by_document: bool = False, together: bool = False):
    """Within it, kernels run as in short calls or as in long ones: the portable backward pass in one launch or in two, Hopper's
    forward pass in tiles of 64 queries or of 128. tall, by_document, together: Hopper's tiles are of 192 queries, or start where
    documents start, or are of all query heads that share a key head, wherever a mask may have such tiles."""
    from sparse_flash.kernels.hopper import configs as hopper
    from sparse_flash.kernels.hopper import division
    from sparse_flash.kernels.portable import configs as portable

    never, limit = 1 << 30, 1 << 30 if short else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "ONE_LAUNCH_TOKENS", limit)
        patch.setattr(hopper, "SHORT_TILES", dict.fromkeys(hopper.SHORT_TILES, limit))
        patch.setattr(hopper, "TALL_TILE_TIME", 0 if tall else never)
        patch.setattr(tall_rows, "_MOST_TIME", never)
        patch.setattr(document_blocks, "_LEAST_GAIN", 0 if by_document else never)  # read at a mask's first use
        if together:
            patch.setattr(division, "has_short_columns", lambda *sizes: True)
        yield


@contextmanager
def poisoned_memory():
    """Fills what torch.empty and its relatives return with NaN, so a value that is never written shows."""

    def poisoned(make):
        def filled(*args, **kwargs):
            tensor = make(*args, **kwargs)
            with torch.no_grad():
                return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return filled

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
    # Its first compilation lists PyTorch's functions: were they poisoned then, it would know the real ones no more.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.trace_rules.clear_lru_cache()


@contextmanager
def no_host_synchronization():
    """Within it, whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kept_pairs(pattern, mask, q_len: int, kv_len: int) -> torch.Tensor:
    """The mask by definition if there is a pattern, else from the table: bool, broadcastable to the scores."""
    if pattern is None and mask is None:
        return torch.ones(q_len, kv_len, dtype=torch.bool)
    if pattern is None:
        return mask.to_dense().cpu()
    grid = BlockGrid(q_len, kv_len, 16)
    q, kv = torch.arange(q_len).numpy() + grid.offset, torch.arange(kv_len).numpy()
    return torch.from_numpy(pattern.token_rule(q[:, None], kv[None, :]).copy()).expand(q_len, kv_len)


def existing(tokens: int, starts=None, lens=None) -> torch.Tensor:
    """Which tokens of each sequence exist: bool, (batch, tokens), or (1, tokens) without starts and lens, (batch,) integers."""
    token = torch.arange(tokens, device=DEVICE)[None]
    exist = torch.ones_like(token, dtype=torch.bool)
    exist = exist if starts is None else exist & (token >= starts[:, None])
    return exist if lens is None else exist & (token < lens[:, None])


def dense_attention(
    q, k, v, kept, scale=None, *, softcap=None, alibi_slopes=None, rel_bias=None, score_mod=None, score_params=(), sinks=None,
    dropout_p=0.0, survives=None, q_starts=None, q_lens=None, kv_starts=None, kv_lens=None,
):  # fmt: skip
    """(out, lse) of the oracle: the formulas of ``attention``'s docstring on whole matrices, differentiable, for inputs in float64.
    In 16 bits, scores are float32 and weights are rounded, as in PyTorch's attention.

    kept: bool, broadcastable to (batch, heads, q_len, kv_len). survives: the pairs that dropout keeps, of that shape. Queries that
    keep nothing give out 0 and lse -inf, or their sink; queries that do not exist give 0 and -inf.
    """
    (batch, heads, q_len, head_dim), kv_len = q.shape, k.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    q, k = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k))
    scores = (head_dim**-0.5 if scale is None else scale) * q @ k.mT
    q_pos, k_pos = torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len, torch.arange(kv_len, device=q.device)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().expand(batch, heads)[:, :, None, None] * (q_pos - k_pos).abs()
    if rel_bias is not None:
        reach = rel_bias.shape[1] // 2
        scores = scores + rel_bias[:, (k_pos - q_pos).clamp(-reach, reach) + reach]
    if score_mod is not None:
        places = torch.arange(batch, device=q.device)[:, None, None, None], torch.arange(heads, device=q.device)[:, None, None]
        scores = score_mod.torch(scores, *places, q_pos, k_pos, tuple(t.double() for t in score_params))
        kept = kept & ~scores.isneginf()
    queries, keys = existing(q_len, q_starts, q_lens)[:, None].to(q.device), existing(kv_len, kv_starts, kv_lens).to(q.device)
    kept = kept & keys[:, None, None] & queries[..., None]
    some = kept.any(-1)
    # Finite if a row keeps nothing, for the sake of gradients.
    scores = scores.masked_fill(~kept & some[..., None], float("-inf")).masked_fill(~kept & ~some[..., None], 0.0)
    lse = torch.where(some, scores.logsumexp(-1), float("-inf"))
    weights = torch.where(some[..., None], scores.softmax(-1), 0.0)
    if sinks is not None:
        sinks, finite = sinks.to(lse)[:, None].expand(batch, heads, q_len), torch.where(some, lse, 0.0)
        total = torch.where(some, torch.logaddexp(finite, sinks), sinks)
        weights = weights * torch.where(some, (finite - torch.where(some, total, 0.0)).exp(), 0.0)[..., None]
        lse = torch.where(queries, total, float("-inf"))
    if survives is not None:
        weights = torch.where(survives, weights / (1 - dropout_p), 0.0)
    return weights.to(v.dtype) @ v, lse


def pytorch_attention(q, k, v, kept, scale):
    """(out, lse) of PyTorch: scaled_dot_product_attention under the dense mask; lse, which it does not return, in float32
    (float64 for float64) from the same inputs."""
    group = q.shape[1] // k.shape[1]
    # On a GPU it refuses some memory orders, and contiguous() would keep odd strides of dimensions of size 1.
    q = q.clone(memory_format=torch.contiguous_format)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    some = kept.any(-1)
    allowed = (kept | ~some[..., None]).expand(q.shape[0], q.shape[1], -1, -1)
    # Its GPU kernels need head dims divisible by 8. For others it computes in float32, which no 16-bit kernel can match.
    padded = [F.pad(t, (0, -t.shape[3] % 8)) if t.is_cuda else t for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*padded, attn_mask=allowed, scale=scale)[..., : v.shape[3]]
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (scale * (q.to(exact) @ k.to(exact).mT)).masked_fill(~allowed, float("-inf"))
    return torch.where(some[..., None], out, 0.0), torch.where(some, scores.logsumexp(-1), float("-inf"))


def pytorch_lse(q, k, kept, scale):
    """The lse of PyTorch's CPU kernel, whose 16-bit exponentials are rougher than float32's."""
    some = kept.any(-1, keepdim=True)
    bias = torch.zeros(kept.shape, dtype=q.dtype).masked_fill(~kept & some, float("-inf")).expand(*q.shape[:2], -1, -1)
    _, lse = aten_cpu.forward(q, k, k, scale, bias=bias)
    return torch.where(some[..., 0], lse, float("-inf"))


def gradients(attend, inputs, dout, dlse, learned=()):
    """[out, lse, dq, dk, dv] of a function of q, k and v, and the gradients of what else it learned; dlse None: lse is not
    differentiated."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = attend(*leaves)
    outputs, cotangents = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    grads = torch.autograd.grad(outputs, [*leaves, *learned], [c.to(o.dtype) for o, c in zip(outputs, cotangents, strict=True)])
    return [t.detach() for t in (out, lse, *grads)]


def require(name: str, call: backends.Call, attempt: Callable[[], object] | None = None) -> None:
    """Ends a test of a back end that cannot run this call: skips it with the back end's own reason. In a property test, which a
    skip would end at its first such example, it only drops the example. attempt: makes the call, which must raise that reason."""
    reason = backends.get_backend(name).supports(call)
    if reason is None:
        return
    if attempt is not None:
        with pytest.raises(ValueError, match=re.escape(reason)):
            attempt()
    if currently_in_test_context():
        reject()
    pytest.skip(f"{name}: {reason}")


def make_call(q, k, mask=None, *, v=None, **options) -> backends.Call:
    """What ``attention`` would ask a back end about this call. v: like k by default."""
    block_size = None if mask is None or mask.keeps_all else mask.block_size
    return backends.Call.from_tensors(q, k, k if v is None else v, block_size, **options)


def check(
    backend: str,
    pattern,
    q_len: int,
    kv_len: int | None = None,
    *,
    block_size: int | None = None,
    dtype: torch.dtype | None = None,
    usual: dict | None = None,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    layout: str = "heads first",
    scale: float | None = None,
    lse_gradient: bool = True,
    device: str = DEVICE,
    seed: int = 0,
    score_shift: float = 0.0,
    score_rise: float = 0.0,
    **options,
) -> dict[str, tuple[float, float]]:
    """Asserts that a back end is right, by the rule above.

    pattern: a Pattern, its spec text, a BlockMask, or None for dense attention. layout: one of ``LAYOUTS``, of q, k, v and the
    incoming gradient. block_size, dtype, head_dim: by default those of ``usual`` and of ``accepted.USUAL``, or others if the back
    end does not accept these. v_head_dim: head_dim by default. lse_gradient: differentiate through lse too. score_shift,
    score_rise: see ``shifted`` and ``rising``. options: passed to ``sf.attention``.

    Returns for each of ``NAMES`` (the back end's error, the error allowed), largest absolute differences.
    """
    kv_len, kv_heads = q_len if kv_len is None else kv_len, heads if kv_heads is None else kv_heads
    mask = pattern if isinstance(pattern, sf.BlockMask) else None
    pattern = sf.parse(pattern) if isinstance(pattern, str) else None if mask is not None else pattern
    given = {"block_size": block_size, "dtype": dtype, "head_dim": head_dim, "v_head_dim": v_head_dim}
    given = {name: value for name, value in given.items() if value is not None}
    if pattern is None:
        given["block_size"] = None if mask is None or mask.keeps_all else mask.block_size
    usual = {name: value for name, value in {**USUAL, **(usual or {})}.items() if name not in given}
    given |= fitted(backend, usual, **given)
    block_size, dtype, head_dim = (given[name] for name in ("block_size", "dtype", "head_dim"))
    if pattern is not None:
        mask = replace(sf.compile_mask(pattern, q_len, kv_len, block_size), coarse=None)  # else a GPU never sees small blocks
    mask = mask if mask is None else mask.to(device)
    generator = torch.Generator().manual_seed(seed)
    queries, keys, of_values = (batch, heads, q_len), (batch, kv_heads, kv_len), v_head_dim or head_dim
    shapes = (*queries, head_dim), (*keys, head_dim), (*keys, of_values), (*queries, of_values)
    q, k, v, dout = (tensor(s, layout, dtype=dtype, device=device, generator=generator) for s in shapes)
    dlse = torch.randn(batch, heads, q_len, generator=generator).to(device) if lse_gradient else None
    require(backend, make_call(q, k, mask, v=v), lambda: sf.attention(q, k, v, mask, backend=backend))
    shifted(q, k, scale, score_shift)
    if score_rise:
        rising(q, k, scale, score_rise)

    kept = kept_pairs(pattern, mask, q_len, kv_len).to(device)
    errors = measure(backend, (q, k, v), dout, dlse, mask, kept, scale, **options)
    for name, (error, allowed) in errors.items():
        assert error <= allowed, f"{name} of {backend} is off by {error:.3g}; {allowed:.3g} is allowed"
    return errors


def measure(
    backend: str, inputs, dout, dlse, mask, kept, scale: float | None, attend=sf.attention, **options
) -> dict[str, tuple[float, float]]:
    """For each of ``NAMES`` (the back end's error, the error allowed) on q, k and v of ``inputs``. Asserts dtypes, shapes,
    memory order and that nothing is NaN.

    dout, dlse: the incoming gradients; dlse None: lse is not differentiated. mask: what the back end gets. kept: the mask by
    definition, bool, broadcastable to (batch, heads, q_len, kv_len). attend: called like ``sf.attention``. options: passed to it.
    """
    q, k = inputs[:2]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    exact = [t.double() for t in inputs]
    wanted = gradients(lambda *t: dense_attention(*t, kept, factor), exact, dout.double(), dlse)
    theirs = gradients(lambda *t: pytorch_attention(*t, kept, factor), inputs, dout, dlse)
    if any(t.isnan().any() for t in theirs):  # cuDNN, for one query whose scores are far below 0
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            theirs = gradients(lambda *t: pytorch_attention(*t, kept, factor), inputs, dout, dlse)
    if backend == "torch" and q.device.type == "cpu" and q.element_size() == 2:
        theirs[1] = pytorch_lse(q, k, kept, factor)
    ours = gradients(lambda *t: attend(*t, mask, scale=scale, return_lse=True, backend=backend, **options), inputs, dout, dlse)

    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    assert [t.dtype for t in ours] == [q.dtype, lse_dtype, q.dtype, q.dtype, q.dtype]
    assert [t.shape for t in ours] == [t.shape for t in wanted]
    assert ours[0].stride() == empty_out(q, ours[0].shape[3], "meta").stride(), "out does not keep q's memory order"
    # dQ and dK are sums of differences of such terms, which cancel if few keys are kept.
    values = exact[2].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    terms = factor * float((dout.double() @ values.mT).abs().max() * max(t.abs().max() for t in exact[:2]))
    # Each probability of the backward pass is the exponential of a score minus lse, which rounds to this many steps; PyTorch on a
    # CPU keeps those of the forward pass instead.
    exponent = float(wanted[1].masked_fill(wanted[1].isneginf(), 0.0).abs().max())
    errors = {
        name: compare(*results, exponent, terms if name in ("dq", "dk") else 0.0)
        for name, *results in zip(NAMES, ours, theirs, wanted, strict=True)
    }
    compared[backend] += 1
    return errors


def compare(ours, theirs, wanted, exponent: float, terms: float) -> tuple[float, float]:
    """(error, error allowed): the largest absolute difference from the oracle, and twice PyTorch's plus rounding. Rounding is that
    of the result and, in case PyTorch's happens to be exact, of the sums behind it, whose ``terms`` may cancel."""
    assert not ours.isnan().any(), "NaN"
    assert torch.equal(ours.isneginf(), wanted.isneginf()), "-inf in the wrong places"
    finite = ~wanted.isneginf()
    if not finite.any():
        return 0.0, 0.0
    error, peer = ((t[finite].double() - wanted[finite]).abs().max().item() for t in (ours, theirs))
    largest = wanted[finite].abs().max().item()
    sums = torch.promote_types(ours.dtype, torch.float32)
    step = torch.finfo(sums).eps * (8 if sums == torch.float64 else 1)  # in float64 the oracle rounds too
    rounding = 2 * torch.finfo(ours.dtype).eps * largest + step * ((32 + 2 * exponent) * max(largest, 1.0) + 8 * terms)
    return error, 2 * peer + rounding
