"""A variant in PyTorch operations: the reference for every back end."""

from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from .variant import Variant

_PHILOX_4X32_FACTORS = 0xD2511F53, 0xCD9E8D57
_PHILOX_2X32_FACTOR = 0xD256D193
_PHILOX_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


class Pairs(NamedTuple):
    """The positions of scores, as int64 tensors that broadcast to their shape. query, key: token indices. q_len, kv_len: totals."""

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    heads: int
    q_len: int
    kv_len: int

    @classmethod
    def all(cls, q: Tensor, k: Tensor) -> Self:
        """Returns the pairs of the whole (batch, heads, q_len, kv_len) matrix."""
        (batch, heads, q_len), kv_len = q.shape[:3], k.shape[2]
        ranges = [torch.arange(size, device=q.device) for size in (batch, heads, q_len, kv_len)]
        batches, each_head, queries, keys = (
            numbers.view([-1 if axis == other else 1 for other in range(4)]) for axis, numbers in enumerate(ranges)
        )
        return cls(batches, each_head, queries, keys, heads, q_len, kv_len)

    @property
    def q_pos(self) -> Tensor:
        return self.query + (self.kv_len - self.q_len)


def modify_scores(variant: Variant, products: Tensor, pairs: Pairs) -> Tensor:
    """Scores from scaled products, modified in order: soft cap, ALiBi, relative bias, the user's function."""
    return _apply_score_mod(variant, _add_biases(variant, _cap_scores(variant, products), pairs), pairs)


def differentiate_scores(variant: Variant, products: Tensor, pairs: Pairs) -> tuple[Tensor, ...]:
    """(scores, their derivative by the biased products, that of the biased products by the products). A derivative may be 1."""
    capped = _cap_scores(variant, products)
    inner = 1 - (capped / variant.softcap) ** 2 if variant.softcap else torch.ones((), device=products.device)
    biased = _add_biases(variant, capped, pairs)
    if variant.score_mod is None:
        return biased, torch.ones((), device=products.device), inner
    scores, pullback = torch.func.vjp(lambda score: _apply_score_mod(variant, score, pairs), biased)[:2]
    return scores, pullback(torch.ones_like(scores))[0], inner


def _cap_scores(variant: Variant, products: Tensor) -> Tensor:
    return (products / variant.softcap).tanh() * variant.softcap if variant.softcap else products


def _add_biases(variant: Variant, scores: Tensor, pairs: Pairs) -> Tensor:
    if variant.alibi_slopes is not None:
        slopes = variant.alibi_slopes[pairs.batch, pairs.head].to(scores.dtype)
        scores = scores - slopes * (pairs.q_pos - pairs.key).abs()
    if variant.rel_bias is not None:
        scores = scores + variant.rel_bias[pairs.head, _bias_column(variant, pairs)]
    return scores


def _apply_score_mod(variant: Variant, scores: Tensor, pairs: Pairs) -> Tensor:
    if variant.score_mod is None:
        return scores
    modified = variant.score_mod.torch(scores, pairs.batch, pairs.head, pairs.q_pos, pairs.key, variant.score_params)
    if not isinstance(modified, Tensor) or not modified.is_floating_point():
        got = modified.dtype if isinstance(modified, Tensor) else type(modified).__name__
        raise TypeError(f"score_mod {variant.score_mod.name} must return scores, a floating-point tensor; got {got}")
    return modified


def _bias_column(variant: Variant, pairs: Pairs) -> Tensor:
    """The column of rel_bias for each pair."""
    reach = cast(Tensor, variant.rel_bias).shape[1] // 2
    return (pairs.key - pairs.q_pos).clamp(-reach, reach) + reach


def add_bias_gradient(gradient: Tensor, variant: Variant, dbiased: Tensor, pairs: Pairs) -> None:
    """Adds the gradient of the biased products to the gradient of rel_bias."""
    index = (pairs.head * gradient.shape[1] + _bias_column(variant, pairs)).expand(dbiased.shape)
    gradient.view(-1).index_add_(0, index.reshape(-1), dbiased.reshape(-1).to(gradient.dtype))


def find_existing_tokens(starts: Tensor | None, lens: Tensor | None, batch: Tensor, token: Tensor) -> Tensor | None:
    """Which tokens exist, in the broadcast shape of batch and token; None: all."""
    exist = None if lens is None else token < lens[batch]
    if starts is not None:
        begun = token >= starts[batch]
        exist = begun if exist is None else exist & begun
    return exist


def existing_pairs(variant: Variant, pairs: Pairs) -> Tensor | None:
    """Which pairs have both tokens; None: all."""
    queries = find_existing_tokens(variant.q_starts, variant.q_lens, pairs.batch, pairs.query)
    keys = find_existing_tokens(variant.kv_starts, variant.kv_lens, pairs.batch, pairs.key)
    return keys if queries is None else queries if keys is None else queries & keys


def clear_nonexistent(x: Tensor, starts: Tensor | None, lens: Tensor | None) -> Tensor:
    """x, (batch, heads, tokens, head_dim), with zeros for nonexistent tokens, which may be NaN."""
    if starts is None and lens is None:
        return x
    batch = torch.arange(x.shape[0], device=x.device)[:, None]
    exist = cast(Tensor, find_existing_tokens(starts, lens, batch, torch.arange(x.shape[2], device=x.device)[None]))
    # In place on a copy: masked_fill changes the memory order, and results must have the arguments' memory order.
    return x.clone().masked_fill_(~exist[:, None, :, None], 0.0)


def kept_by_dropout(variant: Variant, pairs: Pairs, q_axis: int = -2) -> Tensor:
    """Which pairs dropout keeps, bool, in the broadcast shape of ``pairs``. Queries along q_axis and keys along the last axis come
    16 at a time, consecutive from a multiple of 16.

    Philox-4x32-10 at the counter (batch * heads + head, 0, 0, 0), keyed by the seed's two words, gives each batch entry and head
    its words. Philox-2x32-7, keyed by the first of them, runs at the counter (q ^ the second, k ^ the third), where q and k are
    token // 16 * 8 + token % 8 for query and key. Its result serves four pairs: two queries and two keys, each 8 apart. key // 8 %
    2 selects the word, query // 8 % 2 its half, 0 being the lower. A pair is kept if that half is at least dropout_p * 2^16. One
    thread holds these four pairs in a product of NVIDIA's tensor cores, and in its transpose.
    """
    seed = cast(Tensor, variant.seed)[0]
    batch_head = pairs.batch * pairs.heads + pairs.head
    zero = torch.zeros_like(batch_head)
    key, q_mask, k_mask, _ = philox_4x32((batch_head, zero, zero, zero), (seed & _WORD, (seed >> 32) & _WORD))
    counter = _dropout_counters(pairs.query, q_axis) ^ q_mask, _dropout_counters(pairs.key, -1) ^ k_mask
    words = torch.broadcast_tensors(*philox_2x32(counter, key))
    threshold = round(variant.dropout_p * 2**16)
    kept = torch.stack([torch.stack([half >= threshold for half in (word & 0xFFFF, word >> 16)]) for word in words])
    # (word, half, ..., 8 queries, ..., 8 keys): move word and half in front of their 8.
    kept = torch.unflatten(kept, -1, (-1, 8)).unflatten(q_axis - 1, (-1, 8)).movedim((1, 0), (q_axis - 3, -2))
    kept = kept.flatten(-3).flatten(q_axis - 2, q_axis)
    return kept.narrow(q_axis, 0, pairs.query.shape[q_axis]).narrow(-1, 0, pairs.key.shape[-1])


def _dropout_counters(token: Tensor, axis: int) -> Tensor:
    """token // 16 * 8 + token % 8, once for the two tokens that share it."""
    first = token.movedim(axis, -1)[..., ::16, None]
    return (first // 2 + torch.arange(8, device=token.device)).flatten(-2).movedim(-1, axis)


def philox_4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four words from a counter of four and a key of two; int64 tensors that hold 32-bit words, of shapes that
    broadcast. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # An int64 product wraps, but its bits match the unsigned product.
        low, high = c0 * _PHILOX_4X32_FACTORS[0], c2 * _PHILOX_4X32_FACTORS[1]
        c0, c1, c2, c3 = (high >> 32) & _WORD ^ c1 ^ k0, high & _WORD, (low >> 32) & _WORD ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + _PHILOX_STEPS[0]) & _WORD, (k1 + _PHILOX_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def philox_2x32(counter: tuple[Tensor, ...], key: Tensor) -> tuple[Tensor, Tensor]:
    """Philox-2x32-7, like ``philox_4x32``: seven rounds are the fewest that pass the tests of its source."""
    c0, c1 = counter
    for _ in range(7):
        product = c0 * _PHILOX_2X32_FACTOR
        c0, c1 = (product >> 32) & _WORD ^ c1 ^ key, product & _WORD
        key = (key + _PHILOX_STEPS[0]) & _WORD
    return c0, c1


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, variant: Variant | None) -> tuple[Tensor, Tensor]:
    """(out, lse) with one more logit per head, sinks, (heads,), in each query's softmax; a nonexistent query keeps lse -inf."""
    total, exist = join_sinks(lse, sinks, variant)
    share = torch.sigmoid(lse - sinks.to(lse.dtype).clamp(min=torch.finfo(lse.dtype).min)[:, None])
    out = (out * share[..., None]).to(out.dtype)
    # torch.where keeps the memory order of out, unlike masked_fill under a mask that broadcasts.
    return out if exist is None else torch.where(exist[..., None], out, 0.0), total


def join_sinks(lse: Tensor, sinks: Tensor, variant: Variant | None) -> tuple[Tensor, Tensor | None]:
    """(lse with sinks, which queries exist, (batch, 1, q_len), or None for all)"""
    # lse and a sink may both be -inf, which means no sink. Clamped to a finite number, their difference is not NaN.
    lowest = torch.finfo(lse.dtype).min
    total = torch.logaddexp(lse, sinks.to(lse.dtype).clamp(min=lowest)[:, None].expand_as(lse))
    total = total.masked_fill(total <= lowest, float("-inf"))
    if variant is None or (variant.q_starts is None and variant.q_lens is None):
        return total, None
    batch = torch.arange(lse.shape[0], device=lse.device)[:, None]
    token = torch.arange(lse.shape[2], device=lse.device)[None]
    exist = cast(Tensor, find_existing_tokens(variant.q_starts, variant.q_lens, batch, token))[:, None]
    return total.masked_fill(~exist, float("-inf")), exist
