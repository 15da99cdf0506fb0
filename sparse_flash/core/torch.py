"""Block-sparse attention in PyTorch operations, on a CPU or GPU: iterates over the table in chunks of bounded size.

Query blocks that visit the same number of key blocks are computed together: their keys are gathered, and their scores are one
batched matrix product. The online softmax over pieces of a row (arXiv:2307.08691, Alg. 1) bounds the memory of rows that visit many
blocks, and the backward pass recomputes the probabilities from lse (Alg. 2). So memory is linear in tokens, and time is
proportional to the blocks visited. float16 and bfloat16 are computed in float32. On a CPU, PyTorch's kernel computes calls without
a variant: ``aten_cpu``.

A call has a part for each stored mask (``_Part``), with the units that use it: (batch, key head) pairs. A part is computed in
chunks of some units and query blocks, and a chunk in pieces of some key blocks (``_Loop.chunks``).
"""

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..kernels.common.layout import empty_out
from ..masks.block_mask import BlockMask, dense_mask
from ..masks.grid import BlockGrid
from ..masks.memory import register_clear
from . import aten_cpu, definition
from .caches import cache_capacity, check_pages, dequantized
from .definition import Pairs
from .eight_bits import EIGHT_BITS
from .results import compute_dtype, lse_to_subtract, zero_keyless_queries

# Scores computed at a time. On a CPU, a thread's scores should fit its cache, as each is used about five times. Half as many take a
# fifth longer on two cores, as every operation waits for its slowest thread.
_CHUNK_CPU = 1 << 18
_CHUNK_GPU = 1 << 24
_DENSE_BLOCK = 128
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_TILE_PAIRS = 1 << 23  # up to so many pairs, mask tiles are stored decoded; otherwise they are decoded on use
_KEPT_ENTRIES, _KEPT_PAIRS = 1 << 18, 1 << 20  # limits of masks whose host tables are cached: some megabytes each
# By mask and dtype, while the mask lives.
_known_tables: WeakKeyDictionary[BlockMask, dict[torch.dtype, "_HostTables"]] = WeakKeyDictionary()
register_clear(_known_tables.clear)


def supports(call) -> str | None:
    return f"it does not support {EIGHT_BITS}" if EIGHT_BITS in call.features else None


def why_unavailable() -> str | None:
    return None


def forward(call):
    """(out, lse): see ``backends``."""
    out, lse = _forward_without_sinks(*call[:3], call.table, call.scale, call.rest)
    return (out, lse) if call.sinks is None else definition.with_sinks(out, lse, call.sinks, call.rest)


def _forward_without_sinks(q, k, v, mask, scale, variant):
    results = None
    if _can_use_aten_directly(q, v, mask, variant):
        out, lse = aten_cpu.forward(q, k, v, scale, causal=mask is not None)
        return _cast_like(q, out), lse.contiguous()
    if variant is not None:
        q = definition.clear_nonexistent(q, variant.q_starts, variant.q_lens)
        k, v = (definition.clear_nonexistent(t, variant.kv_starts, variant.kv_lens) for t in (k, v))
    for part in (parts := _split_by_mask(q, k, mask)):
        with without_autocast(q):
            packed = part.pack_queries(q), part.pack_keys(k), part.pack_keys(v)
            if _can_use_aten(q, v, variant):
                packed = aten_cpu.loop_forward(*packed, part.loop, scale)
            else:
                packed = _forward(*packed, part.loop, _ScoreRule(part, q, k, scale, variant))
        if len(parts) == 1:
            results = [part.unpack_queries(x) for x in packed]
        else:
            results = results or [x.new_empty(*q.shape[:3], x.shape[3]) for x in packed]
            for result, x in zip(results, packed, strict=True):
                part.scatter_queries(x, result)
    return _cast_like(q, results[0]), results[1][..., 0].contiguous()


def backward(call, dout, dlse, out, lse):
    """(dq, dk, dv), and what is learned: see ``backends``."""
    grads, sinks = _backward_without_sinks(call, dout, dlse, out, lse), call.learned_sinks
    if sinks is None:
        return grads
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - (0.0 if dlse is None else dlse)
    # Without keys and sink, and for nonexistent queries, whose dout may be NaN, lse is -inf.
    return *grads, torch.where(lse.isneginf(), 0.0, (sinks.to(lse.dtype)[:, None] - lse).exp() * -delta)


def _backward_without_sinks(call, dout, dlse, out, lse):
    (q, k, v), mask, scale, variant = call[:3], call.table, call.scale, call.rest
    drel_bias = None
    if dlse is None and _can_use_aten_directly(q, v, mask, variant):
        grads = aten_cpu.backward(dout, q, k, v, out, lse, scale, causal=mask is not None)
        return tuple(_cast_like(x, grad) for x, grad in zip((q, k, v), grads, strict=True))
    if variant is not None:
        q, dout = (definition.clear_nonexistent(t, variant.q_starts, variant.q_lens) for t in (q, dout))
        k, v = (definition.clear_nonexistent(t, variant.kv_starts, variant.kv_lens) for t in (k, v))
        drel_bias = torch.zeros_like(variant.rel_bias) if variant.learned else None
    dout = zero_keyless_queries(dout, lse)
    lse = lse_to_subtract(lse)
    by_pytorchs = dlse is None and _can_use_aten(q, v, variant)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    if variant is not None:
        dlse = definition.clear_nonexistent(dlse[..., None], variant.q_starts, variant.q_lens)[..., 0]
    grads = None
    for part in (parts := _split_by_mask(q, k, mask)):
        queries = [part.pack_queries(x) for x in (q, dout, out, lse[..., None])]
        keys = part.pack_keys(k), part.pack_keys(v)
        with without_autocast(q):
            if by_pytorchs:
                q_rows, dout_rows, *results = queries
                packed = aten_cpu.loop_backward(dout_rows, q_rows, *keys, *results, part.loop, scale)
            else:
                queries.append(part.pack_queries(dlse[..., None]))
                rule = _ScoreRule(part, q, k, scale, variant)
                packed = _backward(*queries, *keys, part.loop, rule, call.deterministic, drel_bias)
        if len(parts) == 1:
            grads = [part.unpack_queries(packed[0]), *packed[1:]]
        else:
            units = k.shape[0] * k.shape[1]
            grads = grads or [packed[0].new_empty(q.shape), *(x.new_zeros(units, *x.shape[1:]) for x in packed[1:])]
            part.scatter_queries(packed[0], grads[0])
            for grad, x in zip(grads[1:], packed[1:], strict=True):
                # A part has each key head once, so this adds in a fixed order.
                grad[part.units] += x
    dk, dv = (grad.flatten(1, 2)[:, : k.shape[2]].unflatten(0, k.shape[:2]) for grad in grads[1:])
    grads = _cast_like(q, grads[0]), _cast_like(k, dk), _cast_like(v, dv)
    return grads if drel_bias is None else (*grads, drel_bias)


def _can_use_aten_directly(q, v, mask, variant) -> bool:
    """Whether PyTorch's CPU kernel supports this call as a whole: dense or causal attention."""
    return _can_use_aten(q, v, variant) and (mask is None or mask.keeps_causal)


def _can_use_aten(q, v, variant) -> bool:
    """Whether PyTorch's CPU kernel can process this call's blocks."""
    return q.device.type == "cpu" and variant is None and q.shape[3] == v.shape[3]


def decode(q, k, v, mask, kv_lens, block_table, causal, scale, k_scale, v_scale, kv_starts):
    """(out, lse): see ``backends``. Reads only the keys that some query keeps."""
    batch, heads, q_len, _ = q.shape
    capacity = cache_capacity(k, block_table)
    out, lse = empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q))
    lengths = [capacity] * batch if kv_lens is None else kv_lens.clamp(0, capacity).tolist()
    starts = [0] * batch if kv_starts is None else kv_starts.clamp(0, capacity).tolist()
    for sequence, (first, end) in enumerate(zip(starts, lengths, strict=True)):
        length = max(0, end - first)
        for group_heads, key_heads, head in _heads_by_mask(mask, sequence, heads, k.shape[1]):
            tokens, kept = _kept_tokens(mask, sequence, head, q_len, length, causal, q.device)
            read = partial(_read_cache, key_heads=key_heads, first=first, block_table=block_table, sequence=sequence, tokens=tokens)
            keys, values = (dequantized(x, of_x, lse.dtype, read) for x, of_x in ((k, k_scale), (v, v_scale)))
            queries = q[sequence, group_heads].to(lse.dtype).reshape(len(keys), -1, q.shape[3])
            with without_autocast(q):
                scores = (queries @ keys.mT * scale).unflatten(1, (-1, q_len)).masked_fill_(~kept, float("-inf"))
                logs = scores.logsumexp(-1)
                scores.sub_(lse_to_subtract(logs)[..., None]).exp_()
                results = scores.flatten(1, 2) @ values
            out[sequence, group_heads] = results.view(-1, q_len, v.shape[3]).to(q.dtype)
            lse[sequence, group_heads] = logs.flatten(0, 1)
    return out, lse


def _heads_by_mask(mask, sequence: int, heads: int, kv_heads: int):
    """Yields (query heads, their key heads, the first head), for heads that share a mask."""
    if mask is None or len(mask.mask_index[sequence if len(mask.mask_index) > 1 else 0].unique()) == 1:
        yield slice(None), slice(None), 0
        return
    for head in range(heads):
        key_head = head * kv_heads // heads
        yield slice(head, head + 1), slice(key_head, key_head + 1), head


def _kept_tokens(mask, sequence: int, head: int, q_len: int, length: int, causal: bool, device):
    """The keys that the last q_len of ``length`` tokens keep: (tokens, (q_len, tokens) bool). tokens: a slice or (n,) int64."""
    if mask is None:
        positions, keys = (torch.arange(first, length, device=device) for first in (length - q_len, 0))
        return slice(0, length), (keys <= positions[:, None]) if causal else (positions >= 0)[:, None].expand(-1, length)
    kept = torch.zeros((q_len, length), dtype=torch.bool, device=device)
    if length:
        first = max(0, length - q_len)
        kept[first - length :] = mask.kept_by_queries(mask.stored_index(sequence, head), first, length)[:, :length]
    tokens = kept.any(0).nonzero()[:, 0]
    return tokens, kept[:, tokens]


def _read_cache(cache, key_heads: slice, first: int, block_table, sequence: int, tokens):
    """(kv_heads, n, head_dim): the given tokens of a sequence, which starts at ``first``; from scales, without head_dim."""
    cache = cache[:, key_heads, first:]
    if block_table is None:
        return cache[sequence, :, tokens]
    page_size = cache.shape[2]
    if isinstance(tokens, slice):
        tokens = torch.arange(tokens.start, tokens.stop, device=cache.device)
    pages = block_table[sequence, tokens // page_size].long()
    check_pages(pages, len(cache), sequence)
    return cache[pages, :, tokens % page_size].transpose(0, 1)


def without_autocast(q):
    """Disables autocast: the call has already cast its arguments, and matrix products must not cast them again."""
    return nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False)  # torch.autocast raises for "meta"


def block_means(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """(batch, heads, blocks, head_dim) means over the tokens of each block, in float32 or x's dtype if that is wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    whole = x.shape[2] // block_size
    means = torch.unflatten(x[:, :, : whole * block_size], 2, (whole, block_size)).mean(3, dtype=dtype)
    rest = x[:, :, whole * block_size :]
    return torch.cat([means, rest.mean(2, keepdim=True, dtype=dtype)], 2) if rest.shape[2] else means


def _cast_like(x, values):
    """Returns values, of any head_dim, in x's dtype and memory order; without a copy if they have these."""
    fits = values.dtype == x.dtype and values.stride() == empty_out(x, values.shape[3], "meta").stride()
    return values if fits else empty_out(x, values.shape[3]).copy_(values)


class _ScoreRule:
    """Turns a part's products into scores in base 2 and weights, a chunk at a time. Applies the variant."""

    def __init__(self, part, q, k, scale: float, variant):
        self.part, self.scale, self.variant = part, scale, variant
        self.heads, self.q_len, self.kv_len = q.shape[1], q.shape[2], k.shape[2]
        self.batch_heads = None if variant is None else part.batch_heads(q)
        self.changes_scores = variant is not None and variant.scored
        self.has_score_mod = variant is not None and variant.score_mod is not None
        self.has_dropout = variant is not None and variant.seed is not None
        # The factor of products: scores stay natural if a variant changes them.
        self.factor = scale if self.changes_scores else scale * _LOG2_E
        # Sums are divided by it once, to compensate for dropout.
        self.kept_share = 1.0 - variant.dropout_p if self.has_dropout else 1.0

    def pairs(self, units: slice, rows, cols) -> Pairs | None:
        """Pairs, shaped as in ``view``. Padding has the last token's index: a user's function reads tables within bounds."""
        if self.batch_heads is None:
            return None
        block, device = self.part.loop.block, self.batch_heads.device
        batch_heads = self.batch_heads[units][:, None, :, None, None, None]
        tokens = torch.arange(block, device=device)
        rows, cols = (torch.arange(i.start, i.stop, device=device) if isinstance(i, slice) else i for i in (rows, cols))
        queries = rows[:, None] * block + tokens
        keys = cols.view(len(rows), -1, 1) * block + tokens
        return Pairs(
            batch_heads // self.heads,
            batch_heads % self.heads,
            queries.clamp_(max=self.q_len - 1)[None, :, None, :, None, None],
            keys.clamp_(max=self.kv_len - 1)[None, :, None, None],
            self.heads,
            self.q_len,
            self.kv_len,
        )

    def view(self, scores, pairs: Pairs):
        """(units * rows, members * queries, entries * keys) as (units, rows, members, queries, entries, keys)."""
        return scores.view(len(pairs.batch), pairs.key.shape[1], pairs.head.shape[2], -1, *pairs.key.shape[4:])

    def modify_scores(self, scores, pairs: Pairs) -> None:
        """Turns products, scaled by ``factor``, into scores in base 2, in place."""
        if self.changes_scores:
            view = self.view(scores, pairs)
            view.copy_(definition.modify_scores(self.variant, view, pairs)).mul_(_LOG2_E)

    def differentiate(self, scores, pairs: Pairs) -> tuple:
        """Does ``modify_scores``, and returns the derivatives: see ``differentiate_scores``."""
        view = self.view(scores, pairs)
        changed, outer, inner = definition.differentiate_scores(self.variant, view, pairs)
        view.copy_(changed).mul_(_LOG2_E)
        return outer, inner

    def mask_scores(self, scores, pairs: Pairs | None) -> None:
        """Sets the scores of nonexistent tokens to -inf."""
        if pairs is not None and (exist := definition.existing_pairs(self.variant, pairs)) is not None:
            self.view(scores, pairs).masked_fill_(~exist, float("-inf"))

    def apply_dropout(self, weights, pairs: Pairs | None) -> None:
        """Zeroes the weights that dropout drops."""
        if self.has_dropout and pairs is not None:
            self.view(weights, pairs).masked_fill_(~definition.kept_by_dropout(self.variant, pairs, -3), 0.0)


def _forward(q, k, v, loop, rule):
    """One part: q (units, q_blocks, rows, head_dim), k, v (units, kv_blocks, block, head_dim) -> out and lse, packed like q."""
    out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full((*q.shape[:3], 1), float("-inf"))
    lowest = torch.finfo(q.dtype).min
    for units, rows, pieces in loop.chunks(*q.shape[::2], q.device):
        q_rows = _take(q[units], rows).reshape(-1, *q.shape[2:])
        running_max = running_sum = accumulator = None
        for piece in pieces:
            keys, values = (_take(t[units], piece.cols).reshape(len(q_rows), -1, t.shape[3]) for t in (k, v))
            scores = loop.scratch(0, q_rows, keys)
            torch.baddbmm(scores, q_rows, keys.mT, beta=0, alpha=rule.factor, out=scores)
            pairs = rule.pairs(units, rows, piece.cols)
            rule.modify_scores(scores, pairs)
            loop.mask_scores(scores, piece, rule.has_score_mod)
            rule.mask_scores(scores, pairs)
            # Finite, so that a row whose scores are all -inf gives exp2(-inf), not exp2(-inf + inf).
            piece_max = scores.amax(-1, keepdim=True).clamp_(min=lowest)
            if running_max is None:
                running_max = piece_max
            else:
                piece_max = torch.maximum(running_max, piece_max)
                rescale = (running_max - piece_max).exp2_()
                running_max = piece_max
                running_sum *= rescale
                accumulator *= rescale
            # exp2, because float32 exp on a CPU is MKL's: 4 times slower, and 50 times where it underflows.
            scores.sub_(running_max).exp2_()
            piece_sum = scores.sum(-1, keepdim=True)
            rule.apply_dropout(scores, pairs)
            if running_sum is None:
                running_sum, accumulator = piece_sum, torch.bmm(scores, values)
            else:
                running_sum += piece_sum
                accumulator.baddbmm_(scores, values)
        _put(lse[units], rows, (running_max + running_sum.log2()).mul_(_LN_2))
        # The sum is 0 if a row keeps nothing; otherwise its largest term is 1.
        _put(out[units], rows, accumulator.div_(running_sum.clamp_(min=0.5).mul_(rule.kept_share)))
    return out, lse


def _backward(q, dout, out, lse, dlse, k, v, loop, rule, deterministic, drel_bias):
    """One part, like ``_forward``; lse and dlse (units, q_blocks, rows, 1) -> dq, dk and dv. Adds to drel_bias."""
    scale = rule.scale
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for units, rows, pieces in loop.chunks(*q.shape[::2], q.device):
        chunk = (_take(x[units], rows).reshape(-1, *x.shape[2:]) for x in (q, dout, out, lse, dlse))
        q_rows, dout_rows, out_rows, lse_rows, dlse_rows = chunk
        bias = lse_rows * -_LOG2_E
        minus_delta = dlse_rows - (dout_rows * out_rows).sum(-1, keepdim=True)
        for piece in pieces:
            keys, values = (_take(t[units], piece.cols).reshape(len(q_rows), -1, t.shape[3]) for t in (k, v))
            shape = (len(q_rows), q_rows.shape[1], keys.shape[1])
            probabilities, dscores = loop.scratch(0, q_rows, keys), loop.scratch(1, q_rows, keys)
            pairs = rule.pairs(units, rows, piece.cols)
            if rule.changes_scores:
                torch.baddbmm(probabilities, q_rows, keys.mT, beta=0, alpha=rule.factor, out=probabilities)
                outer, inner = rule.differentiate(probabilities, pairs)
                probabilities.add_(bias)
            else:
                torch.baddbmm(bias.expand(shape), q_rows, keys.mT, alpha=rule.factor, out=probabilities)
            loop.mask_scores(probabilities, piece, rule.has_score_mod)
            rule.mask_scores(probabilities, pairs)
            probabilities.exp2_()
            if rule.has_score_mod:
                # A pair without weight may have an infinite or NaN derivative, which times 0 is NaN.
                outer = outer.masked_fill(rule.view(probabilities, pairs) == 0, 0.0)
            if rule.has_dropout:
                weights = probabilities.clone()
                rule.apply_dropout(weights, pairs)
                torch.bmm(dout_rows, values.mT, out=dscores)
                rule.apply_dropout(dscores, pairs)
                dscores.div_(rule.kept_share).add_(minus_delta)
            else:
                weights = probabilities
                torch.baddbmm(minus_delta.expand(shape), dout_rows, values.mT, out=dscores)
            _add_product(dv[units], piece.cols, weights.mT, dout_rows, 1.0 / rule.kept_share, deterministic)
            dscores.mul_(probabilities)
            if rule.changes_scores:
                dscores_view = rule.view(dscores, pairs)
                dscores_view.mul_(outer)
                if drel_bias is not None:
                    with repeatable(drel_bias, deterministic):
                        definition.add_bias_gradient(drel_bias, rule.variant, dscores_view, pairs)
                dscores_view.mul_(inner)
            _add_product(dk[units], piece.cols, dscores.mT, q_rows, scale, deterministic)
            _add_product(dq[units], rows, dscores, keys, scale, deterministic)
    return dq, dk, dv


# An index into the blocks of a (units, blocks, tokens, ...) tensor is a slice where possible, which makes a view.


def _take(blocks, index):
    return blocks[:, index] if isinstance(index, slice) else blocks.index_select(1, index)


def _put(blocks, index, values):
    if isinstance(index, slice):
        blocks[:, index] = values.view(blocks.shape[0], -1, *blocks.shape[2:])
    else:
        blocks.index_copy_(1, index, values.view(blocks.shape[0], -1, *blocks.shape[2:]))


def _add_product(blocks, index, left, right, alpha, deterministic):
    """blocks[:, index] += alpha * left @ right."""
    if isinstance(index, slice) and len(left) == len(blocks):  # one product per unit
        blocks[:, index].flatten(1, 2).baddbmm_(left, right, alpha=alpha)
        return
    product = torch.bmm(left, right).view(blocks.shape[0], -1, *blocks.shape[2:])
    if isinstance(index, slice):
        blocks[:, index].add_(product, alpha=alpha)
        return
    with repeatable(blocks, deterministic):
        blocks.index_add_(1, index, product, alpha=alpha)


@contextmanager
def repeatable(target, deterministic):
    """If deterministic, makes index_add_ to ``target`` on a GPU add in a fixed order. Only around it: cuBLAS refuses the flag."""
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if deterministic and target.is_cuda:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if deterministic and target.is_cuda:
            torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])


class _Part:
    """The (batch, key head) units that use one stored mask. units: (n,) int64 indices into batch * kv_heads, or a slice of all.
    members: the slice of query heads within each unit's group, whose rows are stacked, so that keys are read once for all."""

    def __init__(self, loop: "_Loop", units, members: slice, kv_heads: int):
        self.loop, self.units, self.members, self.kv_heads = loop, units, members, kv_heads

    def batch_heads(self, q):
        """(units, members) int64: batch * heads + head of the query heads of each unit."""
        batch_heads = torch.arange(q.shape[0] * q.shape[1], device=q.device).view(-1, q.shape[1] // self.kv_heads)
        return batch_heads[:, self.members][self.units]

    def pack_queries(self, x):
        """(batch, heads, q_len, d) -> (units, q_blocks, members * block, d) in the computation dtype."""
        x = x.unflatten(1, (self.kv_heads, -1))[:, :, self.members].flatten(0, 1)[self.units]
        x = _pad_tokens(x, self.loop.block).to(compute_dtype(x)).unflatten(2, (-1, self.loop.block))
        return x.transpose(1, 2).flatten(2, 3)

    def unpack_queries(self, packed):
        """The reverse of ``pack_queries`` for all units and heads: (batch, heads, q_len, d), a view if no rows are stacked."""
        values = packed.unflatten(2, (-1, self.loop.block)).transpose(1, 2).flatten(2, 3)[:, :, : self.loop.q_len]
        return values.unflatten(0, (-1, self.kv_heads)).flatten(1, 2)

    def scatter_queries(self, packed, target):
        """The reverse of ``pack_queries`` for some units or heads, written into target (batch, heads, q_len, d)."""
        values = packed.unflatten(2, (-1, self.loop.block)).transpose(1, 2).flatten(2, 3)[:, :, : self.loop.q_len]
        target = target.unflatten(1, (self.kv_heads, -1))[:, :, self.members]
        units = torch.arange(target.shape[0] * self.kv_heads, device=target.device)[self.units]
        target[units // self.kv_heads, units % self.kv_heads] = values

    def pack_keys(self, x):
        """(batch, kv_heads, kv_len, d) -> (units, kv_blocks, block, d) in the computation dtype."""
        x = _pad_tokens(x.flatten(0, 1)[self.units], self.loop.block)
        return x.to(compute_dtype(x)).unflatten(1, (-1, self.loop.block))


def _pad_tokens(x, block: int):
    """Pads tokens (the second to last dimension) with zeros to whole blocks."""
    short = -x.shape[-2] % block
    return torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x


def _split_by_mask(q, k, mask) -> list[_Part]:
    batch, kv_heads, group = k.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    mask = dense_mask(BlockGrid(q.shape[2], k.shape[2], _DENSE_BLOCK), q.device) if mask is None else mask
    tables = _host_tables(mask, compute_dtype(q))
    index = np.broadcast_to(mask.mask_index.cpu().numpy(), q.shape[:2]).reshape(batch * kv_heads, group)
    if (index == index[:, :1]).all():
        return [tables.part(number, index[:, 0], slice(None), kv_heads) for number in np.unique(index)]
    return [
        tables.part(number, index[:, member], slice(member, member + 1), kv_heads)
        for member in range(group)
        for number in np.unique(index[:, member])
    ]


def _host_tables(mask, dtype: torch.dtype) -> "_HostTables":
    tiles = sum(len(t) for t in mask.tiles) * mask.block_size**2
    # Tables on a GPU are not cached: a CUDA graph may rewrite them.
    if mask.device.type != "cpu" or len(mask.by_query.col_idx) > _KEPT_ENTRIES or tiles > _KEPT_PAIRS:
        return _HostTables(mask, dtype)
    known = _known_tables.setdefault(mask, {})
    if dtype not in known:
        known[dtype] = _HostTables(mask, dtype)
    return known[dtype]


class _HostTables:
    """The table's arrays on the host, where the loop runs, and its mask tiles on the device."""

    def __init__(self, mask, dtype: torch.dtype):
        table = mask.by_query
        self.block, self.q_len = mask.block_size, mask.q_len
        self.row_ptr, self.row_split = table.row_ptr.cpu().numpy(), table.row_split.cpu().numpy()
        count = int(self.row_ptr.max())
        self.col_idx, self.tile_idx = table.col_idx[:count].cpu().numpy(), table.tile_idx[:count].cpu().numpy()
        self.tiles = _Tiles(mask.tile_runs, mask.tile_bits, dtype)
        self.known: dict[int, list] = {}

    def part(self, number: int, index: np.ndarray, members: slice, kv_heads: int) -> _Part:
        if number not in self.known:
            self.known[number] = list(self.groups(number))
        loop = _Loop(self.block, self.q_len, self.known[number], self.tiles)  # separate buffers: other threads may call too
        chosen = np.flatnonzero(index == number)
        every = len(chosen) == len(index)
        units = slice(None) if every else torch.from_numpy(chosen).to(self.tiles.device)
        return _Part(loop, units, members, kv_heads)

    def groups(self, number: int):
        """Yields (rows, cols, tiles) for each number of entries that rows of this mask have; tiles as in ``_Tiles``."""
        ptr, split = self.row_ptr[number].astype(np.int64), self.row_split[number]
        counts = np.diff(ptr)
        for count in np.unique(counts[counts > 0]):
            rows = np.flatnonzero(counts == count)
            entries = ptr[rows, None] + np.arange(count)
            cols, tiles = self.col_idx[entries], self.tile_idx[entries].astype(np.int64)
            tiles += np.where(entries >= split[rows, 1, None], self.tiles.runs, 0)
            tiles = np.where(entries < split[rows, 0, None], -1, tiles)
            order = np.argsort(cols, axis=1, kind="stable")  # ascending, so that neighbours form a slice
            yield rows, np.take_along_axis(cols, order, 1), np.take_along_axis(tiles, order, 1)


class _Tiles:
    """Mask tiles by number: run tiles, then bit tiles; -1 is a full block."""

    def __init__(self, tile_runs, tile_bits, dtype: torch.dtype):
        self.tile_runs, self.tile_bits, self.dtype = tile_runs, tile_bits, dtype
        self.runs, self.block = tile_runs.shape
        self.device = tile_runs.device
        count = self.runs + len(tile_bits)
        self.decoded = self.decode(torch.arange(-1, count, device=self.device)) if count * self.block**2 <= _TILE_PAIRS else None

    def bounds(self, numbers: np.ndarray) -> torch.Tensor:
        """(n, block, block): +inf for kept pairs, else -inf. torch.minimum takes a fifth of the time of masked_fill_ on a CPU."""
        if self.decoded is None:
            return self.decode(torch.tensor(numbers, device=self.device))
        if (numbers == numbers[0]).all():
            return self.decoded[numbers[0] + 1][None]
        return self.decoded[torch.from_numpy(numbers + 1).to(self.device)]

    def decode(self, numbers):
        column = torch.arange(self.block, device=self.device)
        packed = self.tile_runs[numbers.clamp(0, self.runs - 1)]
        kept = (column >= (packed & 0xFFFF)[..., None]) & (column < (packed >> 16)[..., None])
        if len(self.tile_bits):
            words = self.tile_bits[(numbers - self.runs).clamp(0, len(self.tile_bits) - 1)]
            bits = (words[..., None] >> torch.arange(32, device=self.device)) & 1
            kept = torch.where((numbers >= self.runs)[:, None, None], bits.flatten(2)[..., : self.block].bool(), kept)
        kept |= (numbers < 0)[:, None, None]
        return torch.where(kept, float("inf"), float("-inf")).to(self.dtype)


class _Piece(NamedTuple):
    cols: slice | torch.Tensor  # rows * entries block columns
    tiles: np.ndarray  # (rows, entries)


class _Loop:
    """The loop over one mask's blocks. groups: (rows, cols, tiles) from ``_HostTables.groups``."""

    def __init__(self, block: int, q_len: int, groups: list, tiles: _Tiles):
        self.block, self.q_len, self.groups, self.tiles = block, q_len, groups, tiles
        self.size = _CHUNK_CPU * torch.get_num_threads() if tiles.device.type == "cpu" else _CHUNK_GPU
        self.buffers: dict[int, torch.Tensor] = {}

    def chunks(self, units: int, stacked: int, device):
        """Yields (slice of units, index of query blocks, [pieces]). A piece has at most ``size`` scores, or one block of a unit."""
        for rows, cols, tiles in self.groups:
            entry = stacked * self.block
            width = min(cols.shape[1], max(1, self.size // entry))
            together = min(units, max(1, self.size // (entry * width)))
            height = max(1, self.size // (entry * width * together)) if width == cols.shape[1] else 1
            for unit in range(0, units, together):
                for row in range(0, len(rows), height):
                    chosen = slice(row, row + height)
                    pieces = [
                        _Piece(_slice_or_index(cols[chosen, e : e + width], device), tiles[chosen, e : e + width])
                        for e in range(0, cols.shape[1], width)
                    ]
                    yield slice(unit, min(unit + together, units)), _slice_or_index(rows[chosen], device), pieces

    def scratch(self, number: int, q_rows, keys):
        """(n, queries, keys) from a buffer reused for every chunk."""
        shape = (len(q_rows), q_rows.shape[1], keys.shape[1])
        count = shape[0] * shape[1] * shape[2]
        if number not in self.buffers or self.buffers[number].numel() < count:
            self.buffers[number] = q_rows.new_empty(max(count, self.size))
        return self.buffers[number][:count].view(shape)

    def mask_scores(self, scores, piece: _Piece, any_score: bool):
        """Sets scores to -inf where these blocks' tiles keep no pair. any_score: scores may be NaN."""
        rows, entries = piece.tiles.shape
        partial = np.flatnonzero((piece.tiles >= 0).any(0))
        if not len(partial):
            return
        # (units, rows, members, queries, entries, keys)
        blocks = scores.view(-1, rows, scores.shape[1] // self.block, self.block, entries, self.block)
        for entry in partial.tolist():
            block = blocks[:, :, :, :, entry]
            bounds = self.tiles.bounds(piece.tiles[:, entry])[:, None]
            if any_score:  # the minimum with NaN is NaN
                block.masked_fill_(bounds < 0, float("-inf"))
            else:
                torch.minimum(block, bounds, out=block)


def _slice_or_index(blocks: np.ndarray, device) -> slice | torch.Tensor:
    found = aten_cpu.slice_or_array(blocks.reshape(-1))
    return found if isinstance(found, slice) else torch.from_numpy(found.astype(np.int64)).to(device)
