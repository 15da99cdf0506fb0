"""Attention over picked blocks in PyTorch operations, on any device: walks the groups of queries in chunks of bounded size.

The blocks that a group picked are gathered, and its scores are one batched product. The keys that ``always`` keeps are taken once
for a chunk. The backward pass recomputes the probabilities from lse (arXiv:2307.08691, Alg. 2), so memory is linear in tokens.
float16 and bfloat16 are computed in float32. Gradients repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..backends import Call, empty_out
from ..backends.torch import own_precision, repeatable
from ..masks.block_mask import BlockMask
from ..masks.block_selection import BlockSelection

_CHUNK_CPU, _CHUNK_GPU = 1 << 20, 1 << 26  # gathered keys, values and scores held at a time


def supports(call: Call, selection: BlockSelection) -> str | None:
    return None


def forward(q, k, v, selection, scale):
    """(out, lse)."""
    out, lse = empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=_exact(q))
    with own_precision(q):
        walk = _GroupWalk(q, k, v, selection, scale)
        for chunk in walk:
            weights, logs = chunk.weights()
            chunk.unpack(sum(w @ values for w, values in zip(weights, chunk.values, strict=True)), out)
            chunk.unpack(logs, lse[..., None])
    return out, lse


def backward(dout, dlse, q, k, v, out, lse, selection, scale):
    """(dq, dk, dv)."""
    dq = torch.empty_like(q)
    with own_precision(q):
        walk = _GroupWalk(q, k, v, selection, scale)
        dk, dv = _KeyGradient(k, walk), _KeyGradient(v, walk)
        for chunk in walk:
            weights, _ = chunk.weights(chunk.pack(lse[..., None]))
            upstream = chunk.pack(dout)
            delta = (upstream * chunk.pack(out)).sum(-1, keepdim=True)
            if dlse is not None:
                delta = delta - chunk.pack(dlse[..., None])
            dscores = [w * (upstream @ values.mT - delta) for w, values in zip(weights, chunk.values, strict=True)]
            dv.add(chunk, weights, upstream)
            chunk.add_products(dscores, dq, dk, scale)
    return dq, dk.total(), dv.total()


def block_lse(q, k, selection, scale):
    """(batch, heads, q_len, n): see ``selection/operators``."""
    result = q.new_empty(*q.shape[:3], selection.picks.shape[3], dtype=_exact(q))
    with own_precision(q):
        for chunk in _GroupWalk(q, k, None, selection, scale):
            chunk.unpack(chunk.scores(0).unflatten(-1, (-1, selection.block_size)).logsumexp(-1), result)
    return result


def block_lse_backward(dblock_lse, q, k, block_lse, selection, scale):
    """(dq, dk)."""
    dq = torch.empty_like(q)
    with own_precision(q):
        walk = _GroupWalk(q, k, None, selection, scale)
        dk = _KeyGradient(k, walk)
        for chunk in walk:
            scores = chunk.scores(0).unflatten(-1, (-1, selection.block_size))
            shares = _shares(scores, chunk.pack(block_lse)[..., None])
            chunk.add_products([(shares * chunk.pack(dblock_lse)[..., None]).flatten(-2)], dq, dk, scale)
    return dq, dk.total()


def _exact(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _shares(scores, logs):
    # exp(-inf - inf) is 0, while exp(-inf + inf) would be NaN.
    return (scores - torch.where(logs == float("-inf"), float("inf"), logs)).exp()


class _GroupWalk:
    """The chunks of a call, each of whole groups. v: None where only scores are asked for; then ``always`` has no part."""

    def __init__(self, q, k, v, selection: BlockSelection, scale: float):
        self.q, self.scale, self.selection = q, scale, selection
        self.size, self.every, self.heads = selection.block_size, selection.every, selection.heads
        self.shared = q.shape[1] // self.heads  # query heads that share picks
        # The key head of each head that picks.
        self.key_head = torch.arange(self.heads, device=q.device) * k.shape[1] // self.heads
        self.tensors = [k] if v is None else [k, v]
        self.blocks = [self.in_blocks(t) for t in self.tensors]
        self.always = None if v is None or selection.always is None else _KeysOfAlways(selection.always, selection.offset)

    def in_blocks(self, x):
        """(batch * kv_heads * kv_blocks, block_size, head_dim), zeros past the last key."""
        x = torch.nn.functional.pad(x, (0, 0, 0, self.selection.kv_blocks * self.size - x.shape[2]))
        return x.reshape(-1, self.size, x.shape[3])

    def __iter__(self) -> Iterator[_GroupChunk]:
        picks = self.selection.picks
        batch, heads, groups, n = picks.shape
        rows = self.shared * self.every
        of_group = n * self.size * (rows + sum(t.shape[3] for t in self.tensors))
        of_group += rows * (0 if self.always is None else self.always.most_keys)
        most = _CHUNK_GPU if self.q.is_cuda else _CHUNK_CPU
        step = max(1, most // max(1, batch * heads * of_group))
        for low in range(0, groups, step):
            yield _GroupChunk(self, low, min(low + step, groups))


class _GroupChunk:
    """Some groups of queries. Queries are packed as (batch, heads that pick, groups, shared heads x queries of a group, head_dim).

    keys, values: what each group attends to, one tensor or two: the blocks that it picked, and the keys that ``always`` keeps for
    some query of the chunk; (batch, heads that pick, groups or 1, keys, head_dim).
    """

    def __init__(self, walk: _GroupWalk, low: int, high: int):
        self.walk, selection = walk, walk.selection
        self.groups = high - low
        self.first, self.stop = low * walk.every, min(high * walk.every, selection.q_len)
        picks = selection.picks[:, :, low:high].long()
        batch = torch.arange(len(picks), device=picks.device)[:, None]
        lines = batch * walk.tensors[0].shape[1] + walk.key_head
        # What is gathered for -1 is kept for no query.
        self.index = lines[:, :, None, None] * selection.kv_blocks + picks.clamp(min=0)
        gathered = [blocks[self.index].flatten(3, 4).to(_exact(blocks)) for blocks in walk.blocks]
        position = torch.arange(low * walk.every, high * walk.every, device=picks.device).view(self.groups, walk.every)
        position = torch.where(position < selection.q_len, position + selection.offset, -1)
        key = (picks[..., None] * walk.size + torch.arange(walk.size, device=picks.device)).flatten(3)
        exists = (picks >= 0)[..., None].expand(*picks.shape, walk.size).flatten(3)
        self.kept = [(key[:, :, :, None] <= position[..., None]) & exists[:, :, :, None]]
        kinds = [gathered]
        self.tokens = None
        if walk.always is not None:
            self.tokens, kept = walk.always.keys_of(self.first, self.stop, self.groups * walk.every, picks.device)
            kept = kept.view(self.groups, walk.every, -1)
            # A key of a picked block is there already.
            picked = (picks[..., None] == self.tokens // walk.size).any(3)
            self.kept.append(kept & ~picked[:, :, :, None])
            kinds.append([t[:, walk.key_head][:, :, None, self.tokens].to(_exact(t)) for t in walk.tensors])
        self.keys, self.values = ([kind[which] for kind in kinds] for which in (0, -1))
        self.queries = self.pack(walk.q)

    def pack(self, x):
        """(batch, heads, q_len, width) -> rows of the chunk's queries; zeros past the last query."""
        x = x[:, :, self.first : self.stop].to(_exact(x))
        x = torch.nn.functional.pad(x, (0, 0, 0, self.groups * self.walk.every - x.shape[2]))
        x = x.reshape(x.shape[0], self.walk.heads, self.walk.shared, self.groups, self.walk.every, x.shape[3])
        return x.transpose(2, 3).flatten(3, 4)

    def unpack(self, rows, result) -> None:
        """The reverse, into the chunk's queries of ``result``."""
        rows = rows.unflatten(3, (self.walk.shared, self.walk.every)).transpose(2, 3)
        rows = rows.reshape(rows.shape[0], result.shape[1], -1, rows.shape[-1])
        result[:, :, self.first : self.stop] = rows[:, :, : self.stop - self.first].to(result.dtype)

    def scores(self, kind: int):
        """Scores of the rows with the keys of one kind, -inf for pairs that are not kept."""
        scores = self.queries @ self.keys[kind].mT * self.walk.scale
        by_head = scores.unflatten(3, (self.walk.shared, self.walk.every))
        return by_head.masked_fill_(~self.kept[kind][:, :, :, None], float("-inf")).flatten(3, 4)

    def weights(self, logs=None) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(the probabilities by kind, lse of the rows). logs: lse, computed here by default."""
        scores = [self.scores(kind) for kind in range(len(self.keys))]
        logs = torch.cat(scores, -1).logsumexp(-1, keepdim=True) if logs is None else logs
        return [_shares(s, logs) for s in scores], logs

    def add_products(self, dscores, dq, dk: _KeyGradient, scale: float) -> None:
        """Adds what gradients of scores, by kind, give dq and dk."""
        self.unpack(scale * sum(d @ keys for d, keys in zip(dscores, self.keys, strict=True)), dq)
        dk.add(self, dscores, scale * self.queries)


class _KeyGradient:
    """A gradient of keys or values, summed over chunks in order."""

    def __init__(self, like, walk: _GroupWalk):
        self.like = like
        blocks = like.shape[0] * like.shape[1] * walk.selection.kv_blocks
        self.sums = like.new_zeros(blocks, walk.size, like.shape[3], dtype=_exact(like))

    def add(self, chunk: _GroupChunk, weights: list[torch.Tensor], rows: torch.Tensor) -> None:
        """Adds the transpose of weights, by kind, times rows."""
        with repeatable(self.sums, True):
            self.sums.index_add_(0, chunk.index.flatten(), (weights[0].mT @ rows).view(-1, *self.sums.shape[1:]))
            if chunk.tokens is not None:
                product = weights[1].flatten(2, 3).mT @ rows.flatten(2, 3)
                of_heads = product.unflatten(1, (self.like.shape[1], -1)).sum(2)
                self.by_token().index_add_(2, chunk.tokens, of_heads)

    def by_token(self):
        return self.sums.view(*self.like.shape[:2], -1, self.like.shape[3])

    def total(self):
        return torch.empty_like(self.like).copy_(self.by_token()[:, :, : self.like.shape[2]])


class _KeysOfAlways:
    """Which keys ``always`` keeps for some queries, read from its table."""

    def __init__(self, mask: BlockMask, offset: int):
        self.mask, self.offset = mask, offset
        self.rows, self.cols, self.kind, self.tile = self.mask.entries()
        # Rows ascend. A chunk may touch two.
        self.most_keys = 2 * self.mask.block_size * int(np.bincount(self.rows, minlength=1).max())

    def keys_of(self, low: int, high: int, rows: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys (m,) int64, kept (rows, m) bool) of queries low .. high - 1: the keys that one of them keeps, none after it. Rows
        past the last query keep nothing."""
        size = self.mask.block_size
        first = low // size
        part = slice(*np.searchsorted(self.rows, (first, (high - 1) // size + 1)))
        cols, place = np.unique(self.cols[part], return_inverse=True)
        kept = np.zeros(((high - 1) // size + 1 - first, len(cols), size, size), bool)
        kept[self.rows[part] - first, place] = self.mask.tile_pairs(self.kind[part], self.tile[part])
        kept = kept.transpose(0, 2, 1, 3).reshape(len(kept) * size, -1)[low - first * size : high - first * size]
        keys = (cols[:, None] * size + np.arange(size)).ravel()
        kept &= keys <= np.arange(low, high)[:, None] + self.offset
        some = kept.any(0)
        padded = np.zeros((rows, int(some.sum())), bool)
        padded[: high - low] = kept[:, some]
        return torch.from_numpy(keys[some]).to(device), torch.from_numpy(padded).to(device)
