"""Attention over picked blocks in PyTorch operations, on any device, in chunks of groups of queries that memory bounds.

A chunk lists its picks by block of keys, as pieces of equal size: so a block's keys meet all queries that picked it in one product,
and queries are gathered, not keys. A block of which ``always`` keeps pairs is one more pick, of these pairs, of the groups that did
not pick it. Each pick gives a partial result, and these are merged by their lse. The backward pass recomputes the probabilities
from lse (arXiv:2307.08691, Alg. 2), so memory is linear in tokens. float16 and bfloat16 are computed in float32. Gradients repeat
bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..core.description import Call
from ..core.results import QueryRows, compute_dtype, lse_to_subtract, zero_keyless_queries
from ..core.torch import repeatable, without_autocast
from ..kernels.common.layout import empty_out
from ..masks.block_mask import BlockMask
from .block_selection import BlockSelection

_CHUNK_CPU, _CHUNK_GPU = 1 << 23, 1 << 27  # numbers of parts, and of scores, held at a time
_MOST_ENTRIES = 64  # of a piece


def supports(call: Call, selection: BlockSelection) -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    out, lse = empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q))
    with without_autocast(q):
        for chunk in _ChunkedCall(q, k, v, selection, scale):
            scores = chunk.scores()
            logs = scores.logsumexp(-1, keepdim=True)
            partial = chunk.scatter(_softmax_weights(scores, logs) @ chunk.values, 0.0)
            logs = chunk.scatter(logs, float("-inf"))
            total = logs.logsumexp(1, keepdim=True)
            chunk.unpack((_softmax_weights(logs, total) * partial).sum(1), out)
            chunk.unpack(total[:, 0], lse[..., None])
    return out, lse


def backward(rows: QueryRows, k: Tensor, v: Tensor, selection: BlockSelection, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    q, dout, dlse, out, lse = rows
    dq, dout = torch.empty_like(q), zero_keyless_queries(dout, lse)
    with without_autocast(q):
        call = _ChunkedCall(q, k, v, selection, scale)
        dk, dv = _KeyGradient(k, call), _KeyGradient(v, call)
        for chunk in call:
            logs, upstream = chunk.pack(lse[..., None]), chunk.pack(dout)
            delta = (upstream * chunk.pack(out)).sum(-1, keepdim=True)
            delta = delta if dlse is None else delta - chunk.pack(dlse[..., None])
            weights = _softmax_weights(chunk.scores(), chunk.gather(logs))
            incoming = chunk.gather(upstream)
            dscores = weights * (incoming @ chunk.values.mT - chunk.gather(delta))
            dv.add_blocks(chunk.block, weights.mT @ incoming)
            dk.add_blocks(chunk.block, scale * dscores.mT @ chunk.gather(chunk.queries))
            chunk.unpack(scale * chunk.scatter(dscores @ chunk.keys, 0.0).sum(1), dq)
    return dq, dk.total(), dv.total()


def block_lse(q: Tensor, k: Tensor, selection: BlockSelection, scale: float) -> Tensor:
    """(batch, heads, q_len, n): see ``operators``."""
    result = q.new_empty(*q.shape[:3], selection.picks.shape[3], dtype=compute_dtype(q))
    with without_autocast(q):
        for chunk in _ChunkedCall(q, k, None, selection, scale):
            logs = chunk.scatter(chunk.scores().logsumexp(-1, keepdim=True), float("-inf"))
            chunk.unpack(logs[..., 0].mT, result)
    return result


def block_lse_backward(
    dblock_lse: Tensor, q: Tensor, k: Tensor, block_lse: Tensor, selection: BlockSelection, scale: float
) -> tuple[Tensor, Tensor]:
    """(dq, dk)."""
    dq = torch.empty_like(q)
    with without_autocast(q):
        call = _ChunkedCall(q, k, None, selection, scale)
        dk = _KeyGradient(k, call)
        for chunk in call:
            logs, incoming = (chunk.gather_picks(t) for t in (block_lse, dblock_lse))
            dscores = _softmax_weights(chunk.scores(), logs) * incoming
            dk.add_blocks(chunk.block, scale * dscores.mT @ chunk.gather(chunk.queries))
            chunk.unpack(scale * chunk.scatter(dscores @ chunk.keys, 0.0).sum(1), dq)
    return dq, dk.total()


def _softmax_weights(scores: Tensor, logs: Tensor) -> Tensor:
    return (scores - lse_to_subtract(logs)).exp()


class _ChunkedCall:
    """The chunks of a call, each of whole groups. v: None where only scores are asked for; then ``always`` has no part."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor | None, selection: BlockSelection, scale: float):
        self.q, self.scale, self.selection = q, scale, selection
        self.size, self.every, self.heads = selection.block_size, selection.every, selection.heads
        self.shared = q.shape[1] // self.heads  # query heads that share picks
        # The key head of each head that picks.
        self.key_head = torch.arange(self.heads, device=q.device) * k.shape[1] // self.heads
        self.tensors = [k] if v is None else [k, v]
        # Each is (batch * kv_heads * kv_blocks, block_size, head_dim), with zeros past the last key.
        beyond = selection.kv_blocks * self.size - selection.kv_len
        padded = (torch.nn.functional.pad(t, (0, 0, 0, beyond)) for t in self.tensors)
        self.blocks = [t.reshape(-1, self.size, t.shape[3]) for t in padded]
        self.always = None if v is None or selection.always is None else _KeysOfAlways(selection.always, selection.offset)

    def __iter__(self) -> Iterator[_GroupChunk]:
        batch, heads, groups, n = self.selection.picks.shape
        n += 0 if self.always is None else self.always.most_keys // self.size + 1
        numbers = n * (self.size + self.q.shape[3] + self.tensors[-1].shape[3])
        most = _CHUNK_GPU if self.q.is_cuda else _CHUNK_CPU
        step = max(1, most // (batch * heads * self.shared * self.every * numbers))
        if self.always is not None:
            # A chunk's queries meet the keys of all of them: many more than a row has keys would mostly meet keys of others.
            step = min(step, max(1, self.always.most_keys // (2 * self.every)))
        for low in range(0, groups, step):
            yield _GroupChunk(self, low, min(low + step, groups))


class _GroupChunk:
    """Some groups of queries, and the pieces of the lists of their picks.

    Queries are packed as (batch, heads that pick, groups, rows, head_dim), a group's rows being shared heads x its queries. The
    picks are listed by block of keys, and a piece is a part of one block's list::

        piece 0: block 3 of keys   entries: (group 0, slot 1)  (group 4, slot 0)
        piece 1: block 3 of keys   entries: (group 7, slot 2)  not valid: pads the piece

    ``gather`` takes the rows of the entries' groups, so that one product serves a piece; ``scatter`` puts results of entries back.

    entry, valid: (pieces, entries of a piece) int64 and bool. An entry is a pick: flat group * n + slot, where flat groups count
    (batch, heads that pick, groups). flat_group: of each entry. block: (pieces,) among the blocks of all key heads. keys, values:
    (pieces, block_size, head_dim). always: see ``_AlwaysPairs``, or None.
    """

    def __init__(self, call: _ChunkedCall, low: int, high: int):
        self.call, self.groups, selection = call, high - low, call.selection
        self.first, self.stop = low * call.every, min(high * call.every, selection.q_len)
        picks, self.always = selection.picks[:, :, low:high].long(), None
        if call.always is not None:
            self.always = _AlwaysPairs(*call.always.blocks_of(self.first, self.stop, self.groups, call.every, call.size), picks)
            picks = torch.cat([picks, self.always.picks], 3)
        self.slots, device = picks.shape[3], picks.device
        batch_heads = torch.arange(len(picks), device=device)[:, None] * call.tensors[0].shape[1] + call.key_head
        block = torch.where(picks < 0, -1, batch_heads[:, :, None, None] * selection.kv_blocks + picks).flatten()
        position = torch.arange(low * call.every, high * call.every, device=device)
        self.position = torch.where(position < selection.q_len, position + selection.offset, -1).view(self.groups, call.every)
        self.queries = self.pack(call.q)
        self._cut_lists(block, len(call.blocks[0]))
        self.keys, self.values = (call.blocks[which][self.block].to(compute_dtype(call.q)) for which in (0, -1))

    def _cut_lists(self, block: Tensor, blocks: int) -> None:
        """Sets entry, valid, flat_group and block: lists by block, cut into equal pieces. block: of each entry, -1 for none."""
        order = block.argsort(stable=True)
        counts = torch.bincount(block + 1, minlength=blocks + 1)
        start, counts = counts.cumsum(0)[:-1], counts[1:]
        most = min(_MOST_ENTRIES, 1 << max(0, len(order) // max(1, int((counts > 0).sum())) - 1).bit_length())
        pieces = (counts + most - 1).div(most, rounding_mode="floor")
        self.block = torch.repeat_interleave(pieces)
        number = torch.arange(len(self.block), device=block.device) - (pieces.cumsum(0) - pieces)[self.block]
        place = number[:, None] * most + torch.arange(most, device=block.device)
        self.valid = place < counts[self.block, None]
        self.entry = order[torch.where(self.valid, start[self.block, None] + place, 0)]
        self.flat_group = self.entry // self.slots

    def pack(self, x: Tensor) -> Tensor:
        """(batch, heads, q_len, width) -> rows of the chunk's queries; zeros past the last query."""
        x = x[:, :, self.first : self.stop].to(compute_dtype(x))
        x = torch.nn.functional.pad(x, (0, 0, 0, self.groups * self.call.every - x.shape[2]))
        x = x.reshape(x.shape[0], self.call.heads, self.call.shared, self.groups, self.call.every, x.shape[3])
        return x.transpose(2, 3).flatten(3, 4)

    def unpack(self, rows: Tensor, result: Tensor) -> None:
        """The reverse, of rows by flat group, into the chunk's queries of ``result``."""
        rows = rows.reshape(len(result), self.call.heads, self.groups, self.call.shared, self.call.every, -1).transpose(2, 3)
        rows = rows.reshape(len(result), result.shape[1], -1, result.shape[3])
        result[:, :, self.first : self.stop] = rows[:, :, : self.stop - self.first].to(result.dtype)

    def gather(self, packed: Tensor) -> Tensor:
        """The rows of the entries of each piece, (pieces, entries * rows, width)."""
        return packed.flatten(0, 2)[self.flat_group].flatten(1, 2)

    def gather_picks(self, x: Tensor) -> Tensor:
        """Numbers of queries and picks, (batch, heads, q_len, n), in the order of ``gather``: (pieces, entries * rows, 1)."""
        by_entry = self.pack(x).flatten(0, 2).mT.flatten(0, 1)
        return by_entry[self.entry].flatten(1, 2)[..., None]

    def scatter(self, values: Tensor, fill: float) -> Tensor:
        """Orders results of the rows of pieces, (pieces, entries * rows, width), by pick: (flat groups, n, rows, width)."""
        values = torch.unflatten(values, 1, (self.entry.shape[1], -1))
        groups = self.queries.shape[:3].numel()
        by_pick = values.new_full((groups * self.slots, *values.shape[2:]), fill)
        by_pick[self.entry[self.valid]] = values[self.valid]
        return torch.unflatten(by_pick, 0, (groups, self.slots))

    def scores(self) -> Tensor:
        """(pieces, entries * rows, block_size): scores of each piece's rows with its keys, -inf for pairs that are not kept."""
        call = self.call
        scores = self.gather(self.queries) @ self.keys.mT * call.scale
        first = self.block % call.selection.kv_blocks * call.size
        key = first[:, None] + torch.arange(call.size, device=first.device)
        position = torch.where(self.valid[..., None], self.position[self.flat_group % self.groups], -1)
        kept = key[:, None, None] <= position[..., None]
        if self.always is not None:
            kept &= self.always.pairs_of(self.flat_group, self.entry % self.slots)
        by_query = scores.view(*self.entry.shape, call.shared, call.every, call.size)
        return by_query.masked_fill_(~kept[:, :, None], float("-inf")).view_as(scores)


class _AlwaysPairs:
    """The pairs that ``always`` keeps in blocks that a group did not pick, as one pick of the group for each block.

    block: (m,), kept: (groups, every, m, block_size) bool, the pairs of a chunk's groups in these blocks. picks: (batch, heads that
    pick, groups, n), what they picked; replaced by what is to be added to it, -1 for none.
    """

    def __init__(self, block: np.ndarray, kept: np.ndarray, picks: Tensor):
        number, self.kept = (torch.from_numpy(x).to(picks.device) for x in (block, kept))
        self.picked = picks.shape[3]
        added = self.kept.any(3).any(1) & ~(picks[..., None] == number).any(3)
        self.column = added.byte().argsort(dim=3, descending=True, stable=True)[..., : int(added.sum(3).max())]
        self.picks = torch.where(added.gather(3, self.column), number[self.column], -1)

    def pairs_of(self, flat_group: Tensor, slot: Tensor) -> Tensor:
        """(.., every, block_size) bool: which pairs of picks are kept, all of those that were not added."""
        if not self.picks.shape[3]:
            return torch.ones((), dtype=torch.bool, device=slot.device)
        column = self.column.flatten(0, 2)[flat_group, (slot - self.picked).clamp(min=0)]
        return self.kept[flat_group % len(self.kept), :, column] | (slot < self.picked)[..., None, None]


class _KeyGradient:
    """A gradient of keys or values, summed over chunks in order."""

    def __init__(self, like: Tensor, call: _ChunkedCall):
        self.like = like
        self.sums = like.new_zeros(len(call.blocks[0]), call.size, like.shape[3], dtype=compute_dtype(like))

    def add_blocks(self, block: Tensor, products: Tensor) -> None:
        """products: (pieces, block_size, head_dim), of these blocks."""
        with repeatable(self.sums, True):
            self.sums.index_add_(0, block, products)

    def total(self) -> Tensor:
        by_token = self.sums.view(*self.like.shape[:2], -1, self.like.shape[3])
        return torch.empty_like(self.like).copy_(by_token[:, :, : self.like.shape[2]])


class _KeysOfAlways:
    """Which keys ``always`` keeps for some queries, read from its table."""

    def __init__(self, mask: BlockMask, offset: int):
        self.mask, self.offset = mask, offset
        self.rows, self.cols, self.kind, self.tile = self.mask.entries()
        # Rows ascend. A chunk may touch two.
        self.most_keys = 2 * self.mask.block_size * int(np.bincount(self.rows, minlength=1).max())

    def blocks_of(self, low: int, high: int, groups: int, every: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """(blocks of keys (m,) int64, kept (groups, every, m, block_size) bool) of queries low .. high - 1: the blocks of which one
        may keep a key, and the keys that each keeps, none after it. Queries past the last keep nothing."""
        size = self.mask.block_size
        first = low // size
        part = slice(*np.searchsorted(self.rows, (first, (high - 1) // size + 1)))
        cols, place = np.unique(self.cols[part], return_inverse=True)
        kept = np.zeros(((high - 1) // size + 1 - first, len(cols), size, size), bool)
        kept[self.rows[part] - first, place] = self.mask.tile_pairs(self.kind[part], self.tile[part])
        kept = kept.transpose(0, 2, 1, 3).reshape(len(kept) * size, -1)[low - first * size : high - first * size]
        keys = (cols[:, None] * size + np.arange(size)).ravel()
        kept &= keys <= np.arange(low, high)[:, None] + self.offset
        block, number = np.unique(keys // block_size, return_inverse=True)
        by_block = np.zeros((groups * every, len(block), block_size), bool)
        by_block[: high - low, number, keys % block_size] = kept
        return block, by_block.reshape(groups, every, len(block), block_size)
