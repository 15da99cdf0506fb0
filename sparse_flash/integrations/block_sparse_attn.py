"""The main call of the ``block_sparse_attn`` package, computed here: a program that uses it changes one import.

    from sparse_flash.integrations.block_sparse_attn import block_sparse_attn_func

Arguments, layouts and the meaning of ``head_mask_type`` are that package's; ``backend`` is as in ``sparse_flash.attention``. Blocks
are of 128 queries and 128 keys, counted from the first ones of each document. ``is_causal`` aligns a document's last query with its
last key, token by token.

Streaming heads keep the first and the last blocks of keys. With is_causal, the last ones of a block of queries end with the block
of keys that holds the position of its last query. A block of queries that the document's end cuts short counts as whole, so that
block of keys may lie past the document. Without is_causal, the last ones are the document's own, for all queries.

Differences: all calls have gradients, also with ``exact_streaming``, and the head_dims, dtypes and devices of ``attention``. A
query that keeps nothing, or past the last document, has out 0 and lse -inf. ``return_attn_probs`` returns None for ``S_dmask``, and
is refused with dropout. ``exact_streaming`` is refused with block-sparse heads.

``cu_seqlens_q``, ``cu_seqlens_k``, ``head_mask_type`` and ``streaming_info`` are read on the host: put them on the CPU, or a call
waits for the GPU. Neighbouring documents of equal lengths are one call of ``attention``; others are one call each.

Source: https://github.com/mit-han-lab/Block-Sparse-Attention, commit 49d6c39e4dc0303442cda3bb758b3925d4399c49, BSD 3-Clause: its
README, block_sparse_attn_interface.py, and the reference of its tests.
"""

from itertools import count, groupby
from typing import Any

import torch
import torch.nn.functional as F

from ..api.attention import attention
from ..core.arguments import check_shapes, check_types, refuse_probabilities
from ..masks.block_mask import BlockMask
from ..masks.memory import cached_until_cleared
from ..masks.parsing import parse
from ..masks.pattern import PerHead
from ..packed.arguments import check_packed, resolve_longest

_BLOCK = 128


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
    heads = q.shape[1]
    check_shapes(
        f"cu_seqlens_q: documents+1; cu_seqlens_k: documents+1; head_mask_type: {heads}; streaming_info: {2 * heads}",
        *(cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info),
    )
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.cpu(), cu_seqlens_k.cpu()
    resolve_longest("q", torch.empty(len(q), 0, device="cpu"), cu_seqlens_q, max_seqlen_q_)
    resolve_longest("k", torch.empty(len(k), 0, device="cpu"), cu_seqlens_k, max_seqlen_k_)
    starts, kv_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    number, types = count(1), head_mask_type.tolist()
    types = [next(number) if kind == 1 else kind for kind in types]
    of_type_1 = next(number) - 1
    counts = [(0, 0)] * heads if streaming_info is None else streaming_info.unflatten(0, (heads, 2)).tolist()
    rules = [(kind, *pair) for kind, pair in zip(types, counts, strict=True)]
    for name, given, needed in (("streaming_info", streaming_info, min(types) < 0), ("base_blockmask", base_blockmask, of_type_1)):
        if given is None and needed:
            raise ValueError(f"{name} must be given, as head_mask_type has heads that need it; got None; pass a tensor")
    if max(types) > of_type_1:
        raise ValueError(f"head_mask_type must be at most {of_type_1}, its number of heads of type 1; got {max(types)}; lower it")
    if any(kind < 0 and min(pair) < 0 for kind, *pair in rules):
        raise ValueError(f"streaming_info must not be negative for streaming heads; got (first, last) of {counts}; use 0 for none")
    if exact_streaming and (not is_causal or of_type_1):
        got = f"{is_causal} and {of_type_1} heads; call once for each kind of head"
        raise ValueError(f"exact_streaming needs is_causal=True and no heads of type 1; got {got}")
    blocks = f"{-(-max_seqlen_q_ // _BLOCK)} {-(-max_seqlen_k_ // _BLOCK)}"
    check_shapes(f"base_blockmask: {len(starts) - 1} {of_type_1} {blocks}", base_blockmask)
    options: dict[str, Any] = {"scale": softmax_scale, "dropout_p": p_dropout, "return_lse": True, "backend": backend}
    mask: Any = _token_mask(rules) if exact_streaming else None
    outs, lses, first = [], [], 0
    for (q_len, kv_len), documents in groupby(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)):
        stop = first + len(list(documents))
        tokens = (q, starts, q_len), (k, kv_starts, kv_len), (v, kv_starts, kv_len)
        q_rows, k_rows, v_rows = (x[at[first] : at[stop]].unflatten(0, (stop - first, n)).transpose(1, 2) for x, at, n in tokens)
        if not exact_streaming:
            mask = _block_mask(rules, base_blockmask, slice(first, stop), is_causal, q_len, kv_len, q.device)
        out, lse = attention(q_rows, k_rows, v_rows, mask, deterministic=deterministic or None, **options)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        lses.append(F.pad(lse, (0, max_seqlen_q_ - q_len), value=float("-inf")))
        first = stop
    out = torch.cat([*outs, outs[0].new_zeros(len(q) - starts[-1], *outs[0].shape[1:])])
    return (out, torch.cat(lses), None) if return_attn_probs else out


# rules: of each head, its type, n > 0 for map n - 1, and how many first and last blocks or keys it keeps.
def _token_mask(rules: list[tuple[int, int, int]]) -> PerHead:
    kept = [[f"sinks({first})"] * (first > 0) + [f"local({last})"] * (last > 0) or ["~full"] for _, first, last in rules]
    texts = [f"causal & ({' | '.join(own)})" if rule[0] else "causal" for own, rule in zip(kept, rules, strict=True)]
    return PerHead(tuple(map(parse, texts)))


def _block_mask(rules: list[tuple[int, int, int]], maps, own: slice, causal: bool, q_len: int, kv_len: int, device):
    if all(kind == 0 for kind, _, _ in rules) or 0 in (q_len, kv_len):
        return "causal" if causal else None
    kept, number = _own_blocks(tuple(rules), causal, q_len, kv_len, device)
    if maps is not None and maps.shape[1]:
        maps = maps[own, number.clamp(min=0), : kept.shape[2], : kept.shape[3]]
        kept = torch.where(number[:, None, None] >= 0, maps != 0, kept)
    return BlockMask.from_blocks(kept, _BLOCK, q_len, kv_len, "causal" if causal else None)


@cached_until_cleared(maxsize=256)
def _own_blocks(rules: tuple, causal: bool, q_len: int, kv_len: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(what heads without a map keep, (1, heads, q_blocks, kv_blocks) bool; the map of each head, negative for none)."""
    kind, first, last = torch.tensor(rules, device=device).T[..., None, None]
    row, col = torch.arange(-(-q_len // _BLOCK), device=device)[:, None], torch.arange(-(-kv_len // _BLOCK), device=device)
    stop = row + 1 - (q_len - kv_len) // _BLOCK if causal else len(col)
    kept = (kind == 0) | (col < first) | ((col >= stop - last) & (col < stop))
    return kept.expand(-1, len(row), -1)[None], kind.flatten() - 1
