"""The rule by which a back end is right, and the oracle behind it: a few lines of dense float64 attention.

A back end passes when its error is at most twice the error of PyTorch's own attention in the same dtype on the same
inputs, plus rounding, for out, lse, dq, dk and dv.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from accepted import DEVICE, fitted
from hypothesis import currently_in_test_context, reject
from strategies import dense
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparse_flash as sf
from sparse_flash.core import backends, description
from sparse_flash.core.call import AttentionCall
from sparse_flash.kernels.common.layout import empty_out
from sparse_flash.masks import document_blocks, table
from sparse_flash.masks import fine as fine_blocks
from sparse_flash.masks import tall as tall_rows
from sparse_flash.masks.pattern import PerBatch, PerHead

BACKENDS = ("torch", "triton", "hopper", "reference")
LAYOUTS = ("heads first", "tokens first", "sliced", "head_dim first")
NAMES = ("out", "lse", "dq", "dk", "dv")

SPEC = "causal & (local(20) | sinks(3))"

Results = tuple[torch.Tensor, ...]
SEED = 5  # of what a call drops
ALL, OUT, LSE = (0, 1), (0,), (1,)  # the results of a call that are differentiated

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
def tiles(short: bool = False, tall: bool = False, by_document: bool = False, fine: bool = False, together: bool = False):
    """Within it, kernels run as in short calls or as in long ones: the portable backward pass in one launch or in two, Hopper's
    forward pass in tiles of 64 queries or of 128. tall, by_document, fine, together: Hopper's tiles are of 192 queries, or start
    where documents start, or are blocks of 64, or are of all query heads that share a key head, wherever a mask may have these."""
    from sparse_flash.kernels.hopper import configs as hopper
    from sparse_flash.kernels.hopper import division
    from sparse_flash.kernels.portable import configs as portable

    never, limit = 1 << 30, 1 << 30 if short else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "ONE_LAUNCH_TOKENS", limit)
        patch.setattr(hopper, "SHORT_TILES", dict.fromkeys(hopper.SHORT_TILES, limit))
        patch.setattr(hopper, "TALL_TILE_TIME", 0 if tall else never)
        patch.setattr(tall_rows, "_MOST_TIME", never)
        for derive, wanted in ((document_blocks, by_document), (fine_blocks, fine)):
            patch.setattr(derive, "_LEAST_GAIN", 0 if wanted else never)  # read at a mask's first use
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


class Watching(TorchDispatchMode):
    """Within it, a function is called with each operation, its arguments and the tensors that it returns."""

    def __init__(self, see: Callable):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.see(function, args, [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result


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
    return torch.from_numpy(dense(pattern, q_len, kv_len).copy())


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


def gradients(attend, inputs, dout, dlse, learned=()):
    """[out, lse, dq, dk, dv] of a function of q, k and v, and the gradients of what else it learned; dlse None: lse is not
    differentiated."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = attend(*leaves)
    outputs, cotangents = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    grads = torch.autograd.grad(outputs, [*leaves, *learned], [c.to(o.dtype) for o, c in zip(outputs, cotangents, strict=True)])
    return [t.detach() for t in (out, lse, *grads)]


@dataclass(frozen=True)
class Sizes:
    """Of a call. backend: "auto", or the name of a back end, where the call takes one. layout: see ``tensor``; "mixed": by the
    seed, one for each of q, k, v and the incoming gradient. The rest matters to some calls. spec: of the mask, a Pattern or text.
    block_size: of a table. terms: names of ``calls.every_term``. score_shift, score_rise: see ``shifted`` and ``rising``. lens,
    k_lens: tokens of each document, or of each sequence in a cache. queries: of a decoding call. page: tokens of a page."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 70
    kv_len: int = 70
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "heads first"
    backend: str = "auto"
    seed: int = 0
    spec: sf.Pattern | str | None = SPEC
    block_size: int = 64
    terms: tuple[str, ...] = ("kv_lens", "softcap", "alibi", "bias", "sinks")
    scale: float | None = None
    deterministic: bool | None = None
    score_shift: float = 0.0
    score_rise: float = 0.0
    lens: tuple[int, ...] | None = None
    k_lens: tuple[int, ...] | None = None
    queries: int = 3
    page: int | None = None

    def options(self) -> dict:
        return {"scale": self.scale, "backend": self.backend, "return_lse": True}


def is_interpreted(backend: str) -> bool:
    return backend == "triton" and DEVICE == "cpu"


def sizes_for(backend: str, **given) -> Sizes:
    """The usual sizes with changes, in the dtype, head dimensions and blocks that the back end accepts. Skips without it."""
    if backend != "auto" and (reason := backends.get_backend(backend).why_unavailable()):
        pytest.skip(f"{backend}: {reason}")
    asked = {name: given[name] for name in ("dtype", "head_dim", "v_head_dim", "block_size") if name in given}
    usual = {"dtype": torch.float32, "head_dim": 16, "block_size": 32}
    usual = {name: value for name, value in usual.items() if name not in asked}
    asked |= fitted("torch" if backend == "auto" else backend, usual, **asked)
    # Triton's interpreter takes a second where others take a millisecond.
    few = {"heads": 2, "kv_heads": 1, "q_len": 40, "kv_len": 40} if is_interpreted(backend) else {}
    return replace(Sizes(backend=backend), **{"v_head_dim": asked["head_dim"]} | few | given | asked)


@contextmanager
def unless_refused():
    """Drops an example that the back end refuses; skips a test of one call, with the back end's reason."""
    try:
        yield
    except ValueError as error:
        if "cannot run this call" not in str(error):
            raise
        if currently_in_test_context():
            reject()
        pytest.skip(str(error))


def inputs_of(sizes: Sizes) -> list[torch.Tensor]:
    """q, k, v and the incoming gradient of out."""
    generator, mixed = torch.Generator().manual_seed(sizes.seed), random.Random(sizes.seed).choices(LAYOUTS, k=4)
    queries, keys = (sizes.batch, sizes.heads, sizes.q_len), (sizes.batch, sizes.kv_heads, sizes.kv_len)
    shapes = (*queries, sizes.head_dim), (*keys, sizes.head_dim), (*keys, sizes.v_head_dim), (*queries, sizes.v_head_dim)
    layouts = mixed if sizes.layout == "mixed" else [sizes.layout] * 4
    made = [tensor(*each, dtype=sizes.dtype, generator=generator) for each in zip(shapes, layouts, strict=True)]
    shifted(*made[:2], sizes.scale, sizes.score_shift)
    if sizes.score_rise:
        rising(*made[:2], sizes.scale, sizes.score_rise)
    return made


def normal(sizes: Sizes) -> list[torch.Tensor]:
    """q, k and v."""
    return inputs_of(sizes)[:3]


def record(q, k, v, table, scale: float, variant=None, deterministic: bool = False) -> AttentionCall:
    """What a back end gets of a call."""
    return AttentionCall(q, k, v, table, table, scale, deterministic, "auto", variant)


def make_call(q, k, mask=None, *, v=None, **options) -> description.Call:
    """What ``attention`` would ask a back end about this call. v: like k by default."""
    block_size = None if mask is None or mask.keeps_all else mask.block_size
    return description.Call.from_tensors(q, k, k if v is None else v, block_size, **options)


def kept_by(spec: sf.Pattern | str | None, q_len: int, kv_len: int) -> torch.Tensor:
    """(q_len, kv_len) bool; (heads, q_len, kv_len) for a mask of each head, (batch, 1, q_len, kv_len) of each sequence."""
    if not q_len or not kv_len:
        return torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE)
    pattern = sf.parse(spec) if isinstance(spec, str) else spec
    if isinstance(pattern, PerHead | PerBatch):
        each = torch.stack([kept_by(one, q_len, kv_len) for one in pattern.patterns])
        return each if isinstance(pattern, PerHead) else each[:, None]
    return kept_pairs(pattern, None, q_len, kv_len).to(DEVICE)


def table_of(sizes: Sizes) -> sf.BlockMask:
    """The compiled mask, without the one in blocks of 128 that GPUs would take in its place: they would never see small blocks."""
    spec = sf.full() if sizes.spec is None else sizes.spec
    return replace(sf.compile_mask(spec, sizes.q_len, sizes.kv_len, sizes.block_size, device=DEVICE), coarse=None)


def check(backend: str, mask, q_len: int, kv_len: int | None = None, *, lse_gradient: bool = True, **given) -> None:
    """Asserts that a back end is right, by the rule above. mask: a Pattern, its text, a BlockMask, or None for dense attention.
    lse_gradient: lse is differentiated too. given: other fields of ``Sizes``; one batch entry and two heads by default."""
    table = mask.to(DEVICE) if isinstance(mask, sf.BlockMask) else None
    of_table = {} if table is None else {"block_size": table.block_size}
    given = {"batch": 1, "heads": 2, "kv_heads": given.get("heads", 2), "layout": "heads first", **of_table} | given
    given = {name: value for name, value in given.items() if value is not None}
    sizes = sizes_for(backend, q_len=q_len, kv_len=kv_len or q_len, spec=None if table else mask, **given)
    kept = kept_by(sizes.spec, q_len, sizes.kv_len) if table is None else kept_pairs(None, table, q_len, sizes.kv_len).to(DEVICE)
    table = table_of(sizes) if table is None and mask is not None else table
    *inputs, dout = inputs_of(sizes)

    def run(*tensors):
        return sf.attention(*tensors, table, deterministic=sizes.deterministic, **sizes.options())

    some = ALL if lse_gradient else OUT
    call = Call(tuple(inputs), run, lambda *t: dense_attention(*t, kept, sizes.scale), differentiated=some, dout=dout)
    with unless_refused():
        assert_right(call, backend, keeps_order=True)


@dataclass(frozen=True)
class Call:
    """inputs: the tensors that the call differentiates. others: those that it only reads, such as lengths. run: from both to
    (out,) or (out, lse). define: the same from inputs in float64. differentiable: whether run gives gradients. hidden: bool for
    each of inputs and others, broadcastable to it: the numbers that no result depends on, such as padding; None: there are none.
    spoiled_queries: bool, of hidden queries whose incoming gradients are NaN too. differentiated: which results are; the
    first where these are none. dout: the incoming gradient of out, in its memory order; waves by default."""

    inputs: Results
    run: Callable[..., Results]
    define: Callable[..., Results]
    others: Results = ()
    differentiable: bool = True
    hidden: tuple[torch.Tensor | None, ...] = ()
    spoiled_queries: torch.Tensor | None = None
    differentiated: tuple[int, ...] = ALL
    dout: torch.Tensor | None = None

    def __call__(self) -> Results:
        return self.run(*self.inputs, *self.others)

    def spoiled(self) -> Call:
        """The call with NaN in its hidden numbers; -1 where these are integers."""
        hidden = (*self.hidden, *[None] * (len(self.inputs) + len(self.others) - len(self.hidden)))
        made = [t if which is None else spoil(t, which) for t, which in zip((*self.inputs, *self.others), hidden, strict=True)]
        inputs, others = tuple(made[: len(self.inputs)]), tuple(made[len(self.inputs) :])
        return replace(self, inputs=inputs, others=others, spoiled_queries=hidden[0])

    def cotangents(self, results: Results) -> list[torch.Tensor]:
        """Incoming gradients of results, the same at each call."""
        waves = [torch.arange(t.numel(), device=t.device).mul(1.7).sin().view(t.shape).to(t.dtype) for t in results]
        waves[0] = waves[0] if self.dout is None else self.dout.to(waves[0])
        queries = self.spoiled_queries
        return waves if queries is None else [spoil(w, queries if w.dim() == 4 else queries[..., 0]) for w in waves]

    def outcome(self, run=None) -> list[torch.Tensor]:
        """Results, and the gradients of all inputs where the call has gradients."""
        leaves = [t.detach().requires_grad_(self.differentiable) for t in self.inputs]
        torch.manual_seed(SEED)
        results = (run or self.run)(*leaves, *self.others)
        if not self.differentiable:
            return list(results)
        finite = [t.masked_fill(t.isneginf(), 0.0) for t in results]
        some = [number for number in self.differentiated if number < len(finite)] or [0]
        outputs, given = ([of[number] for number in some] for of in (finite, self.cotangents(finite)))
        return [*(t.detach() for t in results), *torch.autograd.grad(outputs, leaves, given, materialize_grads=True)]

    def defined(self, dtype: torch.dtype | None = torch.float64) -> list[torch.Tensor]:
        """The outcome by definition; in another dtype, or None for that of the inputs, as PyTorch's operations compute it."""
        inputs = tuple(t.to(dtype or t.dtype) for t in self.inputs)
        return replace(self, inputs=inputs, others=(), hidden=()).outcome(self.define)


def spoil(t: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A copy in the same memory order, with NaN where it is hidden; -1 for integers."""
    spoiled = (t.float() if t.element_size() == 1 else t).masked_fill(hidden, float("nan") if t.is_floating_point() else -1)
    return t.new_empty_strided(t.shape, t.stride()).copy_(spoiled)


def errors_of(call: Call, backend: str, keeps_order: bool = False) -> list[tuple[float, float]]:
    """(error, error allowed), largest absolute differences, of results and gradients compared with the definition: at most twice
    the error of PyTorch's operations in the same dtype on the same inputs, plus rounding. Asserts dtypes, shapes, and that nothing
    is NaN. What is hidden is NaN. keeps_order: out lies in memory as q does."""
    wanted, theirs, ours = call.defined(), call.defined(None), call.spoiled().outcome()
    results, dtype = len(ours) - len(call.inputs) * call.differentiable, call.inputs[0].dtype
    largest = max([1.0, *(_largest(t) for t in (*call.inputs, *wanted[:results]))])
    exponent, errors = _largest(wanted[1]) if results > 1 else 0.0, []
    assert ours[0].dtype == dtype and all(t.dtype in (dtype, torch.float32) for t in ours[1:results])
    if keeps_order:
        stride = empty_out(call.inputs[0], ours[0].shape[3], "meta").stride()
        assert all(a == b for a, b, size in zip(ours[0].stride(), stride, ours[0].shape, strict=True) if size > 1)
    for number, (mine, of_pytorch, right) in enumerate(zip(ours, theirs, wanted, strict=True)):
        assert mine.shape == right.shape
        error, allowed = compare(mine, of_pytorch, right, exponent, largest**3 if number >= results else 0.0)
        if number >= results and mine.dtype != dtype:
            # A gradient of all queries of a head has the rounding of each of them.
            allowed += torch.finfo(dtype).eps * float(wanted[0].abs().sum())
        if number == 1 < results and backend in ("torch", "auto") and mine.device.type == "cpu" and dtype.itemsize == 2:
            allowed += torch.finfo(dtype).eps / 8  # exponentials of PyTorch's kernel are rougher in 16 bits
        errors.append((error, allowed))
    if results > 1 and ours[1].dim() == 3:
        empty = wanted[1].isneginf()
        assert not ours[0][empty].any()
        assert not call.differentiable or not ours[2][empty].any(), "a query that keeps nothing has a gradient"
    compared[backend] += 1
    return errors


def assert_right(call: Call, backend: str, keeps_order: bool = False) -> None:
    """See ``errors_of``."""
    for number, (error, allowed) in enumerate(errors_of(call, backend, keeps_order)):
        assert error <= allowed, f"{number} of the outcome is off by {error:.3g}; {allowed:.3g} is allowed"


def _largest(t: torch.Tensor) -> float:
    return float(t.detach().nan_to_num(neginf=0.0).abs().max()) if t.numel() else 0.0


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
