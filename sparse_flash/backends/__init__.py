"""Back ends: each computes attention under a mask, forward and backward, behind one small interface.

A back end is a module of this package with five functions:

    supports(call) -> str | None          why it cannot run this call, or None if it can
    why_unavailable() -> str | None       why it cannot run anything on this machine, or None
    forward(call) -> (out, lse)
    backward(call, dout, dlse, out, lse) -> (dq, dk, dv)
    decode(q, k, v, mask, kv_lens, block_table, causal, scale, k_scale, v_scale, kv_starts) -> (out, lse)

call: a ``dispatch.call.AttentionCall`` whose table is a BlockMask, or None for dense attention. kv_heads divides heads; v may have
its own head_dim. out: (batch, heads, q_len, v's head_dim), in q's memory order (``empty_out``). lse: (batch, heads, q_len) float32
(float64 for float64 inputs), natural logarithm, without dropout, -inf for queries that keep nothing, whose out is 0. dlse: like
lse, or None if nothing depends on lse. If variant.rel_bias is learned, its gradient follows as a fourth. Arguments are checked
before a back end sees them. ``supports`` and ``why_unavailable`` take a ``Call``, which describes one without its tensors.

decode: the queries are the last of each sequence; mask is square and covers the cache's capacity. kv_lens: (batch,) int32, the
number of existing keys of each sequence, or None for all. block_table: (batch, pages of a sequence) int32 into k and v of shape
(pages, kv_heads, page_size, head_dim), or None. causal: without a mask, no query sees a key later than its own. k_scale, v_scale:
if k and v are e4m3, what their tokens are multiplied by, float32 of the shape of k without head_dim, with the same strides: 1 for
tokens, or 0 if one scale serves all tokens of a head and page or batch entry; otherwise None. kv_starts: (batch,) int32 or None.
``attention_decode`` in ``decode.py`` documents the rest.

A back end that supports ``EIGHT_BITS``, which no other feature accompanies, has a sixth:

    forward_in_eight_bits(call) -> (out, lse)                 see ``variant.eight_bits``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from ..compat.pytorch import is_recorded
from ..kernels.common.layout import empty_out as empty_out
from ..variant.eight_bits import EIGHT_BITS
from ..variant.variant import LEARNED, ScoreFunction, Variant

# Fastest first: ``auto`` takes the first that supports the call. ``reference`` builds the whole attention matrix, so it only runs
# on request.
AUTOMATIC = ("hopper", "triton", "torch")
NAMES = (*AUTOMATIC, "reference")
E4M3 = torch.float8_e4m3fn  # of caches
_FLOAT32, _FLOAT64 = torch.float32, torch.float64  # here, as in functions ``torch`` is the back end


class QueryRows(NamedTuple):
    """Holds the inputs of a backward pass that belong to queries. dlse: None if nothing depends on lse."""

    q: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def zero_keyless_queries(x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """x, (batch, heads, q_len, ...), what results of queries receive, with zeros where a query keeps nothing: no input has part in
    its result, what a formula makes of that is often NaN, and 0 * NaN is no 0."""
    return x.masked_fill(lse.isneginf().view(*lse.shape, *[1] * (x.dim() - lse.dim())), 0.0)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of lse, and of PyTorch operations on x: float64 if x is, else float32."""
    return _FLOAT64 if x.dtype == _FLOAT64 else _FLOAT32


def lse_to_subtract(lse: torch.Tensor) -> torch.Tensor:
    """lse with +inf instead of -inf, so that weights without pairs are 0: exp(-inf - inf) is 0, while exp(-inf + inf) is NaN."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def merge_results(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over two sets of keys, from out and lse over each. lse and log are without the last dimension of out and more."""
    total = lse.logaddexp(log)
    base = total.masked_fill(total == float("-inf"), 0.0)
    return out * (lse - base).exp_()[..., None] + more * (log - base).exp_()[..., None], total


@dataclass(frozen=True)
class Call:
    """Describes a call, so that back ends can accept or refuse it without its tensors. Lengths are in tokens."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    block_size: int | None  # None: dense
    deterministic: bool = False
    features: tuple[str, ...] = ()  # ``Variant.features``, and ``EIGHT_BITS``
    score_mod: ScoreFunction | None = None
    v_head_dim: int = 0  # 0: head_dim, the one of q and k
    score_params: tuple[torch.dtype, ...] = ()
    softcap: float = 0.0  # 0: none
    e4m3: bool = False  # whether k and v are

    def __post_init__(self):
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_size: int | None,
        variant: Variant | None = None,
        deterministic: bool = False,
        precision: str | None = None,
    ) -> Call:
        """The call on these tensors."""
        return cls(
            device=q.device,
            dtype=q.dtype,
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            q_len=q.shape[2],
            kv_len=k.shape[2],
            head_dim=q.shape[3],
            block_size=block_size,
            deterministic=deterministic,
            features=(() if variant is None else variant.features) + (() if precision is None else (EIGHT_BITS,)),
            score_mod=None if variant is None else variant.score_mod,
            v_head_dim=v.shape[3],
            score_params=() if variant is None else tuple(t.dtype for t in variant.score_params),
            softcap=0.0 if variant is None else variant.softcap,
            e4m3=k.dtype == E4M3,
        )


def cache_capacity(k: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Tokens of a sequence that a cache of keys has room for.

    k: (batch, kv_heads, tokens, head_dim); with block_table, (batch, pages of a sequence): (pages, kv_heads, tokens of a page,
    head_dim).
    """
    return k.shape[2] if block_table is None else k.shape[2] * block_table.shape[1]


def dequantized(
    stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, read: Callable[..., torch.Tensor] = lambda x: x
) -> torch.Tensor:
    """Keys or values of a cache in this dtype. scale: of e4m3 ones, float32 of their shape without head_dim, or None. read: what
    takes some tokens of either; all by default."""
    if scale is None:
        return read(stored).to(dtype)
    exact = max(dtype, scale.dtype, key=lambda each: each.itemsize)
    return (read(stored).to(exact) * read(scale)[..., None].to(exact)).to(dtype)


def check_pages(pages: torch.Tensor, count: int, sequence: int) -> None:
    """Raises ValueError for pages to read of a sequence that are none of a cache's ``count``. Only on a CPU, as a GPU would have to
    be waited for."""
    if pages.device.type == "cpu" and ((pages < 0) | (pages >= count)).any():
        raise ValueError(
            f"block_table must name one of the {count} pages for each token of a sequence; sequence {sequence} has "
            f"{pages.min()} to {pages.max()}"
        )


def check_read_pages(pages: torch.Tensor, read: torch.Tensor, count: int) -> None:
    """``check_pages`` of each sequence, where operations are not only recorded. pages: (sequences, ...). read: like pages, bool; a
    page that is not read may be any number."""
    if pages.device.type == "cpu" and not is_recorded(pages.device):
        for sequence, (own, of_own) in enumerate(zip(pages, read, strict=True)):
            check_pages(own[of_own], count, sequence)


def get_backend(name: str) -> ModuleType:
    """The back end's module. Raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, NAMES))}; got {name!r}")
    return _MODULES[name]


def check_name(name: str) -> None:
    """Raises ValueError unless this is "auto" or the name of a back end."""
    if name != "auto":
        get_backend(name)


def feature_refusal(call: Call, carried: tuple[str, ...]) -> str | None:
    """The refusal of a back end that supports only these features."""
    features = [name for name in call.features if name not in (*carried, LEARNED)]
    return f"it does not support {' and '.join(features)}" if features else None


def eight_bits_refusal(call: Call) -> str | None:
    """The refusal of a call in e4m3 with other features."""
    features = [name for name in call.features if name != EIGHT_BITS]
    return f"in {EIGHT_BITS} it does not support {' and '.join(features)}" if features else None


_REFERENCE_CAN = "backend='reference' can, slowly and with the whole matrix in memory"


def choose_backend(name: str, call: Call, supports: Callable[[str, Call], str | None] | None = None) -> str:
    """The back end to run: ``name`` itself, or for "auto" the fastest that supports the call. Raises ValueError with the reasons if
    there is none; a named back end is never replaced by another. supports: (name, call) -> the refusal or None, where the call is
    more than ``Call`` says; the back ends' own by default."""
    refusal = supports or _refusal
    if name != "auto":
        get_backend(name)
        reason = refusal(name, call)
        if reason:
            way_out = "no other back end can either, so leave that out"
            if any(refusal(other, call) is None for other in AUTOMATIC):
                way_out = "pass backend='auto' to take one that can"
            elif refusal("reference", call) is None:
                way_out = _REFERENCE_CAN
            raise ValueError(f"backend {name!r} cannot run this call: {reason}; {way_out}")
        return name
    reasons = {}
    for candidate in AUTOMATIC:
        reasons[candidate] = refusal(candidate, call)
        if reasons[candidate] is None and candidate == "triton" and call.device.type != "cuda":
            # Its interpreter is thousands of times slower: for tests, which ask for it by name.
            reasons[candidate] = "it runs on a GPU"
        if reasons[candidate] is None:
            return candidate
    listed = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    hint = "" if refusal("reference", call) else f"; {_REFERENCE_CAN}"
    raise ValueError(f"no back end can run this call ({listed}){hint}")


def _refusal(name: str, call: Call) -> str | None:
    return get_backend(name).supports(call)


# Last, as back ends import names from here. Not on demand, as torch.compile cannot trace an import. None imports triton before it
# runs.
_MODULES = {name: import_module(f"{__name__}.{name}") for name in NAMES}
