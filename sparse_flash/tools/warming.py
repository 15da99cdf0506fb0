"""Compiles the kernels of training ahead of time, so no step waits for a compiler: every kernel of the calls that ``kinds`` lists.

A kernel is compiled for a dtype, head dimensions and a table block; for dense attention or a table; and on Hopper GPUs for
split rows and grouped heads. Other lengths, masks, batches and numbers of heads compile nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from .. import backends
from ..backends import triton as triton_backend
from ..masks.compiler import compile_mask

_TOKENS = 256
# The second is long enough for the tiles of long calls. In the third, some rows and columns are so heavy that they are split.
_MASKS = {  # (spec text, tokens)
    "even rows": ("causal & local(100)", _TOKENS),
    "long rows": ("causal", 16384),
    "heavy rows": ("local(128) | global_tokens(128)", 32768),
}


@dataclass(frozen=True)
class CallKind:
    """One kind of call. mask: a key of ``_MASKS``, or None for dense attention."""

    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    block_size: int
    mask: str | None
    grouped: bool
    deterministic: bool


@dataclass(frozen=True)
class Warmed:
    """kernels: the names of those compiled, or found compiled, for ``kinds`` kinds of calls. seconds: in total."""

    kinds: int
    kernels: tuple[str, ...]
    seconds: float


def kinds(
    head_dims: list[tuple[int, int]], dtypes: list[torch.dtype], block_size: int = 128, deterministic: bool = False
) -> list[CallKind]:
    """The calls of training: dense and sparse, with even, long and heavy rows, with grouped heads and without.

    head_dims: of q and k, and of v.
    """
    return [
        CallKind(dtype, head_dim, v_head_dim, block_size, mask, grouped, deterministic)
        for dtype in dtypes
        for head_dim, v_head_dim in head_dims
        for mask in (None, *_MASKS)
        for grouped in (False, True)
    ]


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU to compile for"
    return triton_backend.why_unavailable()


def warm(calls: list[CallKind], device: torch.device, backend: str = "auto", workers: int | None = None) -> Warmed:
    """Compiles the kernels of both passes of these calls, in parallel, into Triton's cache on disk.

    workers: kernels at a time; by default the number of cores, at most 8. Raises ValueError if a back end cannot run a call.
    """
    from ..kernels.launch.first_calls import compiling_ahead

    begin = time.perf_counter()
    with torch.cuda.device(device), compiling_ahead(device, workers) as asked:
        for call in calls:
            _launch(call, device, backend)
    return Warmed(len(calls), tuple(asked.names()), time.perf_counter() - begin)


def _launch(call: CallKind, device: torch.device, backend: str) -> None:
    """Runs both passes, on a thread that only compiles: the tensors need not fit the mask."""
    heads, kv_heads = 2, 1 if call.grouped else 2
    empty = partial(torch.empty, dtype=call.dtype, device=device)
    q = empty(1, heads, _TOKENS, call.head_dim)
    k, v = empty(1, kv_heads, _TOKENS, call.head_dim), empty(1, kv_heads, _TOKENS, call.v_head_dim)
    mask = None
    if call.mask is not None:
        mask = compile_mask(*_MASKS[call.mask], block_size=call.block_size, device=device)
    sample = backends.Call.from_tensors(q, k, v, None if mask is None else call.block_size, deterministic=call.deterministic)
    module = backends.get_backend(backends.choose_backend(backend, sample))
    module.forward(q, k, v, mask, 1.0, call.deterministic, None)
    out, lse = empty(1, heads, _TOKENS, call.v_head_dim), torch.empty(1, heads, _TOKENS, device=device)
    module.backward(torch.empty_like(out), None, q, k, v, out, lse, mask, 1.0, call.deterministic, None)
