"""The oracle: dense attention in float64, the whole (q_len, kv_len) matrix at once. Slow, and correct by construction.

Every other back end is compared with a softmax like this one. Request it by name on short inputs to tell a wrong result from a
surprising mask.
"""

import torch

from ..kernels.common.layout import empty_out
from . import definition
from .caches import check_pages, dequantized
from .description import eight_bits_refusal
from .eight_bits import EIGHT_BITS, attention_in_eight_bits
from .results import compute_dtype, lse_to_subtract


def supports(call) -> str | None:
    if EIGHT_BITS in call.features and (reason := eight_bits_refusal(call)):
        return reason
    return "it computes in float64, which devices of type mps do not have" if call.device.type == "mps" else None


def why_unavailable() -> str | None:
    return None


def forward(call):
    """(out, lse), always computed in float64: see ``backends``."""
    q, k, v = call[:3]
    matrix = _Matrix(q, k, v, call.table, call.scale, call.variant, differentiate=False)
    out = empty_out(q, v.shape[3]).copy_(matrix.weights @ matrix.values)
    return out, matrix.lse.to(compute_dtype(q))


def forward_in_eight_bits(call):
    """(out, lse) by the definition: see ``backends``."""
    (q, k, v), mask = call[:3], call.table
    out, lse = attention_in_eight_bits(q, k, v, None if mask is None else mask.to_dense(), call.scale)
    return empty_out(q, v.shape[3]).copy_(out), lse.float()


def backward(call, dout, dlse, out, lse):
    """Gradients of a forward pass recomputed in float64; ``out`` and ``lse`` are not used."""
    (q, k, v), scale, variant = call[:3], call.scale, call.variant
    matrix = _Matrix(q, k, v, call.table, scale, variant, differentiate=True)
    dout, dlse = dout.double(), None if dlse is None else dlse.double()[..., None]
    if variant is not None:
        dout = definition.clear_nonexistent(dout, variant.q_starts, variant.q_lens)
        dlse = dlse if dlse is None else definition.clear_nonexistent(dlse, variant.q_starts, variant.q_lens)
    dout = dout.masked_fill(matrix.keyless[..., None], 0.0)
    dprobabilities = dout @ matrix.values.mT * matrix.dropout
    delta = (matrix.probabilities * dprobabilities).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse
    dbiased = matrix.probabilities * (dprobabilities - delta) * matrix.outer
    dproducts = dbiased * matrix.inner * scale
    grads = dproducts @ matrix.keys, dproducts.mT @ matrix.queries, matrix.weights.mT @ dout
    # The gradient of a key head is the sum over the query heads that share it.
    sums = [grads[0], *(grad.unflatten(1, (k.shape[1], -1)).sum(2) for grad in grads[1:])]
    results = tuple(torch.empty_like(t).copy_(grad) for t, grad in zip((q, k, v), sums, strict=True))
    if variant is not None and variant.learned:
        drel_bias = torch.zeros_like(variant.rel_bias, dtype=torch.float64)
        definition.add_bias_gradient(drel_bias, variant, dbiased, matrix.pairs)
        results = *results, drel_bias.to(variant.rel_bias.dtype)
    if call.learned_sinks is not None:
        weights = (call.sinks.double()[:, None] - lse_to_subtract(matrix.lse)).exp()
        results = *results, -weights * delta[..., 0]
    return results


class _Matrix:
    """The whole matrix in float64.

    queries, keys, values: by query head, zero for nonexistent tokens. probabilities: all zero for a query that keeps nothing.
    dropout: 1 / (1 - dropout_p) where it keeps a pair, otherwise 0. weights: the product of the two. outer, inner: see
    ``differentiate_scores``; 1 without ``differentiate``, as torch.func does not work in the forward pass of a compiled graph.
    """

    def __init__(self, q, k, v, mask, scale, variant, differentiate):
        if variant is not None:
            q = definition.clear_nonexistent(q, variant.q_starts, variant.q_lens)
            k, v = (definition.clear_nonexistent(t, variant.kv_starts, variant.kv_lens) for t in (k, v))
        self.queries, self.keys, self.values = q.double(), _per_query_head(k, q), _per_query_head(v, q)
        scores = self.queries @ self.keys.mT * scale
        self.outer = self.inner = self.dropout = 1.0
        kept = None if mask is None else mask.to_dense()
        if variant is not None:
            self.pairs = definition.Pairs.all(q, k)
            if variant.scored and differentiate:
                scores, self.outer, self.inner = definition.differentiate_scores(variant, scores, self.pairs)
            elif variant.scored:
                scores = definition.modify_scores(variant, scores, self.pairs)
            exist = definition.existing_pairs(variant, self.pairs)
            kept = kept if exist is None else exist if kept is None else kept & exist
            if variant.seed is not None:
                self.dropout = definition.kept_by_dropout(variant, self.pairs).double() / (1 - variant.dropout_p)
        if kept is not None:
            scores = scores.masked_fill(~kept, float("-inf"))
        if differentiate and variant is not None and variant.score_mod is not None:
            # A pair without weight may have an infinite derivative, and 0 * inf is NaN.
            self.outer = torch.where(scores == float("-inf"), 0.0, self.outer)
        self.lse = scores.logsumexp(-1)
        self.keyless = self.lse.isneginf()
        if variant is not None and variant.sinks is not None:
            self.lse, _ = definition.join_sinks(self.lse, variant.sinks, variant)
        self.probabilities = (scores - lse_to_subtract(self.lse)[..., None]).exp()
        self.weights = self.probabilities * self.dropout


def decode(q, k, v, mask, kv_lens, block_table, causal, scale, k_scale, v_scale, kv_starts):
    """(out, lse), one query of one head at a time, over the keys that the mask's definition keeps for it."""
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    out = empty_out(q, v.shape[3]).zero_()
    lse = q.new_full((batch, heads, q_len), float("-inf"), dtype=compute_dtype(q))
    k, v = dequantized(k, k_scale, torch.float64), dequantized(v, v_scale, torch.float64)
    for sequence in range(batch):
        first = 0 if kv_starts is None else max(int(kv_starts[sequence]), 0)
        keys, values = (_sequence(t, block_table, sequence)[:, first:] for t in (k, v))
        length = keys.shape[1] if kv_lens is None else min(max(int(kv_lens[sequence]) - first, 0), keys.shape[1])
        for head in range(heads):
            for query in range(max(0, q_len - length), q_len):
                position = length - q_len + query
                if mask is None:
                    kept = torch.arange(length, device=q.device) <= (position if causal else length)
                else:
                    kept = mask.kept_keys(position, sequence, head)[:length]
                chosen = kept.nonzero()[:, 0].to(q.device)
                if block_table is not None:
                    check_pages(block_table[sequence, chosen // k.shape[2]], len(k), sequence)
                scores = keys[head // group, chosen] @ q[sequence, head, query].double() * scale
                out[sequence, head, query] = torch.softmax(scores, 0) @ values[head // group, chosen]
                lse[sequence, head, query] = scores.logsumexp(0)
    return out, lse


def _sequence(cache, block_table, sequence: int):
    """(kv_heads, capacity, head_dim): the keys or values of one sequence. Page numbers are clamped to existing pages."""
    if block_table is None:
        return cache[sequence]
    return cache[block_table[sequence].long().clamp(0, len(cache) - 1)].transpose(0, 1).flatten(1, 2)


def _per_query_head(x, q):
    """(batch, kv_heads, tokens, head_dim) in float64, repeated for each query head."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)
