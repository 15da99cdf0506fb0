"""The calls of the ``block_sparse_attn`` package, computed here: a program that uses them changes one import.

    from sparse_flash.integrations.block_sparse_attn import block_sparse_attn_func

Argument names, order and defaults, layouts and the meaning of ``head_mask_type`` are that package's. Documents are packed one
after another, and each query head is dense, streaming or block-sparse. Blocks are of 128 queries and 128 keys, counted from the
first query and the first key of each document. ``is_causal`` aligns a document's last query with its last key, token by token.
Each call also takes ``backend``, as in ``sparse_flash.attention``.

Streaming heads keep the first and the last blocks of keys. With is_causal, the last ones of a block of queries end with the block
of keys that holds the position of its last query. A block of queries that the document's end cuts short counts as whole, so that
block of keys may lie past the document. Without is_causal, the last ones are the document's own, for all queries.

Differences: all calls have gradients, ``exact_streaming`` too, and take the head_dims, dtypes and devices of ``attention``. A
query that keeps nothing has out 0 and lse -inf. Tokens past the last document have out 0. Blocks of ``base_blockmask`` past a
document's end have no effect. ``S_dmask``, the matrix of weights with dropout's signs, is never formed: ``return_attn_probs``
returns None instead, and is refused with dropout.

Costs: ``cu_seqlens_q``, ``cu_seqlens_k``, ``head_mask_type`` and ``streaming_info`` are read on the host. A call waits for the
GPU unless they are on the CPU, where they may be. Neighbouring documents of equal lengths are one call of ``attention``;
documents of other lengths are one call each. With exact_streaming, streaming heads beside block-sparse ones take a call of their
own, and q, k and v are copied.

Source: https://github.com/mit-han-lab/Block-Sparse-Attention, commit 49d6c39e4dc0303442cda3bb758b3925d4399c49, BSD 3-Clause: its
README, block_sparse_attn_interface.py, and the reference of its tests. Drawn cases of both files of its correctness tests, without
dropout, passed with this module on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..api.arguments import check_types, refuse_probabilities
from ..api.attention import attention
from ..api.document_arguments import check_packed, resolve_longest
from ..masks.block_mask import BlockMask
from ..masks.cache import compile_cached
from ..masks.fields import Natural, Positive
from ..masks.memory import cached_until_cleared
from ..masks.methods import from_blocks
from ..masks.parsing import parse
from ..masks.pattern import Pattern, PerHead
from ..masks.rules import RunPattern

_BLOCK = 128


class _Head(NamedTuple):
    """The rule of a query head. map_number: it keeps the blocks of this map, counted from 0. streaming: it keeps so many first and
    last blocks or keys. Neither: it is dense."""

    map_number: int | None = None
    streaming: tuple[int, int] | None = None


def block_sparse_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    head_mask_type: torch.Tensor,
    streaming_info: torch.Tensor | None,
    base_blockmask: torch.Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    exact_streaming: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
):
    """Returns softmax(softmax_scale * q k^T) v over the pairs that each head keeps, within each document.

    q: (total_q, heads, head_dim). k, v: (total_k, kv_heads, head_dim); kv_heads divides heads.
    cu_seqlens_q, cu_seqlens_k: (documents + 1,) int32, the start of each document, and the end of the last.
    head_mask_type: (heads,) int32. 0: dense. Negative: streaming. 1: block-sparse; the first head of type 1 has map 0, the second
    one map 1, and so on. n > 1: block-sparse; the head shares map n - 1.
    streaming_info: (2 * heads,) int32, first and last of each head: how many first and last blocks of keys a streaming head keeps.
    With exact_streaming they count keys, and the last ones include the query's own. None without streaming heads.
    base_blockmask: (documents, heads of type 1, q_blocks, kv_blocks) bool or integer on q's device, nonzero where a block is kept;
    q_blocks and kv_blocks are max_seqlen_q_ and max_seqlen_k_ in blocks, rounded up. None without block-sparse heads.
    max_seqlen_q_, max_seqlen_k_: upper bounds on document lengths. exact_streaming: streaming heads count keys; needs is_causal.
    p_dropout, softmax_scale: as in ``attention``. deterministic: bitwise repeatable gradients; False follows
    torch.are_deterministic_algorithms_enabled().

    Returns out, (total_q, heads, head_dim), or with return_attn_probs (out, lse, None), lse of shape (documents, heads,
    max_seqlen_q_) float32, -inf past a document's end. Differentiable.
    Raises ValueError or TypeError for arguments that do not fit together, and whenever ``attention`` does.
    """
    check_types(q, k, v)
    check_packed(q, k, v)
    refuse_probabilities(p_dropout, return_attn_probs)
    if exact_streaming and not is_causal:
        raise ValueError("exact_streaming needs is_causal=True; got is_causal=False; pass True, or exact_streaming=False")
    starts = _read_starts("q", q, cu_seqlens_q, max_seqlen_q_)
    kv_starts = _read_starts("k", k, cu_seqlens_k, max_seqlen_k_)
    if len(starts) != len(kv_starts):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of as many documents; "
            f"got {len(starts) - 1} and {len(kv_starts) - 1}; give each document its queries and its keys"
        )
    heads = _read_heads(head_mask_type, streaming_info, q.shape[1])
    maps = _read_maps(base_blockmask, heads, (len(starts) - 1, _blocks(max_seqlen_q_), _blocks(max_seqlen_k_)), q.device)
    options: dict[str, Any] = {
        "scale": softmax_scale,
        "dropout_p": p_dropout,
        "return_lse": True,
        "deterministic": deterministic or None,
        "backend": backend,
    }

    def attend(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        taken = [_take_heads(x, [number * x.shape[1] // len(heads) for number in numbers]) for x in (q, k, v)]
        chosen = tuple(heads[number] for number in numbers)
        return _attend(taken, chosen, starts, kv_starts, maps, is_causal, exact_streaming, options)

    order = sorted(range(len(heads)), key=lambda number: heads[number].streaming is None)
    streaming = sum(head.streaming is not None for head in heads)
    if exact_streaming and streaming and maps is not None:  # a map of blocks cannot say which keys of a block a head keeps
        parts = zip(attend(order[:streaming]), attend(order[streaming:]), strict=True)
        out, lse = (_take_heads(torch.cat(part, 1), [order.index(number) for number in range(len(heads))]) for part in parts)
    else:
        out, lse = _attend([q, k, v], heads, starts, kv_starts, maps, is_causal, exact_streaming, options)
    return (out, F.pad(lse, (0, max_seqlen_q_ - lse.shape[2]), value=float("-inf")), None) if return_attn_probs else out


def block_streaming_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    head_mask_type: torch.Tensor,
    streaming_info: torch.Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
):
    """Calls ``block_sparse_attn_func`` for heads that are dense or keep the first and the last blocks; causal by default."""
    documents = cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_
    rest = p_dropout, deterministic, softmax_scale, is_causal, False, return_attn_probs
    return block_sparse_attn_func(q, k, v, *documents, *rest, backend=backend)


def token_streaming_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    head_mask_type: torch.Tensor,
    streaming_info: torch.Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
):
    """Calls ``block_sparse_attn_func`` for heads that are dense or keep the first and the last keys; always causal, no dropout."""
    documents = cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, None, max_seqlen_q_, max_seqlen_k_
    rest = 0.0, deterministic, softmax_scale, True, True, return_attn_probs
    return block_sparse_attn_func(q, k, v, *documents, *rest, backend=backend)


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK)


@dataclass(frozen=True)
class _Streaming(RunPattern):
    """The first ``sink`` units of keys, and ``local`` units that end with the one that holds the position of the last query of a
    query's own unit, or with the last of all.

    unit: tokens in one. lag: how many positions before position 0 a unit of queries starts. kv_units: how many units of keys there
    are, if the last of all ends them.
    """

    sink: Natural
    local: Natural
    unit: Positive
    lag: Natural = 0
    kv_units: Natural | None = None
    ordered_runs = True

    def row_runs(self, q):
        q = q[..., None]
        sunk = np.full_like(q, self.sink)
        stop = (q + self.lag) // self.unit + 1 if self.kv_units is None else np.full_like(q, self.kv_units)
        first, stop = np.concatenate([np.zeros_like(q), stop - self.local], -1), np.concatenate([sunk, stop], -1)
        return first * self.unit, stop * self.unit


def _attend(tensors: list[torch.Tensor], heads: tuple[_Head, ...], starts, kv_starts, maps, causal: bool, exact: bool, options):
    """Returns out, (total_q, heads, head_dim), and lse, (documents, heads, the longest of these)."""
    q, k, v = tensors
    lengths = [(b - a, d - c) for (a, b), (c, d) in zip(pairwise(starts), pairwise(kv_starts), strict=True)]
    longest = max(q_len for q_len, _ in lengths)
    outs, lses, first = [], [], 0
    for (q_len, kv_len), documents in groupby(lengths):
        stop = first + len(list(documents))
        tokens = (q, starts, q_len), (k, kv_starts, kv_len), (v, kv_starts, kv_len)
        q_rows, k_rows, v_rows = (x[at[first] : at[stop]].unflatten(0, (stop - first, n)).transpose(1, 2) for x, at, n in tokens)
        mask = None
        if heads and q_len and kv_len:
            mask = _build_mask(heads, None if maps is None else maps[first:stop], causal, exact, q_len, kv_len, q.device)
        out, lse = attention(q_rows, k_rows, v_rows, mask, **options)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        lses.append(F.pad(lse, (0, longest - q_len), value=float("-inf")))
        first = stop
    if starts[-1] < len(q):
        outs.append(outs[0].new_zeros(len(q) - starts[-1], *outs[0].shape[1:]))
    return torch.cat(outs) if len(outs) > 1 else outs[0], torch.cat(lses)


def _take_heads(x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """The heads of x, (n, heads, ...), with these numbers. An index would copy the numbers to the GPU."""
    return torch.stack([x[:, number] for number in numbers], 1)


@cached_until_cleared(maxsize=256)
def _build_pattern(heads: tuple[_Head, ...], causal: bool, exact: bool, q_len: int, kv_len: int) -> Pattern:
    """The pattern of all heads; block-sparse ones are dense in it."""
    dense = parse("causal" if causal else "full")
    if exact:
        unit = {"unit": 1}
    else:
        unit = {"unit": _BLOCK} | ({"lag": (q_len - kv_len) % _BLOCK} if causal else {"kv_units": _blocks(kv_len)})
    patterns = tuple(dense if head.streaming is None else dense & _Streaming(*head.streaming, **unit) for head in heads)
    return patterns[0] if len(set(patterns)) == 1 else PerHead(patterns)


def _build_mask(
    heads: tuple[_Head, ...],
    maps: torch.Tensor | None,
    causal: bool,
    exact: bool,
    q_len: int,
    kv_len: int,
    device: torch.device,
) -> BlockMask | Pattern:
    """The mask of documents of these lengths. maps: (documents, maps, q_blocks, kv_blocks) bool, of which heads may use none."""
    pattern = _build_pattern(heads, causal, exact, q_len, kv_len)
    if maps is None or all(head.map_number is None for head in heads):
        return pattern
    maps = maps[:, :, : _blocks(q_len), : _blocks(kv_len)]
    others = compile_cached(pattern, q_len, kv_len, _BLOCK, device).kept_blocks().expand(len(maps), len(heads), *maps.shape[2:])
    kept = [others[:, number] if head.map_number is None else maps[:, head.map_number] for number, head in enumerate(heads)]
    return from_blocks(torch.stack(kept, 1), _BLOCK, q_len, kv_len, "causal" if causal else None)


def _read_starts(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> list[int]:
    """cu_seqlens on the host. Raises as ``resolve_longest`` does on a CPU."""
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.cpu()
    resolve_longest(name, torch.empty(len(x), 0, device="cpu"), cu_seqlens, longest)
    return cu_seqlens.tolist()


def _read_integers(name: str, given: torch.Tensor, number: int) -> list[int]:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(given).__name__}; use torch.tensor(..., dtype=torch.int32)")
    if given.shape != (number,) or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 of shape ({number},); got {given.dtype} of shape {tuple(given.shape)}")
    return given.tolist()


def _read_heads(head_mask_type: torch.Tensor, streaming_info: torch.Tensor | None, heads: int) -> tuple[_Head, ...]:
    """Checks both tensors and returns what each head keeps."""
    types = _read_integers("head_mask_type", head_mask_type, heads)
    ones = types.count(1)
    if max(types, default=0) > ones:
        raise ValueError(
            f"head_mask_type must be at most {ones}, the number of its heads of type 1, which have a map each; got {max(types)}; "
            "give type 1 to every head that has a map of its own"
        )
    number = count(1)
    types = [next(number) if kind == 1 else kind for kind in types]
    if min(types, default=0) >= 0:
        counts = [(0, 0)] * heads
    elif streaming_info is None:
        raise ValueError(
            "streaming_info must be given, as head_mask_type is negative for streaming heads; got None; pass (first, last) for "
            f"each head in one tensor, ({2 * heads},) int32"
        )
    else:
        info = _read_integers("streaming_info", streaming_info, 2 * heads)
        counts = list(zip(info[::2], info[1::2], strict=True))
    for head, kind in enumerate(types):
        if kind < 0 and min(counts[head]) < 0:
            raise ValueError(
                f"streaming_info must not be negative for streaming heads; got {counts[head]} for head {head}; pass how many first "
                "and last blocks or keys it keeps"
            )
    return tuple(
        _Head(streaming=pair) if kind < 0 else _Head(map_number=kind - 1 if kind else None)
        for kind, pair in zip(types, counts, strict=True)
    )


def _read_maps(
    base_blockmask: torch.Tensor | None, heads: tuple[_Head, ...], sizes: tuple[int, int, int], device: torch.device
) -> torch.Tensor | None:
    """base_blockmask as bool, None without block-sparse heads. sizes: documents, blocks of queries, blocks of keys."""
    maps = max((head.map_number + 1 for head in heads if head.map_number is not None), default=0)
    if base_blockmask is None and maps == 0:
        return None
    wanted = (sizes[0], maps, *sizes[1:])
    if not isinstance(base_blockmask, torch.Tensor):
        raise TypeError(
            f"base_blockmask must be a tensor of shape {wanted}, as head_mask_type has {maps} heads of type 1; got "
            f"{type(base_blockmask).__name__}; block_sparse_attn_func takes one, and calls for streaming heads alone do not"
        )
    if base_blockmask.shape != wanted or base_blockmask.is_floating_point() or base_blockmask.device != device:
        raise ValueError(
            f"base_blockmask must be bool or integer of shape (documents, heads of type 1, q_blocks, kv_blocks), here {wanted}, on "
            f"q's {device}; got {base_blockmask.dtype} of shape {tuple(base_blockmask.shape)} on {base_blockmask.device}; make a "
            f"map for each head of type 1, of blocks of {_BLOCK} tokens"
        )
    return base_blockmask != 0 if maps else None
