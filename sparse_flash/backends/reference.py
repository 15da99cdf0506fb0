"""The oracle: dense attention in float64, the whole (q_len, kv_len) matrix at once. Slow, and right by construction.

Every other back end is compared with a softmax like this one; ask for it by name on short inputs to tell a wrong result
from a surprising mask.
"""

from __future__ import annotations

import torch

from . import missing_feature

supports = missing_feature


def available() -> str | None:
    return None


def forward(q, k, v, mask, scale):
    """(out, lse), computed in float64 whatever the inputs' dtype. See the package's docstring."""
    probabilities, lse = _softmax(q, k, mask, scale)
    out = torch.empty_like(q).copy_(probabilities @ _per_query_head(v, q))
    return out, lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def backward(dout, dlse, q, k, v, out, lse, mask, scale, deterministic):
    """(dq, dk, dv) of a forward pass computed again in float64; ``out`` and ``lse`` are not used."""
    probabilities, _ = _softmax(q, k, mask, scale)
    keys, values, dout = _per_query_head(k, q), _per_query_head(v, q), dout.double()
    dprobabilities = dout @ values.mT
    delta = (probabilities * dprobabilities).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.double()[..., None]
    dscores = probabilities * (dprobabilities - delta) * scale
    grads = dscores @ keys, dscores.mT @ q.double(), probabilities.mT @ dout
    # The gradient of a key head is the sum over the query heads that share it.
    sums = [grads[0], *(grad.unflatten(1, (k.shape[1], -1)).sum(2) for grad in grads[1:])]
    return tuple(torch.empty_like(t).copy_(grad) for t, grad in zip((q, k, v), sums, strict=True))


def decode(q, k, v, mask, kv_lens, block_table, causal, scale):
    """(out, lse), one query of one head at a time, over the keys that the mask's definition keeps for it."""
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros_like(q)
    lse = q.new_full((batch, heads, q_len), float("-inf"), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for sequence in range(batch):
        keys, values = (_sequence(t, block_table, sequence).double() for t in (k, v))
        length = keys.shape[1] if kv_lens is None else min(max(int(kv_lens[sequence]), 0), keys.shape[1])
        for head in range(heads):
            for query in range(max(0, q_len - length), q_len):
                position = length - q_len + query
                if mask is None:
                    kept = torch.arange(length) <= (position if causal else length)
                else:
                    kept = mask.kept_keys(position, sequence, head)[:length]
                chosen = kept.nonzero()[:, 0].to(q.device)
                scores = keys[head // group, chosen] @ q[sequence, head, query].double() * scale
                out[sequence, head, query] = torch.softmax(scores, 0) @ values[head // group, chosen]
                lse[sequence, head, query] = scores.logsumexp(0)
    return out, lse


def _sequence(cache, block_table, sequence: int):
    """(kv_heads, capacity, head_dim): the keys or values of one sequence, its pages one after the other."""
    if block_table is None:
        return cache[sequence]
    return cache[block_table[sequence].long().clamp(0, len(cache) - 1)].transpose(0, 1).flatten(1, 2)


def _per_query_head(x, q):
    """(batch, kv_heads, tokens, head_dim) -> float64, a copy for each query head."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _softmax(q, k, mask, scale):
    """The probabilities (batch, heads, q_len, kv_len), all zero for a query that keeps nothing, and lse, both float64."""
    scores = q.double() @ _per_query_head(k, q).mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask.to_dense(), float("-inf"))
    lse = scores.logsumexp(-1)
    # exp(-inf - inf) is 0 where exp(-inf + inf) would be NaN.
    return (scores - torch.where(lse == float("-inf"), float("inf"), lse)[..., None]).exp(), lse
