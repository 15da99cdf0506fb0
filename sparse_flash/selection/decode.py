"""Decoding over picked blocks, by a kernel or in PyTorch operations of fixed shapes, which read no other blocks of the cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compat.pytorch import is_plain_eager
from ..core import hopper, operators
from ..core import triton as triton_backend
from ..core.caches import E4M3, cache_capacity, check_read_pages, dequantized
from ..core.description import Call
from ..core.results import compute_dtype, lse_to_subtract
from ..core.torch import without_autocast
from ..kernels.common.layout import as_contiguous_rows, empty_out, restore_out
from ..kernels.common.streams import current_device
from .block_selection import BlockSelection

CHUNK = 1 << 27  # numbers of keys and values read at a time


def supports(name: str, call: Call) -> str | None:
    """Why a back end cannot run this, or None. "hopper" and "triton" share a kernel."""
    if name == "torch":
        return None
    if name == "reference":
        return "over picked blocks it does not decode"
    return (hopper.why_unavailable() if name == "hopper" else None) or triton_backend.supports(call)


def decode(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float, backend: str, *of_cache: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a back end that supports the call. selection: without ``always``. of_cache: kv_lens, block_table, and the
    scales of e4m3 k and v."""
    run: Any = _decode if is_plain_eager(q, k, v) else _decode_operator
    return run(q, k, v, selection.picks, selection.block_size, scale, backend != "torch", *of_cache)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, picks: Tensor, block_size: int, scale: float, by_kernel: bool, *rest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """rest: kv_lens, block_table, k_scale, v_scale."""
    if not by_kernel:
        return decode_by_operations(q, k, v, picks, block_size, scale, *rest)
    from .kernels.decode import selection_decode

    kv_lens, block_table, k_scale, v_scale = rest
    kv_lens, block_table = (t if t is None else t.contiguous() for t in (kv_lens, block_table))
    ready, keys, values = (as_contiguous_rows(x, in_pairs=k.dtype == E4M3) for x in (q, k, v))
    options = {"kv_lens": kv_lens, "block_table": block_table, "k_scale": k_scale, "v_scale": v_scale}
    with current_device(q.device):
        out, lse = selection_decode(ready, keys, values, picks.contiguous(), block_size, scale, **options)
    return restore_out(out, ready, q, v), lse


_decode_operator = operators.define_operator(
    "selected_attention_decode",
    "Tensor q, Tensor k, Tensor v, Tensor picks, SymInt block_size, float scale, bool by_kernel, "
    "Tensor? kv_lens, Tensor? block_table, Tensor? k_scale, Tensor? v_scale",
)(_decode)
_decode_operator.register_fake(operators.fake_results)


def decode_by_operations(
    q: Tensor, k: Tensor, v: Tensor, picks: Tensor, block_size: int, scale: float, *of_cache: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in PyTorch operations. of_cache: kv_lens, block_table, k_scale, v_scale."""
    kv_lens, block_table, k_scale, v_scale = of_cache
    heads, q_len, slots = picks.shape[1:]
    exact = compute_dtype(q)
    capacity = cache_capacity(k, block_table)
    lengths = torch.full((len(q),), capacity, device=q.device) if kv_lens is None else kv_lens.long().clamp(max=capacity)
    # The queries are the last ones of each sequence.
    position = (torch.arange(q_len, device=q.device) - q_len + lengths[:, None])[:, None, :, None]
    rows = torch.unflatten(q, 1, (heads, -1)).transpose(2, 3).to(exact)
    out, lse = empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=exact)
    numbers = picks.shape[0] * heads * slots * block_size * (q.shape[3] + v.shape[3])
    step = max(1, CHUNK // max(1, numbers))
    with without_autocast(q):
        for low in range(0, q_len, step):
            some = slice(low, low + step)
            pick = picks[:, :, some, :, None].long()
            token = pick * block_size + torch.arange(block_size, device=q.device)
            token = torch.where(pick < 0, -1, token).flatten(3)
            kept = (token >= 0) & (token <= position[:, :, some])
            token = torch.where(kept, token, 0).flatten(2)
            read = partial(read_tokens, token=token, read=kept.flatten(2), heads=heads, block_table=block_table)
            stored = (dequantized(x, of_x, exact, read) for x, of_x in ((k, k_scale), (v, v_scale)))
            keys, values = (torch.unflatten(x, 2, (-1, slots * block_size)) for x in stored)
            # Tokens that are not kept may be NaN, which a weight of 0 does not undo.
            values = values.masked_fill(~kept[..., None], 0.0)
            scores = (scale * (rows[:, :, some] @ keys.mT)).masked_fill(~kept[:, :, :, None], float("-inf"))
            logs = scores.logsumexp(-1, keepdim=True)
            weights = (scores - lse_to_subtract(logs)).exp()
            out[:, :, some] = (weights @ values).transpose(2, 3).flatten(1, 2).to(q.dtype)
            lse[:, :, some] = logs[..., 0].transpose(2, 3).flatten(1, 2)
    return out, lse


def read_tokens(x: Tensor, token: Tensor, read: Tensor, heads: int, block_table: Tensor | None) -> Tensor:
    """(batch, heads, n, head_dim): tokens of a cache, for so many heads, as many for each of its own; or (batch, heads, n) their
    scales. token: (batch, heads | 1, n), int64. read: like token, bool; others are unused. Raises as ``check_read_pages`` does."""
    head = (torch.arange(heads, device=x.device) * x.shape[1] // heads)[:, None]
    sequence = torch.arange(len(token), device=x.device)[:, None, None]
    if block_table is None:
        return x[sequence, head, token]
    page = block_table[sequence, token // x.shape[2]].long()
    check_read_pages(page, read.expand_as(page), len(x))
    return x[page.clamp(0, len(x) - 1), head, token % x.shape[2]]
